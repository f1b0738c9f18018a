"""One cell's failure is that cell's row and nobody else's."""

import gc
import json
import weakref

import pytest
import torch

from benchmarks.cases.case import Case, Check, Prepared, Work
from benchmarks.commands.measuring import status_of
from benchmarks.measure.clock import EventClock, host_clock
from benchmarks.measure.record import Row, RunWriter, load
from benchmarks.measure.sampling import Policy
from benchmarks.runner import clock_name, measure, run_cases

POLICY = Policy(warmup=1, min_samples=5, max_samples=5)


def cells(count=4):
    return [
        Case(area="attention", target=f"cell{i}", phase="forward", shape={"S": 8}, dtype="fp32")
        for i in range(1, count + 1)
    ]


def template(**fields):
    base = {"case": "", "version": 1, "suite": "run", "run": "r", "machine": "local", "commit": None, "dirty": False,
                "source_sha256": "a", "ruler_sha256": "b", "started_at": "", "status": "ok"}  # fmt: skip
    return Row(**(base | fields))


def simple(run=lambda: None, **fields):
    return Prepared(run=run, clock=lambda work: (work(), 0.5)[1], **fields)


def test_out_of_memory_and_errors_leave_the_other_rows(tmp_path):
    """Field case B6: cell 2 runs out of memory holding a tensor, cell 3 has an ordinary error."""
    held = []

    def prepare(case, device):
        if case.target == "cell2":

            def run():
                tensor = torch.ones(1000)
                held.append(weakref.ref(tensor))
                raise torch.cuda.OutOfMemoryError(
                    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has 1.00 GiB free"
                )

            return simple(run)
        if case.target == "cell3":
            gc.collect()
            assert held[0]() is None, "cell 2's tensor is still alive"

            def fail():
                raise ValueError("wrong shape")

            return simple(fail)
        return simple()

    writer = RunWriter(tmp_path, "run")
    seen_on_disk = []
    for row in run_cases(
        cells(), device="cpu", policy=POLICY, template=template(), writer=writer, prepare=prepare
    ):
        seen_on_disk.append(len(load([writer.path])[0]))
        assert row.case
    rows, problems = load([writer.path])
    assert not problems
    assert seen_on_disk == [1, 2, 3, 4]
    assert [row.status for row in rows] == ["ok", "oom", "error", "ok"]
    assert rows[1].samples_seconds == () and rows[1].first_seconds is None
    assert "20" in rows[1].reason and "GiB" in rows[1].reason
    assert rows[2].reason == "ValueError: wrong shape"
    assert status_of(rows) != 0
    assert status_of([row for row in rows if row.status != "error"]) == 0


def test_a_failure_while_preparing_is_a_row_too():
    def prepare(case, device):
        raise RuntimeError("no such kernel\nsecond line")

    outcome = measure(cells(1)[0], "cpu", POLICY, prepare)
    assert (outcome.status, outcome.reason) == ("error", "RuntimeError: no such kernel")


def test_what_cannot_run_here_is_skipped_with_its_reason():
    def prepare(case, device):
        raise NotImplementedError("needs two devices")

    outcome = measure(cells(1)[0], "cpu", POLICY, prepare)
    assert (outcome.status, outcome.reason) == ("skipped", "needs two devices")


@pytest.mark.parametrize("error", [2.0, float("nan")])
def test_no_speed_without_a_green_check(error):
    timed = []
    made = simple(lambda: timed.append(1), check=lambda: Check(error=error, budget=1.0))
    outcome = measure(cells(1)[0], "cpu", POLICY, lambda case, device: made)
    assert outcome.status == "red" and not outcome.samples_seconds and not timed
    assert "differs from the reference" in outcome.reason


@pytest.mark.parametrize("reading", [float("nan"), float("inf"), -1.0, 1e-300])
def test_a_clock_that_gives_no_time_is_an_error_and_the_file_stays_readable(reading, tmp_path):
    def prepare(case, device):
        broken = case.target == "cell1"
        return Prepared(run=lambda: None, clock=lambda work: (work(), reading if broken else 0.5)[1])

    writer = RunWriter(tmp_path, "r")
    options = {
        "device": "cpu",
        "policy": POLICY,
        "template": template(),
        "writer": writer,
        "prepare": prepare,
    }
    rows = list(run_cases(cells(2), **options))
    assert [(r.status, r.reason) for r in rows] == [("error", "the clock gave what is no time"), ("ok", None)]
    assert [r.status for r in load([writer.path])[0]] == ["error", "ok"] and status_of(rows) == 11


def test_an_interruption_keeps_the_rows_and_the_next_run_resumes(tmp_path):
    ran = []

    def prepare(case, device):
        ran.append(case.target)
        if case.target == "cell3" and ran.count("cell3") == 1:
            raise KeyboardInterrupt
        return simple()

    def again():
        writer = RunWriter(tmp_path, "run")
        return list(
            run_cases(
                cells(), device="cpu", policy=POLICY, template=template(), writer=writer, prepare=prepare
            )
        )

    with pytest.raises(KeyboardInterrupt):
        again()
    assert [row.case.split("/")[1] for row in load([tmp_path])[0]] == ["cell1", "cell2"]
    again()
    assert ran == ["cell1", "cell2", "cell3", "cell3", "cell4"]
    assert len(load([tmp_path])[0]) == 4


@pytest.mark.parametrize(("clock", "name"), [(EventClock(), "events"), (host_clock("cpu"), "host")])
def test_rows_say_what_took_their_samples(clock, name):
    assert clock_name(clock) == name


def test_work_and_closing(tmp_path):
    closed = []
    made = simple(work=Work(flops=10.0, tokens=3.0), close=lambda: closed.append(1), state="advances")
    outcome = measure(cells(1)[0], "cpu", POLICY, lambda case, device: made)
    assert outcome.metrics["flops"] == {"value": 10.0, "unit": "FLOP", "better": None}
    assert "bytes" not in outcome.metrics
    assert closed == [1] and outcome.state == "advances"
    assert outcome.samples_seconds == (0.5,) * 5
    json.dumps(outcome.metrics, allow_nan=False)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("rank 1: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes"
        ),
        RuntimeError("CUDA error: out of memory"),
        MemoryError(),
    ],
)
def test_every_form_of_running_out_of_memory_is_told_apart_from_errors(error):
    def prepare(case, device):
        raise ValueError("while compiling") from error

    assert measure(cells(1)[0], "cpu", POLICY, prepare).status == "oom"


def test_a_metric_without_a_direction_that_exists_is_the_cell_s_error():
    made = simple(metrics=lambda: {"m": {"value": 1, "unit": "1", "better": "sideways"}})
    outcome = measure(cells(1)[0], "cpu", POLICY, lambda case, device: made)
    assert outcome.status == "error" and "'m' is better 'sideways'" in outcome.reason


def test_numbers_of_other_libraries_are_stored_and_what_cannot_be_is_the_cell_s_error(tmp_path):
    import numpy

    found = iter([numpy.int64(3), torch.tensor(1.5), float("nan"), object()])

    def prepare(case, device):
        value = next(found)
        return simple(metrics=lambda: {"m": {"value": value, "unit": "1", "better": None}})

    writer = RunWriter(tmp_path, "run")
    rows = list(
        run_cases(cells(), device="cpu", policy=POLICY, template=template(), writer=writer, prepare=prepare)
    )
    assert [row.status for row in rows] == ["ok", "ok", "ok", "error"]
    stored, problems = load([writer.path])
    assert not problems and [row.metrics.get("m", {}).get("value") for row in stored] == [3, 1.5, None, None]


def test_a_case_that_exits_does_not_end_the_sweep():
    def prepare(case, device):
        raise SystemExit(3)

    assert measure(cells(1)[0], "cpu", POLICY, prepare).status == "error"
