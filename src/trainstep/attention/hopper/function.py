"""The Hopper kernels as registered operators, differentiable, behind the attention contract.

They are written for one chip and one compiler: compute capability 9.0 exactly, and the Triton versions in
`TRITON`, whose Gluon dialect is experimental and changes between releases. Anything else is refused with the
reason, so that a caller falls back on `trainstep.attention.triton`.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from trainstep.attention.contract import Problem, finish, prepare, refuse_forward_mode

CAPABILITY = (9, 0)
TRITON = ("3.6.0",)
WIDTHS = (64, 128)
_DTYPES = (torch.float16, torch.bfloat16)


def refusal(problem: Problem) -> str | None:
    """Why these kernels do not take a call, in one sentence; None if they do."""
    q = problem.q
    if q.device.type != "cuda":
        return f"hopper attention needs CUDA tensors, got {q.device}"
    capability = torch.cuda.get_device_capability(q.device)
    if capability != CAPABILITY:
        return f"hopper attention is for compute capability 9.0, got {capability[0]}.{capability[1]}"
    if triton.__version__ not in TRITON:
        return f"hopper attention was tested with Triton {', '.join(TRITON)}, got {triton.__version__}"
    if q.shape[3] not in WIDTHS:
        return f"hopper attention takes head widths {', '.join(map(str, WIDTHS))}, got {q.shape[3]}"
    if problem.window is not None:
        return "hopper attention takes no window"
    return None


@torch.library.custom_op("trainstep::hopper_attention_forward", mutates_args=())
def hopper_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, offset: int
) -> tuple[Tensor, Tensor]:
    """q [B, N, S, H], k/v [B, K, T, H] -> out [B, N, S, H] contiguous and lse [B, N, S] float32."""
    from trainstep.attention.hopper import launch  # Gluon is imported only where it is used

    return launch.forward(q, k, v, causal=causal, scale=scale, offset=offset)


@hopper_attention_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, offset: int) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("trainstep::hopper_attention_backward", mutates_args=())
def hopper_attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    d_lse: Tensor | None,
    causal: bool,
    scale: float,
    offset: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, contiguous, in their dtypes."""
    from trainstep.attention.hopper import launch

    return launch.backward(q, k, v, out, lse, d_out, d_lse, causal=causal, scale=scale, offset=offset)


@hopper_attention_backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None, *rule: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.rule = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)  # an unused log-sum-exp costs nothing


def _differentiate(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    if d_out is None:
        d_out = torch.zeros_like(out)
    grads = hopper_attention_backward(q, k, v, out, lse, d_out, d_lse, *ctx.rule)
    return (*grads, None, None, None)


hopper_attention_forward.register_autograd(_differentiate, setup_context=_save)


def _refuse(ctx: Any, *grads: Tensor | None) -> None:
    raise NotImplementedError(
        "hopper attention has no double backward; use the reference implementation for second derivatives"
    )


hopper_attention_backward.register_autograd(_refuse)


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
) -> Tensor | tuple[Tensor, Tensor]:
    """FlashAttention for Hopper in Gluon; the contract stands in `trainstep.attention`.

    Float16 and bfloat16, head widths 64 and 128, no window. Saves q, k, v, out and the log-sum-exp; scores
    are computed again in the backward pass, whose sums are taken in a fixed order: deterministic.

    Raises:
        ValueError: a call outside the contract, or one that `refusal` names.
        NotImplementedError: forward-mode differentiation.
    """
    problem = prepare(
        q, k, v, causal=causal, window=window, scale=scale, alignment=alignment, name="hopper", dtypes=_DTYPES
    )
    refuse_forward_mode(problem, "hopper")
    reason = refusal(problem)
    if reason is not None:
        raise ValueError(reason)
    out, lse = hopper_attention_forward(
        problem.q, problem.k, problem.v, problem.causal, problem.scale, problem.offset
    )
    return finish(problem, out, lse, return_lse)
