"""Predictions as charts: steps by cause, scaling laws with their intervals, the coordinate check."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.report.chart import Axis, Chart, Point, Series, file_name

if TYPE_CHECKING:
    from benchmarks.cases.mup import Moved
    from trainstep.accounting.layout import Plan, Question
    from trainstep.accounting.scaling_law import Fit


def plan_chart(question: "Question", plans: Sequence["Plan"]) -> Chart:
    """Predicted step time of each plan, stacked by cause; what is small in every plan is summed as "other"."""
    config, device = question.config, question.device
    large = [name for name in plans[0].parts if any(p.parts[name] > 0.02 * p.seconds for p in plans)]
    shown = [(name, index, [plan.parts[name] * 1e3 for plan in plans]) for index, name in enumerate(large)]
    rest = [sum(s for name, s in plan.parts.items() if name not in large) * 1e3 for plan in plans]
    if any(rest):
        shown.append(("other", -1, rest))
    series = [
        Series(
            name=name,
            color=color,
            points=tuple(
                Point(x=place, y=ms, note=f"{plan.layout}: {name} {ms:.4g} ms of {plan.seconds * 1e3:.4g} ms")
                for place, (plan, ms) in enumerate(zip(plans, values, strict=True))
            ),
        )
        for name, color, values in shown
    ]
    return Chart(
        id=file_name(f"plan-{config.name}-{device.name}"),
        title=f"Predicted step of {config.name}, {question.batch} sequences, {device.name}",
        kind="bars",
        x=Axis(
            label="",
            categories=tuple(
                f"{p.layout} · {p.memory_bytes / 2**30:.0f} GiB · MFU {p.mfu:.0%}" for p in plans
            ),
        ),
        y=Axis(label="ms a step", zero=True),
        series=tuple(series),
        caption="Communication counts where nothing hides it.",
        context=question.rates.notes,
    )


def scaling_chart(
    fit: "Fit", x: Sequence[float], y: Sequence[float], *, title: str, x_label: str, y_label: str
) -> Chart:
    """Data, the fitted law and the confidence interval of its mean, continued ten times beyond the data."""
    import numpy as np

    places = np.geomspace(min(x), 10 * max(x), 60)
    values = [fit.predict(float(place)) for place in places]

    def line(name: str, which: str, color: int) -> Series:
        points = tuple(Point(x=float(p), y=getattr(v, which)) for p, v in zip(places, values, strict=True))
        return Series(name=name, color=color, bound=True, points=points)

    share = f"{fit.confidence:.0%}"
    data = tuple(Point(x=one, y=other) for one, other in sorted(zip(x, y, strict=True)))
    return Chart(
        id=file_name(title),
        title=title,
        kind="line",
        x=Axis(label=x_label, log=10),
        y=Axis(label=y_label, log=None if fit.floor else 10),
        series=(
            Series(name="runs", color=0, points=data),
            line("fit", "value", 1),
            line(f"{share} below", "low", -1),
            line(f"{share} above", "high", -1),
        ),
        caption=describe(fit),
    )


def describe(fit: "Fit") -> str:
    """The law in words, every number with its interval."""

    def one(name: str, estimate: object) -> str:
        value, low, high = (getattr(estimate, key) for key in ("value", "low", "high"))
        return f"{name} = {value:.4g} ({low:.4g} to {high:.4g})"

    parts = [one("b", fit.scale), one("a", fit.exponent)]
    law = "b x^-a"
    if fit.floor is not None:
        parts.insert(0, one("floor", fit.floor))
        law = "floor + b x^-a"
    return f"y = {law}: " + ", ".join(parts) + f"; {fit.confidence:.0%} intervals, {fit.points} points"


def coordinate_chart(moved: Sequence["Moved"]) -> Chart:
    """How far a few steps move each activation, against width, for each parametrisation."""
    names = list(dict.fromkeys((row.parametrisation, row.activation) for row in moved))
    series = tuple(
        Series(
            name=f"{activation}, {parametrisation}",
            color=list(dict.fromkeys(name for _, name in names)).index(activation),
            peer=parametrisation != "mup",
            points=tuple(
                Point(x=row.width, y=row.rms)
                for row in moved
                if (row.parametrisation, row.activation) == (parametrisation, activation)
            ),
        )
        for parametrisation, activation in names
    )
    return Chart(
        id="mup-coordinate-check",
        title="Change of activations after a few steps, by width",
        kind="line",
        x=Axis(label="width", log=2, unit="count"),
        y=Axis(label="RMS change", log=10),
        series=series,
        caption="Flat lines: the learning rate of one width serves all. Dashed: the standard parametrisation.",
    )
