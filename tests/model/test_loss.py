"""Cross-entropy against torch's, and at the edges."""

import math

import pytest
import torch
from torch.nn import functional

from trainstep.model.loss import cross_entropy


def loss_and_gradient(function, logits, targets, **options):
    logits = logits.detach().clone().requires_grad_()
    loss = function(logits, targets, **options)
    loss.backward()
    return loss.detach(), logits.grad


@pytest.mark.parametrize("scale", [1.0, 30.0, 1000.0])
def test_against_torch(scale):
    logits, targets = torch.randn(40, 17) * scale, torch.randint(17, (40,))
    targets[::7] = -100
    ours = loss_and_gradient(cross_entropy, logits, targets)
    theirs = loss_and_gradient(functional.cross_entropy, logits, targets)
    torch.testing.assert_close(ours, theirs)


def test_leading_dimensions_and_another_ignore_index():
    logits, targets = torch.randn(3, 5, 11), torch.randint(11, (3, 5))
    targets[0, 2] = targets[2, 4] = 0
    expected = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0)
    torch.testing.assert_close(cross_entropy(logits, targets, ignore_index=0), expected)
    counted = [
        -math.log(logits[i, j].double().softmax(-1)[targets[i, j]])
        for i in range(3)
        for j in range(5)
        if targets[i, j] != 0
    ]
    assert cross_entropy(logits, targets, ignore_index=0).item() == pytest.approx(
        sum(counted) / len(counted), rel=1e-5
    )


def test_large_logits_neither_overflow_nor_vanish():
    logits = torch.tensor([[1e4, 0.0, -1e4], [1e4, 0.0, -1e4], [88.0, 89.0, 90.0]])
    for row, target, expected in ((0, 0, 0.0), (1, 1, 1e4), (2, 2, math.log1p(math.exp(-1) + math.exp(-2)))):
        loss = cross_entropy(logits[row : row + 1], torch.tensor([target]))
        assert loss.item() == pytest.approx(expected, rel=1e-6), (row, target)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_summed_in_float32(dtype):
    # 3000 equal logits: a half-precision sum of the exponentials stops growing long before.
    logits = torch.zeros(2, 3000, dtype=dtype)
    loss, gradient = loss_and_gradient(cross_entropy, logits, torch.tensor([5, 7]))
    assert loss.dtype == torch.float32 and gradient.dtype == dtype
    assert loss.item() == pytest.approx(math.log(3000), rel=1e-6)


def test_every_target_ignored_is_nan_with_zero_gradients_as_in_torch():
    logits, targets = torch.randn(4, 6), torch.full((4,), -100)
    ours = loss_and_gradient(cross_entropy, logits, targets)
    theirs = loss_and_gradient(functional.cross_entropy, logits, targets)
    assert ours[0].isnan() and theirs[0].isnan()
    assert torch.equal(ours[1], torch.zeros(4, 6)) and torch.equal(theirs[1], torch.zeros(4, 6))


def test_ignored_rows_count_nowhere():
    logits, targets = torch.randn(3, 5), torch.tensor([1, -100, 2])
    expected = functional.cross_entropy(logits[::2], targets[::2])
    logits[1, 3] = 1e30
    loss, gradient = loss_and_gradient(cross_entropy, logits, targets)
    torch.testing.assert_close(loss, expected)
    assert torch.equal(gradient[1], torch.zeros(5))


def test_gradient():
    logits = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, -100, 4])
    assert torch.autograd.gradcheck(lambda x: cross_entropy(x, targets), (logits,))


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="need targets of"):
        cross_entropy(torch.zeros(2, 3, 5), torch.zeros(6, dtype=torch.long))
    with pytest.raises((RuntimeError, IndexError)):
        cross_entropy(torch.zeros(1, 5), torch.tensor([5]))
