"""Predicted activation bytes against what the residual recorder sees autograd keep."""

import pytest
import torch

from trainstep.accounting.memory import activation_bytes, block_activation_bytes, residual_stream_bytes
from trainstep.memory.residuals import record_residuals
from trainstep.model.rope import RotaryEmbedding
from trainstep.model.transformer import TransformerBlock, TransformerLM
from trainstep.specs.model import get_model

# The compiler's partitioner decides what a compiled block saves; its code generator is not needed.
PARTITION = "aot_eager_decomp_partition"


def flash(q, k, v, *, causal, window):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def saved_by_block(config, attend, device, dtype):
    rope = RotaryEmbedding(config.head_dim, config.context_length, device=device)
    block = TransformerBlock(config, rope=rope, attend=attend, window=None, device=device, dtype=dtype)
    torch.compiler.reset()
    compiled = torch.compile(block, backend=PARTITION, dynamic=False, fullgraph=True)
    shape = (config.batch_size, config.context_length, config.d_model)
    with record_residuals(block) as recorder:
        compiled(torch.zeros(shape, device=device, dtype=dtype, requires_grad=True))
    return recorder.residuals().activation_bytes


@pytest.mark.parametrize(
    "config",
    [
        get_model("xl", n_heads=16, context_length=2048),
        get_model("toy", batch_size=3, context_length=96, d_ff=200),
    ],
    ids=["xl-2048", "odd"],
)
def test_a_materialised_block(textbook_attention, config):
    predicted = block_activation_bytes(config, attention="materialised", element_bytes=4)
    saved = saved_by_block(config, textbook_attention, "meta", torch.float32)
    assert saved == sum(predicted.values())


def test_a_flash_block():
    config = get_model("toy", batch_size=2, context_length=128, d_model=128, n_heads=2)
    predicted = block_activation_bytes(config, attention="flash", element_bytes=4)
    assert saved_by_block(config, flash, "cpu", torch.float32) == sum(predicted.values())


def test_checkpointed_blocks_keep_their_boundaries(textbook):
    config = get_model("toy", n_layers=6, checkpoint="every-block")
    model = TransformerLM(config, device="meta")
    tokens = torch.zeros(config.batch_size, config.context_length, dtype=torch.long, device="meta")
    with record_residuals(model) as recorder:
        model.hidden_states(tokens)
    predicted = activation_bytes(config, attention="materialised", element_bytes=4, checkpoint_every=1)
    kept = sum(save.bytes for save in recorder.residuals().boundaries)
    assert kept == predicted["boundaries"] == 6 * residual_stream_bytes(config, 4)
