"""Lanes of a traced step."""

from benchmarks.report.facts import facts_of
from benchmarks.report.lane_charts import lane_charts
from tests.report.synthetic import row

CASE = "data_parallel/bucketed/train_step/xl,B4,S512,fp32,w2"


def traced(**more):
    return {"traced_hidden_share": {"value": 0.75, "unit": "1", "better": None, **more}}


def test_lanes_are_square_waves():
    metrics = traced(computation=[[0.0, 0.004], [0.005, 0.006]], communication=[[0.001, 0.002]])
    (chart,) = lane_charts([facts_of(row(CASE, 0.01, metrics=metrics))])
    computing, communicating = chart.series
    assert [(p.x, p.y) for p in computing.points] == [
        (0, 0), (0, 2), (4, 2), (4, 0), (5, 0), (5, 2), (6, 2), (6, 0),
    ]  # fmt: skip
    assert [(p.x, p.y) for p in communicating.points] == [(1, 0), (1, 1), (2, 1), (2, 0)]
    assert "75.0%" in chart.title


def test_rows_without_a_trace_have_no_chart():
    rows = [row(CASE, 0.01), row(CASE, 0.01, metrics=traced()), row(CASE, status="oom", reason="r")]
    assert lane_charts([facts_of(one) for one in rows]) == []
