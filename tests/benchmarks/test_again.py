"""What the gate keeps of measuring again, and that the page comes to the gate's answer with it."""

import re
from dataclasses import replace

import pytest

from benchmarks.again import Round, keep, kept
from benchmarks.gate import compare
from benchmarks.measure.record import AGAIN, load
from benchmarks.report.facts import latest
from benchmarks.report.page import build_page
from benchmarks.report.trends import Commit, regressions, trend_chart, trends
from tests.benchmarks.gate_rows import COMMITS, ONE, TWO, side
from tests.benchmarks.rows import A, B, row

LINE = [Commit(sha=sha, subject=f"commit {place}") for place, sha in enumerate(COMMITS[:4])]
BEFORE, AFTER = "2026-01-02T00:00:00+00:00", "2026-01-02T01:00:00+00:00"


def processes(levels, commit, **fields):
    """asv's rows of a commit: a process a level."""
    fields = {"suite": "asv", "started_at": BEFORE, **fields}
    return [row(ONE, (level,), process=i, commit=commit, **fields) for i, level in enumerate(levels)]


# The third commit is 15% slower than the first two; a busy machine shows half as much again, one commit late.
QUIET, BUSY = (10, 10.1, 10.2, 10.1, 10), (15, 15.1, 15.2, 15.1, 15)
CROWDED = (10.9, 12.5, 14, 17, 20)
PAST = [
    (sha, processes(levels, sha)) for sha, levels in zip(COMMITS, (QUIET, QUIET, CROWDED, BUSY), strict=False)
]
TRUE = dict(zip(COMMITS, (10, 10, 11.5, 11.5), strict=False))


class Gate:
    """Runs of the gate over a history, whose re-measurements find `levels` and are kept in `results`."""

    def __init__(self, results):
        self.results, self.runs = results, 0

    def run(self, past=PAST, levels=TRUE, together=None, baseline=0):
        rounds, self.runs = [], self.runs + 1

        def again(cases, commits):
            found = together if together and len(commits) > 2 else levels
            sides = [side(dict.fromkeys(cases, found[c]), commit=c, started_at=AFTER) for c in commits]
            rounds.append(Round(commits=tuple(commits), sides=tuple(map(tuple, sides))))
            return sides

        self.findings = compare(past[baseline][1], past[-1][1], history=past, remeasure=again)
        self.rounds = rounds
        self.paths = keep(
            rounds,
            run=f"gate-{self.runs}",
            machine="box",
            directory=lambda commit: self.results / commit,
            published=False,
        )
        (finding,) = self.findings
        return finding

    def page(self, past=PAST):
        return regressions(trends(self.rows(past), LINE), LINE)

    def rows(self, past=PAST):
        rows, problems = load([self.results] if self.results.exists() else [])
        assert not problems
        return [*(r for _, found in past for r in found), *rows]


@pytest.fixture
def gate(tmp_path):
    return Gate(tmp_path / "results")


def test_the_page_names_the_commit_that_the_gate_names(gate):
    (alone,) = gate.page()
    assert alone["commits"] == COMMITS[2:4] and alone["ratio"] == pytest.approx(1.5)
    finding = gate.run()
    assert finding.confirmed and finding.suspects == (COMMITS[2],)
    (found,) = gate.page()
    assert found["commits"] == [COMMITS[2]] and found["sure"]
    assert found["ratio"] == pytest.approx(1.15), "as found side by side"
    assert (found["machine"], found["case"], found["suite"]) == ("box", ONE, "asv")


def test_an_alarm_that_the_gate_dismissed_is_not_on_the_page(gate):
    assert gate.page()
    finding = gate.run(levels=dict.fromkeys(COMMITS, 10))
    assert finding.kind == "unchanged" and finding.confirmed is False
    assert gate.page() == []
    (trend,) = trends(gate.rows(), LINE)
    assert trend_chart(trend, LINE).marks == (), "nor as a step of its chart"


def test_a_busy_current_commit_is_a_regression_on_the_page_too_once_it_is_confirmed(gate):
    past = [*PAST[:3], (COMMITS[3], processes(CROWDED, COMMITS[3]))]
    assert gate.page(past) == []
    finding = gate.run(past)
    assert finding.kind == "regressed" and finding.suspects == (COMMITS[2],)
    assert [f["commits"] for f in gate.page(past)] == [[COMMITS[2]]]


@pytest.mark.parametrize("hidden", [COMMITS[1:3], COMMITS[2:3], ()])
def test_where_no_round_names_a_commit_both_say_the_same_range(gate, hidden):
    past = [(sha, [] if sha in hidden else rows) for sha, rows in PAST]
    # Both ends alone differ, and when all are measured together nothing does.
    finding = gate.run(past, together=dict.fromkeys(COMMITS, 10))
    assert finding.confirmed and len(gate.rounds) == 3
    (found,) = gate.page(past)
    assert tuple(found["commits"]) == finding.suspects != ()


def test_the_newest_run_of_the_gate_decides_and_older_ones_are_not_pooled_with_it(gate):
    gate.run()
    assert gate.page()
    gate.run(levels=dict.fromkeys(COMMITS, 10))
    assert gate.page() == []
    finding = gate.run(levels=dict(zip(COMMITS, (10, 12, 12, 12), strict=False)))
    (found,) = gate.page()
    assert finding.suspects == (COMMITS[1],) and found["commits"] == [COMMITS[1]]


def test_rows_measured_since_are_a_new_question(gate):
    gate.run()
    later = {"started_at": "2026-01-03T00:00:00+00:00", "run": "later"}
    fast = [*PAST[:2], (COMMITS[2], []), (COMMITS[3], processes(QUIET, COMMITS[3], **later))]
    assert gate.page(fast) == []
    slow = [(COMMITS[0], processes(QUIET, COMMITS[0], **later)), *PAST[1:]]
    (found,) = gate.page(slow)
    assert found["ratio"] == pytest.approx(1.5)


def test_a_later_commit_is_a_new_question(gate):
    gate.run()
    line = [*LINE, Commit(sha=COMMITS[4])]
    rows = [*gate.rows(), *processes(BUSY, COMMITS[4])]
    (found,) = regressions(trends(rows, line), line)
    assert found["ratio"] == pytest.approx(1.5)


def test_an_alarm_dismissed_beside_another_good_commit_is_dismissed(gate):
    # The first commit was measured after the gate had chosen the second for the best.
    finding = gate.run(PAST[1:], levels=dict.fromkeys(COMMITS, 10))
    assert finding.against == COMMITS[1] and finding.kind == "unchanged"
    assert gate.page() == []
    # A slow one beside the last says nothing of what came before it.
    past = [PAST[0], *((sha, processes(BUSY, sha)) for sha in COMMITS[1:3]), PAST[3]]
    assert len(gate.page(past)) == 1


def test_crashed_processes_are_kept_and_decide_nothing(gate):
    gate.run()
    crashed = [
        replace(
            one,
            sides=tuple(tuple(replace(r, status="error", reason="no luck") for r in s) for s in one.sides),
        )
        for one in gate.rounds
    ]
    paths = keep(crashed, run="gate-9", machine="box", directory=lambda c: gate.results / c, published=False)
    assert {r.status for path in paths for r in load([path])[0]} == {"error"}
    (found,) = gate.page()
    assert found["commits"] == COMMITS[2:4], "as if nothing had been measured again"


def test_another_case_and_another_machine_are_not_decided(gate):
    gate.run(levels=dict.fromkeys(COMMITS, 10))
    for other in ({"case": TWO}, {"machine": "other"}):
        past = [(sha, [replace(r, **other) for r in rows]) for sha, rows in PAST]
        assert len(gate.page(past)) == 1


def test_kept_rows_say_what_they_are_and_stand_in_no_table(gate):
    gate.run()
    assert {path.parent.name for path in gate.paths} == set(COMMITS[:4])
    rows, _ = load(gate.paths)
    assert {(r.suite, r.run, r.machine) for r in rows} == {(AGAIN, "gate-1", "box")}
    assert all(r.commit == path.parent.name for path in gate.paths for r in load([path])[0])
    assert latest(rows) == [] and {f.row.suite for f in latest(gate.rows())} == {"asv"}
    assert len(trends(gate.rows(), LINE)) == 1
    page = build_page(gate.rows(), is_peer=lambda *_: False, commits=LINE, findings=gate.page())
    assert re.search(r"15% slower side by side", page.html)
    build_page(rows, is_peer=lambda *_: False, commits=LINE)


def test_a_tree_that_differs_from_its_commit_is_no_history(gate, tmp_path):
    sides = (tuple(side({ONE: 10}, commit=A)), tuple(side({ONE: 12}, commit=B, dirty=True)))
    rounds = [Round(commits=(A, B), sides=sides)]
    assert keep(rounds, run="r", machine="box", directory=lambda c: tmp_path / c, published=False) == []
    same = [Round(commits=(A, A), sides=(sides[0], sides[0]))]
    assert keep(same, run="r", machine="box", directory=lambda c: tmp_path / c, published=False) == []


def test_all_or_nothing_is_written(gate, tmp_path):
    gate.run()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / COMMITS[3]).write_text("")
    with pytest.raises(ValueError, match="cannot write"):
        keep(gate.rounds, run="r", machine="box", directory=lambda c: tmp_path / "b" / c, published=False)
    assert [path.name for path in (tmp_path / "b").rglob("*.jsonl")] == []
    few = [Round(commits=(A, B), sides=tuple(tuple(processes((1,), c)) for c in (A, B)))]
    with pytest.raises(ValueError, match="needs 5"):
        keep(few, run="r", machine="box", directory=lambda c: tmp_path / "c" / c, published=True)
    assert not (tmp_path / "c").exists()


def test_a_round_that_lost_a_side_is_none(gate):
    gate.run()
    next(path for path in gate.paths if path.parent.name == COMMITS[1]).unlink()
    rows = [r for r in gate.rows() if r.suite == AGAIN]
    assert [one.commits for one in kept(rows, COMMITS[3])] == 2 * [(COMMITS[0], COMMITS[3])]


def test_what_the_rows_suspect_before_the_best_that_was_measured_again_is_not_blamed(gate):
    # Confirmed beside the third commit alone, while the rows suspect the second, slower than the first.
    past = [PAST[0], *((sha, processes((12, 12, 12, 12, 12), sha)) for sha in COMMITS[1:3]), PAST[3]]
    finding = gate.run(past[2:], levels=dict(zip(COMMITS, (10, 12, 12, 15), strict=False)))
    assert finding.against == COMMITS[2] and finding.suspects == (COMMITS[3],)
    assert [f["commits"] for f in gate.page(past)] == [[COMMITS[3]]]
