"""Clocks: how one repetition becomes seconds.

A clock takes `run`, calls it and returns seconds once everything that `run` started has finished. On a CPU the
call itself is the work. On CUDA a call only queues work: kernels are timed by events on the stream, with the
device kept busy until all of the call is queued (their time on the device, launches hidden as in a training loop
that runs ahead); whole steps by the host clock between two synchronisations (what a training loop feels,
launches included). Across ranks a repetition lasts as long as its slowest rank.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


def _nothing() -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class HostClock:
    """The host's clock between two device synchronisations.

    Attributes:
        synchronize: returns when the device is idle; does nothing on a CPU.
        now: monotonic seconds.
    """

    synchronize: Callable[[], None] = _nothing
    now: Callable[[], float] = time.perf_counter

    def __call__(self, run: Callable[[], Any]) -> float:
        """Seconds of one `run`."""
        return self.phases([("run", run)])["run"]

    def phases(self, steps: Sequence[tuple[str, Callable[[], Any]]]) -> dict[str, float]:
        """Seconds of each named step, run in order with a synchronisation after each."""
        seconds = {}
        self.synchronize()
        for name, step in steps:
            start = self.now()
            step()
            self.synchronize()
            seconds[name] = self.now() - start
        return seconds


def host_clock(device: str) -> HostClock:
    """The host clock that waits for this device ("cpu" or "cuda")."""
    if device == "cpu":
        return HostClock()
    import torch

    return HostClock(synchronize=torch.cuda.synchronize)


# Work that the host queues for longer than this is timed with its launches.
LONGEST_HOLD_SECONDS = 0.02
# No GPU's clock is much faster: so many cycles last a second or longer.
CYCLES_A_SECOND = 2e9


@dataclass(kw_only=True)
class EventClock:
    """Seconds between two CUDA events around `run` on the current stream.

    On an idle device the first event passes at once, and the time until the host has launched the first kernel
    would count: 0.1 to 0.3 ms of Python, which differ from process to process and swallow what a slower kernel
    adds. So the device spins for twice as long as the host took to queue the call before this one.

    Attributes:
        host_seconds: what the host took for the last call; 0 before the first one, which is exposed.
    """

    host_seconds: float = 0.0

    def __call__(self, run: Callable[[], Any]) -> float:
        """Seconds of one `run`."""
        import torch

        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        hold = min(2 * self.host_seconds, LONGEST_HOLD_SECONDS)
        torch.cuda._sleep(round(hold * CYCLES_A_SECOND))  # no public call spins on the device
        start.record()
        before = time.perf_counter()
        run()
        self.host_seconds = time.perf_counter() - before
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def kernel_clock(device: str) -> Callable[[Callable[[], Any]], float]:
    """The clock for a kernel on this device: events on CUDA, the host's clock on a CPU."""
    return EventClock() if device == "cuda" else HostClock()


def slowest_rank(run: Callable[[], Sequence[float]]) -> float:
    """Seconds of the slowest rank, where `run` returns what each rank measured."""
    return max(run())


def cold_l2(device: str) -> Callable[[], None]:
    """A function that evicts the device's L2 cache by overwriting a buffer twice its size; nothing on a CPU."""
    if device == "cpu":
        return _nothing
    import torch

    size = 2 * torch.cuda.get_device_properties("cuda").L2_cache_size
    buffer = torch.empty(size, dtype=torch.int8, device="cuda")

    def flush() -> None:
        buffer.zero_()

    return flush
