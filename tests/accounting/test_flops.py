import math

import pytest

from trainstep.accounting.flops import attention_flops, mfu, mfu_flag, model_flops, visible_pairs
from trainstep.specs.model import ModelConfig, get_model

FIELD = {"batch": 2, "heads": 4, "queries": 1024, "keys": 1024, "head_dim": 64}


def brute_pairs(queries, keys, window):
    offset = keys - queries
    return sum(
        1
        for i in range(queries)
        for j in range(keys)
        if j <= i + offset and (window is None or j > i + offset - window)
    )


@pytest.mark.parametrize("window", [None, 1, 2, 5, 100])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (7, 7), (3, 9), (9, 3), (1, 12), (12, 1)])
def test_visible_pairs_equal_a_count_over_the_mask(queries, keys, window):
    counted = visible_pairs(queries=queries, keys=keys, causal=True, window=window)
    assert counted == brute_pairs(queries, keys, window)


def test_the_four_figures_of_the_field_case():
    assert attention_flops(**FIELD, causal=False, phase="forward") == 2_147_483_648
    assert attention_flops(**FIELD, causal=True, phase="forward") == 1_073_741_824
    assert attention_flops(**FIELD, causal=False, phase="backward") == 5_368_709_120
    assert attention_flops(**FIELD, causal=False, phase="forward_backward") == 7_516_192_768
    assert attention_flops(**FIELD, causal=False, phase="forward") / 1e-3 / 1e12 == pytest.approx(
        2.147, abs=5e-4
    )


def test_unequal_lengths_count_the_product_or_the_visible_pairs():
    shape = {"batch": 1, "heads": 1, "queries": 2, "keys": 4, "head_dim": 8}
    assert attention_flops(**shape, causal=False, phase="forward") == 4 * 8 * 8
    assert attention_flops(**shape, causal=True, phase="forward") == 4 * 8 * (3 + 4)


def test_a_window_counts_what_it_shows_and_one_that_hides_nothing_is_half():
    shape = {
        "batch": 1,
        "heads": 1,
        "queries": 6,
        "keys": 6,
        "head_dim": 8,
        "causal": True,
        "phase": "forward",
    }
    assert attention_flops(**shape, window=2) == 4 * 8 * 11
    assert attention_flops(**shape, window=6) == attention_flops(**shape) == 4 * 8 * 18


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"phase": "sideways"}, "unknown phase 'sideways'"),
        ({"window": 4, "causal": False}, "needs causal"),
        ({"window": 0}, "window must be at least 1"),
        ({"queries": 0}, "must be at least 1"),
    ],
)
def test_bad_questions_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        attention_flops(**(FIELD | {"causal": True, "phase": "forward"} | change))


def test_the_long_context_step_counts_2372_tflop():
    flops = model_flops(get_model("8b-32k"), phase="train_step", causal_half=True)
    assert round(flops.total / 1e12) == 2372


def test_one_layer_by_hand():
    config = ModelConfig(name="x", d_model=8, d_ff=16, n_layers=1, n_heads=2, vocab_size=11)
    config = config.with_overrides(batch_size=1, context_length=6)
    parts = model_flops(config, phase="forward", causal_half=False).by_component
    assert parts == {
        "embedding": 0.0,
        "projections": 2 * 6 * 4 * 8 * 8,
        "scores": 4 * 6 * 6 * 8,
        "ffn": 2 * 6 * 3 * 8 * 16,
        "lm_head": 2 * 6 * 8 * 11,
    }
    half = model_flops(config, phase="forward", causal_half=True).by_component
    assert half["scores"] == parts["scores"] / 2
    backward = model_flops(config, phase="backward", causal_half=False).total
    assert backward == 2 * math.fsum(parts.values())


def test_recomputation_and_tying_change_no_flops():
    config = get_model("toy")
    asked = [
        model_flops(c, phase="train_step", causal_half=True)
        for c in (
            config,
            config.with_overrides(checkpoint="every-block"),
            config.with_overrides(tie_embeddings=True),
        )
    ]
    assert asked[0] == asked[1] == asked[2]


def test_only_local_layers_shrink():
    config = get_model("toy", n_layers=4, window=8)
    every = model_flops(config, phase="forward", causal_half=True).by_component["scores"]
    mixed = model_flops(
        config.with_overrides(global_every=2), phase="forward", causal_half=True
    ).by_component["scores"]
    full = model_flops(config.with_overrides(window=512), phase="forward", causal_half=True).by_component[
        "scores"
    ]
    assert mixed == pytest.approx((every + full) / 2)


def test_mfu_is_absent_without_a_peak_and_flagged_above_one():
    assert mfu(1e12, 1.0, None) is None
    assert mfu_flag(None) is None
    assert mfu(5e11, 1.0, 1e12) == 0.5
    assert mfu_flag(0.5) is None
    above = mfu(2e12, 1.0, 1e12)
    assert above == 2.0
    assert "200%" in mfu_flag(above)
    with pytest.raises(ValueError, match="positive"):
        mfu(1.0, 0.0, 1e12)
