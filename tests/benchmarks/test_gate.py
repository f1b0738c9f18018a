"""Every answer of the gate with its exit status (field cases H1, H2, H5, B5, R3)."""

import math
from dataclasses import replace

import pytest

from benchmarks.circumstances import breaks
from benchmarks.gate import compare, exit_status
from tests.benchmarks.gate_rows import COMMITS, ONE, THREE, TWO, Remeasure, shaky, side
from tests.benchmarks.rows import CPU, GPU, A, B, row


def answer(baseline, current, **options):
    """Kinds by case and metric, and the exit status."""
    findings = compare(baseline, current, **options)
    kinds = {(f.case if f.metric == "seconds" else f.metric): f.kind for f in findings}
    return kinds, exit_status(findings)


BASE = side({ONE: 1.0, TWO: 1.0})


@pytest.mark.parametrize(
    "current, kinds, status",
    [
        ({ONE: 1.0, TWO: 1.0}, {ONE: "unchanged", TWO: "unchanged"}, 0),
        ({ONE: 0.5, TWO: 1.0}, {ONE: "improved", TWO: "unchanged"}, 0),
        ({ONE: 1.0, TWO: 1.0, THREE: 1.0}, {ONE: "unchanged", TWO: "unchanged", THREE: "new"}, 0),
        ({}, {"": "nothing_collected"}, 10),
        ({ONE: 1.0, TWO: "error"}, {ONE: "unchanged", TWO: "failed"}, 11),
        ({ONE: 1.0, TWO: "red"}, {ONE: "unchanged", TWO: "failed"}, 11),
        ({ONE: 1.0, TWO: "oom"}, {ONE: "unchanged", TWO: "failed"}, 11),
        ({ONE: 1.0}, {ONE: "unchanged", TWO: "missing"}, 12),
        ({ONE: 1.0, TWO: "skipped"}, {ONE: "unchanged", TWO: "missing"}, 12),
        ({ONE: 1.0, THREE: 1.0}, {ONE: "unchanged", TWO: "missing", THREE: "new"}, 12),
        ({ONE: 1.15, TWO: 1.0}, {ONE: "regressed", TWO: "unchanged"}, 13),
        ({ONE: 2.0, TWO: 0.5}, {ONE: "regressed", TWO: "improved"}, 13),
        # The lowest status that applies.
        ({ONE: 2.0, TWO: "error"}, {ONE: "regressed", TWO: "failed"}, 11),
        ({ONE: 2.0}, {ONE: "regressed", TWO: "missing"}, 12),
        ({THREE: "error", ONE: 1.0}, {ONE: "unchanged", TWO: "missing", THREE: "failed"}, 11),
    ],
)
def test_answers(current, kinds, status):
    assert answer(BASE, side(current, commit=B)) == (kinds, status)


def test_a_removal_may_be_allowed_and_only_that_one():
    assert answer(BASE, side({ONE: 1.0}), allow_missing="/two/")[1] == 0
    assert answer(BASE, side({ONE: 1.0}), allow_missing="/one/")[1] == 12
    assert answer(BASE, side({}), allow_missing=".*")[1] == 10
    with pytest.raises(ValueError, match="regular expression"):
        compare(BASE, BASE, allow_missing="(")


def test_a_declared_rename_is_compared_and_not_missing():
    was = {THREE: ("area/older/forward/S1,fp32,w1", TWO)}
    assert answer(BASE, side({ONE: 1.0, THREE: 1.0}), was=was) == ({ONE: "unchanged", THREE: "renamed"}, 0)
    kinds, status = answer(BASE, side({ONE: 1.0, THREE: 1.5}), was=was)
    assert kinds[THREE] == "regressed" and status == 13
    assert "was " + TWO in compare(BASE, side({ONE: 1.0, THREE: 1.5}), was=was)[0].detail
    # Undeclared it is one missing and one new.
    assert answer(BASE, side({ONE: 1.0, THREE: 1.0}))[1] == 12


def test_failures_on_both_sides_are_still_failures_and_memory_is_a_result():
    both = {ONE: "error", TWO: "oom", THREE: "skipped"}
    kinds, status = answer(side(both), side(both, commit=B))
    assert kinds == {ONE: "failed", TWO: "unchanged", THREE: "unchanged"} and status == 11
    kinds, status = answer(side(both), side({ONE: 1.0, TWO: 1.0, THREE: 1.0}))
    assert kinds == {ONE: "improved", TWO: "improved", THREE: "new"} and status == 0


def test_the_newest_run_decides_whether_a_case_failed():
    older = side({ONE: "error"}, run="r1", started_at="2026-01-01T00:00:00+00:00")
    newer = side({ONE: 1.0}, run="r2", started_at="2026-01-02T00:00:00+00:00")
    base = side({ONE: 1.0})
    assert answer(base, older + newer)[1] == 0
    again = side({ONE: "error"}, run="r3", started_at="2026-01-03T00:00:00+00:00")
    assert answer(base, newer + again)[1] == 11
    # One of five processes crashed.
    assert (
        answer(base, newer + side({ONE: "error"}, run="r2", started_at="2026-01-02T00:00:01+00:00"))[1] == 11
    )


@pytest.mark.parametrize(
    "key", ["gpu", "driver", "torch", "triton", "world_size", "python", "cuda", "device"]
)
def test_other_circumstances_are_not_comparable(key):
    other = {**GPU, key: "other"}
    findings = compare(side({ONE: 1.0}, env=GPU), side({ONE: 5.0}, env=other))
    assert [f.kind for f in findings] == ["not_comparable"] and exit_status(findings) == 14
    assert key in findings[0].detail and "other" in findings[0].detail
    assert (
        answer(side({ONE: 1.0}, env=GPU), side({ONE: 1.0}, env={k: v for k, v in GPU.items() if k != key}))[1]
        == 14
    )


@pytest.mark.parametrize("tool", ["asv", "asv_runner", "pytest_benchmark"])
def test_tool_versions_are_part_of_the_series(tool):
    """H5: another version of the tool may measure another thing under the same name."""
    one, two = ({**CPU, tool: version} for version in ("1.0", "2.0"))
    assert answer(side({ONE: 1.0}, env=one), side({ONE: 1.0}, env=two))[1] == 14
    assert answer(side({ONE: 1.0}, env=one), side({ONE: 1.0}, env={**CPU, tool: None}))[1] == 0


@pytest.mark.parametrize("fields", [{"version": 2}, {"machine": "other"}, {"suite": "asv"}])
def test_other_series_are_not_comparable(fields):
    assert answer(side({ONE: 1.0}), side({ONE: 1.0}, **fields)) == ({ONE: "not_comparable"}, 14)


def test_another_way_of_sampling_is_not_comparable():
    """H5: without warm-up the first call, 50 ms, is a sample; with it none is."""
    cold, warm = ({**CPU, "warmup": warmup} for warmup in (0, 2))
    assert answer(side({ONE: 0.05}, env=cold), side({ONE: 1e-6}, env=warm)) == ({ONE: "not_comparable"}, 14)


def test_samples_that_start_from_another_state_are_not_comparable():
    """H5: a step whose optimizer moves the parameters on between samples, and one that starts anew each time."""
    same, advances = ({**CPU, "state": state} for state in ("same", "advances"))
    assert answer(side({ONE: 1.0}, env=same), side({ONE: 1.0}, env=advances)) == ({ONE: "not_comparable"}, 14)
    step = "step/plain/train_step/toy,B4,S128,fp32,w1"
    # What says nothing of it, such as asv's rows, has what the phase declares.
    assert (
        answer(side({ONE: 1.0, step: 1.0}), side({ONE: 1.0}, env=same) + side({step: 1.0}, env=advances))[1]
        == 0
    )
    assert answer(side({step: 1.0}), side({step: 1.0}, env=same))[1] == 14


def test_ranks_on_other_numbers_of_nodes_are_not_comparable():
    assert answer(side({ONE: 1.0}), side({ONE: 1.0}, env={**CPU, "nodes": 2}))[1] == 14


def test_a_cpu_case_depends_on_the_processor_a_gpu_case_does_not():
    assert answer(side({ONE: 1.0}), side({ONE: 1.0}, env={**CPU, "cpu": "faster"}))[1] == 14
    assert answer(side({ONE: 1.0}, env=GPU), side({ONE: 1.0}, env={**GPU, "cpu": "faster"}))[1] == 0


def on(host, value, env=GPU, case=ONE, **fields):
    """Rows of one host."""
    return side({case: value}, env={**env, "host": host, "clock": "host"}, **fields)


@pytest.mark.parametrize("env", [CPU, GPU])
def test_a_change_of_time_between_hosts_is_nobody_s_until_one_host_confirms_it(env):
    assert answer(on("a", 1.0, env), on("b", 1.0, env, commit=B)) == ({ONE: "unchanged"}, 0)
    (slower,) = compare(on("a", 1.0, env), on("b", 1.5, env, commit=B))
    assert (slower.kind, slower.status, slower.suspects) == ("not_comparable", 14, ())
    assert "x1.5, but on another host" in slower.detail
    (faster,) = compare(on("a", 1.0, env), on("b", 0.5, env, commit=B))
    assert (faster.kind, faster.status) == ("unchanged", 0) and "x0.5, but on another host" in faster.detail
    assert answer(on("a", 1.0, env), on("a", 1.5, env, commit=B)) == ({ONE: "regressed"}, 13)
    for again, kind in ((1.5, "regressed"), (1.0, "unchanged")):
        remeasured = Remeasure({ONE: 1.0}, {ONE: again})
        (finding,) = compare(on("a", 1.0, env), on("b", 1.5, env, commit=B), remeasure=remeasured)
        assert finding.kind == kind and finding.confirmed is (kind == "regressed")


def test_kernels_and_bytes_know_no_host():
    events = [on(host, value, commit=c) for host, value, c in (("a", 1.0, A), ("b", 1.5, B))]
    events = [[replace(r, env=r.env | {"clock": "events"}) for r in rows] for rows in events]
    assert answer(*events) == ({ONE: "regressed"}, 13)
    peak = [{"peak": {"value": value, "unit": "byte", "better": "lower"}} for value in (100, 200)]
    sides = [on("a", 1.0, metrics=peak[0]), on("b", 1.0, commit=B, metrics=peak[1])]
    assert answer(*sides) == ({ONE: "unchanged", "peak": "regressed"}, 13)


def test_rows_of_one_host_are_compared_where_there_are_any():
    both = on("a", 1.0) + on("b", 2.0, run="r2")
    assert answer(both, on("b", 2.0, commit=B)) == ({ONE: "unchanged"}, 0)
    assert answer(on("a", 1.0), both) == ({ONE: "unchanged"}, 0)
    # The best so far was on a faster host.
    past = [(COMMITS[0], on("a", 1.0, commit=COMMITS[0])), (COMMITS[1], on("b", 2.0, commit=COMMITS[1]))]
    past.append((COMMITS[2], on("b", 2.0, commit=COMMITS[2])))
    (finding,) = compare(past[1][1], past[2][1], history=past)
    assert finding.kind == "unchanged"


def test_rows_older_than_the_mark_are_of_unknown_hosts_on_a_gpu_and_of_this_processor_on_a_cpu():
    assert answer(side({ONE: 1.0}, env=GPU), side({ONE: 1.5}, env=GPU)) == ({ONE: "not_comparable"}, 14)
    assert answer(side({ONE: 1.0}), side({ONE: 1.5})) == ({ONE: "regressed"}, 13)
    kernel = "attention/tiled/forward/S1,fp32,w1"
    assert answer(side({kernel: 1.0}, env=GPU), side({kernel: 1.5}, env=GPU)) == ({kernel: "regressed"}, 13)


def test_a_line_breaks_where_the_host_changes():
    (one, *_), (other, *_) = on("a", 1.0), on("b", 1.0)
    assert breaks(one, other) == ["other host"] and breaks(one, one) == []
    (old, *_) = side({ONE: 1.0}, env=GPU)
    assert breaks(old, one) == ["host unknown"]


def test_rows_of_the_same_circumstances_are_chosen():
    newer_torch = {**CPU, "torch": "2.14.0"}
    base = side({ONE: 1.0}) + side({ONE: 2.0}, env=newer_torch, run="r2")
    assert answer(base, side({ONE: 2.0}, env=newer_torch)) == ({ONE: "unchanged"}, 0)
    assert answer(base, side({ONE: 2.0})) == ({ONE: "regressed"}, 13)


def test_a_dirty_tree_is_never_a_baseline():
    dirty = side({ONE: 1.0}, dirty=True)
    findings = compare(dirty, side({ONE: 1.0}))
    assert exit_status(findings) == 10 and "dirty" in findings[0].detail
    # Its fast rows do not count beside clean ones, and it may be the current side.
    assert answer(side({ONE: 2.0}) + side({ONE: 1.0}, dirty=True, run="r2"), side({ONE: 2.0}))[1] == 0
    assert answer(side({ONE: 1.0}), side({ONE: 2.0}, dirty=True))[1] == 13
    history = [(A, side({ONE: 1.0}, dirty=True)), (B, [])]
    assert answer(side({ONE: 2.0}, commit="c" * 40), side({ONE: 2.0}, commit=B), history=history)[1] == 0


def test_an_empty_baseline_is_nothing_collected():
    assert answer([], side({ONE: 1.0}))[1] == 10


def metric(value, unit, better):
    return side({ONE: 1.0}, metrics={"m": {"value": value, "unit": unit, "better": better}})


@pytest.mark.parametrize(
    "old, new, unit, better, kind, status",
    [
        (100.0, 50.0, "tokens/s", "higher", "regressed", 13),
        (50.0, 100.0, "tokens/s", "higher", "improved", 0),
        (10.0, 20.0, "ms", "lower", "regressed", 13),
        (0, 5, "bytes", "lower", "regressed", 13),
        (0, 0, "bytes", "lower", "unchanged", 0),
        (math.nan, 5, "bytes", "lower", "failed", 11),
        (5, math.nan, "bytes", "lower", "failed", 11),
        (None, 5, "bytes", "lower", "failed", 11),
        (5, math.inf, "bytes", "lower", "failed", 11),
    ],
)
def test_h2_direction_zero_and_nan(old, new, unit, better, kind, status):
    kinds, found = answer(metric(old, unit, better), metric(new, unit, better))
    assert kinds == {ONE: "unchanged", "m": kind} and found == status


@pytest.mark.parametrize("other", [("ms", "lower"), ("s", "higher")])
def test_a_metric_that_changed_its_unit_or_its_direction_is_not_comparable(other):
    assert answer(metric(1.0, "s", "lower"), metric(1.0, *other)) == (
        {ONE: "unchanged", "m": "not_comparable"},
        14,
    )


def test_h2_milliseconds_that_double():
    assert answer(side({ONE: 0.010}), side({ONE: 0.020})) == ({ONE: "regressed"}, 13)
    few = [side({ONE: value}, processes=1) for value in (0.010, 0.020)]
    assert answer(*few) == ({ONE: "regressed"}, 13)
    assert answer(side({ONE: 0.0}), side({ONE: 0.0}))[1] == 0
    assert answer(side({ONE: 0.0}), side({ONE: 1.0}))[1] == 13


@pytest.mark.parametrize("samples", [(), (1.0, math.nan)])
def test_an_ok_row_without_finite_times_has_failed_on_either_side(samples):
    empty = [row(ONE, samples)]
    assert answer(side({ONE: 1.0}), empty)[1] == 11 and answer(empty, side({ONE: 1.0}))[1] == 11


def test_a_metric_that_vanished_is_missing():
    assert answer(metric(5, "bytes", "lower"), side({ONE: 1.0})) == ({ONE: "unchanged", "m": "missing"}, 12)
    assert answer(side({ONE: 1.0}), metric(5, "bytes", "lower")) == ({ONE: "unchanged", "m": "new"}, 0)


def test_oversubscribed_rows_are_never_gated_for_speed():
    many = {**CPU, "oversubscribed": True}
    assert answer(side({ONE: 1.0}, env=many), side({ONE: 9.0}, env=many)) == ({ONE: "unchanged"}, 0)
    assert answer(side({ONE: 1.0}, env=many), side({ONE: "error"}, env=many))[1] == 11


def test_few_processes_say_so():
    """Below five processes a side only a large change counts."""
    (finding,) = compare(side({ONE: 1.0}, processes=2), side({ONE: 1.15}))
    assert finding.kind == "unchanged" and "2 and 5 processes, 5 needed" in finding.detail


# Re-measurement.


def test_an_alarm_counts_when_it_shows_again():
    again = Remeasure({ONE: 1.0}, {ONE: 1.14})
    (finding,) = compare(side({ONE: 1.0}), side({ONE: 1.2}, commit=B), remeasure=again)
    assert (
        finding.kind == "regressed" and finding.confirmed is True and "x1.14 measured again" in finding.detail
    )
    assert again.asked == 2 * [([ONE], [A, B])]


def test_an_alarm_that_shows_again_only_once_is_none():
    answers = iter([1.2, 1.0])

    def once(cases, commits):
        return [side({ONE: level}, commit=c) for c, level in zip(commits, (1.0, next(answers)), strict=True)]

    (finding,) = compare(side({ONE: 1.0}), side({ONE: 1.2}, commit=B), remeasure=once)
    assert finding.kind == "unchanged" and finding.confirmed is False


def test_an_alarm_that_does_not_show_again_is_none():
    again = Remeasure({ONE: 1.0}, {ONE: 1.01})
    findings = compare(side({ONE: 1.0}), side({ONE: 1.2}, commit=B), remeasure=again)
    assert findings[0].kind == "unchanged" and findings[0].confirmed is False and exit_status(findings) == 0
    assert "not confirmed" in findings[0].detail


def test_a_busy_machine_is_asked_three_times_and_then_believed_nothing():
    again = Remeasure({ONE: 1.0}, {ONE: 2.0})
    spread = iter(range(100))

    def busy(cases, commits):
        again(cases, commits)
        return [[row(ONE, (level * 1.3 ** next(spread),)) for _ in range(5)] for level in (1.0, 1.01)]

    (finding,) = compare(side({ONE: 1.0}), side({ONE: 1.2}, commit=B), remeasure=busy)
    assert len(again.asked) == 3 and finding.kind == "unchanged" and "too busy to tell" in finding.detail


def test_a_busy_machine_says_so_in_the_first_place():
    crowded = [row(ONE, (1.3**i,), process=i) for i in range(5)]
    (finding,) = compare(crowded, crowded)
    assert finding.kind == "unchanged" and "too busy to tell: processes gave 1 to 2.86 s" in finding.detail


@pytest.mark.parametrize("slower, kind, status", [(1.15, "regressed", 13), (1.0, "unchanged", 0)])
def test_a_busy_machine_is_a_reason_to_measure_again(slower, kind, status):
    again = Remeasure({ONE: 1.0}, {ONE: slower})
    (alone,) = compare(shaky(1.0), shaky(1.2, B))
    assert alone.kind == "unchanged" and alone.doubtful and alone.suspects == ()
    findings = compare(shaky(1.0), shaky(1.2, B), remeasure=again)
    assert again.asked == (2 if kind == "regressed" else 1) * [([ONE], [A, B])]
    assert [f.kind for f in findings] == [kind] and exit_status(findings) == status
    assert f"x{slower:.3g} measured again" in findings[0].detail
    quiet = Remeasure({}, {})
    compare(shaky(1.0), shaky(1.0, B), remeasure=quiet)
    assert quiet.asked == [], "the best process is as good as before: noise only adds"


def test_only_alarms_are_measured_again_and_a_dirty_tree_as_it_is():
    again = Remeasure({TWO: 1.0}, {TWO: 2.0})
    current = side({ONE: 1.0, TWO: 2.0}, commit=B, dirty=True)
    compare(side({ONE: 1.0, TWO: 1.0}), current, remeasure=again)
    assert again.asked == 2 * [([TWO], [A, None])]
    quiet = Remeasure({}, {})
    compare(BASE, BASE, remeasure=quiet)
    assert quiet.asked == []


@pytest.mark.parametrize("old, new", [({}, {}), ({ONE: "skipped"}, {ONE: 1.0}), ({ONE: 1.0}, {ONE: "error"})])
def test_an_alarm_that_cannot_be_measured_again_stays(old, new):
    findings = compare(side({ONE: 1.0}), side({ONE: 1.2}, commit=B), remeasure=Remeasure(old, new))
    assert findings[0].kind == "regressed" and findings[0].confirmed is None and exit_status(findings) == 13
    assert "not measured again" in findings[0].detail
