"""The AdamW kernel against its formula in float64, and what it refuses."""

import os
import subprocess
import sys

import pytest
import torch

from benchmarks.measure.error_budget import OUTPUT_FACTOR, budget, compare
from trainstep.kernels.adamw import function, reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LOW = torch.bfloat16
HYPER = {"lr": 3e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


def state(count, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    master, mean, gradient = (torch.randn(count, generator=generator) for _ in range(3))
    square = torch.rand(count, generator=generator) * 1e-2
    gradient = (gradient * 1e-2).to(dtype)  # values that the formula in float64 gets too
    return [tensor.to(DEVICE) for tensor in (master, gradient, mean * 1e-2, square)]


def updated(update, tensors, step, copy=None, dtype=torch.float32, **hyper):
    master, gradient, mean, square = (t.to(dtype if t.dtype == torch.float32 else t.dtype) for t in tensors)
    master, mean, square = (tensor.clone() for tensor in (master, mean, square))
    number = torch.tensor(float(step), device=DEVICE)
    update(master, gradient, mean, square, number, copy, **(HYPER | hyper))
    return master, mean, square


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize(("count", "programs", "step"), [(1, None, 1), (4096, None, 3), (10_001, 2, 1000)])
def test_matches_the_formula(count, programs, step, low):
    tensors = state(count, LOW if low else torch.float32)
    copy = torch.full((count,), float("nan"), dtype=LOW, device=DEVICE) if low else None
    got = updated(function.adamw_, tensors, step, copy, programs=programs)
    plain = updated(reference.adamw_, tensors, step)
    exact = updated(reference.adamw_, tensors, step, dtype=torch.float64)
    for mine, near, truth, old in zip(got, plain, exact, (tensors[0], *tensors[2:]), strict=True):
        terms = truth.abs() + old.abs()
        assert compare(mine, truth, budget(near, truth, OUTPUT_FACTOR, terms)).green
        assert not torch.equal(mine, old)
    if copy is not None:
        assert torch.equal(copy, got[0].to(LOW))


@pytest.mark.parametrize(
    "hyper", [{"betas": (0.0, 0.0)}, {"weight_decay": 0.0}, {"lr": 0.0}, {"eps": 0.1}], ids=str
)
def test_hyper_parameters_at_their_ends(hyper):
    tensors = state(100, torch.float32)
    got = updated(function.adamw_, tensors, 2, **hyper)
    for mine, truth in zip(got, updated(reference.adamw_, tensors, 2, **hyper), strict=True):
        torch.testing.assert_close(mine, truth, rtol=1e-5, atol=1e-7)


def test_autograd_notices_the_update():
    """What a graph saved and the kernel overwrote must not be differentiated with."""
    master, gradient, mean, square = state(8, torch.float32)
    weight = torch.nn.Parameter(master)
    output = (weight * weight).sum()
    with torch.no_grad():
        function.adamw_(weight, gradient, mean, square, torch.ones((), device=DEVICE), **HYPER)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mean": torch.zeros(3)}, "mean must be"),
        ({"square": torch.zeros(8, dtype=torch.float64)}, "square must be"),
        ({"master": torch.zeros(8, dtype=torch.float16)}, "master must be"),
        ({"gradient": torch.zeros(8, dtype=torch.float64)}, "gradient must be"),
        ({"copy": torch.zeros(16, dtype=torch.float16, device=DEVICE)[::2]}, "copy must be contiguous"),
        ({"step": torch.zeros(1)}, "step must be"),
        ({"step": torch.zeros((), device="meta")}, "on one device"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals(change, message):
    names = ("master", "gradient", "mean", "square")
    arguments = dict(zip(names, state(8, torch.float32), strict=True)) | {
        "step": torch.ones((), device=DEVICE)
    }
    # A copy to another device would be contiguous: only what is not there yet moves.
    change = {
        name: tensor if tensor.is_meta or tensor.device.type == DEVICE.type else tensor.to(DEVICE)
        for name, tensor in change.items()
    }
    with pytest.raises(ValueError, match=message):
        function.adamw_(**(arguments | change), **HYPER)


_COMPILE = """
import torch
from tests.compile_only import CompileOnly, for_hopper
from trainstep.kernels.adamw import function

def report(kernel, built):
    ptx = built.asm["ptx"]
    print("ld.global.v4" in ptx, "local" in ptx)

for_hopper()
function.adamw_kernel = CompileOnly(function.adamw_kernel, report)
function.interpreted = lambda: True  # past the check of the device
p, g = torch.zeros(10_000), torch.zeros(10_000, dtype=torch.bfloat16)
hyper = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
function.adamw_(p, g, p.clone(), p.clone(), torch.ones(()), g.clone(), **hyper)
"""


@pytest.mark.slow
def test_compiles_for_hopper(tmp_path):
    """With 16-byte loads, and without registers that spill to memory."""
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["True", "False"]
