"""Tensors kept on the host come back as they went, once each, and parameters stay."""

import pytest
import torch
from torch import nn

from trainstep.memory import offload


def test_pieces_waste_little():
    mib, kib = 2**20, 2**10
    assert offload.pieces(320 * mib) == [256 * mib, 64 * mib]
    assert offload.pieces(2 * mib + 700 * kib) == [2 * mib, 700 * kib]
    needed = (0, 1, 3, 80 * mib, 2048 * mib, mib + 512 * kib, mib + 600 * kib)
    taken = [0, 1, 4, 80 * mib, 2048 * mib, mib + 512 * kib, 2 * mib]
    assert [offload.pinned_bytes(size) for size in needed] == taken


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_a_copy_in_pieces_is_the_memory(monkeypatch, dtype):
    monkeypatch.setattr(offload, "SMALLEST_PIECE_BYTES", 16)
    for count in (1, 7, 1001):
        flat = torch.arange(count).remainder(5).to(dtype)
        copy = offload.HostCopy(flat)
        assert [values.nbytes for values in copy.values] == offload.pieces(flat.nbytes)
        assert torch.equal(copy.bring_back(), flat)


def test_views_of_the_same_memory_are_one_copy(copies):
    x = torch.randn(3, 8, 8, requires_grad=True)

    def loss():
        y = x.softmax(-1)  # saves its result, [3, 8, 8]
        return (y.view(24, 8) @ torch.ones(8, 2)).square().sum() + (y.transpose(1, 2) * y).sum()

    (plain,) = torch.autograd.grad(loss(), x)
    with offload.offload_to_host(small_bytes=200):
        value = loss()
    assert copies == [(192,)]
    (again,) = torch.autograd.grad(value, x)
    assert torch.equal(again, plain)


def test_two_parts_of_one_storage_are_two_copies(copies):
    x = torch.randn(8, 4, requires_grad=True)
    with offload.offload_to_host(small_bytes=0):
        first, second = (x * 1).chunk(2)
        value = (first * second).sum()
    assert copies == [(16,), (16,)]
    (gradient,) = torch.autograd.grad(value, x)
    assert torch.equal(gradient, torch.cat([x[4:], x[:4]]))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_host_bytes_are_counted_without_a_copy(copies, device):
    layer = nn.Linear(24, 10, bias=False, device=device)
    x = torch.ones(7, 24, device=device, requires_grad=True)
    with offload.count_host_bytes(layer.parameters(), small_bytes=0) as host:
        h = x.exp()  # 7 * 24 * 4 = 672 bytes saved here, and again by the product
        y = layer(h).tanh() + h[:, 2:12]  # 280 bytes
    assert host.bytes == 1024 + 512
    assert copies == []
    y.sum().backward()
    assert x.grad.shape == x.shape


def test_a_strided_view_takes_its_span():
    with offload.count_host_bytes(small_bytes=0) as host:
        torch.ones(8, 16, requires_grad=True)[:, 1:3].square()  # 7 * 16 + 2 floats, of which 16 count
    assert host.bytes == 512


@pytest.fixture
def copies(monkeypatch):
    made = []

    class Counted(offload.HostCopy):
        def __init__(self, flat):
            super().__init__(flat)
            made.append(tuple(flat.shape))

    monkeypatch.setattr(offload, "HostCopy", Counted)
    return made


def test_one_copy_for_a_tensor_saved_three_times(copies):
    x = torch.randn(8, 8, requires_grad=True)
    h = x.exp()  # saves its result
    copies.clear()
    layers = [nn.Linear(8, 8, bias=False) for _ in range(3)]
    with offload.offload_to_host([layer.weight for layer in layers], small_bytes=0):
        y = sum(layer(h) for layer in layers)
    assert copies == [(64,)]
    y.sum().backward()
    expected = (sum(layer.weight for layer in layers).sum(0) * x.exp()).expand(8, 8)
    torch.testing.assert_close(x.grad, expected)


def test_what_stays(copies):
    layer = nn.Linear(4, 4)
    with offload.offload_to_host(small_bytes=17):
        (torch.randn(1, 4, requires_grad=True) * layer.weight).sum()  # 16 bytes, and a parameter
        torch.randn(5, 1, requires_grad=True).expand(5, 5) * torch.ones(5, 5, requires_grad=True)
    # The ones only: the expanded factor's 100 bytes belong to 20.
    assert copies == [(25,)]


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
