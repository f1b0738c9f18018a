"""Facts of a row: summaries, rates and shares computed once, absent wherever they cannot be known."""

from dataclasses import replace

import pytest

from benchmarks.measure.record import STUDY
from benchmarks.report import facts
from benchmarks.report.facts import Peak, contexts, facts_of, latest, summarize
from tests.report.synthetic import CPU_ENV, GPU_ENV, row, work

CASE = "attention/triton/forward/B2,N4,K4,S1024,T1024,H64,causal,bf16,w1"


def test_one_sample_has_no_deviation_and_no_spread():
    summary = summarize([1.0])
    assert summary is not None
    assert (summary.count, summary.mean, summary.median, summary.minimum) == (1, 1.0, 1.0, 1.0)
    assert summary.std is None and summary.spread is None


def test_summary_of_known_samples():
    summary = summarize([1.0, 2.0, 3.0, 4.0, 10.0])
    assert summary is not None
    assert (summary.mean, summary.median, summary.minimum) == (4.0, 3.0, 1.0)
    assert summary.std == pytest.approx(12.5**0.5)
    assert summary.spread == pytest.approx(2 / 3)  # quartiles 2 and 4 about the median 3


def test_no_finite_sample_is_no_summary():
    assert summarize([]) is None
    assert summarize([None, float("nan"), float("inf")]) is None


def test_zero_times_give_no_spread_and_no_rate():
    fact = facts_of(row(CASE, 0.0, metrics=work(flops=1e9)))
    assert fact.seconds == 0.0
    assert fact.time is not None and fact.time.spread is None
    assert fact.per_second("flops") is None


def test_rate_of_a_known_case():
    fact = facts_of(row(CASE, 1e-3, noise=0.0, metrics=work(flops=2_147_483_648)))
    assert fact.per_second("flops") == pytest.approx(2.147e12, rel=1e-3)


@pytest.mark.parametrize("status", ["red", "oom", "error", "skipped"])
def test_no_speed_and_no_metric_without_an_ok(status):
    fact = facts_of(row(CASE, 1e-3, status=status, metrics=work(flops=1e9)))
    assert fact.time is None and fact.per_second("flops") is None and fact.metric("flops") is None


def test_an_ok_row_whose_samples_were_emptied_has_failed():
    """Its work says nothing; bytes that were counted, or what a study explains, are results without times."""
    for metrics in ({}, work(flops=1e9, bytes=1, tokens=1)):
        fact = facts_of(row(CASE, metrics=metrics))
        assert (fact.row.status, fact.row.reason) == ("error", "no finite samples")
        assert facts_of(row(CASE, metrics=metrics, suite=STUDY)).row.status == "ok"
    peak = {"peak_memory": {"value": 1, "unit": "byte", "better": None}}
    assert facts_of(row(CASE, metrics=peak)).row.status == "ok"


def test_mfu_and_roofline_need_a_known_device(monkeypatch):
    one = facts_of(row(CASE, 1e-3, noise=0.0, metrics=work(flops=5e11, bytes=1e9), env=GPU_ENV))
    monkeypatch.setattr(
        facts, "peak_of", lambda name, dtype: Peak(flops_per_second=1e15, bytes_per_second=1e12)
    )
    assert one.mfu == pytest.approx(0.5)
    # Intensity 500 FLOP/byte times 1e12 byte/s is below the peak: memory-bound, and exactly attained.
    assert one.attainable_flops_per_second == pytest.approx(5e14)
    assert one.roofline_share == pytest.approx(1.0)
    two = replace(one, world_size=2)
    assert two.mfu == pytest.approx(0.25)
    monkeypatch.setattr(facts, "peak_of", lambda name, dtype: None)
    assert one.mfu is None and one.roofline_share is None


def test_peak_of_real_and_unknown_devices():
    h200 = facts.peak_of("NVIDIA H200", "bf16")
    assert h200 is not None and h200.flops_per_second == pytest.approx(989e12, rel=0.01)
    assert facts.peak_of("NVIDIA H200", "amp-bf16") == h200
    assert facts.peak_of("NVIDIA H200 MIG 1g.18gb", "bf16") is None
    assert facts.peak_of(None, "bf16") is None
    assert facts_of(row(CASE, 1e-3, env=CPU_ENV)).device_name is None


def test_a_case_id_that_does_not_parse_is_kept():
    fact = facts_of(row("something else", 1.0))
    assert (fact.area, fact.target) == ("other", "something else")


def test_newest_row_of_each_case_and_machine():
    old = row(CASE, 1.0, started_at="2026-01-01T00:00:00")
    new = row(CASE, 2.0, started_at="2026-01-02T00:00:00")
    other = row(CASE, 3.0, machine="another")
    found = latest([new, old, other])
    assert [fact.row for fact in found] == [new, other]


def test_asv_rows_count_only_where_nothing_else_was_measured():
    ours = row(CASE, 1.0, started_at="2026-01-01T00:00:00")
    asv = row(CASE, 2.0, suite="asv", started_at="2026-02-01T00:00:00")
    assert [fact.row for fact in latest([ours, asv])] == [ours]
    assert [fact.row for fact in latest([asv, ours])] == [ours]
    assert [fact.row for fact in latest([asv])] == [asv]


def test_processes_of_one_run_are_one_row():
    rows = [row(CASE, 1.0 + p, samples=2, noise=0, env=CPU_ENV | {"process": p}) for p in range(3)]
    (fact,) = latest(rows)
    assert fact.row.samples_seconds == (1.0, 1.0, 2.0, 2.0, 3.0, 3.0)
    (failed,) = latest([*rows, row(CASE, status="error", reason="x", env=CPU_ENV | {"process": 3})])
    assert failed.row.status == "error"


def test_provenance_names_machine_device_versions_and_commit():
    line, dirty = contexts(
        [facts_of(row(CASE, 1.0, env=GPU_ENV)), facts_of(row(CASE, 1.0, env=GPU_ENV, dirty=True))]
    )
    for part in ("cpu-2core", "NVIDIA H200", "driver 570.124", "torch 2.11.0", "triton 3.6.0", "7777777777"):
        assert part in line
    assert "changes" not in line and "changes" in dirty
