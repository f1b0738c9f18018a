"""Charts of memory: peaks beside predictions, what a rank holds, and active memory over time."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.report.chart import Axis, Chart, Mark, Point, Series, file_name
from benchmarks.report.charts import gap, words
from benchmarks.report.facts import Facts, contexts
from benchmarks.report.tables import MEMORY_AREAS, MIB

GIB = 2**30


def peak_charts(facts: Sequence[Facts]) -> list[Chart]:
    """Measured peak memory as bars with the predicted one as a line across.

    Policies that ran the same phase and shape stand in one chart. What has nothing to stand beside is gathered by
    preset, so that phases, contexts and precisions can be compared.
    """
    by_shape: dict[tuple[str, str, str], list[Facts]] = defaultdict(list)
    for fact in facts:
        if fact.area in MEMORY_AREAS:
            rest = ",".join(part for part in fact.parameters.split(",") if not part.startswith("group"))
            by_shape[(fact.row.machine, words(fact.phase), rest)].append(fact)
    groups: dict[tuple[str, str, str], list[Facts]] = defaultdict(list)
    for (machine, phase, rest), group in by_shape.items():
        alone = len(group) == 1
        groups[(machine, "by phase" if alone else phase, rest.split(",")[0] if alone else rest)] += group
    charts: list[Chart] = []
    for (_, phase, rest), group in groups.items():
        if all(fact.metric("peak_memory") is None for fact in group):
            continue
        unit, unit_name = _unit(value for fact in group for value in _peaks(fact))
        series = []
        for name, metric, color in (("measured", "peak_memory", 0), ("predicted", "predicted_peak", -1)):
            points = tuple(_peak_point(fact, place, name, metric, unit) for place, fact in enumerate(group))
            series.append(Series(name=name, points=points, color=color, bound=color < 0))
        charts.append(
            Chart(
                id=file_name(f"memory {phase} {rest}", [chart.id for chart in charts]),
                title=f"Peak memory, {phase} ({rest})",
                kind="bars",
                x=Axis(label="", categories=tuple(_policy(fact, phase == "by phase") for fact in group)),
                y=Axis(label=unit_name, zero=True),
                series=tuple(series),
                caption="Lower is better. The line across a bar is what the planner predicted; beside it both numbers.",
                context=tuple(contexts(group)),
            )
        )
    return charts


def _peaks(fact: Facts) -> list[float]:
    return [value for name in ("peak_memory", "predicted_peak") if (value := fact.metric(name)) is not None]


def _policy(fact: Facts, alone: bool) -> str:
    name = fact.target + (f" of {size}" if (size := fact.shape.get("group")) else "")
    if not alone:
        return name
    shape = ", ".join(part for part in fact.parameters.split(",")[1:] if part != "w1")
    return f"{words(fact.phase)} · {shape}" + (f" · {name}" if name != "none" else "")


def _peak_point(fact: Facts, place: int, name: str, metric: str, unit: float) -> Point:
    value = fact.metric(metric)
    if value is not None:
        return Point(x=place, y=value / unit, note=f"{name} {value / MIB:,.1f} MiB")
    if fact.row.status == "ok":
        return Point(x=place, y=None, note=f"not {name}")
    return gap(fact, place, fact.row.reason)


def _unit(sizes: Iterable[float]) -> tuple[float, str]:
    """GiB where something reaches ten of them, otherwise MiB."""
    return (GIB, "GiB") if max(sizes, default=0) >= 10 * GIB else (MIB, "MiB")


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
        sums = [sum(fact.row.metrics.get(n, {}).get("predicted") or 0 for n in names) for fact in group]
        held = [sum(fact.metric(n) or 0 for n in names) for fact in group]
        unit, unit_name = _unit([*held, *sums])
        series = []
        for color, name in enumerate(names):
            said = words(name.removeprefix(prefix))
            values = [fact.metric(name) for fact in group]
            points = tuple(
                Point(
                    x=place,
                    y=value / unit if value is not None else None,
                    note=f"{said} {value / MIB:,.2f} MiB" if value is not None else f"no {said}",
                )
                for place, value in enumerate(values)
            )
            series.append(Series(name=said, points=points, color=color))
        marks = tuple(
            Point(x=place, y=total / unit, note=f"predicted {total / MIB:,.2f} MiB in all")
            for place, total in enumerate(sums)
        )
        series.append(Series(name="predicted in all", points=marks, color=-1, bound=True))
        charts.append(
            Chart(
                id=file_name(f"{area} memory {parameters}", [chart.id for chart in charts]),
                title=f"{words(area).capitalize()}: what a rank holds after a step ({parameters})",
                kind="bars",
                x=Axis(label="", categories=tuple(fact.target for fact in group)),
                y=Axis(label=f"{unit_name}, fullest rank", zero=True),
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
            title=f"Active memory, {words(fact.phase)} ({fact.parameters})"
            + (f", {fact.target}" if fact.target != "none" else ""),
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
    highest = max((used for _, used in samples), default=0)
    unit, unit_name = _unit([highest])
    points = []
    for index, (seconds, used) in enumerate(samples):
        if index:  # a step: the value held until now
            points.append(Point(x=seconds * 1e3, y=samples[index - 1][1] / unit))
        note = f"{used / unit:.4g} {unit_name} at {seconds * 1e3:.3f} ms"
        points.append(Point(x=seconds * 1e3, y=used / unit, note=note))
    return Chart(
        id=file_name(f"memory {title}"),
        title=title,
        kind="line",
        x=Axis(label="ms"),
        y=Axis(label=unit_name, zero=True),
        series=(Series(name="active memory", points=tuple(points), color=0, fill=True),),
        marks=tuple(Mark(x=seconds * 1e3, label=name, kind="phase") for seconds, name in phases),
        caption=f"Highest {highest / MIB:,.1f} MiB.",
        context=tuple(context),
    )
