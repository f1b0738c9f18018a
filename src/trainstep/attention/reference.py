"""Attention as the formula says, scores held in full: the oracle of every other implementation.

O = softmax(scale * Q K^T + mask) V. Autograd differentiates it; float64 inputs give the exact answer that
error budgets are measured against.
"""

import torch
from torch import Tensor

from trainstep import ranges
from trainstep.attention.contract import finish, prepare

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
) -> Tensor | tuple[Tensor, Tensor]:
    """Materialised attention; the contract stands in `trainstep.attention`.

    Scores and probabilities [B, N, S, T] are rounded to the inputs' dtype, as a plain model does. float64
    inputs give a float64 log-sum-exp. A NaN in a value that no query sees still reaches the output, because 0
    * NaN is NaN: the fused implementations are stricter.

    Raises:
        ValueError: a call outside the contract.
    """
    problem = prepare(
        q,
        k,
        v,
        causal=causal,
        window=window,
        scale=scale,
        alignment=alignment,
        name="reference",
        dtypes=_DTYPES,
    )
    q, k, v = problem.q, problem.k, problem.v
    batch, query_heads, queries, width = q.shape
    key_heads, keys = k.shape[1], k.shape[2]

    # The heads that share a key/value head are laid one after the other along S: [B, K, N/K * S, H].
    grouped = q.reshape(batch, key_heads, -1, width)
    with ranges.annotate("attention scores"):
        scores = (grouped @ k.transpose(-2, -1)) * problem.scale
        scores = scores.view(batch, query_heads, queries, keys)

    blind = None
    if problem.causal:
        with ranges.annotate("attention mask"):
            seen = problem.mask.visible(queries, keys, device=q.device)
            scores = scores.masked_fill(~seen, float("-inf"))
            if problem.mask.some_query_sees_nothing(queries, keys):
                # A row of -inf alone has no softmax: give it any finite scores and blank the results, which
                # also makes its gradients zero.
                blind = ~seen.any(dim=-1, keepdim=True)
                scores = scores.masked_fill(blind, 0.0)

    with ranges.annotate("attention softmax"):
        probabilities = torch.softmax(scores, dim=-1)
        if blind is not None:
            probabilities = probabilities.masked_fill(blind, 0.0)

    with ranges.annotate("attention value product"):
        out = probabilities.view(batch, key_heads, -1, keys).to(v.dtype) @ v
        out = out.view(batch, query_heads, queries, width)

    lse = None
    if return_lse:
        lse = torch.logsumexp(scores if scores.dtype == torch.float64 else scores.float(), dim=-1)
        if blind is not None:
            lse = lse.masked_fill(blind.squeeze(-1), float("-inf"))
    return finish(problem, out, lse, return_lse)
