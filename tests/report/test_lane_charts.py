"""Lanes of traced steps."""

import pytest

from benchmarks.report.facts import facts_of
from benchmarks.report.lane_charts import lane_charts
from tests.report.synthetic import row

TAIL = "train_step/xl,B4,S512,fp32,w2"


def traced(share, **more):
    return {"traced_hidden_share": {"value": share, "unit": "1", "better": None, **more}}


def charts_of(**metrics):
    rows = [row(f"data_parallel/{target}/{TAIL}", 0.01, metrics=found) for target, found in metrics.items()]
    return lane_charts([facts_of(one) for one in rows])


def test_variants_stand_on_one_time_axis_with_hidden_and_exposed_parts_apart():
    (chart,) = charts_of(
        naive=traced(0.0, computation=[[0.0, 0.004]], communication=[[0.005, 0.008]]),
        bucketed=traced(
            0.75, computation=[[0.0, 0.004], [0.005, 0.006]], communication=[[0.001, 0.002], [0.003, 0.0055]]
        ),
    )
    assert chart.kind == "lanes" and len(chart.x.categories) == 2
    assert chart.x.categories[1] == "bucketed: 75.0% of the communication hidden"
    found = {one.name: [(p.x, p.y, p.until) for p in one.points] for one in chart.series}
    assert found["computation"] == [(0, 0, 4), (1, 0, 4), (1, 5, 6)]
    assert found["exposed communication"] == [(0.5, 5, 8), pytest.approx((1.5, 4, 5))]
    assert found["hidden communication"] == [
        (1.5, 1, 2),
        pytest.approx((1.5, 3, 4)),
        pytest.approx((1.5, 5, 5.5)),
    ]
    notes = [point.note for one in chart.series for point in one.points if point.note]
    assert (
        "hidden communication: 2.5 ms in 3 pieces" in notes
        and "exposed communication: 3 ms in 1 pieces" in notes
    )


def test_rows_without_a_trace_have_no_chart():
    rows = [row(f"data_parallel/naive/{TAIL}", 0.01), row(f"data_parallel/flat/{TAIL}", 0.01, metrics=traced(0.5)),
            row(f"data_parallel/overlap/{TAIL}", status="oom", reason="r")]  # fmt: skip
    assert lane_charts([facts_of(one) for one in rows]) == []
