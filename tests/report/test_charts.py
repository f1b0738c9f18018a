"""Charts: which series, gaps as gaps with their reasons, the bound where the device is known, file names."""

import pytest

from benchmarks.report import charts
from benchmarks.report.chart import file_name
from benchmarks.report.facts import facts_of, latest
from tests.report.synthetic import CPU_ENV, attention_rows, cpu_rows, is_peer, memory_rows, row, work


def series(chart, name):
    (found,) = [one for one in chart.series if one.name == name]
    return found


def attention_chart(phase):
    found = charts.attention_charts(latest(attention_rows()), is_peer)
    (chart,) = [one for one in found if f"attention-{phase}-b1-n16" in one.id]
    return chart


def test_rate_against_length_has_a_line_for_each_implementation_and_the_peak():
    chart = attention_chart("forward")
    names = [one.name for one in chart.series]
    assert names == ["reference", "tiled", "triton", "flex", "sdpa-flash", "compute peak"]
    assert [one.peer for one in chart.series] == [False, False, False, True, True, False]
    assert series(chart, "compute peak").bound
    assert {point.y for point in series(chart, "compute peak").points} == {989.0}
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


def test_steps_are_stacked_by_phase():
    (chart,) = charts.step_charts(latest(cpu_rows()))
    assert [one.name for one in chart.series] == ["forward", "backward", "optimizer"]
    assert len(chart.x.categories) == 3  # the failed step has no bar; its row is in the tables
    assert series(chart, "backward").points[0].y == pytest.approx(45.9, rel=0.01)


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
    assert parts[1:] == pytest.approx([3.6, 8.4]) and sum(parts) == pytest.approx(52, rel=0.02)
    unknown = [one.points[chart.x.categories.index("torch-ddp")] for one in chart.series]
    assert unknown[2].y is None and "overlap not measured" in unknown[1].note


def test_predicted_peaks_stand_across_the_measured_bars():
    (chart,) = charts.policy_charts(latest(memory_rows()))
    assert chart.x.categories == ("none", "every", "group of 4")
    measured, predicted = chart.series
    assert [point.y for point in measured.points] == [4000, 900, 700] and not measured.bound
    assert [point.y for point in predicted.points] == [3900, 1000, None] and predicted.bound


def test_memory_is_drawn_as_steps():
    chart = charts.memory_chart([(0.0, 0), (0.001, 2**20)], phases=[(0.0, "forward")])
    assert [(point.x, point.y) for point in chart.series[0].points] == [(0, 0), (1, 0), (1, 1)]
    assert chart.marks[0].label == "forward" and "1.0 MiB" in chart.caption


def test_a_name_keeps_its_color_over_charts():
    one, two = (attention_chart(phase) for phase in ("forward", "forward-backward"))
    assert {s.name: s.color for s in one.series} == {s.name: s.color for s in two.series}
    assert len({s.color for s in one.series}) == len(one.series)


@pytest.mark.parametrize("text", ["../../etc/passwd", "a b/c", "<script>", "", "ünïcode", "x" * 500])
def test_file_names_are_safe(text):
    name = file_name(text)
    assert name and len(name) <= 80 and set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")


def test_file_names_are_distinct():
    assert file_name("a/b", []) == "a-b" and file_name("a b", ["a-b"]) == "a-b-2"
