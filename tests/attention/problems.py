"""Attention problems for tests: inputs in every layout, exact and plain answers, allowed errors."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.measure.error_budget import (
    GRADIENT_FACTOR,
    OUTPUT_FACTOR,
    attention_terms,
    budget,
    compare,
)
from trainstep.attention.masks import Mask
from trainstep.attention.reference import attention as reference

# Keyword arguments of the masks under test.
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "causal-top-left": {"causal": True, "alignment": "top-left"},
    "window-1": {"causal": True, "window": 1},
    "window-19": {"causal": True, "window": 19},
    "window-70-top-left": {"causal": True, "window": 70, "alignment": "top-left"},
}
LAYOUTS = ("dense", "heads-inside", "sliced", "strided", "columns")
GRADIENT_LAYOUTS = ("dense", "heads-inside", "sliced", "expanded")


class Answer(NamedTuple):
    """Results of one forward and backward pass."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


class Inputs(NamedTuple):
    """q [B, N, S, H], k and v [B, K, T, H], upstream gradients of out and of lse (None: lse not used)."""

    q: Tensor
    k: Tensor
    v: Tensor
    d_out: Tensor
    d_lse: Tensor | None

    def to(self, dtype: torch.dtype) -> "Inputs":
        """Everything but the log-sum-exp's gradient in another dtype; that one at least in float32."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        d_lse = None if self.d_lse is None else self.d_lse.to(wide)
        return Inputs(*(x.to(dtype) for x in self[:4]), d_lse)


def random_tensor(
    shape: tuple[int, ...],
    layout: str,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
) -> Tensor:
    """Normal values [B, heads, S, H] whose memory is laid out in one of the ways that callers have."""
    b, n, s, h = shape
    made = {
        "dense": (b, n, s, h),
        "heads-inside": (b, s, n, h),  # a projection's output, heads moved out by a transpose
        "sliced": (b, n, s + 3, h + 5),  # part of a larger tensor
        "strided": (b, n, s, 2 * h),  # every other column
        "columns": (b, n, h, s),  # the head width is not the last axis in memory
        "expanded": (b, 1, 1, h),  # one row for all, as the gradient of a sum has
    }[layout]
    x = torch.randn(made, generator=generator, dtype=torch.float64).to(device=device, dtype=dtype)
    match layout:
        case "heads-inside":
            x = x.transpose(1, 2)
        case "sliced":
            x = x[:, :, 2 : s + 2, 4 : h + 4]
        case "strided":
            x = x[..., ::2]
        case "columns":
            x = x.transpose(2, 3)
        case "expanded":
            x = x.expand(shape)
    assert x.shape == shape
    return x


def make_inputs(
    *,
    queries: int,
    keys: int,
    width: int,
    heads: tuple[int, int, int] = (1, 1, 1),
    dtype: torch.dtype = torch.float32,
    device: torch.device,
    layout: str = "dense",
    d_layout: str = "dense",
    use_lse: bool = True,
    seed: int = 0,
) -> Inputs:
    """Inputs of a problem; `heads` is (batch, query heads, key/value heads)."""
    batch, query_heads, key_heads = heads
    generator = torch.Generator().manual_seed(seed)

    def make(n: int, rows: int, layout: str) -> Tensor:
        return random_tensor((batch, n, rows, width), layout, dtype, device, generator)

    q = make(query_heads, queries, layout)
    k, v = make(key_heads, keys, layout), make(key_heads, keys, layout)
    d_out = make(query_heads, queries, d_layout)
    d_lse = None
    if use_lse:
        d_lse = torch.randn(batch, query_heads, queries, generator=generator).to(device)
    return Inputs(q, k, v, d_out, d_lse)


def solve(function: Callable[..., Any], inputs: Inputs, **options: Any) -> Answer:
    """Run forward and backward; rows that see no key have lse = -inf, whose gradient must not matter."""
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    out, lse = function(q, k, v, return_lse=True, **options)
    if inputs.d_lse is None:
        grads = torch.autograd.grad(out, (q, k, v), inputs.d_out.to(out.dtype))
    else:
        grads = torch.autograd.grad((out, lse), (q, k, v), (inputs.d_out.to(out.dtype), inputs.d_lse))
    return Answer(out.detach(), lse.detach(), *grads)


def mask_of(inputs: Inputs, options: dict[str, Any]) -> Mask:
    """The rule of who sees whom, computed here on its own."""
    queries, keys = inputs.q.shape[2], inputs.k.shape[2]
    top_left = options.get("alignment") == "top-left"
    causal = options.get("causal", False)
    return Mask(causal, options.get("window"), keys - queries if causal and not top_left else 0)


def summed_terms(inputs: Inputs, **options: Any) -> Answer:
    """For every result the sum of the absolute values of the terms it adds up, in float64."""
    q, k, v, d_out, d_lse = inputs.to(torch.float64)
    scale = options.get("scale") or q.shape[-1] ** -0.5
    seen = mask_of(inputs, options).visible(q.shape[2], k.shape[2], device=q.device)
    out, dq, dk, dv = attention_terms(q, k, v, d_out, seen=seen, scale=scale, d_lse=d_lse)
    every_key = k.abs().repeat_interleave(q.shape[1] // k.shape[1], 1)
    lse = ((q.abs() @ every_key.mT) * scale).masked_fill(~seen, 0.0).amax(-1)
    return Answer(out, lse, dq, dk, dv)


def check(function: Callable[..., Any], inputs: Inputs, **options: Any) -> Answer:
    """Compare every result with float64, within the error that plain PyTorch makes in the inputs' dtype."""
    exact = solve(reference, inputs.to(torch.float64), **options)
    plain = solve(reference, inputs, **options)
    terms = summed_terms(inputs, **options)
    actual = solve(function, inputs, **options)
    assert actual.out.dtype == inputs.q.dtype
    assert actual.lse.dtype == torch.float32 or inputs.q.dtype == torch.float64
    for name in Answer._fields:
        result = getattr(actual, name)
        if name.startswith("d"):
            assert result.dtype == inputs.q.dtype, name
        factor = GRADIENT_FACTOR if name.startswith("d") else OUTPUT_FACTOR
        allowed = budget(getattr(plain, name), getattr(exact, name), factor, getattr(terms, name))
        outcome = compare(result, getattr(exact, name), allowed)
        assert outcome.green, f"{name}: error {outcome.error:.3g}, allowed {outcome.budget:.3g}"
    return actual
