"""A plain attention for models that are only counted."""

import sys
import types

import pytest
import torch


def attention(q, k, v, *, causal, window):
    """Softmax by hand, its exponentials in float32 as CUDA's autocast takes them."""
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    index = torch.arange(q.shape[2], device=q.device)
    scores = scores.masked_fill(~(index[:, None] >= index[None, :]), float("-inf"))
    weights = (scores - scores.amax(-1, keepdim=True)).float().exp()
    return (weights / weights.sum(-1, keepdim=True)).to(v.dtype) @ v


@pytest.fixture
def textbook(monkeypatch):
    """The model under test attends by the textbook, whatever the reference implementation does."""
    module = types.ModuleType("trainstep.attention.reference")
    module.attention = attention
    monkeypatch.setitem(sys.modules, "trainstep.attention.reference", module)


@pytest.fixture
def textbook_attention():
    """That attention itself."""
    return attention
