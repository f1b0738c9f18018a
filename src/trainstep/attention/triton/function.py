"""The Triton kernels as registered operators, differentiable, behind the attention contract.

torch.compile sees `trainstep::flash_attention_forward` and `trainstep::flash_attention_backward` as single
operators whose fake implementations give shapes and strides without running anything.
"""

from typing import Any

import torch
from torch import Tensor

from trainstep.attention.contract import finish, prepare, refuse_forward_mode, refuse_second_derivative
from trainstep.attention.triton import launch


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


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.rule = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)  # an unused log-sum-exp costs nothing


def _differentiate(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    if d_out is None:
        d_out = torch.zeros_like(out)
    grads = flash_attention_backward(q, k, v, out, lse, d_out, d_lse, *ctx.rule)
    return (*grads, None, None, None, None, None)


flash_attention_forward.register_autograd(_differentiate, setup_context=_save)


def _refuse(ctx: Any, *grads: Tensor | None) -> None:
    raise NotImplementedError(
        "triton attention has no double backward; use the reference implementation for second derivatives"
    )


flash_attention_backward.register_autograd(_refuse)


class FlashAttention2(torch.autograd.Function):
    """`apply(q, k, v, is_causal=False)` on [B, S, H]; saves q, k, v, the output and one lse [B, S].

    One head, scale 1/sqrt(H), bottom-right causal mask. Under autocast q, k and v are saved as they came, and
    cast again in the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        problem = prepare(
            q, k, v, causal=is_causal, window=None, scale=None, alignment="bottom-right", name="triton"
        )
        ctx.rule = {
            "causal": problem.causal,
            "window": None,
            "scale": problem.scale,
            "offset": problem.offset,
        }
        out, lse = launch.forward(problem.q, problem.k, problem.v, **ctx.rule)
        ctx.save_for_backward(q, k, v, out.squeeze(1), lse.squeeze(1))
        return out.squeeze(1)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, out, lse = ctx.saved_tensors  # once: under checkpointing they are unpacked once
        with torch.no_grad():
            q, k, v = (x.to(out.dtype).unsqueeze(1) for x in inputs)
            grads = launch.backward(
                q, k, v, out.unsqueeze(1), lse.unsqueeze(1), d_out.unsqueeze(1), None, **ctx.rule
            )
            first = tuple(grad.squeeze(1).to(x.dtype) for grad, x in zip(grads, inputs, strict=True))
        return (*refuse_second_derivative("triton", first, (*inputs, d_out)), None)


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
    refuse_forward_mode(problem, "triton")
    if tf32 and problem.q.dtype != torch.float32:
        raise ValueError(f"tf32 is a way to multiply float32, got {problem.q.dtype}")
    out, lse = flash_attention_forward(*problem[:7], tf32)
    return finish(problem, out, lse, return_lse)
