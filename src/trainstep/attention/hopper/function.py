"""The Hopper kernels as registered operators, differentiable, behind the attention contract.

They are written for one chip and one compiler: compute capability 9.0 exactly, and the Triton versions in
`TRITON`, whose Gluon dialect is experimental and changes between releases. Anything else is refused with the
reason, so that a caller falls back on `trainstep.attention.triton`.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from trainstep.attention.contract import Problem, finish, prepare
from trainstep.attention.differentiable import Attention, Passes, register_derivatives
from trainstep.derivatives import inside_func, refuse_forward_mode

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


_PASSES = Passes("hopper attention", hopper_attention_forward, hopper_attention_backward)
register_derivatives(_PASSES)


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
    refuse_forward_mode(_PASSES.name, *problem[:3])
    reason = refusal(problem)
    if reason is not None:
        raise ValueError(reason)
    # torch.func takes no derivative from `register_autograd`.
    rule = (problem.causal, problem.scale, problem.offset)
    if inside_func(*problem[:3]):
        out, lse = Attention.apply(*problem[:3], _PASSES, rule)
    else:
        out, lse = hopper_attention_forward(*problem[:3], *rule)
    return finish(problem, out, lse, return_lse)
