"""Forward kernel: CONSUMERS warpgroups of 64 query rows each, fed by one loading warp.

One program computes CONSUMERS * 64 query rows of one head. The loader streams key and value tiles through a
ring of STAGES buffers with TMA; each consumer keeps its scores, probabilities and outputs in registers
(FlashAttention-2, Algorithm 1, over key tiles from the last visible one to the first, so that the masked ones
come first). Two products are in flight at once: while the tensor cores do S_t = Q K_t^T and O += P_{t-1}
V_{t-1}, the softmax of S_t runs on the other units (FlashAttention-3, section 3.2).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from trainstep.attention.hopper.primitives import (
    accumulator_layout,
    allocate_barriers,
    any_non_finite,
    first_bad_row,
    left_operand_layout,
    pack_pairs,
    unpack_pairs,
    visible,
    write_finite,
)


@gluon.jit
def load_tiles(
    q_desc, k_desc, v_desc, q_tile, k_ring, v_ring, bars, batch, head, kv_head, first_row, tiles,
    ROWS: gl.constexpr, KEYS: gl.constexpr, H: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
):  # fmt: skip
    """The loading warp: Q once, then K_t and V_t in the consumers' order, each into the buffer freed last."""
    q_ready, k_ready, k_free, v_ready, v_free, _, _ = bars
    mbarrier.expect(q_ready.index(0), ROWS * H * 2)
    for c in gl.static_range(CONSUMERS):
        tma.async_copy_global_to_shared(
            q_desc,
            [batch, head, first_row + c * 64, 0],
            q_ready.index(0),
            q_tile.index(c).reshape([1, 1, 64, H]),
        )
    for t in range(tiles):
        stage = t % STAGES
        free_phase = (t // STAGES + 1) & 1  # the first pass over the ring finds it free
        first_key = (tiles - 1 - t) * KEYS
        mbarrier.wait(k_free.index(stage), free_phase)
        mbarrier.expect(k_ready.index(stage), KEYS * H * 2)
        tma.async_copy_global_to_shared(
            k_desc, [batch, kv_head, first_key, 0], k_ready.index(stage),
            k_ring.index(stage).reshape([1, 1, KEYS, H]),
        )  # fmt: skip
        mbarrier.wait(v_free.index(stage), free_phase)
        mbarrier.expect(v_ready.index(stage), KEYS * H * 2)
        tma.async_copy_global_to_shared(
            v_desc, [batch, kv_head, first_key, 0], v_ready.index(stage),
            v_ring.index(stage).reshape([1, 1, KEYS, H]),
        )  # fmt: skip


@gluon.jit
def online_softmax_update(s, row_max, row_sum, scale_log2, GUARD: gl.constexpr):
    """Fold one tile of scores s [64, KEYS] into the running maximum and sum (both [64]).

    Returns:
        p [64, KEYS] = exp2(scale_log2 * (s - maximum)), the new maximum and sum, and the factor that brings
        what was accumulated under the old maximum to the new one. GUARD: a row may have seen no key yet.
    """
    new_max = gl.maximum(row_max, gl.max(s, axis=1))
    shift = new_max * scale_log2
    if GUARD:
        shift = gl.where(new_max == -float("inf"), 0.0, shift)
    correction = gl.exp2(row_max * scale_log2 - shift)
    p = gl.exp2(s * scale_log2 - gl.expand_dims(shift, 1))
    return p, new_max, row_sum * correction + gl.sum(p, axis=1), correction


@gluon.jit
def hide_non_finite(
    o, t, v_ring, bars, rows, offset, tiles, KEYS: gl.constexpr, STAGES: gl.constexpr, DTYPE: gl.constexpr
):
    """Before P_t V_t on a masked tile: an infinity or NaN in V_t must not reach, as 0 * NaN, a row that may
    not see it. It becomes 0 in V_t, and O becomes NaN in the rows that see it: all from the first bad key on.

    All consumers share V_t. None changes it before all have looked at it, so that all come to the same
    conclusion; then all write the same. The usual tile costs one look: 16 bytes a load, half an instruction
    an element.
    """
    _, _, _, v_ready, _, _, agreed = bars
    stage = t % STAGES
    mbarrier.wait(v_ready.index(stage), (t // STAGES) & 1)
    v_tile = v_ring.index(stage)  # [KEYS, H]
    if any_non_finite(v_tile, 4, DTYPE):
        first = (tiles - 1 - t) * KEYS + first_bad_row(v_tile, 4)
        mbarrier.arrive(agreed.index(t), count=1)
        mbarrier.wait(agreed.index(t), 0)  # a tile comes once
        write_finite(v_tile, v_tile, 4)
        fence_async_shared()
        gl.thread_barrier()
        sees = gl.convert_layout(rows, gl.SliceLayout(1, o.type.layout)) + offset >= first
        o = gl.where(gl.expand_dims(sees, 1), float("nan"), o)
    return o


@gluon.jit
def attend_tile(
    t, q_tile, k_ring, v_ring, bars, p, o, row_max, row_sum, scale_log2, rows, offset, key_length, tiles,
    KEYS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, MASK: gl.constexpr,
    CONSUMER: gl.constexpr,
    CONSUMERS: gl.constexpr, TAKE_TURNS: gl.constexpr, S_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr,
    DTYPE: gl.constexpr,
):  # fmt: skip
    """S_t = Q K_t^T beside O += P_{t-1} V_{t-1}; then P_t. For t >= 1; K_t has arrived, and K_{t+1} has at
    the end."""
    _, k_ready, k_free, v_ready, v_free, turn, _ = bars
    stage = t % STAGES
    if TAKE_TURNS:
        # The first consumer began without waiting.
        mbarrier.wait(turn.index(CONSUMER), (t + (CONSUMER == 0)) & 1)
    s = gl.zeros([64, KEYS], gl.float32, S_LAYOUT)
    s = warpgroup_mma(q_tile, k_ring.index(stage).permute((1, 0)), s, use_acc=False, is_async=True)
    before = (t - 1) % STAGES
    mbarrier.wait(v_ready.index(before), ((t - 1) // STAGES) & 1)
    o = warpgroup_mma(unpack_pairs(p, DTYPE, P_LAYOUT), v_ring.index(before), o, is_async=True)
    if TAKE_TURNS:
        mbarrier.arrive(turn.index((CONSUMER + 1) % CONSUMERS), count=1)
    s = warpgroup_mma_wait(1, deps=[s])
    mbarrier.arrive(k_free.index(stage), count=1)
    if MASK:
        columns = (tiles - 1 - t) * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, S_LAYOUT))
        seen = visible(gl.expand_dims(rows, 1), gl.expand_dims(columns, 0), offset, key_length, CAUSAL)
        s = gl.where(seen, s, -float("inf"))
    probabilities, row_max, row_sum, correction = online_softmax_update(s, row_max, row_sum, scale_log2, MASK)
    # The next wait for keys stands here because ptxas moves no arithmetic across its loop: left to itself it takes
    # the exponentials after the products, beside nothing.
    ahead = t + 1
    mbarrier.wait(k_ready.index(ahead % STAGES), (ahead // STAGES) & 1, pred=ahead < tiles)
    o = warpgroup_mma_wait(0, deps=[o])
    mbarrier.arrive(v_free.index(before), count=1)
    o = o * gl.expand_dims(gl.convert_layout(correction, gl.SliceLayout(1, o.type.layout)), 1)
    p = pack_pairs(probabilities, DTYPE)
    return p, o, row_max, row_sum


@gluon.jit
def attend_rows(
    o_desc, lse, q_tiles, k_ring, v_ring, bars, instance, first_row, tiles, masked_tiles,
    scale_log2, offset, query_length, key_length,
    KEYS: gl.constexpr, H: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, CONSUMER: gl.constexpr,
    CONSUMERS: gl.constexpr, TAKE_TURNS: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """One consumer warpgroup: 64 query rows against all their key tiles."""
    S_LAYOUT: gl.constexpr = accumulator_layout(4, 1, KEYS)
    O_LAYOUT: gl.constexpr = accumulator_layout(4, 1, H)
    P_LAYOUT: gl.constexpr = left_operand_layout(O_LAYOUT)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    q_ready, k_ready, k_free, v_ready, _, turn, _ = bars
    q_tile = q_tiles.index(CONSUMER)  # [64, H]
    rows = first_row + CONSUMER * 64 + gl.arange(0, 64, ROW_LAYOUT)
    row_max = gl.full([64], -float("inf"), gl.float32, ROW_LAYOUT)
    row_sum = gl.zeros([64], gl.float32, ROW_LAYOUT)
    o = gl.zeros([64, H], gl.float32, O_LAYOUT)

    # Tile 0, the last of the visible ones, always compares indices.
    mbarrier.wait(q_ready.index(0), 0)
    mbarrier.wait(k_ready.index(0), 0)
    if TAKE_TURNS and CONSUMER > 0:
        mbarrier.wait(turn.index(CONSUMER), 0)
    s = gl.zeros([64, KEYS], gl.float32, S_LAYOUT)
    s = warpgroup_mma(q_tile, k_ring.index(0).permute((1, 0)), s, use_acc=False, is_async=True)
    if TAKE_TURNS:
        mbarrier.arrive(turn.index((CONSUMER + 1) % CONSUMERS), count=1)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_free.index(0), count=1)
    columns = (tiles - 1) * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, S_LAYOUT))
    seen = visible(gl.expand_dims(rows, 1), gl.expand_dims(columns, 0), offset, key_length, CAUSAL)
    s = gl.where(seen, s, -float("inf"))
    probabilities, row_max, row_sum, _ = online_softmax_update(s, row_max, row_sum, scale_log2, True)
    p = pack_pairs(probabilities, DTYPE)

    mbarrier.wait(k_ready.index(1 % STAGES), (1 // STAGES) & 1, pred=tiles > 1)
    for t in range(1, masked_tiles):
        if CAUSAL:  # keys past the end are zeros
            o = hide_non_finite(o, t - 1, v_ring, bars, rows, offset, tiles, KEYS, STAGES, DTYPE)
        p, o, row_max, row_sum = attend_tile(
            t, q_tile, k_ring, v_ring, bars, p, o, row_max, row_sum, scale_log2, rows, offset, key_length,
            tiles, KEYS, STAGES, CAUSAL, True, CONSUMER, CONSUMERS, TAKE_TURNS, S_LAYOUT, P_LAYOUT, DTYPE,
        )  # fmt: skip
    if CAUSAL:
        o = hide_non_finite(o, masked_tiles - 1, v_ring, bars, rows, offset, tiles, KEYS, STAGES, DTYPE)
    for t in range(masked_tiles, tiles):
        p, o, row_max, row_sum = attend_tile(
            t, q_tile, k_ring, v_ring, bars, p, o, row_max, row_sum, scale_log2, rows, offset, key_length,
            tiles, KEYS, STAGES, CAUSAL, False, CONSUMER, CONSUMERS, TAKE_TURNS, S_LAYOUT, P_LAYOUT, DTYPE,
        )  # fmt: skip

    last = (tiles - 1) % STAGES
    mbarrier.wait(v_ready.index(last), ((tiles - 1) // STAGES) & 1)
    o = warpgroup_mma(unpack_pairs(p, DTYPE, P_LAYOUT), v_ring.index(last), o, is_async=True)
    o = warpgroup_mma_wait(0, deps=[o])

    # A row that saw no key: zeros, whatever the masked products left, and -inf.
    some = row_sum != 0.0
    inverse = gl.where(some, 1.0 / row_sum, 0.0)
    keep = gl.expand_dims(gl.convert_layout(some, gl.SliceLayout(1, O_LAYOUT)), 1)
    o = gl.where(keep, o * gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, O_LAYOUT)), 1), 0.0)
    LN2: gl.constexpr = 0.6931471805599453
    row_lse = gl.where(some, (row_max * scale_log2 + gl.log2(row_sum)) * LN2, -float("inf"))
    # Positions in another layout are made anew: kept through the loops they would not fit the registers.
    STORED: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    rows = first_row + CONSUMER * 64 + gl.arange(0, 64, STORED)
    row_lse = gl.convert_layout(row_lse, STORED)
    gl.store(lse + instance.to(gl.int64) * query_length + rows, row_lse, mask=rows < query_length)
    q_tile.store(o.to(DTYPE))  # this warpgroup is done with its queries
    fence_async_shared()
    tma.async_copy_shared_to_global(
        o_desc, [0, instance, first_row + CONSUMER * 64, 0], q_tile.reshape([1, 1, 64, H])
    )
    tma.store_wait(0)


# A length of 1 must not become a constant: partitions cannot capture one.
_LENGTHS = ["heads", "group", "head_section", "row_tiles", "query_length", "key_length", "offset"]


@gluon.jit(do_not_specialize=_LENGTHS)
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, lse, heads, group, head_section, row_tiles, query_length, key_length,
    offset, scale_log2,
    KEYS: gl.constexpr, H: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, CONSUMERS: gl.constexpr,
    TAKE_TURNS: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """O [1, B * N, S, H] and the natural log-sum-exp [B, N, S] of CONSUMERS * 64 query rows a program.

    Programs run through sections of `head_section` heads (whose keys and values fit in the L2 together), the
    longest rows of a section first.
    """
    ROWS: gl.constexpr = CONSUMERS * 64
    RING: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, H], DTYPE)
    q_tiles = gl.allocate_shared_memory(
        DTYPE, [CONSUMERS, 64, H], gl.NVMMASharedLayout.get_default_for([64, H], DTYPE)
    )
    k_ring = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, H], RING)
    v_ring = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, H], RING)
    bars = (
        allocate_barriers(1, 1),  # q_ready
        allocate_barriers(STAGES, 1),  # k_ready
        allocate_barriers(STAGES, CONSUMERS),  # k_free
        allocate_barriers(STAGES, 1),  # v_ready
        allocate_barriers(STAGES, CONSUMERS),  # v_free
        allocate_barriers(CONSUMERS, 1),  # turn: this consumer may issue its products
        allocate_barriers((ROWS + KEYS - 2) // KEYS + 1, CONSUMERS),  # agreed; at least one a masked tile
    )

    program = gl.program_id(0)
    section = program // (head_section * row_tiles)
    within = program % (head_section * row_tiles)
    instance = section * head_section + within % head_section  # batch * heads + head
    row_tile = row_tiles - 1 - within // head_section
    batch = instance // heads
    head = instance % heads
    first_row = row_tile * ROWS

    # Keys [0, seen_keys) are seen by some row, keys [0, full_keys) by every row of the tile.
    seen_keys = key_length
    full_keys = key_length
    if CAUSAL:
        seen_keys = gl.minimum(key_length, gl.maximum(first_row + ROWS + offset, 1))
        full_keys = gl.minimum(key_length, gl.maximum(first_row + 1 + offset, 0))
    tiles = (seen_keys + KEYS - 1) // KEYS
    masked_tiles = gl.minimum(gl.maximum(tiles - full_keys // KEYS, 1), tiles)
    kv_head = head // group

    # The registers add up to the 64 K of a multiprocessor, the loader's three idle neighbours included.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (
                    attend_rows,
                    (
                        o_desc, lse, q_tiles, k_ring, v_ring, bars, instance, first_row, tiles,
                        masked_tiles, scale_log2, offset, query_length, key_length,
                        KEYS, H, STAGES, CAUSAL, 0, CONSUMERS, TAKE_TURNS, DTYPE,
                    ),
                ),
                (
                    attend_rows,
                    (
                        o_desc, lse, q_tiles, k_ring, v_ring, bars, instance, first_row, tiles,
                        masked_tiles, scale_log2, offset, query_length, key_length,
                        KEYS, H, STAGES, CAUSAL, 1, CONSUMERS, TAKE_TURNS, DTYPE,
                    ),
                ),
                (
                    load_tiles,
                    (
                        q_desc, k_desc, v_desc, q_tiles, k_ring, v_ring, bars, batch, head, kv_head,
                        first_row, tiles, ROWS, KEYS, H, STAGES, CONSUMERS,
                    ),
                ),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    attend_rows,
                    (
                        o_desc, lse, q_tiles, k_ring, v_ring, bars, instance, first_row, tiles,
                        masked_tiles, scale_log2, offset, query_length, key_length,
                        KEYS, H, STAGES, CAUSAL, 0, CONSUMERS, TAKE_TURNS, DTYPE,
                    ),
                ),
                (
                    attend_rows,
                    (
                        o_desc, lse, q_tiles, k_ring, v_ring, bars, instance, first_row, tiles,
                        masked_tiles, scale_log2, offset, query_length, key_length,
                        KEYS, H, STAGES, CAUSAL, 1, CONSUMERS, TAKE_TURNS, DTYPE,
                    ),
                ),
                (
                    attend_rows,
                    (
                        o_desc, lse, q_tiles, k_ring, v_ring, bars, instance, first_row, tiles,
                        masked_tiles, scale_log2, offset, query_length, key_length,
                        KEYS, H, STAGES, CAUSAL, 2, CONSUMERS, TAKE_TURNS, DTYPE,
                    ),
                ),
                (
                    load_tiles,
                    (
                        q_desc, k_desc, v_desc, q_tiles, k_ring, v_ring, bars, batch, head, kv_head,
                        first_row, tiles, ROWS, KEYS, H, STAGES, CONSUMERS,
                    ),
                ),
            ],
            [4, 4, 1], [160, 160, 24],
        )  # fmt: skip
