"""Grids, strides and buffers: from tensors to launches of the Triton kernels.

Inputs are read through their own strides, whatever those are; outputs are allocated by `torch.empty_like`, so
that a dense input's layout is kept.
"""

from functools import partial

import torch
from torch import Tensor

from trainstep.attention.triton import backward as backward_kernels
from trainstep.attention.triton import tuning
from trainstep.attention.triton.forward import forward_kernel
from trainstep.attention.triton.primitives import LOG2_E
from trainstep.attention.triton.tuning import Tile
from trainstep.interpreter import holds_bare_bits, interpreted

_LARGEST_GRID = 2**31 - 1  # axis x; all programs are on it, because y and z end at 65,535


def _grid(batch: int, heads: int, rows: int, rows_a_tile: int) -> tuple[int]:
    programs = batch * heads * -(-rows // rows_a_tile)
    if programs > _LARGEST_GRID:
        raise ValueError(
            f"{batch} x {heads} heads of {rows} rows need {programs} programs, more than a grid holds"
        )
    return (programs,)


def _check_device(q: Tensor) -> None:
    if q.device.type != "cuda" and not interpreted():
        raise ValueError(f"triton attention needs CUDA tensors, got {q.device} without TRITON_INTERPRET=1")


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    window: int | None,
    scale: float,
    offset: int,
    tf32: bool = False,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """q [B, N, S, H], k/v [B, K, T, H] -> out like q, lse [B, N, S] float32.

    `tile` overrides the tuned shape. `tf32` rounds float32 operands of matrix products to TF32.
    """
    _check_device(q)
    if holds_bare_bits(q):
        out, lse = forward(
            q.float(),
            k.float(),
            v.float(),
            causal=causal,
            window=window,
            scale=scale,
            offset=offset,
            tile=tile,
        )
        return out.to(q.dtype), lse
    batch, query_heads, queries, width = q.shape
    key_heads, keys = k.shape[1], k.shape[2]
    out = torch.empty_like(q)
    lse = torch.empty(batch, query_heads, queries, dtype=torch.float32, device=q.device)

    def run(tile: Tile) -> None:
        forward_kernel[_grid(batch, query_heads, queries, tile.queries)](
            q, k, v, out, lse, q.stride(), k.stride(), v.stride(), out.stride(),
            query_heads, query_heads // key_heads, queries, keys, offset, window or 0, scale * LOG2_E.value,
            WIDTH=width, BLOCK_H=tuning.padded_width(width),
            BLOCK_Q=tile.queries, BLOCK_K=tile.keys, CAUSAL=causal, WINDOWED=window is not None,
            PRECISION="tf32" if tf32 else "ieee", num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    with torch.cuda.device_of(q):
        run(tile or tuning.choose("forward", width, tuning.kind_of(q.dtype, tf32), run))
    return out, lse


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    d_lse: Tensor | None,
    *,
    causal: bool,
    window: int | None,
    scale: float,
    offset: int,
    tf32: bool = False,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients dq like q, dk like k, dv like v; `tile` overrides both passes' tuned shapes."""
    _check_device(q)
    if holds_bare_bits(q):
        dq, dk, dv = backward(
            q.float(), k.float(), v.float(), out.float(), lse, d_out.float(), d_lse,
            causal=causal, window=window, scale=scale, offset=offset, tile=tile,
        )  # fmt: skip
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
    batch, query_heads, queries, width = q.shape
    key_heads, keys = k.shape[1], k.shape[2]
    delta = torch.empty_like(lse)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    # It is, as the forward pass made it; torch.func.vmap may hand on one repeated by stride 0.
    lse = lse.contiguous()
    d_lse = None if d_lse is None else d_lse.float().contiguous()
    rows = tuning.DELTA_TILE.queries
    shape = {"WIDTH": width, "BLOCK_H": tuning.padded_width(width)}
    options = {
        **shape,
        "CAUSAL": causal,
        "WINDOWED": window is not None,
        "PRECISION": "tf32" if tf32 else "ieee",
    }
    problem = (query_heads // key_heads, queries, keys, offset, window or 0, scale)

    def run_dq(tile: Tile) -> None:
        backward_kernels.dq_kernel[_grid(batch, query_heads, queries, tile.queries)](
            q, k, v, d_out, lse, delta, dq,
            q.stride(), k.stride(), v.stride(), d_out.stride(), dq.stride(), query_heads, *problem,
            BLOCK_Q=tile.queries, BLOCK_K=tile.keys, num_warps=tile.warps, num_stages=tile.stages, **options,
        )  # fmt: skip

    def run_dkdv(tile: Tile) -> None:
        backward_kernels.dkdv_kernel[_grid(batch, key_heads, keys, tile.keys)](
            q, k, v, d_out, lse, delta, dk, dv,
            q.stride(), k.stride(), v.stride(), d_out.stride(), dk.stride(), dv.stride(), key_heads, *problem,
            BLOCK_Q=tile.queries, BLOCK_K=tile.keys, num_warps=tile.warps, num_stages=tile.stages, **options,
        )  # fmt: skip

    with torch.cuda.device_of(q):
        backward_kernels.delta_kernel[_grid(batch, query_heads, queries, rows)](
            out, d_out, delta if d_lse is None else d_lse, delta, out.stride(), d_out.stride(),
            query_heads, queries, BLOCK_Q=rows, HAS_D_LSE=d_lse is not None, **shape,
        )  # fmt: skip
        choose = partial(tuning.choose, width=width, kind=tuning.kind_of(q.dtype, tf32))
        run_dq(tile or choose("dq", run=run_dq))
        run_dkdv(tile or choose("dkdv", run=run_dkdv))
    return dq, dk, dv
