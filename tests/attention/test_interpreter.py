"""Triton's interpreter: when it is on, and bfloat16, which it holds as bare bits and multiplies as they are."""

import os
import subprocess
import sys

import pytest
import torch
import triton as triton_package

from tests.attention.problems import GRADIENT_LAYOUTS, LAYOUTS, MASKS, check, make_inputs
from trainstep.attention.triton.function import FlashAttention2
from trainstep.attention.triton.function import attention as triton
from trainstep.interpreter import interpreted


@pytest.mark.parametrize("value", ["1", "true", "YES", "on", "y", "0", "false", "no", "off", "2", ""])
def test_what_triton_takes_for_on_is_on(value, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", value)
    assert interpreted() is triton_package.knobs.runtime.interpret


def test_without_the_variable_it_is_off(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not interpreted()


_SMALL = """
import torch
from trainstep.attention.triton.function import attention
from trainstep.kernels.weighted_sum.function import weighted_sum

x = torch.ones(1, 1, 8, 16, dtype=torch.bfloat16)
assert torch.equal(attention(x, x, x), x) and weighted_sum(x, x[0, 0, 0])[0, 0, 0] == 16.0
print("right")
"""


def test_kernels_run_where_triton_says_true():
    done = subprocess.run(
        [sys.executable, "-c", _SMALL],
        env={**os.environ, "TRITON_INTERPRET": "true", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "right" in done.stdout, done.stderr[-2000:]


@pytest.mark.parametrize(("mask", "layout"), zip(MASKS, [*LAYOUTS, "dense"], strict=True), ids=str)
def test_bfloat16(mask, layout, device):
    inputs = make_inputs(
        queries=40, keys=57, width=24, heads=(1, 2, 1), dtype=torch.bfloat16, device=device,
        layout=layout, d_layout=layout if layout in GRADIENT_LAYOUTS else "expanded",
    )  # fmt: skip
    before = [x.clone() for x in inputs]
    check(triton, inputs, **MASKS[mask])
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


def test_bfloat16_in_the_autograd_function(device):
    def run(dtype):
        torch.manual_seed(0)
        q, k, v, d_out = (torch.randn(2, 20, 16, device=device).bfloat16().to(dtype) for _ in range(4))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = FlashAttention2.apply(*leaves, True)
        return out, *torch.autograd.grad(out, leaves, d_out)

    for low, single in zip(run(torch.bfloat16), run(torch.float32), strict=True):
        assert low.dtype == torch.bfloat16
        assert (low - single).abs().max() < 0.02 * single.abs().max()


@pytest.mark.parametrize("layout", ["dense", "heads-inside", "sliced"])
def test_bfloat16_outputs_lie_in_memory_as_those_of_float16(layout, device):
    strides = []
    for dtype in (torch.float16, torch.bfloat16):
        inputs = make_inputs(
            queries=9, keys=12, width=16, heads=(2, 2, 1), dtype=dtype, device=device, layout=layout
        )
        q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
        out = triton(q, k, v)
        strides.append([x.stride() for x in (out, *torch.autograd.grad(out.sum(), (q, k, v)))])
    assert strides[0] == strides[1]
