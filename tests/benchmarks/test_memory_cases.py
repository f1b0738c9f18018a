"""Memory cases: ids, predictions beside counted bytes, checks, and cells that do not reach into one
another."""

import json
import weakref

import pytest
import torch

from benchmarks.cases import memory as table
from benchmarks.cases.case import parse_id
from benchmarks.measure.memory import HostMemoryError, PeakMeter
from benchmarks.measure.sampling import Policy
from benchmarks.runner import measure
from trainstep.memory.live import INSIDE
from trainstep.specs.model import get_model

ONCE = Policy(warmup=0, min_samples=1, max_samples=1)
CPU_POLICIES = ("none", "groups-1", "groups-2", "groups-4", "recursive", "selective")


def test_ids_name_the_policy():
    one = table.case("every-block", "forward_backward", "xl", context=2048, dtype="amp-bf16")
    assert one.id == "memory/groups/forward_backward/xl,B4,S2048,group1,amp-bf16,w1"
    assert table.policy_of(one) == "groups-1"
    assert parse_id(one.id)["group"] == 1
    assert table.policy_of(table.case("recursive", "forward", "toy")) == "recursive"
    ids = [case.id for case in table.cases()]
    assert len(ids) == len(set(ids))


def test_the_full_sweep_has_every_policy_and_group_size():
    cells = [
        case for case in table.cases() if case.shape["preset"] == "xl" and case.phase == "forward_backward"
    ]
    for dtype in ("fp32", "amp-bf16"):
        names = {table.policy_of(cell) for cell in cells if cell.dtype == dtype}
        groups = {f"groups-{size}" for size in (1, 2, 4, 8, 16)}
        assert names == {"none", "recursive", "selective", "offload", *groups}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sometimes", "forward", "toy", {}), "unknown checkpointing policy 'sometimes'"),
        (("none", "sideways", "toy", {}), "unknown phase 'sideways'"),
        (("none", "forward", "huge", {}), "unknown model preset 'huge'"),
        (("none", "forward", "toy", {"dtype": "fp3"}), "unknown dtype 'fp3'"),
        (("none", "forward", "toy", {"batch": 0}), "batch_size must be a positive integer"),
    ],
)
def test_clear_errors(arguments, message):
    *names, options = arguments
    with pytest.raises(ValueError, match=message):
        table.case(*names, **options)


def counted(config, dtype, policy, phase):
    """Peak of a second step, when optimizer state exists."""
    step = table.build(config, dtype, "cpu", policy)
    for _ in range(2):
        step.reset_gradients()
        step.loss = None
        with PeakMeter("cpu", table.resident(step)) as meter:
            for name, part in table.parts_of(step, phase):
                with meter.phase(name):
                    part()
    return meter.peak_bytes


@pytest.mark.parametrize("dtype", ["fp32", "amp-bf16"])
@pytest.mark.parametrize("policy", CPU_POLICIES)
def test_predicted_within_two_percent_of_counted(policy, dtype):
    config = get_model("toy", n_layers=8, context_length=64, vocab_size=100, batch_size=2)
    expected = table.predict(config, dtype, policy, "forward_backward", "cpu")
    assert expected.peak_bytes == pytest.approx(counted(config, dtype, policy, "forward_backward"), rel=0.02)


@pytest.mark.parametrize("dtype", ["fp32", "amp-bf16"])
@pytest.mark.parametrize("phase", table.PHASES)
def test_predictions_by_phase(phase, dtype):
    # Autocast's copies of the weights outlive the layer that needed them, also without gradients.
    config = get_model("toy", n_layers=8, context_length=64, vocab_size=100, batch_size=2)
    expected = table.predict(config, dtype, "none", phase, "cpu")
    assert expected.peak_bytes == pytest.approx(counted(config, dtype, "none", phase), rel=0.02)


# GiB that one H200 measured with torch 2.11: xl, batch 4, context 2048, float32, forward and backward.
MEASURED_GIB = {
    "groups-1": 33.97, "groups-2": 37.61, "groups-4": 44.90, "groups-8": 59.49, "groups-16": 88.64
}  # fmt: skip


def test_xl_on_paper_is_what_a_gpu_measured(monkeypatch):
    operation = torch.ops.aten._softmax_backward_data.default
    monkeypatch.setattr(table, "measuring_device", lambda *_: "meta")
    monkeypatch.setitem(INSIDE, ("meta", operation), INSIDE["cuda", operation])
    table.model_cost.cache_clear()
    try:
        for policy, measured in MEASURED_GIB.items():
            config = get_model("xl", context_length=2048)
            expected = table.predict(config, "fp32", policy, "forward_backward", "cpu")
            assert expected.peak_bytes / 2**30 == pytest.approx(measured, rel=0.006), policy
    finally:
        table.model_cost.cache_clear()


def test_a_cell_that_the_host_cannot_hold_is_refused_before_anything_is_built(monkeypatch):
    cell = table.case("groups-1", "forward_backward", "toy", context=32)
    needed = table.predict(table.config_of(cell), "fp32", "groups-1", "forward_backward", "cpu").peak_bytes
    monkeypatch.setattr(table, "available_host_bytes", lambda: int(needed) - 1)
    with monkeypatch.context() as patched:
        patched.setattr(table, "build", lambda *_: pytest.fail("built"))
        outcome = measure(cell, "cpu", ONCE, table.prepare)
    assert outcome.status == "oom"
    assert outcome.reason.startswith(f"out of memory of the host: asked for {int(needed)} bytes (")
    assert f"free: {int(needed) - 1} bytes (" in outcome.reason
    monkeypatch.setattr(table, "available_host_bytes", lambda: int(needed))
    assert measure(cell, "cpu", ONCE, table.prepare).status == "ok"
    monkeypatch.setattr(table, "available_host_bytes", lambda: None)
    assert measure(cell, "cpu", ONCE, table.prepare).status == "ok"


def test_of_a_gpu_only_offload_takes_of_the_host(monkeypatch):
    monkeypatch.setattr(table, "available_host_bytes", lambda: 2**20)
    config = get_model("toy", context_length=128)
    for policy in CPU_POLICIES:
        table.require_host_memory(table.predict(config, "fp32", policy, "forward_backward", "cpu"), "cuda")
    expected = table.predict(config, "fp32", "offload", "forward_backward", "cpu")
    with pytest.raises(HostMemoryError) as refused:
        table.require_host_memory(expected, "cuda")
    assert (refused.value.asked_bytes, refused.value.free_bytes) == (expected.host_bytes, 2**20)


def test_offload_comes_last_of_the_large_cells():
    targets = [case.target for case in table.cases() if case.shape["preset"] == "xl"]
    assert targets[-2:] == ["offload", "offload"] and "offload" not in targets[:-2]


def test_unknown_phase_is_refused():
    with pytest.raises(ValueError, match="unknown phase 'later'"):
        table.predict(get_model("toy"), "fp32", "none", "later", "cpu")


@pytest.mark.parametrize("policy", ["groups-2", "recursive", "selective"])
def test_check_compares_bit_for_bit(policy, monkeypatch):
    table.check.cache_clear()
    assert table.check(policy, "fp32", "cpu").green
    table.check.cache_clear()
    honest = table.build

    def dishonest(config, dtype, device, name):
        step = honest(config, dtype, device, name)
        if name != "none":
            torch.nn.init.zeros_(step.model.blocks[0].feed_forward.up.weight)
        return step

    monkeypatch.setattr(table, "build", dishonest)
    assert not table.check(policy, "fp32", "cpu").green
    table.check.cache_clear()


def test_a_cell_as_the_runner_measures_it():
    outcome = measure(table.case("groups-1", "train_step", "toy", context=32), "cpu", ONCE, table.prepare)
    assert outcome.status == "ok", outcome.reason
    values = {name: metric["value"] for name, metric in outcome.metrics.items()}
    config = get_model("toy")
    gradient = 4 * (4 * config.d_model**2 + 3 * config.d_model * config.d_ff + 2 * config.d_model)
    assert values["block_gradient"] == gradient
    assert values["peak_memory"] == max(
        values[f"peak_{name}"] for name in ("forward", "backward", "optimizer")
    )
    assert outcome.state == "advances"
    kept = outcome.metrics["active_memory"]
    assert len(kept["seconds"]) == len(kept["samples"]) <= table.TIMELINE_POINTS + 2
    assert max(kept["samples"]) == kept["value"] == values["peak_memory"]
    assert [name for _, name in kept["phases"]] == ["forward", "backward", "optimizer"]
    assert len(kept["allocations"]) == 5
    json.dumps(outcome.metrics, allow_nan=False)


def test_offload_needs_a_device_besides_the_host():
    outcome = measure(table.case("offload", "forward", "toy", context=16), "cpu", ONCE, table.prepare)
    assert (outcome.status, outcome.reason) == ("skipped", "offload does not run on cpu")


def test_a_cells_peak_does_not_depend_on_the_cell_before_it(monkeypatch):
    cell = table.case("none", "forward_backward", "toy", context=32)

    def peak():
        return measure(cell, "cpu", ONCE, table.prepare).metrics["peak_memory"]["value"]

    alone = peak()
    measure(table.case("none", "train_step", "toy", context=64), "cpu", ONCE, table.prepare)
    assert peak() == alone

    honest = table.build

    alive = []

    def out_of_memory(*arguments):
        step = honest(*arguments)
        alive.append(weakref.ref(step))
        raise torch.OutOfMemoryError("Tried to allocate 20 bytes.")

    with monkeypatch.context() as patched:
        patched.setattr(table, "build", out_of_memory)
        assert measure(cell, "cpu", ONCE, table.prepare).status == "oom"
        assert alive[0]() is None
    assert peak() == alone


def test_the_planners_choice_is_measured_with_its_neighbours():
    config = get_model("toy", n_layers=6, context_length=16, vocab_size=100, batch_size=1)
    names = table.with_neighbours(["none", "groups-1"], config, "fp32", "cpu")
    assert names[:2] == ["none", "groups-1"]
    assert len(names) == len(set(names)) >= 3
    assert all(name.startswith("groups-") for name in names[2:])
