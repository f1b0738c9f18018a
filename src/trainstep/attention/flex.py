"""FlexAttention, compiled, with cached block masks."""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from trainstep.attention.contract import finish, prepare


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Tensor | tuple[Tensor, Tensor]]:
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


@lru_cache(maxsize=64)
def _block_mask(queries: int, keys: int, window: int | None, offset: int, device: torch.device) -> BlockMask:
    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        late = key <= query + offset
        return late if window is None else late & (key > query + offset - window)

    return create_block_mask(seen, B=None, H=None, Q_LEN=queries, KV_LEN=keys, device=device)


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
    """A peer; the contract stands in `trainstep.attention`. Block masks are cached by shape.

    Raises:
        ValueError: a call outside the contract.
    """
    problem = prepare(q, k, v, causal=causal, window=window, scale=scale, alignment=alignment, name="flex")
    queries, keys = problem.q.shape[2], problem.k.shape[2]
    mask = None
    if problem.causal:
        mask = _block_mask(queries, keys, problem.window, problem.offset, problem.q.device)
    result = _compiled()(
        problem.q,
        problem.k,
        problem.v,
        block_mask=mask,
        scale=problem.scale,
        enable_gqa=problem.q.shape[1] != problem.k.shape[1],
        return_lse=return_lse,
    )
    if return_lse:
        out, lse = result
        return finish(problem, out, lse, True)
    assert isinstance(result, Tensor)
    return finish(problem, result, None, False)
