"""pytest-benchmark suite of the area data_parallel."""

import pytest

from benchmarks.measure.pytest_timer import CLOCK

AREA = "data_parallel"


@pytest.mark.benchmark(timer=CLOCK)
def test_case(case, measured):
    measured(case)
