"""Bad input: one clear line that names the value, exit status 2, nothing written."""

import importlib
import inspect
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import COMMANDS, main
from benchmarks.measure.record import RunWriter, load
from tests.benchmarks.rows import row
from trainstep.attention.registry import ATTENTION
from trainstep.specs.dtype import DTYPES

ROOT = Path(__file__).resolve().parents[2]
LOCAL = ROOT / "results" / "local"


def command(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | environment,
        timeout=120,
    )


def files():
    return set(LOCAL.rglob("*")) if LOCAL.exists() else set()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["step", "huge"], "'huge'"),
        (["step", "toy", "--steps", "-3"], "-3"),
        (["step", "toy", "--steps", "0"], "steps must be at least 1, got 0"),
        (["step", "toy", "--warmup", "1,x"], "'1,x'"),
        (["step", "toy", "--dtype", "fp7"], "'fp7'"),
        (["step", "toy", "--context", "0"], "0"),
        (["step", "toy", "--target", "fastest"], "'fastest'"),
        (["attention", "--implementation", "magic"], "'magic'"),
        (["attention", "--length", "12k"], "'12k'"),
        (["attention", "--window", "8", "--no-causal"], "8"),
        (["attention", "--head-dim", "7"], "head width must be from 8 to 256, got 7"),
        (["attention", "--head-dim", "257"], "head width must be from 8 to 256, got 257"),
        (["attention", "--batch", "x"], "'x'"),
        (["step", "toy", "--heads", "32"], "head width must be from 8 to 256, got 2"),
        (["step", "toy", "--heads", "1", "--d-model", "512"], "head width must be from 8 to 256, got 512"),
        (["step", "toy", "--steps", "1e3"], "'1e3'"),
        (["step", "toy", "--target", "ours", "--device", "cpu"], "target 'ours' does not run on cpu"),
        (["memory", "toy", "--policy", "offload", "--device", "cpu"], "policy 'offload' does not run on cpu"),
        (["memory", "toy", "--steps", "0"], "steps must be at least 1, got 0"),
        (["profile", "toy", "--mode", "all"], "unknown mode 'all'"),
        (["profile", "toy", "--target", "all"], "unknown target 'all'"),
        (["plan", "--tensor", "0"], "--tensor must be at least 1, got 0"),
        (["plan", "--context-ranks", "-1"], "--context-ranks must be at least 1, got -1"),
        (["plan", "--microbatch", "0"], "--microbatch must be at least 1, got 0"),
        (["plan", "--between", "0"], "--between: a size must be at least one byte, got '0'"),
        (["gate", "--baseline", ""], "'' is neither a file nor a commit"),
        (["gate", "--baseline", "HEAD", "--current", ""], "'' is neither a file nor a commit"),
        (["collective", "--sizes", "1X"], "'1X'"),
        (["collective", "--sizes", ""], "--sizes: not a size: ''"),
        (["collective", "--sizes", "1GB:1MB:10"], "1000000000"),
        (["collective", "--sizes", "1MB:1GB:1"], "1.0"),
        (["collective", "--sizes", "1MB:1GB"], "'1MB:1GB'"),
        (["collective", "--ranks", "99"], "99"),
        (["collective", "--operation", "gossip"], "'gossip'"),
        (["parallel", "--ranks", "0"], "0"),
        (["parallel", "--variant", "magic"], "'magic'"),
        (["parallel", "--ranks", "17"], "17"),
        (["run", "--tier", "enormous"], "'enormous'"),
        (["run", "--only", "no-such-case"], "'no-such-case'"),
        (["run", "--only", "("], "'('"),
        (["run", "--samples", "0"], "0"),
        (["run", "--samples", "0"], "samples must be at least 1, got 0"),
        (["run", "--list", "--samples", "0"], "samples must be at least 1"),
        (["run", "--list", "--warmup", "-1"], "warmup must not be negative"),
        (["run", "--list", "--device", "tpu"], "'tpu'"),
        (["run", "--list", "--machine", "../away"], "'../away'"),
        (["run", "--list", "--machine", "m", "--samples", "4"], "at least 5"),
        (["run", "--list", "--source", "no/such/tree"], "'no/such/tree'"),
        (["run", "--list", "--commit", "no-such-commit"], "no-such-commit"),
        (["run", "--list", "--out", "/proc/nothing/rows.jsonl"], "/proc/nothing"),
        (["run", "--list", "--out", "/tmp"], "/tmp is a directory"),
        (["run", "--list", "--process", "-1"], "-1"),
        (["run", "--process", "-1"], "-1"),
        (["run", "--machine", "../away"], "'../away'"),
        (["run", "--source", "no/such/tree"], "'no/such/tree'"),
        (["run", "--out", "/proc/nothing/rows.jsonl"], "/proc/nothing"),
        (["fly"], "fly"),
        (["run", "--tiers", "smoke"], "--tiers"),
    ],
)
def test_bad_input(arguments, named, capsys):
    before = files()
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    lines = err.strip().splitlines()
    assert len(lines) == 1 and named in lines[0], err
    assert out == ""
    assert files() == before


@pytest.mark.parametrize("arguments", [["run"], ["step", "toy"], ["attention"], ["collective"], ["parallel"]])
def test_cuda_where_there_is_none(arguments, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([*arguments, "--device", "cuda"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.strip().count("\n") == 0 and "cuda" in err


def test_a_damaged_out_file_is_left_alone(tmp_path):
    damaged = tmp_path / "rows.jsonl"
    damaged.write_text('{"schema": 1, "case"')
    done = command("run", "--only", "attention/reference/forward/.*S256", "--out", str(damaged))
    assert done.returncode == 2 and str(damaged) in done.stderr
    assert damaged.read_text() == '{"schema": 1, "case"'


def test_the_process_answers_with_the_same_status():
    done = command("step", "huge")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)


def test_without_arguments_the_help_is_shown_and_one_line_says_why(capsys):
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert "Usage" in out and err == "error: no command given\n"


@pytest.mark.parametrize("name", ["attention", "step", "parallel", "memory", "profile", "plan"])
def test_help_lists_every_dtype_that_is_accepted(name):
    help_ = inspect.signature(getattr(importlib.import_module(f"benchmarks.commands.{name}"), name))
    (said,) = [p.annotation.__metadata__[0].help for n, p in help_.parameters.items() if n == "dtype"]
    accepted = [d for d in DTYPES if name != "attention" or any(d in row.dtypes for row in ATTENTION)]
    assert set(re.findall(r"[a-z-]+\d+", said)) == set(accepted)


def test_help_lists_every_command():
    done = command("--help")
    assert done.returncode == 0
    assert all(name in done.stdout for name in COMMANDS)


def test_an_interrupted_run_keeps_its_rows_and_resumes(tmp_path):
    """SIGINT in the middle: status 130, the rows so far on the disk, and the same command measures only the rest."""
    out = tmp_path / "rows.jsonl"
    words = [
        sys.executable,
        "-m",
        "benchmarks",
        "run",
        "--only",
        "attention/(tiled|reference|sdpa-math)/.*N4,K4,S256",
        "--samples",
        "5",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    # A group of its own, so that the signal reaches the run alone, as a terminal's Ctrl-C would.
    started = subprocess.Popen(
        [*words, "--out", str(out)], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not (out.exists() and out.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(started.pid, signal.SIGINT)
    _, err = started.communicate(timeout=60)
    first = load([out])[0]
    assert started.returncode == 130 and err == f"{len(first)} rows are kept in {out}\ninterrupted\n"
    assert 1 <= len(first) < 9
    again = subprocess.run(
        [*words, "--out", str(out)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert again.returncode == 0, again.stderr
    rows = load([out])[0]
    assert len(rows) == 9 and rows[: len(first)] == first


def test_a_file_of_another_run_is_not_shown_as_this_one(tmp_path, capsys):
    """The same cases with other options: nothing is measured, and nobody is shown the old numbers."""
    out = tmp_path / "rows.jsonl"
    words = ["run", "--only", "attention/sdpa-math/forward/.*S256", "--out", str(out)]
    assert main([*words, "--samples", "5"]) == 0
    before = out.read_text()
    assert main([*words, "--samples", "6"]) == 2
    assert "another run" in capsys.readouterr().err
    assert out.read_text() == before
    assert main([*words, "--samples", "5"]) == 0
    assert "nothing was measured" in capsys.readouterr().err
    assert main([*words, "--samples", "6", "--fresh"]) == 0
    assert out.read_text() != before


def test_an_interruption_before_the_first_row_keeps_nothing_and_says_nothing_else(
    tmp_path, capsys, monkeypatch
):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("benchmarks.runner.measure", interrupted)
    assert main([*RUN, str(tmp_path / "rows.jsonl")]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert list(tmp_path.iterdir()) == []


RUN = ["run", "--only", "attention/sdpa-math/forward/.*S256", "--out"]


@pytest.mark.parametrize(
    "arguments",
    [
        RUN,
        [*RUN[:-1], "--list", "--out"],
        [*RUN[:-1], "--fresh", "--out"],
        ["attention", "--length", "32", "--samples", "2", "--implementation", "sdpa", "--out"],
        ["step", "toy", "--context", "8", "--steps", "2", "--target", "plain", "--out"],
        ["collective", "--sizes", "1K", "--samples", "2", "--out"],
        ["parallel", "--samples", "2", "--out"],
        ["memory", "toy", "--study", "peak", "--context", "8", "--out"],
        ["plan", "--model", "toy", "--out"],
        ["plan", "--model", "toy", "--figure"],
        ["adopt"],
        ["profile", "--overlap"],
        ["gate", "--current", "HEAD", "--baseline"],
    ],
)
@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_only_regular_files_are_read_or_written(arguments, kind, tmp_path, capsys):
    place = tmp_path / ("picture.png" if "--figure" in arguments else "rows.json")
    target = place if kind == "pipe" else tmp_path / "pipe"
    os.mkfifo(target)
    if kind == "link":
        place.symlink_to(target)
    assert main([*arguments, str(place)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.endswith(f"{place} is not a regular file\n") and err.count("\n") == 1, err
    assert target.is_fifo() and place.is_symlink() == (kind == "link")


def test_one_of_several_files_that_is_in_the_way_is_seen_before_any_is_written(tmp_path, capsys):
    os.mkfifo(tmp_path / "rows-w1.jsonl")
    os.mkfifo(tmp_path / "rows-peak.jsonl")
    out = str(tmp_path / "rows.jsonl")
    assert main(["step", "toy", "--warmup", "0,1", "--steps", "1", "--out", out]) == 2
    assert "rows-w1.jsonl is not a regular file" in capsys.readouterr().err
    assert main(["memory", "toy", "--study", "checkpoint,peak", "--out", out]) == 2
    assert "rows-peak.jsonl is not a regular file" in capsys.readouterr().err
    assert len(list(tmp_path.iterdir())) == 2


def test_rows_reach_the_target_of_a_link(tmp_path):
    (tmp_path / "link.jsonl").symlink_to("rows.jsonl")
    assert main([*RUN, str(tmp_path / "link.jsonl"), "--samples", "5"]) == 0
    assert (tmp_path / "link.jsonl").is_symlink() and len(load([tmp_path / "rows.jsonl"])[0]) == 1
    assert main([*RUN, str(tmp_path / "link.jsonl"), "--samples", "6", "--fresh"]) == 0
    assert (tmp_path / "link.jsonl").is_symlink() and len(load([tmp_path / "rows.jsonl"])[0]) == 1


def test_a_file_that_another_process_is_writing_is_refused(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    other = RunWriter.to_file(out)
    other.add(row())
    before = out.read_text()
    for fresh in ([], ["--fresh"]):
        assert main([*RUN, str(out), *fresh]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and "another process is writing" in err and str(out) in err
    assert out.read_text() == before
    other.close()


def test_fresh_never_removes_a_file_that_holds_no_rows(tmp_path, capsys):
    precious = tmp_path / "precious.md"
    precious.write_text("not rows")
    words = ["run", "--fresh", "--only", "attention/sdpa-math/forward/.*S256", "--out", str(precious)]
    assert main(words) == 2 and precious.read_text() == "not rows"
    assert main([*words[:-1], str(tmp_path)]) == 2


def test_a_published_row_has_five_samples(capsys):
    assert main(["run", "--only", "attention/sdpa-math", "--machine", "m", "--samples", "4"]) == 2
    assert "at least 5" in capsys.readouterr().err


def test_a_damaged_side_of_the_gate_is_named(tmp_path, capsys):
    bad = tmp_path / "rows.jsonl"
    bad.write_text("{")
    assert main(["gate", "--baseline", str(bad), "--current", str(bad)]) == 2
    assert str(bad) in capsys.readouterr().err
