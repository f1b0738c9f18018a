"""Attention under torch.func: what an implementation cannot do, it says; it never answers wrongly."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap

from tests.attention.problems import make_inputs
from trainstep.attention import get_attention, load_attention
from trainstep.attention.hopper.function import attention as hopper
from trainstep.kernels.weighted_sum.function import weighted_sum


def load(name):
    return load_attention(get_attention(name))


def many(device, count=3):
    """q, k, v with an axis to map over in front."""
    return [
        torch.stack(x)
        for x in zip(
            *(
                make_inputs(queries=9, keys=12, width=16, heads=(2, 2, 1), device=device, seed=seed)[:3]
                for seed in range(count)
            ),
            strict=True,
        )
    ]


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 0, 0), (3, 1, None)], ids=str)
@pytest.mark.parametrize("name", ["reference", "tiled", "triton"])
def test_vmap(name, in_dims, device):
    attention = load(name)
    mapped = [x if dim is not None else x[0] for x, dim in zip(many(device), in_dims, strict=True)]
    moved = [x.movedim(0, dim) if dim else x for x, dim in zip(mapped, in_dims, strict=True)]
    out, lse = vmap(lambda *x: attention(*x, causal=True, return_lse=True), in_dims=in_dims)(*moved)
    for i in range(3):
        one = [x if dim is None else x[i] for x, dim in zip(mapped, in_dims, strict=True)]
        expected, expected_lse = attention(*one, causal=True, return_lse=True)
        torch.testing.assert_close(out[i], expected)
        torch.testing.assert_close(lse[i], expected_lse)


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, None, 0)], ids=str)
def test_gradients_of_tiled_under_vmap(in_dims, device):
    def loss(attention):
        return lambda *x: attention(*x, causal=True, return_lse=True)[1].sum() + attention(*x).square().sum()

    q, k, v = (x if dim == 0 else x[0] for x, dim in zip(many(device), in_dims, strict=True))
    grads = [
        vmap(grad(loss(load(name)), argnums=(0, 1, 2)), in_dims=in_dims)(q, k, v)
        for name in ("tiled", "reference")
    ]
    for one, another in zip(*grads, strict=True):
        torch.testing.assert_close(one, another, rtol=1e-4, atol=1e-5)


def test_second_derivatives_of_tiled_are_refused_under_func(device):
    q, k, v = (x[0] for x in many(device))
    first = grad(lambda q: load("tiled")(q, k, v).square().sum())
    with pytest.raises(NotImplementedError, match="tiled attention has no double backward"):
        grad(lambda q: first(q).sum())(q)


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("name", ["tiled", "triton"])
def test_forward_mode_is_refused(name, needs_grad, which, device):
    # A custom operator without a rule for it would give no tangent, which counts as zero.
    x = [x[0].requires_grad_(needs_grad) for x in many(device)]
    with forward_ad.dual_level():
        x[which] = forward_ad.make_dual(x[which], torch.ones_like(x[which]))
        with pytest.raises(NotImplementedError, match="forward"):
            load(name)(*x)


def test_forward_mode_of_hopper_is_refused():
    # Before it looks for its GPU.
    q = torch.ones(1, 2, 8, 64, dtype=torch.bfloat16)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(NotImplementedError, match="hopper attention has no forward-mode derivative"):
            hopper(q, dual, q)


@pytest.mark.parametrize("name", ["tiled", "triton"])
def test_forward_mode_of_func_is_refused(name, device):
    q, k, v = (x[0] for x in many(device))
    tangent = torch.ones_like(q)
    with pytest.raises(NotImplementedError, match="forward"):
        jvp(lambda q: load(name)(q, k, v), (q,), (tangent,))
    with pytest.raises(NotImplementedError, match="forward"):
        jvp(vmap(lambda q: load(name)(q[None], k[:1], v[:1])), (q,), (tangent,))
    with pytest.raises(NotImplementedError, match="forward"):
        jvp(lambda k: vmap(lambda q: load(name)(q[None], k[:1], v[:1]))(q), (k,), (torch.ones_like(k),))
    with pytest.raises(NotImplementedError, match="forward"):
        vmap(lambda t: jvp(lambda q: load(name)(q, k, v), (q,), (t,))[1])(tangent[None])


@pytest.mark.parametrize("name", ["tiled", "triton"])
def test_without_a_tangent_forward_mode_changes_nothing(name, device):
    q, k, v = (x[0] for x in many(device))
    expected = load(name)(q, k, v)
    with forward_ad.dual_level():
        assert torch.equal(load(name)(q, k, v), expected)


@pytest.mark.parametrize("which", [0, 1])
def test_forward_mode_of_the_weighted_sum_is_refused(which, device):
    x = [torch.ones(3, 4, device=device), torch.ones(4, device=device)]
    with forward_ad.dual_level():
        x[which] = forward_ad.make_dual(x[which], torch.ones_like(x[which]))
        with pytest.raises(NotImplementedError, match="the Triton weighted sum has no forward-mode"):
            weighted_sum(*x)
