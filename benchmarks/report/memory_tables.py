"""Tables of memory: peaks beside predictions, and the largest allocations of a step."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from benchmarks.report.facts import Facts
from benchmarks.report.tables import (
    MEMORY_AREAS,
    STEP_PHASES,
    check_text,
    flags,
    frame,
    identity,
    mebibytes,
    ratio,
    timing,
)

if TYPE_CHECKING:
    from pandas import DataFrame


def memory(facts: Iterable[Facts]) -> "DataFrame":
    """Peak memory of checkpointing policies and the like beside the planner's prediction, with what they cost in time.

    "forward MiB", "backward MiB" and "optimizer MiB" are the peaks within each phase.
    """
    records = []
    for fact in facts:
        if fact.area in MEMORY_AREAS:
            peak, predicted = fact.metric("peak_memory"), fact.metric("predicted_peak")
            records.append(identity(fact) | timing(fact) | {
                "peak MiB": mebibytes(peak),
                "predicted MiB": mebibytes(predicted),
                "peak/predicted": ratio(peak, predicted),
                **{f"{name} MiB": mebibytes(fact.metric(f"peak_{name}")) for name in STEP_PHASES},
                "tokens/s": fact.per_second("tokens"),
                "check": check_text(fact),
                "notes": flags(fact),
            })  # fmt: skip
    return frame(
        records,
        "implementation | phase | parameters | status | peak MiB | predicted MiB | peak/predicted | forward MiB"
        " | backward MiB | optimizer MiB | median ms | tokens/s | samples | spread % | check | notes",
    )


def allocations(facts: Iterable[Facts]) -> "DataFrame":
    """The largest allocations of each recorded step: their size, how often, in which phase, and the frame that asked."""
    records = [
        identity(fact)
        | {
            "MiB": mebibytes(one["bytes"]),
            "times": one["count"],
            "during": one["phase"],
            "made by": one["frame"],
        }
        for fact in facts
        if fact.row.status == "ok"
        for one in fact.row.metrics.get("active_memory", {}).get("allocations", ())
    ]
    return frame(records, "implementation | phase | parameters | MiB | times | during | made by")
