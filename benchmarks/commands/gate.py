"""`gate`: compare two sets of results, print what changed, answer with an exit status."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from benchmarks.again import Round
    from benchmarks.gate import Finding, Remeasure
    from benchmarks.measure.record import Row

ROOT = Path(__file__).resolve().parents[2]


def gate(
    baseline: Annotated[str, typer.Option(help="A commit, or a file or directory of results.")],
    current: Annotated[str, typer.Option(help="Likewise; by default the commit checked out.")] = "HEAD",
    machine: Annotated[
        str | None, typer.Option(help="Whose results: results/records/NAME; without it results/local.")
    ] = None,
    allow_missing: Annotated[
        str | None, typer.Option(help="Regular expression of case ids that may be missing.")
    ] = None,
    history: Annotated[
        int,
        typer.Option(
            help="Commits to look back, at least to the baseline, for the best result and the first slow one."
        ),
    ] = 20,
    remeasure: Annotated[
        bool, typer.Option(help="Measure an alarm again, both commits alternating, before it counts.")
    ] = True,
) -> int:
    """Exit status 0 nothing wrong, 10 nothing collected, 11 failed, 12 missing, 13 regressed, 14 not
    comparable.

    The lowest that applies; 2 for usage errors. A damaged file on a side is not comparable with anything. An alarm
    is measured again only where this machine is the one that the rows are from; elsewhere the rows decide and the
    table says so. What was measured again is kept beside the other results, for the page; where it cannot be, the
    answer is the same.
    """
    from benchmarks.cases import every_case
    from benchmarks.gate import Finding, compare, exit_status
    from benchmarks.history import is_older

    if history < 0:
        raise ValueError(f"history must not be negative, got {history}")
    if machine is not None:
        _known(machine)
    damaged: dict[str, None] = {}
    before, after = _side(baseline, machine, damaged), _side(current, machine, damaged)
    unread = list(damaged)
    past = _history(before, after, machine, history, damaged)
    for problem in damaged:
        print(problem, file=sys.stderr)
    rounds: list[Round] = []
    findings = compare(
        before.rows,
        after.rows,
        was={case.id: case.was for case in every_case() if case.was},
        allow_missing=allow_missing,
        remeasure=_remeasure(before.rows, after.rows, rounds) if remeasure else None,
        history=past,
    )
    findings += [Finding(kind="not_comparable", case="", detail=problem) for problem in unread]
    status = exit_status(findings)
    _print(findings, before, after)
    if before.commit and after.commit and is_older(ROOT, after.commit, before.commit):
        print(
            "the current commit is older than the baseline: no commit since the baseline can have made a regression"
        )
    print(_summary(findings, status))
    if rounds:
        try:
            _keep(rounds, after.rows[0].machine, machine)
        except ValueError as error:
            print(f"what was measured again is not kept for the page: {error}", file=sys.stderr)
    return status


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side: its rows and the commit they are of, None where that is unknown."""

    name: str
    rows: "Sequence[Row]"
    commit: str | None


def _known(machine: str) -> None:
    """Refuse a machine without records.

    Raises:
        ValueError: it has none; the message lists those that have.
    """
    from benchmarks.measure.record import RESULTS, check_machine

    known = sorted(path.name for path in (ROOT / RESULTS / "records").glob("*") if path.is_dir())
    if check_machine(machine) not in known:
        raise ValueError(f"no results of machine {machine!r}; there are: {', '.join(known) or 'none'}")


def _side(text: str, machine: str | None, damaged: dict[str, None]) -> Side:
    """Rows of a file, a directory or a commit; a line a file that cannot be read is put into `damaged`.

    Raises:
        ValueError: it is none of them, or a file with rows of several commits.
    """
    from benchmarks.history import resolve, with_same_code

    path = Path(text)
    if text and path.exists():
        problems: dict[str, None] = {}
        rows = _load([path], problems)
        if problems and not path.is_dir():  # it is the very file that was asked for
            raise ValueError(next(iter(problems)).replace(": skipped, damaged: ", " is damaged: "))
        damaged |= problems
        commits = {row.commit for row in rows}
        if len(commits) > 1:
            raise ValueError(f"{text} holds rows of {len(commits)} commits; name a commit, or a file of one")
        return Side(name=text, rows=rows, commit=commits.pop() if commits else None)
    commit = resolve(ROOT, text)
    rows = _filed([commit], machine, damaged)[commit]
    name = f"{text} ({commit[:10]})" if text != commit else commit[:10]
    # A commit that changed only text goes by the one before it that was measured, as it does on the page.
    measured = {row.commit for row in rows}
    commit = next((one for one in with_same_code(ROOT, commit) if one in measured), commit)
    return Side(name=name, rows=[replace(row, commit=commit) for row in rows], commit=commit)


def _load(paths: list[Path], damaged: dict[str, None]) -> "list[Row]":
    """Rows of files; a line a damaged one is put into `damaged`.

    What a gate measured again answered that gate's question. It is no result of its commit's, and this gate measures
    anew. A study explains and is compared with nothing.
    """
    from benchmarks.export import exported
    from benchmarks.measure.record import AGAIN, STUDY, load

    rows, problems = load(paths)
    damaged |= dict.fromkeys(problems)
    return [row for row in rows if row.suite not in (AGAIN, STUDY) and not exported(row)]


def _filed(
    commits: "Sequence[str]", machine: str | None, damaged: dict[str, None], *, asv: bool = False
) -> "dict[str, list[Row]]":
    """Clean rows of each commit, on request asv's among them; a dirty one is nobody's.

    They are filed under the commit or, of what it has no rows, under any whose src/ and benchmarks/ are the same:
    `adopt` takes the oldest of these, `run` the one checked out.
    """
    from benchmarks.history import trees
    from benchmarks.measure.record import RESULTS, destination

    digit, results = "[0-9a-f]", ROOT / RESULTS
    places = sorted(destination(machine, 40 * "0", results).parent.glob(40 * digit))
    if asv:
        folder = results / ("local/asv/local" if machine is None else f"asv/{machine}")
        places += sorted(folder.glob(f"{8 * digit}-*.json"))
    names = [place.name.partition("-")[0] for place in places]
    measured = trees(ROOT, [*commits, *names])

    @cache
    def clean(place: Path) -> "list[Row]":
        return (
            [row for row in _load([place], damaged) if not row.dirty]
            if place.is_dir() or place.suffix
            else []
        )

    found: dict[str, list[Row]] = {}
    for commit, tree in zip(commits, measured, strict=False):
        own, twins = [], []
        for place, name, other in zip(places, names, measured[len(commits) :], strict=True):
            if commit.startswith(name):
                own += clean(place)
            elif other == tree and any(tree):  # git knows both
                twins += clean(place)
        have = {(row.case, row.suite) for row in own}
        found[commit] = own + [row for row in twins if (row.case, row.suite) not in have]
    return found


def _history(
    before: Side, after: Side, machine: str | None, count: int, damaged: dict[str, None]
) -> "list[tuple[str, list[Row]]]":
    """Rows of the commits up to the current one, oldest first, asv's among them; none where git does not know it.

    Only rows of the series that is gated count: `compare` sees to it.
    """
    from benchmarks.history import look_back

    if after.commit is None or count == 0:
        return []
    try:
        commits = look_back(ROOT, after.commit, count, before.commit)
    except ValueError:
        return []
    found = _filed(commits, machine, damaged, asv=True)
    # A work tree is no history: its commit keeps what is filed for it.
    if not any(row.dirty for row in after.rows):
        found[after.commit] = list(after.rows)
    return list(found.items())


def _remeasure(before: "Sequence[Row]", after: "Sequence[Row]", rounds: "list[Round]") -> "Remeasure | None":
    """The alternating runner, when the rows are this machine's and of commits and a work tree that are here; else None.

    What it measures between commits is put into `rounds`; a work tree that differs from them is no history.
    """
    from benchmarks.again import Round
    from benchmarks.measure.alternate import alternate
    from benchmarks.measure.provenance import SOURCE, head_commit, tree_id, tree_sha256

    if not after or head_commit(ROOT) is None:
        return None
    trees = {row.source_sha256 for row in after if row.dirty or row.commit is None}
    commits = {row.commit for row in (*before, *after) if not row.dirty and row.commit is not None}
    if trees - {tree_sha256(ROOT / SOURCE)} or any(tree_id(ROOT, name, SOURCE) is None for name in commits):
        return None
    device = _device_here(after[0])
    if device is None:
        return None

    def again(case_ids: list[str], commits: list[str | None]) -> "list[list[Row]]":
        from rich.console import Console

        names = " and ".join(commit[:10] if commit else "the work tree" for commit in commits)
        with Console(stderr=True).status(f"measuring {len(case_ids)} again at {names}") as status:

            def progress(done: int, total: int) -> None:
                status.update(f"measuring {len(case_ids)} again at {names}: process {done + 1} of {total}")

            sides = alternate(ROOT, commits, case_ids, device=device, progress=progress)
        named = tuple(commit for commit in commits if commit is not None)
        if len(named) == len(commits):
            rounds.append(Round(commits=named, sides=tuple(tuple(rows) for rows in sides)))
        return sides

    return again


def _keep(rounds: "Sequence[Round]", measured: str, machine: str | None) -> None:
    """File what was measured again: with a machine's other rows where it was gated by name, else in results/local.

    Raises:
        ValueError: a place cannot be written; nothing is, then.
    """
    from benchmarks.again import keep
    from benchmarks.measure.provenance import provenance
    from benchmarks.measure.record import RESULTS, destination

    # As for every published row, the ruler must be a commit's.
    published = machine == measured and not provenance(ROOT).dirty
    keep(
        rounds,
        run=f"gate-{datetime.now(UTC):%Y%m%dT%H%M%S%f}",
        machine=measured,
        directory=lambda commit: destination(machine if published else None, commit, ROOT / RESULTS),
        published=published,
    )


def _device_here(row: "Row") -> str | None:
    """The device to measure on again, when the row was measured on hardware like this machine's; else
    None."""
    import torch

    from benchmarks.measure.provenance import environment

    device = row.env.get("device")
    if device is None:  # asv's own rows do not know; those of no named machine are this one's
        return "cpu" if row.machine == "local" and not torch.cuda.is_available() else None
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        return None
    name = "gpu" if device == "cuda" else "cpu"
    here = environment(device)
    return device if here.get(name) == row.env.get(name) and here["torch"] == row.env.get("torch") else None


def _print(findings: "Sequence[Finding]", before: Side, after: Side) -> None:
    """One line a finding; what changed first. Ids and reasons come from outside and are shown as they are."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"unchanged": "dim", "improved": "green", "new": "cyan", "renamed": "cyan"}
    table = Table(title=Text(f"{before.name} -> {after.name}"), title_justify="left")
    for name in ("", "case", "baseline", "current", "ratio", "since", "note"):
        table.add_column(
            name, justify="right" if name in ("baseline", "current", "ratio") else "left", overflow="fold"
        )
    for finding in findings:
        if (
            finding.kind == "unchanged"
            and finding.current is None
            and not finding.detail.startswith("more ranks")
        ):
            continue  # nothing on either side, such as what asv calls n/a; the summary counts it
        case = finding.case if finding.metric == "seconds" else f"{finding.case} {finding.metric}"
        words = [
            finding.kind.replace("_", " "),
            case,
            _amount(finding.baseline, finding.unit),
            _amount(finding.current, finding.unit),
            "" if finding.ratio is None else f"x{finding.ratio:.3f}",
            _since(finding),
            finding.detail,
        ]
        table.add_row(*map(Text, words), style="dim" if finding.allowed else colours.get(finding.kind, "red"))
    # A pipe or a log has no width of its own: fold nothing that a terminal of this width would not.
    console = Console()
    console.width = console.width if console.is_terminal or "COLUMNS" in os.environ else 200
    console.print(table)


def _amount(value: float | None, unit: str) -> str:
    """A number with its unit, seconds in the unit one would say."""
    if value is None:
        return ""
    if unit != "s":
        return f"{value:.6g} {unit}".strip()
    for scale, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if value >= scale:
            return f"{value / scale:.4g} {name}"
    return f"{value / 1e-9:.4g} ns"


def _since(finding: "Finding") -> str:
    """The commit that made a regression, or the range of those that may have, or why nobody knows."""
    if not finding.suspects:
        known = finding.kind != "regressed" or not finding.unknown
        return "" if known else f"not known: {finding.unknown}"
    first, last = finding.suspects[0], finding.suspects[-1]
    short = [name if " " in name else name[:10] for name in (first, last)]
    if len(finding.suspects) == 1:
        return short[0]
    return f"{short[0]}..{short[1]} ({len(finding.suspects)} commits)"


def _summary(findings: "Sequence[Finding]", status: int) -> str:
    """One line: counts by kind, the worst regression and where it began, the exit status."""
    from benchmarks.history import subject

    kinds = dict.fromkeys(finding.kind for finding in findings)
    counts = ", ".join(f"{sum(f.kind == k for f in findings)} {k.replace('_', ' ')}" for k in kinds)
    said = [counts]
    slow = [finding for finding in findings if finding.kind == "regressed"]
    if slow:
        worst = max(
            slow, key=lambda f: float("inf") if f.ratio is None else max(f.ratio, 1 / max(f.ratio, 1e-12))
        )
        text = f"worst {worst.case} {'from zero' if worst.ratio is None else f'x{worst.ratio:.3g}'}"
        if worst.suspects:
            message = subject(ROOT, worst.suspects[0]) if len(worst.suspects) == 1 else ""
            text += f" since {_since(worst)}" + (f" {message!r}" if message else "")
        said.append(text if worst.confirmed else f"{text}, not measured again")
    return "; ".join([*said, f"exit status {status}"])
