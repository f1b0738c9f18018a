"""What was measured again, side by side, says about a suspicion: does it show again, and which commit made it.

Rows of a history were taken one commit after another, so that a busy spell stays with the commit it came with; rows
taken in turns within minutes share their spells. The gate measures so before an alarm counts, and keeps the rows,
with which the page comes to the gate's answer: the rule is here, once.

A question is (best, current): is the current commit worse than the best before it? Rounds of exactly these two answer
it; rounds of more commits between the same two say where it began, from their own rows alone.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import evidence
from benchmarks.blame import blame
from benchmarks.evidence import Evidence, NotFiniteError
from benchmarks.history import Step
from benchmarks.measure.record import AGAIN, Row, check_published, safe_name, to_line, write_atomically


@dataclass(frozen=True, kw_only=True)
class Round:
    """One alternating measurement.

    Attributes:
        commits: oldest first; the first is the best so far, the last the current one.
        sides: the rows of each, of any cases.
    """

    commits: tuple[str, ...]
    sides: tuple[tuple[Row, ...], ...]

    @property
    def question(self) -> tuple[str, str]:
        """The best and the current commit."""
        return self.commits[0], self.commits[-1]

    def of(self, case: str, place: int) -> list[Row]:
        """The rows of a case at the commit in this place."""
        return [row for row in self.sides[place] if row.case == case]


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The answer to a question about one quantity of one case.

    Attributes:
        before, after: at the best commit and at the current one.
        step: where it began, None where no round says so beyond doubt.
        unsteady: commits whose processes disagreed when several were measured beside one another.
    """

    before: Evidence
    after: Evidence
    step: Step[Evidence] | None
    unsteady: frozenset[str] = frozenset()

    @property
    def confirmed(self) -> bool:
        """Whether it shows again."""
        return evidence.worse(self.before, self.after)

    def blamed(
        self, alone: tuple[str | None, tuple[str, ...]], question: tuple[str, str], line: Sequence[str]
    ) -> tuple[str | None, tuple[str, ...]]:
        """The last good commit and those that may have made it.

        Args:
            alone: what the rows of the history say of it, which counts where no round named a commit and it is about
                commits after the best one.
            question: see `Round`.
            line: commits in first-parent order. Where not even the history says anything, it was one of those between.
        """
        if self.step is not None:
            return self.step.good, self.step.suspects
        between = commits_between(line, question)[1:]
        return (
            alone if alone[1] and set(between or alone[1]) >= set(alone[1]) else (question[0], tuple(between))
        )


def judge(
    rounds: Sequence[Round], case: str, metric: str, question: tuple[str, str], line: Sequence[str]
) -> Judgement | None:
    """What the rounds say, None where not both sides gave a result.

    Args:
        rounds: of one run of the gate.
        case, metric: of what; the metric "seconds" is the time.
        question: see `Round`.
        line: commits in first-parent order, oldest first.
    """
    asked = [one for one in rounds if one.question == question]
    try:
        ends = _by_commit([one for one in asked if len(one.commits) == 2], case, metric)
        found = _by_commit([one for one in asked if len(one.commits) > 2], case, metric)
    except NotFiniteError:
        return None
    before, after = (ends.get(commit) for commit in question)
    if before is None or after is None:
        return None
    unsteady = frozenset(name for name, value in found.items() if value is not None and not value.steady)
    return Judgement(before=before, after=after, step=_step(found, question, line), unsteady=unsteady)


def _by_commit(rounds: Sequence[Round], case: str, metric: str) -> dict[str, Evidence | None]:
    """What rounds of one question say of each of their commits, all rows of one together."""
    rows: dict[str, list[Row]] = {}
    for one in rounds:
        for place, name in enumerate(one.commits):
            rows.setdefault(name, []).extend(one.of(case, place))
    return evidence.by_commit(rows, metric)


def _step(
    found: Mapping[str, Evidence | None], question: tuple[str, str], line: Sequence[str]
) -> Step[Evidence] | None:
    best, current = question
    before, after = found.get(best), found.get(current)
    if before is None or after is None:
        return None
    # Commits that were left out widen the range. Of a best one that is not in the line, nobody knows the place.
    between = commits_between(line, question) or [name for name in line if name in found]
    past = {name: found.get(name) for name in between}
    step, certain = blame(before, after, baseline=best, current=current, past=past)
    return step if certain else None


def commits_between(line: Sequence[str], question: tuple[str, str]) -> Sequence[str]:
    """The commits from the best to the current one, both included; none where the line lacks one of them."""
    first, last = (line.index(name) if name in line else -1 for name in question)
    return line[first : last + 1] if 0 <= first <= last else ()


def keep(
    rounds: Sequence[Round], *, run: str, machine: str, directory: Callable[[str], Path], published: bool
) -> list[Path]:
    """File the rows of the rounds under their commits, all of them or, where one place refuses, none.

    Rounds with a work tree that differs from its commit are no history and are left out.

    Args:
        rounds: of one run of the gate.
        run: names it; of two runs the later one has the greater name.
        machine: whose rows were gated.
        directory: of a commit's rows.
        published: the rows go to a published series.

    Returns:
        the files, one a commit.

    Raises:
        ValueError: a place cannot be written, or a row is too little for a published series.
    """
    filed: dict[str, list[Row]] = {}
    for number, one in enumerate(rounds):
        if len(set(one.commits)) < len(one.commits) or any(row.dirty for side in one.sides for row in side):
            continue
        about = {"round": number, "beside": list(one.commits)}
        for commit, side in zip(one.commits, one.sides, strict=True):
            filed.setdefault(commit, []).extend(
                replace(row, suite=AGAIN, run=run, machine=machine, commit=commit, env=row.env | about)
                for row in side
            )
    if published:
        for row in (row for rows in filed.values() for row in rows):
            check_published(row)
    written: list[Path] = []
    try:
        for commit, rows in filed.items():
            path = directory(commit) / f"{safe_name(run)}.jsonl"
            write_atomically(path, "".join(map(to_line, rows)))
            written.append(path)
    except BaseException:
        for path in written:
            path.unlink(missing_ok=True)
        raise
    return written


def kept(rows: Iterable[Row], current: str) -> list[Round]:
    """The rounds of the newest run of the gate that measured a case again at `current`; of other runs nothing counts.

    Args:
        rows: of one case on one machine; those that no gate kept are passed over.
        current: the commit that was gated.
    """
    found: dict[str, dict[int, list[Row]]] = {}
    for row in rows:
        beside, number = row.env.get("beside"), row.env.get("round")
        if row.suite == AGAIN and isinstance(beside, list) and beside[-1:] == [current]:
            found.setdefault(row.run, {}).setdefault(int(number or 0), []).append(row)
    if not found:
        return []
    rounds = []
    for _, members in sorted(found[max(found)].items()):
        commits = tuple(members[0].env["beside"])
        sides = tuple(tuple(row for row in members if row.commit == name) for name in commits)
        if all(sides):  # a side whose file was removed since: nothing is beside it any more
            rounds.append(Round(commits=commits, sides=sides))
    return rounds
