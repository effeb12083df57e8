# pyright: basic
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# ruff: noqa: ANN001, ANN201, ANN202, RUF005
"""What the Gluon kernels share: weights to shared memory, and from there to registers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

__all__ = [
    "buffers",
    "codes_of_plane",
    "copy_block",
    "copy_layout",
    "fp4_of_plane",
    "row_layout",
    "words_of_rows",
]


@gluon.constexpr_function
def copy_layout(WARPS):
    """Of pointers to `[rows, 32]` of 16 bits: 16 bytes a thread."""
    return gl.BlockedLayout([1, 8], [8, 4], [WARPS, 1], [1, 0])


@gluon.constexpr_function
def row_layout(WARPS):
    """Of pointers to a number a row: 8 rows a thread."""
    return gl.BlockedLayout([8], [32], [WARPS], [0])


@gluon.constexpr_function
def plane_asm(dtype, PLANE):
    """PTX that takes a plane of two words at once, as `firesteel.moe.tile` does."""
    magic = "0x43004300" if dtype == gl.bfloat16 else "0x64006400"
    if PLANE == 0:
        return f"lop3.b32 $0, $1, 0x000f000f, {magic}, 0xea;"
    shift = f".reg .b32 t; shr.u32 t, $1, {4 * PLANE};"
    return f"{{ {shift} lop3.b32 $0, t, 0x000f000f, {magic}, 0xea; }}"


@gluon.constexpr_function
def e2m1_asm(dtype, PLANE):
    """PTX that takes the E2M1 numbers of a plane of two words, as `firesteel.moe.tile` does."""
    # By plane: how far the sign is below bit 15, and the other bits below where dtype has them.
    sign = (0, 3, 1, 2)[PLANE]
    low = (6 if dtype == gl.bfloat16 else 9) - (6, 3, 0, 9)[PLANE]
    mask = "0x01c001c0" if dtype == gl.bfloat16 else "0x0e000e00"
    if sign == low:
        both = "0x81c081c0" if dtype == gl.bfloat16 else "0x8e008e00"
        return f"{{ .reg .b32 t; shl.b32 t, $1, {sign}; and.b32 $0, t, {both}; }}"
    shift = f"shl.b32 t, $1, {low};" if low >= 0 else f"shr.u32 t, $1, {-low};"
    return (
        f"{{ .reg .b32 t, u; {shift} and.b32 t, t, {mask}; shl.b32 u, $1, {sign}; "
        "lop3.b32 $0, u, 0x80008000, t, 0xea; }"
    )


@gluon.jit
def codes_of_plane(words, zero, like, PLANE: gl.constexpr):
    """Codes of a plane less their zero points, exactly, in the type of `like`.

    zero is a tuple: empty where it is 8, or the zero points of the rows in words' layout.
    """
    # As `firesteel.moe.tile` has it: the codes stand in the last places of a power of two.
    dtype: gl.constexpr = like.dtype
    BASE: gl.constexpr = 128.0 if dtype == gl.bfloat16 else 1024.0
    asm: gl.constexpr = plane_asm(dtype, PLANE)
    numbers = gl.inline_asm_elementwise(
        asm, "=r,r", [words], dtype=like.dtype, is_pure=True, pack=2
    )
    if len(zero) == 0:
        numbers -= gl.full(words.shape, BASE + 8, dtype, layout=words.type.layout)
    else:
        numbers -= (zero[0].to(gl.float32) + BASE).to(dtype)[:, None]
    return numbers


@gluon.jit
def fp4_of_plane(words, scales, like, PLANE: gl.constexpr):
    """FP4 weights of a plane, exactly, but for what `fp4_unit` has; scales are `fp4_scales`.

    Of groups of 16 columns a plane has two.
    """
    asm: gl.constexpr = e2m1_asm(like.dtype, PLANE)
    numbers = gl.inline_asm_elementwise(
        asm, "=r,r", [words], dtype=like.dtype, is_pure=True, pack=2
    )
    if len(scales) == 4:
        scale = scales[PLANE][:, None]
    else:
        column = gl.arange(0, 32, layout=gl.SliceLayout(0, words.type.layout))[None, :]
        scale = gl.where(column < 16, scales[2 * PLANE][:, None], scales[2 * PLANE + 1][:, None])
    return numbers * scale


@gluon.jit
def words_of_rows(row, NUM_BLOCKS: gl.constexpr, WARPS: gl.constexpr):
    """Offsets `[rows, 32]` of the words of rows of a matrix in block 0; row as `copy_layout`'s."""
    word = gl.arange(0, 32, layout=gl.SliceLayout(0, copy_layout(WARPS)))
    tile = (row // 64) * (NUM_BLOCKS * 2048) + (row % 64) * 32
    return tile[:, None] + word[None, :]


@gluon.jit
def buffers(dtype, COUNT: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """So many allocations, each of which is copied to apart from the others."""
    found = ()
    for _ in gl.static_range(COUNT):
        found = found + (gl.allocate_shared_memory(dtype, SHAPE, LAYOUT),)
    return found


@gluon.jit
def copy_block(
    shared, source, turn, last,
    K: gl.constexpr, HEIGHT: gl.constexpr, PARTS: gl.constexpr, GROUP_SIZE: gl.constexpr,
    ROWS: gl.constexpr, SPAN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Start the copies of a turn's block to its buffers, as one group.

    From turn `last` on they are masked, not skipped: a branch among `wgmma` would make each wait.

    source is x_ptrs at column 0, which of its rows there are, and the columns of a copy; words_ptrs
    `[ROWS, 32]` at block 0 (`words_of_rows`) and their rows; scales_ptrs and zeros_ptrs (a tuple of
    one, or empty) `[ROWS]` at group 0 and their rows. shared is tuples of buffers: of x, one or one
    a plane; of words; of scales and of zero points one a group of a block. W has PARTS matrices of
    HEIGHT rows and K columns; ROWS are the operand's of one row block, and a program has SPAN of
    those.
    """
    NUM_BLOCKS: gl.constexpr = (K + 127) // 128
    GROUPS: gl.constexpr = 1 if GROUP_SIZE == K else (127 + GROUP_SIZE) // GROUP_SIZE
    STEP: gl.constexpr = ROWS // PARTS
    PADDED: gl.constexpr = (HEIGHT + 63) // 64 * 64
    xs, words, scales, zeros = shared
    x_ptrs, is_x, x_column, words_ptrs, word_row, scales_ptrs, zeros_ptrs, scale_row = source
    WIDTH: gl.constexpr = 128 // len(xs)
    slot = turn % STAGES
    row_block, block = 0, turn
    if SPAN > 1:
        row_block, block = turn // NUM_BLOCKS, turn % NUM_BLOCKS
    is_turn = turn < last
    for part in gl.static_range(len(xs)):
        is_column = is_x & is_turn
        if K % 128 != 0:
            is_column = is_column & (block * 128 + part * WIDTH + x_column < K)[None, :]
        async_copy.async_copy_global_to_shared(
            xs[part].index(slot), x_ptrs + block * 128 + part * WIDTH, mask=is_column
        )
    is_word = is_turn
    if PADDED % (STEP * SPAN) != 0:
        is_word = is_turn & (word_row + row_block * STEP < PADDED)[:, None]
    words_ptrs += row_block * (STEP // 64 * NUM_BLOCKS * 2048)
    async_copy.async_copy_global_to_shared(
        words[0].index(slot), words_ptrs + block * 2048, mask=is_word
    )
    for span in gl.static_range(GROUPS):
        column = block * 128 + span * GROUP_SIZE
        is_scale = is_turn & (column < K)
        if HEIGHT % (STEP * SPAN) != 0:
            is_scale = is_scale & (scale_row + row_block * STEP < HEIGHT)
        group = 0 if GROUP_SIZE == K else column // GROUP_SIZE
        place = group * (PARTS * HEIGHT) + row_block * STEP
        async_copy.async_copy_global_to_shared(
            scales[span].index(slot), scales_ptrs + place, mask=is_scale
        )
        if len(zeros_ptrs) > 0:
            async_copy.async_copy_global_to_shared(
                zeros[span].index(slot), zeros_ptrs[0] + place, mask=is_scale
            )
    async_copy.commit_group()
