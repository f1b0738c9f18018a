"""Both lanes of traced steps: when the device computed and when it communicated."""

from collections.abc import Sequence

from benchmarks.measure.overlap import Interval, intersection
from benchmarks.report.chart import Axis, Chart, Point, Series, file_name
from benchmarks.report.charts import beside_one_another, variant_name, words
from benchmarks.report.facts import Facts, contexts


def lane_charts(facts: Sequence[Facts]) -> list[Chart]:
    """A chart for each machine and configuration: the traced steps of its variants on one time axis.

    A row has a trace when its metric "traced_hidden_share" comes with the intervals of both lanes. The upper lane is
    computation, the lower one communication, its hidden parts apart from its exposed ones.
    """
    found: list[Chart] = []
    for (_, area, phase, rest), group in beside_one_another(f for f in facts if _lanes(f) is not None):
        parts: dict[str, list[Point]] = {
            "computation": [], "exposed communication": [], "hidden communication": [],
        }  # fmt: skip
        names = []
        for place, fact in enumerate(group):
            lanes = _lanes(fact)
            assert lanes is not None
            computing, communicating = lanes
            hidden = intersection(computing, communicating)
            share = fact.row.metrics["traced_hidden_share"]["value"]
            names.append(f"{variant_name(fact)}: {share:.1%} of the communication hidden")
            for name, at, intervals in (
                ("computation", place, computing),
                ("exposed communication", place + 0.5, _without(communicating, hidden)),
                ("hidden communication", place + 0.5, hidden),
            ):
                took = sum(end - start for start, end in intervals)
                note = f"{name}: {took * 1e3:.4g} ms in {len(intervals)} pieces"
                parts[name] += [
                    Point(x=at, y=start * 1e3, until=end * 1e3, note="" if number else note)
                    for number, (start, end) in enumerate(intervals)
                ]
        found.append(
            Chart(
                id=file_name(f"lanes {area} {phase} {rest}", [chart.id for chart in found]),
                title=f"{words(area).capitalize()}: both lanes of a step ({rest})",
                kind="lanes",
                x=Axis(label="", categories=tuple(names)),
                y=Axis(label="ms of one step on rank 0, from the profiler's trace", zero=True),
                series=tuple(
                    Series(name=name, points=tuple(points), color=color)
                    for color, (name, points) in enumerate(parts.items())
                ),
                caption="Upper lane: computing; lower lane: communicating. Where the upper lane is empty the device waits, "
                "for the host or for the other ranks. Gaps below a thousandth of the step are closed in the "
                "picture, not in the share.",
                context=tuple(contexts(group)),
            )
        )
    return found


def _lanes(fact: Facts) -> tuple[list[Interval], list[Interval]] | None:
    """Disjoint (start, end) in seconds of computation and of communication; None without a trace."""
    entry = fact.row.metrics.get("traced_hidden_share")
    if (
        entry is None
        or fact.row.status != "ok"
        or not (entry.get("computation") and entry.get("communication"))
    ):
        return None
    return tuple([(start, end) for start, end in entry[name]] for name in ("computation", "communication"))  # type: ignore[return-value]


def _without(intervals: Sequence[Interval], parts: Sequence[Interval]) -> list[Interval]:
    """Intervals less their parts, both disjoint and in order, the parts inside the intervals."""
    left = []
    for start, end in intervals:
        for from_, to in parts:
            if start <= from_ and to <= end:
                if start < from_:
                    left.append((start, from_))
                start = to
        if start < end:
            left.append((start, end))
    return left
