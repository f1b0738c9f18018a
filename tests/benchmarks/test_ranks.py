"""Field case D8: one rank fails, the case ends with its message, the next case runs in a fresh group."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.cases import collectives
from benchmarks.cases.case import Case, Prepared
from benchmarks.measure.clock import slowest_rank
from benchmarks.measure.ranks import close_ranks, drop, on_ranks
from benchmarks.measure.record import Row, RunWriter
from benchmarks.measure.sampling import Policy
from benchmarks.runner import run_cases


def reduce_once(fault):
    """On a rank: an all-reduce, with rank 1 failing in one of three ways. Returns seconds."""
    import torch
    import torch.distributed as dist

    if dist.get_rank() == 1:
        if fault == "raises":
            raise ValueError("rank 1 ran out of batches")
        if fault == "exits":
            os._exit(1)
        if fault == "skips":
            return 0.25
    dist.all_reduce(torch.ones(4))
    return 0.5


HANG = """
import os, time
from benchmarks.cases.case import Case, Prepared
from benchmarks.measure.clock import slowest_rank
from benchmarks.measure.ranks import drop, on_ranks
from benchmarks.measure.sampling import Policy
from benchmarks.runner import measure

def hang():
    os.write(1, f"{os.getpid()}\\n".encode())
    time.sleep(1000)

def prepare(case, device):
    return Prepared(
        run=lambda: on_ranks(2, "cpu", hang), clock=slowest_rank, close=lambda: on_ranks(2, "cpu", drop)
    )

if __name__ == "__main__":
    case = Case(area="collective", target="t", phase="p", shape={}, dtype="fp32", world_size=2)
    print(measure(case, "cpu", Policy(), prepare))
"""
IMPORT_EACH_FIRST = """
import importlib, pkgutil, sys
import torch
import benchmarks
for module in pkgutil.walk_packages(benchmarks.__path__, "benchmarks."):
    if "pytests" not in module.name and not module.name.endswith("__main__"):
        for loaded in [name for name in sys.modules if name.split(".")[0] == "benchmarks"]:
            del sys.modules[loaded]
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            print(module.name, error)
"""


@pytest.fixture(autouse=True)
def left():
    """Tells which processes the test started and left alive. Ranks that other tests keep for the session are older."""
    before = children()
    yield lambda: children() - before
    close_ranks()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raises", "rank 1: ValueError: rank 1 ran out of batches"),
        ("exits", "rank 1: exited with status 1"),
        ("skips", "no answer after 10 s"),
    ],
)
def test_a_failing_rank_ends_its_case_only(fault, said, tmp_path, left):
    cases = [
        Case(area="collective", target=f"cell{i}", phase="all_reduce", shape={}, dtype="fp32", world_size=2)
        for i in (1, 2, 3)
    ]

    def prepare(case, device):
        faulty = fault if case.target == "cell2" else None
        return Prepared(
            run=lambda: on_ranks(2, "cpu", reduce_once, faulty, timeout_seconds=10, name=case.id),
            clock=slowest_rank,
        )

    template = Row(
        case="", version=1, suite="run", run="r", machine="local", commit=None, dirty=False, source_sha256="a",
        ruler_sha256="b", started_at="", status="ok",
    )  # fmt: skip
    started = time.monotonic()
    policy = Policy(warmup=1, min_samples=5, max_samples=5)
    writer = RunWriter(tmp_path, "r")
    rows = list(
        run_cases(cases, device="cpu", policy=policy, template=template, writer=writer, prepare=prepare)
    )
    assert [row.status for row in rows] == ["ok", "error", "ok"]
    assert said in rows[1].reason and cases[1].id in rows[1].reason
    assert rows[0].samples_seconds == rows[2].samples_seconds == (0.5,) * 5
    assert time.monotonic() - started < 60
    close_ranks()
    assert not left(), "a rank is left"


def test_nothing_is_started_only_to_let_go(left):
    assert on_ranks(2, "cpu", drop) == [] and not left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_waits_for_its_ranks(number, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(HANG)
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    run = subprocess.Popen(
        [sys.executable, script], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    pids = [int(run.stdout.readline()) for _ in range(2)]  # each of a rank at work
    run.send_signal(number)
    _, errors = run.communicate(timeout=60)
    assert run.returncode and "KeyboardInterrupt" in errors, errors
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids), "a rank is left, or was not waited for"


def children():
    """Processes that this one started and that still live."""
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    fields = file.read().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[1]) == os.getpid() and fields[0] != "Z":
                found.add(int(entry))
    return found


@pytest.mark.parametrize(("collective", "least"), [("all_reduce", 4), ("all_to_all", 12)])
def test_a_payload_without_an_element_a_rank_is_refused_before_ranks_start(collective, least):
    with pytest.raises(
        ValueError, match=f"{collective} .* 3 ranks needs at least {least} bytes, got {least - 1}"
    ):
        collectives.case("torch", collective, least - 1, 3)
    assert collectives.case("torch", collective, least, 3).shape == {"bytes": least}


def test_every_module_of_the_ruler_can_be_a_scripts_first_import():
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_EACH_FIRST],
        cwd=root,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(root), *sys.path])},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
