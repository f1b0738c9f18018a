"""Tensors whose offsets pass 2^31 elements, and more heads than a grid's y axis holds."""

import os
import subprocess
import sys

import pytest
import torch

from trainstep.attention.triton.function import attention as triton

# A wrapped 32-bit offset reads outside the allocation and may kill the process: hence a process of its own.
_FAR_APART = """
import torch
from trainstep.attention.triton.function import attention

base = torch.empty(2**31 + 2**29, dtype=torch.float16)  # pages are only touched where elements lie
torch.manual_seed(0)

def check(shape, strides):
    def far(offset):
        return base.as_strided(shape, strides, offset).copy_(torch.randn(shape))
    data, upstream = far(0), far(2048)
    results = []
    for prepare in (lambda x: x, lambda x: x.clone(memory_format=torch.contiguous_format)):
        q, k, v = (prepare(data).detach().requires_grad_() for _ in range(3))
        out = attention(q, k, v, causal=True)
        results.append((out, *torch.autograd.grad(out, (q, k, v), prepare(upstream))))
    assert all(torch.equal(far, near) for far, near in zip(*results)), (shape, strides)

check((3, 1, 16, 16), (2**30, 256, 16, 1))  # batch * stride
check((1, 3, 16, 16), (256, 2**30, 16, 1))  # head * stride
check((1, 1, 70, 16), (1, 1, 2**25, 1))  # row * stride, inside a tile and before it
print("equal")
"""


def test_offsets_past_two_to_the_31_elements(device):
    """Field case A6: about 360 MiB resident on a CPU."""
    if device.type == "cuda":
        pytest.skip("the next test does it in device memory")
    done = subprocess.run(
        [sys.executable, "-c", _FAR_APART],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "equal" in done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(3, 1, 16, 16), (1, 3, 16, 16)], ids=["batch", "heads"])
def test_offsets_past_two_to_the_31_elements_on_the_device(device, shape):
    strides = (2**30, 2**30, 16, 1)
    base = torch.empty(2**31 + 4096, dtype=torch.float16, device=device)
    far = base.as_strided(shape, strides).copy_(torch.randn(shape, device=device))
    results = []
    for data in (far, far.clone(memory_format=torch.contiguous_format)):
        q, k, v = (data.detach().requires_grad_() for _ in range(3))
        out = triton(q, k, v, causal=True)
        results.append((out, *torch.autograd.grad(out.sum(), (q, k, v))))
    assert all(torch.equal(one, another) for one, another in zip(*results, strict=True))


@pytest.mark.gpu
def test_a_row_stride_past_two_to_the_31_elements(device):
    # One head's rows alone span more than 2^31 elements.
    base = torch.empty(2**31 + 2**28 + 64, dtype=torch.float16, device=device)
    far = base.as_strided((1, 1, 10, 16), (1, 1, 2**28, 1)).copy_(torch.randn(1, 1, 10, 16, device=device))
    assert torch.equal(triton(far, far, far), triton(*[far.clone(memory_format=torch.contiguous_format)] * 3))


@pytest.mark.gpu
def test_65536_heads(device):
    q, k, v = (torch.randn(2, 65536, 16, 16, device=device, dtype=torch.bfloat16) for _ in range(3))
    last = slice(65530, 65536)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = triton(q, k, v, causal=True)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    few = [x[:, last].detach().requires_grad_() for x in (q, k, v)]
    expected = triton(*few, causal=True)
    assert torch.equal(out[:, last], expected)
    for all_heads, some in zip(grads, torch.autograd.grad(expected.sum(), few), strict=True):
        assert torch.equal(all_heads[:, last], some)
