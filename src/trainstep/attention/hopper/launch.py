"""Tensor maps, grids and buffers: from tensors to launches of the Hopper kernels."""

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from trainstep.attention.hopper.backward import backward_kernel, finish_dq_kernel
from trainstep.attention.hopper.forward import forward_kernel

LOG2_E = 1.4426950408889634
_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
_L2_BYTES = 32 * 2**20  # what a section's streamed tensors may fill of the 50 to 60 MB


class ForwardTile(NamedTuple):
    """How the forward kernel is built: rows a program are 64 * consumers."""

    keys: int
    consumers: int
    stages: int
    take_turns: bool


class BackwardTile(NamedTuple):
    """How the backward kernel is built."""

    queries: int
    keys: int
    q_stages: int
    do_stages: int


FORWARD = {64: ForwardTile(128, 3, 2, True), 128: ForwardTile(128, 2, 2, False)}
BACKWARD = {64: BackwardTile(128, 128, 3, 2), 128: BackwardTile(64, 128, 3, 2)}


def _loadable(x: Tensor) -> Tensor:
    """x [B, heads, S, H], copied if the tensor memory accelerator cannot read its strides."""
    aligned = x.data_ptr() % 16 == 0 and x.stride(3) == 1
    for dim in range(3):
        stride_bytes = x.stride(dim) * x.element_size()
        if x.shape[dim] > 1 and (stride_bytes % 16 or not 0 < stride_bytes < 2**40):
            aligned = False
    return x if aligned else x.contiguous()


class _Map(TensorDescriptor):
    """A tensor map whose numbers are right by construction. Triton checks each anew, which kept the host busy
    for half of a call."""

    def __post_init__(self) -> None:
        pass


@cache
def _tile_layout(rows: int, width: int, dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, width], _DTYPES[dtype])


_ROW_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


def _tile_map(x: Tensor, rows: int, length: int | None = None) -> TensorDescriptor:
    """Tensor map of tiles [1, 1, rows, H] of x [B, heads, S, H]; rows from `length` on read as 0, are not
    written."""
    batch, heads, size, width = x.shape
    # An axis of one element may have any stride; the map wants a multiple of 16 bytes.
    strides = [s if n > 1 else width for n, s in zip(x.shape[:3], x.stride()[:3], strict=True)]
    shape = [batch, heads, size if length is None else length, width]
    return _Map(x, shape, [*strides, 1], [1, 1, rows, width], _tile_layout(rows, width, x.dtype))


def _row_map(x: Tensor, rows: int) -> TensorDescriptor:
    """Tensor map of [1, rows] pieces of float32 x [B * heads, S]."""
    return _Map(x, list(x.shape), list(x.stride()), [1, rows], _ROW_LAYOUT)


def _section(instances: int, bytes_each: int, multiple: int = 1) -> int:
    """How many heads run side by side: the largest divisor of `instances` whose data stays in the L2."""
    wanted = max(multiple, _L2_BYTES // max(bytes_each, 1))
    return max(d for d in range(1, min(instances, wanted) + 1) if instances % d == 0)


def _visible_keys(queries: int, keys: int, causal: bool, offset: int) -> int:
    """Keys from this one on are seen by no row. The kernels read them as zeros, so nothing in them can
    matter."""
    return min(keys, max(queries + offset, 0)) if causal else keys


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, offset: int,
    tile: ForwardTile | None = None, section: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q [B, N, S, H], k/v [B, K, T, H] -> out [B, N, S, H] contiguous, lse [B, N, S] float32."""
    batch, heads, queries, width = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    tile = tile or FORWARD[width]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    seen = _visible_keys(queries, keys, causal, offset)
    if seen == 0:
        return out.zero_(), lse.fill_(-float("inf"))
    q, k, v = _loadable(q), _loadable(k), _loadable(v)
    group = heads // kv_heads
    row_tiles = -(-queries // (64 * tile.consumers))
    instances = batch * heads
    section = section or _section(instances, 4 * seen * width // group, group)
    with torch.cuda.device_of(q):
        forward_kernel[(row_tiles * instances,)](
            _tile_map(q, 64), _tile_map(k, tile.keys, seen), _tile_map(v, tile.keys, seen),
            _tile_map(out.view(1, instances, queries, width), 64), lse, heads, group, section, row_tiles,
            queries, seen, offset, scale * LOG2_E,
            KEYS=tile.keys, H=width, STAGES=tile.stages, CAUSAL=causal, CONSUMERS=tile.consumers,
            TAKE_TURNS=tile.take_turns, DTYPE=_DTYPES[q.dtype], num_warps=4,
        )  # fmt: skip
    return out, lse


@triton.jit(do_not_specialize=["queries", "padded"])
def statistics_kernel(
    out_ptr, d_out_ptr, lse_ptr, d_lse_ptr, lse2_ptr, delta_ptr, counters_ptr, d_out_strides, heads, queries, padded,
    H: tl.constexpr, ROWS: tl.constexpr, HAS_D_LSE: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(O * dO) - dlse and the log-sum-exp in base 2, both [B * N, padded] float32.

    dO is read through three strides: what `_loadable` gives has its columns side by side.

    A row without keys and a row past the end get lse2 = +inf, which makes every P of theirs 0. On the way the
    counters of the backward kernel become 0: a number a program and one more.
    """
    tiles = padded // ROWS
    instance = (tl.program_id(0) // tiles).to(tl.int64)
    row = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    exists = row < queries
    column = tl.arange(0, H)
    out = tl.load(
        out_ptr + (instance * queries + row[:, None]) * H + column[None, :], mask=exists[:, None], other=0.0
    )  # [ROWS, H]
    d_out = tl.load(
        d_out_ptr + instance // heads * d_out_strides[0] + instance % heads * d_out_strides[1]
        + row[:, None].to(tl.int64) * d_out_strides[2] + column[None, :],
        mask=exists[:, None], other=0.0,
    )  # [ROWS, H]  # fmt: skip
    tl.store(counters_ptr + tl.program_id(0), 0)
    tl.store(counters_ptr + tl.num_programs(0), 0, mask=tl.program_id(0) == 0)
    delta = tl.sum(out.to(tl.float32) * d_out.to(tl.float32), 1)
    if HAS_D_LSE:
        delta -= tl.load(d_lse_ptr + instance * queries + row, mask=exists, other=0.0)
    lse = tl.load(lse_ptr + instance * queries + row, mask=exists, other=-float("inf"))
    lse2 = tl.where(lse == -float("inf"), float("inf"), lse * 1.4426950408889634)
    tl.store(lse2_ptr + instance * padded + row, lse2)
    tl.store(delta_ptr + instance * padded + row, delta)


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None, *,
    causal: bool, scale: float, offset: int, tile: BackwardTile | None = None, section: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients dq [B, N, S, H], dk and dv [B, K, T, H], contiguous, in the inputs' dtype.

    Beside the outputs, a float32 workspace of dq's shape and two of lse's live during the call.
    """
    batch, heads, queries, width = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    tile = tile or BACKWARD[width]
    group = heads // kv_heads
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    seen = _visible_keys(queries, keys, causal, offset)
    make = torch.empty if seen == keys else torch.zeros  # keys that no row sees get no program
    dk = make(k.shape, dtype=k.dtype, device=k.device)
    dv = make(v.shape, dtype=v.dtype, device=v.device)
    if seen == 0:
        return dq.zero_(), dk, dv
    q, k, v, d_out = _loadable(q), _loadable(k), _loadable(v), _loadable(d_out)
    # They are, as the forward pass made them; torch.func.vmap may hand on one repeated by stride 0.
    out, lse = out.contiguous(), lse.contiguous()
    d_lse = None if d_lse is None else d_lse.float().contiguous()

    instances = batch * heads
    row_tiles = -(-queries // tile.queries)
    key_tiles = -(-seen // tile.keys)
    padded = row_tiles * tile.queries
    statistics = torch.empty(2, instances, padded, dtype=torch.float32, device=q.device)
    lse2, delta = statistics
    dq_sum = torch.empty(instances * padded * width, dtype=torch.float32, device=q.device)
    programs = instances * (padded // 64)  # of the statistics kernel, which zeroes the counters
    counters = torch.empty(programs + 1, dtype=torch.int32, device=q.device)
    section = section or _section(batch * kv_heads, 4 * queries * width * group)
    with torch.cuda.device_of(q):
        statistics_kernel[(programs,)](
            out, d_out, lse, lse if d_lse is None else d_lse, lse2, delta, counters, d_out.stride(), heads, queries,
            padded, H=width, ROWS=64, HAS_D_LSE=d_lse is not None,
        )  # fmt: skip
        backward_kernel[(key_tiles * batch * kv_heads,)](
            _tile_map(k, tile.keys, seen), _tile_map(v, tile.keys, seen), _tile_map(q, tile.queries),
            _tile_map(d_out, tile.queries), _row_map(lse2, tile.queries), _row_map(delta, tile.queries),
            _tile_map(dk, tile.keys, seen), _tile_map(dv, tile.keys, seen), dq_sum, counters[1:], counters,
            heads, kv_heads, group, section, key_tiles, queries, seen, offset, scale, scale * LOG2_E,
            QUERIES=tile.queries, KEYS=tile.keys, H=width, Q_STAGES=tile.q_stages, DO_STAGES=tile.do_stages,
            CAUSAL=causal, DTYPE=_DTYPES[q.dtype], num_warps=8,
        )  # fmt: skip
        finish_dq_kernel[(instances * row_tiles,)](
            dq_sum,
            dq,
            queries,
            row_tiles,
            offset,
            scale,
            QUERIES=tile.queries,
            H=width,
            CAUSAL=causal,
            num_warps=8,
        )
    return dq, dk, dv
