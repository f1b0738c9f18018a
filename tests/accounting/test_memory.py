import pytest

from trainstep.accounting import params
from trainstep.accounting.kv_cache import (
    cache_overtakes_weights,
    inference_bytes,
    kv_cache_bytes,
    scores_overtake_weights,
)
from trainstep.accounting.memory import (
    activation_bytes,
    block_activation_bytes,
    residual_stream_bytes,
    scores_bytes,
    training_bytes_per_parameter,
    training_state_bytes,
)
from trainstep.specs.model import ModelConfig, get_model

MIB, GIB = 2**20, 2**30


def test_training_bytes_a_parameter():
    assert training_bytes_per_parameter("fp32") == 16
    assert training_bytes_per_parameter("mixed") == 18
    assert training_bytes_per_parameter("bf16") == 8
    with pytest.raises(ValueError, match="unknown precision 'int3'"):
        training_bytes_per_parameter("int3")


def test_zero_stages_divide_one_part_more_each():
    config = get_model("small")
    count = params.count(config)
    totals = [
        sum(training_state_bytes(config, "fp32", zero_stage=stage, ranks=4).values()) / count
        for stage in range(4)
    ]
    assert totals == [16, 10, 7, 4]


def test_the_residual_stream_of_xl_is_20_mib():
    assert residual_stream_bytes(get_model("xl"), 4) == 20 * MIB


def test_scores_of_8192_squared_and_32_heads_are_4_gib():
    config = get_model("xl", context_length=8192, batch_size=1)
    assert scores_bytes(config, 2) == 4 * GIB


def test_the_measured_block():
    """A compiled plain block: xl's width, 16 heads, batch 4, context 2048, float32, keeps 3651.3 MiB."""
    config = get_model("xl", n_heads=16, context_length=2048)
    saved = block_activation_bytes(config, attention="materialised", element_bytes=4)
    assert sum(saved.values()) / MIB == pytest.approx(3651.3, rel=1e-3)


def test_checkpoints_keep_boundaries_and_one_group():
    config = get_model("toy", n_layers=5)
    everything = activation_bytes(config, attention="flash", element_bytes=4)
    block = sum(block_activation_bytes(config, attention="flash", element_bytes=4).values())
    assert sum(everything.values()) == 5 * block + everything["head"]
    pairs = activation_bytes(config, attention="flash", element_bytes=4, checkpoint_every=2)
    assert pairs["boundaries"] == 3 * residual_stream_bytes(config, 4)
    assert pairs["recomputed"] == 2 * block
    with pytest.raises(ValueError, match="checkpoint_every"):
        activation_bytes(config, attention="flash", element_bytes=4, checkpoint_every=0)


def test_flash_saves_no_square():
    short, long = (get_model("xl", context_length=s) for s in (1024, 2048))
    grow = [
        sum(block_activation_bytes(c, attention="flash", element_bytes=2).values()) for c in (short, long)
    ]
    assert grow[1] == 2 * grow[0]
    with pytest.raises(ValueError, match="unknown attention 'sparse'"):
        block_activation_bytes(short, attention="sparse", element_bytes=2)


SHAPES = [
    ModelConfig(name="x", d_model=32, d_ff=64, n_layers=4, n_heads=4, vocab_size=50),
    ModelConfig(name="x", d_model=32, d_ff=64, n_layers=4, n_heads=4, n_kv_heads=1, vocab_size=50),
    ModelConfig(
        name="x", d_model=32, d_ff=64, n_layers=4, n_heads=4, vocab_size=50, window=16, global_every=2
    ),
    ModelConfig(
        name="x", d_model=32, d_ff=64, n_layers=4, n_heads=4, vocab_size=50, window=100, global_every=4
    ),
    ModelConfig(name="x", d_model=32, d_ff=64, n_layers=4, n_heads=4, vocab_size=50, window=16),
]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("config", SHAPES)
def test_cache_crossover_equals_a_scan(config, batch):
    weights = params.count(config) * 2
    scan = next(
        (
            s
            for s in range(1, 5000)
            if kv_cache_bytes(config, batch=batch, context=s, element_bytes=2) > weights
        ),
        None,
    )
    assert cache_overtakes_weights(config, batch=batch) == scan


@pytest.mark.parametrize("config", SHAPES[:2])
def test_scores_crossover_equals_a_scan(config):
    weights = params.count(config)
    scan = next(s for s in range(1, 5000) if 2 * config.n_heads * s * s > weights)
    assert scores_overtake_weights(config, batch=2) == scan


def test_inference_by_hand():
    config = get_model("8b-32k")
    decode = inference_bytes(config, phase="decode", batch=1, context=32768, element_bytes=2)
    assert decode["kv_cache"] == 2 * 32768 * 4096 * 34 * 2
    assert decode["weights"] == 2 * params.count(config)
    prefill = inference_bytes(config, phase="prefill", batch=1, context=32768, element_bytes=2)
    assert prefill["activations"] == 32768 * 2 * (4096 + 11008) * 2
    plain = inference_bytes(
        config, phase="prefill", batch=1, context=32768, element_bytes=2, attention="materialised"
    )
    assert plain["activations"] - 2 * 2 * 32 * 32768**2 == 32768 * 5 * 4096 * 2
    with pytest.raises(ValueError, match="unknown phase"):
        inference_bytes(config, phase="train", batch=1, context=1, element_bytes=2)
