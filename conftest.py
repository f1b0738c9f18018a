"""Options of `pytest benchmarks`: what is measured, on what, and where pytest-benchmark keeps it.

Here and not in benchmarks/, which asv imports whole in an environment without pytest.
"""

from pathlib import Path


def pytest_addoption(parser):
    group = parser.getgroup("trainstep")
    group.addoption("--tier", default="smoke", help="smoke, standard or full (with `pytest benchmarks`)")
    group.addoption("--device", default="auto", help="cpu or cuda; by default cuda where there is one")
    group.addoption("--machine", default=None, help="publish under results/pytest-benchmark as this machine")


def pytest_configure(config):
    # A stranger's timings never join a published series: only --machine writes outside results/local. A storage
    # named on the command line is left alone.
    if hasattr(config.option, "benchmark_save_data"):
        config.option.benchmark_save_data = True  # a median without its samples cannot be judged
    if config.getoption("benchmark_storage", None) == "file://./.benchmarks":
        place = "pytest-benchmark" if config.getoption("machine") else "local/pytest-benchmark"
        config.option.benchmark_storage = f"file://{Path(config.rootpath) / 'results' / place}"


def pytest_benchmark_update_machine_info(config, machine_info):
    from benchmarks.commands.measuring import choose_device
    from benchmarks.measure.provenance import environment

    machine_info["node"] = config.getoption("machine") or "local"
    machine_info["trainstep"] = environment(choose_device(config.getoption("device")))
