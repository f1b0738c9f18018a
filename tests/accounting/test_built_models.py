"""Counts against built models: parameters on the meta device, FLOPs against torch's own counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from trainstep.accounting import params
from trainstep.accounting.execution import EXECUTIONS, block_work
from trainstep.accounting.flops import layer_window, model_flops
from trainstep.model.transformer import TransformerLM
from trainstep.model.transformer import layer_window as model_window
from trainstep.specs.model import MODELS, get_model

VARIANTS = [
    *MODELS.values(),
    get_model("small", n_kv_heads=4),
    get_model("small", n_kv_heads=1, qk_norm=True),
    get_model("small", tie_embeddings=True),
]
IDS = [*MODELS, "grouped", "multi-query-qk-norm", "tied"]


@pytest.mark.parametrize("config", VARIANTS, ids=IDS)
def test_parameters_equal_the_built_model(textbook, config):
    model = TransformerLM(config, device="meta")
    assert params.count(config) == sum(p.numel() for p in model.parameters())
    assert params.block(config) == sum(p.numel() for p in model.blocks[0].parameters())
    parts = params.by_component(config)
    assert parts["embedding"] == model.embedding.weight.numel()
    if not config.tie_embeddings:
        assert parts["lm_head"] == model.head.weight.numel()


@pytest.mark.parametrize("name", ["toy", "small", "medium", "8b-32k"])
def test_flops_equal_the_counter(textbook, name):
    config = get_model(name)
    if name == "8b-32k":
        config = config.with_overrides(n_layers=2)
    model = TransformerLM(config, device="meta")
    tokens = torch.zeros(config.batch_size, config.context_length, dtype=torch.long, device="meta")
    with torch.device("meta"), FlopCounterMode(display=False) as forward:
        logits = model(tokens)
    with torch.device("meta"), FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    counted = {"forward": forward.get_total_flops(), "backward": backward.get_total_flops()}
    for phase, flops in counted.items():
        assert model_flops(config, phase=phase, causal_half=False).total == flops


def test_windows_lie_on_the_layers_that_the_model_gives_them():
    config = get_model("toy", n_layers=7, window=8, global_every=3)
    assert [layer_window(config, i) for i in range(7)] == [model_window(config, i) for i in range(7)]


def test_checkpointing_repeats_products_and_raises_no_mfu(textbook):
    """The counter sees the recomputation; the figure that MFU is made of does not."""
    config = get_model("toy", checkpoint="every-block")
    model = TransformerLM(config)
    tokens = torch.zeros(1, 16, dtype=torch.long)
    config = config.with_overrides(batch_size=1, context_length=16)
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    asked = model_flops(config, phase="train_step", causal_half=False)
    blocks = model_flops(config, phase="forward", causal_half=False)
    down = blocks.by_component["ffn"] / 3  # the last product of a block, which backward never asks for
    again = blocks.total - blocks.by_component["lm_head"] - down
    assert counter.get_total_flops() == asked.total + again
    recomputed = block_work(config, EXECUTIONS["plain"], "fp32", sequences=1, phase="recompute")
    assert config.n_layers * recomputed.product_flops == again
