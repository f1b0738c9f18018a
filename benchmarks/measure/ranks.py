"""Persistent worker ranks shared by the cases of one process.

Starting ranks costs about two seconds, so a pool lives as long as the process that measures and serves one case
after another. A pool in which a rank failed is broken: it is closed and the next case gets a fresh one.
"""

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measure.settle import settle

# A rank that skips a collective must end its case within a minute.
TIMEOUT_SECONDS = 50
_ROOT = Path(__file__).resolve().parents[2]
_pools: dict[tuple[int, str], Any] = {}


def on_ranks(
    world_size: int,
    device: str,
    function: Callable[..., Any],
    *args: Any,
    timeout_seconds: float = TIMEOUT_SECONDS,
    name: str | None = None,
) -> list[Any]:
    """Run `function(*args)` on every rank of the shared pool and bring back what each returned.

    `name` is what a failure or a timeout calls the work: the case's id. Where no pool is left, `drop` has nothing to
    do, and none is started for it.

    Raises:
        RankFailure: a rank raised, died or did not answer in time. The pool is gone afterwards.
    """
    from trainstep.parallel.launch import Ranks

    key = (world_size, device)
    if key not in _pools and function is drop:
        return []
    if key not in _pools:
        _end_in_order_at_sigterm()
        close_ranks()  # one pool at a time: ranks of another size would take the cores or the devices
        # asv finds the ruler through an import hook of its own, which a rank, given this path, does not have.
        if str(_ROOT) not in sys.path:
            sys.path.append(str(_ROOT))
        _pools[key] = Ranks(world_size, device=device)
        if device == "cpu":
            _pools[key].run(settle, timeout_seconds=TIMEOUT_SECONDS)
    try:
        return _pools[key].run(function, *args, timeout_seconds=timeout_seconds, name=name)
    except BaseException:
        close_ranks()
        raise


def close_ranks() -> None:
    """Stop every pool of this process."""
    for key in list(_pools):
        _pools.pop(key).close()


atexit.register(close_ranks)


def _end_in_order_at_sigterm() -> None:
    """Make SIGTERM an interruption, as Ctrl-C is: a process that dies at once leaves ranks that nobody waits for."""
    ours = threading.current_thread() is threading.main_thread()
    if ours and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.default_int_handler)


# Under torchrun (or SLURM, by the template) this process starts one of the ranks, and all of its like run the same
# command. The first measures for all: only it writes and prints, and what depends on a clock or a file is its decision.
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def started_ranks() -> int | None:
    """How many ranks torchrun started; None where it did not start this process."""
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in _TORCHRUN) else None


def nodes() -> int:
    """How many machines the ranks are spread over."""
    here = os.environ.get("LOCAL_WORLD_SIZE")
    return -(-(started_ranks() or 1) // int(here)) if started_ranks() and here else 1


def is_first() -> bool:
    """Whether this process is the first rank, or the only process."""
    return started_ranks() is None or int(os.environ["RANK"]) == 0


def agreed(value: Any, device: str) -> Any:
    """The first rank's value on every rank under torchrun, where all of them call this; elsewhere `value` itself."""
    size = started_ranks()
    return value if size is None else on_ranks(size, device, _itself, value)[0]


def _itself(value: Any) -> Any:
    return value


def agreed_clock(device: str) -> Callable[[], float]:
    """Monotonic seconds, the first rank's under torchrun: a time cap must end sampling on all ranks or on none."""
    return time.perf_counter if started_ranks() is None else lambda: agreed(time.perf_counter(), device)


# What a rank keeps between the calls of one case, by case id.
_state: dict[str, Any] = {}


def keep(case_id: str, value: Any) -> None:
    """On a rank: hold `value` for later calls; whatever another case held is released first."""
    _state.clear()
    _state[case_id] = value


def kept(case_id: str) -> Any:
    """On a rank: what `keep` holds for the case."""
    return _state[case_id]


def drop() -> None:
    """On a rank: release what is held, device memory included."""
    import torch

    from benchmarks.measure.memory import release

    _state.clear()
    release("cuda" if torch.cuda.is_available() else "cpu")
