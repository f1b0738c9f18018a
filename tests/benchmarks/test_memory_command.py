"""The sub-commands memory, profile and precision: what they print, write and refuse."""

import json
import re
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as command_line
from benchmarks.cases import AREAS
from benchmarks.cases import memory as table
from benchmarks.cases.registries import ROOT
from benchmarks.commands.memory_studies import (
    Cell,
    cell_frame,
    cells_of,
    gradient_line,
    record_step,
    verdicts,
)
from benchmarks.measure.record import STUDY, Row, read_rows, to_line
from trainstep import ranges
from trainstep.memory.snapshot import load_snapshot
from trainstep.specs.model import get_model


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(AREAS, "memory", table)
    for name in ("memory", "profile", "precision"):
        monkeypatch.setitem(command_line.COMMANDS, name, name)


def run(capsys, *arguments):
    status = command_line.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def cell(policy, predicted, measured=None, status="ok", dtype="fp32"):
    return Cell(
        policy=policy,
        phase="forward_backward",
        dtype=dtype,
        context=2048,
        status=status,
        reason=None,
        predicted_bytes=predicted,
        recomputed_flops=0,
        measured_bytes=measured,
    )


def out_of_memory_row(policy):
    one = table.case(policy, "forward_backward", "toy", context=32)
    return Row(
        case=one.id, version=1, suite="run", run="r", machine="local", commit=None, dirty=False, source_sha256="",
        ruler_sha256="", started_at="", status="oom", reason="out of memory",
    )  # fmt: skip


def test_precision(capsys, tmp_path):
    status, out, _ = run(capsys, "precision", "--dtype", "bf16", "--device", "cpu", "--out", tmp_path)
    assert status == 0
    for known in ("10.0001", "9.9531", "10.0021"):
        assert known in out
    assert "blocks.0.feed_forward.down" in out
    assert "bfloat16" in out
    (path,) = tmp_path.iterdir()
    rows = {row.case: row for row in read_rows(path)}
    assert list(rows) == [
        "precision/accumulation/sum/mixed,w1",
        "precision/autocast/forward_backward/fc1-relu-ln-fc2,bf16,w1",
        "precision/autocast/forward_backward/toy,B1,S16,L1,bf16,w1",
    ]
    sums, toy, _ = rows.values()
    assert sums.metrics["float16 += float16"]["value"] == 9.953125
    assert {"what": "output", "of": "fc1", "dtype": "bfloat16"} in toy.metrics["dtypes"]["tensors"]
    assert {"what": "gradients", "of": "all 4", "dtype": "float32"} in toy.metrics["dtypes"]["tensors"]
    assert_says_where_it_comes_from(sums)


def assert_says_where_it_comes_from(row):
    """As any measured row does, and with no place of this machine in it."""
    assert row.suite == STUDY and row.machine == "local"
    assert len(row.source_sha256) == len(row.ruler_sha256) == 64
    assert row.env["device"] == "cpu" and row.env["torch"] == str(torch.__version__) and "triton" in row.env
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", row.started_at)
    stored = to_line(row)
    assert str(ROOT) not in stored and tempfile.gettempdir() not in stored


def test_residuals_and_plan(capsys):
    status, out, _ = run(
        capsys, "memory", "toy", "--study", "residuals,plan", "--context", "32", "--device", "cpu"
    )
    assert status == 0
    assert "eager" in out and "compiled" in out
    assert "Softmax" in out and "attention" in out
    assert "sqrt(L*boundary/residual)" in out
    assert "recursive" in out and "offload" in out
    assert "host GiB" in out


def test_checkpoint_study_compares_prediction_and_fact(capsys, tmp_path):
    rows = tmp_path / "rows.jsonl"
    status, out, _ = run(
        capsys, "memory", "toy", "--study", "checkpoint", "--policy", "none,groups-1,groups-2",
        "--context", "32", "--device", "cpu", "--out", rows,
    )  # fmt: skip
    assert status == 0
    assert "3 of 3 measured cells lie within 10% of their prediction" in out
    assert "of the single-level policies the planner chooses groups-" in out
    written = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["status"] for row in written] == ["ok"] * 3
    assert written[0]["metrics"]["predicted_peak"]["unit"] == "byte"


def test_what_may_end_the_run_comes_last(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(table.ROWS, "offload", table.MemoryRow(name="offload"))
    rows = tmp_path / "rows.jsonl"
    status, _, _ = run(
        capsys, "memory", "toy", "--study", "checkpoint", "--policy", "offload,none", "--dtype", "fp32,bf16",
        "--context", "16", "--device", "cpu", "--out", rows,
    )  # fmt: skip
    assert status == 0
    order = [json.loads(line)["case"].split("/")[1] for line in rows.read_text().splitlines()]
    assert order == ["none", "none", "offload", "offload"]


@pytest.mark.parametrize("named", [True, False])
def test_an_interrupted_sweep_shows_what_it_has(capsys, tmp_path, monkeypatch, named):
    honest = table.build

    def interrupted(config, dtype, device, policy):
        if policy == "groups-2" and config.batch_size == 3:
            raise KeyboardInterrupt
        return honest(config, dtype, device, policy)

    monkeypatch.setattr(table, "build", interrupted)
    out = ("--out", tmp_path / "rows.jsonl") if named else ()
    status, printed, err = run(
        capsys, "memory", "toy", "--study", "checkpoint", "--policy", "none,groups-1,groups-2",
        "--context", "17", "--batch", "3", "--device", "cpu", *out,
    )  # fmt: skip
    assert status == command_line.INTERRUPTED
    assert "2 of 2 measured cells lie within 10% of their prediction" in printed
    (place,) = re.findall(r"2 rows are kept in (\S+)\ninterrupted\n", err)
    kept = Path(place)
    assert len(kept.read_text().splitlines()) == 2
    assert kept.name.endswith("rows.jsonl" if named else ".partial.jsonl")
    kept.unlink()


def test_a_cell_without_a_prediction_does_not_hide_the_others(monkeypatch):
    def broken(one, device):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr("benchmarks.commands.memory_studies.expected_of", broken)
    (found,) = cells_of([out_of_memory_row("groups-2")], "cpu")
    assert (found.predicted_bytes, found.recomputed_flops, found.ratio) == (None, None, None)
    assert len(cell_frame([found])) == 1
    assert verdicts([found], 10) == []


@pytest.mark.parametrize("steps", [4, 5])
def test_below_five_steps_only_bytes_are_kept(capsys, tmp_path, steps):
    rows = tmp_path / "rows.jsonl"
    status, printed, _ = run(
        capsys, "memory", "toy", "--study", "checkpoint", "--policy", "none", "--context", "16", "--device", "cpu",
        "--steps", steps, "--out", rows,
    )  # fmt: skip
    (row,) = [json.loads(line) for line in rows.read_text().splitlines()]
    assert (status, row["status"]) == (0, "ok")
    assert row["metrics"]["peak_memory"]["value"] > 0
    assert len(row["samples_seconds"]) == (5 if steps == 5 else 0)
    assert (row["first_seconds"] is None) == ("step ms" not in printed) == (steps == 4)


def test_bytes_may_be_published_without_a_time(monkeypatch, tmp_path):
    from benchmarks.cases import registries
    from benchmarks.commands import measuring
    from benchmarks.measure import provenance as origin
    from benchmarks.measure.sampling import Policy

    facts = replace(origin.provenance(registries.ROOT), commit="a" * 40, dirty=False)
    monkeypatch.setattr(origin, "provenance", lambda *_, **__: facts)
    options = {"device": "cpu", "machine": "box", "out": tmp_path / "rows.jsonl"}
    cells = [table.case("none", "forward", "toy", context=16)]
    few = {"warmup": 0, "min_samples": 1, "max_samples": 1}
    with pytest.raises(ValueError, match="at least 5 samples"):
        measuring.measure_cases(cells, policy=Policy(**few), **options)
    (row,), _ = measuring.measure_cases(cells, policy=Policy(**few, timed=False), **options)
    assert (row.machine, row.status, row.samples_seconds) == ("box", "ok", ())


def test_peak_study(capsys, tmp_path):
    status, out, _ = run(
        capsys, "memory", "toy", "--study", "peak", "--context", "16,32", "--device", "cpu",
        "--out", tmp_path / "rows.jsonl",
    )  # fmt: skip
    assert status == 0
    assert out.count("inference") == 2 and out.count("train_step") == 2
    assert "predicted 262656 bytes (0.25 MiB), measured 262656 bytes" in out


def timeline_study(capsys, pictures):
    """Exit status and output of the timeline study of a tiny model."""
    status, out, _ = run(
        capsys, "memory", "toy", "--study", "timeline", "--context", "16", "--device", "cpu",
        "--pictures", pictures,
    )  # fmt: skip
    return status, out


def test_timeline_study_writes_snapshots_and_pictures(capsys, tmp_path):
    status, out = timeline_study(capsys, tmp_path)
    assert status == 0
    names = sorted(path.suffix for path in tmp_path.iterdir())
    assert names == [".pickle", ".pickle", ".png", ".png", ".svg", ".svg"]
    assert "trainstep/model/loss.py" in out
    phases = [
        name for _, name in load_snapshot(next(tmp_path.glob("toy-train*.pickle")))["trainstep"]["phases"]
    ]
    assert phases == ["forward", "backward", "optimizer"]


def test_a_step_that_does_not_fit_is_recorded_with_every_block_checkpointed(monkeypatch, tmp_path):
    honest = table.build

    def small_memory(config, dtype, device, policy):
        if policy == "none":
            raise torch.OutOfMemoryError("Tried to allocate 20 bytes.")
        return honest(config, dtype, device, policy)

    monkeypatch.setattr(table, "build", small_memory)
    picture = record_step(table.case("none", "train_step", "toy", context=16), "cpu", tmp_path)
    assert picture.policy == "every-block"
    with pytest.raises(torch.OutOfMemoryError):
        record_step(table.case("none", "inference", "toy", context=16), "cpu", tmp_path)


def test_a_step_beyond_the_hosts_memory_is_not_recorded(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(table, "available_host_bytes", lambda: 1000)
    monkeypatch.setattr(table, "build", lambda *_: pytest.fail("built"))
    status, out = timeline_study(capsys, tmp_path)
    assert status == 0
    assert out.count("out of memory of the host: asked for") == 2
    assert list(tmp_path.iterdir()) == []


def test_profile_writes_a_trace_and_answers(capsys, tmp_path):
    status, out, _ = run(
        capsys, "profile", "toy", "--context", "16,32", "--device", "cpu", "--out", tmp_path, "--top", "3"
    )
    assert status == 0
    assert out.count("matrix products take") == 2
    assert "inside attention softmax takes" in out
    assert "ranges that are switched off take" in out
    assert "operators" in out and "kernel" not in out
    traces = sorted(path.name for path in tmp_path.glob("*.trace.json.gz"))
    assert len(traces) == 2
    assert (tmp_path / traces[0]).read_bytes()[:2] == b"\x1f\x8b"
    (path,) = tmp_path.glob("*.jsonl")
    assert len(list(tmp_path.iterdir())) == 3
    first, second = read_rows(path)
    assert first.case == "profile/plain/train_step/toy,B4,S16,fp32,w1" and second.case.count("S32")
    assert {"forward", "backward", "optimizer", "softmax_to_matmul", "ranges_off", "answers"} == set(
        first.metrics
    )
    forward = first.metrics["forward"]
    (product,) = [line for line in forward["kernels"] if line["name"] == "aten::mm"]
    assert (product["kind"], product["calls"]) == ("matmul", 2 * 7 + 1)
    assert forward["value"] == pytest.approx(sum(line["seconds"] for line in forward["kernels"]))
    assert all(said in out for row in (first, second) for said in row.metrics["answers"]["said"])
    assert_says_where_it_comes_from(first)
    assert not ranges.is_enabled()
    status, out, _ = run(capsys, "profile", "--overlap", tmp_path / traces[0], "--out", tmp_path)
    assert status == 0
    assert "nothing was communicated" in out


def test_profile_of_ranks_reads_the_overlap(capsys, tmp_path):
    status, out, _ = run(
        capsys, "profile", "toy", "--context", "16", "--ranks", "2", "--variant", "bucketed", "--device", "cpu",
        "--out", tmp_path,
    )  # fmt: skip
    assert status == 0
    assert "hidden behind computation" in out
    assert len(list(tmp_path.glob("*.trace.json.gz"))) == len(list(tmp_path.glob("*.lanes.png"))) == 1


def test_a_profiled_step_that_fails_is_no_success(capsys, tmp_path, monkeypatch):
    from benchmarks.cases import step as steps

    def broken(self):
        raise RuntimeError("broken forward")

    monkeypatch.setattr(steps.Step, "forward", broken)
    status, _, err = run(capsys, "profile", "toy", "--context", "16", "--device", "cpu", "--out", tmp_path)
    assert status == 11
    assert "broken forward" in err
    (path,) = tmp_path.glob("*.jsonl")
    (row,) = read_rows(path)
    assert (row.status, row.reason) == ("error", "RuntimeError: broken forward")
    path.unlink()

    def full(self):
        raise torch.OutOfMemoryError("Tried to allocate 20 bytes.")

    monkeypatch.setattr(steps.Step, "forward", full)
    status, out, _ = run(capsys, "profile", "toy", "--context", "16", "--device", "cpu", "--out", tmp_path)
    assert status == 0
    assert "out of memory: asked for 20 bytes" in out
    (row,) = read_rows(next(tmp_path.glob("*.jsonl")))
    assert row.status == "oom" and row.reason.startswith("out of memory: asked for 20 bytes")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("memory", "huge"), "huge"),
        (("memory", "toy", "--study", "dreams"), "dreams"),
        (("memory", "toy", "--policy", "sometimes"), "sometimes"),
        (("memory", "toy", "--dtype", "fp3"), "fp3"),
        (("memory", "toy", "--context", "0"), "context"),
        (("memory", "toy", "--device", "tpu"), "tpu"),
        (("memory", "toy", "--machine", "../z"), "../z"),
        (("memory", "toy", "--pictures", f"{__file__}/pictures"), "cannot write"),
        (("memory", "toy", "--study", "plan,checkpoint", "--out", f"{__file__}/rows"), "cannot write"),
        (("profile", "toy", "--out", f"{__file__}/profiles"), "cannot write"),
        (
            (
                "memory",
                "xl",
                "--study",
                "plan",
                "--dtype",
                "amp-bf16",
                "--context",
                "2048",
                "--device",
                "cpu",
            ),
            "GPU",
        ),
        (("profile", "toy", "--mode", "sideways"), "sideways"),
        (("profile", "toy", "--top", "0"), "top"),
        (("profile", "--overlap", "/nowhere/trace.json"), "/nowhere/trace.json"),
        (("profile", "toy", "--ranks", "3", "--device", "cpu"), "divide over 3 ranks"),
        (("precision", "--dtype", "fp8"), "fp8"),
        (("precision", "huge"), "huge"),
        (("precision", "--device", "cpu", "--out", f"{__file__}/rows"), "cannot write"),
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys, arguments, named):
    status, out, err = run(capsys, *arguments)
    assert status == 2
    assert named in err
    assert len(err.strip().splitlines()) == 1
    assert out == ""


def test_nsys_that_is_not_there(capsys, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    status, _, err = run(capsys, "profile", "toy", "--nsys", "--device", "cpu")
    assert status == 2
    assert "nsys is not installed" in err


def test_nsys_runs_the_captured_step(capsys, monkeypatch, tmp_path):
    """A stand-in for nsys notes its options and runs the command behind them."""
    program = tmp_path / "bin" / "nsys"
    program.parent.mkdir()
    program.write_text(
        '#!/bin/sh\nfor option; do case "$option" in profile|--*) echo "$option" >> "$NOTES"; shift;; *) break;; esac; '
        'done\nexec "$@"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    status, out, err = run(
        capsys,
        "profile",
        "toy",
        "--context",
        "16",
        "--nsys",
        "--device",
        "cpu",
        "--out",
        tmp_path / "reports",
    )
    assert status == 0, err
    assert "toy-b4-s16-plain-train-step-fp32.nsys-rep" in out
    options = (tmp_path / "notes").read_text().splitlines()
    assert options[0] == "profile"
    assert f"--output={tmp_path / 'reports' / 'toy-b4-s16-plain-train-step-fp32'}" in options


def test_verdicts_of_a_sweep():
    gib = 2**30
    said = verdicts(
        [
            cell("none", 170 * gib, status="oom"),
            cell("groups-1", 30 * gib, 31 * gib),
            cell("groups-2", 40 * gib, 29 * gib),
            cell("groups-16", 160 * gib, 120 * gib),
            cell("recursive", 30 * gib, status="oom"),
        ],
        140 * gib,
    )
    assert said[0] == (
        "fp32: of the single-level policies the planner chooses groups-1, but groups-2 is the measured minimum."
    )
    assert said[1] == (
        "fp32: 1 of 3 measured cells lie within 10% of their prediction; the farthest is groups-2 at 27.5%."
    )
    assert said[2:] == [
        "fp32: none is predicted to need 170.0 GiB, more than the device's 140.0 GiB, and ran out of memory.",
        "fp32: groups-16 is predicted to need 160.0 GiB, more than the device's 140.0 GiB, and ended as ok.",
        "fp32: recursive is predicted to need 30.0 GiB, no more than the device's 140.0 GiB, and ran out of memory.",
    ]


def test_verdicts_without_measurements():
    assert verdicts([], None) == []
    assert verdicts([cell("none", 1, status="oom")], None) == []
    assert "which is the measured minimum" in verdicts([cell("groups-1", 10, 10)], None)[0]


def test_an_out_of_memory_row_keeps_its_prediction():
    (found,) = cells_of([out_of_memory_row("groups-2")], "cpu")
    assert (found.policy, found.status, found.measured_bytes, found.ratio) == ("groups-2", "oom", None, None)
    assert found.predicted_bytes > 0


def test_gradient_bytes_without_a_measurement():
    assert gradient_line(get_model("toy"), "fp32", []).endswith("262656 bytes (0.25 MiB), not measured.")
