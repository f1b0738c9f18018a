"""Charts: which series, gaps as gaps with their reasons, the bound where the device is known, file names."""

import pytest

from benchmarks.report import charts, memory_charts
from benchmarks.report.chart import file_name
from benchmarks.report.facts import facts_of, latest
from benchmarks.report.style import DARK, LIGHT, color_of
from tests.report.synthetic import CPU_ENV, GPU_ENV, attention_rows, cpu_rows, is_peer, memory_rows, row, work
from trainstep.attention import ATTENTION


def series(chart, name):
    (found,) = [one for one in chart.series if one.name == name]
    return found


def attention_chart(phase):
    found = charts.attention_charts(latest(attention_rows()), is_peer)
    (chart,) = [one for one in found if f"attention-{phase}-b1-n16" in one.id]
    return chart


def test_rate_against_length_has_a_line_for_each_implementation_and_the_roofline():
    chart = attention_chart("forward")
    names = [one.name for one in chart.series]
    assert names == ["reference", "tiled", "triton", "flex", "sdpa-flash", "roofline"]
    assert [one.peer for one in chart.series] == [False, False, False, True, True, False]
    assert series(chart, "roofline").bound
    # At 512 the four tensors of 1 MiB take longer to move than the 0.5 GFLOP to compute: 128 FLOP/byte at 4.8 TB/s.
    assert [point.y for point in series(chart, "roofline").points] == pytest.approx([614.4, 989, 989, 989])
    assert [point.x for point in series(chart, "triton").points] == [512, 1024, 4096, 16384]
    assert "% of the roofline" in series(chart, "triton").points[-1].note


@pytest.mark.parametrize(
    ("name", "place", "status", "reason"),
    [
        ("reference", 3, "oom", "8.00 GiB"),
        ("tiled", 2, "red", "differs"),
        ("flex", 0, "skipped", "no kernel"),
    ],
)
def test_a_row_without_a_result_is_a_gap_with_its_reason(name, place, status, reason):
    point = series(attention_chart("forward"), name).points[place]
    assert point.y is None and point.status == status and reason in point.note


def test_a_time_of_zero_is_a_gap_and_not_a_rate():
    rows = [row(f"attention/triton/forward/B1,N1,K1,S{n},T{n},H8,causal,fp32,w1", n - 64.0, noise=0,
                metrics=work(flops=1e9)) for n in (64, 128)]  # fmt: skip
    (chart,) = charts.attention_charts([facts_of(r) for r in rows], is_peer)
    zero, other = series(chart, "triton").points
    assert zero.y is None and zero.status == "no rate" and other.y is not None


def test_no_bound_without_a_known_device():
    rows = [row(f"attention/triton/forward/B1,N1,K1,S{n},T{n},H8,causal,fp32,w1", 1.0, env=CPU_ENV,
                metrics=work(flops=1e9)) for n in (64, 128)]  # fmt: skip
    (chart,) = charts.attention_charts([facts_of(r) for r in rows], is_peer)
    assert [one.name for one in chart.series] == ["triton"] and "not known" in chart.caption


def test_one_length_makes_no_chart():
    rows = [row("attention/triton/forward/B1,N1,K1,S64,T64,H8,causal,fp32,w1", 1.0)]
    assert charts.attention_charts([facts_of(r) for r in rows], is_peer) == []


def test_a_rate_above_the_peak_is_a_gap_that_says_so():
    rows = [row(f"attention/triton/forward/B1,N1,K1,S{n},T{n},H64,causal,bf16,w1", 1e-3, env=GPU_ENV,
                metrics=work(flops=flops)) for n, flops in ((4096, 2e12), (8192, 2e11))]  # fmt: skip
    (chart,) = charts.attention_charts([facts_of(r) for r in rows], is_peer)
    wrong, right = series(chart, "triton").points
    assert wrong.y is None and wrong.status == "above the peak" and "work or peak is wrong" in wrong.note
    assert right.y == pytest.approx(200, rel=0.02)


def test_steps_are_stacked_by_phase_beside_the_whole_step():
    (chart,) = charts.step_charts(latest(cpu_rows()))  # the step of xl failed: nothing to draw
    assert [one.name for one in chart.series] == ["forward", "backward", "optimizer", "whole step"]
    assert chart.x.categories == ("plain", "best-parts", "ours")
    assert series(chart, "backward").points[0].y == pytest.approx(45.9, rel=0.01)
    whole = series(chart, "whole step")
    assert whole.bound and whole.points[0].y == pytest.approx(90, rel=0.01)


def test_a_step_without_phases_is_one_bar_and_a_failed_one_says_why():
    tail = "train_step/small,B4,S512,fp32,w1"
    metrics = {"forward": {"value": 0.001, "unit": "s", "better": "lower"}}
    rows = [row(f"step/plain/{tail}", 0.002, noise=0, metrics=metrics), row(f"step/ours/{tail}", 0.003, noise=0),
            row(f"step/best-parts/{tail}", status="oom", reason="asked for 1 GiB")]  # fmt: skip
    (chart,) = charts.step_charts([facts_of(r) for r in rows])
    assert [point.y for point in series(chart, "not timed by phase").points] == [None, pytest.approx(3), None]
    assert [point.y for point in series(chart, "forward").points] == [1, None, None]
    assert [point.y for point in series(chart, "whole step").points] == [pytest.approx(2), None, None]
    failed = series(chart, "forward").points[2]
    assert failed.status == "oom" and failed.note == "oom: asked for 1 GiB"


def test_configurations_do_not_share_an_axis():
    found = charts.step_charts(
        [facts_of(row(f"step/plain/train_step/{size},B4,S512,fp32,w1", 1.0)) for size in ("small", "xl")]
    )
    assert ["small" in chart.title for chart in found] == [True, False] and len({c.id for c in found}) == 2


def test_collectives_have_a_line_for_each_rank_count():
    time, bandwidth = charts.collective_charts(latest(cpu_rows()), is_peer)
    names = ["ring, 2 ranks", "ring, 4 ranks", "torch, 2 ranks", "torch, 4 ranks"]
    assert [one.name for one in time.series] == [one.name for one in bandwidth.series] == names
    gap = series(time, "ring, 4 ranks").points[-1]
    assert gap.y is None and gap.status == "error"
    assert series(bandwidth, "ring, 4 ranks").points[0].y == pytest.approx(1.147, rel=0.01)


def test_data_parallel_bars_add_up_to_the_step():
    (chart,) = charts.parallel_charts(latest(cpu_rows()))
    place = chart.x.categories.index("overlapped")
    parts = [one.points[place].y for one in chart.series]
    assert parts[1:3] == pytest.approx([3.6, 8.4]) and sum(parts[:3]) == pytest.approx(52, rel=0.02)
    assert parts[3] is None
    unknown = [one.points[chart.x.categories.index("torch-ddp")] for one in chart.series]
    assert [point.y is None for point in unknown] == [False, True, True, False]  # not drawn as exposed
    assert chart.series[3].name == "communication, overlap not measured"


def test_communication_noted_in_a_slower_pass_does_not_lengthen_the_step():
    metrics = {"communication": {"value": 0.05, "unit": "s", "better": "lower"},
               "hidden_share": {"value": 0.6, "unit": "1", "better": "higher"}}  # fmt: skip
    one = facts_of(row("data_parallel/naive/train_step/toy,B4,S128,fp32,w2", 0.04, noise=0, metrics=metrics))
    (chart,) = charts.parallel_charts([one])
    assert [s.points[0].y for s in chart.series] == pytest.approx([0, 20, 20])
    assert "hidden communication: 30 ms" in chart.series[2].points[0].note


def test_a_variant_without_a_result_keeps_its_place():
    tail = "train_step/toy,B4,S128,fp32,w2"
    rows = [
        row(f"data_parallel/naive/{tail}", 0.04),
        row(f"data_parallel/flat/{tail}", status="error", reason="r"),
    ]
    (chart,) = charts.parallel_charts([facts_of(r) for r in rows])
    assert chart.x.categories == ("naive", "flat")
    assert all(one.points[1].y is None and one.points[1].status == "error" for one in chart.series)


def test_predicted_peaks_stand_across_the_measured_bars():
    (chart,) = memory_charts.peak_charts(latest(memory_rows()))
    assert chart.x.categories == ("none", "every", "group of 4", "offload")
    measured, predicted = chart.series
    assert [point.y for point in measured.points] == [4000, 900, 700, None] and not measured.bound
    assert [point.y for point in predicted.points] == [3900, 1000, None, None] and predicted.bound
    assert measured.points[3].status == "error"


def test_peaks_that_nothing_stands_beside_are_compared_over_phases_and_contexts():
    size = {"peak_memory": {"value": 20 * 2**30, "unit": "byte", "better": "lower"}}
    rows = [row(f"memory/none/{phase}/xl,B4,S{length},fp32,w1", 1.0, metrics=size)
            for length in (128, 2048) for phase in ("inference", "train_step")]  # fmt: skip
    rows[3] = row(rows[3].case, status="oom", reason="asked for 2 GiB")
    (chart,) = memory_charts.peak_charts([facts_of(one) for one in rows])
    assert chart.x.categories[1] == "train step · B4, S128, fp32" and chart.y.label == "GiB"
    assert [point.y for point in chart.series[0].points] == [20, 20, 20, None]
    assert chart.series[0].points[3].note == "oom: asked for 2 GiB"


def test_what_a_rank_holds_is_stacked_beside_the_predicted_sum():
    metrics = {
        f"after_step_{name}": {
            "value": size * 2**20,
            "unit": "byte",
            "better": "lower",
            "predicted": 2.0 * 2**20,
        }
        for name, size in (("parameters", 2), ("optimizer", 4))
    }
    rows = [row("sharding/zero1/train_step/toy,B4,S128,fp32,w2", 1.0, metrics=metrics),
            row("sharding/fsdp/train_step/toy,B4,S128,fp32,w2", status="oom", metrics=metrics)]  # fmt: skip
    (chart,) = memory_charts.component_charts(latest(rows))
    assert chart.x.categories == ("zero1",)
    assert [(one.name, one.points[0].y, one.bound) for one in chart.series] == [
        ("parameters", 2, False), ("optimizer", 4, False), ("predicted in all", 4, True)]  # fmt: skip


def test_a_row_that_kept_its_timeline_has_a_chart():
    (chart,) = memory_charts.memory_charts(latest(memory_rows()))
    assert [point.y for point in chart.series[0].points] == [1024, 1024, 4000, 4000, 1024]
    assert [(mark.x, mark.label) for mark in chart.marks] == [(0, "forward"), (15, "backward")]
    assert chart.title == "Active memory, train step (toy,B4,S128,fp32,w1)" and chart.context


def test_memory_is_drawn_as_steps():
    chart = memory_charts.memory_chart([(0.0, 0), (0.001, 2**20)], phases=[(0.0, "forward")])
    assert [(point.x, point.y) for point in chart.series[0].points] == [(0, 0), (1, 0), (1, 1)]
    assert chart.marks[0].label == "forward" and "1.0 MiB" in chart.caption


def test_a_name_keeps_its_color_over_charts():
    one, two = (attention_chart(phase) for phase in ("forward", "forward-backward"))
    assert {s.name: s.color for s in one.series} == {s.name: s.color for s in two.series}
    assert len({s.color for s in one.series}) == len(one.series)


def test_every_implementation_of_attention_has_a_hue_of_its_own():
    for theme in (LIGHT, DARK):
        assert len({color_of(index, theme) for index in range(len(ATTENTION))}) == len(ATTENTION)


@pytest.mark.parametrize("text", ["../../etc/passwd", "a b/c", "<script>", "", "ünïcode", "x" * 500])
def test_file_names_are_safe(text):
    name = file_name(text)
    assert name and len(name) <= 80 and set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")


def test_file_names_are_distinct():
    assert file_name("a/b", []) == "a-b" and file_name("a b", ["a-b"]) == "a-b-2"
