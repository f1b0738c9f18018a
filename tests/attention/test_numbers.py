"""Every implementation's numbers against the reference in float64, forward and backward."""

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial

import pytest
import torch

from tests.attention.covering import pairwise
from tests.attention.full_product import HEADS, LENGTHS, WIDTHS, check_batch, compile_batch
from tests.attention.problems import GRADIENT_LAYOUTS, LAYOUTS, MASKS, check, make_inputs, solve
from trainstep.attention import ATTENTION, load_attention
from trainstep.attention.tiled import attention as tiled
from trainstep.attention.triton.function import attention as triton

# The interpreter takes a while for every head.
FEW_HEADS = ((2, 1, 1), (1, 2, 1), (1, 4, 2), (1, 8, 1))
OURS = {"tiled": partial(tiled, tile=32), "triton": triton}
PAIRS = pairwise(
    {
        "queries": LENGTHS,
        "keys": LENGTHS,
        "width": WIDTHS,
        "mask": tuple(MASKS),
        "layout": LAYOUTS,
        "d_layout": GRADIENT_LAYOUTS,
        "heads": HEADS if torch.cuda.is_available() else FEW_HEADS,
        "dtype": (torch.float32, torch.float16),
        "use_lse": (True, False),
    }
)


@pytest.mark.parametrize("case", PAIRS, ids=lambda case: "-".join(str(value) for value in case.values()))
@pytest.mark.parametrize("name", OURS)
def test_every_pair_of_shapes_masks_and_layouts(name, case, device):
    case = dict(case)
    mask = MASKS[case.pop("mask")]
    check(OURS[name], make_inputs(device=device, **case), **mask)


# Checked in the order in which compilations end: float32 products are unrolled, wide heads most of all.
PRODUCT = [
    (dtype, width) for dtype in (torch.float16, torch.bfloat16, torch.float32) for width in reversed(WIDTHS)
]


@pytest.fixture(scope="module")
def compiled() -> Iterator[dict[tuple[torch.dtype, int], Future[None]]]:
    """Kernels of the full product, compiled by processes of their own while this one checks."""
    workers = min(16, os.cpu_count() or 1)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        order = sorted(PRODUCT, key=lambda batch: batch[0].itemsize, reverse=True)  # slow ones start first
        yield {batch: pool.submit(compile_batch, *batch) for batch in order}
        pool.shutdown(cancel_futures=True)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", PRODUCT, ids=str)
def test_full_product(batch, compiled):
    compiled[batch].result(timeout=280)
    checked, failures = check_batch(*batch)
    assert checked == len(LENGTHS) ** 2 * len(HEADS) * len(MASKS)
    assert not failures, f"{len(failures)} of {checked}, the first: {failures[0]}"


@pytest.mark.parametrize("lengths", [(17, 17), (17, 33), (1, 20), (40, 7)], ids=str)
@pytest.mark.parametrize("name", OURS)
def test_key_tail_does_not_enter_the_softmax(name, lengths, device):
    # Without a mask on the last tile the error is 0.36; causal hides it at equal lengths (field case A1).
    check(OURS[name], make_inputs(queries=lengths[0], keys=lengths[1], width=16, device=device), causal=False)


@pytest.mark.parametrize("lengths", [(2, 4), (4, 2)], ids=str)
@pytest.mark.parametrize("alignment", ["bottom-right", "top-left"])
@pytest.mark.parametrize("name", ["reference", "tiled", "triton"])
def test_causal_alignment(name, alignment, lengths, device):
    # Against a mask written out here (field case A2); the two alignments differ by O(1).
    queries, keys = lengths
    q, k, v, *_ = make_inputs(queries=queries, keys=keys, width=16, device=device)
    shift = keys - queries if alignment == "bottom-right" else 0
    seen = torch.tensor([[j <= i + shift for j in range(keys)] for i in range(queries)], device=device)
    expected = torch.softmax(((q @ k.mT) / 4).masked_fill(~seen, float("-inf")), -1).nan_to_num(0.0) @ v
    function = {row.name: row for row in ATTENTION}[name]
    out = load_attention(function)(q, k, v, causal=True, alignment=alignment)
    assert (out - expected).abs().max() < 1e-5


@pytest.mark.parametrize("width", [16, 24, 32, 80, 96, 128])
@pytest.mark.parametrize("name", OURS)
def test_the_last_column_counts(name, width, device):
    # A kernel that truncates the head width to a power of two passes many a tolerance (field case A4).
    q, k, v, *_ = make_inputs(queries=32, keys=32, width=width, device=device)
    before = OURS[name](q, k, v)
    q[..., -1] += 1.0
    assert (OURS[name](q, k, v) - before).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["reference", *OURS])
def test_scale(name, device):
    function = load_attention({row.name: row for row in ATTENTION}[name])
    check(function, make_inputs(queries=20, keys=20, width=16, device=device), scale=0.7, causal=True)


@pytest.mark.parametrize("width", [16, 64, 128])
def test_the_budget_sees_a_scale_that_is_off_by_one_in_100_000(width, device):
    def off(q, k, v, **options):
        return OURS["tiled"](q * (1 + 1e-5), k, v, **options)

    inputs = make_inputs(queries=128, keys=128, width=width, heads=(2, 2, 1), device=device)
    check(OURS["tiled"], inputs, causal=True)
    with pytest.raises(AssertionError, match="allowed"):
        check(off, inputs, causal=True)


@pytest.mark.parametrize("name", OURS)
def test_large_scores_do_not_overflow(name, device):
    # Scores near +-1000, whose exponentials float32 cannot hold. Their round-off alone is 1e-4.
    inputs = make_inputs(queries=20, keys=40, width=16, device=device)
    inputs = inputs._replace(q=inputs.q * 300)
    exact = solve(load_attention(ATTENTION[0]), inputs.to(torch.float64), causal=True)
    for actual, wanted in zip(solve(OURS[name], inputs, causal=True), exact, strict=True):
        assert (actual.double() - wanted).abs().max() < 1e-3 * wanted.abs().max().clamp(min=1)


@pytest.mark.parametrize("name", ["reference", *OURS])
def test_without_a_head_axis(name, device):
    function = load_attention({row.name: row for row in ATTENTION}[name])
    q, k, v, *_ = make_inputs(queries=9, keys=12, width=16, heads=(3, 1, 1), device=device)
    out, lse = function(q[:, 0], k[:, 0], v[:, 0], causal=True, return_lse=True)
    whole, whole_lse = function(q, k, v, causal=True, return_lse=True)
    assert torch.equal(out, whole[:, 0]) and torch.equal(lse, whole_lse[:, 0])


@pytest.mark.parametrize("row", ATTENTION, ids=lambda row: row.name)
@pytest.mark.parametrize("dtype", ["fp32", "tf32", "fp16", "bf16"])
def test_every_row_does_what_it_says(row, dtype, device):
    """A row's promises, kept on this device: shapes, grouped heads, window, gradients."""
    wants = {
        "grouped_query": row.grouped_query,
        "window": row.window,
        "backward": row.backward,
        "lse": row.lse,
    }
    capability = torch.cuda.get_device_capability() if device.type == "cuda" else None
    refusal = row.refusal(device=device.type, dtype=dtype, capability=capability, **wants)
    if refusal is not None:
        pytest.skip(refusal)
    if row.options.get("compile"):
        torch.compiler.reset()
    if row.options.get("compile") and device.type == "cpu" and dtype != "fp32":
        pytest.skip("one compilation is enough on a CPU")
    torch_dtype = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16}.get(
        dtype, torch.bfloat16
    )
    inputs = make_inputs(
        queries=40,
        keys=57,
        width=row.head_dims[0] if row.head_dims else 32,
        heads=(2, 4, 2 if row.grouped_query else 4),
        dtype=torch_dtype,
        device=device,
    )
    options = {"causal": True, **({"window": 13} if row.window else {})}
    function = load_attention(row)
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    out = function(q, k, v, return_lse=True, **options)[0] if row.lse else function(q, k, v, **options)
    grads = torch.autograd.grad(out, (q, k, v), inputs.d_out)
    exact = [x.detach().double().requires_grad_() for x in inputs[:3]]
    reference = load_attention(ATTENTION[0])
    expected = reference(*exact, **options)
    expected_grads = torch.autograd.grad(expected, exact, inputs.d_out.double())
    # Coarse on purpose: whether the row computes this at all. Budgets judge our own rows above.
    tolerance = {"fp32": 1e-5, "tf32": 1e-2, "fp16": 1e-2, "bf16": 6e-2}[dtype]
    for actual, wanted in zip((out, *grads), (expected, *expected_grads), strict=True):
        assert actual.dtype == torch_dtype
        assert (actual.double() - wanted).abs().max() < tolerance
