"""FlashAttention-2 backward kernels (arXiv 2307.08691, Algorithm 2), without atomics.

Three kernels: D = rowsum(O * dO) - dlse; dQ, one program for each tile of queries; dK and dV, one program for
each tile of keys. The latter two compute P = exp(S - L) again from the saved log-sum-exp L. With dP = dO V^T,

    dS = P * (dP - D),    dQ = scale * dS K,    dK = scale * dS^T Q,    dV = P^T dO.

The log-sum-exp's own gradient enters D because dL_i/dS_ij = P_ij. Computing S and dP twice costs 7 matrix
products instead of 5, but every output is written once by one program, in a fixed order: deterministic.
"""

import triton
import triton.language as tl

from trainstep.attention.triton.primitives import (
    LOG2_E,
    is_finite,
    key_stages,
    load_tile,
    query_stages,
    store_tile,
    visible,
)


@triton.jit(do_not_specialize=["num_query_heads", "num_queries"])
def delta_kernel(
    out_ptr, d_out_ptr, d_lse_ptr, delta_ptr, out_strides, d_out_strides, num_query_heads, num_queries,
    WIDTH: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_Q: tl.constexpr, HAS_D_LSE: tl.constexpr,
):  # fmt: skip
    """D = rowsum(O * dO) - dlse, [B, N, S] float32 (Algorithm 2, line 4)."""
    query_tiles = tl.cdiv(num_queries, BLOCK_Q)
    program = tl.program_id(0)
    first_query = program % query_tiles * BLOCK_Q
    batch_head = program // query_tiles
    batch = (batch_head // num_query_heads).to(tl.int64)
    head = (batch_head % num_query_heads).to(tl.int64)
    out_base = out_ptr + batch * out_strides[0] + head * out_strides[1]
    d_out_base = d_out_ptr + batch * d_out_strides[0] + head * d_out_strides[1]
    out = load_tile(
        out_base, first_query, num_queries, out_strides[2], out_strides[3], BLOCK_Q, BLOCK_H, WIDTH, True
    )
    d_out = load_tile(
        d_out_base,
        first_query,
        num_queries,
        d_out_strides[2],
        d_out_strides[3],
        BLOCK_Q,
        BLOCK_H,
        WIDTH,
        True,
    )
    delta = tl.sum(out.to(tl.float32) * d_out.to(tl.float32), 1)  # [BLOCK_Q]
    query = first_query + tl.arange(0, BLOCK_Q)
    row = batch_head.to(tl.int64) * num_queries
    if HAS_D_LSE:
        delta -= tl.load(d_lse_ptr + row + query, mask=query < num_queries, other=0.0)
    tl.store(delta_ptr + row + query, delta, mask=query < num_queries)


@triton.jit
def _dq_visit_keys(
    dq, q, d_out, lse, delta, k_base, v_base, start, stop, first_query, num_queries, num_keys, offset, window,
    k_strides, v_strides, qk_scale,
    WIDTH: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, BOUNDARY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add dS K over the keys of [start, stop) to dQ / scale of one tile of queries."""
    query = first_query + tl.arange(0, BLOCK_Q)
    for first_key in tl.range(start, stop, BLOCK_K):
        k = load_tile(
            k_base, first_key, num_keys, k_strides[2], k_strides[3], BLOCK_K, BLOCK_H, WIDTH, BOUNDARY
        )  # [BLOCK_K, BLOCK_H]
        v = load_tile(
            v_base, first_key, num_keys, v_strides[2], v_strides[3], BLOCK_K, BLOCK_H, WIDTH, BOUNDARY
        )  # [BLOCK_K, BLOCK_H]
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_Q, BLOCK_K]
        p = tl.exp2(scores * qk_scale - lse[:, None])
        dp = tl.dot(d_out, tl.trans(v), input_precision=PRECISION)  # [BLOCK_Q, BLOCK_K]
        ds = p * (dp - delta[:, None])
        if BOUNDARY:
            key = first_key + tl.arange(0, BLOCK_K)
            seen = visible(
                query[:, None], key[None, :], num_queries, num_keys, offset, window, CAUSAL, WINDOWED
            )
            ds = tl.where(seen, ds, 0.0)
            k = tl.where(is_finite(k), k, 0.0)  # 0 * NaN; rows that see the bad key have a NaN score already
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)  # [BLOCK_Q, BLOCK_H]
    return dq


@triton.jit(do_not_specialize=["num_query_heads", "num_queries", "num_keys", "offset", "window"])
def dq_kernel(
    q_ptr, k_ptr, v_ptr, d_out_ptr, lse_ptr, delta_ptr, dq_ptr,
    q_strides, k_strides, v_strides, d_out_strides, dq_strides,
    num_query_heads, group, num_queries, num_keys, offset, window, scale,
    WIDTH: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: dQ of BLOCK_Q queries of one head. Grid as in the forward kernel."""
    query_tiles = tl.cdiv(num_queries, BLOCK_Q)
    program = tl.program_id(0)
    first_query = (query_tiles - 1 - program % query_tiles) * BLOCK_Q
    batch_head = program // query_tiles
    batch = (batch_head // num_query_heads).to(tl.int64)
    head = (batch_head % num_query_heads).to(tl.int64)

    q_base = q_ptr + batch * q_strides[0] + head * q_strides[1]
    d_out_base = d_out_ptr + batch * d_out_strides[0] + head * d_out_strides[1]
    k_base = k_ptr + batch * k_strides[0] + head // group * k_strides[1]
    v_base = v_ptr + batch * v_strides[0] + head // group * v_strides[1]
    q = load_tile(
        q_base, first_query, num_queries, q_strides[2], q_strides[3], BLOCK_Q, BLOCK_H, WIDTH, True
    )  # [BLOCK_Q, BLOCK_H]
    d_out = load_tile(
        d_out_base,
        first_query,
        num_queries,
        d_out_strides[2],
        d_out_strides[3],
        BLOCK_Q,
        BLOCK_H,
        WIDTH,
        True,
    )  # [BLOCK_Q, BLOCK_H]
    query = first_query + tl.arange(0, BLOCK_Q)
    row = batch_head.to(tl.int64) * num_queries
    lse = tl.load(lse_ptr + row + query, mask=query < num_queries, other=0.0) * LOG2_E  # [BLOCK_Q]
    delta = tl.load(delta_ptr + row + query, mask=query < num_queries, other=0.0)  # [BLOCK_Q]

    qk_scale = scale * LOG2_E
    dq = tl.zeros([BLOCK_Q, BLOCK_H], tl.float32)
    a, b, c, d = key_stages(
        first_query, num_queries, num_keys, offset, window, CAUSAL, WINDOWED, BLOCK_Q, BLOCK_K
    )
    if WINDOWED:  # otherwise [a, b) is empty
        dq = _dq_visit_keys(
            dq, q, d_out, lse, delta, k_base, v_base, a, b, first_query, num_queries, num_keys,
            offset, window, k_strides, v_strides, qk_scale,
            WIDTH, BLOCK_H, BLOCK_Q, BLOCK_K, CAUSAL, WINDOWED, True, PRECISION,
        )  # fmt: skip
    dq = _dq_visit_keys(
        dq, q, d_out, lse, delta, k_base, v_base, b, c, first_query, num_queries, num_keys,
        offset, window, k_strides, v_strides, qk_scale,
        WIDTH, BLOCK_H, BLOCK_Q, BLOCK_K, CAUSAL, WINDOWED, False, PRECISION,
    )  # fmt: skip
    dq = _dq_visit_keys(
        dq, q, d_out, lse, delta, k_base, v_base, c, d, first_query, num_queries, num_keys,
        offset, window, k_strides, v_strides, qk_scale,
        WIDTH, BLOCK_H, BLOCK_Q, BLOCK_K, CAUSAL, WINDOWED, True, PRECISION,
    )  # fmt: skip
    dq_base = dq_ptr + batch * dq_strides[0] + head * dq_strides[1]
    store_tile(
        dq_base, dq * scale, first_query, num_queries, dq_strides[2], dq_strides[3], BLOCK_Q, BLOCK_H, WIDTH
    )


@triton.jit
def _dkdv_visit_queries(
    dk, dv, k, v, q_base, d_out_base, lse_base, delta_base, start, stop, first_key, num_queries, num_keys,
    offset, window, q_strides, d_out_strides, qk_scale,
    WIDTH: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, BOUNDARY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add dS^T Q and P^T dO over the queries of [start, stop) to dK / scale and dV of one tile of keys."""
    key = first_key + tl.arange(0, BLOCK_K)
    for first_query in tl.range(start, stop, BLOCK_Q):
        query = first_query + tl.arange(0, BLOCK_Q)
        q = load_tile(
            q_base, first_query, num_queries, q_strides[2], q_strides[3], BLOCK_Q, BLOCK_H, WIDTH, BOUNDARY
        )  # [BLOCK_Q, BLOCK_H]
        d_out = load_tile(
            d_out_base, first_query, num_queries, d_out_strides[2], d_out_strides[3],
            BLOCK_Q, BLOCK_H, WIDTH, BOUNDARY,
        )  # [BLOCK_Q, BLOCK_H]  # fmt: skip
        if BOUNDARY:
            lse = tl.load(lse_base + query, mask=query < num_queries, other=0.0) * LOG2_E  # [BLOCK_Q]
            delta = tl.load(delta_base + query, mask=query < num_queries, other=0.0)  # [BLOCK_Q]
        else:
            lse = tl.load(lse_base + query) * LOG2_E
            delta = tl.load(delta_base + query)
        # Transposed scores, so that P^T and dS^T come out as the left operands they are needed as.
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [BLOCK_K, BLOCK_Q]
        p = tl.exp2(scores * qk_scale - lse[None, :])
        dp = tl.dot(v, tl.trans(d_out), input_precision=PRECISION)  # [BLOCK_K, BLOCK_Q]
        ds = p * (dp - delta[None, :])
        if BOUNDARY:
            seen = visible(
                query[None, :], key[:, None], num_queries, num_keys, offset, window, CAUSAL, WINDOWED
            )
            p = tl.where(seen, p, 0.0)
            ds = tl.where(seen, ds, 0.0)
        dv = tl.dot(p.to(d_out.dtype), d_out, dv, input_precision=PRECISION)  # [BLOCK_K, BLOCK_H]
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)  # [BLOCK_K, BLOCK_H]
    return dk, dv


@triton.jit(do_not_specialize=["num_key_heads", "num_queries", "num_keys", "offset", "window"])
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, d_out_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    q_strides, k_strides, v_strides, d_out_strides, dk_strides, dv_strides,
    num_key_heads, group, num_queries, num_keys, offset, window, scale,
    WIDTH: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: dK and dV of BLOCK_K keys of one key/value head, over all query heads that share it.

    Grid: B * K * ceil(T / BLOCK_K) on axis x. First keys first: under a causal mask they have the most work.
    """
    key_tiles = tl.cdiv(num_keys, BLOCK_K)
    program = tl.program_id(0)
    first_key = program % key_tiles * BLOCK_K
    batch_head = program // key_tiles
    batch = (batch_head // num_key_heads).to(tl.int64)
    key_head = (batch_head % num_key_heads).to(tl.int64)

    k_base = k_ptr + batch * k_strides[0] + key_head * k_strides[1]
    v_base = v_ptr + batch * v_strides[0] + key_head * v_strides[1]
    k = load_tile(k_base, first_key, num_keys, k_strides[2], k_strides[3], BLOCK_K, BLOCK_H, WIDTH, True)
    v = load_tile(v_base, first_key, num_keys, v_strides[2], v_strides[3], BLOCK_K, BLOCK_H, WIDTH, True)

    qk_scale = scale * LOG2_E
    dk = tl.zeros([BLOCK_K, BLOCK_H], tl.float32)
    dv = tl.zeros([BLOCK_K, BLOCK_H], tl.float32)
    a, b, c, d = query_stages(
        first_key, num_queries, num_keys, offset, window, CAUSAL, WINDOWED, BLOCK_Q, BLOCK_K
    )
    for member in tl.range(0, group):
        head = key_head * group + member
        q_base = q_ptr + batch * q_strides[0] + head * q_strides[1]
        d_out_base = d_out_ptr + batch * d_out_strides[0] + head * d_out_strides[1]
        row = (batch * num_key_heads * group + head) * num_queries
        lse_base = lse_ptr + row
        delta_base = delta_ptr + row
        if CAUSAL:  # otherwise [a, b) is empty
            dk, dv = _dkdv_visit_queries(
                dk, dv, k, v, q_base, d_out_base, lse_base, delta_base, a, b, first_key, num_queries,
                num_keys, offset, window, q_strides, d_out_strides, qk_scale,
                WIDTH, BLOCK_H, BLOCK_Q, BLOCK_K, CAUSAL, WINDOWED, True, PRECISION,
            )  # fmt: skip
        dk, dv = _dkdv_visit_queries(
            dk, dv, k, v, q_base, d_out_base, lse_base, delta_base, b, c, first_key, num_queries, num_keys,
            offset, window, q_strides, d_out_strides, qk_scale,
            WIDTH, BLOCK_H, BLOCK_Q, BLOCK_K, CAUSAL, WINDOWED, False, PRECISION,
        )  # fmt: skip
        dk, dv = _dkdv_visit_queries(
            dk, dv, k, v, q_base, d_out_base, lse_base, delta_base, c, d, first_key, num_queries, num_keys,
            offset, window, q_strides, d_out_strides, qk_scale,
            WIDTH, BLOCK_H, BLOCK_Q, BLOCK_K, CAUSAL, WINDOWED, True, PRECISION,
        )  # fmt: skip
    dk_base = dk_ptr + batch * dk_strides[0] + key_head * dk_strides[1]
    dv_base = dv_ptr + batch * dv_strides[0] + key_head * dv_strides[1]
    store_tile(
        dk_base, dk * scale, first_key, num_keys, dk_strides[2], dk_strides[3], BLOCK_K, BLOCK_H, WIDTH
    )
    store_tile(dv_base, dv, first_key, num_keys, dv_strides[2], dv_strides[3], BLOCK_K, BLOCK_H, WIDTH)
