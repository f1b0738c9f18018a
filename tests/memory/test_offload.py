"""Tensors kept on the host come back as they went, once each, and parameters stay."""

import pytest
import torch
from torch import nn

from trainstep.memory import offload


@pytest.fixture
def copies(monkeypatch):
    made = []

    class Counted(offload.HostCopy):
        def __init__(self, tensor):
            super().__init__(tensor)
            made.append(tensor.shape)

    monkeypatch.setattr(offload, "HostCopy", Counted)
    return made


def test_one_copy_for_a_tensor_saved_three_times(copies):
    x = torch.randn(8, 8, requires_grad=True)
    h = x.exp()  # saves its result
    copies.clear()
    layers = [nn.Linear(8, 8, bias=False) for _ in range(3)]
    with offload.offload_to_host([layer.weight for layer in layers], small_bytes=0):
        y = sum(layer(h) for layer in layers)
    assert copies == [h.shape]
    y.sum().backward()
    expected = (sum(layer.weight for layer in layers).sum(0) * x.exp()).expand(8, 8)
    torch.testing.assert_close(x.grad, expected)


def test_what_stays(copies):
    layer = nn.Linear(4, 4)
    with offload.offload_to_host(small_bytes=17):
        (torch.randn(1, 4, requires_grad=True) * layer.weight).sum()  # 16 bytes, and a parameter
        torch.randn(5, 1, requires_grad=True).expand(5, 5) * torch.ones(5, 5, requires_grad=True)
    # The ones only: the expanded factor's 100 bytes belong to 20.
    assert copies == [torch.Size([5, 5])]


def test_values_written_in_place_between_two_saves():
    with offload.offload_to_host(small_bytes=0):
        w = torch.ones(4, requires_grad=True)
        x = torch.full((4,), 2.0)
        first = (w * x).sum()
        x.fill_(3.0)
        second = (w * x).sum()
    (first + second).backward()
    assert w.grad.tolist() == [5.0] * 4


def test_strides_come_back():
    seen = []

    class Looking(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x.t(), x[:, 1:3])
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            seen.extend((tensor.stride(), tensor.tolist()) for tensor in ctx.saved_tensors)
            return gradient

    x = torch.arange(12.0).reshape(3, 4).requires_grad_()
    with offload.offload_to_host(small_bytes=0):
        y = Looking.apply(x)
    y.sum().backward()
    assert seen == [((1, 4), x.t().tolist()), ((4, 1), x[:, 1:3].tolist())]


def test_switched_off_after_an_exception(copies):
    with pytest.raises(RuntimeError, match="stop"), offload.offload_to_host(small_bytes=0):
        raise RuntimeError("stop")
    torch.randn(4, requires_grad=True).exp()
    assert copies == []
