"""The gate as a command: sides by file and by commit, its exit status, what it prints."""

import pytest

from benchmarks.commands import gate as command
from benchmarks.measure.record import RunWriter, destination
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


def file_rows(scratch, commit, values, machine=None, **fields):
    writer = RunWriter(destination(machine, commit, scratch.root / "results"), "run-1")
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


def test_the_default_is_head_and_a_commit_of_text_has_the_results_before_it(repository, capsys):
    scratch, commits = repository
    file_rows(scratch, commits[2], {ONE: 1.0})
    file_rows(scratch, commits[3], {ONE: 2.0})
    status, out, _ = run(capsys, commits[2], history=0)
    assert status == 13 and "HEAD" in out


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


def test_files_and_directories(repository, capsys, tmp_path):
    scratch, commits = repository
    old = file_rows(scratch, commits[0], {ONE: 1.0, TWO: 1.0})
    new = file_rows(scratch, commits[1], {ONE: 1.0})
    assert run(capsys, str(old), str(new))[0] == 12
    assert run(capsys, str(old), str(new), allow_missing="two")[0] == 0
    assert run(capsys, str(old.parent), str(old))[0] == 0
    with pytest.raises(ValueError, match="2 commits"):
        command.gate(str(old.parent.parent), str(new))


def test_a_damaged_file_is_named_and_the_rest_compared(repository, capsys):
    scratch, commits = repository
    old, new = (file_rows(scratch, commit, {ONE: 1.0}) for commit in commits[:2])
    (new.parent / "bad.jsonl").write_text("{")
    status, _, err = run(capsys, str(old), str(new.parent))
    assert status == 0 and "bad.jsonl" in err and "damaged" in err
    # Asked for by name it is a mistake, not an absence of results.
    with pytest.raises(ValueError, match=r"bad\.jsonl is damaged"):
        run(capsys, str(old), str(new.parent / "bad.jsonl"))


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
