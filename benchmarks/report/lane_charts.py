"""Both lanes of a traced step: when the device computed and when it communicated."""

from collections.abc import Iterator, Sequence

from benchmarks.report.chart import Axis, Chart, Point, Series, file_name
from benchmarks.report.facts import Facts, contexts

# Both areas start at the bottom: the lower one stays visible inside the higher.
_LANES = (("computation", 2.0), ("communication", 1.0))


def lane_charts(facts: Sequence[Facts]) -> list[Chart]:
    """A chart for each row whose step was traced: the metric "traced_hidden_share" with its two lanes."""
    found: list[Chart] = []
    for fact in facts:
        entry = fact.row.metrics.get("traced_hidden_share")
        if entry is None or fact.row.status != "ok" or not all(entry.get(name) for name, _ in _LANES):
            continue
        found.append(
            Chart(
                id=file_name(f"lanes {fact.row.case}", [chart.id for chart in found]),
                title=f"{fact.target}: {entry['value']:.1%} of the communication hidden ({fact.parameters})",
                kind="line",
                x=Axis(label="ms of one step on rank 0, from the profiler's trace"),
                y=Axis(label="2: computing, 1: communicating", zero=True),
                series=tuple(
                    Series(name=name, points=tuple(_steps(entry[name], height)), color=color, fill=True)
                    for color, (name, height) in enumerate(_LANES)
                ),
                caption="Where both lanes are filled, communication runs behind the computation. Gaps below a "
                "thousandth of the step are closed in the picture, not in the share.",
                context=tuple(contexts([fact])),
            )
        )
    return found


def _steps(intervals: Sequence[Sequence[float]], height: float) -> Iterator[Point]:
    """A square wave: `height` inside the intervals (seconds), zero between them."""
    for start, end in intervals:
        note = f"{start * 1e3:.2f} to {end * 1e3:.2f} ms"
        for x, y in ((start, 0.0), (start, height), (end, height), (end, 0.0)):
            yield Point(x=x * 1e3, y=y, note=note)
