"""pytest-benchmark suite of the area collective."""

import pytest

from benchmarks.measure.pytest_timer import CLOCK

AREA = "collective"


@pytest.mark.benchmark(timer=CLOCK)
def test_case(case, measured):
    measured(case)
