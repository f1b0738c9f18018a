"""pytest-benchmark suite of the area memory."""

import pytest

from benchmarks.measure.pytest_timer import CLOCK

AREA = "memory"


@pytest.mark.benchmark(timer=CLOCK)
def test_case(case, measured):
    measured(case)
