"""pytest-benchmark suite of the area sharding."""

import pytest

from benchmarks.measure.pytest_timer import CLOCK

AREA = "sharding"


@pytest.mark.benchmark(timer=CLOCK)
def test_case(case, measured):
    measured(case)
