"""The weighted sum as an operator that autograd and torch.compile know: checks, launches, derivatives."""

from typing import Any

import torch
import triton
from torch import Tensor

from trainstep.derivatives import no_double_backward, refuse_forward_mode, refuse_func_gradients
from trainstep.interpreter import holds_bare_bits, interpreted
from trainstep.kernels.weighted_sum.triton import backward_kernel, forward_kernel

_NAME = "the Triton weighted sum"
_ROWS = 16
_MOST_PROGRAMS = 512  # of the backward pass: bounds the memory of the shares of dw
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def weighted_sum(x: Tensor, weight: Tensor) -> Tensor:
    """y_r = sum_d x_rd w_d: x [..., D], weight [D] -> [...], in x's dtype, summed in float32.

    Saves x and weight for the backward pass. Any strides; where the leading dimensions of x cannot be viewed
    as one, x is copied. Deterministic.

    Raises:
        ValueError: shapes that do not fit, mixed or unknown dtypes, tensors that are not on one CUDA device.
        NotImplementedError: forward-mode differentiation, or derivatives by torch.func.
    """
    if x.dim() < 1 or weight.shape != x.shape[-1:]:
        raise ValueError(f"weight must be [D] for x [..., D], got {tuple(weight.shape)} for {tuple(x.shape)}")
    if x.numel() == 0:
        raise ValueError(f"x must hold at least one element, got {tuple(x.shape)}")
    if x.dtype != weight.dtype or x.dtype not in _DTYPES:
        raise ValueError(
            f"x and weight must share one of {', '.join(map(str, _DTYPES))}, got {x.dtype} and {weight.dtype}"
        )
    if x.device != weight.device:
        raise ValueError(f"x and weight must be on one device, got {x.device} and {weight.device}")
    refuse_forward_mode(_NAME, x, weight)
    refuse_func_gradients(_NAME, x, weight)
    return weighted_sum_forward(x.reshape(-1, x.shape[-1]), weight).view(x.shape[:-1])


def _wide(x: Tensor, weight: Tensor) -> bool:
    """Whether the offset of a column passes 31 bits, in x [R, D] or weight [D], tiles past the end included."""
    last = x.shape[1] + _columns(x.shape[1])
    return last * max(x.stride(1), weight.stride(0)) >= 2**31


def _columns(width: int) -> int:
    return min(triton.next_power_of_2(width), 512)


@torch.library.custom_op("trainstep::weighted_sum_forward", mutates_args=())
def weighted_sum_forward(x: Tensor, weight: Tensor) -> Tensor:
    """x [R, D], weight [D] -> y [R]."""
    if x.device.type != "cuda" and not interpreted():
        raise ValueError(f"{_NAME} needs CUDA tensors, got {x.device} without TRITON_INTERPRET=1")
    if holds_bare_bits(x):
        return weighted_sum_forward(x.float(), weight.float()).to(x.dtype)
    rows, width = x.shape
    y = torch.empty(rows, dtype=x.dtype, device=x.device)
    with torch.cuda.device_of(x):  # Triton launches on the current device, which need not be x's
        forward_kernel[(triton.cdiv(rows, _ROWS),)](
            x, weight, y, rows, width, x.stride(0), x.stride(1), weight.stride(0),
            ROWS=_ROWS, COLUMNS=_columns(width), WIDE=_wide(x, weight),
        )  # fmt: skip
    return y


@weighted_sum_forward.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0])


@torch.library.custom_op("trainstep::weighted_sum_backward", mutates_args=())
def weighted_sum_backward(x: Tensor, weight: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """x [R, D], weight [D], g [R] -> dx [R, D], dw [D], in the inputs' dtype."""
    if holds_bare_bits(x):
        dx, dw = weighted_sum_backward(x.float(), weight.float(), g.float())
        return dx.to(x.dtype), dw.to(weight.dtype)
    rows, width = x.shape
    programs = min(triton.cdiv(rows, _ROWS), _MOST_PROGRAMS)
    rows_a_program = triton.cdiv(triton.cdiv(rows, programs), _ROWS) * _ROWS
    dx = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    partial = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        backward_kernel[(programs,)](
            x, weight, g, dx, partial, rows, width, rows_a_program,
            x.stride(0), x.stride(1), weight.stride(0), g.stride(0),
            ROWS=_ROWS, COLUMNS=_columns(width), WIDE=_wide(x, weight),
        )  # fmt: skip
    return dx, partial.sum(0).to(weight.dtype)


@weighted_sum_backward.register_fake
def _(x: Tensor, weight: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
    return weighted_sum_backward(*ctx.saved_tensors, g)


weighted_sum_forward.register_autograd(_differentiate, setup_context=_save)
weighted_sum_backward.register_autograd(no_double_backward(_NAME))
