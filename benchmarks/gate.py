"""Compare two sets of rows: what regressed, improved, vanished, appeared, failed or cannot be compared.

asv and pytest-benchmark pass a benchmark that vanished, and asv fails without a table when one benchmark
fails; this gate has an answer and an exit status for each. Rules of the comparison are in `evidence`, the
order of commits in `history`.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks import evidence
from benchmarks.again import Judgement, Round, commits_between, judge
from benchmarks.blame import blame
from benchmarks.circumstances import differences, other_host, pools
from benchmarks.evidence import Evidence, NotFiniteError
from benchmarks.measure.record import Row

# Of the kinds found, the lowest status that is not 0 is the gate's; usage errors are 2.
STATUS = {
    "unchanged": 0,
    "improved": 0,
    "new": 0,
    "renamed": 0,
    "nothing_collected": 10,
    "failed": 11,
    "missing": 12,
    "regressed": 13,
    "not_comparable": 14,
}
# Times an alarm is measured again while the machine is too busy to tell.
ATTEMPTS = 3
# Up to this many commits are measured again, one beside the other, to name the one that made a regression.
MOST_SUSPECTS = 8
# What stands for the commit of rows from a tree that differs from every commit.
WORK_TREE = "the work tree"
# remeasure(case ids, [commit or None for the work tree, ...]) -> the rows of each, measured alternately
Remeasure = Callable[[list[str], list[str | None]], Sequence[Sequence[Row]]]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One answer of the gate.

    Attributes:
        kind: a key of STATUS.
        case: id at the current commit (at the baseline for what is missing), "" for nothing collected.
        metric: "seconds" or a metric's name.
        baseline, current: the statistic on each side, None where there is none.
        ratio: current over baseline, None over a zero baseline.
        unit: of the two.
        detail: one line: why, or what else is known.
        allowed: a missing case that may be missing.
        against: the commit whose result `baseline` is.
        doubtful: the machine was too busy to tell whether it regressed: worth measuring again.
        elsewhere: the baseline was measured on another host, or may have been, and the host takes part in the times.
        confirmed: an alternating re-measurement confirmed the regression; None: there was none.
        good: the last commit before the regression, where the history knows.
        suspects: the commits that may have made it, oldest first; one is a proof.
        unknown: why there are none, where a history was given.
    """

    kind: str
    case: str
    metric: str = "seconds"
    baseline: float | None = None
    current: float | None = None
    ratio: float | None = None
    unit: str = "s"
    detail: str = ""
    allowed: bool = False
    against: str | None = None
    doubtful: bool = False
    elsewhere: bool = False
    confirmed: bool | None = None
    good: str | None = None
    suspects: tuple[str, ...] = ()
    unknown: str = ""

    @property
    def status(self) -> int:
        """The exit status that this finding alone would give."""
        return 0 if self.allowed else STATUS[self.kind]


def exit_status(findings: Iterable[Finding]) -> int:
    """The lowest status that applies, 0 when nothing is wrong."""
    return min((f.status for f in findings if f.status), default=0)


def compare(
    baseline: Sequence[Row],
    current: Sequence[Row],
    *,
    was: Mapping[str, Sequence[str]] | None = None,
    allow_missing: str | None = None,
    remeasure: Remeasure | None = None,
    history: Sequence[tuple[str, Sequence[Row]]] = (),
) -> list[Finding]:
    """What changed from the baseline to the current rows.

    Rows of one case are pooled over processes and runs. Dirty rows never belong to a baseline. A case whose
    newest run failed has failed. With a history, a regression is one against the best commit so far, not only
    against the baseline (10, 20, 15 is 50% slower, not faster), and the commits that may have made it are
    named.

    Args:
        baseline, current: rows of one commit each.
        was: current id -> ids the case had before.
        allow_missing: regular expression of ids that may vanish.
        remeasure: measures both commits again, alternating, before an alarm counts. Without it the rows as
            given decide and `confirmed` stays None.
        history: (commit, rows) in first-parent order, oldest first, up to the current commit.

    Raises:
        ValueError: `allow_missing` is no regular expression.
    """
    try:
        allowed = re.compile(allow_missing) if allow_missing is not None else None
    except re.error as error:
        raise ValueError(f"not a regular expression: {allow_missing!r} ({error})") from None
    clean = [row for row in baseline if not row.dirty]
    for rows, side in ((current, "current"), (clean, "baseline")):
        if not rows:
            why = "only dirty rows, which are never a baseline" if rows is clean and baseline else "no rows"
            return [Finding(kind="nothing_collected", case="", detail=f"{side}: {why}")]
    old, new = _by_case(clean), _by_case(current)
    past = [(commit, _by_case(row for row in rows if not row.dirty)) for commit, rows in history]
    names = {
        case: next((o for o in (was or {}).get(case, ()) if o in old), None)
        for case in new
        if case not in old
    }
    findings: list[Finding] = []
    for case, rows in new.items():
        before = case if case in old else names[case]
        ids = {case, *(was or {}).get(case, ())}
        series = {commit: [row for name in ids for row in found.get(name, ())] for commit, found in past}
        for finding in _case(case, old.get(before or "", []), rows, series):
            if before not in (None, case):
                kind = "renamed" if finding.kind == "unchanged" else finding.kind
                finding = replace(finding, kind=kind, detail=_join(f"was {before}", finding.detail))
            findings.append(finding)
    for case in old:
        if case not in new and case not in names.values():
            yes = bool(allowed and allowed.search(case))
            detail = "allowed to be missing" if yes else "measured in the baseline, absent now"
            findings.append(Finding(kind="missing", case=case, allowed=yes, detail=detail))
    if remeasure is not None:
        line = [commit for commit, _ in history]
        here = _commit(current) or WORK_TREE
        again = _Again(
            here=here, line=line if here in line else [*line, here], remeasure=remeasure, rounds=[]
        )
        findings = _named(_confirmed(findings, again), again)
    findings = [_across_hosts(finding) for finding in findings]
    # Of what is not a regression, nobody is to blame.
    findings = [f if f.kind == "regressed" else replace(f, good=None, suspects=()) for f in findings]
    return sorted(findings, key=lambda f: (f.status == 0, f.status, f.case, f.metric))


def _by_case(rows: Iterable[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.case, []).append(row)
    return found


def _ok(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.status == "ok"]


def _newest(rows: Iterable[Row]) -> Row:
    return max(rows, key=lambda row: row.started_at)


def _commit(rows: Sequence[Row]) -> str | None:
    """The commit the rows are of; None for a work tree that differs from it."""
    return None if any(row.dirty for row in rows) else rows[0].commit


def _failure(rows: Sequence[Row]) -> Row | None:
    """A row of the newest run that is not ok: what other processes or older runs measured does not excuse
    it."""
    newest = _newest(rows)
    failed = [
        row for row in rows if (row.suite, row.run) == (newest.suite, newest.run) and row.status != "ok"
    ]
    return failed[0] if failed else None


def _case(case: str, old: list[Row], new: list[Row], series: Mapping[str, list[Row]]) -> list[Finding]:
    """The findings of one case: one for its status where either side has no result, else one a quantity."""
    failure, old_ok = _failure(new), _ok(old)
    if failure is not None:
        return [_without_result(case, old, failure)]
    if not old:
        return [Finding(kind="new", case=case)]
    if not old_ok:
        before = _newest(old)
        kind = "new" if before.status == "skipped" else "improved"
        return [Finding(kind=kind, case=case, detail=f"{before.status} in the baseline: {before.reason}")]
    if any(row.env.get("oversubscribed") for row in new):
        return [Finding(kind="unchanged", case=case, detail="more ranks than cores: speed not gated")]
    # Newer rows first: where a commit was measured under several circumstances, the last ones are meant. Rows of one
    # host on both sides come before those.
    for elsewhere in (False, True):
        for row in sorted(_ok(new), key=lambda row: row.started_at, reverse=True):
            before_rows = [
                one for one in old_ok if not differences(one, row) and other_host(one, row) == elsewhere
            ]
            if before_rows:
                after_rows = [one for one in _ok(new) if pools(row, one)]
                past = {c: [r for r in _ok(rows) if pools(row, r)] for c, rows in series.items()}
                return _quantities(case, before_rows, after_rows, {} if elsewhere else past, elsewhere)
    why = differences(_newest(old_ok), _newest(_ok(new)))
    return [Finding(kind="not_comparable", case=case, detail="; ".join(why))]


def _without_result(case: str, old: list[Row], row: Row) -> Finding:
    """The finding of a case whose newest run has no result."""
    reason = f"{row.status}: {row.reason}"
    before = _newest(old).status if old else None
    if row.status == "skipped":
        # It cannot run here any more: as good as removed.
        kind = "missing" if _ok(old) else "new" if before is None else "unchanged"
    elif row.status == "oom":
        # Out of memory is a result of a sweep, unless it fitted before.
        kind = "unchanged" if before == "oom" else "new" if before is None else "failed"
    else:
        kind = "failed"
    return Finding(kind=kind, case=case, detail=reason)


def _quantities(
    case: str,
    old: Sequence[Row],
    new: Sequence[Row],
    past: Mapping[str, Sequence[Row]],
    elsewhere: bool,
) -> list[Finding]:
    """Compare the seconds and every metric that has a better side."""
    names = ["seconds", *dict.fromkeys(name for row in (*old, *new) for name in row.metrics)]
    found = []
    for name in names:
        try:
            before, after = evidence.of(old, name), evidence.of(new, name)
            series = evidence.by_commit(past, name)
        except NotFiniteError:
            found.append(Finding(kind="failed", case=case, metric=name, detail="not a finite number"))
            continue
        if before is None and after is None:
            continue
        if after is None or before is None:
            kind = "missing" if after is None else "new"
            found.append(Finding(kind=kind, case=case, metric=name, detail=f"{name} only on one side"))
            continue
        if (before.unit, before.better) != (after.unit, after.better):
            why = f"{before.unit}, {before.better} is better -> {after.unit}, {after.better} is better"
            found.append(Finding(kind="not_comparable", case=case, metric=name, detail=why))
            continue
        series = {
            commit: value if value and (value.unit, value.better) == (after.unit, after.better) else None
            for commit, value in series.items()
        }
        finding = _quantity(case, name, before, after, series, old[0].commit, _commit(new))
        # A host changes times, never bytes.
        found.append(replace(finding, elsewhere=elsewhere and after.rule is not evidence.COUNT))
    return found


def _quantity(
    case: str,
    name: str,
    before: Evidence,
    after: Evidence,
    past: Mapping[str, Evidence | None],
    old_commit: str | None,
    new_commit: str | None,
) -> Finding:
    """One quantity: against the best commit so far where there is a history, else against the baseline."""
    here = new_commit or WORK_TREE
    step, certain = blame(before, after, baseline=old_commit, current=here, past=past)
    unknown = "no earlier result" if past else ""
    if old_commit == here:
        within = blame(before, after, baseline=old_commit, current=here, past={})
        if within[0] is not None:  # what differs within a commit, no commit made
            (step, certain), unknown = within, "both sides are of one commit"
    best, against = before, old_commit
    if step is not None and step.best is not None:
        best, against = step.before, step.best
    doubts = _doubts(best, after)
    finding = Finding(
        kind="unchanged",
        case=case,
        metric=name,
        baseline=best.value,
        current=after.value,
        ratio=evidence.ratio(best, after),
        unit=after.unit,
        detail=doubts,
        against=against,
        doubtful=not certain,
    )
    if step is None:
        return replace(finding, kind="improved") if evidence.better(before, after) else finding
    if against != old_commit:
        finding = replace(finding, detail=_join("the best so far; baseline " + _number(before), doubts))
    if against == here:
        alone = "no re-measurement of a commit tells its rows apart"
        finding = replace(finding, detail=_join(finding.detail, alone))
    finding = replace(finding, good=step.good, suspects=step.suspects, unknown=unknown)
    return replace(finding, kind="regressed") if certain else finding


def _number(value: Evidence) -> str:
    return f"{value.value:.4g} {value.unit}"


def _join(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


def _doubts(before: Evidence, after: Evidence) -> str:
    """Why less can be told than usual: few observations, or none that agree; "" when nothing is in the
    way."""
    if before.enough and after.enough:
        shaky = [value for value in (before, after) if not value.steady]
        if not shaky:
            return ""
        ends = min(shaky[-1].observations), max(shaky[-1].observations)
        return f"the machine was too busy to tell: processes gave {ends[0]:.3g} to {ends[1]:.3g} {after.unit}"
    what = "processes" if after.rule.processes else "samples"
    counts = f"{len(before.observations)} and {len(after.observations)} {what}"
    return (
        f"{counts}, {after.rule.needed} needed: only a change of {after.rule.weak_threshold:.0%} would show"
    )


@dataclass(frozen=True, kw_only=True)
class _Again:
    """What was measured again in this comparison: the commits up to the current one, oldest first, and the rounds."""

    here: str
    line: Sequence[str]
    remeasure: Remeasure
    rounds: list[Round]

    def measure(self, cases: list[str], commits: Sequence[str]) -> None:
        """One more round."""
        sides = self.remeasure(cases, [None if name == WORK_TREE else name for name in commits])
        self.rounds.append(Round(commits=tuple(commits), sides=tuple(tuple(rows) for rows in sides)))

    def judgement(self, case: str, metric: str, against: str | None) -> Judgement | None:
        """What the rounds so far say."""
        return judge(self.rounds, case, metric, (against or "", self.here), self.line)


def _confirmed(findings: list[Finding], again: _Again) -> list[Finding]:
    """Measure what regressed or may have again, both commits alternating, and keep the alarms that show
    again.

    What shows once is measured once more: five processes a side that all met a busy spell happen in one of some tens of
    comparisons on a shared machine, ten hardly do. So is what the machine was too busy to tell, and a third time. All
    re-measured processes count together.
    """

    def open_still(case: str, against: str, attempt: int) -> bool:
        said = again.judgement(case, "seconds", against)
        if said is None:
            return False
        return (said.confirmed and attempt == 0) or not (said.before.steady and said.after.steady)

    def alarm(finding: Finding) -> bool:
        return (finding.kind == "regressed" or finding.doubtful) and finding.against not in (None, again.here)

    open_: dict[str, list[str]] = {}
    for finding in findings:
        if alarm(finding):
            cases = open_.setdefault(finding.against or "", [])
            if finding.case not in cases:
                cases.append(finding.case)
    for attempt in range(ATTEMPTS):
        for against, cases in open_.items():
            if cases:
                again.measure(cases, [against, again.here])
        open_ = {
            against: [case for case in cases if open_still(case, against, attempt)]
            for against, cases in open_.items()
        }
    return [_after(f, again) if alarm(f) else f for f in findings]


def _across_hosts(finding: Finding) -> Finding:
    """Of a change of time between two hosts nobody knows what made it, until both sides were measured on one."""
    if not finding.elsewhere or finding.confirmed or finding.kind not in ("regressed", "improved"):
        return finding
    seen = "from zero" if finding.ratio is None else f"x{finding.ratio:.3g}"
    why = _join(f"{seen}, but on another host: measure both on one", finding.detail)
    # What may be slower must not pass; what may be faster may.
    return replace(finding, kind="not_comparable" if finding.kind == "regressed" else "unchanged", detail=why)


def _named(findings: list[Finding], again: _Again) -> list[Finding]:
    """Measure every commit since the best one again, alternating, and let those rows alone say where each confirmed
    regression began.

    Once and, where the machine was too busy to tell suspects apart, twice more with those that are left.
    """
    findings = [_blamed(finding, again) for finding in findings]
    for attempt in range(ATTEMPTS):
        ranges: dict[tuple[str, ...], list[str]] = {}
        for finding in findings:
            if finding.confirmed and finding.suspects:
                cases = ranges.setdefault(
                    _since(finding, again) if attempt == 0 else _left(finding, again), []
                )
                if finding.case not in cases:
                    cases.append(finding.case)
        for commits, cases in ranges.items():
            if len(commits) > 2:
                again.measure(cases, commits)
        findings = [_blamed(finding, again) for finding in findings]
    return findings


def _left(finding: Finding, again: _Again) -> tuple[str, ...]:
    """The commits to measure once more: the suspects between both ends and the last good one, if one of them was
    unsteady; else none."""
    said = again.judgement(finding.case, finding.metric, finding.against)
    if said is None or said.step is None or not said.unsteady.intersection(finding.suspects[:-1]):
        return ()
    return _suspected(finding, again)


def _suspected(finding: Finding, again: _Again) -> tuple[str, ...]:
    """The best and the current commit, and between them the last good one and the suspects."""
    ends = finding.against or "", again.here
    between = (finding.good, *finding.suspects)
    return (ends[0], *(name for name in between if name is not None and name not in ends), ends[1])


def _blamed(finding: Finding, again: _Again) -> Finding:
    """A confirmed finding with the commits that may have made it."""
    said = again.judgement(finding.case, finding.metric, finding.against) if finding.confirmed else None
    if said is None or finding.against is None:
        return finding
    alone = finding.good, finding.suspects
    good, suspects = said.blamed(alone, (finding.against, again.here), again.line)
    return replace(finding, good=good, suspects=suspects)


def _since(finding: Finding, again: _Again) -> tuple[str, ...]:
    """The commits to measure beside one another: all from the best to the current one or, where those are too many,
    the suspects with the commit before them; only both ends where there is nothing to choose from, or too much."""
    ends = finding.against or "", again.here
    every = tuple(commits_between(again.line, ends))
    if 0 < len(every) <= MOST_SUSPECTS + 1:
        return every
    chosen = 1 < len(finding.suspects) <= MOST_SUSPECTS and finding.good
    return _suspected(finding, again) if chosen else ends


def _after(finding: Finding, again: _Again) -> Finding:
    """The finding once both sides were measured again."""
    said = again.judgement(finding.case, finding.metric, finding.against)
    if said is None:
        question = finding.against, again.here
        sides = [
            one.of(finding.case, place)
            for one in again.rounds
            if one.question == question
            for place in (0, -1)
        ]
        reason = next((row.reason for rows in sides for row in rows if row.reason), "no rows")
        return replace(finding, detail=_join(finding.detail, f"not measured again: {reason}"))
    factor = evidence.ratio(said.before, said.after)
    shown = "from zero" if factor is None else f"x{factor:.3g}"
    if said.confirmed:
        return replace(
            finding, kind="regressed", confirmed=True, detail=_join(finding.detail, f"{shown} measured again")
        )
    if finding.doubtful:
        return replace(
            finding,
            confirmed=False,
            detail=_join(f"{shown} measured again", _doubts(said.before, said.after)),
        )
    seen = "from zero" if finding.ratio is None else f"x{finding.ratio:.3g}"
    detail = f"alarm not confirmed: {seen} in the rows, {shown} measured again, alternating"
    detail = _join(detail, _doubts(said.before, said.after))
    return replace(finding, kind="unchanged", confirmed=False, detail=detail)
