"""`report`: reads every kind of result, names damaged files, writes the page whole or not at all."""

import json
import subprocess
import sys

import pytest

from benchmarks.cases import every_case
from benchmarks.commands import report as command
from benchmarks.commands.report import collect, first_parents, make_report
from benchmarks.measure import record
from benchmarks.measure.record import RunWriter, load
from benchmarks.report.facts import latest
from tests.report.synthetic import CPU_ENV, GPU_ENV, REGRESSED, all_rows, row, work


def git(root, *arguments):
    author = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.invalid"]
    done = subprocess.run(
        ["git", "-C", str(root), *author, *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    """A repository whose third commit of four is slower, with records of five processes each."""
    root = tmp_path / "checkout"
    root.mkdir()
    git(root, "init", "-q", "-b", "main")
    for number, subject in enumerate(["one", "two", "slow <b>", "four"]):
        git(root, "commit", "-q", "--allow-empty", "-m", subject, "--date", f"2026-01-0{9 - number}T00:00:00")
    for number, commit in enumerate(git(root, "rev-list", "--reverse", "main").split()):
        writer = RunWriter(root / "results" / "records" / "cpu-2core" / commit, f"run-{number}")
        for process in range(5):
            seconds = 0.01 * (2 if number >= 2 else 1)
            env = CPU_ENV | {"process": process}
            writer.add(row(REGRESSED, seconds, commit=commit, run=f"run-{number}", env=env))
    return root


def test_the_page_names_the_slow_commit(checkout, tmp_path):
    index = make_report(checkout, tmp_path / "out")
    assert index == tmp_path / "out" / "index.html"
    page = index.read_text()
    slow = git(checkout, "rev-parse", "main~1")[:8]
    assert "1 regression" in page and f"<b>{slow} slow &lt;b&gt;</b>" in page
    assert [path.name for path in index.parent.iterdir()] == ["index.html"]  # nothing half-written beside it


def test_first_parents_are_oldest_first_whatever_the_dates(checkout):
    git(checkout, "checkout", "-q", "-b", "side", "main~2")
    git(checkout, "commit", "-q", "--allow-empty", "-m", "on a side branch")
    git(checkout, "checkout", "-q", "main")
    git(checkout, "merge", "-q", "--no-ff", "-m", "merged", "side")
    assert [commit.subject for commit in first_parents(checkout)] == [
        "one",
        "two",
        "slow <b>",
        "four",
        "merged",
    ]


def test_no_git_no_history(tmp_path):
    assert first_parents(tmp_path) == []


def test_damaged_files_are_named_on_the_page_and_on_stderr(checkout, tmp_path, capsys):
    folder = checkout / "results" / "records" / "cpu-2core" / "bad"
    folder.mkdir()
    (folder / "x.jsonl").write_text('{"case": NaN}\n')
    before = (folder / "x.jsonl").read_bytes()
    page = make_report(checkout, tmp_path / "out").read_text()
    said = capsys.readouterr().err
    for text in (page, said):
        assert "results/records/cpu-2core/bad/x.jsonl" in text
    assert "1 damaged result file, skipped" in page and said.startswith("warning: results/")
    assert str(checkout) not in page  # where the checkout lies is nobody's business
    assert (folder / "x.jsonl").read_bytes() == before


@pytest.mark.parametrize("seconds", [1e-300, 1e308])
def test_a_row_of_impossible_numbers_does_not_take_the_page_with_it(checkout, tmp_path, seconds, capsys):
    place = checkout / "results" / "local" / "no-commit" / "x.jsonl"
    record.write_atomically(place, record.to_line(row(REGRESSED, seconds, noise=0, metrics=work(flops=1e12))))
    assert "results/local/no-commit/x.jsonl" in make_report(checkout, tmp_path / "out").read_text()
    assert "results/local/no-commit/x.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("number", [record.LARGEST, record.LARGEST / 1e6, 1e-300, -record.LARGEST])
@pytest.mark.parametrize("seconds", [record.LARGEST, record.SHORTEST_SECONDS])
def test_the_page_shows_whatever_a_record_may_hold(checkout, tmp_path, number, seconds):
    """Also at the limits nothing overflows in a rate, a ratio, a mean or a picture."""
    writer = RunWriter(checkout / "results" / "local" / "no-commit", "r")
    for one in all_rows():
        if one.status == "ok" and one.suite == "run":
            metrics = {name: {**m, "value": number} for name, m in one.metrics.items() if m["unit"] != "s"}
            env = CPU_ENV if one.case.startswith("step") else GPU_ENV
            ours = seconds if "torch" in one.case else one.samples_seconds[0] if one.samples_seconds else None
            writer.add(row(one.case, ours, noise=0, metrics=metrics, env=env, run="r", machine="local"))
    writer.close()
    assert load([writer.path])[1] == []
    make_report(checkout, tmp_path / "out", file_format="csv")


def test_asv_s_results_need_git(tmp_path):
    with pytest.raises(ValueError, match="results are of commits, and git knows none here"):
        make_report(tmp_path, tmp_path / "out", file_format="asv")
    assert not (tmp_path / "out").exists()


def test_asv_s_results_hold_cases_of_every_tier_and_name_what_they_leave_out(checkout, tmp_path, capsys):
    pytest.importorskip("asv", reason="asv is not installed")
    large = next(case for case in every_case() if case.tier == "full" and case.area == "attention")
    commit = git(checkout, "rev-parse", "main")
    writer = RunWriter(checkout / "results" / "records" / "h200" / commit, "run")
    for case in (large.id, "attention/gone/forward/B1,S64,fp32,w1"):
        writer.add(row(case, 0.5, commit=commit, run="run", machine="h200", version=large.version))
    make_report(checkout, tmp_path / "out", machine="h200", file_format="asv")
    (stored,) = (path for path in (checkout / "results" / "asv" / "h200").glob(f"{commit[:8]}-*.json"))
    assert large.target in stored.read_text()
    assert "1 of 2 rows are not among asv's results" in capsys.readouterr().err


def test_one_machine(checkout, tmp_path):
    writer = RunWriter(checkout / "results" / "local" / "no-commit", "run")
    writer.add(row("step/plain/forward/toy,B4,S8,fp32,w1", 1.0, machine="local", commit=None))
    assert "<h1>cpu-2core</h1>" in make_report(checkout, tmp_path / "all").read_text()
    page = make_report(checkout, tmp_path / "one", machine="local").read_text()
    assert "<h1>local</h1>" in page and "cpu-2core" not in page


def test_unknown_machine_and_format_write_nothing(checkout, tmp_path):
    with pytest.raises(ValueError, match="no results of machine 'x'; there are: cpu-2core"):
        make_report(checkout, tmp_path / "out", machine="x")
    with pytest.raises(ValueError, match="unknown format 'docx'; known: md, tex, typ, csv, png, svg"):
        make_report(checkout, tmp_path / "out", file_format="docx")
    assert not (tmp_path / "out").exists()


def test_a_place_that_cannot_be_written_is_refused_before_any_work(checkout, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    (tmp_path / "taken" / "index.html").mkdir(parents=True)
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "tables").write_text("")
    monkeypatch.setattr(
        command, "collect", lambda results: pytest.fail("worked before the place was checked")
    )
    for place, file_format in (("file", None), ("file/below", None), ("taken", None), ("half", "md")):
        with pytest.raises(ValueError, match=r"cannot write|is a directory"):
            make_report(checkout, tmp_path / place, file_format=file_format)
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith(".part")]


@pytest.fixture
def local_results(tmp_path):
    writer = RunWriter(tmp_path / "results" / "local" / "no-commit", "run")
    for one in all_rows():
        if one.case.startswith(("step/", "data_parallel/")):
            writer.add(one)
    return tmp_path


def test_tables_as_files_without_drawing(local_results, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # importing it would fail
    out = local_results / "out"
    make_report(local_results, out, file_format="csv")
    assert sorted(path.name for path in out.iterdir()) == ["index.html", "tables"]
    tables = {path.name for path in (out / "tables").iterdir()}
    assert {"cpu-2core-steps.csv", "cpu-2core-parallel.csv", "cpu-2core-headline.csv"} <= tables
    text = (out / "tables" / "cpu-2core-steps.csv").read_text()
    assert text.startswith("implementation,phase,parameters,part,")


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_figures_as_files(local_results, kind):
    out = local_results / "out"
    make_report(local_results, out, file_format=kind)
    assert sorted(path.name for path in out.iterdir()) == ["figures", "index.html"]
    figures = sorted(path.name for path in (out / "figures").iterdir())
    assert figures == [
        f"cpu-2core-data-parallel-train-step-toy-b4-s128-fp32-w2.{kind}",
        f"cpu-2core-step-toy-b4-s128-fp32-w1.{kind}",
    ]


def test_asv_results_are_read_and_its_configuration_is_no_damage(tmp_path):
    local = tmp_path / "results" / "local"
    (local / "asv" / "m").mkdir(parents=True)
    (local / "asv.conf.json").write_text("{}")
    (local / "asv" / "benchmarks.json").write_text("{}")
    (local / "asv" / "m" / "machine.json").write_text("{}")
    stored = {
        "commit_hash": "1" * 40, "python": "3.11", "requirements": {}, "params": {"machine": "m"},
        "result_columns": ["result", "params", "version", "started_at", "samples"],
        "results": {"bench_attention.Forward.sampled": [
            [0.5, float("nan")], [["'reference'", "'nobody'"], ["'B1,N1,K1,S8,T8,H8,causal,fp32,w1'"]],
            "1", 0, [[0.5, 0.6], None],
        ]},
    }  # fmt: skip
    (local / "asv" / "m" / "x.json").write_text(json.dumps(stored))
    rows, damaged = collect(tmp_path / "results")
    assert damaged == []
    # asv says n/a for pairs of its parameters that no case has: they are nobody's rows.
    assert [(f.target, f.row.samples_seconds) for f in latest(rows)] == [("reference", (0.5, 0.6))]


def test_no_results_at_all(tmp_path):
    assert "Nothing has been measured yet." in make_report(tmp_path, tmp_path / "out").read_text()
