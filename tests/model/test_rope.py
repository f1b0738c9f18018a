"""Rotary positions: against complex multiplication, and the property they exist for."""

import math

import pytest
import torch
from torch import nn

from trainstep.model.rope import RotaryEmbedding


def rotate_as_complex(x, positions, theta):
    """The pairs (2i, 2i + 1) as complex numbers times exp(j m theta^(-2i / H)), in float64."""
    width = x.shape[-1]
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    frequencies = torch.tensor([theta ** (-2 * i / width) for i in range(width // 2)], dtype=torch.float64)
    turns = torch.polar(torch.ones(()).double(), positions.double()[..., None] * frequencies)
    return torch.view_as_real(pairs * turns).flatten(-2)


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("width", [2, 16, 24])
def test_against_complex_numbers(width, theta):
    x = torch.randn(2, 3, 40, width)
    ours = RotaryEmbedding(width, 64, theta)(x)
    expected = rotate_as_complex(x, torch.arange(40), theta)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-6, atol=1e-6)


def test_a_pair_by_hand():
    # Width 4, theta 100: pair 1 turns by m / 10. At position 2 the unit vectors turn by 2 and 0.2.
    x = torch.tensor([1.0, 0.0, 0.0, 1.0]).expand(1, 1, 3, 4)
    y = RotaryEmbedding(4, 3, theta=100.0)(x)[0, 0, 2]
    expected = torch.tensor([math.cos(2), math.sin(2), -math.sin(0.2), math.cos(0.2)])
    torch.testing.assert_close(y, expected)


def test_late_positions_keep_float32_precision():
    # Float32 angles would be off by 2e-3 here.
    x = torch.randn(1, 1, 32_768, 8)
    ours = RotaryEmbedding(8, 32_768)(x)[:, :, -1:]
    expected = rotate_as_complex(x[:, :, -1:], torch.tensor([32_767]), 10_000.0)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-6, atol=1e-6)


def test_scores_depend_on_the_distance_only():
    rope = RotaryEmbedding(32, 300)
    q, k = torch.randn(2, 1, 1, 1, 32).double()
    scores = [
        (rope(q, torch.tensor([m])) * rope(k, torch.tensor([n]))).sum().item()
        for m, n in ((7, 3), (104, 100), (299, 295))
    ]
    assert max(scores) - min(scores) < 1e-5
    assert abs(scores[0] - (rope(q, torch.tensor([7])) * rope(k, torch.tensor([4]))).sum().item()) > 1e-3


def test_explicit_positions():
    rope = RotaryEmbedding(8, 50)
    x = torch.randn(2, 3, 5, 8)
    torch.testing.assert_close(rope(x, torch.arange(5)), rope(x), rtol=0, atol=0)
    shared = torch.tensor([4, 0, 49, 7, 7])
    torch.testing.assert_close(
        rope(x, shared).double(), rotate_as_complex(x, shared, 1e4), rtol=1e-5, atol=1e-6
    )
    own = torch.stack((shared, shared.flip(0)))
    expected = torch.stack([rotate_as_complex(x[b], own[b], 1e4) for b in range(2)])
    torch.testing.assert_close(rope(x, own).double(), expected, rtol=1e-5, atol=1e-6)


def test_positions_are_checked():
    rope = RotaryEmbedding(8, 5)
    with pytest.raises(ValueError, match="6 tokens is longer than the context length 5"):
        rope(torch.zeros(1, 1, 6, 8))
    with pytest.raises(ValueError, match="positions must have shape"):
        rope(torch.zeros(2, 1, 3, 8), torch.arange(4))
    with pytest.raises(IndexError):
        rope(torch.zeros(1, 1, 1, 8), torch.tensor([5]))
    with pytest.raises(ValueError, match="odd"):
        RotaryEmbedding(7, 5)


def test_no_parameters_and_nothing_in_the_state_dict():
    rope = RotaryEmbedding(8, 5)
    assert not list(rope.parameters()) and not rope.state_dict()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype):
    x = torch.randn(1, 2, 100, 16).to(dtype)
    y = RotaryEmbedding(16, 100)(x)
    assert y.dtype == dtype
    exact = rotate_as_complex(x, torch.arange(100), 1e4)
    assert ((y.double() - exact).abs() <= torch.finfo(dtype).eps / 2 * exact.abs() * 1.01 + 1e-6).all()


def test_tables_survive_casts_and_the_meta_device():
    fresh = RotaryEmbedding(8, 5)
    cast = nn.Sequential(RotaryEmbedding(8, 5)).to(torch.bfloat16)[0]
    built = nn.Sequential(RotaryEmbedding(8, 5, device="meta")).to_empty(device="cpu")[0]
    with torch.device("meta"):
        lazy = RotaryEmbedding(8, 5)
    assert lazy.cos.is_meta
    for rope in (cast, built, lazy.to_empty(device="cpu")):
        assert rope.cos.dtype == torch.float32
        assert torch.equal(rope.cos, fresh.cos) and torch.equal(rope.sin, fresh.sin)


def test_gradient():
    rope = RotaryEmbedding(6, 4)
    x = torch.randn(1, 2, 4, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(rope, (x,))
