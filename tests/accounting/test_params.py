import pytest

from trainstep.accounting import params
from trainstep.specs.model import MODELS, ModelConfig, get_model

PUBLISHED = {
    "small": 128_625_408,
    "medium": 423_183_360,
    "large": 969_411_840,
    "xl": 3_406_809_600,
    "10b": 12_832_823_808,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_equal_the_published_ones(name):
    assert params.count(get_model(name)) == PUBLISHED[name]


@pytest.mark.parametrize("config", MODELS.values(), ids=lambda c: c.name)
def test_one_more_layer_adds_one_block(config):
    deeper = config.with_overrides(n_layers=config.n_layers + 1)
    assert params.count(deeper) - params.count(config) == params.block(config)


def test_grouped_queries_shrink_keys_and_values_only():
    full = ModelConfig(name="x", d_model=64, d_ff=128, n_layers=3, n_heads=8)
    grouped = full.with_overrides(n_kv_heads=2)
    assert params.count(full) - params.count(grouped) == 3 * 2 * 64 * (64 - 16)


def test_a_tied_head_counts_once():
    full = get_model("toy")
    assert params.count(full) - params.count(full.with_overrides(tie_embeddings=True)) == 10_000 * 64
