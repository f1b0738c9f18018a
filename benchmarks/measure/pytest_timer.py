"""How seconds measured by the ruler's clocks reach pytest-benchmark through its public interface.

pytest-benchmark reads a timer before and after each round. `DeviceClock` answers 0 and then the seconds that the
round's own clock found, so that its statistics are over device events or the slowest rank and not over the time
it took to queue the work.
"""

from typing import Any


class DeviceClock:
    """A timer whose every second reading is the elapsed time put into it."""

    __name__ = "device_clock"

    def __init__(self) -> None:
        self.elapsed = 0.0
        self._started = False

    def __call__(self) -> float:
        self._started = not self._started
        return 0.0 if self._started else self.elapsed


CLOCK = DeviceClock()
ROUNDS = 10


def measure_with(benchmark: Any, case: Any, device: str) -> None:
    """Prepare, check and measure one case as a pytest-benchmark test. What cannot run here is skipped with its reason.

    The calibrated call `benchmark(f)` would call more often than it says; `pedantic` calls once a round.
    """
    import pytest

    from benchmarks import cases as tables

    try:
        made = tables.prepare(case, device)
    except NotImplementedError as reason:
        pytest.skip(str(reason))
    try:
        if made.check is not None:
            result = made.check()
            assert result.green, f"differs from the reference: error {result.error:.3g}, allowed {result.budget:.3g}"

        def once() -> None:
            made.before()
            CLOCK.elapsed = made.clock(made.run)

        benchmark.extra_info.update(case=case.id, version=case.version, device=device)
        benchmark.pedantic(once, rounds=ROUNDS if benchmark.enabled else 1, warmup_rounds=2, iterations=1)
    finally:
        made.close()
