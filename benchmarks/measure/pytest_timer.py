"""How seconds measured by the ruler's clocks reach pytest-benchmark through its public interface.

pytest-benchmark reads a timer before and after each round. `DeviceClock` answers 0 and then the seconds that the
round's own clock found, so that its statistics are over device events or the slowest rank and not over the time
it took to queue the work.
"""

import math
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
# A case whose call takes longer than this gets half the rounds, which is still the least that a result may have.
LONG_SECONDS = 0.3


def measure_with(benchmark: Any, case: Any, device: str) -> None:
    """Prepare, check and measure one case as a pytest-benchmark test. What cannot run here is skipped with its reason.

    The calibrated call `benchmark(f)` would call more often than it says; `pedantic` calls once a round. What the
    tool has no place for (metrics, check, first call) goes into `extra_info`, where the record loader finds it.
    """
    import pytest

    from benchmarks import cases as tables
    from benchmarks.measure.record import check_metrics, finite_or_absent
    from benchmarks.runner import clock_name, work_metrics

    try:
        made = tables.prepare(case, device)
    except NotImplementedError as reason:
        pytest.skip(str(reason))
    extra = {
        "case": case.id,
        "version": case.version,
        "metrics": work_metrics(made.work),
        "env": {"state": made.state, "clock": clock_name(made.clock)},
    }
    try:
        if made.check is not None:
            result = made.check()
            extra["check"] = {"error": result.error, "budget": result.budget}
            assert result.green, (
                f"differs from the reference: error {result.error:.3g}, allowed {result.budget:.3g}"
            )

        def once() -> None:
            made.before()
            CLOCK.elapsed = made.clock(made.run)
            assert math.isfinite(CLOCK.elapsed), "the clock gave no finite time"

        once()
        extra["first_seconds"] = CLOCK.elapsed
        once()
        rounds = ROUNDS if CLOCK.elapsed < LONG_SECONDS else ROUNDS // 2
        benchmark.pedantic(once, rounds=rounds if benchmark.enabled else 1, iterations=1)
        if made.metrics is not None:
            extra["metrics"] |= made.metrics()
        extra = finite_or_absent(extra)
        check_metrics(extra["metrics"])
        benchmark.extra_info.update(extra)
    finally:
        made.close()
