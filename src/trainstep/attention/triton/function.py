"""The Triton kernels as registered operators, differentiable, behind the attention contract.

torch.compile sees `trainstep::flash_attention_forward` and `trainstep::flash_attention_backward` as single
operators whose fake implementations give shapes and strides without running anything.
"""

from typing import Any

import torch
from torch import Tensor

from trainstep.attention.contract import finish, prepare
from trainstep.attention.differentiable import Attention, AttentionGradient, Passes, register_derivatives
from trainstep.attention.triton import launch
from trainstep.derivatives import inside_func, refuse_forward_mode


@torch.library.custom_op("trainstep::flash_attention_forward", mutates_args=())
def flash_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, scale: float, offset: int, tf32: bool
) -> tuple[Tensor, Tensor]:
    """q [B, N, S, H], k/v [B, K, T, H] -> out [B, N, S, H] and lse [B, N, S] float32."""
    return launch.forward(q, k, v, causal=causal, window=window, scale=scale, offset=offset, tf32=tf32)


@flash_attention_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, scale: float, offset: int, tf32: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("trainstep::flash_attention_backward", mutates_args=())
def flash_attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    d_lse: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float,
    offset: int,
    tf32: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, in their dtypes."""
    return launch.backward(
        q, k, v, out, lse, d_out, d_lse, causal=causal, window=window, scale=scale, offset=offset, tf32=tf32
    )


@flash_attention_backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None, *rule: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


_PASSES = Passes("triton attention", flash_attention_forward, flash_attention_backward)
register_derivatives(_PASSES)


class FlashAttention2(torch.autograd.Function):
    """`apply(q, k, v, is_causal=False)` on [B, S, H]; saves q, k, v, the output and one lse [B, S].

    One head, scale 1/sqrt(H), bottom-right causal mask. Under autocast q, k and v are saved as they came, and
    cast again in the backward pass. `torch.func` needs `attention` instead.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        problem = prepare(
            q, k, v, causal=is_causal, window=None, scale=None, alignment="bottom-right", name="triton"
        )
        ctx.rule = (*problem[3:7], False)
        out, lse = flash_attention_forward(*problem[:3], *ctx.rule)
        ctx.save_for_backward(q, k, v, out.squeeze(1), lse.squeeze(1))
        return out.squeeze(1)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, out, lse = ctx.saved_tensors  # once: under checkpointing they are unpacked once
        q, k, v = (x.to(out.dtype).unsqueeze(1) for x in inputs)
        grads = AttentionGradient.apply(
            q, k, v, out.unsqueeze(1), lse.unsqueeze(1), d_out.unsqueeze(1), None, _PASSES, ctx.rule
        )
        return (*(grad.squeeze(1).to(x.dtype) for grad, x in zip(grads, inputs, strict=True)), None)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    alignment: str = "bottom-right",
    return_lse: bool = False,
    tf32: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """FlashAttention-2 in Triton; the contract stands in `trainstep.attention`.

    Any CUDA device; float32 products are IEEE float32, or TF32 with `tf32=True`. Saves q, k, v, out and the
    log-sum-exp; scores are computed again in the backward pass. Deterministic on one device.

    Raises:
        ValueError: a call outside the contract, tensors that are not on a CUDA device, or `tf32` with another
            dtype than float32.
        NotImplementedError: forward-mode differentiation.
    """
    problem = prepare(q, k, v, causal=causal, window=window, scale=scale, alignment=alignment, name="triton")
    refuse_forward_mode(_PASSES.name, *problem[:3])
    if tf32 and problem.q.dtype != torch.float32:
        raise ValueError(f"tf32 is a way to multiply float32, got {problem.q.dtype}")
    # torch.func takes no derivative from `register_autograd`.
    if inside_func(*problem[:3]):
        out, lse = Attention.apply(*problem[:3], _PASSES, (*problem[3:7], tf32))
    else:
        out, lse = flash_attention_forward(*problem[:7], tf32)
    return finish(problem, out, lse, return_lse)
