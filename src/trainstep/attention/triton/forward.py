"""FlashAttention-2 forward kernel (arXiv 2307.08691, Algorithm 1)."""

import triton
import triton.language as tl

from trainstep.attention.triton.primitives import (
    LN_2,
    is_finite,
    key_stages,
    load_tile,
    online_softmax_update,
    store_tile,
    visible,
)


@triton.jit
def _visit_keys(
    acc, largest, total, q, k_base, v_base, start, stop, first_query, num_queries, num_keys, offset, window,
    k_strides, v_strides, qk_scale,
    WIDTH: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, BOUNDARY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold the keys of [start, stop) into the running output, maximum and sum of one tile of queries."""
    query = first_query + tl.arange(0, BLOCK_Q)
    for first_key in tl.range(start, stop, BLOCK_K):
        k = load_tile(
            k_base, first_key, num_keys, k_strides[2], k_strides[3], BLOCK_K, BLOCK_H, WIDTH, BOUNDARY
        )  # [BLOCK_K, BLOCK_H]
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_Q, BLOCK_K]
        if BOUNDARY:
            key = first_key + tl.arange(0, BLOCK_K)
            seen = visible(
                query[:, None], key[None, :], num_queries, num_keys, offset, window, CAUSAL, WINDOWED
            )
            scores = tl.where(seen, scores, float("-inf"))
        p, largest, total, rescale = online_softmax_update(scores, largest, total, qk_scale, BOUNDARY)
        v = load_tile(
            v_base, first_key, num_keys, v_strides[2], v_strides[3], BLOCK_K, BLOCK_H, WIDTH, BOUNDARY
        )  # [BLOCK_K, BLOCK_H]
        if BOUNDARY:
            # 0 * NaN is NaN: a bad value must not reach, through p = 0, a row from which it is hidden. It is
            # replaced by 0, and the rows that do see it become NaN.
            finite = is_finite(v)
            bad_key = tl.min(finite.to(tl.int32), 1) == 0  # [BLOCK_K]
            p = tl.where(seen & bad_key[None, :], float("nan"), p)
            v = tl.where(finite, v, 0.0)
        acc = acc * rescale[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)  # [BLOCK_Q, BLOCK_H]
    return acc, largest, total


@triton.jit(do_not_specialize=["num_query_heads", "num_queries", "num_keys", "offset", "window"])
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, q_strides, k_strides, v_strides, out_strides,
    num_query_heads, group, num_queries, num_keys, offset, window, qk_scale,
    WIDTH: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_Q queries of one head, all the keys they see.

    q, out [B, N, S, WIDTH] and k, v [B, N / group, T, WIDTH] by their four strides; lse [B, N, S] contiguous.
    Grid: B * N * ceil(S / BLOCK_Q) on axis x alone, whose limit is 2^31 - 1 (y and z end at 65,535).
    """
    query_tiles = tl.cdiv(num_queries, BLOCK_Q)
    program = tl.program_id(0)
    # Last queries first: under a causal mask they have the most work and should not be the stragglers.
    first_query = (query_tiles - 1 - program % query_tiles) * BLOCK_Q
    batch_head = program // query_tiles
    batch = (batch_head // num_query_heads).to(tl.int64)
    head = (batch_head % num_query_heads).to(tl.int64)

    q_base = q_ptr + batch * q_strides[0] + head * q_strides[1]
    k_base = k_ptr + batch * k_strides[0] + head // group * k_strides[1]
    v_base = v_ptr + batch * v_strides[0] + head // group * v_strides[1]
    q = load_tile(
        q_base, first_query, num_queries, q_strides[2], q_strides[3], BLOCK_Q, BLOCK_H, WIDTH, True
    )  # [BLOCK_Q, BLOCK_H]

    acc = tl.zeros([BLOCK_Q, BLOCK_H], tl.float32)
    largest = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    a, b, c, d = key_stages(
        first_query, num_queries, num_keys, offset, window, CAUSAL, WINDOWED, BLOCK_Q, BLOCK_K
    )
    if WINDOWED:  # otherwise [a, b) is empty
        acc, largest, total = _visit_keys(
            acc, largest, total, q, k_base, v_base, a, b, first_query, num_queries, num_keys,
            offset, window, k_strides, v_strides, qk_scale,
            WIDTH, BLOCK_H, BLOCK_Q, BLOCK_K, CAUSAL, WINDOWED, True, PRECISION,
        )  # fmt: skip
    acc, largest, total = _visit_keys(
        acc, largest, total, q, k_base, v_base, b, c, first_query, num_queries, num_keys,
        offset, window, k_strides, v_strides, qk_scale,
        WIDTH, BLOCK_H, BLOCK_Q, BLOCK_K, CAUSAL, WINDOWED, False, PRECISION,
    )  # fmt: skip
    acc, largest, total = _visit_keys(
        acc, largest, total, q, k_base, v_base, c, d, first_query, num_queries, num_keys,
        offset, window, k_strides, v_strides, qk_scale,
        WIDTH, BLOCK_H, BLOCK_Q, BLOCK_K, CAUSAL, WINDOWED, True, PRECISION,
    )  # fmt: skip

    # O = acc / total, L = m + log(total) (Algorithm 1, lines 12 and 13); without any key: 0 and -inf.
    blind = total == 0.0
    out = acc / tl.where(blind, 1.0, total)[:, None]
    lse = tl.where(blind, float("-inf"), (largest + tl.log2(total)) * LN_2)
    out_base = out_ptr + batch * out_strides[0] + head * out_strides[1]
    store_tile(
        out_base, out, first_query, num_queries, out_strides[2], out_strides[3], BLOCK_Q, BLOCK_H, WIDTH
    )
    query = first_query + tl.arange(0, BLOCK_Q)
    lse_base = lse_ptr + batch_head.to(tl.int64) * num_queries
    tl.store(lse_base + query, lse, mask=query < num_queries)
