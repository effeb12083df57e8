# pyright: basic
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# ruff: noqa: ANN001, ANN201, ANN202, RUF005
"""What the Gluon kernels share: weights to shared memory, and from there to registers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from firesteel.moe.narrow import looked_up, narrow_words, side_by_side

__all__ = [
    "buffers",
    "codes_of_plane",
    "copy_block",
    "copy_layout",
    "fp4_of_plane",
    "load_words",
    "row_layout",
    "tile_words",
    "word_buffers",
    "word_layout",
    "words_of_rows",
]


@gluon.constexpr_function
def is_narrow(ELEMENT):
    """Whether codes are of 3 bits."""
    return ELEMENT in ("int3", "nf3")


@gluon.constexpr_function
def tile_words(ELEMENT):
    """Words of 16 bits of a tile of 64 rows and 128 columns."""
    return 1536 if ELEMENT in ("int3", "nf3") else 2048


@gluon.constexpr_function
def copy_layout(WARPS):
    """Of pointers to `[rows, 32]` of 16 bits: 16 bytes a thread."""
    return gl.BlockedLayout([1, 8], [8, 4], [WARPS, 1], [1, 0])


@gluon.constexpr_function
def word_layout(ELEMENT, WARPS):
    """Of pointers to the words of rows, 16 bytes a thread: of 3 bits to `[rows, 8]`."""
    if ELEMENT not in ("int3", "nf3"):
        return gl.BlockedLayout([1, 8], [8, 4], [WARPS, 1], [1, 0])
    return gl.BlockedLayout([1, 8], [32, 1], [WARPS, 1], [1, 0])


@gluon.constexpr_function
def narrow_layout(ROWS, WARPS):
    """Of `[rows, 8]` words: a thread has the two whose numbers it multiplies, of rows 8 apart."""
    warps = [[16 << i, 0] for i in range(WARPS.bit_length() - 1)]
    more = [[(16 * WARPS) << i, 0] for i in range((ROWS // (16 * WARPS)).bit_length() - 1)]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[0, 1], [8, 0], *more], lanes, warps, [], [ROWS, 8])


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
def codes_of_plane(words, zero, like, PLANE: gl.constexpr, LAYOUT: gl.constexpr,
                   ELEMENT: gl.constexpr):  # fmt: skip
    """Codes of a plane less their zero points, or nf3's numbers, exactly, in the type of `like`.

    words is a tuple of one tensor, of three of 3-bit codes. zero is a tuple: empty where it is 8
    (of int3 4), or the zero points of the rows in LAYOUT, that of the result.
    """
    dtype: gl.constexpr = like.dtype
    if is_narrow(ELEMENT):
        plane = narrow_words(words[0], words[1], words[2], PLANE, True)
        a, b, c, d = looked_up(plane, dtype, ELEMENT, len(zero) > 0)
        numbers = gl.convert_layout(side_by_side(a, b, c, d), LAYOUT, assert_trivial=True)
        if len(zero) > 0:
            numbers -= zero[0].to(gl.float32).to(dtype)[:, None]
    else:
        # As `firesteel.moe.tile` has it: the codes stand in the last places of a power of two.
        BASE: gl.constexpr = 128.0 if dtype == gl.bfloat16 else 1024.0
        asm: gl.constexpr = plane_asm(dtype, PLANE)
        numbers = gl.inline_asm_elementwise(
            asm, "=r,r", [words[0]], dtype=like.dtype, is_pure=True, pack=2
        )
        if len(zero) == 0:
            numbers -= gl.full(numbers.shape, BASE + 8, dtype, layout=LAYOUT)
        else:
            numbers -= (zero[0].to(gl.float32) + BASE).to(dtype)[:, None]
    return numbers


@gluon.jit
def fp4_of_plane(words, scales, like, PLANE: gl.constexpr):
    """FP4 weights of a plane, exactly, but for what `unit_of_sums` has; scales are `fp4_scales`.

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
def words_of_rows(row, NUM_BLOCKS: gl.constexpr, ELEMENT: gl.constexpr, WARPS: gl.constexpr):
    """Offsets of the words of rows of a matrix in block 0, in `word_layout`, as row is.

    `[rows, 32]`, or of 3-bit codes `[rows, 8]`, the first of three.
    """
    WIDTH: gl.constexpr = 8 if is_narrow(ELEMENT) else 32
    word = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, word_layout(ELEMENT, WARPS)))
    tile = (row // 64) * (NUM_BLOCKS * tile_words(ELEMENT)) + (row % 64) * WIDTH
    return tile[:, None] + word[None, :]


@gluon.jit
def buffers(dtype, COUNT: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """So many allocations, each of which is copied to apart from the others."""
    found = ()
    for _ in gl.static_range(COUNT):
        found = found + (gl.allocate_shared_memory(dtype, SHAPE, LAYOUT),)
    return found


@gluon.jit
def word_buffers(ELEMENT: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr):
    """Buffers of words: one `[STAGES, ROWS, 32]`, or three `[STAGES, ROWS, 8]` of 3-bit codes."""
    if is_narrow(ELEMENT):
        narrow_s: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        found = buffers(gl.int16, 3, [STAGES, ROWS, 8], narrow_s)
    else:
        words_s: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [1, 0])
        found = buffers(gl.int16, 1, [STAGES, ROWS, 32], words_s)
    return found


@gluon.jit
def load_words(words, slot, LAYOUT: gl.constexpr, ELEMENT: gl.constexpr, WARPS: gl.constexpr):
    """A block's words from their buffers, so that `codes_of_plane` has its numbers in LAYOUT."""
    if is_narrow(ELEMENT):
        ROWS: gl.constexpr = words[0].shape[1]
        narrow_l: gl.constexpr = narrow_layout(ROWS, WARPS)
        found = (
            words[0].index(slot).load(narrow_l),
            words[1].index(slot).load(narrow_l),
            words[2].index(slot).load(narrow_l),
        )
    else:
        found = (words[0].index(slot).load(LAYOUT),)
    return found


@gluon.jit
def copy_block(
    shared, source, turn, last,
    K: gl.constexpr, HEIGHT: gl.constexpr, PARTS: gl.constexpr, GROUP_SIZE: gl.constexpr,
    ROWS: gl.constexpr, SPAN: gl.constexpr, STAGES: gl.constexpr, ELEMENT: gl.constexpr,
):  # fmt: skip
    """Start the copies of a turn's block to its buffers, as one group.

    From turn `last` on they are masked, not skipped: a branch among `wgmma` would make each wait.

    source is x_ptrs at column 0, which of its rows there are, and the columns of a copy; words_ptrs
    at block 0 (`words_of_rows`) and their rows; scales_ptrs and zeros_ptrs (a tuple of one, or
    empty) `[ROWS]` at group 0 and their rows. shared is tuples of buffers: of x, one or one a
    plane; of words (`word_buffers`); of scales and of zero points one a group of a block. W has
    PARTS matrices of HEIGHT rows and K columns; ROWS are the operand's of one row block, and a
    program has SPAN of those.
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
    words_ptrs += row_block * (STEP // 64 * NUM_BLOCKS * tile_words(ELEMENT))
    for run in gl.static_range(len(words)):
        async_copy.async_copy_global_to_shared(
            words[run].index(slot), words_ptrs + (block * tile_words(ELEMENT) + run * 512),
            mask=is_word,
        )  # fmt: skip
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
