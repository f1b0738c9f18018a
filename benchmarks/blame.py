"""Since which commit a quantity is worse: the search of `history` over what `evidence` is sure of."""

from collections.abc import Mapping

from benchmarks import evidence
from benchmarks.evidence import Evidence
from benchmarks.history import Step, first_bad


def blame(
    before: Evidence,
    after: Evidence,
    *,
    baseline: str | None,
    current: str,
    past: Mapping[str, Evidence | None],
) -> tuple[Step[Evidence] | None, bool]:
    """The step that made `after` worse than the best before it: the last one that leads from levels near the best to
    levels near `after`. A commit that is worse than the best by a tenth did not make what is twice as slow now.

    Args:
        before: at the baseline.
        after: at the current commit.
        baseline: the baseline's commit.
        current: the current commit, or a name for a dirty tree.
        past: commits up to the current one in first-parent order, None where one has no result; the baseline among
            them has at least `before`. Where it is not, its place is unknown: it is a level and clears no commit.

    Returns:
        the step, None when nothing is worse; and whether that is certain. It is not where the machine was too
        busy for two processes to agree, but taking the best ones for the truth shows a step: noise only adds
        time, so the best process is no proof of a slowdown but a reason to measure again.
    """
    step = _search(before, after, baseline=baseline, current=current, past=past)
    if step is not None or (before.steady and after.steady):
        return step, True
    step = _search(before.settled(), after.settled(), baseline=baseline, current=current, past=past)
    return step, step is None


def _search(
    before: Evidence,
    after: Evidence,
    *,
    baseline: str | None,
    current: str,
    past: Mapping[str, Evidence | None],
) -> Step[Evidence] | None:
    # The same commit may be on both sides, from two files: then its older rows are no part of the series.
    commits = [commit for commit in past if commit != current]
    known = {commit: past[commit] or (before if commit == baseline else None) for commit in commits}
    results = _sure({commit: value for commit, value in known.items() if value})
    results[current] = after

    def slow(best: Evidence, value: Evidence) -> bool:
        return evidence.worse(best, value) and (value is after or evidence.past_half(best, after, value))

    outside = None if baseline in commits else before
    step = first_bad([*commits, current], results, worse=evidence.worse, slow=slow, before=outside)
    if step is None and baseline in commits and evidence.worse(before, after):
        # The baseline is a little better than the level that the history started from.
        later = [*commits[commits.index(baseline) :], current]
        results[baseline] = before
        step = first_bad(later, results, worse=evidence.worse, slow=slow)
    return step


def _sure(results: Mapping[str, Evidence]) -> dict[str, Evidence]:
    """What can be relied on: steady results, and unsteady ones that are as good as the best or of which every
    process is beyond every one of another commit.

    Of any other unsteady one that looks worse nobody knows whether the commit was slow or the machine busy: as
    if it had not been measured, which widens the range of suspects. The one best process of an unsteady one that
    looks better than every steady one shows that the commit is not slow; as a level to be measured by it would
    make all the others slow. So such a commit is as good as its second process or the best steady commit.
    """
    settled = {commit: value.settled() for commit, value in results.items()}
    steady = [value for value in results.values() if value.steady]
    level = min(steady, key=lambda value: value.rule.cost(value.value, value.better), default=None)
    sure: dict[str, Evidence] = {}
    for commit, value in results.items():
        if value.steady or any(evidence.worse(other, value) for other in results.values()):
            sure[commit] = value
        elif not any(evidence.worse(other, settled[commit]) for other in settled.values()):
            sure[commit] = settled[commit]
            if level is not None and evidence.worse(settled[commit], level):
                second = value.without_best().settled()
                sure[commit] = second if evidence.worse(second, level) else level
    return sure
