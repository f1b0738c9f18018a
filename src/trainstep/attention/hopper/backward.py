"""Backward kernel: dK, dV and dQ in one pass over the scores, five products a tile.

One program owns KEYS keys and values of one key/value head and streams the query rows that see them. With the
key tile down the rows, every product suits wgmma (FlashAttention-2, Algorithm 2; notation of its section
3.2):

    S^T  = K Q^T                  P^T  = exp2(scale_log2 * S^T - lse2)       [KEYS, QUERIES]
    dV  += P^T dO                 P^T straight from registers                [KEYS, H]
    dP^T = V dO^T                 dS^T = P^T * (dP^T - delta)                [KEYS, QUERIES]
    dK  += dS^T Q                 dS^T straight from registers               [KEYS, H]
    dQ   = dS K                   dS through shared memory                   [QUERIES, H]

dQ is summed over the key tiles in device memory, in float32 and in the order of the key tiles: a query tile
carries a counter, and key tile j adds once the counter reads j. So the sum does not depend on timing. Three
warps keep that order (`take_turns`, `pass_turns`) beside the eight that compute, which only wait on an
mbarrier, complete by then. Query tiles run from the last to the first, so that the order costs a short ramp
at the start and nothing after it.

Programs take their tile from a counter in the order of their arrival, so that a program only ever waits for
programs that already run: no deadlock, whatever the order of dispatch.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from trainstep.attention.hopper.primitives import (
    accumulator_layout,
    allocate_barriers,
    any_non_finite,
    left_operand_layout,
    load_acquire,
    store_release,
    visible,
    write_finite,
)


@gluon.constexpr_function
def dq_layout(QUERIES, H):
    """Accumulator of dQ [QUERIES, H] over eight warps: 64 rows leave the columns to be shared by two
    warpgroups."""
    return accumulator_layout(4, 2, H // 2) if QUERIES == 64 else accumulator_layout(8, 1, H)


@gluon.jit
def by_thread(dq, QUERIES: gl.constexpr, H: gl.constexpr):
    """dQ [QUERIES, H] as [QUERIES * H / 1024, 1024] where each thread holds four neighbours of each row.

    Nothing moves: the workspace simply stores the tile in the order of the accumulator's registers, so that a
    warp's additions to it are whole 128-byte lines.
    """
    FLAT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, 8], [1, 0])
    if QUERIES == 64:
        dq = dq.reshape([4, 2, 8, 2, H // 16, 4, 2]).permute((4, 3, 0, 2, 5, 1, 6))
    else:
        dq = dq.reshape([8, 2, 8, H // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5))
    return gl.convert_layout(dq.reshape([QUERIES * H // 1024, 1024]), FLAT, assert_trivial=True)


@gluon.jit
def from_thread_order(flat, QUERIES: gl.constexpr, H: gl.constexpr):
    """The inverse of `by_thread`: [QUERIES * H / 1024, 1024] to [QUERIES, H]."""
    if QUERIES == 64:
        dq = flat.reshape([H // 16, 2, 4, 8, 4, 2, 2]).permute((2, 5, 3, 1, 0, 4, 6))
    else:
        dq = flat.reshape([H // 8, 8, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5))
    return dq.reshape([QUERIES, H])


@gluon.jit
def flat_offsets(QUERIES: gl.constexpr, H: gl.constexpr):
    """Offsets [QUERIES * H / 1024, 1024] of one tile in the workspace."""
    FLAT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, 8], [1, 0])
    down = gl.arange(0, QUERIES * H // 1024, gl.SliceLayout(1, FLAT))
    across = gl.arange(0, 1024, gl.SliceLayout(0, FLAT))
    return gl.expand_dims(down, 1) * 1024 + gl.expand_dims(across, 0)


@gluon.jit
def next_tile(head, row_tile, last_tile, steps_a_head):
    """The query tile after this one: one up, or the last one of the group's next head."""
    wrap = row_tile == last_tile - steps_a_head + 1
    return gl.where(wrap, head + 1, head), gl.where(wrap, last_tile, row_tile - 1)


@gluon.jit
def load_tiles(
    k_desc, v_desc, q_desc, do_desc, lse2_desc, delta_desc, tiles, bars, work,
    QUERIES: gl.constexpr, KEYS: gl.constexpr, H: gl.constexpr, Q_STAGES: gl.constexpr,
    DO_STAGES: gl.constexpr, ORDER: gl.constexpr,
):  # fmt: skip
    """The loading warp: K and V once; then Q with lse2, and dO with delta, for every step.

    Step t done means that dV_t and dQ_t are complete, and with them everything before, dK_{t-1} too: dO_t and
    Q_{t-1} have been read.
    """
    k_ring, v_ring, q_ring, do_ring, lse2_ring, delta_ring, _ = tiles
    k_tile = k_ring.index(0)
    v_tile = v_ring.index(0)
    kv_ready, q_ready, do_ready, _, done, _ = bars
    batch, kv_head, key_tile, group, heads, last_tile, steps_a_head, steps = work
    mbarrier.expect(kv_ready.index(0), KEYS * H * 2)
    tma.async_copy_global_to_shared(
        k_desc, [batch, kv_head, key_tile * KEYS, 0], kv_ready.index(0), k_tile.reshape([1, 1, KEYS, H])
    )
    mbarrier.expect(kv_ready.index(1), KEYS * H * 2)
    tma.async_copy_global_to_shared(
        v_desc, [batch, kv_head, key_tile * KEYS, 0], kv_ready.index(1), v_tile.reshape([1, 1, KEYS, H])
    )
    head = kv_head * group
    row_tile = last_tile
    for t in range(steps):
        first_row = row_tile * QUERIES
        instance = batch * heads + head
        stage = t % Q_STAGES
        before = t - Q_STAGES + 1  # the step whose end frees this buffer of Q
        mbarrier.wait(
            done.index((before + ORDER) % ORDER), ((before + ORDER) // ORDER + 1) & 1, pred=before > 0
        )
        mbarrier.expect(q_ready.index(stage), QUERIES * H * 2 + QUERIES * 4)
        tma.async_copy_global_to_shared(
            q_desc,
            [batch, head, first_row, 0],
            q_ready.index(stage),
            q_ring.index(stage).reshape([1, 1, QUERIES, H]),
        )
        tma.async_copy_global_to_shared(
            lse2_desc, [instance, first_row], q_ready.index(stage), lse2_ring.index(stage)
        )
        stage = t % DO_STAGES
        before = t - DO_STAGES
        mbarrier.wait(
            done.index((before + ORDER) % ORDER), ((before + ORDER) // ORDER + 1) & 1, pred=before >= 0
        )
        mbarrier.expect(do_ready.index(stage), QUERIES * H * 2 + QUERIES * 4)
        tma.async_copy_global_to_shared(
            do_desc, [batch, head, first_row, 0], do_ready.index(stage),
            do_ring.index(stage).reshape([1, 1, QUERIES, H]),
        )  # fmt: skip
        tma.async_copy_global_to_shared(
            delta_desc, [instance, first_row], do_ready.index(stage), delta_ring.index(stage)
        )
        head, row_tile = next_tile(head, row_tile, last_tile, steps_a_head)


@gluon.jit
def take_turns(counters, bars, work, row_tiles, ORDER: gl.constexpr):
    """One warp: tell the computing warps when the key tiles before ours have added to a query tile."""
    _, _, _, turn, _, passed = bars
    batch, kv_head, key_tile, group, heads, last_tile, steps_a_head, steps = work
    head = kv_head * group
    row_tile = last_tile
    for t in range(steps):
        counter = counters + (batch * heads + head) * row_tiles + row_tile
        while load_acquire(counter) != key_tile:
            pass
        # At most ORDER turns ahead of `pass_turns`.
        mbarrier.wait(passed.index(t % ORDER), (t // ORDER + 1) & 1)
        mbarrier.arrive(turn.index(t % ORDER), count=1)
        head, row_tile = next_tile(head, row_tile, last_tile, steps_a_head)


@gluon.jit
def pass_turns(
    counters, bars, work, row_tiles, FIRST: gl.constexpr, PASSERS: gl.constexpr, ORDER: gl.constexpr
):
    """One of PASSERS warps: once our additions to a query tile are issued, let the next key tile have it.

    The release waits for the program's additions to arrive in the L2; with one warp for the even steps and
    one for the odd ones two such waits can overlap.
    """
    _, _, _, _, done, passed = bars
    batch, kv_head, key_tile, group, heads, last_tile, steps_a_head, steps = work
    head = kv_head * group
    row_tile = last_tile
    for _skipped in gl.static_range(FIRST):
        head, row_tile = next_tile(head, row_tile, last_tile, steps_a_head)
    for t in range(FIRST, steps, PASSERS):
        counter = counters + (batch * heads + head) * row_tiles + row_tile
        mbarrier.wait(done.index(t % ORDER), (t // ORDER) & 1)
        store_release(counter, key_tile + 1)
        mbarrier.arrive(passed.index(t % ORDER), count=1)
        for _others in gl.static_range(PASSERS):
            head, row_tile = next_tile(head, row_tile, last_tile, steps_a_head)


@gluon.jit
def opaque_zero(t):
    """A zero that the compiler cannot see through, made anew each step.

    Indexing a fixed tile with it keeps the descriptors of that tile's products out of the loop's invariants,
    which would fill some 70 registers of each thread and spill.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [t], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def accumulate_gradients(
    dk_desc, dv_desc, dq_sum, tiles, bars, work, row_tiles, scale, scale_log2, offset, key_length,
    QUERIES: gl.constexpr, KEYS: gl.constexpr, H: gl.constexpr, Q_STAGES: gl.constexpr,
    DO_STAGES: gl.constexpr, ORDER: gl.constexpr, CAUSAL: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """The eight computing warps. Products are issued in the order dP_t, dV_t, dQ_t, dK_t, S_{t+1}.

    exp2 of S_t runs beside dP_t, dS_t beside dV_t, and the additions to dQ beside dK_t and S_{t+1}. Waiting
    for S_t before dP_t is issued, and for dV_t before dQ_t, frees the operands' registers (240 a thread are
    all in use) and keeps ptxas from serialising the products, which it does when it cannot tell which are
    complete. The compiler puts a barrier of all eight warps on either side of every arrival, hence the single
    one a step.
    """
    S_LAYOUT: gl.constexpr = accumulator_layout(8, 1, QUERIES)
    KV_LAYOUT: gl.constexpr = accumulator_layout(8, 1, H)
    Q_LAYOUT: gl.constexpr = dq_layout(QUERIES, H)
    LEFT: gl.constexpr = left_operand_layout(KV_LAYOUT)
    COLUMN: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    k_ring, v_ring, q_ring, do_ring, lse2_ring, delta_ring, ds_ring = tiles
    k_tile = k_ring.index(0)
    kv_ready, q_ready, do_ready, turn, done, _ = bars
    batch, kv_head, key_tile, group, heads, last_tile, steps_a_head, steps = work

    keys = key_tile * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, S_LAYOUT))
    last_key = key_tile * KEYS + KEYS - 1
    offsets = flat_offsets(QUERIES, H)
    score_zeros = gl.zeros([KEYS, QUERIES], gl.float32, S_LAYOUT)
    dq_zeros = gl.zeros([QUERIES, H], gl.float32, Q_LAYOUT)

    mbarrier.wait(kv_ready.index(0), 0)
    mbarrier.wait(kv_ready.index(1), 0)
    # Under a mask, dS = 0 must not meet a bad key (0 * NaN in dQ) nor a bad value (in dP, then in dS). Rows that
    # see a bad key have a NaN log-sum-exp, and rows that see a bad value a NaN delta: they need nothing more. So
    # bad values become 0, and dQ of masked tiles is taken with a second copy of K, in which bad keys are 0.
    clean = 0  # which copy of K
    if CAUSAL:
        bad = any_non_finite(k_ring.index(0), 8, DTYPE) | any_non_finite(v_ring.index(0), 8, DTYPE)
        if bad:
            write_finite(k_ring.index(0), k_ring.index(1), 8)
            write_finite(v_ring.index(0), v_ring.index(0), 8)
            fence_async_shared()
        clean = bad.to(gl.int32)
        gl.thread_barrier()
    mbarrier.wait(q_ready.index(0), 0)
    # Complete before the loop: zeroing dK and dV beside a product in flight would make ptxas serialise them
    # all.
    s = warpgroup_mma(k_tile, q_ring.index(0).permute((1, 0)), score_zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_init(warpgroup_mma_wait(0, deps=[s]))
    dk = warpgroup_mma_init(gl.zeros([KEYS, H], gl.float32, KV_LAYOUT))
    dv = gl.zeros([KEYS, H], gl.float32, KV_LAYOUT)
    head = kv_head * group
    row_tile = last_tile
    # A loop that might not run would merge dK in flight with its zeros: again ptxas would serialise.
    gl.assume(steps > 0)
    for t in range(steps):
        zero = opaque_zero(t)
        k_tile = k_ring.index(zero)
        v_tile = v_ring.index(zero)
        ds_tile = ds_ring.index(zero)
        q_tile = q_ring.index(t % Q_STAGES)  # [QUERIES, H]
        do_tile = do_ring.index(t % DO_STAGES)  # [QUERIES, H]

        mbarrier.wait(do_ready.index(t % DO_STAGES), (t // DO_STAGES) & 1)
        s, dk = warpgroup_mma_wait(0, deps=[s, dk])
        dp = warpgroup_mma(v_tile, do_tile.permute((1, 0)), score_zeros, use_acc=False, is_async=True)
        lse2 = lse2_ring.index(t % Q_STAGES).reshape([QUERIES]).load(COLUMN)
        masked = (row_tile * QUERIES + offset < last_key and CAUSAL) or last_key >= key_length
        if masked:
            rows = row_tile * QUERIES + gl.arange(0, QUERIES, COLUMN)
            seen = visible(gl.expand_dims(rows, 0), gl.expand_dims(keys, 1), offset, key_length, CAUSAL)
            s = gl.where(seen, s, -float("inf"))
        p = gl.exp2(s * scale_log2 - gl.expand_dims(lse2, 0))  # [KEYS, QUERIES]
        dv = warpgroup_mma(gl.convert_layout(p.to(DTYPE), LEFT), do_tile, dv, is_async=True)

        dp = warpgroup_mma_wait(1, deps=[dp])
        delta = delta_ring.index(t % DO_STAGES).reshape([QUERIES]).load(COLUMN)
        ds = (p * (dp - gl.expand_dims(delta, 0))).to(DTYPE)
        ds_tile.store(ds)
        fence_async_shared()
        gl.thread_barrier()
        dv = warpgroup_mma_wait(0, deps=[dv])
        dq_keys = k_tile
        if CAUSAL:
            dq_keys = k_ring.index(gl.where(masked, clean, 0))
        dq = warpgroup_mma(ds_tile.permute((1, 0)), dq_keys, dq_zeros, use_acc=False, is_async=True)
        dk = warpgroup_mma(gl.convert_layout(ds, LEFT), q_tile, dk, is_async=True)
        # The last step's product has no reader: cheaper than a branch between products in flight.
        ahead = (t + 1) % Q_STAGES
        mbarrier.wait(q_ready.index(ahead), ((t + 1) // Q_STAGES) & 1, pred=t + 1 < steps)
        s = warpgroup_mma(
            k_tile, q_ring.index(ahead).permute((1, 0)), score_zeros, use_acc=False, is_async=True
        )

        dq = warpgroup_mma_wait(2, deps=[dq])
        tile = dq_sum + ((batch * heads + head) * row_tiles + row_tile).to(gl.int64) * (QUERIES * H)
        mbarrier.wait(turn.index(t % ORDER), (t // ORDER) & 1)
        if key_tile == 0:  # always the first to come: it sets what the others add to
            gl.store(tile + offsets, by_thread(dq, QUERIES, H))
        else:
            gl.atomic_add(tile + offsets, by_thread(dq, QUERIES, H), sem="relaxed", scope="gpu")
        gl.thread_barrier()
        mbarrier.arrive(done.index(t % ORDER), count=1)
        head, row_tile = next_tile(head, row_tile, last_tile, steps_a_head)

    s, dk = warpgroup_mma_wait(0, deps=[s, dk])
    gl.thread_barrier()  # both warpgroups are done with K and V: their tiles carry the results out
    k_tile = k_ring.index(0)
    v_tile = v_ring.index(0)
    k_tile.store((dk * scale).to(DTYPE))
    v_tile.store(dv.to(DTYPE))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(
        dk_desc, [batch, kv_head, key_tile * KEYS, 0], k_tile.reshape([1, 1, KEYS, H])
    )
    tma.async_copy_shared_to_global(
        dv_desc, [batch, kv_head, key_tile * KEYS, 0], v_tile.reshape([1, 1, KEYS, H])
    )
    tma.store_wait(0)


_LENGTHS = ["heads", "kv_heads", "group", "head_section", "key_tiles", "query_length", "key_length", "offset"]


@gluon.jit(do_not_specialize=_LENGTHS)
def backward_kernel(
    k_desc, v_desc, q_desc, do_desc, lse2_desc, delta_desc, dk_desc, dv_desc, dq_sum, counters, arrivals,
    heads, kv_heads, group, head_section, key_tiles, query_length, key_length, offset, scale, scale_log2,
    QUERIES: gl.constexpr, KEYS: gl.constexpr, H: gl.constexpr, Q_STAGES: gl.constexpr,
    DO_STAGES: gl.constexpr, CAUSAL: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """dK and dV [B, K, T, H] of KEYS keys a program, and their share of dQ.

    Args:
        lse2_desc, delta_desc: [B * N, rows padded to QUERIES] float32: the log-sum-exp in base 2 (+inf for a row that
            saw no key or does not exist) and rowsum(O * dO) - dlse.
        dq_sum: float32 workspace, QUERIES * H numbers a query tile, in the order of `by_thread`.
        counters: int32 zeros, one a query tile.
        arrivals: one int32 zero.
    """
    ORDER: gl.constexpr = 8
    KV: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, H], DTYPE)
    Q: gl.constexpr = gl.NVMMASharedLayout.get_default_for([QUERIES, H], DTYPE)
    STATISTIC: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    tiles = (
        gl.allocate_shared_memory(DTYPE, [2, KEYS, H], KV),  # K, and room for K without bad keys
        gl.allocate_shared_memory(DTYPE, [1, KEYS, H], KV),
        gl.allocate_shared_memory(DTYPE, [Q_STAGES, QUERIES, H], Q),
        gl.allocate_shared_memory(DTYPE, [DO_STAGES, QUERIES, H], Q),
        gl.allocate_shared_memory(gl.float32, [Q_STAGES, 1, QUERIES], STATISTIC),
        gl.allocate_shared_memory(gl.float32, [DO_STAGES, 1, QUERIES], STATISTIC),
        gl.allocate_shared_memory(
            DTYPE, [1, KEYS, QUERIES], gl.NVMMASharedLayout.get_default_for([KEYS, QUERIES], DTYPE)
        ),
    )
    bars = (
        allocate_barriers(2, 1),  # kv_ready
        allocate_barriers(Q_STAGES, 1),  # q_ready
        allocate_barriers(DO_STAGES, 1),  # do_ready
        allocate_barriers(ORDER, 1),  # turn: ours at this step's query tile
        allocate_barriers(ORDER, 1),  # done: this step's tiles are read, its additions issued
        allocate_barriers(ORDER, 1),  # passed: and the next key tile knows
    )

    program = gl.atomic_add(arrivals, 1, sem="relaxed", scope="gpu")
    section = program // (head_section * key_tiles)
    within = program % (head_section * key_tiles)
    instance = section * head_section + within % head_section  # batch * kv_heads + kv_head
    key_tile = within // head_section
    row_tiles = (query_length + QUERIES - 1) // QUERIES
    first_tile = 0
    if CAUSAL:
        first_tile = gl.maximum(key_tile * KEYS - offset, 0) // QUERIES
    steps_a_head = row_tiles - first_tile  # every key tile is seen by the last row
    work = (
        instance // kv_heads, instance % kv_heads, key_tile, group, heads, row_tiles - 1, steps_a_head,
        steps_a_head * group,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (
                accumulate_gradients,
                (
                    dk_desc, dv_desc, dq_sum, tiles, bars, work, row_tiles, scale, scale_log2, offset,
                    key_length, QUERIES, KEYS, H, Q_STAGES, DO_STAGES, ORDER, CAUSAL, DTYPE,
                ),
            ),
            (
                load_tiles,
                (
                    k_desc, v_desc, q_desc, do_desc, lse2_desc, delta_desc, tiles, bars, work,
                    QUERIES, KEYS, H, Q_STAGES, DO_STAGES, ORDER,
                ),
            ),
            (take_turns, (counters, bars, work, row_tiles, ORDER)),
            (pass_turns, (counters, bars, work, row_tiles, 0, 2, ORDER)),
            (pass_turns, (counters, bars, work, row_tiles, 1, 2, ORDER)),
        ],
        [1, 1, 1, 1], [24, 24, 24, 24],
    )  # fmt: skip


@gluon.jit(do_not_specialize=["query_length", "row_tiles", "offset"])
def finish_dq_kernel(
    dq_sum, dq, query_length, row_tiles, offset, scale,
    QUERIES: gl.constexpr, H: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """dQ [B * N, S, H] = scale * the workspace's sums, one query tile a program (8 warps)."""
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // H, H // 8], [8, 1], [1, 0])
    tile = gl.program_id(0)
    instance = (tile // row_tiles).to(gl.int64)
    row_tile = tile % row_tiles
    flat = gl.load(dq_sum + tile.to(gl.int64) * (QUERIES * H) + flat_offsets(QUERIES, H))
    if CAUSAL and row_tile * QUERIES + QUERIES - 1 + offset < 0:  # no key tile ever came here
        flat = gl.zeros_like(flat)
    values = gl.convert_layout((from_thread_order(flat, QUERIES, H) * scale).to(dq.dtype.element_ty), ROWS)
    # From the tile's own first element: from the head's, 32 bits end at 2^31 elements.
    first_row = row_tile * QUERIES
    dq_tile = dq + (instance * query_length + first_row) * H
    rows = gl.expand_dims(gl.arange(0, QUERIES, gl.SliceLayout(1, ROWS)), 1)
    columns = gl.expand_dims(gl.arange(0, H, gl.SliceLayout(0, ROWS)), 0)
    gl.store(dq_tile + (rows * H + columns), values, mask=first_row + rows < query_length)
