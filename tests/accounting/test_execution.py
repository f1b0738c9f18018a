"""The eager tables of `execution` counted again: every operation of a real step passes a dispatch mode."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainstep.accounting import params
from trainstep.accounting.execution import (
    EAGER_KERNELS,
    EAGER_TRAFFIC,
    EXECUTIONS,
    block_work,
    get_execution,
    optimizer_work,
    tensors,
)
from trainstep.model.transformer import TransformerLM
from trainstep.specs.model import MODELS, get_model

VIEWS = {"view", "transpose", "t", "expand", "slice", "select", "unsqueeze", "permute", "alias", "detach"}
VIEWS |= {"_unsafe_view", "as_strided", "squeeze", "split", "unbind", "promote_types"}
PRODUCTS = {"mm", "bmm"}
KINDS = {"fp32": (torch.float32, False), "amp": (torch.float32, True), "half": (torch.bfloat16, False)}


class Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.kernels, self.moved = Counter(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        result = function(*args, **(kwargs or {}))
        if name in VIEWS:
            return result
        self.kernels[name] += 1
        if name not in PRODUCTS:
            touched = [result] if name in ("zeros", "arange", "ones_like") else [args, kwargs, result]
            self.moved += sum(stored(t) for t in tree_leaves(touched) if isinstance(t, torch.Tensor))
        return result


def stored(tensor):
    """Bytes behind a tensor; an expanded dimension repeats nothing."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count * tensor.element_size()


def a_block(kind, shape):
    """Kernels and bytes that one more block adds, forward and backward."""
    dtype, autocast = KINDS[kind]
    counts = []
    for layers in (1, 2):
        config = get_model("toy", n_layers=layers, vocab_size=11, **shape)
        model = TransformerLM(config, dtype=dtype)
        tokens = torch.zeros(config.batch_size, config.context_length, dtype=torch.long)
        with Counted() as forward, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(tokens).float().sum()
        with Counted() as backward:
            loss.backward()
        counts.append((forward, backward))
    (f1, b1), (f2, b2) = counts
    return {
        "forward": ((f2.kernels - f1.kernels).total(), f2.moved - f1.moved),
        "backward": ((b2.kernels - b1.kernels).total(), b2.moved - b1.moved),
    }


SHAPES = [
    {"batch_size": 4, "context_length": 64, "d_model": 64, "d_ff": 320, "n_heads": 4},
    {"batch_size": 2, "context_length": 128, "d_model": 128, "d_ff": 256, "n_heads": 8},
]


@pytest.mark.parametrize("shape", SHAPES, ids=["wide", "long"])
@pytest.mark.parametrize("kind", KINDS)
def test_eager_tables_equal_a_count(textbook, kind, shape):
    counted = a_block(kind, shape)
    config = get_model("toy", **shape)
    tokens = config.batch_size * config.context_length
    scores = config.n_heads * config.context_length * tokens
    for phase in ("forward", "backward"):
        kernels, moved = counted[phase]
        assert kernels == EAGER_KERNELS[kind, phase]
        row = EAGER_TRAFFIC[kind, phase]
        predicted = tokens * (config.d_model * row.stream + config.d_ff * row.hidden) + scores * row.scores
        assert predicted + params.block(config) * row.weights == pytest.approx(moved, rel=0.02)


def test_fused_passes_move_less_and_launch_less():
    config = get_model("xl")
    for dtype in ("fp32", "amp-bf16", "bf16"):
        for phase in ("forward", "backward"):
            plain, fused, flash = (
                block_work(config, EXECUTIONS[name], dtype, sequences=4, phase=phase)
                for name in ("plain", "plain-compiled", "fused")
            )
            assert plain.product_flops == fused.product_flops > flash.product_flops
            assert plain.moved_bytes > fused.moved_bytes > flash.moved_bytes
            assert plain.kernels > fused.kernels


@pytest.mark.parametrize("config", [*MODELS.values(), get_model("toy", qk_norm=True, tie_embeddings=True)])
def test_tensors_are_counted(textbook, config):
    assert tensors(config) == len(list(TransformerLM(config, device="meta").parameters()))


def test_optimizer_bytes():
    config = get_model("small")
    count = params.count(config)
    assert optimizer_work(config, EXECUTIONS["fused"], "fp32").moved_bytes == 28 * count
    assert optimizer_work(config, EXECUTIONS["fused"], "mixed").moved_bytes == 30 * count
    assert optimizer_work(config, EXECUTIONS["fused"], "bf16").moved_bytes == 14 * count
    assert optimizer_work(config, EXECUTIONS["plain"], "fp32").moved_bytes == 132 * count


def test_unknown_execution():
    with pytest.raises(ValueError, match=r"unknown execution 'fast'.*plain-compiled"):
        get_execution("fast")
