"""The planner: its formula against the simulated schedule, its search against trying everything."""

import itertools
import random
import time
from dataclasses import replace

import pytest

from trainstep.accounting import params, question
from trainstep.accounting.large_models import LARGE_MODELS, find_model
from trainstep.accounting.layout import Layout, refuse
from trainstep.accounting.planner import evaluate, memory, simulated_seconds
from trainstep.accounting.search import search
from trainstep.specs.model import get_model

SEVENTY = find_model("70b")


def ask(config, *, devices, batch, state="mixed", execution="fused", between=50e9):
    return question.ask(
        config,
        devices=devices,
        batch=batch,
        dtype="bf16",
        state=state,
        execution=execution,
        between_bytes_per_second=between,
    )


def random_questions(count):
    """Possible layouts of the 70B model over nodes joined at different speeds."""
    draw = random.Random(1)
    while count:
        layout = Layout(
            tensor=draw.choice([1, 2, 4, 8]),
            context=draw.choice([1, 1, 2, 4]),
            data=draw.choice([1, 2, 4, 16, 64]),
            shard=draw.choice([1, 2, 4, 16, 64, 256]),
            pipeline=draw.choice([1, 1, 2, 4, 8, 20, 40, 80]),
            microbatch=draw.choice([1, 2, 4]),
            checkpoint=draw.random() < 0.5,
        )
        asked = ask(SEVENTY, devices=layout.devices, batch=256, between=draw.choice([50e9, 25e9, 5e9, 1e9]))
        if refuse(asked, layout) is None:
            count -= 1
            yield asked, layout


def test_the_formula_equals_the_simulated_schedule():
    for asked, layout in random_questions(150):
        plan = evaluate(asked, layout)
        assert plan.seconds == pytest.approx(simulated_seconds(asked, layout), rel=0.05), layout
        assert plan.seconds == pytest.approx(sum(plan.parts.values()))
        assert all(seconds >= 0 for seconds in plan.parts.values())
        assert 0 < plan.mfu < 1


def test_search_finds_what_trying_everything_finds():
    config = get_model("medium", n_layers=8)
    asked = ask(config, devices=8, batch=16)
    found = search(asked, 8)[0]
    sizes = (1, 2, 4, 8)
    everything = [
        Layout(tensor=t, context=c, data=d, shard=s, pipeline=p, microbatch=m, checkpoint=k)
        for t, c, d, s, p, m, k in itertools.product(
            sizes, sizes[:3], sizes, sizes, sizes, (1, 2, 4, 8, 16), (False, True)
        )
    ]
    possible = [x for x in everything if 4 <= x.devices <= 8 and refuse(asked, x) is None]
    assert len(possible) > 100
    best = min(evaluate(asked, layout).seconds for layout in possible)
    assert found.seconds <= best * 1.001


@pytest.mark.parametrize(("devices", "batch"), [(1024, 1024), (100_000, 8192)])
def test_a_large_question_is_answered_in_time(devices, batch):
    asked = ask(SEVENTY, devices=devices, batch=batch)
    assert [level.name for level in asked.network.levels] == ["node", "cluster"]
    started = time.process_time()
    plans = search(asked, devices)
    assert time.process_time() - started < 10
    best = plans[0]
    assert best.seconds <= min(plan.seconds for plan in plans) * 1.001
    assert devices / 2 <= best.layout.devices <= devices
    assert best.memory_bytes <= asked.device.memory_bytes
    assert best.bound in best.parts
    assert simulated_seconds(asked, best.layout) == pytest.approx(best.seconds, rel=0.05)


def test_what_binds_moves_with_the_question():
    slow = ask(SEVENTY, devices=1024, batch=1024, between=1e8)
    assert search(slow, 1024, fixed={"tensor": 1, "context": 1, "pipeline": 1})[0].bound == "sharding"
    assert search(ask(SEVENTY, devices=1024, batch=1024), 1024)[0].bound == "products"
    tiny = question.ask(get_model("small"), devices=1, dtype="amp-bf16", execution="plain")
    assert search(tiny, 1)[0].bound == "host"


def test_no_more_devices_than_the_batch_can_feed():
    plan = search(ask(SEVENTY, devices=96, batch=64), 96)[0]
    assert 48 <= plan.layout.devices <= 96
    assert 64 % plan.layout.data == 0


def test_memory_by_hand():
    config = get_model("8b-32k")
    asked = ask(config, devices=2, batch=2, state="bf16")
    alone = memory(asked, Layout(data=2, microbatch=1, checkpoint=True))
    halved = memory(asked, Layout(data=2, shard=2, microbatch=1, checkpoint=True))
    count = 8_125_000_000
    assert alone["parameters"] == pytest.approx(2 * count, rel=1e-3)
    assert alone["optimizer"] == pytest.approx(4 * count, rel=1e-3)
    assert halved["optimizer"] == alone["optimizer"] / 2
    assert alone["gathered"] == 0 < halved["gathered"]
    # With gradients summed over micro-batches they stand beside all activations.
    summed = memory(ask(config, devices=1, batch=2, state="bf16"), Layout(microbatch=1, checkpoint=True))
    assert summed["gradients"] == pytest.approx(2 * count, rel=1e-3)
    boundary, layers = 32768 * 4096 * 2, 34
    block = summed["activations"] - layers * boundary
    assert block == pytest.approx(9 * boundary + 3 * 32768 * 11008 * 2, rel=1e-3)
    # With one micro-batch gradients come as activations go: whichever end of the backward pass is fuller
    # counts.
    assert alone["activations"] == pytest.approx(block + boundary)
    assert alone["gradients"] > 0
    kept = memory(ask(config, devices=1, batch=1, state="bf16"), Layout(checkpoint=False))
    assert kept["activations"] == pytest.approx(layers * block)
    assert kept["gradients"] == 0


def test_the_first_stage_holds_as_many_microbatches_as_there_are_stages():
    asked = ask(SEVENTY, devices=40, batch=64)
    held = [memory(asked, Layout(pipeline=stages, data=2))["activations"] for stages in (1, 4, 40)]
    assert held[0] == held[1]  # a quarter of the layers, four in flight
    assert held[2] == pytest.approx(held[0] * 2 / 80 * 32)  # only 32 micro-batches exist


def test_ring_attention_shows_only_what_attention_does_not_hide():
    fast, slow = (ask(SEVENTY, devices=16, batch=1, between=rate) for rate in (50e9, 1e8))
    layout = Layout(context=16)
    hidden = evaluate(slow, layout).parts["attention"]
    # Keys and values of 512 tokens, 8 heads of 128, 2 bytes each, 15 hops forward and twice that backward, 80
    # layers.
    sent = 2 * 512 * 8 * 128 * 2 / (1e8 * slow.rates.link_share)
    passed = 3 * 80 * 15 * (sent + slow.network.call_seconds + 5e-6)
    assert evaluate(slow, layout).parts["context"] == pytest.approx(passed - hidden, rel=1e-6)
    assert evaluate(fast, layout).parts["context"] < passed / 100


@pytest.mark.parametrize(
    ("change", "layout", "message"),
    [
        ({"batch": 4}, {"data": 8}, "a batch of 4 sequences is smaller than 8 data-parallel ranks"),
        ({"batch": 12}, {"data": 8}, "12 sequences do not divide into 8 ranks of 1"),
        ({}, {"tensor": 3}, "64 query heads are not divisible by 3"),
        ({}, {"tensor": 16}, "8 key/value heads are not divisible by 16"),
        ({}, {"pipeline": 3}, "80 layers are not divisible by 3"),
        ({}, {"context": 7}, "context of 8192 is not divisible by 7"),
        ({}, {"data": 8, "shard": 3}, "8 ranks are not divisible into shard groups of 3"),
        ({}, {"data": 0}, "at least one device"),
        ({"execution": "plain"}, {"context": 2}, "needs flash attention"),
    ],
)
def test_impossible_layouts_get_one_line(change, layout, message):
    asked = ask(SEVENTY, **({"devices": 8, "batch": 64} | change))
    with pytest.raises(ValueError, match=message) as error:
        evaluate(asked, Layout(**layout))
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=message):
        search(asked, 64, fixed=layout)


@pytest.mark.parametrize(
    ("devices", "batch", "message"),
    [
        (0, 1, "at least one device, got 0"),
        (8, 0, "at least one sequence, got 0"),
        (2, 2, r"70b does not fit on 2 h200: the leanest layout needs .* GiB a device, which has 131.3 GiB"),
        (100_000, 1, "a batch of 1 sequences of 70b keeps at most .* of 100000 devices busy"),
    ],
)
def test_impossible_questions_get_one_line(devices, batch, message):
    with pytest.raises(ValueError, match=message) as error:
        search(replace(ask(SEVENTY, devices=max(devices, 1), batch=1), batch=batch), devices)
    assert "\n" not in str(error.value)


def test_large_models_have_their_published_size():
    billions = {name: params.count(model) / 1e9 for name, model in LARGE_MODELS.items()}
    assert billions == pytest.approx({"70b": 70.55, "405b": 405.85}, rel=1e-3)
    assert find_model("70b", n_layers=4).n_layers == 4
    assert find_model("xl") is not find_model("70b")
    with pytest.raises(ValueError, match=r"unknown model '7b'.*xl.*70b"):
        find_model("7b")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"devices": 0}, "devices must be at least 1, got 0"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"per_node": 0}, "devices a node must be at least 1"),
        ({"state": "int8"}, "unknown state 'int8'"),
        ({"dtype": "fp7"}, "unknown dtype 'fp7'"),
        ({"device": "h300"}, "unknown device 'h300'"),
        ({"execution": "magic"}, "unknown execution 'magic'"),
        ({"device": "v100"}, "no peak for bf16"),
    ],
)
def test_bad_questions_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        question.ask(SEVENTY, **({"devices": 8} | change))
