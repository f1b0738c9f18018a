"""Tables of what `profile` and `precision` saw: kernels by phase, sums, dtypes under autocast."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.measure.kernel_names import short_name
from benchmarks.measure.profile import unit_of
from benchmarks.measure.record import Row
from benchmarks.report.facts import Facts
from benchmarks.report.tables import STEP_PHASES, frame, identity

if TYPE_CHECKING:
    from pandas import DataFrame

Line = Mapping[str, Any]


def phases_of(row: Row) -> dict[str, Sequence[Line]]:
    """Each phase's kernels as stored, the most expensive first: name, kind, calls, seconds, share."""
    return {name: metric["kernels"] for name, metric in row.metrics.items() if "kernels" in metric}


def answers_of(row: Row) -> list[str]:
    """The usual questions answered in words."""
    return list(row.metrics.get("answers", {}).get("said", ()))


def profiles(facts: Iterable[Facts]) -> "DataFrame":
    """Profiled steps side by side: device time of each phase, the share of matrix products, softmax beside the products
    of attention in one forward, and what takes most time of the step."""
    records = []
    for fact in _ok(facts, "profile"):
        phases = phases_of(fact.row)
        every = [line for lines in phases.values() for line in lines]
        split = fact.row.metrics.get("softmax_to_matmul", {})
        records.append(identity(fact) | {
            **{f"{name} ms": _milliseconds(fact.metric(name)) for name in STEP_PHASES},
            "products in forward %": _products(phases.get("forward", ())),
            "products in step %": _products(every) if len(phases) > 1 else None,
            "softmax ms": _milliseconds(split.get("softmax_seconds")),
            "attention products ms": _milliseconds(split.get("matmul_seconds")),
            "softmax/products": split.get("value"),
            "most time": _most_time(every),
        })  # fmt: skip
    return frame(
        records,
        "implementation | phase | parameters | forward ms | backward ms | optimizer ms | products in forward %"
        " | products in step % | softmax ms | attention products ms | softmax/products | most time",
    )


def _ok(facts: Iterable[Facts], area: str) -> list[Facts]:
    return [fact for fact in facts if fact.area == area and fact.row.status == "ok"]


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _products(lines: Sequence[Line]) -> float | None:
    total = sum(line["seconds"] for line in lines)
    return 100 * sum(line["seconds"] for line in lines if line["kind"] == "matmul") / total if total else None


def _most_time(lines: Sequence[Line]) -> str | None:
    seconds: dict[str, float] = {}
    for line in lines:
        seconds[line["name"]] = seconds.get(line["name"], 0.0) + line["seconds"]
    return short_name(max(seconds, key=lambda name: seconds[name])) if seconds else None


def _shown(fact: Facts, top: int) -> list[tuple[str, Line, str | None]]:
    """(phase, line, full name) of the `top` most expensive kernels of each phase, then of what is left in one line."""
    shown: list[tuple[str, Line, str | None]] = []
    for phase, lines in phases_of(fact.row).items():
        shown += [(phase, {**line, "name": short_name(line["name"])}, line["name"]) for line in lines[:top]]
        if rest := lines[top:]:
            summed = {key: sum(line[key] for line in rest) for key in ("calls", "seconds", "share")}
            name = f"{len(rest)} other{'s' if len(rest) > 1 else ''}"
            shown.append((phase, {"name": name, "kind": None, **summed}, None))
    return shown


def kernels(fact: Facts, top: int) -> "DataFrame":
    """The kernels (on a CPU: operators) of a profiled step by phase, each phase's most expensive ones, by short names.

    "share %" is of the phase's device time.
    """
    unit = unit_of(fact.row.env.get("device", ""))
    records = [
        {
            "phase": phase,
            unit: line["name"],
            "kind": line["kind"],
            "calls": line["calls"],
            "ms": line["seconds"] * 1e3,
            "share %": line["share"] * 100,
        }
        for phase, line, _ in _shown(fact, top)
    ]
    return frame(records, f"phase | {unit} | kind | calls | ms | share %")


def full_names(fact: Facts, top: int) -> list[str | None]:
    """The names that `kernels` shortens, row by row; None for several in one."""
    return [full for _, _, full in _shown(fact, top)]


def sums(facts: Iterable[Facts]) -> "DataFrame":
    """What 1000 additions of 0.01 give, by the dtypes of sum and number; four decimals as text."""
    records = [
        {"sum": name, "result": f"{metric['value']:.4f}", "lesson": metric.get("lesson")}
        for fact in _ok(facts, "precision")
        if fact.target == "accumulation"
        for name, metric in fact.row.metrics.items()
    ]
    return frame(records, "sum | result | lesson")


def dtypes(facts: Iterable[Facts]) -> "DataFrame":
    """The dtype of each tensor of a step under autocast, a column for each lower dtype."""
    import pandas

    found: dict[tuple[str, str, str], dict[str, str]] = {}
    names: dict[str, None] = {}
    for fact in _ok(facts, "precision"):
        for tensor in fact.row.metrics.get("dtypes", {}).get("tensors", ()):
            key = fact.parameters.rsplit(",", 2)[0], tensor["what"], tensor["of"]
            line = found.setdefault(key, dict(zip(("model", "tensor", "of"), key, strict=True)))
            line[f"under {fact.dtype}"] = tensor["dtype"]
            names[f"under {fact.dtype}"] = None
    return pandas.DataFrame(list(found.values()), columns=["model", "tensor", "of", *names], dtype=object)
