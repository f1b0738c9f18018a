"""Tables as pandas DataFrames, made from rows: what the page shows and what the command line exports.

Every function takes facts (`facts.latest(rows)` gives the newest of each case) and returns a DataFrame whose
column names carry their units. Absent values are NA. `format_frame` turns any of them into Markdown, LaTeX,
Typst or CSV.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.report.facts import ABOVE_PEAK, WORK, Facts, Summary

if TYPE_CHECKING:
    from pandas import DataFrame, Series

MIB = 2**20
# What a table of records is keyed by: is a case's target somebody else's work?
IsPeer = Callable[[str, str], bool]
STEP_PHASES = ("forward", "backward", "optimizer")
ATTENTION_AREAS = ("attention",)
STEP_AREAS = ("step",)
COLLECTIVE_AREAS = ("collective", "collectives")
PARALLEL_AREAS = ("data_parallel", "sharding")
MEMORY_AREAS = ("memory",)


# Columns that are not floating-point numbers.
_TEXT = (
    "area | implementation | phase | parameters | status | part | dtype | mask | best peer | peer"
    " | peer status | reason | check | notes | run | case | change | commit | finding | suite | machine | during | made by"
    " | kernel | operator | kind | most time | sum | result | lesson"
)
_WHOLE = (
    "samples | heads | width | length | ranks | bytes | sent bytes | formula bytes | commits | without result"
    " | times | calls"
)


def frame(records: Sequence[Mapping[str, Any]], columns: str) -> "DataFrame":
    """Records as a DataFrame with the columns "one | two", of nullable types, so that absent stays absent."""
    import pandas

    def series(name: str) -> "Series[Any]":
        values = [one.get(name) for one in records]
        if name in _TEXT.split(" | "):
            return pandas.Series(values, dtype="string")
        if name not in _WHOLE.split(" | "):
            return pandas.Series(values, dtype="Float64")
        small = all(value is None or abs(value) < 2**63 for value in values)
        return pandas.Series(values, dtype="Int64" if small else "object")

    return pandas.DataFrame({name: series(name) for name in columns.split(" | ")})


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _percent(share: float | None) -> float | None:
    return None if share is None else share * 100


def ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over is not None and under else None


def check_text(fact: Facts) -> str | None:
    """The check beside its budget; None where there is nothing to check."""
    check = fact.row.check
    if check is None:
        return None
    error, budget = check.get("error"), check.get("budget")
    if error is None or budget is None:
        return "red: no finite error"
    return f"{'ok' if error <= budget else 'red'}: {error:.2g} of {budget:.2g}"


def flags(fact: Facts) -> str | None:
    """Why there is no number, or what a reader must know before believing it."""
    found = [fact.row.reason] if fact.row.reason else []
    if fact.oversubscribed:
        found.append("oversubscribed")
    if fact.row.dirty:
        found.append("uncommitted changes")
    if fact.time is not None and fact.time.count < 5:
        found.append(f"{fact.time.count} sample{'s' if fact.time.count > 1 else ''}")
    if fact.above_peak:
        found.append(ABOVE_PEAK)
    return "; ".join(found) or None


def peers_of(facts: Iterable[Facts], is_peer: IsPeer) -> list[tuple[Facts, list[Facts]]]:
    """Each of our own rows beside its peers: same configuration, same machine, *same run*, fastest first."""
    groups: dict[tuple[Any, ...], list[Facts]] = defaultdict(list)
    for fact in facts:
        groups[(fact.row.machine, fact.row.run, fact.row.commit, *fact.configuration)].append(fact)
    paired = []
    for group in groups.values():
        peers = sorted(
            (f for f in group if is_peer(f.area, f.target)), key=lambda f: (f.seconds is None, f.seconds or 0)
        )
        paired += [(fact, peers) for fact in group if not is_peer(fact.area, fact.target)]
    return paired


def headline(facts: Iterable[Facts], is_peer: IsPeer) -> "DataFrame":
    """Every own case that ran beside peers, with the fastest of its run; a ratio above 1: ours is faster."""
    records = []
    for fact, peers in peers_of(facts, is_peer):
        if not peers or fact.row.status == "skipped":
            continue
        best = peers[0] if peers and peers[0].seconds is not None else None
        notes = [flags(fact), f"{best.target} {ABOVE_PEAK}" if best and best.above_peak else None]
        records.append(identity(fact) | timing(fact) | {
            "best peer": best.target if best else None,
            "peer ms": _ms(best.seconds) if best else None,
            "peer/ours": ratio(best.seconds, fact.seconds) if best else None,
            "check": check_text(fact),
            "notes": "; ".join(filter(None, notes)) or None,
        })  # fmt: skip
    return frame(
        records,
        "area | implementation | phase | parameters | peer/ours | median ms | best peer | peer ms"
        " | status | samples | spread % | check | notes",
    )


def beside_peers(facts: Iterable[Facts], is_peer: IsPeer) -> "DataFrame":
    """Every own case that ran, with a column of ratios (peer over ours) for each peer of its run.

    A cell without a ratio says why the peer has no time ("oom", "skipped", ...).
    """
    import pandas

    records: list[dict[str, Any]] = []
    names: dict[str, None] = {}
    for fact, peers in peers_of(facts, is_peer):
        if not peers or fact.row.status == "skipped":
            continue
        record = identity(fact) | {"median ms": _ms(fact.seconds)}
        for peer in peers:
            ok = peer.row.status == "ok"
            record[peer.target] = ratio(peer.seconds, fact.seconds) if ok else peer.row.status
            names[peer.target] = None
        records.append(record)
    columns = ["area", "implementation", "phase", "parameters", "status", "median ms", *sorted(names)]
    return pandas.DataFrame(records, columns=columns, dtype=object)


def identity(fact: Facts) -> dict[str, Any]:
    return {
        "area": fact.area,
        "implementation": fact.target,
        "phase": fact.phase,
        "parameters": fact.parameters,
        "status": fact.row.status,
    }


def timing(fact: Facts) -> dict[str, Any]:
    time = fact.time
    return {
        "median ms": _ms(fact.seconds),
        "samples": time.count if time else None,
        "spread %": _percent(time.spread) if time else None,
    }


def steps(facts: Iterable[Facts]) -> "DataFrame":
    """End-to-end steps: mean, deviation, median, minimum of each phase and the total; tokens/s, MFU, memory.

    Phases are timed with a synchronisation between them, the total in a pass of its own without, so that
    phases need not add up to it.
    """
    records = []
    for fact in facts:
        if fact.area not in STEP_AREAS:
            continue
        peak = fact.metric("peak_memory")
        base = identity(fact) | {"notes": flags(fact)}
        records += [base | {"part": name} | _statistics(fact.metric_summary(name)) for name in STEP_PHASES
                    if name in fact.row.metrics]  # fmt: skip
        records.append(base | {"part": "total"} | _statistics(fact.time) | {
            "tokens/s": fact.per_second("tokens"),
            "MFU %": _percent(fact.mfu),
            "peak MiB": mebibytes(peak),
            "first call ms": _ms(fact.row.first_seconds),
        })  # fmt: skip
    return frame(
        records,
        "implementation | phase | parameters | part | status | mean ms | std ms | median ms"
        " | min ms | samples | tokens/s | MFU % | peak MiB | first call ms | notes",
    )


def _statistics(summary: Summary | None) -> dict[str, Any]:
    if summary is None:
        return {}
    return {
        "mean ms": _ms(summary.mean),
        "std ms": _ms(summary.std),
        "median ms": _ms(summary.median),
        "min ms": _ms(summary.minimum),
        "samples": summary.count,
    }


def rate_unit(facts: Iterable[Facts]) -> tuple[float, str]:
    """The unit in which these rates read best: TFLOP/s, or GFLOP/s where none reaches one TFLOP/s."""
    rates = [rate for fact in facts if (rate := fact.per_second("flops")) is not None]
    return (1e9, "GFLOP/s") if rates and max(rates) < 1e12 else (1e12, "TFLOP/s")


def attention(facts: Iterable[Facts]) -> "DataFrame":
    """Attention rate against length, one row a case: time, rate, share of the roofline where it is known."""
    chosen = [fact for fact in facts if fact.area in ATTENTION_AREAS]
    unit, name = rate_unit(chosen)
    records = []
    for fact in chosen:
        rate = fact.per_second("flops")
        records.append(identity(fact) | timing(fact) | {
            "dtype": fact.dtype,
            "heads": fact.shape.get("N"),
            "width": fact.shape.get("H"),
            "length": fact.shape.get("S"),
            "mask": fact.shape.get("mask"),
            name: rate / unit if rate is not None else None,
            "of roofline %": _percent(fact.roofline_share),
            "notes": flags(fact),
        })  # fmt: skip
    records.sort(key=lambda r: (r["phase"], r["dtype"], r["width"] or 0, r["length"] or 0))
    return frame(
        records,
        "implementation | phase | dtype | heads | width | mask | length | status | median ms"
        f" | {name} | of roofline % | samples | spread % | notes",
    )


def attention_rates(facts: Iterable[Facts]) -> "DataFrame":
    """Attention rates side by side: a line for each configuration, a column for each implementation.

    The unit is `rate_unit`'s. A cell without a rate says why ("oom", "skipped", "above the peak", ...); a cell
    that was never measured is absent, and a configuration without any rate is left out.
    """
    chosen = [fact for fact in facts if fact.area in ATTENTION_AREAS]
    unit, _ = rate_unit(chosen)
    lines: dict[tuple[Any, ...], dict[str, Any]] = {}
    names: dict[str, None] = {}
    for fact in chosen:
        shape = fact.shape
        key = (
            fact.phase,
            fact.dtype,
            shape.get("N") or 0,
            shape.get("H") or 0,
            shape.get("S") or 0,
            fact.parameters,
        )
        line = lines.setdefault(key, {"phase": fact.phase, "parameters": fact.parameters})
        rate = fact.per_second("flops")
        line[fact.target] = rate / unit if rate is not None else None
        if fact.row.status != "ok":
            line[fact.target] = fact.row.status
        elif fact.above_peak:
            line[fact.target] = "above the peak"
        names[fact.target] = None
    kept = [
        lines[key] for key in sorted(lines) if any(isinstance(value, float) for value in lines[key].values())
    ]
    import pandas

    return pandas.DataFrame(kept, columns=["phase", "parameters", *names], dtype=object)


def collectives(facts: Iterable[Facts]) -> "DataFrame":
    """Collectives: slowest rank's time, algorithm and bus bandwidth, bytes a rank sent beside the formula.

    Bus bandwidth as nccl-tests defines it; with two ranks an all-reduce's equals the algorithm bandwidth.
    """
    records = []
    for fact in facts:
        if fact.area not in COLLECTIVE_AREAS:
            continue
        size = fact.shape.get("bytes")
        records.append(identity(fact) | timing(fact) | {
            "ranks": fact.world_size,
            "bytes": size,
            "min ms": _ms(fact.time.minimum) if fact.time else None,
            "algbw GB/s": _gigabytes(algorithm_bandwidth(fact)),
            "busbw GB/s": _gigabytes(bus_bandwidth(fact)),
            "sent bytes": _integer(fact.metric("bytes_sent")),
            "formula bytes": _integer(formula_bytes(fact)),
            "check": check_text(fact),
            "notes": flags(fact),
        })  # fmt: skip
    records.sort(key=lambda r: (r["phase"], r["implementation"], r["ranks"], r["bytes"] or 0))
    return frame(
        records,
        "phase | implementation | ranks | bytes | status | median ms | min ms | algbw GB/s"
        " | busbw GB/s | sent bytes | formula bytes | samples | spread % | check | notes",
    )


def _gigabytes(rate: float | None) -> float | None:
    return None if rate is None else rate / 1e9


def _integer(value: float | None) -> int | None:
    return None if value is None else round(value)


def algorithm_bandwidth(fact: Facts) -> float | None:
    """Payload over time in bytes/s; None for a row without result or with a time of zero."""
    size = payload_bytes(fact)
    return size / fact.seconds if size is not None and fact.seconds else None


def payload_bytes(fact: Facts) -> float | None:
    """Bytes that the collective really held, after rounding to whole elements; else the size asked for."""
    return fact.metric("payload") or fact.shape.get("bytes")


def bus_bandwidth(fact: Facts) -> float | None:
    """Bytes/s over each link as `accounting.collectives` defines it; None for others."""
    from trainstep.accounting.collectives import OPS, bus_bandwidth

    size = payload_bytes(fact)
    if size is None or not fact.seconds or fact.phase not in OPS:
        return None
    return bus_bandwidth(fact.phase, size, fact.seconds, fact.world_size)


def formula_bytes(fact: Facts) -> float | None:
    """Bytes one rank sends by the ring's formula, or by that of passing whole tensors round."""
    from trainstep.accounting.collectives import OPS, bytes_sent

    size = payload_bytes(fact)
    op = f"whole_tensor_{fact.phase}" if fact.target == "whole-tensor" else fact.phase
    return bytes_sent(op, size, fact.world_size) if size is not None and op in OPS else None


def parallel(facts: Iterable[Facts], is_peer: IsPeer) -> "DataFrame":
    """Data-parallel variants: step, communication, its hidden and exposed parts, ratio to the best peer.

    Communication is noted from the start of each collective to its end, waiting for other ranks included; "traced"
    columns come from the kernels of one profiled step of rank 0.
    """
    chosen = [fact for fact in facts if fact.area in PARALLEL_AREAS]
    best: dict[str, Facts | None] = {}
    for fact, peers in peers_of(chosen, is_peer):
        best[fact.row.case] = peers[0] if peers and peers[0].seconds is not None else None
    records = []
    for fact in chosen:
        communication, share = fact.metric("communication"), fact.metric("hidden_share")
        hidden, exposed = hidden_exposed(fact)
        traced = fact.row.metrics.get("traced_hidden_share", {}) if fact.row.status == "ok" else {}
        peer = best.get(fact.row.case)
        records.append(identity(fact) | timing(fact) | {
            "ranks": fact.world_size,
            "step ms": _ms(fact.seconds),
            "communication ms": _ms(communication),
            "of step %": _percent(ratio(communication, fact.seconds)),
            "hidden %": _percent(share),
            "hidden ms": _ms(hidden),
            "exposed ms": _ms(exposed),
            "traced communication ms": _ms(traced.get("communication_seconds")),
            "traced hidden %": _percent(traced.get("value")),
            "best peer": peer.target if peer else None,
            "peer/ours": ratio(peer.seconds, fact.seconds) if peer else None,
            "check": check_text(fact),
            "notes": flags(fact),
        })  # fmt: skip
    return frame(
        records,
        "implementation | phase | parameters | ranks | status | step ms | communication ms"
        " | of step % | hidden % | hidden ms | exposed ms | traced communication ms | traced hidden % | best peer"
        " | peer/ours | samples"
        " | spread % | check | notes",
    )


def hidden_exposed(fact: Facts) -> tuple[float | None, float | None]:
    """Communication seconds behind computation and beside it; both None unless the share was measured."""
    communication, share = fact.metric("communication"), fact.metric("hidden_share")
    if communication is None or share is None:
        return None, None
    return communication * share, communication * (1 - share)


def statuses(facts: Iterable[Facts]) -> "DataFrame":
    """Every row without a speed, with its reason: out of memory, failed, skipped here, or check red."""
    records = [
        identity(fact) | {"reason": fact.row.reason, "check": check_text(fact), "run": fact.row.run}
        for fact in facts
        if fact.row.status != "ok"
    ]
    records.sort(
        key=lambda r: ("red", "error", "oom", "skipped").index(r["status"]) if r["status"] != "ok" else 9
    )
    return frame(records, "status | area | implementation | phase | parameters | reason | check | run")


def mebibytes(size: float | None) -> float | None:
    return None if size is None else size / MIB


_UNITS = {"byte": ("MiB", 1 / MIB), "s": ("ms", 1e3), "1": ("", 1.0)}


def every_row(facts: Iterable[Facts]) -> "DataFrame":
    """Rows of any area: time, rate where the work is known, a column for each metric, and the check."""
    import pandas

    records: list[dict[str, Any]] = []
    metrics: dict[str, None] = {}
    for fact in facts:
        rate = fact.per_second("flops")
        record = identity(fact) | timing(fact)
        record |= {"GFLOP/s": rate / 1e9 if rate is not None else None}
        for name, entry in fact.row.metrics.items():
            value = fact.metric(name)
            if name in WORK or value is None:
                continue
            stored = str(entry.get("unit") or "")
            unit, factor = _UNITS.get(stored, (stored, 1.0))
            column = f"{name.replace('_', ' ')} {unit}".strip()
            record[column] = value * factor
            metrics[column] = None
        records.append(record | {"check": check_text(fact), "notes": flags(fact)})
    columns = ["area", "implementation", "phase", "parameters", "status", "median ms", "GFLOP/s"]
    columns += [*metrics, "samples", "spread %", "check", "notes"]
    return pandas.DataFrame(records, columns=columns, dtype=object)
