"""Places that cannot be written: one line and status 2 before any work, and nothing half-written."""

from dataclasses import replace

import pytest

from benchmarks.__main__ import main
from benchmarks.measure import record
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
    assert (status, out, err.count("\n")) == (2, "", 1) and (
        "is a directory" if place == "taken" else "cannot write"
    ) in err
    assert [path.name for path in tmp_path.rglob("*")] == [f"taken{suffix}"]


def test_report_answers_with_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    status = main(["report", "--out", str(tmp_path / "file")])
    out, err = capsys.readouterr()
    assert (status, out, err.count("\n")) == (2, "", 1) and "cannot write" in err


def test_a_picture_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    def no_room(*_):
        raise OSError(28, "No space left on device")

    record.write_atomically(tmp_path / "a.png", b"old")
    monkeypatch.setattr(record.os, "replace", no_room)
    with pytest.raises(ValueError, match=r"cannot write .*a\.png: No space left on device"):
        record.write_atomically(tmp_path / "a.png", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a.png", b"old")]


def numbered(count):
    return [replace(CHART, id=f"c{number}") for number in range(count)]


def test_many_pictures_are_the_same_whoever_draws_them(tmp_path, monkeypatch):
    monkeypatch.setattr(plots.os, "cpu_count", lambda: 2)
    paths = list(plots.save_all(numbered(16), tmp_path, "svg"))
    assert [path.name for path in paths] == [f"c{number}.svg" for number in range(16)]
    assert all(
        path.read_bytes() == plots.render(chart, "svg")
        for path, chart in zip(paths[:2], numbered(2), strict=True)
    )


@pytest.mark.parametrize("kind", plots.IMAGE_FORMATS)
def test_only_pictures_that_changed_are_drawn_again(kind, tmp_path, monkeypatch):
    list(plots.save_all(numbered(3), tmp_path, kind))
    drawn = []
    monkeypatch.setattr(plots, "render", lambda chart, kind: drawn.append(chart.id) or b"new")
    changed = [replace(chart, caption="other") if chart.id == "c1" else chart for chart in numbered(3)]
    assert len(list(plots.save_all(changed, tmp_path, kind))) == 3
    assert drawn == ["c1"] and (tmp_path / f"c1.{kind}").read_bytes() == b"new"
