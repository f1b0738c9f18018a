"""The `plan` command: answers in time, says what binds, writes strict files, refuses in one line."""

import json
import time

import pandas
import pytest

from benchmarks import __main__ as command_line
from benchmarks.cases.mup import Moved
from benchmarks.commands import plan_charts, plan_tables
from benchmarks.report.plots import render
from trainstep.accounting.parallel_limits import Layer
from trainstep.accounting.question import ask
from trainstep.accounting.scaling_law import fit_power_law, fit_saturating
from trainstep.accounting.search import search
from trainstep.specs.device import DEVICES
from trainstep.specs.model import get_model


@pytest.fixture
def plan(monkeypatch, capsys):
    """Run `python -m benchmarks plan` in this process: status, standard output and error."""
    monkeypatch.setitem(command_line.COMMANDS, "plan", "Predict a step on many devices.")

    def run(*arguments):
        status = command_line.main(["plan", *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--model", "8b-32k"], "one device"),
        (["--model", "8b-32k", "--devices", "2"], "DP2 FSDP2"),
        (["--model", "xl", "--devices", "2", "--batch", "4", "--execution", "plain"], "DP2"),
        (["--model", "70b", "--devices", "1024", "--state", "mixed"], "cluster of 1024"),
        (
            ["--model", "70b", "--devices", "100000", "--batch", "8192", "--state", "mixed"],
            "cluster of 100000",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_questions_of_the_issue(plan, arguments, expected):
    started = time.process_time()
    status, out, _ = plan(*arguments)
    assert time.process_time() - started < 10
    assert status == 0
    assert "bound by" in out
    assert expected in out
    assert "Assumed" in out
    assert "fitted to" in out


def test_measured_figures_stand_beside_predicted_ones(plan):
    status, out, _ = plan("--model", "toy", "--validation")
    assert status == 0
    assert "Measured beside predicted" in out and "this package's own `plain` is faster" in out
    assert "8b-32k bf16 fused x2 sharded" in out


def test_files_hold_the_plans(plan, tmp_path):
    table, content, picture = (tmp_path / name for name in ("a.csv", "a.json", "a.svg"))
    question = ("--model", "xl", "--devices", "2", "--batch", "4")
    assert plan(*question, "--out", str(table), "--figure", str(picture))[0] == 0
    assert plan(*question, "--out", str(content))[0] == 0
    rows = json.loads(content.read_text(), parse_constant=pytest.fail)
    frame = pandas.read_csv(table)
    assert list(frame["layout"]) == [row["layout"] for row in rows["plans"]]
    assert frame["step ms"].is_monotonic_increasing
    causes = [
        name for name in frame.columns if name.endswith(" ms") and name not in ("step ms", "simulated ms")
    ]
    assert frame[causes].sum(axis=1).to_numpy() == pytest.approx(frame["step ms"].to_numpy())
    assert rows["assumptions"]
    assert picture.read_text().lstrip().startswith("<?xml")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.csv", "a.json", "a.svg"]


def test_fixed_axes_stay_fixed(plan):
    _, out, _ = plan("--model", "xl", "--devices", "2", "--batch", "4", "--data", "2", "--shard", "1")
    assert "Best: DP2," in out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model", "7b"], "'7b'"),
        (["--device", "h300"], "'h300'"),
        (["--devices", "0"], "0"),
        (["--devices", "8", "--data", "8", "--batch", "4"], "smaller than 8"),
        (["--devices", "4", "--data", "8", "--batch", "8"], "need 8 devices"),
        (["--devices", "8", "--tensor", "3"], "not divisible by 3"),
        (["--model", "405b", "--devices", "4"], "does not fit on 4 h200"),
        (["--devices", "100000", "--batch", "1"], "at most"),
        (["--dtype", "fp7"], "'fp7'"),
        (["--state", "int8"], "'int8'"),
        (["--execution", "magic"], "'magic'"),
        (["--between", "fast"], "'fast'"),
        (["--heads", "7"], "7"),
        (["--keep", "0"], "0"),
        (["--device", "v100", "--dtype", "bf16"], "no peak for bf16"),
        (["--out", "plan.txt"], "'plan.txt'"),
        (["--figure", "plan.gif"], "'plan.gif'"),
        (["--out", "nowhere/at/all/plan.csv"], "nowhere/at/all"),
    ],
)
def test_bad_questions_get_one_line(plan, arguments, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = plan(*arguments)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert named in err
    assert not list(tmp_path.iterdir())


def test_rows_for_the_page():
    validation = plan_tables.validation_rows()
    assert all(abs(row["error %"]) < 15 for row in validation)
    assert len(plan_tables.device_rows()) == len(DEVICES)
    layer = Layer(tokens=65536, d_ff=16384, flops_per_second=4e14, bytes_per_second=1.8e11)
    limits = {row["cut"]: row["devices"] for row in plan_tables.limit_rows(layer)}
    assert limits["FSDP x TP, one after the other"] < limits["FSDP x TP, overlapped"]
    assert limits["DP or FSDP"] == pytest.approx(1 + 65536 * 1.8e11 / 4e14)
    assumed = plan_tables.assumption_rows(ask(get_model("8b-32k"), devices=16))
    assert {row["assumed"]: row["value"] for row in assumed}["bf16 products"] == pytest.approx(700)
    assert all(row["fitted to"] for row in assumed)


def test_the_chart_adds_up_to_the_step():
    question = ask(get_model("xl"), devices=2, batch=4)
    plans = search(question, 2)
    chart = plan_charts.plan_chart(question, plans)
    for place, one in enumerate(plans):
        assert sum(series.points[place].y for series in chart.series) == pytest.approx(one.seconds * 1e3)
    assert render(chart, "png").startswith(b"\x89PNG")


def test_scaling_charts_show_the_interval_around_the_fit():
    x = [1e17, 1e18, 1e19, 1e20, 1e21]
    noise = [1.001, 0.999, 1.002, 0.998, 1.0]
    losses = [(2 + 500 * c**-0.15) * n for c, n in zip(x, noise, strict=True)]
    names = {"title": "Loss", "x_label": "FLOPs", "y_label": "nats a token"}
    for fit in (fit_saturating(x, losses), fit_power_law(x, losses)):
        chart = plan_charts.scaling_chart(fit, x, losses, **names)
        _, middle, below, above = (series.points for series in chart.series)
        assert all(low.y < at.y < high.y for low, at, high in zip(below, middle, above, strict=True))
        assert "95% intervals, 5 points" in chart.caption
        assert render(chart, "svg")


def test_the_coordinate_chart_has_a_line_for_each_activation():
    moved = [
        Moved(parametrisation=name, width=width, activation=activation, rms=0.5)
        for name in ("mup", "standard")
        for width in (64, 128)
        for activation in ("block 0", "logits")
    ]
    chart = plan_charts.coordinate_chart(moved)
    assert [(series.name, series.peer, series.color) for series in chart.series] == [
        ("block 0, mup", False, 0),
        ("logits, mup", False, 1),
        ("block 0, standard", True, 0),
        ("logits, standard", True, 1),
    ]
    assert render(chart, "png")
