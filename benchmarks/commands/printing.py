"""Rows as tables in the terminal: the report's tables, every row beside its peers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.measure.record import Row

if TYPE_CHECKING:
    from pandas import DataFrame


def is_peer(area: str, target: str) -> bool:
    """True when the target of an area is somebody else's work."""
    from benchmarks.cases import AREAS

    module = AREAS.get(area)
    return module is not None and target in module.ROWS and module.ROWS[target].peer


def print_rows(rows: Sequence[Row]) -> None:
    """One table an area, then whatever has no speed with its reason."""
    from benchmarks.report import facts, tables

    found = facts.latest(rows)
    by_area = {
        "step": ("Steps", tables.steps),
        "attention": ("Attention", tables.attention),
        "collective": ("Collectives", tables.collectives),
        "data_parallel": ("Data parallelism", lambda chosen: tables.parallel(chosen, is_peer)),
    }
    for area, (title, table) in by_area.items():
        chosen = [fact for fact in found if fact.area == area and fact.row.status == "ok"]
        if chosen:
            print_frame(title, table(chosen))
    print_frame("Beside the fastest peer of the same run", tables.headline(found, is_peer))
    print_frame("Without a speed", tables.statuses(found))


def print_warmup_study(rows: Sequence[Row]) -> None:
    """The same cases with different numbers of warm-up steps, side by side."""
    import pandas

    from benchmarks.report.facts import facts_of

    lines = []
    for fact in sorted(map(facts_of, rows), key=lambda fact: (fact.row.case, fact.row.env["warmup"])):
        if fact.time is not None:
            std = None if fact.time.std is None else fact.time.std * 1e3
            lines.append(
                {
                    "implementation": fact.target,
                    "phase": fact.phase,
                    "parameters": fact.parameters,
                    "warm-up": fact.row.env["warmup"],
                    "first call ms": fact.row.first_seconds * 1e3,
                    "mean ms": fact.time.mean * 1e3,
                    "std ms": std,
                    "median ms": fact.time.median * 1e3,
                    "min ms": fact.time.minimum * 1e3,
                }
            )
    print_frame("Warm-up study", pandas.DataFrame(lines))


def print_frame(title: str, frame: "DataFrame") -> None:
    """A DataFrame as a rich table; columns without any value are left out, an empty frame prints nothing."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from benchmarks.report.formats import is_absent, is_number, number

    if frame.empty:
        return
    table = Table(title=title, title_justify="left", header_style="bold")
    columns = [name for name in frame.columns if not all(is_absent(value) for value in frame[name])]
    for name in columns:
        numeric = any(is_number(value) for value in frame[name])
        table.add_column(name, justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
    for _, line in frame.iterrows():
        cells = [line[name] for name in columns]
        # Text objects: what comes from outside is never read as rich markup.
        table.add_row(*(Text("" if is_absent(c) else number(c) if is_number(c) else str(c)) for c in cells))
    console = Console()
    console.print(table, width=None if console.is_terminal else 200)
