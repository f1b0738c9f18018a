"""Fixtures of the pytest-benchmark suite."""

import pytest

from benchmarks.commands.measuring import choose_device


@pytest.fixture(scope="session")
def device(request):
    """Where the cases run."""
    return choose_device(request.config.getoption("device"))


def pytest_generate_tests(metafunc):
    """Each module names its area; its cases of the chosen tier become the parameters, under their ids."""
    from benchmarks.cases import select

    if "case" in metafunc.fixturenames:
        chosen = select(tier=metafunc.config.getoption("tier"), area=metafunc.module.AREA)
        metafunc.parametrize("case", chosen, ids=[case.id for case in chosen])


@pytest.fixture
def measured(benchmark, device):
    """Measure a case through pytest-benchmark: its timer hands over the seconds that the ruler's clock measured."""
    from benchmarks.measure.pytest_timer import measure_with

    return lambda case: measure_with(benchmark, case, device)
