"""Attention under torch.func: what an implementation cannot do, it says; it never answers wrongly."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, jacrev, jvp, vmap

from tests.attention.problems import make_inputs
from trainstep.attention import get_attention, load_attention
from trainstep.attention import tiled as tiled_passes
from trainstep.attention.hopper.function import attention as hopper
from trainstep.attention.masks import Mask


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


def loss(attention):
    """Uses the output and the log-sum-exp."""

    def total(*x):
        out, lse = attention(*x, causal=True, return_lse=True)
        return lse.sum() + out.square().sum()

    return total


def assert_close(ours, expected):
    for one, another in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, another, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["tiled", "triton"])
def test_gradients(name, device):
    x = [x[0] for x in many(device)]
    ours, expected = (grad(loss(load(name)), argnums=(0, 1, 2))(*x) for name in (name, "reference"))
    assert_close(ours, expected)


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, None, 0)], ids=str)
@pytest.mark.parametrize("name", ["tiled", "triton"])
def test_gradients_under_vmap(name, in_dims, device):
    q, k, v = (x if dim == 0 else x[0] for x, dim in zip(many(device), in_dims, strict=True))
    grads = [
        vmap(grad(loss(load(name)), argnums=(0, 1, 2)), in_dims=in_dims)(q, k, v)
        for name in (name, "reference")
    ]
    assert_close(*grads)


@pytest.mark.parametrize("name", ["tiled", "triton"])
def test_the_gradient_of_a_vmap(name, device):
    x = many(device)
    ours, expected = (
        grad(lambda *x: vmap(loss(load(name)))(*x).sum(), argnums=(0, 1, 2))(*x)  # noqa: B023
        for name in (name, "reference")
    )
    assert_close(ours, expected)


@pytest.mark.parametrize("name", ["tiled", "triton"])
def test_jacobian_of_reverse_mode(name, device):
    q, k, v = (x[0, :1, :1, :3, :8] for x in many(device))
    ours, expected = (jacrev(lambda q: load(name)(q, k, v))(q) for name in (name, "reference"))  # noqa: B023
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["tiled", "triton"])
def test_second_derivatives_are_refused_under_func(name, device):
    q, k, v = (x[0] for x in many(device))
    first = grad(lambda q: load(name)(q, k, v).square().sum())
    with pytest.raises(NotImplementedError, match=f"{name} attention has no double backward"):
        grad(lambda q: first(q).sum())(q)


def test_hopper_under_func(monkeypatch):
    """Its kernels replaced by the tiled passes: the way to them is the same on a GPU."""
    pytest.importorskip("triton.experimental.gluon")
    from trainstep.attention.hopper import function, launch

    def passes(compute):
        return lambda *x, causal, scale, offset: compute(*x, Mask(causal, None, offset), scale, 64)

    monkeypatch.setattr(function, "refusal", lambda problem: None)
    monkeypatch.setattr(launch, "forward", passes(tiled_passes.forward))
    monkeypatch.setattr(launch, "backward", passes(tiled_passes.backward))
    q, k, v = (torch.randn(2, 1, 2, 9, 64).half() for _ in range(3))
    gradients = [vmap(grad(loss(one), argnums=(0, 1, 2)))(q, k, v) for one in (hopper, load("tiled"))]
    assert all(map(torch.equal, *gradients))
    with pytest.raises(NotImplementedError, match="hopper attention has no forward-mode derivative"):
        jvp(lambda q: hopper(q, k[0], v[0]), (q[0],), (q[0],))


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("name", ["tiled", "triton"])
def test_forward_mode_is_refused(name, needs_grad, which, device):
    # A custom operator without a rule for it would give no tangent, which counts as zero.
    x = [x[0].requires_grad_(needs_grad) for x in many(device)]
    with forward_ad.dual_level():
        x[which] = forward_ad.make_dual(x[which], torch.ones_like(x[which]))
        with pytest.raises(NotImplementedError, match=f"^{name} attention has no forward-mode derivative"):
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
    said = f"^{name} attention has no forward-mode derivative"
    with pytest.raises(NotImplementedError, match=said):
        jvp(lambda q: load(name)(q, k, v), (q,), (tangent,))
    with pytest.raises(NotImplementedError, match=said):
        jvp(vmap(lambda q: load(name)(q[None], k[:1], v[:1])), (q,), (tangent,))
    with pytest.raises(NotImplementedError, match=said):
        jvp(lambda k: vmap(lambda q: load(name)(q[None], k[:1], v[:1]))(q), (k,), (torch.ones_like(k),))
    with pytest.raises(NotImplementedError, match=said):
        vmap(lambda t: jvp(lambda q: load(name)(q, k, v), (q,), (t,))[1])(tangent[None])


@pytest.mark.parametrize("name", ["tiled", "triton"])
def test_without_a_tangent_forward_mode_changes_nothing(name, device):
    q, k, v = (x[0] for x in many(device))
    expected = load(name)(q, k, v)
    with forward_ad.dual_level():
        assert torch.equal(load(name)(q, k, v), expected)
