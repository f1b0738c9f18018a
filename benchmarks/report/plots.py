"""Charts as matplotlib figures, each savable as PNG and SVG."""

import io
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report.chart import Axis, Chart, Series
from benchmarks.report.style import LIGHT, color_of, marker_of, matplotlib_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IMAGE_FORMATS = ("png", "svg")


def figure(chart: Chart) -> "Figure":
    """Draw a chart. No window system is needed, and pyplot's global state is not touched."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib_style():
        height = 4.4 if chart.kind == "line" else 1.4 + 0.42 * max(2, len(chart.x.categories))
        drawn = Figure(figsize=(8, height), layout="constrained")
        FigureCanvasAgg(drawn)
        axes = drawn.add_subplot()
        (_lines if chart.kind == "line" else _bars)(axes, chart)
        axes.set_title(chart.title)
        for place in chart.marks:
            color = {"regression": LIGHT.bad, "possible": LIGHT.warn}.get(place.kind, LIGHT.muted)
            axes.axvline(place.x, color=color, linewidth=1, linestyle=(0, (3, 3)), zorder=1)
            axes.annotate(
                place.label,
                (place.x, 1),
                xycoords=("data", "axes fraction"),
                xytext=(4, -2),
                textcoords="offset points",
                color=color,
                fontsize=8,
                va="top",
            )
        if len(chart.series) > 1 or chart.kind == "bars":
            axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=9)
        if chart.context:
            drawn.supxlabel("\n".join(chart.context), fontsize=7, color=LIGHT.muted, x=0.01, ha="left")
    return drawn


def render(chart: Chart, image_format: str) -> bytes:
    """A chart as the bytes of a PNG or an SVG.

    Raises:
        ValueError: the format is neither.
    """
    if image_format not in IMAGE_FORMATS:
        raise ValueError(f"unknown image format {image_format!r}; known: {', '.join(IMAGE_FORMATS)}")
    out = io.BytesIO()
    with matplotlib_style():
        metadata: dict[str, Any] = {"Date": None} if image_format == "svg" else {}
        figure(chart).savefig(out, format=image_format, metadata=metadata)
    return out.getvalue()


def save(chart: Chart, folder: Path) -> list[Path]:
    """Write a chart as PNG and SVG under its id, each whole or not at all; returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for image_format in IMAGE_FORMATS:
        path = folder / f"{chart.id}.{image_format}"
        part = path.with_suffix(path.suffix + ".part")
        part.write_bytes(render(chart, image_format))
        os.replace(part, path)
        written.append(path)
    return written


def _lines(axes: Any, chart: Chart) -> None:
    for series in chart.series:
        _line(axes, series, chart)
    _scale(axes.xaxis, chart.x)
    _scale(axes.yaxis, chart.y)
    axes.grid(False, axis="x")
    _gaps(axes, chart)


def _line(axes: Any, series: Series, chart: Chart) -> None:
    drawable = [p.y is not None and (not chart.y.log or p.y > 0) for p in series.points]
    xs = [point.x for point in series.points]
    ys = [
        point.y if ok else math.nan for point, ok in zip(series.points, drawable, strict=True)
    ]  # NaN breaks the line
    color = color_of(series.color)
    if series.fill:
        axes.fill_between(xs, ys, color=color, alpha=0.25, linewidth=0)
    plain = series.bound or series.fill
    axes.plot(
        xs,
        ys,
        color=color,
        label=series.name,
        linewidth=1.2 if series.bound else 1.8,
        linestyle=(0, (4, 2)) if series.peer else ("dotted" if series.bound else "-"),
        marker=None if plain else marker_of(series.color),
        markersize=5,
        markerfacecolor=LIGHT.surface if series.peer else color,
    )


def _gaps(axes: Any, chart: Chart) -> None:
    """A cross on the lower edge for every point that has a status instead of a value."""
    for series in chart.series:
        xs = [point.x for point in series.points if point.y is None and point.status]
        if xs:
            axes.plot(
                xs,
                [0.015] * len(xs),
                transform=axes.get_xaxis_transform(),
                linestyle="none",
                marker="x",
                markersize=6,
                color=color_of(series.color),
                clip_on=False,
            )


def _scale(axis: Any, described: Axis) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    axis.set_label_text(described.label)
    if described.log:
        which = "x" if axis.axis_name == "x" else "y"
        getattr(axis.axes, f"set_{which}scale")("log", base=described.log)
        axis.set_major_locator(LogLocator(base=described.log, numticks=20))
        axis.set_minor_locator(NullLocator())
    if described.zero:
        axis.axes.set_ylim(bottom=0)
    if described.categories:
        names = described.categories
        axis.set_major_locator(MaxNLocator(nbins=12, integer=True))
        axis.set_major_formatter(FuncFormatter(lambda x, _: names[int(x)] if 0 <= x < len(names) else ""))
    else:
        axis.set_major_formatter(FuncFormatter(lambda value, _: tick_text(value, described.unit)))


def tick_text(value: float, unit: str = "") -> str:
    """A tick: 16k for counts (1024), 10 MB for bytes (1000), otherwise the number at its shortest."""
    if unit == "bytes":
        for size, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
            if value >= size:
                return f"{value / size:g} {name}"
        return f"{value:g} B"
    if unit == "count" and value >= 1024 and value % 1024 == 0:
        return f"{value / 1024:g}k"
    return f"{value:g}"


def _bars(axes: Any, chart: Chart) -> None:
    """Stacked horizontal bars, first category on top."""
    count = len(chart.x.categories)
    left = [0.0] * count
    for series in chart.series:
        widths = [0.0] * count
        for point in series.points:
            widths[int(point.x)] = point.y or 0.0
        if series.bound:
            places = [point for point in series.points if point.y is not None]
            at, rows = [point.y for point in places], [point.x for point in places]
            axes.plot(at, rows, "|", color=LIGHT.ink, markersize=16, markeredgewidth=1.5, label=series.name)
            continue
        axes.barh(
            range(count),
            widths,
            left=left,
            height=0.62,
            color=color_of(series.color),
            edgecolor=LIGHT.surface,
            label=series.name,
        )
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for place, total in enumerate(left):
        axes.annotate(
            f" {total:.4g}", (total, place), va="center", fontsize=8, color=LIGHT.muted, annotation_clip=False
        )
    axes.set_yticks(range(count), list(chart.x.categories))
    axes.invert_yaxis()
    axes.set_xlabel(chart.y.label)
    axes.grid(False, axis="y")
