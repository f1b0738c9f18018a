"""History: topological order, gaps, breaks where conditions change, and the commit that made it slower."""

import pytest

from benchmarks.report.trends import (
    Commit,
    blamed,
    change,
    finding_table,
    regressions,
    trend_chart,
    trend_table,
    trends,
    verdict,
)
from tests.report.synthetic import (
    COMMITS,
    CPU_ENV,
    EVIL_SUBJECT,
    FINDINGS,
    GPU_ENV,
    REGRESSED,
    STEADY,
    history_rows,
    row,
)


def trend_of(case, rows, findings=()):
    (found,) = [one for one in trends(rows, COMMITS, findings) if one.case == case]
    return found


def series(values, commits=COMMITS):
    """Rows of one case, five quiet processes a commit; None leaves the commit without a row."""
    return [
        row(STEADY, value, noise=0.001, commit=commit.sha, run=commit.sha[:4], env=CPU_ENV | {"process": p})
        for commit, value in zip(commits, values, strict=False)
        if value is not None
        for p in range(5)
    ]


def test_commits_are_in_the_callers_order_whatever_the_dates():
    trend = trend_of(REGRESSED, history_rows())
    assert sorted(trend.values) == [0, 1, 3, 4, 6, 7]
    assert trend.values[3] == pytest.approx(0.010, rel=0.01) and trend.values[4] == pytest.approx(
        0.0115, rel=0.01
    )


def test_the_regression_is_named_with_its_commit():
    (found,) = regressions(trends(history_rows(), COMMITS), COMMITS)
    assert (found["case"], found["commits"]) == (REGRESSED, [COMMITS[4].sha])
    assert found["ratio"] == pytest.approx(1.15, rel=0.01)


def test_no_change_raises_no_alarm():
    assert regressions(trends(history_rows(slow=1.0), COMMITS), COMMITS) == []


def test_a_commit_without_a_result_widens_the_range():
    rows = series([1.0, 1.0, None, 1.3, 1.3])
    (found,) = regressions(trends(rows, COMMITS), COMMITS)
    assert found["commits"] == [COMMITS[2].sha, COMMITS[3].sha]
    assert blamed(found, COMMITS) == f"one of 2 commits, {COMMITS[2].label} to {COMMITS[3].label}"


def test_partly_recovered_is_still_slower_than_the_best():
    (found,) = regressions(trends(series([10.0, 20.0, 15.0]), COMMITS), COMMITS)
    assert found["commits"] == [COMMITS[1].sha] and found["ratio"] == pytest.approx(1.5, rel=0.01)


def test_too_few_processes_make_a_possibility_and_no_alarm():
    rows = [one for one in series([1.0, 1.0, 3.0]) if one.env["process"] == 0]
    (found,) = regressions(trends(rows, COMMITS), COMMITS)
    assert found["commits"] == [COMMITS[2].sha] and not found["sure"]
    assert verdict(found) == "possibly 3x as long"
    (mark,) = trend_chart(trend_of(STEADY, rows, [found]), COMMITS).marks
    assert mark.kind == "possible" and mark.label == "possibly 3x as long: 22222222"
    (certain,) = regressions(trends(series([1.0, 1.0, 3.0]), COMMITS), COMMITS)
    assert certain["sure"] and verdict(certain) == "3x as long"


def test_past_changes_are_marked_without_alarm():
    rows = series([10.0, 20.0, 10.0, 10.0, 5.0])
    assert regressions(trends(rows, COMMITS), COMMITS) == []
    marks = trend_chart(trend_of(STEADY, rows), COMMITS).marks
    assert [(mark.x, mark.kind) for mark in marks] == [(1, "step"), (2, "step"), (4, "step")]
    assert marks[0].label.startswith("2x as long") and marks[2].label.startswith("50% faster")


def test_recovered_is_no_regression():
    assert regressions(trends(series([10.0, 20.0, 10.0]), COMMITS), COMMITS) == []


def test_another_environment_begins_anew():
    before, after = series([1.0]), series([None, 2.0])
    changed = [row(r.case, 2.0, commit=r.commit, run=r.run, env=r.env | {"torch": "9"}) for r in after]
    assert regressions(trends([*before, *changed], COMMITS), COMMITS) == []
    assert len(regressions(trends([*before, *after], COMMITS), COMMITS)) == 1


def test_dirty_and_unknown_commits_have_no_place_in_history():
    rows = [row(STEADY, 1.0, dirty=True), row(STEADY, 1.0, commit="f" * 40), row(STEADY, 1.0, commit=None)]
    assert trends(rows, COMMITS) == []


def test_the_chart_leaves_gaps_and_marks_the_commit():
    chart = trend_chart(trend_of(REGRESSED, history_rows(), FINDINGS), COMMITS)
    points = chart.series[0].points
    assert [point.y is None for point in points] == [False, False, True, False, False, True, False, False]
    assert points[2].status is None and "not measured" in points[2].note and EVIL_SUBJECT in points[2].note
    assert points[5].status == "error" and "ImportError" in points[5].note
    (mark,) = chart.marks
    assert (
        (mark.x, mark.kind) == (4, "regression") and "44444444" in mark.label and "15% slower" in mark.label
    )


def test_the_line_breaks_where_torch_changes():
    chart = trend_chart(trend_of(STEADY, history_rows()), COMMITS)
    (mark,) = chart.marks
    assert mark.kind == "environment" and "torch 2.13.0 -> 2.14.0" in mark.label
    (gap,) = [point for point in chart.series[0].points if point.x == mark.x]
    assert gap.y is None and mark.x == 5.5


def test_a_regression_at_the_first_shown_commit_is_marked():
    finding = {"case": STEADY, "commits": [COMMITS[0].sha], "ratio": 2.0}
    chart = trend_chart(trend_of(STEADY, history_rows(), [finding]), COMMITS)
    assert chart.marks[-1].x == 0 or any(mark.x == 0 for mark in chart.marks)


def test_tables_of_trends_and_findings():
    found = trends(history_rows(), COMMITS, FINDINGS)
    first = trend_table(found, COMMITS).iloc[0]
    assert first["case"] == REGRESSED and first["commits"] == 6 and first["without result"] == 2
    assert first["finding"] == "15% slower: 44444444 Mask keys in a loop"
    line = finding_table(FINDINGS, COMMITS).iloc[0]
    assert line["commit"] == "44444444 Mask keys in a loop" and line["new/old"] == 1.15


@pytest.mark.parametrize(
    ("ratio", "words"),
    [(1.15, "15% slower"), (2.0, "2x as long"), (0.8, "20% faster"), (None, "slower than zero")],
)
def test_changes_in_words(ratio, words):
    assert change(ratio) == words


def test_an_unknown_commit_is_named_by_its_hash():
    assert blamed({"commits": ["abcdef0123"]}, [Commit(sha="1" * 40)]) == "abcdef01"


STEP = "step/plain/train_step/small,B4,S512,fp32,w1"


def on_hosts(*hosts, case=STEP, env=GPU_ENV):
    """A case twice as slow at each further commit, each commit measured on its host; None: not said."""
    return [
        row(
            case,
            2.0**index,
            commit=commit.sha,
            run=f"run-{index}",
            env=env | ({"host": host} if host else {}),
        )
        for index, (commit, host) in enumerate(zip(COMMITS, hosts, strict=False))
    ]


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        (("a", "b"), "other host"),
        ((None, "b"), "host unknown"),
        ((None, None), "host unknown"),
    ],
)
def test_another_host_is_marked_and_is_no_regression(hosts, said):
    rows = on_hosts(*hosts)
    assert regressions(trends(rows, COMMITS), COMMITS) == []
    chart = trend_chart(trend_of(STEP, rows), COMMITS)
    (mark,) = chart.marks
    assert (mark.kind, mark.label) == ("environment", said)
    assert [point.y is None for point in chart.series[0].points] == [False, True, False]


def test_the_same_host_is_compared_and_so_are_kernels_timed_by_the_device():
    assert len(regressions(trends(on_hosts("a", "a"), COMMITS), COMMITS)) == 1
    kernel = "attention/triton/forward/B1,N4,K4,S256,T256,H64,causal,bf16,w1"
    assert len(regressions(trends(on_hosts("a", "b", case=kernel), COMMITS), COMMITS)) == 1


def test_old_rows_of_a_cpu_machine_are_compared():
    assert len(regressions(trends(on_hosts(None, None, env=CPU_ENV), COMMITS), COMMITS)) == 1
    assert regressions(trends(on_hosts("a", "b", env=CPU_ENV), COMMITS), COMMITS) == []


def test_a_commit_measured_on_two_hosts_counts_by_the_newer():
    old, new = on_hosts("a", "b")
    rows = [
        old,
        row(STEP, 1.0, commit=old.commit, run="x", env=GPU_ENV | {"host": "b"}, started_at="2027"),
        new,
    ]
    trend = trend_of(STEP, rows)
    assert [one.env["host"] for one in trend.rows[0]] == ["b"] and trend.values[0] == pytest.approx(
        1.0, rel=0.01
    )
    assert [mark.kind for mark in trend_chart(trend, COMMITS).marks] == ["step"]
