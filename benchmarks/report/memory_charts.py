"""Charts of memory: peaks beside predictions, what a rank holds, and active memory over time."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from benchmarks.report.chart import Axis, Chart, Mark, Point, Series, file_name
from benchmarks.report.charts import words
from benchmarks.report.facts import Facts, contexts
from benchmarks.report.tables import MEMORY_AREAS, MIB


def policy_charts(facts: Sequence[Facts]) -> list[Chart]:
    """Measured peak memory as bars with the predicted one as a line across, a chart for each phase and shape."""
    groups: dict[tuple[Any, ...], list[Facts]] = defaultdict(list)
    for fact in facts:
        if fact.area in MEMORY_AREAS and fact.metric("peak_memory") is not None:
            rest = ",".join(part for part in fact.parameters.split(",") if not part.startswith("group"))
            groups[(fact.row.machine, fact.phase, rest)].append(fact)
    charts: list[Chart] = []
    for (_, phase, rest), group in groups.items():
        series = []
        for color, (name, metric) in enumerate(
            (("measured", "peak_memory"), ("predicted", "predicted_peak"))
        ):
            points = []
            for place, fact in enumerate(group):
                value = fact.metric(metric)
                note = f"{name} {value / MIB:,.1f} MiB" if value is not None else f"not {name}"
                points.append(Point(x=place, y=value / MIB if value is not None else None, note=note))
            bound = name == "predicted"
            series.append(Series(name=name, points=tuple(points), color=-1 if bound else color, bound=bound))
        names = [fact.target + (f" of {size}" if (size := fact.shape.get("group")) else "") for fact in group]
        charts.append(
            Chart(
                id=file_name(f"memory {phase} {rest}", [chart.id for chart in charts]),
                title=f"Peak memory, {words(phase)} ({rest})",
                kind="bars",
                x=Axis(label="", categories=tuple(names)),
                y=Axis(label="MiB", zero=True),
                series=tuple(series),
                caption="Lower is better. The line across a bar is what the planner predicted.",
                context=tuple(contexts(group)),
            )
        )
    return charts


def component_charts(facts: Sequence[Facts]) -> list[Chart]:
    """Bytes the fullest rank holds after a step, stacked by component, with the predicted sum as a line across.

    Components are the metrics "after_step_*" that carry a prediction beside their value.
    """
    prefix = "after_step_"
    groups: dict[tuple[Any, ...], list[Facts]] = defaultdict(list)
    for fact in facts:
        if any(name.startswith(prefix) for name in fact.row.metrics) and fact.row.status == "ok":
            groups[(fact.row.machine, fact.area, fact.parameters)].append(fact)
    charts: list[Chart] = []
    for (_, area, parameters), group in groups.items():
        names = list(dict.fromkeys(n for fact in group for n in fact.row.metrics if n.startswith(prefix)))
        series = []
        for color, name in enumerate(names):
            said = words(name.removeprefix(prefix))
            values = [fact.metric(name) for fact in group]
            points = tuple(
                Point(
                    x=place,
                    y=value / MIB if value is not None else None,
                    note=f"{said} {value / MIB:,.2f} MiB" if value is not None else f"no {said}",
                )
                for place, value in enumerate(values)
            )
            series.append(Series(name=said, points=points, color=color))
        sums = [sum(fact.row.metrics.get(n, {}).get("predicted") or 0 for n in names) for fact in group]
        marks = tuple(
            Point(x=place, y=total / MIB, note=f"predicted {total / MIB:,.2f} MiB in all")
            for place, total in enumerate(sums)
        )
        series.append(Series(name="predicted in all", points=marks, color=-1, bound=True))
        charts.append(
            Chart(
                id=file_name(f"{area} memory {parameters}", [chart.id for chart in charts]),
                title=f"{words(area).capitalize()}: what a rank holds after a step ({parameters})",
                kind="bars",
                x=Axis(label="", categories=tuple(fact.target for fact in group)),
                y=Axis(label="MiB, fullest rank", zero=True),
                series=tuple(series),
                caption="Lower is better. The line across a bar is the predicted sum.",
                context=tuple(contexts(group)),
            )
        )
    return charts


def memory_charts(facts: Sequence[Facts]) -> list[Chart]:
    """A timeline for each row that kept one.

    That is the metric "active_memory", whose "samples" are bytes in use, each from the same place of "seconds" on,
    and whose "phases" are pairs of the second at which one begins and its name.
    """
    charts: list[Chart] = []
    for fact in facts:
        entry = fact.row.metrics.get("active_memory")
        if entry is None or fact.row.status != "ok" or not entry.get("seconds"):
            continue
        chart = memory_chart(
            list(zip(entry["seconds"], entry["samples"], strict=True)),
            phases=[(seconds, name) for seconds, name in entry.get("phases", ())],
            title=f"Active memory: {fact.row.case}",
            context=contexts([fact]),
        )
        charts.append(chart)
    return charts


def memory_chart(
    samples: Sequence[tuple[float, float]],
    *,
    phases: Sequence[tuple[float, str]] = (),
    title: str = "Active memory",
    context: Sequence[str] = (),
) -> Chart:
    """Active memory over time.

    Args:
        samples: (seconds, bytes) in order of time; a value holds until the next.
        phases: (seconds at which it begins, name).
        title: of the chart.
        context: provenance lines.
    """
    points = []
    for index, (seconds, used) in enumerate(samples):
        if index:  # a step: the value held until now
            points.append(Point(x=seconds * 1e3, y=samples[index - 1][1] / MIB))
        points.append(
            Point(x=seconds * 1e3, y=used / MIB, note=f"{used / MIB:.1f} MiB at {seconds * 1e3:.3f} ms")
        )
    return Chart(
        id=file_name(f"memory {title}"),
        title=title,
        kind="line",
        x=Axis(label="ms"),
        y=Axis(label="MiB", zero=True),
        series=(Series(name="active memory", points=tuple(points), color=0, fill=True),),
        marks=tuple(Mark(x=seconds * 1e3, label=name, kind="phase") for seconds, name in phases),
        caption=f"Highest {max((used for _, used in samples), default=0) / MIB:.1f} MiB.",
        context=tuple(context),
    )
