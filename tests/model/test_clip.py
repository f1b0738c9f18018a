"""Clipping by the global norm, against torch's and by hand."""

import pytest
import torch
from torch import nn

from trainstep.model.clip import clip_grad_norm


def parameters_with(*gradients):
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    return parameters


def test_by_hand():
    first, second = parameters = parameters_with(torch.tensor([3.0, 0.0]), torch.tensor([[4.0]]))
    norm = clip_grad_norm(parameters, 1.0)
    assert norm.item() == 5.0
    torch.testing.assert_close(first.grad, torch.tensor([0.6, 0.0]))
    torch.testing.assert_close(second.grad, torch.tensor([[0.8]]))


@pytest.mark.parametrize("max_norm", [0.0, 0.5, 7.0, 1e4, float("inf")])
def test_against_torch(max_norm):
    gradients = [torch.randn(shape) for shape in ((5, 6), (3,), (), (2, 2, 2))]
    ours, theirs = parameters_with(*gradients), parameters_with(*gradients)
    norm = clip_grad_norm(ours, max_norm)
    expected = nn.utils.clip_grad_norm_(theirs, max_norm)
    torch.testing.assert_close(norm, expected)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_small_gradients_keep_every_bit():
    gradients = [torch.randn(40) * 1e-3, torch.zeros(3)]
    parameters = parameters_with(*gradients)
    clip_grad_norm(parameters, 1.0)
    assert all(torch.equal(p.grad, g) for p, g in zip(parameters, gradients, strict=True))


def test_parameters_without_gradients_and_generators():
    with_gradient, without = parameters_with(torch.tensor([2.0]))[0], nn.Parameter(torch.ones(2))
    assert clip_grad_norm((p for p in (without, with_gradient)), 1.0).item() == 2.0
    assert without.grad is None and with_gradient.grad.item() == pytest.approx(1.0, rel=1e-5)
    assert clip_grad_norm([without], 1.0).item() == 0.0
    assert clip_grad_norm([], 1.0).item() == 0.0


def test_half_precision_norm_is_summed_in_float32():
    # The squares and the norm itself, 300,000, overflow float16.
    parameters = parameters_with(
        torch.full((100,), 30_000.0, dtype=torch.float16), torch.ones(1, dtype=torch.bfloat16)
    )
    norm = clip_grad_norm(parameters, 1.0)
    assert norm.dtype == torch.float32 and norm.item() == pytest.approx(300_000.0, rel=1e-6)
    assert [p.grad.dtype for p in parameters] == [torch.float16, torch.bfloat16]
    assert parameters[0].grad[0].item() == pytest.approx(0.1, rel=1e-3)


def test_a_gradient_that_is_not_finite_shows_in_the_norm():
    assert not clip_grad_norm(parameters_with(torch.tensor([float("inf"), 1.0])), 1.0).isfinite()
    assert clip_grad_norm(parameters_with(torch.tensor([float("nan")])), 1.0).isnan()


@pytest.mark.parametrize("max_norm", [-1.0, float("nan")])
def test_range_is_checked(max_norm):
    with pytest.raises(ValueError, match="max_norm must be at least 0"):
        clip_grad_norm([], max_norm)
