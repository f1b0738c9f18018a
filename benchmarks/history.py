"""Commits in their first-parent order, and which of them changed a level.

Dates say nothing: a rebased or merged commit keeps its author's. A branch counts as the merge that brought
it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Generic, TypeVar

from benchmarks.measure.provenance import RULER, SOURCE, git

T = TypeVar("T")


def first_parent(root: Path, rev: str = "HEAD") -> list[str]:
    """The commit `rev` and its first-parent ancestors, oldest first.

    Raises:
        ValueError: git does not know `rev`.
    """
    return git(root, "rev-list", "--first-parent", resolve(root, rev)).decode().split()[::-1]


def look_back(root: Path, rev: str, count: int, baseline: str | None) -> list[str]:
    """The commit `rev` and the `count` first-parent ancestors before it, or as many as lead back to the baseline where
    it is one of them: without those between, nobody knows which commit is to blame. Oldest first.

    Raises:
        ValueError: git does not know `rev`.
    """
    commits = first_parent(root, rev)
    start = max(0, len(commits) - 1 - count)
    return commits[min(start, commits.index(baseline)) if baseline in commits else start :]


def is_older(root: Path, commit: str, than: str) -> bool:
    """Whether one commit is another's ancestor; False also where git does not know them."""
    try:
        one, other = resolve(root, commit), resolve(root, than)
        git(root, "merge-base", "--is-ancestor", one, other)
    except ValueError:
        return False
    return one != other


def resolve(root: Path, rev: str) -> str:
    """The full id of a commit.

    Raises:
        ValueError: git does not know it.
    """
    try:
        return (
            git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{rev}^{{commit}}")
            .decode()
            .strip()
        )
    except ValueError:
        raise ValueError(f"{rev!r} is neither a file nor a commit") from None


def subject(root: Path, commit: str) -> str:
    """The first line of a commit's message, "" when git does not know the commit."""
    try:
        return git(root, "show", "--no-patch", "--format=%s", commit).decode(errors="replace").strip()
    except ValueError:
        return ""


def trees(root: Path, commits: Sequence[str]) -> list[tuple[str | None, str | None]]:
    """Git's ids of src/ and benchmarks/ of each commit, None for what it lacks; also of an abbreviated one.

    What was measured at one commit was measured for all with equal trees.
    """
    names = "".join(f"{commit}:{directory}\n" for commit in commits for directory in (SOURCE, RULER))
    answers = git(root, "cat-file", "--batch-check", stdin=names.encode()).decode().splitlines()
    ids = [None if answer.endswith((" missing", " ambiguous")) else answer.split()[0] for answer in answers]
    return list(zip(ids[::2], ids[1::2], strict=True))


def with_same_code(root: Path, commit: str) -> list[str]:
    """The commit and the first-parent ancestors before it up to which only text was changed, newest first."""
    line = first_parent(root, commit)[::-1]
    measured = trees(root, line)
    return [
        one for one, _ in takewhile(lambda pair: pair[1] == measured[0], zip(line, measured, strict=True))
    ]


@dataclass(frozen=True, kw_only=True)
class Step(Generic[T]):
    """A change of level.

    Attributes:
        good: the last commit measured before it; None when the level before came from outside the commits.
        suspects: the commits that may have made it, oldest first: those after `good` without a result, then
            the first one measured at the new level. One suspect is a proof. None where no commit is known good: the
            first one of those looked at need not have made what it shows.
        best: the commit of the level before; None when it came from outside.
        before: that level.
        after: the level at the last suspect.
        worse: the direction.
    """

    good: str | None
    suspects: tuple[str, ...]
    best: str | None
    before: T
    after: T
    worse: bool = True


def first_bad(
    commits: Sequence[str],
    results: Mapping[str, T],
    *,
    worse: Callable[[T, T], bool],
    slow: Callable[[T, T], bool] | None = None,
    before: T | None = None,
) -> Step[T] | None:
    """Where the last measured commit's slowness began: it and all since are slow beside the best before them.

    10, 20, 15 began at the second commit although the third is faster than it: the best so far is 10.

    Args:
        commits: oldest first.
        results: by commit; a commit may lack one.
        worse: `worse(old, new)`.
        slow: `slow(best, new)`: which commits count as slow; by default those that are worse.
        before: a level that is none of the commits', if known.

    Returns:
        None when the last measured commit is no worse than the best before it.
    """
    measured = [index for index, commit in enumerate(commits) if commit in results]
    best, best_commit = before, None
    good: int | None = None  # the last that is not bad
    bad: int | None = None  # the first of the bad ones that reach to the end
    for index in measured:
        value = results[commits[index]]
        if best is not None and (slow or worse)(best, value):
            bad = index if bad is None else bad
            continue
        good, bad = index, None
        if best is None or worse(value, best):
            best, best_commit = value, commits[index]
    if bad is None:
        return None
    assert best is not None
    return Step(
        good=None if good is None else commits[good],
        suspects=() if good is None else tuple(commits[good + 1 : bad + 1]),
        best=best_commit,
        before=best,
        after=results[commits[bad]],
    )


def steps(
    commits: Sequence[str], results: Mapping[str, T], *, worse: Callable[[T, T], bool]
) -> list[Step[T]]:
    """Every change of level along the commits, for better or worse, oldest first.

    The level stays where the last step put it, so that many small changes add up to a step where their sum
    counts.
    """
    found: list[Step[T]] = []
    level: T | None = None
    best = ""
    last: int | None = None
    for index, commit in enumerate(commits):
        if commit not in results:
            continue
        value = results[commit]
        if level is None or last is None:
            level, best = value, commit
        elif (down := worse(level, value)) or worse(value, level):
            suspects = tuple(commits[last + 1 : index + 1])
            found.append(
                Step(good=commits[last], suspects=suspects, best=best, before=level, after=value, worse=down)
            )
            level, best = value, commit
        last = index
    return found
