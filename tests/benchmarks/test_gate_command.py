"""The gate as a command: sides by file and by commit, its exit status, what it prints."""

import pytest

from benchmarks.commands import gate as command
from benchmarks.measure.provenance import tree_sha256
from benchmarks.measure.record import STUDY, RunWriter, destination
from tests.benchmarks.rows import CPU
from tests.benchmarks.test_gate import ONE, TWO, side

pytest_plugins = ["tests.benchmarks.scratch"]


@pytest.fixture
def repository(scratch, monkeypatch):
    """Five commits, the last of text only, in the repository that the command works on."""
    monkeypatch.setattr(command, "ROOT", scratch.root)
    monkeypatch.setattr(command, "_device_here", lambda row: None)
    monkeypatch.setenv("COLUMNS", "300")
    commits = [
        scratch.commit({"src/a.py": str(i), "benchmarks/b.py": ""}, f"commit {i} [bold]<b>") for i in range(4)
    ]
    commits.append(scratch.commit({"README": "text"}))
    return scratch, commits


def file_rows(scratch, commit, values, machine=None, run="run-1", **fields):
    writer = RunWriter(destination(machine, commit, scratch.root / "results"), run)
    for each in side(values, commit=commit, machine=machine or "local", **fields):
        writer.add(each)
    return writer.path


def run(capsys, *positional, **options):
    status = command.gate(*positional, **options)
    out = capsys.readouterr()
    return status, out.out, out.err


def test_two_commits(repository, capsys):
    scratch, commits = repository
    for commit, value in zip(commits, (1.0, 1.0, 1.2, 1.2), strict=False):
        file_rows(scratch, commit, {ONE: value, TWO: 1.0}, "box")
    status, out, _ = run(capsys, "HEAD~2", "HEAD~1", machine="box")
    assert status == 13 and f"since {commits[2][:10]} 'commit 2 [bold]<b>'" in out
    assert out.splitlines()[-1].endswith("not measured again; exit status 13")
    assert run(capsys, "HEAD~3", "HEAD~3", machine="box")[0] == 0


@pytest.mark.parametrize("back", [1, 2, 3, 20])
def test_a_baseline_older_than_the_window_is_looked_back_to(repository, capsys, back):
    scratch, commits = repository
    commits.append(scratch.commit({"src/a.py": "4"}))
    for commit, value in zip(commits, (1.0, 2.0, 2.0, 2.0, None, 2.0), strict=True):
        if value is not None:
            file_rows(scratch, commit, {ONE: value})
    status, out, _ = run(capsys, commits[0], history=back)
    assert status == 13 and f"since {commits[1][:10]} 'commit 1" in out


def test_a_baseline_on_another_branch_names_nobody(repository, capsys):
    scratch, commits = repository
    scratch.git("checkout", "-q", "-b", "side", commits[0])
    aside = scratch.commit({"src/b.py": "aside"})
    scratch.git("checkout", "-q", "main")
    for commit, value in zip((aside, *commits[1:4]), (1.0, 2.0, 2.0, 2.0), strict=True):
        file_rows(scratch, commit, {ONE: value})
    status, out, _ = run(capsys, "side")
    assert status == 13 and "not known: no earlier result" in out
    assert not any(f"since {commit[:10]}" in out for commit in commits)


@pytest.mark.parametrize("back", [1, 2, 20])
def test_a_current_commit_older_than_the_baseline(repository, capsys, back):
    scratch, commits = repository
    for commit, value in ((commits[2], 2.0), (commits[3], 1.0)):
        file_rows(scratch, commit, {ONE: value})
    status, out, _ = run(capsys, commits[3], commits[2], history=back)
    assert status == 13 and "not known: no earlier result" in out and "older than the baseline" in out
    assert "older than" not in run(capsys, commits[2], commits[3], history=back)[1]
    file_rows(scratch, commits[0], {ONE: 1.0})  # what came before it tells since when
    status, out, _ = run(capsys, commits[3], commits[2], history=2)
    assert f"since {commits[1][:10]}..{commits[2][:10]} (2 commits)" in out


def test_the_default_is_head_and_a_commit_of_text_has_the_results_before_it(repository, capsys):
    scratch, commits = repository
    file_rows(scratch, commits[2], {ONE: 1.0})
    file_rows(scratch, commits[3], {ONE: 2.0})
    status, out, _ = run(capsys, commits[2], history=0)
    assert status == 13 and "HEAD" in out


def test_equal_trees_have_the_same_rows_whichever_was_measured(repository, capsys):
    scratch, commits = repository
    file_rows(scratch, commits[4], {ONE: 2.0, TWO: 1.0}, "box")  # text alone was changed by this one
    assert run(capsys, "HEAD~1", machine="box")[0] == run(capsys, "HEAD", "HEAD~1", machine="box")[0] == 0
    file_rows(scratch, commits[2], {ONE: 1.0, TWO: 1.0}, "box")
    status, out, _ = run(capsys, "HEAD~2", machine="box")
    assert status == 13 and f"since {commits[3][:10]} 'commit 3" in out, "a change of text is not to blame"
    # What was measured at neither of its twins only is not missing.
    file_rows(scratch, commits[3], {ONE: 2.0}, "box")
    status, out, _ = run(capsys, "HEAD~2", "HEAD~1", machine="box")
    assert status == 13 and "1 regressed, 1 unchanged" in out
    file_rows(scratch, commits[3], {TWO: 2.0}, "box", run="dirty", dirty=True)
    assert run(capsys, "HEAD~2", "HEAD~1", machine="box")[1] == out


def test_a_revert_has_the_rows_of_what_it_went_back_to(repository, capsys):
    """`adopt` files them under the oldest commit."""
    scratch, commits = repository
    commits.append(scratch.commit({"src/a.py": "2"}, "revert"))
    for commit, value in ((commits[2], 2.0), (commits[3], 1.0)):
        file_rows(scratch, commit, {ONE: value})
    status, out, _ = run(capsys, commits[3])
    assert status == 13 and f"since {commits[4][:10]}..{commits[5][:10]}" not in out
    assert f"since {commits[5][:10]} 'revert'" in out
    assert run(capsys, commits[2], commits[5])[0] == 13 and run(capsys, "HEAD", "HEAD~1")[0] == 0


def test_without_results_nothing_is_collected(repository, capsys):
    scratch, commits = repository
    file_rows(scratch, commits[3], {ONE: 1.0}, "box")
    assert run(capsys, "HEAD~3", machine="box")[0] == 10
    assert run(capsys, "HEAD~1", "HEAD~3", machine="box")[0] == 10
    assert run(capsys, "HEAD~1", "HEAD~1")[0] == 10, "another machine's results are not local ones"


def test_dirty_rows_are_of_no_commit(repository, capsys):
    scratch, commits = repository
    file_rows(scratch, commits[2], {ONE: 1.0})
    file_rows(scratch, commits[3], {ONE: 2.0}, dirty=True)
    assert run(capsys, commits[2], commits[3])[0] == 10


@pytest.mark.parametrize(
    ("before", "clean", "words"),
    [
        (2.0, 1.0, "since the work tree"),
        (1.0, 1.0, "since the work tree"),
        (1.0, 2.0, "since {first}..{last} (3 commits)"),
    ],
    ids=["best-is-head", "head-is-fast", "head-is-slow"],
)
def test_a_work_tree_leaves_its_commit_the_rows_it_has(repository, capsys, tmp_path, before, clean, words):
    scratch, commits = repository
    file_rows(scratch, commits[0], {ONE: before})
    file_rows(scratch, commits[3], {ONE: clean})
    writer = RunWriter.to_file(tmp_path / "tree.jsonl")
    for each in side({ONE: 2.0}, commit=commits[3], machine="local", dirty=True):
        writer.add(each)
    writer.close()
    status, out, _ = run(capsys, commits[0], str(tmp_path / "tree.jsonl"), remeasure=False)
    assert status == 13 and words.format(first=commits[1][:10], last=commits[3][:10]) in out


def test_files_and_directories(repository, capsys, tmp_path):
    scratch, commits = repository
    old = file_rows(scratch, commits[0], {ONE: 1.0, TWO: 1.0})
    new = file_rows(scratch, commits[1], {ONE: 1.0})
    assert run(capsys, str(old), str(new))[0] == 12
    assert run(capsys, str(old), str(new), allow_missing="two")[0] == 0
    assert run(capsys, str(old.parent), str(old))[0] == 0
    with pytest.raises(ValueError, match="2 commits"):
        command.gate(str(old.parent.parent), str(new))


def test_studies_are_compared_with_nothing(repository, capsys):
    """Profiled at one commit and not at the next, nothing is missing."""
    scratch, commits = repository
    old, new = (file_rows(scratch, commit, {ONE: 1.0}) for commit in commits[:2])
    file_rows(scratch, commits[0], {TWO: 1.0}, suite=STUDY, run="profile-1")
    status, out, _ = run(capsys, str(old.parent), str(new.parent))
    assert status == 0 and "missing" not in out


@pytest.mark.parametrize("by_commit", [True, False])
def test_a_damaged_file_is_named_once_and_passes_on_neither_side(repository, capsys, by_commit):
    """Its case, slower now, would be new; the rest is compared."""
    scratch, commits = repository
    old, new = (file_rows(scratch, commit, {ONE: 1.0}) for commit in commits[:2])
    (new.parent / "bad.jsonl").write_text("{")
    names = commits[:2] if by_commit else (str(old.parent), str(new.parent))
    for sides in (names, names[::-1]):
        status, out, err = run(capsys, *sides)
        assert status == 14 and "1 unchanged, 1 not comparable" in out
        assert err.count("bad.jsonl") == 1 and err.count("\n") == 1 and "damaged" in err
    assert run(capsys, commits[0], commits[0])[0] == 0


def test_a_damaged_file_hides_no_regression(repository, capsys):
    scratch, commits = repository
    old, new = (
        file_rows(scratch, commit, {ONE: level}) for commit, level in zip(commits, (1, 9), strict=False)
    )
    bad = old.with_name("bad.jsonl")
    bad.write_text("{")
    assert run(capsys, str(old.parent), str(new))[0] == 13
    # A commit whose only file is damaged has the rows of the one with the same code; the damage is named.
    file_rows(scratch, commits[3], {ONE: 1.0})
    last = scratch.root / "results" / "local" / commits[4]
    last.mkdir()
    (last / "bad.jsonl").write_text("{")
    status, _, err = run(capsys, commits[4], commits[1])
    assert status == 13 and str(last) in err


def test_a_damaged_file_asked_for_by_name(repository, capsys):
    scratch, commits = repository
    old, new = (file_rows(scratch, commit, {ONE: 1.0}) for commit in commits[:2])
    (new.parent / "bad.jsonl").write_text("{")
    # Asked for by name it is a mistake, not an absence of results.
    with pytest.raises(ValueError, match=r"bad\.jsonl is damaged"):
        run(capsys, str(old), str(new.parent / "bad.jsonl"))


def test_an_unknown_machine_is_a_mistake_not_an_absence(repository, capsys):
    scratch, commits = repository
    for name in ("box", "other"):
        old = file_rows(scratch, commits[0], {ONE: 1.0}, name)
    for baseline in (commits[0], str(old)):
        with pytest.raises(ValueError, match="no results of machine 'bax'; there are: box, other"):
            run(capsys, baseline, machine="bax")


@pytest.mark.parametrize(
    "options", [{"baseline": "no-such"}, {"history": -1}, {"allow_missing": "("}, {"machine": "../x"}]
)
def test_bad_input_is_one_line(repository, options):
    scratch, commits = repository
    file_rows(scratch, commits[3], {ONE: 1.0})
    with pytest.raises(ValueError) as caught:
        command.gate(**{"baseline": "HEAD~1", "current": "HEAD~1", **options})
    assert "\n" not in str(caught.value)


def test_the_command_line_answers_with_the_status(repository, capsys):
    from benchmarks.__main__ import main

    scratch, commits = repository
    old, new = (
        file_rows(scratch, commit, {ONE: value}) for commit, value in zip(commits, (1.0, 2.0), strict=False)
    )
    assert main(["gate", "--baseline", str(old), "--current", str(new)]) == 13
    assert main(["gate", "--baseline", str(new), "--current", str(old)]) == 0
    capsys.readouterr()
    for arguments in (["gate", "--baseline", "no-such"], ["gate"], ["adopt", "no-file"], ["adopt"]):
        assert main(arguments) == 2
        out, err = capsys.readouterr()
        assert out == "" and len(err.splitlines()) == 1, err


def test_text_from_outside_is_shown_literally(repository, capsys):
    scratch, commits = repository
    bad = {ONE: "error"}
    old = file_rows(scratch, commits[0], {ONE: 1.0})
    new = file_rows(scratch, commits[1], bad, reason="ValueError: [red]not markup[/red] <b>")
    status, out, _ = run(capsys, str(old), str(new))
    assert status == 11 and "[red]not markup[/red] <b>" in out


def test_an_alarm_is_measured_again_on_the_machine_it_is_from(repository, capsys, monkeypatch):
    scratch, commits = repository
    file_rows(scratch, commits[0], {ONE: 1.0})
    file_rows(scratch, commits[1], {ONE: 1.2})
    asked = []

    def again(root, which, cases, *, device, progress):
        asked.append((root, which, cases, device))
        return [side({ONE: 1.0}), side({ONE: 1.0})]

    monkeypatch.setattr(command, "_device_here", lambda row: "cpu" if row.env["cpu"] == CPU["cpu"] else None)
    monkeypatch.setattr("benchmarks.measure.alternate.alternate", again)
    assert run(capsys, commits[0], commits[1])[0] == 0
    assert asked == [(scratch.root, [commits[0], commits[1]], [ONE], "cpu")]
    assert run(capsys, commits[0], commits[1], remeasure=False)[0] == 13


def test_within_one_commit_the_rows_decide(repository, capsys, monkeypatch, tmp_path):
    """Two environments, one commit: the checkout cannot tell them apart, and no commit is to blame."""
    scratch, commits = repository
    file_rows(scratch, commits[0], {ONE: 1.0})
    files = []
    for value in (1.0, 2.0):
        writer = RunWriter.to_file(tmp_path / f"{value}.jsonl")
        for each in side({ONE: value}, commit=commits[1], machine="local"):
            writer.add(each)
        files.append(str(writer.path))

    def again(root, which, cases, **options):
        raise AssertionError("measured again")

    monkeypatch.setattr(command, "_device_here", lambda row: "cpu")
    monkeypatch.setattr("benchmarks.measure.alternate.alternate", again)
    status, out, _ = run(capsys, *files)
    assert (
        status == 13
        and "not known: both sides are of one commit" in out
        and "since" not in out.splitlines()[-1]
    )
    assert "no re-measurement of a commit tells its rows apart" in out
    assert run(capsys, *files[::-1])[0] == 0


def test_rows_of_another_processor_are_not_this_machines():
    from benchmarks.measure.provenance import environment
    from tests.benchmarks.rows import row

    here = environment("cpu")
    assert command._device_here(row(env=here)) == "cpu"
    for other in (
        {**here, "cpu": "other"},
        {**here, "device": "cuda", "gpu": "other"},
        {**here, "torch": "0"},
        {},
    ):
        assert command._device_here(row(env=other)) is None


def test_asv_rows_of_no_named_machine_are_this_ones(monkeypatch):
    import torch

    from tests.benchmarks.rows import row

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    asv = row(env={"python": "3.11"}, suite="asv", machine="local")
    assert command._device_here(asv) == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert command._device_here(asv) is None, "measured on the GPU or not, nobody knows"


def test_what_is_absent_on_both_sides_is_counted_not_listed(repository, capsys):
    scratch, commits = repository
    old, new = (file_rows(scratch, commit, {ONE: 1.0, TWO: "skipped"}) for commit in commits[:2])
    status, out, _ = run(capsys, str(old), str(new))
    assert status == 0 and ONE in out and TWO not in out and "2 unchanged" in out


@pytest.fixture
def measured(repository, monkeypatch):
    """The third commit is slow; the rows blame the fourth, since a busy spell began there. Measuring again tells."""
    scratch, commits = repository
    for commit, value in zip(commits, (1.0, 1.0, None, 1.5), strict=False):
        if value is not None:
            file_rows(scratch, commit, {ONE: value})
    levels = dict(zip(commits, (1.0, 1.0, 1.2, 1.2), strict=False))

    def again(root, which, cases, *, device, progress):
        later = {"machine": "local", "started_at": "2026-02-01T00:00:00+00:00"}
        return [
            side({ONE: levels[c or commits[3]]}, commit=c or commits[3], dirty=c is None, **later)
            for c in which
        ]

    monkeypatch.setattr(command, "_device_here", lambda row: "cpu")
    monkeypatch.setattr("benchmarks.measure.alternate.alternate", again)
    return scratch, commits, levels


def kept_files(scratch):
    return sorted(scratch.root.joinpath("results").rglob("gate-*.jsonl"))


def page(scratch, machine="local"):
    from benchmarks.commands.report import collect, first_parents
    from benchmarks.report.trends import regressions, trends

    rows, damaged = collect(scratch.root / "results")
    assert not damaged
    commits = first_parents(scratch.root)
    return regressions(trends([row for row in rows if row.machine == machine], commits), commits)


def test_what_was_measured_again_is_kept_and_the_page_names_the_same_commit(measured, capsys):
    scratch, commits, levels = measured
    (alone,) = page(scratch)
    assert alone["commits"] == commits[2:4]
    status, out, err = run(capsys, commits[0], commits[3])
    assert status == 13 and f"since {commits[2][:10]}" in out and err == ""
    assert [path.parent for path in kept_files(scratch)] == sorted(
        scratch.root / "results" / "local" / commit for commit in commits[:4]
    )
    (found,) = page(scratch)
    assert found["commits"] == [commits[2]] and found["ratio"] == pytest.approx(1.2)

    # The gate over the same commits measures anew, and what it kept before is no result of theirs.
    again = run(capsys, commits[0], commits[3])
    assert (again[0], again[1]) == (status, out) and len(kept_files(scratch)) == 8
    assert page(scratch) == [found]
    # The third commit has kept rows and no result of its own.
    assert run(capsys, commits[0], commits[2], remeasure=False)[0] == 10
    assert run(capsys, str(kept_files(scratch)[0]), commits[3])[0] == 10
    levels.update(dict.fromkeys(commits, 1.0))
    assert run(capsys, commits[0], commits[3])[0] == 0
    assert page(scratch) == []


def test_where_it_cannot_be_kept_the_answer_is_the_same(measured, capsys):
    scratch, commits, _ = measured
    (scratch.root / "results" / "local" / commits[2]).write_text("in the way")
    status, out, err = run(capsys, commits[0], commits[3])
    assert status == 13 and f"since {commits[2][:10]}" in out
    assert len(err.splitlines()) == 1 and "not kept" in err and commits[2] in err
    assert kept_files(scratch) == []


def test_an_interrupted_gate_keeps_nothing(measured, capsys, monkeypatch):
    scratch, commits, _ = measured
    from benchmarks.measure import alternate

    whole = alternate.alternate

    def interrupted(root, which, cases, **options):
        if len(which) > 2:
            raise KeyboardInterrupt
        return whole(root, which, cases, **options)

    monkeypatch.setattr(alternate, "alternate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(capsys, commits[0], commits[3])
    assert kept_files(scratch) == []


def test_what_a_work_tree_gave_is_not_kept(measured, capsys, tmp_path):
    scratch, commits, _ = measured
    writer = RunWriter.to_file(tmp_path / "dirty.jsonl")
    here = tree_sha256(scratch.root / "src")
    for each in side({ONE: 1.5}, commit=commits[3], machine="local", dirty=True, source_sha256=here):
        writer.add(each)
    status, out, _ = run(capsys, commits[0], str(writer.path))
    assert status == 13 and "x1.2 measured again" in out and kept_files(scratch) == []


@pytest.mark.parametrize(
    "current, fields",
    [
        (True, {"dirty": True}),
        (True, {"dirty": True, "commit": None}),
        (True, {"commit": "f" * 40}),
        (False, {"commit": "f" * 40}),
    ],
)
def test_rows_of_a_tree_that_is_not_here_decide(measured, capsys, tmp_path, fields, current):
    """Another work tree, or a commit of another repository."""
    _, commits, _ = measured
    foreign = tmp_path / "foreign.jsonl"
    writer = RunWriter.to_file(foreign)
    for each in side({ONE: 1.5 if current else 0.5}, machine="local", **{"commit": commits[3], **fields}):
        writer.add(each)
    sides = (commits[0], str(foreign)) if current else (str(foreign), commits[0])
    status, out, _ = run(capsys, *sides)
    assert status == 13 and out.splitlines()[-1].endswith("not measured again; exit status 13")


def test_a_named_machine_s_are_published_where_the_ruler_is_a_commit_s(measured, capsys):
    scratch, commits, _ = measured
    for commit, value in ((commits[0], 1.0), (commits[3], 1.5)):
        file_rows(scratch, commit, {ONE: value}, "box")
    for ruler, series in (("", "records/box"), ("changed", "local")):
        scratch.write("benchmarks/b.py", ruler)
        assert run(capsys, commits[0], commits[3], machine="box")[0] == 13
        files = kept_files(scratch)
        assert {path.parent.parent for path in files} == {scratch.root / "results" / series}
        assert [f["commits"] for f in page(scratch, "box")] == [[commits[2]]]
        for path in files:
            path.unlink()


def test_asv_s_results_are_history_too(repository, capsys):
    import json

    scratch, commits = repository
    case = "step/plain/forward/toy,B4,S128,fp32,w1"
    files = []
    for commit, seconds in zip(commits, (1.0, 2.0, 2.0), strict=False):
        result = {
            "commit_hash": commit,
            "python": "3.11",
            "params": {"machine": "local"},
            "requirements": {},
            "result_columns": ["result", "params", "version", "started_at", "samples"],
            "results": {
                "bench_step.Forward.sampled": [
                    [seconds],
                    [["'plain'"], ["'toy,B4,S128,fp32,w1'"]],
                    "1",
                    1,
                    None,
                ]
            },
        }
        path = scratch.root / "results" / "local" / "asv" / "local" / f"{commit[:8]}-env.json"
        scratch.write(str(path.relative_to(scratch.root)), json.dumps(result))
        files.append(str(path))
    status, out, _ = run(capsys, files[1], files[2])
    assert status == 13 and f"worst {case} x2 since {commits[1][:10]}" in out
    assert run(capsys, files[1], files[2], history=0)[0] == 0
