"""Charts made from facts: which series, which axes, which gaps. `plots` and the page draw them."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.report.chart import Axis, Chart, Point, Series, file_name
from benchmarks.report.facts import ABOVE_PEAK, Facts, contexts
from benchmarks.report.tables import (
    ATTENTION_AREAS,
    COLLECTIVE_AREAS,
    PARALLEL_AREAS,
    STEP_AREAS,
    STEP_PHASES,
    IsPeer,
    algorithm_bandwidth,
    bus_bandwidth,
    hidden_exposed,
    rate_unit,
)


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
        bound = _roofline(group, unit)
        if bound is not None:
            lines.append(bound)
        charts.append(
            Chart(
                id=file_name(f"attention {phase} {rest}", [chart.id for chart in charts]),
                title=f"Attention {words(phase)}: rate against length ({rest})",
                kind="line",
                x=Axis(label="sequence length" + ("" if square else " (queries)"), log=2, unit="count"),
                y=Axis(label=unit_name, log=10),
                series=tuple(lines),
                caption="Higher is better. Visible query-key pairs only are counted; the backward pass "
                "counts 2.5 forward passes. Dashed lines are peers."
                + (
                    " The thin line is the roofline: compute peak, or memory bandwidth times FLOPs a byte."
                    if bound
                    else " This device's peak is not known."
                ),
                context=tuple(contexts(group)),
            )
        )
    return charts


def _roofline(group: Sequence[Facts], unit: float) -> Series | None:
    """What the device allows at each length: the compute peak, below it intensity times memory bandwidth."""
    allowed: dict[int, float] = {}
    for fact in group:
        rate = fact.attainable_flops_per_second
        if rate is not None and fact.row.status == "ok":
            length = fact.shape["S"]
            allowed[length] = min(rate, allowed.get(length, rate))
    if not allowed:
        return None
    points = tuple(
        Point(x=length, y=rate / unit, note="compute peak or memory bandwidth of the device")
        for length, rate in sorted(allowed.items())
    )
    return Series(name="roofline", points=points, color=-1, bound=True)


def words(name: str) -> str:
    """A name from a case id as one says it."""
    return name.replace("forward_backward", "forward + backward").replace("_", " ")


def _rate_point(fact: Facts, unit: float) -> Point:
    rate, length = fact.per_second("flops"), fact.shape["S"]
    if rate is None:
        unknown = "time or work is zero or absent" if fact.row.status == "ok" else fact.row.reason
        return gap(fact, length, unknown)
    if fact.above_peak:
        return Point(x=length, y=None, note=f"{ABOVE_PEAK} ({_time_note(fact)})", status="above the peak")
    share = fact.roofline_share
    note = _time_note(fact) + (f", {share:.1%} of the roofline" if share is not None else "")
    return Point(x=length, y=rate / unit, note=note)


def gap(fact: Facts, x: float, reason: str | None) -> Point:
    """The place of a row without a value, with its status and the reason."""
    status = fact.row.status if fact.row.status != "ok" else "no rate"
    return Point(x=x, y=None, note=f"{status}: {reason}" if reason else status, status=status)


def _time_note(fact: Facts) -> str:
    time = fact.time
    if time is None:
        return fact.row.status
    spread = f", spread {time.spread:.1%}" if time.spread is not None else ""
    return f"{time.median * 1e3:.4g} ms, {time.count} samples{spread}"


def step_charts(facts: Sequence[Facts]) -> list[Chart]:
    """Step time stacked by phase: a chart for each machine and configuration, a bar for each way of running it."""
    groups: dict[tuple[str, str], list[Facts]] = defaultdict(list)
    for fact in facts:
        if fact.area in STEP_AREAS:
            groups[(fact.row.machine, fact.parameters)].append(fact)
    charts: list[Chart] = []
    for (_, parameters), group in groups.items():
        if all(fact.time is None for fact in group):
            continue
        shown: list[tuple[str, int, list[Point]]] = [
            (name, color, [_phase_point(fact, name, place) for place, fact in enumerate(group)])
            for color, name in enumerate(STEP_PHASES)
        ]
        if any(fact.time is not None and not has_phases(fact) for fact in group):
            undivided = [_undivided_point(fact, place) for place, fact in enumerate(group)]
            shown.append(("not timed by phase", len(STEP_PHASES), undivided))
        whole = tuple(
            Point(x=place, y=fact.seconds * 1e3, note=f"whole step: {_time_note(fact)}")
            if fact.seconds is not None and has_phases(fact)
            else Point(x=place, y=None)
            for place, fact in enumerate(group)
        )
        several = len({fact.phase for fact in group}) > 1
        names = [fact.target + (f" · {words(fact.phase)}" if several else "") for fact in group]
        charts.append(
            Chart(
                id=file_name(f"step {parameters}", [chart.id for chart in charts]),
                title=f"Step time by phase ({parameters})",
                kind="bars",
                x=Axis(label="", categories=tuple(names)),
                y=Axis(label="median ms", zero=True),
                series=(
                    *(Series(name=name, points=tuple(points), color=color) for name, color, points in shown),
                    Series(name="whole step", points=whole, color=-1, bound=True),
                ),
                caption="Lower is better. A bar is its phases, timed with a synchronisation after each; the line across "
                "it is the whole step without them, which the ratios compare. A step captured as one graph, or "
                "with its optimizer inside the backward pass, has no phases.",
                context=tuple(contexts(group)),
            )
        )
    return charts


def has_phases(fact: Facts) -> bool:
    """Whether a step was also timed phase by phase."""
    return any(fact.metric(name) is not None for name in STEP_PHASES)


def _phase_point(fact: Facts, name: str, place: int) -> Point:
    value = fact.metric_summary(name)
    if value is not None:
        return Point(x=place, y=value.median * 1e3, note=f"{name}: {value.median * 1e3:.4g} ms")
    return _no_bar(fact, place)


def _undivided_point(fact: Facts, place: int) -> Point:
    if fact.seconds is None or has_phases(fact):
        return _no_bar(fact, place)
    return Point(x=place, y=fact.seconds * 1e3, note=f"not timed by phase: {fact.seconds * 1e3:.4g} ms")


def _no_bar(fact: Facts, place: int) -> Point:
    """No part of a bar; of a row without a result, the reason."""
    return Point(x=place, y=None) if fact.row.status == "ok" else gap(fact, place, fact.row.reason)


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
                        points.append(gap(fact, fact.shape["bytes"], fact.row.reason))
                        continue
                    note = _time_note(fact) + (f", {rate / 1e9:.3g} GB/s" if rate else "")
                    points.append(Point(x=fact.shape["bytes"], y=value, note=note))
                name = f"{target}, {ranks} ranks"
                series.append(Series(name=name, points=tuple(points), color=index, peer=peer))
            better = "Lower" if quantity == "time" else "Higher"
            charts.append(
                Chart(
                    id=file_name(f"{phase} {quantity}", [chart.id for chart in charts]),
                    title=f"{words(phase).capitalize()}: {quantity} against size",
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
    charts: list[Chart] = []
    for (_, area, phase, rest), group in beside_one_another(f for f in facts if f.area in PARALLEL_AREAS):
        if all(fact.seconds is None for fact in group):
            continue
        series = [
            Series(name=name, points=tuple(points), color=color)
            for (name, color), points in zip(
                _PARTS.items(),
                zip(*(_step_parts(fact, place) for place, fact in enumerate(group)), strict=True),
                strict=True,
            )
        ]
        if all(point.y is None for point in series[-1].points):
            series.pop()
        charts.append(
            Chart(
                id=file_name(f"{area} {phase} {rest}", [chart.id for chart in charts]),
                title=f"{words(area).capitalize()}: what a step is made of ({rest})",
                kind="bars",
                x=Axis(label="", categories=tuple(map(variant_name, group))),
                y=Axis(label="median ms a step, slowest rank", zero=True),
                series=tuple(series),
                caption="Lower is better. Hidden communication runs while the processor computes: the bar's "
                "length is the step, and only its exposed part would vanish with an infinitely fast network. "
                "Communication is noted from its start to its end, waiting for other ranks included.",
                context=tuple(contexts(group)),
            )
        )
    return charts


def beside_one_another(facts: Iterable[Facts]) -> list[tuple[tuple[str, str, str, str], list[Facts]]]:
    """Data-parallel rows that share machine, area, phase and parameters, whatever the size of their buckets."""
    groups: dict[tuple[str, str, str, str], list[Facts]] = defaultdict(list)
    for fact in facts:
        rest = ",".join(part for part in fact.parameters.split(",") if not part.startswith("bucket"))
        groups[(fact.row.machine, fact.area, fact.phase, rest)].append(fact)
    return list(groups.items())


def variant_name(fact: Facts) -> str:
    """A data-parallel variant with the size of its buckets."""
    return fact.target + (f" · {size} MB" if (size := fact.shape.get("bucket")) else "")


# Parts of a step with their colors; the last only where nobody noted how much was hidden.
_PARTS = {
    "computation alone": 0,
    "exposed communication": 1,
    "hidden communication": 2,
    "communication, overlap not measured": -1,
}


def _step_parts(fact: Facts, place: int) -> tuple[Point, ...]:
    """The parts of a step, which together are as long as the step."""
    if fact.seconds is None:
        return (_no_bar(fact, place),) * len(_PARTS)
    hidden, exposed = hidden_exposed(fact)
    unknown = fact.metric("communication") if exposed is None else None
    left = fact.seconds
    points = []
    # Noted in a pass of its own, communication may be longer than the step.
    for name, measured in zip(list(_PARTS)[1:], (exposed, hidden, unknown), strict=True):
        drawn = min(measured, left) if measured is not None else None
        left -= drawn or 0.0
        note = f"{name}: {measured * 1e3:.4g} ms" if measured is not None else ""
        points.append(Point(x=place, y=drawn * 1e3 if drawn is not None else None, note=note))
    return Point(x=place, y=left * 1e3, note=f"computation alone: {left * 1e3:.4g} ms"), *points
