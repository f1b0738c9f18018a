"""Starting ranks on this machine, and running the same function under torchrun.

`launch` starts fresh ranks for one call; `Ranks` keeps them for many (a start costs one to two seconds).
Ranks are subprocesses in the caller's process group, die with the thread that started them, and meet through
a file. The backend is gloo on CPU and NCCL, one device a rank, on CUDA. Under torchrun (`RANK`,
`WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT` set) every process that it started starts its own rank only, they meet
through torchrun's store, and each process gets every rank's values: see `torchrun`.
"""

import atexit
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from trainstep.parallel import transfer
from trainstep.parallel.torchrun import Round, connect, leave, under_torchrun
from trainstep.parallel.whereabouts import list_whereabouts

MAX_CPU_RANKS = 16
_GRACE_SECONDS = 0.5  # after a first failure: wait for the failure that caused it to be heard too
_CLOSE_SECONDS = 5.0
_ANSWER_SECONDS = 1.0


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


def initialize(
    rank: int, world_size: int, device: str, rendezvous: str, timeout_seconds: float = 600.0
) -> None:
    """Make the default process group of one rank; `NCCL_*` variables are left as found.

    Args:
        rendezvous: where the ranks meet: a file's path, or a name in torchrun's store.
    """
    timeout = timedelta(seconds=timeout_seconds)
    store: dist.Store
    if under_torchrun():
        store = dist.PrefixStore(rendezvous, connect(False))
    else:
        store = dist.FileStore(rendezvous, world_size)
    if device == "cuda":
        local = int(os.environ["LOCAL_RANK"]) if under_torchrun() else rank
        torch.cuda.set_device(local)
        dist.init_process_group(
            "nccl",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=torch.device("cuda", local),
        )
    else:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)


def rank_device() -> torch.device:
    """The device of the calling rank: its CUDA device under NCCL, else the CPU."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class Ranks:
    """Persistent ranks with an initialised default process group.

    After a failure or a timeout every rank is killed and the pool stays closed; its owner starts a fresh one.
    On a CPU each rank gets one thread unless OMP_NUM_THREADS is set. Under torchrun every process that it started
    makes this object and calls `run` alike, each with its own arguments, and gets every rank's values or the same
    failure.

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
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._connections: dict[int, Connection] = {}
        self._asking: dict[int, Connection] = {}
        self._open = True
        _made.add(self)
        try:
            joint = _next_round(world_size)
            if joint and device == "cuda":  # else this process's own context would be on the first device
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            rendezvous = joint.name if joint else os.path.join(self._folder, "rendezvous")
            for rank in range(world_size) if joint is None else (int(os.environ["RANK"]),):
                self._start(rank, rendezvous)
            self._collect("start", start_timeout_seconds or 60.0 + 5.0 * world_size, joint)
        except BaseException:
            self._kill()
            raise

    def _start(self, rank: int, rendezvous: str) -> None:
        (here, there), (asking, asked) = Pipe(), Pipe()
        environment = dict(os.environ)
        if self.device == "cpu":
            environment.setdefault("OMP_NUM_THREADS", "1")
            if sys.platform == "linux" and not under_torchrun():  # which may reach over several nodes
                environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name need not resolve
        worker = Path(__file__).with_name("_worker.py")
        with there, asked:
            ends = (there.fileno(), asked.fileno())
            process = subprocess.Popen(
                [sys.executable, str(worker), *map(str, ends)],
                pass_fds=ends,
                env=environment,
                stdin=subprocess.DEVNULL,
            )
        self._processes[rank] = process
        self._connections[rank] = here
        self._asking[rank] = asking
        place = {
            "rank": rank,
            "world_size": self.world_size,
            "device": self.device,
            "rendezvous": rendezvous,
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
        joint = _next_round(self.world_size)
        try:
            job = transfer.dumps((fn, args))
        except ValueError as error:
            if joint is not None:  # the other ranks may run theirs
                joint.fail(min(self._processes), f"ValueError: {error}", "")
                self._kill()
            raise
        try:
            for connection in self._connections.values():
                connection.send_bytes(job)
        except OSError:
            pass  # a rank is gone; said below
        except BaseException:
            self._kill()
            raise
        return self._collect(job_name, timeout_seconds, joint)

    def _collect(self, job: str, timeout_seconds: float, joint: Round | None) -> list[Any]:
        """Wait for every rank's report; on any trouble kill all ranks and raise."""
        deadline = time.monotonic() + timeout_seconds
        late = f"no answer after {timeout_seconds:g} s (waiting for ranks {{late}}; returned: {{done}})"
        try:
            values, failures = self._listen(deadline, joint)
            if joint is not None:
                values = self._settle(job, joint, values, failures, deadline, late)
            elif failures:
                raise RankFailure(job, *self._blame(failures))
            elif pending := [rank for rank in self._connections if rank not in values]:
                done = ", ".join(map(str, values)) or "none"
                message = late.format(late=", ".join(map(str, pending)), done=done)
                raise RankTimeout(job, pending[0], message + list_whereabouts(self._whereabouts(pending)))
        except BaseException:
            self._kill()
            raise
        return [transfer.loads(values[rank]) for rank in range(self.world_size)]

    def _listen(
        self, deadline: float, joint: Round | None
    ) -> tuple[dict[int, bytes], dict[int, dict[str, Any]]]:
        """What this process's ranks returned and how they failed, by rank; ends early where others gave the verdict."""
        pending = dict(self._connections)
        values: dict[int, bytes] = {}
        failures: dict[int, dict[str, Any]] = {}
        while pending and time.monotonic() < deadline and not (joint and joint.verdict()):
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
                    values[rank] = report["value"]
                else:
                    if not failures:
                        deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
                    failures[rank] = report
        return values, failures

    def _settle(
        self,
        job: str,
        joint: Round,
        values: dict[int, bytes],
        failures: dict[int, dict[str, Any]],
        deadline: float,
        late: str,
    ) -> dict[int, bytes]:
        """Every rank's value, or the failure that all of torchrun's processes raise."""
        if failures:
            if not any(report.get("dead") for report in failures.values()):
                time.sleep(_GRACE_SECONDS)  # one that died comes first: the others failed for want of it
            joint.fail(*self._blame(failures))
        for value in values.values():
            joint.done(value)
        verdict = joint.verdict(deadline - time.monotonic())
        if verdict is None:
            joint.tell_whereabouts(self._whereabouts([r for r in self._connections if r not in values]))
            verdict = joint.give_up(late)
        if not verdict["ok"]:
            kind = RankTimeout if verdict["late"] else RankFailure
            raise kind(job, verdict["rank"], verdict["message"], verdict["details"])
        return dict(enumerate(joint.values()))

    def _whereabouts(self, ranks: list[int]) -> dict[int, str]:
        """What those of this process's ranks that still answer are in."""
        found = {}
        deadline = time.monotonic() + _ANSWER_SECONDS
        try:
            for rank in ranks:
                self._asking[rank].send_bytes(b"where?")
            for rank in ranks:
                if self._asking[rank].poll(max(0.0, deadline - time.monotonic())):
                    found[rank] = self._asking[rank].recv_bytes().decode()
        except (EOFError, OSError):
            pass  # it ended just now
        return found

    def _blame(self, failures: dict[int, dict[str, Any]]) -> tuple[int, str, str]:
        """Rank, message and details: one that died before one that raised, the first that raised before later ones."""
        dead = [rank for rank, report in failures.items() if report.get("dead")]
        if dead:
            status = self._processes[dead[0]].wait()
            if status < 0:
                return dead[0], f"killed by signal {-status} ({signal.Signals(-status).name})", ""
            return dead[0], f"exited with status {status} without returning", ""
        rank = min(failures, key=lambda r: failures[r]["at"])
        return rank, failures[rank]["message"], failures[rank]["traceback"]

    def _kill(self) -> None:
        self._open = False
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
        for process in self._processes.values():
            process.wait()
        for connection in (*self._connections.values(), *self._asking.values()):
            connection.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        """Stop the ranks; no process is left afterwards. May be called again."""
        if not self._open:
            return
        deadline = time.monotonic() + _CLOSE_SECONDS
        try:
            for connection in self._connections.values():
                connection.send_bytes(b"")
            for process in self._processes.values():
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

    The timeout counts from the moment the ranks stand. Under torchrun this process starts its own rank, and gets the
    whole list.

    Raises:
        ValueError, RankFailure, RankTimeout: as in `Ranks`; ValueError when torchrun's world size differs.
    """
    with Ranks(world_size, device) as ranks:
        return ranks.run(fn, *args, timeout_seconds=timeout_seconds, name=name)


_made: WeakSet[Ranks] = WeakSet()


@cache
def _leave_in_order() -> None:
    """At the end of this process close its ranks, which read the store too, and only then leave."""

    def end() -> None:
        for ranks in list(_made):
            ranks.close()
        leave()

    atexit.register(end)


def _next_round(world_size: int) -> Round | None:
    """What torchrun's processes settle next; None where torchrun started none."""
    if not under_torchrun():
        return None
    started = int(os.environ["WORLD_SIZE"])
    if world_size != started:
        raise ValueError(f"torchrun started {started} ranks, {world_size} were asked for")
    _leave_in_order()
    return Round()
