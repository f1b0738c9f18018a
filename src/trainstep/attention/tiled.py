"""FlashAttention-2 in plain PyTorch: the same tiles and sums as the Triton kernels, readable and slow.

T. Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning" (arXiv 2307.08691),
Algorithm 1 forward and Algorithm 2 backward. No [S, T] matrix is ever held.
"""

from typing import Any

import torch
from torch import Tensor

from trainstep.attention.contract import finish, prepare, without_autocast
from trainstep.attention.differentiable import Attention, AttentionGradient, Passes
from trainstep.attention.masks import Mask
from trainstep.derivatives import refuse_forward_mode

TILE = 64
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _tiles(start: int, stop: int, size: int) -> range:
    """First indices of the tiles that cover [start, stop), on multiples of `size`."""
    return range(start // size * size, stop, size)


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, tile: int) -> tuple[Tensor, Tensor]:
    """Online-softmax forward: q [B, N, S, H], k/v [B, K, T, H] -> out [B, N, S, H], lse [B, N, S].

    out has q's dtype; lse is float32, float64 of float64. `tile`: queries and keys a tile.
    """
    batch, query_heads, queries, _ = q.shape
    key_heads, keys = k.shape[1], k.shape[2]
    wide = _accumulator(q.dtype)
    out = torch.empty_like(q)
    lse = torch.empty(batch, query_heads, queries, dtype=wide, device=q.device)
    for i in _tiles(0, queries, tile):
        rows = min(tile, queries - i)
        # [B, K, N/K, rows, H]: query heads beside the key/value head they share
        q_tile = q[:, :, i : i + rows].unflatten(1, (key_heads, -1)).to(wide)
        largest = q_tile.new_full(q_tile.shape[:-1], float("-inf"))
        total = torch.zeros_like(largest)
        acc = torch.zeros_like(q_tile)
        for j in _tiles(*mask.visible_keys(i, i + rows - 1, keys), tile):
            columns = min(tile, keys - j)
            k_tile = k[:, :, None, j : j + columns].to(wide)  # [B, K, 1, columns, H]
            v_tile = v[:, :, None, j : j + columns].to(wide)
            scores = (q_tile @ k_tile.transpose(-2, -1)) * scale  # [B, K, N/K, rows, columns]
            boundary = not mask.all_visible(i, i + rows - 1, j, j + columns - 1)
            if boundary:
                seen = mask.visible(rows, columns, device=q.device, first_query=i, first_key=j)
                scores = scores.masked_fill(~seen, float("-inf"))
            new_largest = torch.maximum(largest, scores.amax(-1))
            # A row that has seen no key yet keeps -inf; subtracting 0 instead avoids -inf - -inf.
            shift = new_largest.masked_fill(new_largest == float("-inf"), 0.0)
            p = torch.exp(scores - shift[..., None])
            if boundary:
                # 0 * NaN is NaN, so a value hidden from a row must not enter its product: bad values become 0
                # and the rows that do see them become NaN.
                finite = torch.isfinite(v_tile)
                bad_key = ~finite.all(-1).unsqueeze(-2)  # [B, K, 1, 1, columns]
                p = p.masked_fill(bad_key & seen, float("nan"))
                v_tile = v_tile.masked_fill(~finite, 0.0)
            rescale = torch.exp(largest - shift)
            total = total * rescale + p.sum(-1)
            acc = acc * rescale[..., None] + p @ v_tile
            largest = new_largest
        blind = total == 0
        o_tile = acc / total.masked_fill(blind, 1.0)[..., None]
        lse_tile = (largest + torch.log(total)).masked_fill(blind, float("-inf"))
        out[:, :, i : i + rows] = o_tile.flatten(1, 2).to(q.dtype)
        lse[:, :, i : i + rows] = lse_tile.flatten(1, 2)
    return out, lse


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    d_lse: Tensor | None,
    mask: Mask,
    scale: float,
    tile: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, in their dtypes, from the saved log-sum-exp and D = rowsum(O * dO) - dlse.

    d_out like out, d_lse like lse or None where it has no gradient.
    """
    key_heads, queries, keys = k.shape[1], q.shape[2], k.shape[2]
    wide = _accumulator(q.dtype)
    delta = (out.to(wide) * d_out.to(wide)).sum(-1)  # D, [B, N, S]
    if d_lse is not None:
        delta = delta - d_lse
    dq = torch.zeros_like(q, dtype=wide).unflatten(1, (key_heads, -1))  # [B, K, N/K, S, H]
    dk = torch.zeros_like(k, dtype=wide)
    dv = torch.zeros_like(v, dtype=wide)
    for i in _tiles(0, queries, tile):
        rows = slice(i, min(i + tile, queries))
        q_tile, do_tile, lse_tile, delta_tile = (
            x[:, :, rows].unflatten(1, (key_heads, -1)).to(wide) for x in (q, d_out, lse, delta)
        )
        for j in _tiles(*mask.visible_keys(i, rows.stop - 1, keys), tile):
            columns = slice(j, min(j + tile, keys))
            k_tile, v_tile = (x[:, :, None, columns].to(wide) for x in (k, v))
            scores = (q_tile @ k_tile.transpose(-2, -1)) * scale
            p = torch.exp(scores - lse_tile[..., None])
            ds = p * (do_tile @ v_tile.transpose(-2, -1) - delta_tile[..., None])
            if not mask.all_visible(i, rows.stop - 1, j, columns.stop - 1):
                seen = mask.visible(
                    rows.stop - i, columns.stop - j, device=q.device, first_query=i, first_key=j
                )
                p = p.masked_fill(~seen, 0.0)
                ds = ds.masked_fill(~seen, 0.0)
                k_tile = k_tile.masked_fill(~torch.isfinite(k_tile), 0.0)  # as v in the forward pass
            dv[:, :, columns] += (p.transpose(-2, -1) @ do_tile).sum(2)
            dq[:, :, :, rows] += (ds @ k_tile) * scale
            dk[:, :, columns] += (ds.transpose(-2, -1) @ q_tile).sum(2) * scale
    return dq.flatten(1, 2).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, tile: int) -> tuple[Tensor, Tensor]:
    with without_autocast(q.device):
        return forward(q, k, v, mask, scale, tile)


def _backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None,
    mask: Mask, scale: float, tile: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    with without_autocast(q.device):
        return backward(q, k, v, out, lse, d_out, d_lse, mask, scale, tile)


_PASSES = Passes("tiled attention", _forward, _backward)


class FlashAttention2(torch.autograd.Function):
    """`apply(q, k, v, is_causal=False)` on [B, S, H]; saves q, k, v, the output and one lse [B, S].

    The smallest form of the algorithm: one head, scale 1/sqrt(H), bottom-right causal mask. Under autocast q, k
    and v are saved as they came, and cast again in the backward pass. `torch.func` needs `attention` instead.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        problem = prepare(
            q,
            k,
            v,
            causal=is_causal,
            window=None,
            scale=None,
            alignment="bottom-right",
            name="tiled",
            dtypes=_DTYPES,
        )
        ctx.rule = (problem.mask, problem.scale, TILE)
        with without_autocast(q.device):
            out, lse = forward(problem.q, problem.k, problem.v, *ctx.rule)
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
    tile: int = TILE,
) -> Tensor | tuple[Tensor, Tensor]:
    """Tiled attention; the contract stands in `trainstep.attention`. `tile`: queries and keys a tile.

    Raises:
        ValueError: a call outside the contract.
        NotImplementedError: forward-mode differentiation.
    """
    problem = prepare(
        q,
        k,
        v,
        causal=causal,
        window=window,
        scale=scale,
        alignment=alignment,
        name="tiled",
        dtypes=_DTYPES,
    )
    refuse_forward_mode(_PASSES.name, *problem[:3])
    out, lse = Attention.apply(*problem[:3], _PASSES, (problem.mask, problem.scale, tile))
    return finish(problem, out, lse, return_lse)
