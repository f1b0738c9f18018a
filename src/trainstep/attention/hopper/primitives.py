"""The pieces both Hopper kernels are made of: tile bounds, masks, barriers and the order between programs.

Positions: query row i sees key j when j <= i + offset, offset being T - S for the bottom-right alignment and
0 for the top-left one. Without a causal mask only the key length bounds what is seen.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.constexpr_function
def accumulator_layout(warps_down, warps_across, columns):
    """Registers of a wgmma accumulator: `warps_down` x 16 rows an instruction, `columns` wide for each warp
    across."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[warps_down, warps_across], instr_shape=[16, columns, 16]
    )


@gluon.constexpr_function
def left_operand_layout(accumulator):
    """Registers of a 16-bit left operand: a bit-for-bit relabelling of an accumulator's, so P never moves."""
    return gl.DotOperandLayout(operand_index=0, parent=accumulator, k_width=2)


@gluon.jit
def visible(rows, columns, offset, key_length, CAUSAL: gl.constexpr):
    """[rows, columns] of booleans from a [rows, 1] and a [1, columns] tensor of positions."""
    seen = columns < key_length
    if CAUSAL:
        seen = seen & (columns <= rows + offset)
    return seen


@gluon.jit
def allocate_barriers(COUNT: gl.constexpr, arrivals: gl.constexpr):
    """COUNT mbarriers, each complete after `arrivals` arrivals (a TMA's `expect` counts as one)."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=arrivals)
    return barriers


@gluon.jit
def load_acquire(pointer):
    """One 32-bit integer of global memory; later reads and writes are ordered after it (scope: the
    device)."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [pointer], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def store_release(pointer, value):
    """Write one 32-bit integer; everything that this thread saw happen is visible before it (scope: the
    device)."""
    gl.inline_asm_elementwise(
        "st.release.gpu.global.b32 [$1], $2; mov.b32 $0, $2;",
        "=r,l,r",
        [pointer, value],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def pack_pairs(x, DTYPE: gl.constexpr):
    """float32 x [M, N] rounded to 16 bits, two neighbours a 32-bit word: [M, N / 2] int32.

    What a loop carries as words stays packed; carried as 16-bit numbers it would be unpacked and packed each
    turn.
    """
    even, odd = gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    if DTYPE == gl.bfloat16:  # noqa: SIM300 (a constexpr, not a constant)
        words = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1
        )
    else:
        words = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1
        )
    return words


@gluon.jit
def unpack_pairs(words, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """The inverse of `pack_pairs`: [M, N / 2] int32 to [M, N] of DTYPE, in a layout of the same registers."""
    even = (words & 0xFFFF).to(gl.int16).to(DTYPE, bitcast=True)
    odd = (words >> 16).to(gl.int16).to(DTYPE, bitcast=True)
    pairs = gl.join(even, odd)
    return gl.convert_layout(
        gl.reshape(pairs, [words.shape[0], words.shape[1] * 2]), LAYOUT, assert_trivial=True
    )


@gluon.constexpr_function
def sixteen_byte_layout(warps, columns):
    """Registers of a 16-bit tile [rows, columns] read by 16 bytes a thread, warps * 256 // columns rows a
    pass."""
    return gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def everywhere_layout(size, warps):
    """Every thread holds all of [size]: a sum over it needs no exchange, which would pin a register a place."""
    return gl.BlockedLayout([size], [32], [warps], [0])


@gluon.jit
def keep_non_finite(x, found, DTYPE: gl.constexpr):
    """x * 0 + found: infinite or NaN where x or found is. Two 16-bit numbers an instruction."""
    if DTYPE == gl.bfloat16:  # noqa: SIM300 (a constexpr, not a constant)
        found = gl.inline_asm_elementwise(
            "{ .reg .b32 zero; mov.b32 zero, 0; fma.rn.bf16x2 $0, $1, zero, $2; }",
            "=r,r,r", [x, found], dtype=gl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        found = gl.inline_asm_elementwise(
            "{ .reg .b32 zero; mov.b32 zero, 0; fma.rn.f16x2 $0, $1, zero, $2; }",
            "=r,r,r", [x, found], dtype=gl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    return found


@gluon.jit
def any_non_finite(tile, WARPS: gl.constexpr, DTYPE: gl.constexpr):
    """Whether a 16-bit tile [rows, columns] of shared memory holds an infinity or a NaN; all warps get the
    answer."""
    LAYOUT: gl.constexpr = sixteen_byte_layout(WARPS, tile.shape[1])
    ROWS: gl.constexpr = WARPS * (256 // tile.shape[1])
    found = tile.slice(0, ROWS).load(LAYOUT)
    for i in gl.static_range(1, tile.shape[0] // ROWS):
        found = keep_non_finite(tile.slice(i * ROWS, ROWS).load(LAYOUT), found, DTYPE)
    rows = gl.convert_layout(gl.sum(found.to(gl.float32) * 0.0, 1), everywhere_layout(ROWS, WARPS))
    return gl.sum(rows, 0) != 0.0  # 0, or NaN


@gluon.jit
def is_finite(x):
    """True where x is neither infinite nor NaN."""
    return x.to(gl.float32) * 0.0 == 0.0


@gluon.jit
def first_bad_row(tile, WARPS: gl.constexpr):
    """Index of the first row of a 16-bit tile [rows, columns] of shared memory with an infinity or a NaN."""
    LAYOUT: gl.constexpr = sixteen_byte_layout(WARPS, tile.shape[1])
    ROWS: gl.constexpr = WARPS * (256 // tile.shape[1])
    row = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)), 1)
    first = gl.full([ROWS, tile.shape[1]], tile.shape[0], gl.int32, LAYOUT)
    for i in gl.static_range(tile.shape[0] // ROWS):
        finite = is_finite(tile.slice(i * ROWS, ROWS).load(LAYOUT))
        first = gl.where(finite, first, gl.minimum(first, row + i * ROWS))
    return gl.min(gl.convert_layout(gl.min(first, 1), everywhere_layout(ROWS, WARPS)), 0)


@gluon.jit
def write_finite(source, target, WARPS: gl.constexpr):
    """Copy a 16-bit tile [rows, columns] of shared memory with 0 for infinities and NaN; may be in place."""
    LAYOUT: gl.constexpr = sixteen_byte_layout(WARPS, source.shape[1])
    ROWS: gl.constexpr = WARPS * (256 // source.shape[1])
    for i in gl.static_range(source.shape[0] // ROWS):
        x = source.slice(i * ROWS, ROWS).load(LAYOUT)
        target.slice(i * ROWS, ROWS).store(gl.where(is_finite(x), x, gl.zeros_like(x)))
