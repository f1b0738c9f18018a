"""A new attention implementation, and a new data-parallel variant, is its own file and one registry row."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

RIGHT = '''"""Attention as one einsum after another."""

import torch


def attention(q, k, v, *, causal=False, window=None, scale=None, alignment="bottom-right", return_lse=False):
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        rows, columns = scores.shape[-2:]
        hidden = torch.ones(rows, columns, dtype=torch.bool, device=q.device).triu(1 + columns - rows)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(-1) @ v
'''
ATTENTION_ROW = """ATTENTION += (
    AttentionRow(name="mine", target="trainstep.attention.mine:attention", grouped_query=False, window=False, lse=False),
)
"""
VARIANT = '''"""Data parallelism with one all-reduce for each parameter, last parameter first."""

from trainstep.parallel.data.protocol import DataParallel


class Backwards(DataParallel):
    """Reduces the parameters in reverse order."""

    def _reduce_gradients(self):
        for parameter in reversed(self._trainable):
            gradient = self._take(parameter)
            self._all_reduce(gradient).wait()
            self._give(parameter, gradient)
'''
VARIANT_ROW = """DATA_PARALLEL += (DataParallelRow(name="mine", target="trainstep.parallel.data.mine:Backwards"),)
"""


@pytest.fixture
def copy(tmp_path):
    """A copy of the tree without results or history."""
    for name in ("src", "benchmarks", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "conftest.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def python(copy, *arguments):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=copy,
        capture_output=True,
        text=True,
        env=environment,
        timeout=280,
    )


def add(copy, file, text, registry, row):
    (copy / "src/trainstep" / file).write_text(text)
    path = copy / "src/trainstep" / registry
    # Appending keeps the test independent of the table's rows; a contributor writes the row inside it.
    path.write_text(path.read_text() + "\n\n" + row)


def test_an_attention_implementation_is_two_files(copy):
    add(copy, "attention/mine.py", RIGHT, "attention/registry.py", ATTENTION_ROW)
    listed = python(copy, "benchmarks", "run", "--list", "--tier", "full", "--only", "attention/mine/")
    assert listed.stdout.count("attention/mine/forward/") > 10
    measured = python(
        copy, "benchmarks", "attention", "--implementation", "mine", "--length", "64", "--samples", "5"
    )
    assert measured.returncode == 0, measured.stderr
    assert "mine" in measured.stdout
    guarded = python(copy, "pytest", "tests/test_registries.py", "-q", "-k", "mine")
    assert guarded.returncode == 0 and "2 passed" in guarded.stdout, guarded.stdout


def test_a_wrong_implementation_gets_no_speed(copy):
    wrong = RIGHT.replace("triu(1 +", "triu(2 +")  # sees one key too many
    add(copy, "attention/mine.py", wrong, "attention/registry.py", ATTENTION_ROW)
    measured = python(
        copy, "benchmarks", "attention", "--implementation", "mine", "--length", "64", "--samples", "5"
    )
    assert measured.returncode == 11
    assert "red" in measured.stdout and "differs from the reference" in measured.stdout
    guarded = python(copy, "pytest", "tests/test_registries.py", "-q", "-k", "mine")
    assert guarded.returncode == 1 and "1 failed, 1 passed" in guarded.stdout


def test_a_data_parallel_variant_is_two_files(copy):
    add(copy, "parallel/data/mine.py", VARIANT, "parallel/registry.py", VARIANT_ROW)
    measured = python(
        copy, "benchmarks", "parallel", "--variant", "mine", "--context", "32", "--samples", "5"
    )
    assert measured.returncode == 0, measured.stderr
    assert "mine" in measured.stdout
    guarded = python(copy, "pytest", "tests/test_registries.py", "-q", "-k", "mine")
    assert guarded.returncode == 0 and "2 passed" in guarded.stdout, guarded.stdout
