"""Exports, read back by the tools themselves and by our loader (field cases R1, B5)."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.cases.case import Case
from benchmarks.commands.report import collect
from benchmarks.export import asv_benchmarks, exported, to_asv, to_pytest_benchmark
from benchmarks.measure.record import AGAIN, load
from tests.benchmarks.rows import CPU, A, row

pytest_plugins = ["tests.benchmarks.scratch"]


def case(target, length, phase="forward_backward", **fields):
    return Case(area="attention", target=target, phase=phase, shape={"S": length}, dtype="fp32", **fields)


CASES = [
    case("tiled", 256),
    case("tiled", 1024),
    case("reference", 256),
    case("reference", 256, "forward", version=3),
]
ENV = {**CPU, "os": "Linux 6", "arch": "x86_64", "cpu_count": 2, "pytest_benchmark": "5.3.1"}


def name(each):
    return f"bench_{each.area}.{each.phase.title().replace('_', '')}.sampled", (each.target, each.parameters)


def measured(commit, factor=1.0, **fields):
    """Every kind of row: ok in two processes, one sample, time zero, skipped, out of memory, error."""
    common = {"commit": commit, "env": ENV, **fields}
    seconds = [0.010 * factor * (1 + 0.001 * i) for i in range(10)]
    return [
        row(CASES[0].id, seconds, process=0, **common),
        row(CASES[0].id, seconds, process=1, **common),
        row(CASES[1].id, status="oom", **common),
        row(CASES[2].id, status="skipped", **common),
        row(CASES[3].id, (0.5,), version=3, **common),
    ]


@pytest.fixture
def history(scratch):
    commits = [scratch.commit({"src/a.py": str(i)}, date=f"2026-01-0{i + 1}T00:00:00Z") for i in range(2)]
    return scratch, commits


def export(scratch, rows):
    return to_asv(rows, scratch.root / "results" / "asv", cases=CASES, asv_name=name, root=scratch.root)


def test_asv_keeps_samples_statistics_and_kinds_of_absence(history):
    scratch, commits = history
    (path,), left = export(scratch, measured(commits[0]))
    assert left == []
    stored = json.loads(path.read_text())
    assert stored["commit_hash"] == commits[0] and stored["params"]["machine"] == "box"
    assert stored["date"] == 1767225600000
    columns = stored["result_columns"]
    both = dict(zip(columns, stored["results"]["bench_attention.ForwardBackward.sampled"], strict=False))
    assert both["params"] == [["'tiled'", "'reference'"], ["'S256,fp32,w1'", "'S1024,fp32,w1'"]], (
        "the cases' order"
    )
    ok, oom, skipped, unmeasured = both["result"]
    assert ok == pytest.approx(0.010045) and oom is None and math.isnan(skipped) and math.isnan(unmeasured)
    assert len(both["samples"][0]) == 20 and both["stats_repeat"][0] == 20
    one = dict(zip(columns, stored["results"]["bench_attention.Forward.sampled"], strict=False))
    assert one["result"] == [0.5] and one.get("stats_ci_99_a") is None, "one sample has no interval"
    assert "Infinity" not in path.read_text()
    # Our own loader reads what was written.
    rows, problems = load([path])
    back = {(r.case, r.status) for r in rows}
    assert not problems and (CASES[0].id, "ok") in back and (CASES[1].id, "error") in back
    assert (CASES[2].id, "skipped") in back and (CASES[3].id, "ok") in back
    assert {r.version for r in rows if r.case == CASES[3].id} == {3}


def test_what_was_exported_is_no_second_result(history):
    scratch, commits = history
    (path,), _ = export(scratch, measured(commits[0]))
    rows, _ = load([path])
    assert rows and all(map(exported, rows))
    assert collect(scratch.root / "results") == ([], [])


def test_exporting_again_changes_nothing(history):
    scratch, commits = history
    (path,), _ = export(scratch, measured(commits[0]))
    files = {p: p.read_bytes() for p in path.parents[1].rglob("*.json")}
    export(scratch, measured(commits[0]))
    assert {p: p.read_bytes() for p in path.parents[1].rglob("*.json")} == files and len(files) == 3


def test_rows_without_a_place_are_returned(history):
    scratch, commits = history
    bad = [
        row(CASES[0].id, commit=None, env=ENV),
        row(CASES[0].id, commit=commits[0], env=ENV, dirty=True),
        row(CASES[0].id, commit=commits[0], env=ENV, version=2),
        row(CASES[0].id, commit=commits[0], env=ENV, suite="asv"),
        row("attention/gone/forward/S1,fp32,w1", commit=commits[0], env=ENV),
    ]
    assert export(scratch, bad) == ([], bad)
    assert not (scratch.root / "results").exists()


def test_other_circumstances_go_to_another_file(history):
    scratch, commits = history
    rows = measured(commits[0]) + measured(commits[0], env={**ENV, "gpu": "A/B <x>", "device": "cuda"})
    rows += measured(commits[0], env={**ENV, "cpu": "other"})
    paths, _ = export(scratch, rows)
    assert len(set(paths)) == 3 and all(p.exists() and p.parent.name == "box" for p in paths)


def test_asvs_own_list_is_kept(history):
    scratch, commits = history
    path = scratch.root / "results" / "asv" / "benchmarks.json"
    path.parent.mkdir(parents=True)
    mine = "bench_attention.Forward.sampled"
    path.write_text(
        json.dumps(
            {"other.time_x": {"name": "other.time_x"}, mine: {"code": "def", "version": "1"}, "version": 2}
        )
    )
    export(scratch, measured(commits[0]))
    found = json.loads(path.read_text())
    assert found["other.time_x"] == {"name": "other.time_x"} and found["version"] == 2
    assert found[mine]["code"] == "def" and found[mine]["version"] == "3"
    path.write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        export(scratch, measured(commits[0]))


def asv(scratch, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "asv", *arguments],
        cwd=scratch.root,
        env={**scratch.env, "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
        capture_output=True,
        text=True,
    )


def test_asv_compare_and_publish_accept_the_files(history):
    pytest.importorskip("asv", reason="asv is not installed")
    scratch, commits = history
    export(scratch, measured(commits[0]) + measured(commits[1], factor=2.0))
    config = {
        "version": 1,
        "project": "p",
        "project_url": "https://example.invalid",
        "repo": ".",
        "branches": ["main"],
    }
    config |= {
        "results_dir": "results/asv",
        "html_dir": "html",
        "environment_type": "virtualenv",
        "benchmark_dir": "b",
    }
    scratch.write("asv.conf.json", json.dumps(config))
    scratch.write("b/__init__.py", "")
    compared = asv(scratch, "compare", "--machine", "box", *commits)
    assert compared.returncode == 0, compared.stderr
    (line,) = [li for li in compared.stdout.splitlines() if "'tiled', 'S256" in li or "tiled, S256" in li]
    assert "2.00" in line and line.lstrip("| ").startswith("+")
    published = asv(scratch, "publish")
    assert published.returncode == 0, published.stdout + published.stderr
    (graph,) = (scratch.root / "html" / "graphs" / "arch-x86_64").rglob(
        "bench_attention.ForwardBackward.sampled.json"
    )
    # One curve a parameter combination: (tiled, S256) is the first.
    points = json.loads(graph.read_text())
    assert [p[1][0] for p in points] == [pytest.approx(0.010045, rel=1e-3), pytest.approx(0.02009, rel=1e-3)]


def test_the_live_suite_names_the_same_benchmarks():
    """What `asv run` stores and what is exported must be one series."""
    cases = pytest.importorskip("benchmarks.cases")
    from benchmarks.suite import ASV_TIERS, asv_name, suite

    for area in cases.AREAS:
        chosen = [c for c in cases.select(area=area) if c.tier in ASV_TIERS]
        entries = asv_benchmarks(chosen, asv_name)
        for phase, benchmark in suite(area).items():
            entry = entries[f"bench_{area}.{phase}.sampled"]
            assert entry["params"] == [[repr(p) for p in values] for values in benchmark.params]
            assert entry["version"] == benchmark.version
            assert entry["param_names"] == list(benchmark.param_names)
        assert len(entries) == len(suite(area))


def strict(path: Path):
    def refuse(word):
        raise AssertionError(word)

    return json.loads(path.read_text(), parse_constant=refuse)


def test_pytest_benchmark_file(tmp_path):
    rows = [
        *measured(A),
        row(CASES[2].id, (0.0, 0.0), commit=A, env=ENV),
        row("a/b/c/S1,fp32,w1", status="error", commit=A, env=ENV),
    ]
    absent = to_pytest_benchmark(rows, tmp_path / "0001_x.json")
    assert [r.status for r in absent] == ["oom", "error"]
    stored = strict(tmp_path / "0001_x.json")
    stats = {b["extra_info"]["case"]: b["stats"] for b in stored["benchmarks"]}
    assert stats[CASES[0].id]["rounds"] == 20 and stats[CASES[0].id]["min"] == 0.01
    assert stats[CASES[3].id]["stddev"] is None and stats[CASES[3].id]["median"] == 0.5, (
        "one sample: no spread"
    )
    assert stats[CASES[2].id]["ops"] is None, "no rate at time zero"
    assert [(n["status"], n["reason"]) for n in stored["not_measured"]] == [
        ("oom", "for the test"),
        ("error", "for the test"),
    ]
    back, problems = load([tmp_path])
    assert not problems and {r.case: len(r.samples_seconds) for r in back} == {
        CASES[0].id: 20,
        CASES[3].id: 1,
        CASES[2].id: 2,
    }
    assert back[0].commit == A and back[0].env["torch"] == ENV["torch"]


def test_what_the_gate_measured_again_is_in_no_export(tmp_path, scratch):
    rows = [row(seconds=(1.0, 1.1)), row(seconds=(9.0, 9.1), suite=AGAIN)]
    to_pytest_benchmark(rows, tmp_path / "b.json")
    (entry,) = strict(tmp_path / "b.json")["benchmarks"]
    assert entry["stats"]["data"] == [1.0, 1.1]
    assert export(scratch, rows[1:]) == ([], rows[1:])


def test_pytest_benchmark_compares_the_files(tmp_path):
    pytest.importorskip("pytest_benchmark", reason="pytest-benchmark is not installed")
    for number, factor in ((1, 1.0), (2, 2.0)):
        rows = [r for r in measured(A, factor) if len(r.samples_seconds) != 1]
        to_pytest_benchmark(rows, tmp_path / f"000{number}_x.json")
    done = subprocess.run(
        [sys.executable, "-m", "pytest_benchmark", "compare", "--columns=median,stddev", *map(str,
        sorted(tmp_path.glob("*.json")))], capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and "(2.00)" in done.stdout, done.stdout + done.stderr


def test_statistics_are_those_of_pytest_benchmark():
    stats_module = pytest.importorskip("pytest_benchmark.stats", reason="pytest-benchmark is not installed")
    from benchmarks.export import _pytest_stats

    samples = [5.0, 1.0, 2.0, 2.5, 3.0, 2.0, 30.0]
    theirs = stats_module.Stats()
    for sample in samples:
        theirs.update(sample)
    for field in ("min", "max", "mean", "stddev", "rounds", "median", "ops", "total", "stddev_outliers"):
        assert _pytest_stats(samples)[field] == pytest.approx(getattr(theirs, field)), field


def test_a_file_is_of_one_machine_and_commit(tmp_path):
    for rows in ([], [row(), row(machine="other")]):
        with pytest.raises(ValueError, match="one machine"):
            to_pytest_benchmark(rows, tmp_path / "x.json")
    assert list(tmp_path.iterdir()) == []
