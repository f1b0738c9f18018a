"""The contract every attention implementation keeps, checked in one place.

    attention(q, k, v, *, causal=False, window=None, scale=None, alignment="bottom-right", return_lse=False)

`prepare` turns what a caller passes into a `Problem`; `finish` turns an implementation's 4-D result back.
"""

import math
import numbers
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainstep.attention.masks import Mask

ALIGNMENTS = ("bottom-right", "top-left")
SMALLEST_HEAD_WIDTH, LARGEST_HEAD_WIDTH = 8, 256
_LOW_AND_SINGLE = (torch.float32, torch.float16, torch.bfloat16)


class Problem(NamedTuple):
    """One checked call.

    Attributes:
        q: queries [B, N, S, H].
        k: keys [B, K, T, H].
        v: values [B, K, T, H].
        causal: later keys are hidden.
        window: keys a query sees at most, or None.
        scale: factor of the scores.
        offset: query i sees keys j <= i + offset when causal: T - S for "bottom-right", 0 for "top-left".
        headless: the caller's tensors had no head axis.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    window: int | None
    scale: float
    offset: int
    headless: bool

    @property
    def mask(self) -> Mask:
        """The rule of who sees whom."""
        return Mask(self.causal, self.window, self.offset)


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    window: int | None,
    scale: float | None,
    alignment: str,
    name: str,
    dtypes: tuple[torch.dtype, ...] = _LOW_AND_SINGLE,
) -> Problem:
    """Check a call and bring it to four dimensions, under autocast also to autocast's dtype.

    Args:
        name: the implementation, for messages.
        dtypes: what the implementation computes in.

    Raises:
        ValueError: with one sentence that names the argument and its value.
    """
    # The meta device has no autocast, and asking for it is an error. torch.amp.is_autocast_available would answer,
    # but torch.compile cannot trace it before 2.12.
    if q.device.type != "meta" and torch.is_autocast_enabled(q.device.type):
        # As torch's own attention does; autocast leaves float64 alone.
        low = torch.get_autocast_dtype(q.device.type)
        q, k, v = (x.to(low) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v))
    if not (q.dtype == k.dtype == v.dtype):
        raise ValueError(f"q, k and v must share one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if q.dtype not in dtypes:
        raise ValueError(f"{name} attention takes {', '.join(map(str, dtypes))}, got {q.dtype}")
    if not (q.device == k.device == v.device):
        raise ValueError(f"q, k and v must be on one device, got {q.device}, {k.device} and {v.device}")
    headless = q.dim() == 3
    if q.dim() not in (3, 4) or k.dim() != q.dim() or v.dim() != q.dim():
        raise ValueError(
            "q, k and v must all be [B, heads, S, H] or all [B, S, H], "
            f"got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if headless:
        q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
    batch, query_heads, queries, width = q.shape
    if k.shape != v.shape:
        raise ValueError(f"k and v must have one shape, got {tuple(k.shape)} and {tuple(v.shape)}")
    key_heads, keys = k.shape[1], k.shape[2]
    if k.shape[0] != batch or k.shape[3] != width:
        raise ValueError(
            f"q and k must agree in batch and head width, got {tuple(q.shape)} and {tuple(k.shape)}"
        )
    if batch < 1 or query_heads < 1 or key_heads < 1 or queries < 1 or keys < 1:
        raise ValueError(f"q and k must hold at least one element, got {tuple(q.shape)} and {tuple(k.shape)}")
    if query_heads % key_heads:
        raise ValueError(f"{key_heads} key/value heads do not divide {query_heads} query heads")
    if not SMALLEST_HEAD_WIDTH <= width <= LARGEST_HEAD_WIDTH:
        raise ValueError(
            f"head width must be from {SMALLEST_HEAD_WIDTH} to {LARGEST_HEAD_WIDTH}, got {width}"
        )
    if alignment not in ALIGNMENTS:
        raise ValueError(f"unknown alignment {alignment!r}; known: {', '.join(ALIGNMENTS)}")
    if causal not in (False, True):
        raise ValueError(f"causal must be True or False, got {causal!r}")
    if window is not None:
        if not causal:
            raise ValueError("a window needs causal=True")
        if isinstance(window, bool) or not isinstance(window, numbers.Integral):
            raise ValueError(f"window must be a whole number, got {window!r}")
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}")
        # A window that reaches from the last query to the first key hides nothing, and larger ones would pass the
        # kernels' 31 bits.
        window = min(int(window), keys if alignment == "bottom-right" else queries)
    if scale is None:
        scale = 1.0 / math.sqrt(width)
    elif isinstance(scale, bool) or not isinstance(scale, numbers.Real) or not 0.0 < scale < math.inf:
        raise ValueError(f"scale must be a positive number, got {scale!r}")
    offset = keys - queries if causal and alignment == "bottom-right" else 0
    return Problem(q, k, v, bool(causal), window, float(scale), offset, headless)


def finish(
    problem: Problem, out: Tensor, lse: Tensor | None, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """Drop the head axis that `prepare` added; pair the output [B, N, S, H] with lse [B, N, S] if asked."""
    if problem.headless:
        out = out.squeeze(1)
        lse = None if lse is None else lse.squeeze(1)
    if not return_lse:
        return out
    assert lse is not None
    return out, lse


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """For products of float32 that autocast would take in 16 bits; also on the meta device, which has no autocast."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)
