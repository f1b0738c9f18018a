"""Starting ranks on this machine, and running the same function under torchrun.

`launch` starts fresh ranks for one call; `Ranks` keeps them for many (a start costs one to two seconds).
Ranks are subprocesses in the caller's process group, die with the thread that started them, and meet through
a file. The backend is gloo on CPU and NCCL, one device a rank, on CUDA. Under torchrun (`RANK`,
`WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT` set) nothing is started: this process is one of the ranks.
"""

import atexit
import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainstep.parallel import transfer

MAX_CPU_RANKS = 16
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_GRACE_SECONDS = 0.5  # after a first failure: wait for the failure that caused it to be heard too
_CLOSE_SECONDS = 5.0
_runs = 0  # jobs of this process under torchrun: alike on all of its ranks


class RankFailure(RuntimeError):
    """A rank raised or died.

    Attributes:
        rank: the rank at fault.
        message: one line: the exception's type and text, or how the process ended.
    """

    def __init__(self, job: str, rank: int, message: str, details: str = "") -> None:
        super().__init__(f"{job}: rank {rank}: {message}" + (f"\n{details}" if details else ""))
        self.rank = rank
        self.message = message


class RankTimeout(RankFailure):
    """Not every rank returned in time; `rank` is the first that did not."""


def check_ranks(world_size: int, device: str) -> None:
    """Refuse what this machine cannot start, before anything starts.

    Raises:
        ValueError: world_size is not a positive integer, more than 16 ranks on CPU, more ranks than CUDA
            devices, or an unknown device type.
    """
    if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:
        raise ValueError(f"the number of ranks must be a positive integer, got {world_size!r}")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"ranks run on 'cpu' or 'cuda', not on {device!r}")
    if under_torchrun():
        return  # other nodes hold their share
    if device == "cpu" and world_size > MAX_CPU_RANKS:
        raise ValueError(f"at most {MAX_CPU_RANKS} ranks start on a CPU, {world_size} were asked for")
    if device == "cuda" and world_size > torch.cuda.device_count():
        raise ValueError(
            f"{world_size} ranks on CUDA need a device each, this machine has {torch.cuda.device_count()}"
        )


def under_torchrun() -> bool:
    """Whether this process was started as one rank of many by torchrun."""
    return all(name in os.environ for name in _TORCHRUN)


def initialize(
    rank: int, world_size: int, device: str, init_method: str, timeout_seconds: float = 600.0
) -> None:
    """Make the default process group of one rank; `NCCL_*` variables are left as found."""
    timeout = timedelta(seconds=timeout_seconds)
    if device == "cuda":
        local = int(os.environ["LOCAL_RANK"]) if under_torchrun() else rank
        torch.cuda.set_device(local)
        dist.init_process_group(
            "nccl",
            init_method=init_method,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=torch.device("cuda", local),
        )
    else:
        dist.init_process_group(
            "gloo", init_method=init_method, rank=rank, world_size=world_size, timeout=timeout
        )


def rank_device() -> torch.device:
    """The device of the calling rank: its CUDA device under NCCL, else the CPU."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class Ranks:
    """Persistent ranks with an initialised default process group.

    After a failure or a timeout every rank is killed and the pool stays closed; its owner starts a fresh one.
    On a CPU each rank gets one thread unless OMP_NUM_THREADS is set. Under torchrun the ranks are those it
    started: every one of them makes this object and calls `run` alike, and gets every rank's values.

    Args:
        world_size: ranks.
        device: "cpu" (gloo) or "cuda" (NCCL).
        start_timeout_seconds: allowed for starting; by default 60 and 5 more a rank.

    Raises:
        ValueError: see `check_ranks`.
        RankFailure, RankTimeout: the ranks did not start.
    """

    def __init__(
        self, world_size: int, device: str = "cpu", *, start_timeout_seconds: float | None = None
    ) -> None:
        check_ranks(world_size, device)
        self.world_size = world_size
        self.device = device
        self._folder = "" if under_torchrun() else tempfile.mkdtemp(prefix="trainstep-ranks-")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._open = True
        if under_torchrun():
            _join_torchrun(world_size, device)
            return
        try:
            for rank in range(world_size):
                self._start(rank)
            self._collect("start", start_timeout_seconds or 60.0 + 5.0 * world_size)
        except BaseException:
            self._kill()
            raise

    def _start(self, rank: int) -> None:
        here, there = Pipe()
        environment = dict(os.environ)
        if self.device == "cpu":
            environment.setdefault("OMP_NUM_THREADS", "1")
            if sys.platform == "linux":
                environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name need not resolve
        worker = Path(__file__).with_name("_worker.py")
        with there:
            process = subprocess.Popen(
                [sys.executable, str(worker), str(there.fileno())],
                pass_fds=(there.fileno(),),
                env=environment,
                stdin=subprocess.DEVNULL,
            )
        self._processes.append(process)
        self._connections.append(here)
        place = {
            "rank": rank,
            "world_size": self.world_size,
            "device": self.device,
            "rendezvous": os.path.join(self._folder, "rendezvous"),
            "parent": os.getpid(),
            "sys_path": [os.path.abspath(entry) for entry in sys.path],
        }
        here.send_bytes(pickle.dumps(place))

    @property
    def closed(self) -> bool:
        """True after `close` or a failure: no rank is left."""
        return not self._open

    def run(
        self, fn: Callable[..., Any], *args: Any, timeout_seconds: float = 50.0, name: str | None = None
    ) -> list[Any]:
        """Call `fn(*args)` on every rank and return their values in rank order.

        Args:
            fn: a function at the top of a module or script.
            args: the same for every rank; anything that pickles.
            timeout_seconds: until the last rank must have returned.
            name: what failures call this job; by default the function's name.

        Raises:
            ValueError: function or arguments cannot be handed over (nothing ran).
            RankFailure: a rank raised or died; the rest are killed.
            RankTimeout: a rank did not return in time; all are killed.
            RuntimeError: the pool is closed.
        """
        if not self._open:
            raise RuntimeError("these ranks are closed; start fresh ones")
        job_name = name or str(getattr(fn, "__qualname__", fn))
        if under_torchrun():
            return self._run_here(fn, args, job_name, timeout_seconds)
        job = transfer.dumps((fn, args))
        try:
            for connection in self._connections:
                connection.send_bytes(job)
        except OSError:
            pass  # a rank is gone; said below
        except BaseException:
            self._kill()
            raise
        return self._collect(job_name, timeout_seconds)

    def _run_here(
        self, fn: Callable[..., Any], args: tuple[Any, ...], job: str, timeout_seconds: float
    ) -> list[Any]:
        """Run this process's share under torchrun; every rank gets all values, or raises the failure.

        Outcomes go through the store, not through a collective: a rank that failed may have left the others inside
        one of the job's own.
        """
        global _runs
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_seconds))
        try:
            outcome = pickle.dumps({"ok": True, "value": fn(*args)})
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            report = {"ok": False, "message": message, "traceback": traceback.format_exc(), "at": time.time()}
            outcome = pickle.dumps(report)
        store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
        keys = [f"trainstep/run/{_runs}/{r}" for r in range(self.world_size)]
        store.set(keys[rank], outcome)  # type: ignore[arg-type]  # bytes, whatever the stub says
        with contextlib.suppress(RuntimeError):  # who is late is said below
            store.wait(keys, timedelta(seconds=timeout_seconds))
        here = [r for r, key in enumerate(keys) if store.check([key])]
        if _runs and len(here) == self.world_size:  # all have read what the job before gave
            store.delete_key(f"trainstep/run/{_runs - 1}/{rank}")
        _runs += 1
        outcomes = {r: pickle.loads(store.get(keys[r])) for r in here}
        failures = {r: report for r, report in outcomes.items() if not report["ok"]}
        if failures or len(here) < self.world_size:
            self._open = False
        if failures:
            first = min(failures, key=lambda r: failures[r]["at"])
            raise RankFailure(job, first, failures[first]["message"], failures[first]["traceback"])
        if len(here) < self.world_size:
            late = [r for r in range(self.world_size) if r not in here]
            message = f"no answer for {timeout_seconds:g} s (waiting for ranks {', '.join(map(str, late))})"
            raise RankTimeout(job, late[0], message)
        return [outcomes[r]["value"] for r in range(self.world_size)]

    def _collect(self, job: str, timeout_seconds: float) -> list[Any]:
        """Wait for every rank's report; on any trouble kill all ranks and raise."""
        deadline = time.monotonic() + timeout_seconds
        pending = dict(enumerate(self._connections))
        values: dict[int, Any] = {}
        failures: dict[int, dict[str, Any]] = {}
        try:
            while pending and time.monotonic() < deadline:
                ready = wait(list(pending.values()), timeout=min(0.5, max(0.0, deadline - time.monotonic())))
                for rank, connection in list(pending.items()):
                    if connection in ready:
                        try:
                            report = pickle.loads(connection.recv_bytes())
                        except (EOFError, OSError):
                            report = {"ok": False, "dead": True}
                    elif self._processes[rank].poll() is not None and not connection.poll():
                        report = {"ok": False, "dead": True}
                    else:
                        continue
                    del pending[rank]
                    if report["ok"]:
                        values[rank] = transfer.loads(report["value"])
                    else:
                        if not failures:
                            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
                        failures[rank] = report
            if failures:
                raise self._failure(job, failures)
            if pending:
                late = ", ".join(map(str, pending))
                done = ", ".join(map(str, values)) or "none"
                message = (
                    f"no answer after {timeout_seconds:g} s (waiting for ranks {late}; returned: {done})"
                )
                raise RankTimeout(job, min(pending), message)
        except BaseException:
            self._kill()
            raise
        return [values[rank] for rank in range(self.world_size)]

    def _failure(self, job: str, failures: dict[int, dict[str, Any]]) -> RankFailure:
        """Blame a rank that died before one that raised, and the first that raised before the later ones."""
        dead = [rank for rank, report in failures.items() if report.get("dead")]
        if dead:
            status = self._processes[dead[0]].wait()
            if status < 0:
                how = f"killed by signal {-status} ({signal.Signals(-status).name})"
            else:
                how = f"exited with status {status} without returning"
            return RankFailure(job, dead[0], how)
        rank = min(failures, key=lambda r: failures[r]["at"])
        return RankFailure(job, rank, failures[rank]["message"], failures[rank]["traceback"])

    def _kill(self) -> None:
        self._open = False
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait()
        for connection in self._connections:
            connection.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        """Stop the ranks; no process is left afterwards. May be called again."""
        if not self._open:
            return
        deadline = time.monotonic() + _CLOSE_SECONDS
        try:
            for connection in self._connections:
                connection.send_bytes(b"")
            for process in self._processes:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except (OSError, subprocess.TimeoutExpired):
            pass
        finally:
            self._kill()

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def launch(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    device: str = "cpu",
    timeout_seconds: float = 50.0,
    name: str | None = None,
) -> list[Any]:
    """Run `fn(*args)` on `world_size` fresh ranks and return every rank's value, in rank order.

    The timeout counts from the moment the ranks stand. Under torchrun this process runs its own share, and
    every rank gets the whole list.

    Raises:
        ValueError, RankFailure, RankTimeout: as in `Ranks`; ValueError when torchrun's world size differs.
    """
    with Ranks(world_size, device) as ranks:
        return ranks.run(fn, *args, timeout_seconds=timeout_seconds, name=name)


def _join_torchrun(world_size: int, device: str) -> None:
    """Make the default process group of torchrun's ranks, once a process."""
    started = int(os.environ["WORLD_SIZE"])
    if world_size != started:
        raise ValueError(f"torchrun started {started} ranks, {world_size} were asked for")
    if not dist.is_initialized():
        initialize(int(os.environ["RANK"]), started, device, "env://")
        atexit.register(dist.destroy_process_group)
