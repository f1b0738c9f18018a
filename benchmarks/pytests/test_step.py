"""pytest-benchmark suite of the area step."""

import pytest

from benchmarks.measure.pytest_timer import CLOCK

AREA = "step"


@pytest.mark.benchmark(timer=CLOCK)
def test_case(case, measured):
    measured(case)
