"""Which commit the gate names for a regression (field case R3)."""

import pytest

from benchmarks.gate import compare
from tests.benchmarks.gate_rows import COMMITS, ONE, TWO, Remeasure, shaky, side
from tests.benchmarks.rows import A, row


def history(values):
    return [
        (commit, [] if value is None else side({ONE: value}, commit=commit))
        for commit, value in zip(COMMITS, values, strict=False)
    ]


def gated(values, baseline=-2, **options):
    past = history(values)
    (finding,) = compare(past[baseline][1], past[-1][1], history=past, **options)
    return finding


def test_r3_ten_twenty_fifteen_is_fifty_percent_slower():
    finding = gated([10, 20, 15])
    assert finding.kind == "regressed" and finding.ratio == pytest.approx(1.5)
    assert (finding.good, finding.suspects, finding.against) == (COMMITS[0], (COMMITS[1],), COMMITS[0])


@pytest.mark.parametrize(
    "values, suspects",
    [
        ([10, 20, 20, 20, 20], [1]),
        ([10, None, 20, 20], [1, 2]),
        ([10, 10, 10, 11.5], [3]),
        ([10, 10, None, None, 12, 12], [2, 3, 4]),
    ],
)
def test_r3_the_commit_or_the_range_is_named(values, suspects):
    finding = gated(values, baseline=0)
    assert finding.kind == "regressed" and finding.suspects == tuple(COMMITS[i] for i in suspects)


@pytest.mark.parametrize("values", [[20, 20], [None, 20], [20, 20, 20], [20, None, 20]])
def test_r3_nobody_is_blamed_beside_a_baseline_of_unknown_place(values):
    """The window's edge is no commit's fault; that of a later commit is shown by an earlier one alone."""
    past = history(values)
    (finding,) = compare(side({ONE: 10}, commit=A), past[-1][1], history=past)
    assert (finding.kind, finding.good, finding.suspects, finding.against) == ("regressed", None, (), A)
    past = history([10, *values])
    (finding,) = compare(side({ONE: 10}, commit=A), past[-1][1], history=past)
    assert finding.good == COMMITS[0] and finding.suspects[0] == COMMITS[1]


def test_nor_when_measured_again_side_by_side():
    # The rows say that the first commit was good; beside the baseline it is not.
    def again(cases, commits):
        return [side({ONE: 10 if commit == A else 20}, commit=commit) for commit in commits]

    past = history([10, None, 20])
    (finding,) = compare(side({ONE: 10}, commit=A), past[-1][1], history=past, remeasure=again)
    assert (finding.confirmed, finding.good, finding.suspects) == (True, None, ())


def test_nobody_before_the_baseline_is_blamed():
    """Neither where the baseline is a little better than the level before it, nor where its processes disagreed."""
    past = history([10.5, 10.5, 10, 11.1])
    (finding,) = compare(past[2][1], past[-1][1], history=past)
    assert finding.good == COMMITS[2] and finding.suspects == (COMMITS[3],)
    past = [(c, []) for c in COMMITS[:4]]
    (finding,) = compare(shaky(10, COMMITS[1]), side({ONE: 40}, commit=COMMITS[3]), history=past)
    assert finding.good == COMMITS[1] and finding.suspects == tuple(COMMITS[2:4])


def test_a_commit_beside_itself_may_still_be_worse_than_the_best_before_it():
    again = Remeasure({ONE: 10}, {ONE: 20})
    past = history([10, 20])
    (finding,) = compare(past[1][1], past[1][1], history=past, remeasure=again)
    assert finding.confirmed and (finding.against, finding.suspects) == (COMMITS[0], (COMMITS[1],))


@pytest.mark.parametrize("level", [20, None])
def test_what_differs_within_one_commit_is_no_commit_s_doing(level):
    past = history([10, 10])
    current = shaky(20, COMMITS[1]) if level is None else side({ONE: 20}, commit=COMMITS[1])
    before = shaky(10, COMMITS[1]) if level is None else past[1][1]
    again = Remeasure({ONE: 10}, {ONE: 10})
    (finding,) = compare(before, current, history=past, remeasure=again)
    assert (finding.suspects, finding.against, again.asked) == ((), COMMITS[1], [])
    assert finding.kind == ("unchanged" if level is None else "regressed"), "too busy to tell stays so"


def processes(levels, commit):
    """One process a level."""
    return [row(ONE, (level,), process=i, commit=commit) for i, level in enumerate(levels)]


def test_an_unsteady_commit_that_looks_slow_is_as_good_as_not_measured():
    past = history([None, 10, 20, 20])
    past[0] = (COMMITS[0], processes([10, 10, 10, 10, 16], COMMITS[0]))  # one busy process
    past[1] = (COMMITS[1], shaky(15, COMMITS[1]))
    (finding,) = compare(past[0][1], past[-1][1], history=past)
    assert finding.good == COMMITS[0] and finding.suspects == (COMMITS[1], COMMITS[2])
    past[1] = (COMMITS[1], shaky(10, COMMITS[1]))  # its best process is proof enough that it was fast
    (finding,) = compare(past[0][1], past[-1][1], history=past)
    assert finding.good == COMMITS[1] and finding.suspects == (COMMITS[2],)
    past[1] = (COMMITS[1], shaky(20, COMMITS[1]))  # all its processes are beyond the busy one too
    (finding,) = compare(past[0][1], past[-1][1], history=past)
    assert finding.good == COMMITS[0] and finding.suspects == (COMMITS[1],)


def test_a_range_of_suspects_is_measured_again_to_name_one():
    levels = dict(zip(COMMITS, (10, 10, 20, 20), strict=False))
    asked = []

    def again(cases, commits):
        asked.append(commits)
        return [side({ONE: levels[commit]}, commit=commit) for commit in commits]

    past = history([10, None, None, 20])
    (alone,) = compare(past[0][1], past[-1][1], history=past)
    assert alone.suspects == tuple(COMMITS[1:4])
    (finding,) = compare(past[0][1], past[-1][1], history=past, remeasure=again)
    assert asked == [*2 * [[COMMITS[0], COMMITS[3]]], COMMITS[:4]]
    assert finding.good == COMMITS[1] and finding.suspects == (COMMITS[2],)


def measured(levels):
    """A history of one commit a line, of one process a level."""
    return [(commit, processes(level, commit)) for commit, level in zip(COMMITS, levels, strict=False)]


# Each seen: equal code but for the fifth commit, which doubled the time.
ONE_LUCKY_PROCESS_OF_THE_THIRD = [
    (54, 57, 49, 52, 59),
    (71, 59, 53, 62, 62),
    (41, 77, 63, 68, 60),
    (55, 51, 66, 51, 56),
    (118, 158, 149, 125, 141),
    (137, 179, 127, 156, 155),
]
TWO_GOOD_ONES_AND_A_SLOW_FOURTH = [
    (53.8, 48.8, 44.7, 44.7, 64.2),
    (65.0, 54.5, 57.7, 58.0, 49.6),
    (40.9, 42.4, 46.6, 60.4, 58.0),
    (49.0, 53.7, 59.1, 67.3, 48.7),
    (125, 106, 110, 128, 139),
    (138, 151, 124, 122, 137),
]


@pytest.mark.parametrize("levels", [ONE_LUCKY_PROCESS_OF_THE_THIRD, TWO_GOOD_ONES_AND_A_SLOW_FOURTH])
def test_noise_before_a_doubled_step_takes_no_blame(levels):
    past = measured(levels)
    (finding,) = compare(past[0][1], past[-1][1], history=past)
    assert finding.good == COMMITS[3] and finding.suspects == (COMMITS[4],)


def test_two_lucky_processes_are_a_level():
    past = measured([(10, 12, 13, 14, 15), (20, 20, 20, 20, 20), (20, 20, 20, 20, 20)])
    (finding,) = compare(past[1][1], past[-1][1], history=past)
    assert finding.good == COMMITS[0] and finding.suspects == (COMMITS[1],)
    assert finding.baseline == pytest.approx(12)


def test_suspects_that_a_busy_machine_cannot_tell_apart_are_measured_once_more():
    asked = []

    def again(cases, commits):
        asked.append(commits)
        busy = len(asked) == 3
        return [
            processes([10, 10, 10, 10, 16] if commit in COMMITS[:2] else [15, 17, 19, 21, 23], commit)
            if busy and commit in COMMITS[:3]
            else side({ONE: 10 if commit in COMMITS[:2] else 15}, commit=commit)
            for commit in commits
        ]

    past = history([10, 10, None, None, 15])
    (finding,) = compare(past[0][1], past[-1][1], history=past, remeasure=again)
    assert asked[2:] == [COMMITS[:5], [COMMITS[0], *COMMITS[1:3], COMMITS[3], COMMITS[4]]]
    assert finding.good == COMMITS[1] and finding.suspects == (COMMITS[2],)


def test_they_are_measured_beside_a_best_commit_from_before_the_window_too():
    asked = []

    def again(cases, commits):
        asked.append(commits)
        busy = len(asked) == 3
        return [
            processes([10, 10, 10, 10, 16] if commit in (A, COMMITS[0]) else [15, 17, 19, 21, 23], commit)
            if busy and commit in (A, *COMMITS[:2])
            else side({ONE: 10 if commit in (A, COMMITS[0]) else 15}, commit=commit)
            for commit in commits
        ]

    past = history([10, None, None, 15])
    (finding,) = compare(side({ONE: 10}, commit=A), past[-1][1], history=past, remeasure=again)
    assert asked[2:] == 2 * [[A, *COMMITS[:4]]]
    assert finding.good == COMMITS[0] and finding.suspects == (COMMITS[1],)


def test_a_commit_that_cannot_be_measured_is_not_tried_for_ever():
    asked = []

    def again(cases, commits):
        asked.append(commits)
        levels = dict(zip(COMMITS, (10, 10, None, 20, 20), strict=False))
        return [[] if levels[c] is None else side({ONE: levels[c]}, commit=c) for c in commits]

    past = history([10, 10, None, None, 20])
    (finding,) = compare(past[0][1], past[-1][1], history=past, remeasure=again)
    assert len(asked) == 3 and finding.suspects == (COMMITS[2], COMMITS[3])


def test_a_busy_spell_that_came_with_a_commit_does_not_name_it():
    # In the rows the slowness began at the third commit; measured side by side it began at the second.
    def again(cases, commits):
        return [side({ONE: 10 if c == COMMITS[0] else 12}, commit=c) for c in commits]

    past = history([10, 10.5, 15, 15])
    (alone,) = compare(past[0][1], past[-1][1], history=past)
    assert alone.suspects == (COMMITS[2],)
    (finding,) = compare(past[0][1], past[-1][1], history=past, remeasure=again)
    assert finding.suspects == (COMMITS[1],) and finding.good == COMMITS[0]


def test_too_many_commits_are_not_measured_again():
    again = Remeasure({ONE: 10}, {ONE: 20})
    commits = [f"{number:040x}" for number in range(12)]
    past = [(c, side({ONE: 20 if n == 11 else 10}, commit=c)) for n, c in enumerate(commits)]
    (finding,) = compare(past[0][1], past[-1][1], history=past, remeasure=again)
    assert len(again.asked) == 2 and finding.suspects == (commits[11],)


def test_a_range_that_shows_nothing_when_measured_again_stays():
    def again(cases, commits):
        if len(commits) == 2:
            return [
                side({ONE: level}, commit=commit) for commit, level in zip(commits, (10, 20), strict=True)
            ]
        return [side({ONE: 10}, commit=commit) for commit in commits]

    past = history([10, None, 20])
    (finding,) = compare(past[0][1], past[-1][1], history=past, remeasure=again)
    assert finding.confirmed and finding.suspects == tuple(COMMITS[1:3])


def test_a_busy_current_commit_gets_its_blame_once_it_is_confirmed():
    past = history([10, 10, 20])
    past.append((COMMITS[3], shaky(20, COMMITS[3])))

    def again(cases, commits):
        return [side({ONE: 10 if c in COMMITS[:2] else 20}, commit=c) for c in commits]

    (finding,) = compare(past[0][1], past[-1][1], history=past, remeasure=again)
    assert finding.kind == "regressed" and finding.suspects == (COMMITS[2],)


def test_a_dirty_tree_is_blamed_after_its_commit():
    past = history([10, 10])
    (finding,) = compare(past[0][1], side({ONE: 20}, commit=COMMITS[1], dirty=True), history=past)
    assert finding.suspects == ("the work tree",)


def test_a_mended_slowdown_is_no_regression():
    assert gated([10, 20, 10]).kind == "improved"
    assert gated([10, 20, 10], baseline=0).kind == "unchanged"


def test_confirmation_is_against_the_best_commit():
    again = Remeasure({ONE: 10}, {ONE: 15})
    assert gated([10, 20, 15], remeasure=again).confirmed is True
    assert again.asked == [*2 * [([ONE], [COMMITS[0], COMMITS[2]])], ([ONE], COMMITS[:3])]


def test_history_follows_a_rename():
    past = [(COMMITS[0], side({TWO: 10}, commit=COMMITS[0])), *history([None, 20, 20])[1:]]
    (finding,) = compare(past[0][1], past[-1][1], history=past, was={ONE: (TWO,)})
    assert finding.kind == "regressed" and finding.good == COMMITS[0] and finding.suspects == (COMMITS[1],)


def test_a_baseline_given_by_file_has_its_place_in_history():
    past = history([None, None, None, 20])
    (finding,) = compare(side({ONE: 10}, commit=COMMITS[1]), past[-1][1], history=past)
    assert finding.good == COMMITS[1] and finding.suspects == (COMMITS[2], COMMITS[3])
