"""PyTorch's scaled_dot_product_attention, with the backend it chooses itself or with one forced: flash, cuDNN,
memory-efficient or math."""

import contextlib

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from trainstep.attention.contract import finish, prepare

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


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
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """A peer; the contract stands in `trainstep.attention`, and the registry's row says what a backend lacks.

    Raises:
        ValueError: a call outside the contract, or one that PyTorch's interface lacks: a log-sum-exp,
            a window except as a dense mask of the math backend.
        RuntimeError: from PyTorch, when the forced backend does not take the call.
    """
    name = f"sdpa-{backend}" if backend else "sdpa"
    problem = prepare(
        q, k, v, causal=causal, window=window, scale=scale, alignment=alignment, name=name, dtypes=_DTYPES
    )
    if return_lse:
        raise ValueError(f"{name} returns no log-sum-exp")
    if window is not None and backend not in (None, "math"):
        raise ValueError(f"{name} takes no window")
    queries, keys = problem.q.shape[2], problem.k.shape[2]
    mask = None
    is_causal = problem.causal
    if window is not None:
        mask, is_causal = problem.mask.visible(queries, keys, device=problem.q.device), False
    elif problem.causal and problem.offset != 0:
        # is_causal aligns the diagonal to the top left. The bias object picks the kernel's own bottom-right
        # mask where the backend has one; the others get it as a dense mask.
        is_causal = False
        mask = (
            causal_lower_right(queries, keys)
            if backend in ("flash", "efficient")
            else problem.mask.visible(queries, keys, device=problem.q.device)
        )
    with sdpa_kernel(_BACKENDS[backend]) if backend else contextlib.nullcontext():
        out = torch.nn.functional.scaled_dot_product_attention(
            problem.q,
            problem.k,
            problem.v,
            attn_mask=mask,
            is_causal=is_causal,
            scale=problem.scale,
            enable_gqa=problem.q.shape[1] != problem.k.shape[1],
        )
    return finish(problem, out, None, return_lse)
