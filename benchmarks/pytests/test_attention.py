"""pytest-benchmark suite of the area attention."""

import pytest

from benchmarks.measure.pytest_timer import CLOCK

AREA = "attention"


@pytest.mark.benchmark(timer=CLOCK)
def test_case(case, measured):
    measured(case)
