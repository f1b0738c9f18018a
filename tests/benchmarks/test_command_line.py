"""Bad input: one clear line that names the value, exit status 2, nothing written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import COMMANDS, main

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
        (["step", "toy", "--warmup", "1,x"], "'1,x'"),
        (["step", "toy", "--dtype", "fp7"], "'fp7'"),
        (["step", "toy", "--context", "0"], "0"),
        (["step", "toy", "--target", "fastest"], "'fastest'"),
        (["attention", "--implementation", "magic"], "'magic'"),
        (["attention", "--length", "12k"], "'12k'"),
        (["attention", "--window", "8", "--no-causal"], "8"),
        (["attention", "--head-dim", "0"], "0"),
        (["collective", "--sizes", "1X"], "'1X'"),
        (["collective", "--sizes", ""], "''"),
        (["collective", "--ranks", "99"], "99"),
        (["collective", "--operation", "gossip"], "'gossip'"),
        (["parallel", "--ranks", "0"], "0"),
        (["parallel", "--variant", "magic"], "'magic'"),
        (["parallel", "--ranks", "17"], "17"),
        (["run", "--tier", "enormous"], "'enormous'"),
        (["run", "--only", "no-such-case"], "'no-such-case'"),
        (["run", "--only", "("], "'('"),
        (["run", "--samples", "0"], "0"),
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


def test_help_lists_every_command():
    done = command("--help")
    assert done.returncode == 0
    assert all(name in done.stdout for name in COMMANDS)
