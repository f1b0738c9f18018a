"""The weighted-sum kernel against its formula, forward and backward."""

import os
import subprocess
import sys

import pytest
import torch

from benchmarks.measure.error_budget import GRADIENT_FACTOR, OUTPUT_FACTOR, budget, compare
from trainstep.kernels import KERNELS, get_kernel, load_kernel
from trainstep.kernels.weighted_sum.function import weighted_sum, weighted_sum_backward, weighted_sum_forward
from trainstep.kernels.weighted_sum.reference import weighted_sum as reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def run(function, x, weight, g):
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = function(x, weight)
    return y, *torch.autograd.grad(y, (x, weight), g.to(y.dtype))


def layouts(shape, dtype, seed=0):
    """x in memory as callers have it: dense, transposed, a slice, every other element."""
    *lead, width = shape
    generator = torch.Generator().manual_seed(seed)

    def make(*size):
        return torch.randn(*size, generator=generator).to(DEVICE, dtype)

    yield "dense", make(*shape)
    yield "transposed", make(width, *lead).movedim(0, -1)
    yield "sliced", make(*lead, width + 3)[..., 2:-1]
    yield "strided", make(*lead, 2 * width)[..., ::2]
    yield "expanded", make(width).expand(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (17, 33), (2, 3, 20), (40, 600), (7,), (300, 8)], ids=str)
def test_matches_the_formula_in_every_layout(shape, dtype):
    for name, x in layouts(shape, dtype):
        weight = torch.randn(shape[-1], generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
        g = torch.randn(shape[:-1], generator=torch.Generator().manual_seed(2)).to(DEVICE, dtype)
        exact = run(reference, x.double(), weight.double(), g.double())
        plain = run(reference, x, weight, g)
        absolute = [t.double().abs() for t in (x, weight, g)]
        terms = run(reference, *absolute)
        factors = (OUTPUT_FACTOR, GRADIENT_FACTOR, GRADIENT_FACTOR)
        for actual, *rest, factor, what in zip(
            run(weighted_sum, x, weight, g), plain, exact, terms, factors, ("y", "dx", "dw"), strict=True
        ):
            assert actual.dtype == dtype and actual.shape == rest[1].shape
            outcome = compare(actual, rest[1], budget(rest[0], rest[1], factor, rest[2]))
            assert outcome.green, f"{name} {what}: {outcome}"


def test_an_upstream_gradient_of_any_layout():
    x, weight = torch.randn(6, 8, device=DEVICE), torch.randn(8, device=DEVICE)
    wide = torch.randn(12, device=DEVICE)
    for g in (torch.ones((), device=DEVICE).expand(6), wide[::2]):
        for actual, wanted in zip(run(weighted_sum, x, weight, g), run(reference, x, weight, g), strict=True):
            assert (actual - wanted).abs().max() < 1e-5


def test_more_rows_than_programs(monkeypatch):
    # Each program of the backward pass then owns several row tiles, and the last of them is partly empty.
    monkeypatch.setattr("trainstep.kernels.weighted_sum.function._MOST_PROGRAMS", 3)
    x, weight, g = (torch.randn(*shape, device=DEVICE) for shape in ((101, 4), (4,), (101,)))
    for actual, wanted in zip(run(weighted_sum, x, weight, g), run(reference, x, weight, g), strict=True):
        assert (actual - wanted).abs().max() < 1e-4


def test_outputs_do_not_depend_on_what_memory_held():
    x, weight, g = (torch.randn(*shape, device=DEVICE) for shape in ((19, 33), (33,), (19,)))
    clean = run(weighted_sum, x, weight, g)
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty hands out NaN
    try:
        poisoned = run(weighted_sum, x, weight, g)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one, other) for one, other in zip(clean, poisoned, strict=True))


# A wrapped 32-bit offset reads outside the allocation and may kill the process: hence a process of its own.
_FAR_APART = """
import sys
import torch
from trainstep.kernels.weighted_sum.function import weighted_sum

base = torch.empty(2**31 + 2**29, dtype=torch.float16, device=sys.argv[1])  # on a CPU only pages in use exist
torch.manual_seed(0)

def check(shape, strides, weight_stride, g_stride):
    far = [(shape, strides, 0), (shape[1:], (weight_stride,), 128), (shape[:1], (g_stride,), 256)]
    x, weight, g = (base.as_strided(*where).copy_(torch.randn(where[0])) for where in far)
    results = []
    for prepare in (lambda t: t, lambda t: t.clone(memory_format=torch.contiguous_format)):
        leaves = [prepare(t).detach().requires_grad_() for t in (x, weight)]
        y = weighted_sum(*leaves)
        results.append((y, *torch.autograd.grad(y, leaves, prepare(g))))
    assert all(torch.equal(far, near) for far, near in zip(*results)), (shape, strides)

check((4, 18), (1, 2**27), 1, 1)
check((4, 3), (1, 2**30), 1, 1)
check((4, 3), (3, 1), 2**30, 1)
check((3, 4), (2**30, 1), 1, 2**30)
print("equal")
"""


def test_offsets_past_two_to_the_31_elements():
    done = subprocess.run(
        [sys.executable, "-c", _FAR_APART, DEVICE.type],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    assert "equal" in done.stdout


def test_opcheck():
    x = torch.randn(5, 6, device=DEVICE, requires_grad=True)
    weight = torch.randn(6, device=DEVICE, requires_grad=True)
    torch.library.opcheck(weighted_sum_forward, (x, weight))
    torch.library.opcheck(weighted_sum_backward, (x.detach(), weight.detach(), torch.randn(5, device=DEVICE)))


def test_compiles_to_one_graph():
    torch.compiler.reset()
    x, weight, g = (torch.randn(*shape, device=DEVICE) for shape in ((2, 5, 6), (6,), (2, 5)))
    compiled = torch.compile(lambda *a: weighted_sum(*a).exp(), fullgraph=True, backend="aot_eager")
    for one, other in zip(
        run(compiled, x, weight, g), run(lambda *a: reference(*a).exp(), x, weight, g), strict=True
    ):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-5)


def test_double_backward_is_refused():
    x, weight = torch.randn(3, 4, device=DEVICE, requires_grad=True), torch.randn(4, device=DEVICE)
    weight.requires_grad_()
    (dx,) = torch.autograd.grad(weighted_sum(x, weight).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="no double backward"):
        torch.autograd.grad(dx.sum(), weight)


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (torch.zeros(3, 4), torch.zeros(3), r"weight must be \[D\]"),
        (torch.zeros(()), torch.zeros(1), r"weight must be \[D\]"),
        (torch.zeros(0, 4), torch.zeros(4), "at least one element"),
        (torch.zeros(3, 4), torch.zeros(4).half(), "got torch.float32 and torch.float16"),
        (torch.zeros(3, 4).long(), torch.zeros(4).long(), "got torch.int64"),
    ],
)
def test_calls_that_do_not_fit(x, weight, message):
    with pytest.raises(ValueError, match=message):
        weighted_sum(x.to(DEVICE), weight.to(DEVICE))


def test_the_device_it_needs(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="needs CUDA tensors, got cpu without TRITON_INTERPRET=1"):
        weighted_sum(torch.zeros(3, 4), torch.zeros(4))


@pytest.mark.parametrize(
    "row", [row for row in KERNELS if row.kernel == "weighted_sum"], ids=lambda row: row.name
)
def test_every_row_computes_it(row):
    assert get_kernel(row.kernel, row.name) is row
    x, weight, g = (torch.randn(*shape, device=DEVICE) for shape in ((7, 12), (12,), (7,)))
    if row.options.get("compile"):
        torch.compiler.reset()
    for actual, wanted in zip(run(load_kernel(row), x, weight, g), run(reference, x, weight, g), strict=True):
        assert (actual - wanted).abs().max() < 1e-5


def test_unknown_names_list_the_known():
    with pytest.raises(ValueError, match="unknown kernel 'gelu'; known: weighted_sum"):
        get_kernel("gelu", "triton")
    with pytest.raises(ValueError, match="unknown implementation 'cuda' of weighted_sum; known: reference"):
        get_kernel("weighted_sum", "cuda")
