"""Linear, packed linear, embedding, RMSNorm, SwiGLU and the initial distribution, against torch's own
parts."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from trainstep.model.embedding import Embedding
from trainstep.model.init import truncated_normal_
from trainstep.model.linear import Linear, PackedLinear
from trainstep.model.norm import RMSNorm
from trainstep.model.swiglu import SwiGLU

# A normal distribution cut at 3 standard deviations has this one: sqrt(1 - 6 phi(3) / (2 Phi(3) - 1)).
CUT_STD = math.sqrt(1 - 6 * math.exp(-4.5) / math.sqrt(2 * math.pi) / math.erf(3 / math.sqrt(2)))


def assert_truncated_normal(weight, std):
    """Mean, spread and cut of many draws; bounds are five standard errors."""
    n = weight.numel()
    values = weight.detach().double().flatten()
    rounding = torch.finfo(weight.dtype).eps * 3 * std
    assert values.abs().max() <= 3 * std + rounding
    assert values.abs().max() > 2.8 * std
    assert abs(values.mean()) < 5 * std / math.sqrt(n)
    assert abs(values.std() / (CUT_STD * std) - 1) < 5 / math.sqrt(2 * n) + torch.finfo(weight.dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_truncated_normal(dtype):
    torch.manual_seed(1)
    assert_truncated_normal(truncated_normal_(torch.empty(300, 400, dtype=dtype), 0.25), 0.25)


def test_same_seed_same_weights_in_every_dtype():
    torch.manual_seed(3)
    exact = truncated_normal_(torch.empty(7, 5), 0.1)
    torch.manual_seed(3)
    rounded = truncated_normal_(torch.empty(7, 5, dtype=torch.bfloat16), 0.1)
    assert torch.equal(exact.bfloat16(), rounded)


def test_initial_distributions():
    torch.manual_seed(2)
    assert_truncated_normal(Linear(300, 500).weight, math.sqrt(2 / 800))
    assert_truncated_normal(Embedding(500, 200).weight, 1.0)
    packed = PackedLinear(300, (500, 100)).weight
    assert_truncated_normal(packed[:500], math.sqrt(2 / 800))
    assert_truncated_normal(packed[500:], math.sqrt(2 / 400))
    assert torch.equal(RMSNorm(9).weight, torch.ones(9))


@pytest.mark.parametrize(
    "make", [lambda: Linear(3, 4), lambda: Embedding(5, 4), lambda: PackedLinear(3, (2, 4))]
)
def test_reset_draws_what_the_constructor_drew(make):
    torch.manual_seed(5)
    layer = make()
    first = layer.weight.detach().clone()
    layer.reset_parameters()
    assert not torch.equal(layer.weight, first)
    torch.manual_seed(5)
    layer.reset_parameters()
    assert torch.equal(layer.weight, first)


def test_linear():
    layer = Linear(6, 4, dtype=torch.float64)
    assert layer.weight.shape == (4, 6) and [name for name, _ in layer.named_parameters()] == ["weight"]
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    assert torch.allclose(layer(x), torch.einsum("oi,bsi->bso", layer.weight, x), rtol=1e-12)


def test_packed_linear_is_its_parts():
    torch.manual_seed(4)
    packed = PackedLinear(6, (4, 2, 3))
    torch.manual_seed(4)
    parts = [Linear(6, d_out) for d_out in (4, 2, 3)]
    assert torch.equal(packed.weight, torch.cat([part.weight for part in parts]))
    x = torch.randn(5, 6)
    for ours, part in zip(packed(x), parts, strict=True):
        torch.testing.assert_close(ours, part(x))


def test_embedding_looks_up_and_sums_gradients_of_repeated_tokens():
    layer = Embedding(5, 3)
    tokens = torch.tensor([[1, 4], [1, 0]])
    out = layer(tokens)
    for row in range(2):
        for column in range(2):
            assert torch.equal(out[row, column], layer.weight[tokens[row, column]])
    out.sum().backward()
    assert torch.equal(layer.weight.grad, torch.tensor([1.0, 2.0, 0.0, 0.0, 1.0])[:, None].expand(5, 3))


def test_rms_norm_against_torch():
    ours, theirs = RMSNorm(24, eps=1e-3), nn.RMSNorm(24, eps=1e-3)
    with torch.no_grad():
        theirs.weight.copy_(ours.weight.uniform_(-2, 2))
    x = torch.randn(3, 5, 24)
    torch.testing.assert_close(ours(x), theirs(x))


def test_rms_norm_gradient():
    layer = RMSNorm(7, dtype=torch.float64)
    x = torch.randn(2, 7, dtype=torch.float64, requires_grad=True)
    assert layer(x).dtype == torch.float64
    assert torch.autograd.gradcheck(lambda x, _: layer(x), (x, layer.weight))


def test_rms_norm_computes_in_float32_and_keeps_the_dtype():
    # Squares of 300 overflow float16; squares of 1e-4 vanish in it.
    for value, expected in ((300.0, 1.0), (1e-4, 1e-4 / math.sqrt(1e-8 + 1e-5))):
        x = torch.full((1, 16), value, dtype=torch.float16)
        y = RMSNorm(16)(x)
        assert y.dtype == torch.float16
        assert abs(y[0, 0].item() / expected - 1) < 1e-3
    with torch.autocast("cpu", torch.bfloat16):
        assert RMSNorm(16)(torch.ones(2, 16)).dtype == torch.float32
        assert RMSNorm(16)(torch.ones(2, 16, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_rms_norm_saves_six_tensors_three_storages_besides_the_weight():
    layer = RMSNorm(2560)
    x = torch.randn(4, 8, 2560, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(x)
    assert len(saved) == 6
    weight = layer.weight.untyped_storage().data_ptr()
    assert len({t.untyped_storage().data_ptr() for t in saved} - {weight}) == 2 + 1


@pytest.mark.parametrize("fused", [False, True])
def test_swiglu(fused):
    layer = SwiGLU(6, 10, fused_projections=fused, dtype=torch.float64)
    if fused:
        gate, up = layer.gate_up.weight[:10], layer.gate_up.weight[10:]
    else:
        gate, up = layer.gate.weight, layer.up.weight
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    # torch's glu is a * sigmoid(b): with a = z_gate * z_up and b = z_gate it is the SwiGLU product.
    hidden = functional.glu(torch.cat(((x @ gate.T) * (x @ up.T), x @ gate.T), dim=-1))
    torch.testing.assert_close(layer(x), hidden @ layer.down.weight.T, rtol=1e-12, atol=1e-12)
