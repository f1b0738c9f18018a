"""Rows as tables in the terminal: every row beside its peers, grouped by what they have in common."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.measure.record import Row

if TYPE_CHECKING:
    from pandas import DataFrame

    from benchmarks.report.facts import Facts


def is_peer(area: str, target: str) -> bool:
    """True when the target of an area is somebody else's work."""
    from benchmarks.cases import AREAS

    module = AREAS.get(area)
    return module is not None and target in module.ROWS and module.ROWS[target].peer


def _milliseconds(name: str) -> Callable[["Facts"], float | None]:
    def value(fact: "Facts") -> float | None:
        seconds = fact.metric(name)
        return None if seconds is None else seconds * 1e3

    return value


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else value * scale


def _extra_columns() -> dict[str, dict[str, Callable[["Facts"], float | None]]]:
    """What an area shows besides times: column name -> value of a row."""
    from benchmarks.report.facts import Facts
    from benchmarks.report.tables import algorithm_bandwidth, bus_bandwidth

    parallel: dict[str, Callable[[Facts], float | None]] = {
        "communication ms": _milliseconds("communication"),
        "hidden %": lambda fact: _scaled(fact.metric("hidden_share"), 100),
    }
    return {
        "step": {
            "forward ms": _milliseconds("forward"),
            "backward ms": _milliseconds("backward"),
            "optimizer ms": _milliseconds("optimizer"),
            "tokens/s": lambda fact: fact.per_second("tokens"),
            "MFU %": lambda fact: _scaled(fact.mfu, 100),
            "peak MiB": lambda fact: _scaled(fact.metric("peak_memory"), 2**-20),
        },
        "attention": {
            "TFLOP/s": lambda fact: _scaled(fact.per_second("flops"), 1e-12),
            "roofline %": lambda fact: _scaled(fact.roofline_share, 100),
        },
        "collective": {
            "algbw GB/s": lambda fact: _scaled(algorithm_bandwidth(fact), 1e-9),
            "busbw GB/s": lambda fact: _scaled(bus_bandwidth(fact), 1e-9),
            "sent MB": lambda fact: _scaled(fact.metric("bytes_sent"), 1e-6),
        },
        "data_parallel": parallel,
        "sharding": parallel
        | {
            f"{component} MiB": lambda fact, name=f"after_step_{component}": _scaled(
                fact.metric(name), 2**-20
            )
            for component in ("parameters", "gradients", "optimizer")
        },
    }


def print_rows(rows: Sequence[Row]) -> None:
    """One table for each group of rows that share area, phase and parameters; then what has no speed, and why."""
    import pandas

    from benchmarks.report import facts

    found = facts.latest(rows)
    extra = _extra_columns()
    groups: dict[tuple[str, str, str], list[Facts]] = {}
    for fact in found:
        if fact.row.status == "ok":
            groups.setdefault(fact.configuration, []).append(fact)
    for (area, phase, parameters), group in groups.items():
        best = min((f.seconds for f in group if is_peer(f.area, f.target) and f.seconds), default=None)
        lines = []
        for fact in sorted(group, key=lambda fact: fact.seconds or 0):
            assert fact.time is not None
            line: dict[str, Any] = {
                "implementation": fact.target + (" (peer)" if is_peer(area, fact.target) else ""),
                "median ms": fact.time.median * 1e3,
                "min ms": fact.time.minimum * 1e3,
                "spread %": _scaled(fact.time.spread, 100),
                "samples": fact.time.count,
                "best peer / this": best / fact.seconds if best and fact.seconds else None,
            }
            line |= {name: value(fact) for name, value in extra.get(area, {}).items()}
            lines.append(line | {"notes": facts.ABOVE_PEAK if fact.above_peak else None})
        print_frame(f"{area} {phase} · {parameters}", pandas.DataFrame(lines))
    failed = [fact for fact in found if fact.row.status != "ok"]
    lines = [{"status": f.row.status, "case": f.row.case, "reason": f.row.reason} for f in failed]
    # One line a target and reason: what cannot run here would otherwise fill the screen.
    grouped: dict[tuple[str, str], list[str]] = {}
    for entry in lines:
        area_target = "/".join(str(entry["case"]).split("/")[:2])
        grouped.setdefault((f"{entry['status']} {area_target}", str(entry["reason"])), []).append(
            str(entry["case"])
        )
    print_frame(
        "Without a speed",
        pandas.DataFrame(
            [
                {"status": what, "cases": len(cases), "reason": reason, "first": cases[0].split("/", 2)[2]}
                for (what, reason), cases in grouped.items()
            ]
        ),
    )


def print_warmup_study(rows: Sequence[Row]) -> None:
    """The same cases with different numbers of warm-up steps, side by side."""
    import pandas

    from benchmarks.report.facts import facts_of

    lines = []
    for fact in sorted(map(facts_of, rows), key=lambda fact: (fact.row.case, fact.row.env["warmup"])):
        if fact.time is not None:
            lines.append(
                {
                    "implementation": fact.target,
                    "phase": fact.phase,
                    "parameters": fact.parameters,
                    "warm-up": fact.row.env["warmup"],
                    "first call ms": _scaled(fact.row.first_seconds, 1e3),
                    "mean ms": fact.time.mean * 1e3,
                    "std ms": _scaled(fact.time.std, 1e3),
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
    # Text objects throughout: what comes from outside is never read as rich markup.
    table = Table(title=Text(title, style="bold"), title_justify="left")
    columns = [name for name in frame.columns if not all(is_absent(value) for value in frame[name])]
    for name in columns:
        numeric = any(is_number(value) for value in frame[name])
        table.add_column(name, justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
    for _, line in frame.iterrows():
        cells = [line[name] for name in columns]
        table.add_row(*(Text("" if is_absent(c) else number(c) if is_number(c) else str(c)) for c in cells))
    console = Console()
    if not console.is_terminal:  # a log has no width of its own
        console = Console(width=160)
    console.print(table)
