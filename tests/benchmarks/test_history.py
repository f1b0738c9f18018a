"""Commit order and blame (field case R3)."""

import pytest

from benchmarks.history import (
    first_bad,
    first_parent,
    is_older,
    look_back,
    resolve,
    steps,
    subject,
    trees,
    with_same_code,
)

pytest_plugins = ["tests.benchmarks.scratch"]


def worse(old, new):
    return new > 1.1 * old


@pytest.fixture
def merged(scratch):
    """Five commits on main with dates in no order, the fourth a merge of a branch of one commit."""
    dates = ["2026-05-01", "2020-01-01", "2026-03-01", "2024-01-01", "2021-01-01"]
    at = [f"{day}T00:00:00Z" for day in dates]
    commits = [
        scratch.commit({"src/a.py": "0"}, "first", at[0]),
        scratch.commit({"src/a.py": "1"}, "slow", at[1]),
    ]
    scratch.git("checkout", "-q", "-b", "side")
    side = scratch.commit({"src/b.py": "s"}, "side", "2019-01-01T00:00:00Z")
    scratch.git("checkout", "-q", "main")
    commits.append(scratch.commit({"src/a.py": "2"}, "third", at[2]))
    date = {"GIT_AUTHOR_DATE": at[3], "GIT_COMMITTER_DATE": at[3]}
    scratch.git("merge", "-q", "--no-ff", "-m", "merge side", "side", **date)
    commits.append(scratch.git("rev-parse", "HEAD"))
    commits.append(scratch.commit({"README": "text"}, "text <b>only</b>", at[4]))
    return scratch.root, commits, side


def test_order_is_the_first_parents_not_the_dates(merged):
    root, commits, side = merged
    assert first_parent(root) == commits and side not in commits
    assert first_parent(root, "HEAD~2") == commits[:3]
    assert look_back(root, "HEAD", 2, None) == look_back(root, "HEAD", 2, side) == commits[2:]
    assert (
        look_back(root, "HEAD", 2, commits[1]) == commits[1:] and look_back(root, "HEAD", 9, None) == commits
    )
    assert look_back(root, "HEAD", 2, commits[3]) == commits[2:], "at least as many as asked for"


def test_which_of_two_commits_is_older(merged):
    root, commits, side = merged
    assert is_older(root, commits[0], commits[4]) and is_older(root, side, "HEAD")
    for one, other in (
        (commits[4], commits[0]),
        ("HEAD", commits[4]),
        (side, commits[2]),
        ("--help", "HEAD"),
    ):
        assert not is_older(root, one, other)


def test_the_slow_commit_is_named_through_dates_and_merge(merged):
    root, commits, _ = merged
    results = dict(zip(commits, [10.0, 20.0, 20.5, 20.0, 20.2], strict=True))
    step = first_bad(first_parent(root), results, worse=worse)
    assert step.suspects == (commits[1],) and step.good == commits[0]
    assert subject(root, step.suspects[0]) == "slow"


def test_resolve_refuses_what_is_no_commit(merged):
    root, commits, _ = merged
    assert resolve(root, "HEAD") == commits[-1] == resolve(root, commits[-1][:10])
    for bad in ("no-such", "--help", "HEAD~99", "", "HEAD:src"):
        with pytest.raises(ValueError, match="neither a file nor a commit") as caught:
            resolve(root, bad)
        assert "\n" not in str(caught.value)
    assert subject(root, "f" * 40) == ""


def test_a_commit_that_changed_only_text_has_the_results_of_the_one_before(merged):
    root, commits, _ = merged
    assert with_same_code(root, commits[4]) == [commits[4], commits[3]]
    assert with_same_code(root, commits[3]) == [commits[3]]
    same = trees(root, [commits[3], commits[4][:8], "f" * 40, commits[0]])
    assert same[0] == same[1] != same[3] and same[3][0] and same[2] == (None, None)


def at(values, before=None):
    """first_bad over commits "0", "1", ...; None is a commit without a result."""
    commits = [str(i) for i in range(len(values))]
    results = {c: v for c, v in zip(commits, values, strict=True) if v is not None}
    return first_bad(commits, results, worse=worse, before=before)


@pytest.mark.parametrize(
    "values, good, suspects",
    [
        ([10, 20], "0", ("1",)),  # the last good one is index 0
        ([10, 20, 15], "0", ("1",)),  # still 50% above the best
        ([10, None, 20], "0", ("1", "2")),  # a missing result widens the range
        ([None, 10, None, None, 20, None, 21], "1", ("2", "3", "4")),
        ([10, 10, 20, 10, 10, 20], "4", ("5",)),  # mended in between
        ([10, 20, 8, 9.5], "2", ("3",)),
        ([10, 10.5, 10.9, 11.5], "2", ("3",)),  # creeping: the first beyond the limit
        ([20, 10, 12], "1", ("2",)),
    ],
)
def test_first_bad(values, good, suspects):
    step = at(values)
    assert (step.good, step.suspects) == (good, suspects)


@pytest.mark.parametrize(
    "values", [[], [10], [None, None], [10, 10], [20, 10], [10, 20, 10], [0, 0], [10, 11]]
)
def test_no_step(values):
    assert at(values) is None


@pytest.mark.parametrize("values", [[20, 21], [None, 21], [20, None, 21]])
def test_worse_than_a_level_from_elsewhere_nobody_knows_since_when(values):
    step = at(values, before=10)
    assert (step.good, step.suspects, step.best, step.before) == (None, (), None, 10)
    assert at([10, 10], before=10) is None
    step = at([10, *values], before=10)
    assert step.good == "0" and step.suspects[0] == "1"


def test_a_step_carries_best_and_level():
    step = at([10, 9, 8, 20, 15])
    assert (step.best, step.before, step.after) == ("2", 8, 20)


def test_every_step_for_the_history_picture():
    commits = list("abcdefgh")
    results = dict(zip(commits, [10, 10, None, 20, 20, 10, 10.9, 11.5], strict=True))
    del results["c"]
    found = steps(commits, results, worse=worse)
    assert [(s.suspects, s.worse, s.good) for s in found] == [
        (("c", "d"), True, "b"),
        (("f",), False, "e"),
        (("h",), True, "g"),
    ]
