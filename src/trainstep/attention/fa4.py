"""FlashAttention-4, the CuTe kernels of the package flash-attn-4; imported only when it is called."""

import importlib

import torch
from torch import Tensor

from trainstep.attention.contract import finish, prepare

NAME = "flash-attention-4"


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
    """A peer; the contract stands in `trainstep.attention`. Its kernels take [B, S, N, H]: views, no copies.

    Float16 and bfloat16. Its log-sum-exp has no gradient, hence is not offered; its causal mask is aligned to
    the bottom right.

    Raises:
        ImportError: flash-attn-4 is not installed, or does not load here.
        ValueError: a call outside the contract, or one that it cannot express.
    """
    problem = prepare(
        q, k, v, causal=causal, window=window, scale=scale, alignment=alignment, name=NAME,
        dtypes=(torch.float16, torch.bfloat16),
    )  # fmt: skip
    if return_lse:
        raise ValueError(f"{NAME} returns no log-sum-exp")
    if window is not None:
        raise ValueError(f"{NAME} takes no window")
    if problem.causal and problem.offset != problem.k.shape[2] - problem.q.shape[2]:
        raise ValueError(f"{NAME} aligns a causal mask to the bottom right only")
    try:
        flash_attn_func = importlib.import_module("flash_attn.cute").flash_attn_func
    except ImportError as error:
        raise ImportError(f"{NAME} needs the package flash-attn-4: {error}") from error
    result = flash_attn_func(
        *(x.transpose(1, 2) for x in problem[:3]), softmax_scale=problem.scale, causal=problem.causal
    )
    out = result[0] if isinstance(result, tuple) else result  # with the log-sum-exp in some versions
    return finish(problem, out.transpose(1, 2), None, False)
