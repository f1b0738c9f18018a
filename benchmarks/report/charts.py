"""Charts made from facts: which series, which axes, which gaps. `plots` and the page draw them."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.report.chart import Axis, Chart, Mark, Point, Series, file_name
from benchmarks.report.facts import Facts, contexts, peak_of
from benchmarks.report.tables import (
    ATTENTION_AREAS,
    COLLECTIVE_AREAS,
    MEMORY_AREAS,
    PARALLEL_AREAS,
    STEP_AREAS,
    STEP_PHASES,
    IsPeer,
    algorithm_bandwidth,
    bus_bandwidth,
    hidden_exposed,
    rate_unit,
)

MIB = 2**20


def colors(facts: Iterable[Facts], is_peer: IsPeer) -> dict[str, int]:
    """A color index for each target, our own first, so that a name keeps its color over all charts."""
    targets = {(is_peer(fact.area, fact.target), fact.area, fact.target): None for fact in facts}
    areas: dict[str, list[str]] = defaultdict(list)
    for _, area, target in sorted(targets):
        areas[area].append(target)
    return {target: index for names in areas.values() for index, target in enumerate(names)}


def attention_charts(facts: Sequence[Facts], is_peer: IsPeer) -> list[Chart]:
    """Rate against length: a chart for each phase and shape, a line for each implementation, the peak above.

    A configuration swept at a single length needs no chart; its table says it.
    """
    chosen = [fact for fact in facts if fact.area in ATTENTION_AREAS and fact.shape.get("S")]
    palette = colors(chosen, is_peer)
    groups: dict[tuple[Any, ...], list[Facts]] = defaultdict(list)
    for fact in chosen:
        rest = ",".join(p for p in fact.parameters.split(",") if p[:1] not in "ST" or not p[1:].isdigit())
        square = fact.shape["S"] == fact.shape.get("T", fact.shape["S"])
        groups[(fact.row.machine, fact.phase, rest, square)].append(fact)
    charts: list[Chart] = []
    for (_, phase, rest, square), group in groups.items():
        lengths = sorted({fact.shape["S"] for fact in group})
        if len(lengths) < 2:
            continue
        unit, unit_name = rate_unit(group)
        by_target: dict[str, list[Facts]] = defaultdict(list)
        for fact in group:
            by_target[fact.target].append(fact)
        lines = [
            Series(
                name=target,
                color=palette[target],
                peer=is_peer(one[0].area, target),
                points=tuple(_rate_point(fact, unit) for fact in sorted(one, key=lambda f: f.shape["S"])),
            )
            for target, one in by_target.items()
        ]
        lines.sort(key=lambda line: (line.peer, line.color))
        peak = peak_of(group[0].device_name, group[0].dtype)
        if peak:
            bound = [
                Point(x=n, y=peak.flops_per_second / unit, note="compute peak of the device") for n in lengths
            ]
            lines.append(Series(name="compute peak", points=tuple(bound), color=-1, bound=True))
        charts.append(
            Chart(
                id=file_name(f"attention {phase} {rest}", [chart.id for chart in charts]),
                title=f"Attention {_words(phase)}: rate against length ({rest})",
                kind="line",
                x=Axis(label="sequence length" + ("" if square else " (queries)"), log=2, unit="count"),
                y=Axis(label=unit_name, log=10),
                series=tuple(lines),
                caption="Higher is better. Visible query-key pairs only are counted; the backward pass "
                "counts 2.5 forward passes. Dashed lines are peers."
                + (
                    " The thin line is the device's compute peak."
                    if peak
                    else " This device's peak is not known."
                ),
                context=tuple(contexts(group)),
            )
        )
    return charts


def _words(name: str) -> str:
    return name.replace("forward_backward", "forward + backward").replace("_", " ")


def _rate_point(fact: Facts, unit: float) -> Point:
    rate = fact.per_second("flops")
    if rate is None:
        reason = fact.row.reason or (
            "no rate: time or work is zero or absent" if fact.row.status == "ok" else ""
        )
        return _gap(fact, fact.shape["S"], reason)
    share = fact.roofline_share
    note = _time_note(fact) + (f", {share:.1%} of the roofline" if share is not None else "")
    return Point(x=fact.shape["S"], y=rate / unit, note=note)


def _gap(fact: Facts, x: float, reason: str | None = None) -> Point:
    reason = reason if reason is not None else fact.row.reason
    status = fact.row.status if fact.row.status != "ok" else "no rate"
    return Point(x=x, y=None, note=f"{status}: {reason}" if reason else status, status=status)


def _time_note(fact: Facts) -> str:
    time = fact.time
    if time is None:
        return fact.row.status
    spread = f", spread {time.spread:.1%}" if time.spread is not None else ""
    return f"{time.median * 1e3:.4g} ms, {time.count} samples{spread}"


def step_charts(facts: Sequence[Facts]) -> list[Chart]:
    """Step time stacked by phase, one chart for each machine and rank count, a bar for each measured step."""
    groups: dict[tuple[Any, ...], list[Facts]] = defaultdict(list)
    for fact in facts:
        if fact.area in STEP_AREAS and any(name in fact.row.metrics for name in STEP_PHASES):
            groups[(fact.row.machine, fact.world_size)].append(fact)
    charts = []
    for (_, ranks), group in groups.items():
        group = [fact for fact in group if fact.time is not None]
        if not group:
            continue
        series = []
        for index, name in enumerate(STEP_PHASES):
            points = []
            for place, fact in enumerate(group):
                value = fact.metric_summary(name)
                note = f"{name}: {value.median * 1e3:.4g} ms" if value else f"no {name}"
                points.append(Point(x=place, y=value.median * 1e3 if value else None, note=note))
            series.append(Series(name=name, points=tuple(points), color=index))
        charts.append(
            Chart(
                id=file_name(f"step phases w{ranks}"),
                title="Step time by phase" + (f", {ranks} ranks" if ranks > 1 else ""),
                kind="bars",
                x=Axis(
                    label="",
                    categories=tuple(f"{fact.target} · {fact.phase} · {fact.parameters}" for fact in group),
                ),
                y=Axis(label="median ms", zero=True),
                series=tuple(series),
                caption="Lower is better. Phases are timed with a synchronisation between them; the table's "
                "total is timed without, and may be shorter than their sum.",
                context=tuple(contexts(group)),
            )
        )
    return charts


def collective_charts(facts: Sequence[Facts], is_peer: IsPeer) -> list[Chart]:
    """Time and bus bandwidth against size, a line for each implementation and rank count.

    Two charts for each machine and collective.
    """
    groups: dict[tuple[str, str], list[Facts]] = defaultdict(list)
    for fact in facts:
        if fact.area in COLLECTIVE_AREAS and fact.shape.get("bytes"):
            groups[(fact.row.machine, fact.phase)].append(fact)
    charts: list[Chart] = []
    for (_, phase), group in groups.items():
        by_line: dict[tuple[bool, str, int], list[Facts]] = defaultdict(list)
        for fact in group:
            by_line[(is_peer(fact.area, fact.target), fact.target, fact.world_size)].append(fact)
        keys = sorted(by_line)
        for quantity, label in (("time", "ms"), ("bandwidth", "bus bandwidth, GB/s")):
            series = []
            for index, key in enumerate(keys):
                peer, target, ranks = key
                points = []
                for fact in sorted(by_line[key], key=lambda f: f.shape["bytes"]):
                    rate = bus_bandwidth(fact) or algorithm_bandwidth(fact)
                    value = fact.seconds * 1e3 if fact.seconds else None
                    value = value if quantity == "time" else (rate / 1e9 if rate else None)
                    if value is None:
                        points.append(_gap(fact, fact.shape["bytes"]))
                        continue
                    note = _time_note(fact) + (f", {rate / 1e9:.3g} GB/s" if rate else "")
                    points.append(Point(x=fact.shape["bytes"], y=value, note=note))
                name = f"{target}, {ranks} ranks"
                series.append(Series(name=name, points=tuple(points), color=index, peer=peer))
            better = "Lower" if quantity == "time" else "Higher"
            charts.append(
                Chart(
                    id=file_name(f"{phase} {quantity}", [chart.id for chart in charts]),
                    title=f"{_words(phase).capitalize()}: {quantity} against size",
                    kind="line",
                    x=Axis(label="payload", log=10, unit="bytes"),
                    y=Axis(label=label, log=10),
                    series=tuple(series),
                    caption=f"{better} is better. The time is the slowest rank's; sizes are powers of ten.",
                    context=tuple(contexts(group)),
                )
            )
    return charts


def parallel_charts(facts: Sequence[Facts]) -> list[Chart]:
    """Data-parallel variants: computation, exposed and hidden communication of each step.

    One chart for each machine, preset and rank count.
    """
    groups: dict[tuple[Any, ...], list[Facts]] = defaultdict(list)
    for fact in facts:
        if fact.area in PARALLEL_AREAS and fact.seconds is not None:
            rest = ",".join(p for p in fact.parameters.split(",") if not p.startswith("bucket"))
            groups[(fact.row.machine, fact.phase, rest)].append(fact)
    charts: list[Chart] = []
    for (_, phase, rest), group in groups.items():
        parts: dict[str, list[Point]] = {
            "computation": [],
            "exposed communication": [],
            "hidden communication": [],
        }
        for place, fact in enumerate(group):
            assert fact.seconds is not None
            hidden, exposed = hidden_exposed(fact)
            communication = fact.metric("communication")
            if exposed is None and communication is not None:
                exposed = (
                    communication  # the overlap was not measured: all of it is shown as exposed, and said so
                )
            said = "" if hidden is not None else " (overlap not measured)"
            computation = fact.seconds - (exposed or 0) - (hidden or 0)
            values = (max(0.0, computation), exposed, hidden)
            for (name, points), value in zip(parts.items(), values, strict=True):
                note = f"{name}: {value * 1e3:.4g} ms{said}" if value is not None else f"{name} not measured"
                points.append(Point(x=place, y=value * 1e3 if value is not None else None, note=note))
        labels = [fact.target + (f" · {b} MB" if (b := fact.shape.get("bucket")) else "") for fact in group]
        charts.append(
            Chart(
                id=file_name(f"data parallel {phase} {rest}", [chart.id for chart in charts]),
                title=f"Data parallelism: what a step is made of ({rest})",
                kind="bars",
                x=Axis(label="", categories=tuple(labels)),
                y=Axis(label="median ms a step, slowest rank", zero=True),
                series=tuple(
                    Series(name=name, points=tuple(points), color=color)
                    for color, (name, points) in enumerate(parts.items())
                ),
                caption="Lower is better. Hidden communication runs while the processor computes: the bar's "
                "length is the step, and only its exposed part would vanish with an infinitely fast network.",
                context=tuple(contexts(group)),
            )
        )
    return charts


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
                title=f"Peak memory, {_words(phase)} ({rest})",
                kind="bars",
                x=Axis(label="", categories=tuple(names)),
                y=Axis(label="MiB", zero=True),
                series=tuple(series),
                caption="Lower is better. The line across a bar is what the planner predicted.",
                context=tuple(contexts(group)),
            )
        )
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
