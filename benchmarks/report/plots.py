"""Charts as matplotlib figures, each savable as PNG and SVG."""

import hashlib
import io
import math
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measure.record import write_atomically
from benchmarks.report.chart import Axis, Chart, Series
from benchmarks.report.style import LIGHT, color_of, marker_of, matplotlib_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IMAGE_FORMATS = ("png", "svg")


def figure(chart: Chart) -> "Figure":
    """Draw a chart. No window system is needed, and pyplot's global state is not touched."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kinds = {"line": _lines, "bars": _bars, "lanes": _lanes}
    with matplotlib_style():
        each = {"bars": 0.42, "lanes": 0.6}.get(chart.kind, 0)
        height = 1.4 + each * max(2, len(chart.x.categories)) if each else 4.4
        drawn = Figure(figsize=(8, height))
        FigureCanvasAgg(drawn)
        axes = drawn.add_subplot()
        kinds[chart.kind](axes, chart)
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
        if len(chart.series) > 1 or chart.kind != "line":
            axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=9)
        if chart.context:  # below the axis' label, wherever the axes end
            axes.annotate(
                "\n".join(chart.context),
                (0, 0),
                xycoords="axes fraction",
                xytext=(0, -44),
                textcoords="offset points",
                fontsize=7,
                color=LIGHT.muted,
                va="top",
            )
    return drawn


def render(chart: Chart, image_format: str) -> bytes:
    """A chart as the bytes of a PNG or an SVG.

    Raises:
        ValueError: the format is neither.
    """
    if image_format not in IMAGE_FORMATS:
        raise ValueError(f"unknown image format {image_format!r}; known: {', '.join(IMAGE_FORMATS)}")
    return _bytes(figure(chart), image_format, origin(chart))


def _bytes(drawn: "Figure", image_format: str, from_: str) -> bytes:
    out = io.BytesIO()
    # No date in the file, and little time for packing: half of the time would go there.
    options: dict[str, Any] = {"metadata": {"Date": None, "Identifier": from_}}
    if image_format == "png":
        options = {"metadata": {"Comment": from_}, "pil_kwargs": {"compress_level": 1}}
    with matplotlib_style():
        drawn.savefig(out, format=image_format, **options)
    return out.getvalue()


def save(chart: Chart, folder: Path) -> list[Path]:
    """Draw a chart once and write it as PNG and SVG under its id; returns the paths.

    Raises:
        ValueError: the place cannot be written.
    """
    drawn = figure(chart)
    paths = [folder / f"{chart.id}.{image_format}" for image_format in IMAGE_FORMATS]
    for path, image_format in zip(paths, IMAGE_FORMATS, strict=True):
        write_atomically(path, _bytes(drawn, image_format, origin(chart)))
    return paths


def save_all(charts: Sequence[Chart], folder: Path, image_format: str) -> Iterator[Path]:
    """Write every chart in one format under its id, giving the paths as they are there.

    A picture says in its file what it was drawn from; one that is up to date is left as it is.

    Raises:
        ValueError: a place cannot be written.
    """
    paths = {folder / f"{chart.id}.{image_format}": chart for chart in charts}
    missing = {
        path: chart
        for path, chart in paths.items()
        if not (path.is_file() and origin(chart).encode() in path.read_bytes())
    }
    yield from (path for path in paths if path not in missing)
    for path, picture in zip(missing, _render_all(list(missing.values()), image_format), strict=True):
        write_atomically(path, picture)
        yield path


def origin(chart: Chart) -> str:
    """A hash of all that decides how a chart's picture looks."""
    import matplotlib

    code = b"".join(Path(__file__).with_name(name).read_bytes() for name in ("plots.py", "style.py"))
    said = repr((chart, matplotlib.__version__)).encode("utf-8", "surrogatepass")
    return hashlib.sha256(code + said).hexdigest()


def _render_all(charts: Sequence[Chart], image_format: str) -> Iterator[bytes]:
    """Pictures in order; many are drawn on all processors at once."""
    workers = min(os.cpu_count() or 1, len(charts) // 8)
    if workers < 2:
        yield from (render(chart, image_format) for chart in charts)
        return
    # Fresh processes: a forked one would inherit the threads' locks of this one.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        yield from pool.map(render, charts, [image_format] * len(charts), chunksize=4)


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
    """A cross on the lower edge for every point that has a status instead of a value, beside one another."""
    from matplotlib.transforms import ScaledTranslation

    crowds: dict[float, list[str]] = {}
    for series in chart.series:
        for point in series.points:
            if point.y is None and point.status:
                crowds.setdefault(point.x, []).append(color_of(series.color))
    for x, crowd in crowds.items():
        for place, color in enumerate(crowd):
            aside = (place - (len(crowd) - 1) / 2) * 7 / 72
            shift = ScaledTranslation(aside, 0, axes.figure.dpi_scale_trans)
            axes.plot(
                [x], [0.015], transform=axes.get_xaxis_transform() + shift, linestyle="none", marker="x",
                markersize=6, color=color, clip_on=False,
            )  # fmt: skip


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
        axis.set_major_locator(MaxNLocator(nbins=8, integer=True))
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
    """Stacked horizontal bars, first category on top; bounds as lines across them."""
    count = len(chart.x.categories)
    left = [0.0] * count
    reach = [0.0] * count  # of bars and bounds: where a bar's numbers have room
    beside = [""] * count
    for series in chart.series:
        if series.bound:
            places = [(int(point.x), point.y) for point in series.points if point.y is not None]
            rows, at = [place for place, _ in places], [value for _, value in places]
            axes.plot(at, rows, "|", color=LIGHT.ink, markersize=16, markeredgewidth=1.5, label=series.name)
            for place, value in places:
                reach[place] = max(reach[place], value)
                beside[place] += f" | {value:.4g}"
            continue
        widths = [0.0] * count
        for point in series.points:
            widths[int(point.x)] = point.y or 0.0
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
    reach = [max(pair) for pair in zip(left, reach, strict=True)]
    for place, (total, end) in enumerate(zip(left, reach, strict=True)):
        said = _missing(chart, place) or f"{total:.4g}{beside[place]}"
        axes.annotate(f" {said}", (end, place), va="center", fontsize=8, color=LIGHT.muted)
    axes.set_xlim(0, max(reach, default=0) * (1.2 if any(beside) else 1.12) or 1)
    _rows(axes, chart)


def _missing(chart: Chart, place: int) -> str | None:
    """What stands in a bar's stead: why it is missing, or a dash; None where there is a bar."""
    points = [series.points[place] for series in chart.series if not series.bound]
    if any(point.y is not None for point in points):
        return None
    return next((point.status for point in points if point.status), "–")


def _lanes(axes: Any, chart: Chart) -> None:
    """Two lanes of intervals for each category, first category on top."""
    for series in chart.series:
        color = color_of(series.color)
        for low in sorted({point.x for point in series.points}):
            spans = [
                (point.y, point.until - point.y)
                for point in series.points
                if point.x == low and point.y is not None and point.until is not None
            ]
            axes.broken_barh(spans, (low - 0.4, 0.36), color=color, linewidth=0)
        axes.plot([], [], color=color, linewidth=6, label=series.name)
    axes.set_xlim(left=0)
    _rows(axes, chart)


def _rows(axes: Any, chart: Chart) -> None:
    """The categories down the side, first on top, and the measure along the bottom."""
    axes.set_yticks(range(len(chart.x.categories)), list(chart.x.categories))
    axes.invert_yaxis()
    axes.set_xlabel(chart.y.label)
    axes.grid(False, axis="y")
