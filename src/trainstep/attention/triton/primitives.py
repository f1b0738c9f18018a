"""Steps of FlashAttention-2 on one tile, shared by the forward and backward kernels.

T. Dao, "FlashAttention-2" (arXiv 2307.08691). Scores stay in base 2: exp(x) = exp2(x * log2 e), and log2 e is
folded into the scale, so that an exponential costs one multiply-add and one ex2.

Every kernel splits its inner loop into three stages: a boundary before, the tiles all of whose entries count,
and a boundary after. Only boundary tiles compare indices; tiles outside the boundaries are never visited.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_tile(
    base, first_row, num_rows, stride_row, stride_col,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, CHECK_ROWS: tl.constexpr,
):  # fmt: skip
    """Rows first_row.. of a matrix [num_rows, WIDTH] as a tile [ROWS, COLUMNS], zero outside the matrix."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    # 64-bit products: rows * stride may pass 2^31 elements although both factors are small.
    pointers = base + tl.cast(first_row, tl.int64) * stride_row
    pointers += row[:, None].to(tl.int64) * stride_row + column[None, :].to(tl.int64) * stride_col
    if CHECK_ROWS:
        inside = (first_row + row)[:, None] < num_rows
        if COLUMNS != WIDTH:
            inside = inside & (column[None, :] < WIDTH)
        return tl.load(pointers, mask=inside, other=0.0)
    elif COLUMNS != WIDTH:
        return tl.load(pointers, mask=column[None, :] < WIDTH, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def store_tile(
    base, tile, first_row, num_rows, stride_row, stride_col,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the part of a tile [ROWS, COLUMNS] that lies inside the matrix [num_rows, WIDTH]."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    pointers = base + tl.cast(first_row, tl.int64) * stride_row
    pointers += row[:, None].to(tl.int64) * stride_row + column[None, :].to(tl.int64) * stride_col
    inside = ((first_row + row)[:, None] < num_rows) & (column[None, :] < WIDTH)
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=inside)


@triton.jit
def visible(query, key, num_queries, num_keys, offset, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr):
    """Entries that count, for broadcastable query and key indices: inside matrix, diagonal and window."""
    seen = (query < num_queries) & (key < num_keys)
    if CAUSAL:
        seen = seen & (key <= query + offset)
    if WINDOWED:
        seen = seen & (key > query + offset - window)
    return seen


@triton.jit
def split_stages(start, full_start, full_stop, stop, BLOCK: tl.constexpr):
    """Cut [start, stop) at multiples of BLOCK: boundary, full tiles inside [full_start, full_stop), boundary.

    Returns (a, b, c, d): [a, b) and [c, d) need index comparisons, [b, c) does not. Without a full tile
    everything lies in the last stage.
    """
    a = tl.maximum(start, 0) // BLOCK * BLOCK
    b = (tl.maximum(full_start, 0) + BLOCK - 1) // BLOCK * BLOCK
    c = tl.maximum(full_stop, 0) // BLOCK * BLOCK
    some_full = c > b
    return a, tl.where(some_full, b, a), tl.where(some_full, c, a), stop


@triton.jit
def key_stages(
    first_query, num_queries, num_keys, offset, window,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The keys that a tile of queries visits, as stages of `split_stages`."""
    last_query = tl.minimum(first_query + BLOCK_Q, num_queries) - 1
    start = first_query * 0
    full_start = start
    stop = start + num_keys
    full_stop = stop
    if CAUSAL:
        stop = tl.minimum(num_keys, last_query + offset + 1)
        full_stop = tl.minimum(num_keys, first_query + offset + 1)
    if WINDOWED:
        start = first_query + offset - window + 1
        full_start = last_query + offset - window + 1
    return split_stages(start, full_start, full_stop, stop, BLOCK_K)


@triton.jit
def query_stages(
    first_key, num_queries, num_keys, offset, window,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The queries that visit a tile of keys, as stages of `split_stages`."""
    last_key = tl.minimum(first_key + BLOCK_K, num_keys) - 1
    start = first_key * 0
    full_start = start
    stop = start + num_queries
    full_stop = stop
    if CAUSAL:
        start = first_key - offset
        full_start = last_key - offset
    if WINDOWED:
        stop = tl.minimum(num_queries, last_key - offset + window)
        full_stop = tl.minimum(num_queries, first_key - offset + window)
    return split_stages(start, full_start, full_stop, stop, BLOCK_Q)


@triton.jit
def online_softmax_update(scores, largest, total, qk_scale, MAY_BE_EMPTY: tl.constexpr):
    """One step of the online softmax (FlashAttention-2, Algorithm 1, line 9), in base 2.

    Args:
        scores: raw Q K^T [BLOCK_Q, BLOCK_K], -inf where hidden.
        largest: running maximum of the scaled scores [BLOCK_Q].
        total: running sum of exp2 [BLOCK_Q].
        qk_scale: scale * log2 e, positive.
        MAY_BE_EMPTY: some rows may have seen no key so far.

    Returns:
        p [BLOCK_Q, BLOCK_K], new maximum, new sum, and the factor that brings older sums to the new maximum.
    """
    new_largest = tl.maximum(largest, tl.max(scores, 1) * qk_scale)
    shift = new_largest
    if MAY_BE_EMPTY:
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # -inf - -inf is NaN
    p = tl.exp2(scores * qk_scale - shift[:, None])
    rescale = tl.exp2(largest - shift)
    return p, new_largest, total * rescale + tl.sum(p, 1), rescale


@triton.jit
def is_finite(x):
    """True where x is neither infinite nor NaN; compared in float32, exact for every narrower type."""
    return tl.abs(x.to(tl.float32)) < float("inf")
