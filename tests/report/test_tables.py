"""Tables: peers of the same run beside ours, steps, rates, collectives, data parallelism, failures."""

import pandas
import pytest

from benchmarks.commands.printing import print_rows
from benchmarks.report import facts as facts_module
from benchmarks.report import memory_tables, tables
from benchmarks.report.cards import headline_groups
from benchmarks.report.facts import facts_of, latest
from benchmarks.report.page import build_page
from tests.report.synthetic import (
    CPU_ENV,
    GPU_ENV,
    all_rows,
    attention_rows,
    cpu_rows,
    is_peer,
    memory_rows,
    row,
    work,
)

TAIL = "B1,N4,K4,S64,T64,H64,causal,fp32,w1"


def records(frame):
    """Rows as dictionaries with None for what is absent."""
    return frame.astype(object).where(frame.notna(), None).to_dict("records")


def pick(frame, **wanted):
    found = [r for r in records(frame) if all(r[key] == value for key, value in wanted.items())]
    assert len(found) == 1, found
    return found[0]


def test_headline_takes_the_fastest_peer_of_the_same_run():
    rows = [
        row(f"attention/triton/forward/{TAIL}", 2e-3, noise=0),
        row(f"attention/flex/forward/{TAIL}", 5e-3, noise=0),
        row(f"attention/sdpa-flash/forward/{TAIL}", 3e-3, noise=0),
        row(f"attention/sdpa-flash/forward/{TAIL}", 1e-3, noise=0, run="run-0", started_at="2020-01-01"),
    ]
    (line,) = records(tables.headline([facts_of(r) for r in rows], is_peer))
    assert (line["implementation"], line["best peer"]) == ("triton", "sdpa-flash")
    assert line["peer/ours"] == pytest.approx(1.5) and line["peer ms"] == pytest.approx(3.0)
    assert line["samples"] == 10 and line["spread %"] == pytest.approx(0)


def test_ratios_to_every_peer_say_why_one_is_missing():
    rows = [row(f"attention/triton/forward/{TAIL}", 2e-3, noise=0),
            row(f"attention/sdpa-flash/forward/{TAIL}", 3e-3, noise=0),
            row(f"attention/flex/forward/{TAIL}", status="oom", reason="no room")]  # fmt: skip
    (line,) = records(tables.beside_peers([facts_of(r) for r in rows], is_peer))
    assert line["sdpa-flash"] == pytest.approx(1.5) and line["flex"] == "oom"
    (head,) = records(tables.headline([facts_of(r) for r in rows[::2]], is_peer))
    assert head["best peer"] is None and head["peer/ours"] is None


def test_zero_time_has_no_ratio():
    rows = [row(f"attention/triton/forward/{TAIL}", 0.0), row(f"attention/flex/forward/{TAIL}", 1e-3)]
    (line,) = records(tables.headline([facts_of(r) for r in rows], is_peer))
    assert line["median ms"] == 0 and line["peer/ours"] is None


def test_steps_list_each_part_and_the_total(monkeypatch):
    peak = facts_module.Peak(flops_per_second=1e11)
    monkeypatch.setattr(facts_module, "peak_of", lambda name, dtype: peak)
    frame = tables.steps(latest(cpu_rows()))
    parts = [r["part"] for r in records(frame) if r["implementation"] == "ours"]
    assert parts == ["forward", "backward", "optimizer", "total"]
    forward = pick(frame, implementation="ours", part="forward")
    assert forward["samples"] == 5 and forward["min ms"] == pytest.approx(15.0)
    assert forward["std ms"] > 0 and forward["tokens/s"] is None
    total = pick(frame, implementation="ours", part="total")
    assert total["tokens/s"] == pytest.approx(512 / 0.050, rel=0.02)
    assert total["MFU %"] == pytest.approx(100 * 2e9 / 0.050 / 1e11, rel=0.02)
    assert total["peak MiB"] == pytest.approx(3.2e8 / 2**20)
    failed = pick(frame, implementation="plain", part="total", status="error")
    assert failed["mean ms"] is None and failed["tokens/s"] is None


def test_a_single_sample_has_no_deviation():
    frame = tables.steps([facts_of(row("step/plain/forward/toy,B4,S8,fp32,w1", 1.0, samples=1))])
    (line,) = records(frame)
    assert line["samples"] == 1 and line["std ms"] is None and line["notes"] == "1 sample"


def test_attention_rates_side_by_side_say_why_a_cell_is_empty():
    frame = tables.attention_rates(latest(attention_rows()))
    tail = "B1,N16,K16,S{0},T{0},H64,causal,bf16,w1"
    assert pick(frame, phase="forward", parameters=tail.format(16384))["reference"] == "oom"
    assert pick(frame, phase="forward", parameters=tail.format(4096))["tiled"] == "red"
    assert pick(frame, phase="forward", parameters=tail.format(512))["flex"] == "skipped"
    rate = pick(frame, phase="forward", parameters=tail.format(4096))["triton"]
    assert rate == pytest.approx(420 / (1 + 2000 / 4096), rel=0.02)
    lengths = [r["parameters"] for r in records(frame) if r["phase"] == "forward"]
    assert lengths == [tail.format(n) for n in (512, 1024, 4096, 16384)]  # as numbers, not as text


def test_attention_table_has_rate_and_share_of_the_roofline():
    frame = tables.attention(latest(attention_rows()))
    line = pick(frame, implementation="triton", phase="forward", length=16384)
    assert line["TFLOP/s"] == pytest.approx(420 / (1 + 2000 / 16384), rel=0.02)
    assert line["of roofline %"] == pytest.approx(100 * line["TFLOP/s"] / 989, rel=0.01)
    zero = pick(frame, implementation="triton", phase="backward", length=64)
    assert zero["median ms"] == 0 and zero["TFLOP/s"] is None
    out = pick(frame, implementation="reference", phase="forward", length=16384)
    assert out["status"] == "oom" and out["median ms"] is None  # neither zero nor left out


@pytest.mark.parametrize(
    ("op", "factors"),
    [("all_reduce", (0, 1, 1.5, 1.75)), ("all_gather", (0, 0.5, 0.75, 0.875)),
     ("reduce_scatter", (0, 0.5, 0.75, 0.875)), ("broadcast", (1, 1, 1, 1))],
)  # fmt: skip
def test_bus_bandwidth_of_known_cases(op, factors):
    for ranks, factor in zip((1, 2, 4, 8), factors, strict=True):
        fact = facts_of(row(f"collective/torch/{op}/bytes1000000000,fp32,w{ranks}", 0.1, noise=0))
        assert tables.algorithm_bandwidth(fact) == pytest.approx(10e9)
        assert tables.bus_bandwidth(fact) == pytest.approx(10e9 * factor)


def test_collectives_beside_the_formula():
    frame = tables.collectives(latest(cpu_rows()))
    line = pick(frame, implementation="ring", ranks=4, bytes=10**7)
    assert line["sent bytes"] == line["formula bytes"] == 15_000_000
    assert line["busbw GB/s"] == pytest.approx(1.5 * line["algbw GB/s"])
    assert line["notes"] == "oversubscribed"
    assert pick(frame, implementation="ring", ranks=2, bytes=10**7)["notes"] is None
    failed = pick(frame, implementation="ring", ranks=4, bytes=10**8)
    assert failed["status"] == "error" and failed["algbw GB/s"] is None
    order = [r["bytes"] for r in records(frame) if r["implementation"] == "torch" and r["ranks"] == 2]
    assert order == [10**6, 10**7, 10**8]


def test_whole_tensor_ring_sends_more():
    fact = facts_of(row("collective/whole-tensor/all_reduce/bytes1000,fp32,w4", 0.1))
    assert tables.formula_bytes(fact) == 3000


def test_data_parallel_splits_communication():
    frame = tables.parallel(latest(cpu_rows()), is_peer)
    line = pick(frame, implementation="overlapped")
    assert line["communication ms"] == pytest.approx(12) and line["hidden ms"] == pytest.approx(8.4)
    assert line["exposed ms"] == pytest.approx(3.6) and line["best peer"] == "torch-ddp"
    assert line["peer/ours"] == pytest.approx(51 / 52, rel=0.02)
    unknown = pick(frame, implementation="torch-ddp")
    assert unknown["hidden ms"] is None and unknown["exposed ms"] is None


def test_statuses_keep_failed_and_skipped_apart_and_give_reasons():
    frame = tables.statuses(latest(all_rows()))
    assert set(frame["status"]) == {"oom", "error", "skipped", "red"}
    assert frame["reason"].notna().all()
    assert pick(frame, status="oom", phase="forward")["reason"] == "asked for 8.00 GiB, 1.20 GiB free"


def test_every_table_with_notes_says_why_a_row_has_no_speed():
    for area in ("attention", "step", "collective", "data_parallel"):
        facts = [facts_of(row(f"{area}/x/all_reduce/{TAIL}", status="skipped", reason="no compiler"))]
        made = {
            "attention": tables.attention,
            "step": tables.steps,
            "collective": tables.collectives,
            "data_parallel": lambda facts: tables.parallel(facts, is_peer),
        }[area]
        for frame in (made(facts), tables.every_row(facts)):
            assert list(frame["notes"]) == ["no compiler"]


def test_impossible_rates_are_flagged():
    fact = facts_of(row(f"attention/triton/forward/{TAIL}", 1e-6, metrics=work(flops=1e12), env=GPU_ENV))
    assert "above the peak" in (tables.flags(fact) or "")


def impossible_rows():
    """A peer above the peak beside one of ours, and a kernel that moves bytes faster than the memory can."""
    tail = "B1,N16,K16,S4096,T4096,H64,causal,bf16,w1"
    flops = work(flops=4 * 16 * 4096**2 * 64 / 2)
    return [
        row(f"attention/triton/forward/{tail}", 1e-3, metrics=flops, env=GPU_ENV),
        row(f"attention/flex/forward/{tail}", 1e-5, metrics=flops, env=GPU_ENV),
        row("kernel/swiglu/forward/B1,bf16,w1", 1e-3, metrics=work(bytes=1e10), env=GPU_ENV),
    ]


def test_no_table_shows_a_rate_above_the_peak_as_if_it_were_fine(capsys):
    found = [facts_of(one) for one in impossible_rows()]
    assert [fact.above_peak for fact in found] == [False, True, True]
    (line,) = records(tables.headline(found, is_peer))
    assert line["notes"] == "flex above the peak: work or peak is wrong"
    (rates,) = records(tables.attention_rates(found))
    assert rates["flex"] == "above the peak" and rates["triton"] == pytest.approx(34.2, rel=0.02)
    assert "above the peak" in pick(tables.every_row(found), implementation="swiglu")["notes"]
    assert headline_groups(found, is_peer) == []
    page = build_page(impossible_rows(), is_peer=is_peer).html
    assert page.count('<tr class="above-peak">') >= 3
    print_rows(impossible_rows())
    assert "above the peak" in capsys.readouterr().out


def test_nothing_possible_is_flagged(capsys):
    rows = impossible_rows()[:1]
    print_rows(rows)
    assert "above" not in capsys.readouterr().out
    assert "tr class=" not in build_page(rows, is_peer=is_peer).html


def test_a_red_check_shows_error_and_budget():
    fact = facts_of(row("x", status="red", check={"error": None, "budget": 1.0}))
    assert tables.check_text(fact) == "red: no finite error"
    fact = facts_of(row("x", 1.0, check={"error": 0.5, "budget": 1.0}))
    assert tables.check_text(fact) == "ok: 0.5 of 1"


def test_memory_stands_beside_its_prediction():
    frame = memory_tables.memory(latest(memory_rows()))
    line = pick(frame, implementation="every")
    assert (line["peak MiB"], line["predicted MiB"], line["peak/predicted"]) == (900, 1000, 0.9)
    assert pick(frame, implementation="group")["peak/predicted"] is None
    assert pick(frame, implementation="offload")["peak MiB"] is None


def test_peaks_of_phases_have_columns():
    sizes = {f"peak_{name}": {"value": size * 2**20, "unit": "byte", "better": "lower"}
             for name, size in (("memory", 4), ("forward", 2), ("backward", 4))}  # fmt: skip
    one = facts_of(row("memory/none/forward_backward/toy,B4,S128,fp32,w1", 1.0, metrics=sizes))
    (line,) = records(memory_tables.memory([one]))
    assert (line["forward MiB"], line["backward MiB"], line["optimizer MiB"]) == (2, 4, None)


def test_the_largest_allocations_name_their_frames():
    entry = {"value": 1, "unit": "byte", "better": None, "allocations": [
        {"bytes": 2**20, "count": 3, "phase": "backward", "frame": "trainstep/model/loss.py:34 cross_entropy"}]}  # fmt: skip
    rows = [row(f"memory/none/train_step/toy,B4,S{n},fp32,w1", metrics={"active_memory": entry} if n == 8 else {})
            for n in (8, 16)]  # fmt: skip
    (line,) = records(memory_tables.allocations([facts_of(one) for one in rows]))
    assert (line["MiB"], line["times"], line["during"]) == (1, 3, "backward")
    assert line["made by"] == "trainstep/model/loss.py:34 cross_entropy"


def test_rows_of_any_area_show_their_metrics():
    metrics = work(flops=1e9) | {"peak_memory": {"value": 2**20, "unit": "byte", "better": "lower"},
                                 "wait": {"value": 0.002, "unit": "s", "better": "lower"}}  # fmt: skip
    frame = tables.every_row(
        [facts_of(row("kernel/swiglu/forward/B1,fp32,w1", 1.0, noise=0, metrics=metrics))]
    )
    (line,) = records(frame)
    assert (line["peak memory MiB"], line["wait ms"], line["GFLOP/s"]) == (
        1.0,
        2.0,
        1.0,
    ) and "flops" not in line


def test_tables_of_nothing_have_their_columns():
    made = [tables.headline([], is_peer), tables.beside_peers([], is_peer), tables.parallel([], is_peer)]
    makers = (
        tables.steps,
        tables.attention,
        tables.attention_rates,
        tables.collectives,
        memory_tables.memory,
    )
    for frame in [*made, *(maker([]) for maker in (*makers, tables.statuses, tables.every_row))]:
        assert isinstance(frame, pandas.DataFrame) and frame.empty and len(frame.columns)


def test_oversubscription_is_a_matter_of_cores():
    case = "collective/ring/all_reduce/bytes1000,fp32,w4"
    assert facts_of(row(case, 1.0, env=CPU_ENV)).oversubscribed
    assert not facts_of(row(case, 1.0, env=CPU_ENV | {"cpu_count": 4})).oversubscribed
    assert not facts_of(row(case, 1.0, env=GPU_ENV)).oversubscribed
