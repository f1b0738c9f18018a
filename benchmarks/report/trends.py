"""Each case over the commits: a chart and a table line, with regressions marked and gaps left open.

Commits come from the caller in first-parent order, oldest first. Only neighbouring commits are joined by a
line, and only while version, device and tools stay the same: everything else would claim a measurement that
nobody made.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks import evidence, history
from benchmarks.again import Judgement, judge, kept
from benchmarks.blame import blame
from benchmarks.circumstances import breaks, pools
from benchmarks.measure.record import AGAIN, Row
from benchmarks.report.chart import Axis, Chart, Mark, Point, Series, file_name
from benchmarks.report.facts import contexts, facts_of
from benchmarks.report.tables import frame

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, kw_only=True)
class Commit:
    """One commit of the first-parent history."""

    sha: str
    subject: str = ""

    @property
    def label(self) -> str:
        return f"{self.sha[:8]} {self.subject}".strip()


@dataclass(frozen=True, kw_only=True)
class Trend:
    """One case on one machine, measured by one suite, over commits.

    Attributes:
        machine, case, suite: whose trend it is.
        values: commit's position -> seconds, the statistic that the gate compares.
        rows: commit's position -> the rows behind it, also those without a result.
        findings: the gate's findings about this case: dicts with "commits" (hashes: one blamed, or a range)
            and "ratio".
        again: what the gate kept of measuring the case again, whatever suite's rows had raised the alarm.
    """

    machine: str
    case: str
    suite: str
    values: Mapping[int, float]
    rows: Mapping[int, Sequence[Row]]
    findings: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
    again: Sequence[Row] = field(default_factory=tuple)

    @property
    def best(self) -> float | None:
        return min(self.values.values(), default=None)

    @property
    def last(self) -> float | None:
        return self.values[max(self.values)] if self.values else None


def trends(
    rows: Iterable[Row], commits: Sequence[Commit], findings: Iterable[Mapping[str, Any]] = ()
) -> list[Trend]:
    """Group rows into trends; those with findings first, then by case.

    Rows of an unknown commit (another branch, or none) and of a dirty tree belong to no place in history and
    are left out; they are in the tables.
    """
    place = {commit.sha: index for index, commit in enumerate(commits)}
    grouped: dict[tuple[str, str, str], dict[int, list[Row]]] = defaultdict(lambda: defaultdict(list))
    again: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row.suite == AGAIN:
            again[(row.machine, row.case)].append(row)
        elif row.commit in place and not row.dirty:
            grouped[(row.machine, row.case, row.suite)][place[row.commit]].append(row)
    found = defaultdict(list)
    for finding in findings:
        found[finding["case"]].append(finding)
    made = []
    for (machine, case, suite), measured in grouped.items():
        by_place = {index: _alike(at) for index, at in measured.items()}
        values = {index: value for index, at in by_place.items() if (value := level(at)) is not None}
        mine = [
            f for f in found[case] if f.get("machine", machine) == machine and f.get("suite", suite) == suite
        ]
        made.append(
            Trend(
                machine=machine,
                case=case,
                suite=suite,
                values=values,
                rows=by_place,
                findings=tuple(mine),
                again=again[(machine, case)],
            )
        )
    return sorted(
        made, key=lambda t: (not any(map(sure, t.findings)), not t.findings, t.case, t.machine, t.suite)
    )


def _alike(rows: Sequence[Row]) -> list[Row]:
    """The newest row of a commit and those measured under the same circumstances."""
    newest = max(rows, key=lambda row: row.started_at)
    return [row for row in rows if row is newest or pools(row, newest)]


def level(rows: Sequence[Row]) -> float | None:
    """Seconds of one commit as the gate sees them: medians on a GPU, minima of processes on a CPU."""
    ok = [row for row in rows if row.status == "ok" and row.samples_seconds]
    try:
        found = evidence.seconds(ok) if ok else None
    except evidence.NotFiniteError:
        return None
    return found.value if found else None


def regressions(found: Iterable[Trend], commits: Sequence[Commit]) -> list[dict[str, Any]]:
    """Trends whose last result is worse than the best before it by the gate's own rules, and since when.

    Only results under the circumstances of the last one count: another driver, torch or host begins anew. The ratio
    is the last result over the best, so that 10, 20, 15 is half as slow again, since the second commit. "sure"
    says that each side had as many processes (on a GPU, samples) as the gate's rules need; without them only a
    large change is reported at all, and as a possibility.

    Where the gate measured the last commit again beside others, that decides: what it confirmed is a regression, with
    the ratio and the commit found side by side, and an alarm that it dismissed is none.
    """
    answers = []
    for trend in found:
        if len(trend.values) < 2:
            continue
        line = [commit.sha for commit in commits[: max(trend.values) + 1]]
        step, certain, after = _suspicion(trend, commits)
        judged = judgements(trend, commits)
        # The best of the rows first: of several questions the rows' own.
        confirmed = sorted(
            (best for best, said in judged.items() if said.confirmed),
            key=lambda best: not (step and best == step.best),
        )
        if confirmed:
            best, said = confirmed[0], judged[confirmed[0]]
            alone = (step.good, step.suspects) if step else (None, ())
            _, suspects = said.blamed(alone, (best, line[-1]), line)
            answer = {"ratio": evidence.ratio(said.before, said.after), "sure": True, "again": True}
        elif step is None or not certain or any(_spans(best, step, line) for best in judged):
            continue
        else:
            suspects = step.suspects
            answer = {
                "ratio": evidence.ratio(step.before, after),
                "sure": _certain(step.before, step.after, after),
            }
        where = {"machine": trend.machine, "case": trend.case, "suite": trend.suite}
        answers.append({**where, "commits": list(suspects), **answer})
    return answers


def _suspicion(
    trend: Trend, commits: Sequence[Commit]
) -> tuple[history.Step[evidence.Evidence] | None, bool, evidence.Evidence]:
    """Since when the last result is worse by the rows of the trend alone, whether that is certain, and that result."""
    known = _comparable(trend, commits)[-1]
    order = [commit.sha for commit in commits]
    first, *_ = known
    last = order[max(trend.values)]
    line = order[order.index(first) : order.index(last) + 1]
    past = {sha: known.get(sha) for sha in line}
    step, certain = blame(known[first], known[last], baseline=first, current=last, past=past)
    return step, certain, known[last]


def judgements(trend: Trend, commits: Sequence[Commit]) -> dict[str, Judgement]:
    """What the gate found when it measured the trend's last commit again: by the commit it was measured beside.

    Rows taken since, of either commit, are a new question.
    """
    line = [commit.sha for commit in commits[: max(trend.values, default=-1) + 1]]
    if not line:
        return {}
    position = {sha: index for index, sha in enumerate(line)}
    rounds = kept(trend.again, line[-1])
    began = min((row.started_at for one in rounds for side in one.sides for row in side), default="")

    def older(best: str) -> bool:
        places = position.get(best), position[line[-1]]
        return all(
            at is not None and at in trend.values and all(row.started_at <= began for row in trend.rows[at])
            for at in places
        )

    asked = dict.fromkeys(one.question for one in rounds)
    return {
        best: said
        for best, last in asked
        if older(best) and (said := judge(rounds, trend.case, "seconds", (best, last), line)) is not None
    }


def _spans(best: str, step: history.Step[evidence.Evidence], line: Sequence[str]) -> bool:
    """Whether the step, were it one, lies between the best commit that was measured again and the last."""
    return step.good is not None and line.index(best) <= line.index(step.good)


def _comparable(trend: Trend, commits: Sequence[Commit]) -> list[dict[str, evidence.Evidence]]:
    """Evidence by commit, in runs of commits whose circumstances are the same, oldest first."""
    runs: list[dict[str, evidence.Evidence]] = []
    before: Row | None = None
    for index in sorted(trend.values):
        ok = [row for row in trend.rows[index] if row.status == "ok" and row.samples_seconds]
        found = evidence.seconds(ok)
        assert found is not None, "a trend's values come from the same evidence"
        if before is None or breaks(before, ok[0]):
            runs.append({})
        runs[-1][commits[index].sha] = found
        before = ok[0]
    return runs


def _certain(*sides: evidence.Evidence) -> bool:
    return all(side.enough and side.steady for side in sides)


def _steps(trend: Trend, commits: Sequence[Commit]) -> list[tuple[int, str]]:
    """Every certain change of level, for better or worse, with the position of the commit that shows it.

    Not what the rows alone say is slower where the gate measured again: the findings tell.
    """
    position = {commit.sha: index for index, commit in enumerate(commits)}
    order = [commit.sha for commit in commits]
    told = min((position[best] for best in judgements(trend, commits)), default=len(order))
    return [
        (position[step.suspects[-1]], change(evidence.ratio(step.before, step.after)))
        for known in _comparable(trend, commits)
        for step in history.steps(order, known, worse=evidence.worse)
        if _certain(step.before, step.after) and not (step.worse and position[step.suspects[-1]] > told)
    ]


def blamed(finding: Mapping[str, Any], commits: Sequence[Commit]) -> str:
    """The commit a finding names, or the range where some in between were not measured."""
    known = {commit.sha: commit for commit in commits}
    named = [known.get(sha, Commit(sha=sha)).label for sha in finding["commits"]]
    if len(named) <= 1:
        return named[0] if named else "unknown commit"
    return f"one of {len(named)} commits, {named[0]} to {named[-1]}"


def sure(finding: Mapping[str, Any]) -> bool:
    """Whether enough was measured to call it a regression; findings that do not say were confirmed elsewhere."""
    return bool(finding.get("sure", True))


def verdict(finding: Mapping[str, Any]) -> str:
    """A finding in words: "15% slower", or "possibly 40% slower" where too little was measured.

    Of one that was measured again it says so: the ratio is then another than the trend's last over its best.
    """
    words = ("" if sure(finding) else "possibly ") + change(finding["ratio"])
    return f"{words} side by side" if finding.get("again") else words


def change(ratio: float | None) -> str:
    """A ratio of new to old seconds in words: 1.15 is "15% slower"; None is a rise from zero."""
    if ratio is None:
        return "slower than zero"
    if ratio >= 2:
        return f"{ratio:.3g}x as long"
    return f"{(ratio - 1) * 100:.3g}% slower" if ratio >= 1 else f"{(1 - ratio) * 100:.3g}% faster"


def trend_chart(trend: Trend, commits: Sequence[Commit], taken: Sequence[str] = ()) -> Chart:
    """Milliseconds over the commits from the first to the last measured one."""
    low, high = min(trend.rows), max(trend.rows)
    points: list[Point] = []
    marks: list[Mark] = []
    before: Row | None = None
    for index in range(low, high + 1):
        at, value = trend.rows.get(index, ()), trend.values.get(index)
        x = index - low
        if value is None:
            row = at[0] if at else None
            note = f"{row.status}: {row.reason}" if row else "not measured"
            points.append(
                Point(x=x, y=None, note=f"{commits[index].label}\n{note}", status=row.status if row else None)
            )
            continue
        if before is not None and (changed := breaks(before, at[0])):
            points.append(Point(x=x - 0.5, y=None))  # breaks the line
            marks.append(Mark(x=x - 0.5, label="; ".join(changed), kind="environment"))
        before = at[0]
        count = sum(len(row.samples_seconds) for row in at)
        note = f"{commits[index].label}\n{value * 1e3:.4g} ms ({count} samples)"
        points.append(Point(x=x, y=value * 1e3, note=note))
    position = {commit.sha: index - low for index, commit in enumerate(commits)}
    for finding in trend.findings:
        places = [position[sha] for sha in finding["commits"] if sha in position]
        if places:
            first, last = finding["commits"][0][:8], finding["commits"][-1][:8]
            label = f"{verdict(finding)}: {last if len(places) == 1 else f'{first}..{last}'}"
            marks.append(Mark(x=max(places), label=label, kind="regression" if sure(finding) else "possible"))
    named = {mark.x for mark in marks}
    marks += [
        Mark(x=at - low, label=f"{words}: {commits[at].sha[:8]}", kind="step")
        for at, words in _steps(trend, commits)
        if at - low not in named
    ]
    measured = [facts_of(row) for index in sorted(trend.rows) for row in trend.rows[index]]
    return Chart(
        id=file_name(f"history {trend.machine} {trend.suite} {trend.case}", taken),
        title=trend.case,
        kind="line",
        x=Axis(
            label="commit, first parents, oldest first",
            categories=tuple(c.sha[:8] for c in commits[low : high + 1]),
        ),
        y=Axis(label="ms", zero=False),
        series=(Series(name=f"{trend.machine}, {trend.suite}", points=tuple(points), color=0),),
        marks=tuple(marks),
        caption="Lower is better. A commit without a result is a gap; the line also breaks where the "
        "environment changed.",
        context=tuple(contexts(measured)[-1:]),
    )


def trend_table(found: Iterable[Trend], commits: Sequence[Commit]) -> "DataFrame":
    """A line for each trend: last and best time, their ratio, the commits measured, what was found."""
    records = []
    for trend in found:
        best, last = trend.best, trend.last
        records.append({
            "case": trend.case,
            "last/best": last / best if last is not None and best else None,
            "last ms": last * 1e3 if last is not None else None,
            "best ms": best * 1e3 if best is not None else None,
            "finding": "; ".join(f"{verdict(f)}: {blamed(f, commits)}" for f in trend.findings)
            or None,
            "commits": len(trend.values),
            "without result": max(trend.rows) - min(trend.rows) + 1 - len(trend.values),
            "suite": trend.suite,
            "machine": trend.machine,
        })  # fmt: skip
    return frame(
        records,
        "case | last/best | last ms | best ms | finding | commits | without result | suite | machine",
    )


def finding_table(findings: Iterable[Mapping[str, Any]], commits: Sequence[Commit]) -> "DataFrame":
    """The regressions: which case, how much, since which commit."""
    records = [
        {
            "case": f["case"],
            "new/old": f["ratio"],
            "change": verdict(f),
            "commit": blamed(f, commits),
        }
        for f in findings
    ]
    return frame(records, "case | new/old | change | commit")
