"""Figures: every chart becomes a PNG and an SVG; gaps break lines; text from outside stays text."""

import xml.etree.ElementTree as ET

import numpy
import pytest

from benchmarks.report import charts, memory_charts, plots
from benchmarks.report.chart import Axis, Chart, Point, Series
from benchmarks.report.facts import latest
from benchmarks.report.trends import trend_chart, trends
from tests.report.synthetic import (
    COMMITS,
    FINDINGS,
    attention_rows,
    cpu_rows,
    history_rows,
    is_peer,
    memory_rows,
)


def line_chart(**fields):
    given = {
        "id": "c",
        "title": "t",
        "kind": "line",
        "x": Axis(label="x"),
        "y": Axis(label="y"),
        "series": (),
    }
    return Chart(**(given | fields))


def test_every_kind_of_chart_is_drawn_as_png_and_svg(tmp_path):
    found = [
        charts.attention_charts(latest(attention_rows()), is_peer)[0],
        memory_charts.peak_charts(latest(memory_rows()))[0],
        trend_chart(trends(history_rows(), COMMITS, FINDINGS)[0], COMMITS),
    ]
    for chart in found:
        png, svg = plots.save(chart, tmp_path)
        assert png.read_bytes().startswith(b"\x89PNG") and png.name == f"{chart.id}.png"
        root = ET.fromstring(svg.read_text())
        assert root.tag.endswith("svg") and chart.title in "".join(root.itertext())
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".png"] * 3 + [".svg"] * 3  # nothing half-written


def test_a_gap_is_neither_zero_nor_joined():
    points = (Point(x=1, y=1.0), Point(x=2, y=None, status="oom"), Point(x=3, y=3.0))
    figure = plots.figure(line_chart(series=(Series(name="s", points=points, color=0),)))
    line, cross = figure.axes[0].lines
    assert numpy.isnan(line.get_ydata()[1]) and not (line.get_ydata() == 0).any()
    assert list(cross.get_xdata()) == [2] and cross.get_marker() == "x"


def test_zero_on_a_logarithmic_axis_is_a_gap():
    points = (Point(x=1, y=0.0), Point(x=2, y=1.0))
    chart = line_chart(y=Axis(label="y", log=10), series=(Series(name="s", points=points, color=0),))
    assert numpy.isnan(plots.figure(chart).axes[0].lines[0].get_ydata()[0])


def test_dollars_are_no_mathematics_and_angles_no_markup():
    title = r"$\frac$ <script> & _x_"
    points = (Point(x=0, y=1.0), Point(x=1, y=2.0))
    chart = line_chart(title=title, series=(Series(name=r"$\bad$", points=points, color=0),))
    assert title in "".join(ET.fromstring(plots.render(chart, "svg")).itertext())


def test_lanes_are_drawn_as_intervals_on_two_levels():
    points = (Point(x=0, y=0.0, until=4.0), Point(x=0.5, y=1.0, until=2.0))
    chart = line_chart(kind="lanes", x=Axis(label="", categories=("naive",)),
                       series=(Series(name="s", points=points, color=0),))  # fmt: skip
    upper, lower = plots.figure(chart).axes[0].collections
    assert [path.get_extents().bounds for path in upper.get_paths()] == [pytest.approx((0, -0.4, 4, 0.36))]
    assert [path.get_extents().bounds for path in lower.get_paths()] == [pytest.approx((1, 0.1, 1, 0.36))]


def test_a_bar_that_is_missing_says_why_and_a_bound_its_number():
    bar = Series(
        name="b", points=(Point(x=0, y=2.0), Point(x=1, y=None, status="oom"), Point(x=2, y=None)), color=0
    )
    line = Series(
        name="l", points=(Point(x=0, y=3.0), Point(x=1, y=None), Point(x=2, y=None)), color=-1, bound=True
    )
    chart = line_chart(kind="bars", x=Axis(label="", categories=("a", "b", "c")), series=(bar, line))
    texts = [text.get_text().strip() for text in plots.figure(chart).axes[0].texts]
    assert texts == ["2 | 3", "oom", "–"]


def test_the_same_chart_gives_the_same_file():
    chart = charts.step_charts(latest(cpu_rows()))[0]
    assert plots.render(chart, "svg") == plots.render(chart, "svg")


def test_unknown_image_format():
    with pytest.raises(ValueError, match="unknown image format 'gif'; known: png, svg"):
        plots.render(line_chart(), "gif")


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (16384, "count", "16k"),
        (512, "count", "512"),
        (1e7, "bytes", "10 MB"),
        (1e9, "bytes", "1 GB"),
        (0.5, "", "0.5"),
    ],
)
def test_ticks(value, unit, text):
    assert plots.tick_text(value, unit) == text
