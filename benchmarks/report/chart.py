"""What a chart shows, apart from how it is drawn: `plots` and the page draw the same description."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Point:
    """One place of a series; on lanes, one interval.

    Attributes:
        x: number, or the index of a category; on lanes plus a half for the lower of a category's two lanes.
        y: None is a gap: never drawn as zero, never joined over.
        note: what a reader sees on pointing at it, plain text.
        status: why there is a gap ("oom", "error", ...), drawn as a mark on the chart's edge, on bars as a word;
            None for a mere gap.
        until: on lanes the end of the interval that begins at `y`.
    """

    x: float
    y: float | None
    note: str = ""
    status: str | None = None
    until: float | None = None


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line, or one part of stacked bars.

    Attributes:
        name: as the legend shows it.
        points: in the order of x.
        color: index into the palette of `style`; -1 is the neutral ink of bounds and formulas.
        peer: somebody else's work: drawn dashed.
        bound: what is possible or predicted: a thin line without points; across each bar instead of stacked.
        fill: the area under the line is filled (memory timelines).
    """

    name: str
    points: tuple[Point, ...]
    color: int
    peer: bool = False
    bound: bool = False
    fill: bool = False


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Label with its unit; log base (2, 10) or None for linear; names of categories where x counts them.

    Attributes:
        zero: a linear axis starts at zero (lengths of bars and areas lie otherwise).
        unit: "bytes" prints ticks as 1 MB, 10 MB; "count" as 1k, 16k in powers of two.
    """

    label: str
    log: int | None = None
    categories: tuple[str, ...] = ()
    zero: bool = False
    unit: str = ""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A place on the x axis to point out.

    Attributes:
        x: where.
        label: what to say there.
        kind: "regression", a "possible" one, a "step" that was made good or is an improvement, a change of
            "environment" (another host among them), the beginning of a "phase".
    """

    x: float
    label: str
    kind: str = "regression"


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart: "line" (series over x), "bars" (horizontal, a bar for each category, series stacked) or "lanes"
    (two lanes of intervals for each category).

    Attributes:
        id: distinct on a page and safe as a file name.
        title: what the chart shows, one line.
        caption: how to read it.
        context: where it was measured, a line for each distinct machine, commit and set of versions.
    """

    id: str
    title: str
    kind: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    marks: tuple[Mark, ...] = ()
    caption: str = ""
    context: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert self.kind in ("line", "bars", "lanes"), self.kind

    @property
    def empty(self) -> bool:
        """True when no point has a value."""
        return not any(point.y is not None for one in self.series for point in one.points)

    def to_json(self) -> dict[str, Any]:
        """A dictionary for the page's script; of what a point lacks only a missing y is said."""
        described = {one.name: getattr(self, one.name) for one in fields(self)}
        series = [vars(one) | {"points": [_said(point) for point in one.points]} for one in self.series]
        marks = [asdict(mark) for mark in self.marks]
        return described | {"x": asdict(self.x), "y": asdict(self.y), "series": series, "marks": marks}


def _said(point: Point) -> dict[str, Any]:
    return {name: value for name, value in vars(point).items() if name == "y" or value not in (None, "")}


def file_name(text: str, taken: Sequence[str] = ()) -> str:
    """Text as a file name and HTML id: letters, digits and hyphens only, made distinct from those taken."""
    name = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in text.lower())
    name = "-".join(part for part in name.split("-") if part)[:80] or "unnamed"
    distinct, count = name, 2
    while distinct in taken:
        distinct, count = f"{name}-{count}", count + 1
    return distinct
