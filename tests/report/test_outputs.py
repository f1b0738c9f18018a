"""Places that cannot be written: one line and status 2 before any work, and nothing half-written."""

import pytest

from benchmarks.__main__ import main
from benchmarks.report import plots
from benchmarks.report.chart import Axis, Chart, Point, Series

CHART = Chart(
    id="c",
    title="t",
    kind="line",
    x=Axis(label="x"),
    y=Axis(label="y"),
    series=(Series(name="s", points=(Point(x=0, y=1.0), Point(x=1, y=2.0)), color=0),),
)


@pytest.mark.parametrize("option", ["--figure", "--out"])
@pytest.mark.parametrize("place", ["taken", "/proc/no"])
def test_plan_looks_before_it_searches(option, place, tmp_path, monkeypatch, capsys):
    from trainstep.accounting import search

    monkeypatch.setattr(
        search, "search", lambda *_, **__: pytest.fail("searched before the place was checked")
    )
    suffix = ".png" if option == "--figure" else ".csv"
    (tmp_path / f"taken{suffix}").mkdir()
    monkeypatch.chdir(tmp_path)
    status = main(["plan", "--model", "toy", option, f"{place}{suffix}"])
    out, err = capsys.readouterr()
    assert (status, out, err.count("\n")) == (2, "", 1) and "cannot write" in err
    assert [path.name for path in tmp_path.rglob("*")] == [f"taken{suffix}"]


def test_report_answers_with_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    status = main(["report", "--out", str(tmp_path / "file")])
    out, err = capsys.readouterr()
    assert (status, out, err.count("\n")) == (2, "", 1) and "cannot write" in err


def test_a_picture_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    def no_room(*_):
        raise OSError(28, "No space left on device")

    plots.write_picture(tmp_path / "a.png", b"old")
    monkeypatch.setattr(plots.os, "replace", no_room)
    with pytest.raises(ValueError, match=r"cannot write .*a\.png: No space left on device"):
        plots.write_picture(tmp_path / "a.png", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a.png", b"old")]


def test_many_pictures_come_in_order_whoever_draws_them(monkeypatch):
    monkeypatch.setattr(plots.os, "cpu_count", lambda: 2)
    charts = [CHART] * 16
    drawn = list(plots.render_all(charts, "svg"))
    assert [chart for chart, _ in drawn] == charts and {picture for _, picture in drawn} == {
        plots.render(CHART, "svg")
    }
