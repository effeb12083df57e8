# pyright: basic
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# ruff: noqa: ANN001, ANN201, ANN202, RUF005
"""The loop that FC1 and FC2 share on Hopper where experts have many rows, in Gluon.

A program multiplies row blocks of W by up to 128 routes with `wgmma`, W on the left, its numbers in
registers. Blocks of 128 columns come by `cp.async` through STAGES buffers. Each of a block's planes
is one product, and the next is unpacked while it runs.

Products of a group cannot be scaled apart here, since that would take every accumulator twice: a
scale multiplies its weights, in the 16-bit type, before the product. So the numbers are those of
weights dequantised to that type, rounded once.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

__all__ = ["copy_layout", "products", "row_layout", "start", "store_rows", "words_of_rows"]


@gluon.constexpr_function
def product_layout(ROUTES, WARPS):
    """Of products with so many routes: each warp has 16 rows of W."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, ROUTES, 16]
    )


@gluon.constexpr_function
def operand_layout(ROUTES, WARPS):
    """Of the numbers of W that those products take from registers."""
    return gl.DotOperandLayout(operand_index=0, parent=product_layout(ROUTES, WARPS), k_width=2)


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


@gluon.jit
def unpack(words, scale, zero, PLANE: gl.constexpr):
    """(codes of a plane - zero point) * scale, in scale's type, rounded once."""
    asm: gl.constexpr = plane_asm(scale.dtype, PLANE)
    numbers = gl.inline_asm_elementwise(
        asm, "=r,r", [words], dtype=scale.dtype, is_pure=True, pack=2
    )
    return (numbers - zero) * scale


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
    shared, source, turn,
    K: gl.constexpr, HEIGHT: gl.constexpr, PARTS: gl.constexpr, GROUP_SIZE: gl.constexpr,
    ROWS: gl.constexpr, SPAN: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Start the copies of a turn's block to its buffers, as one group.

    Past the last block they are masked, not skipped: a branch among products would make each wait.
    """
    NUM_BLOCKS: gl.constexpr = (K + 127) // 128
    GROUPS: gl.constexpr = 1 if GROUP_SIZE == K else (127 + GROUP_SIZE) // GROUP_SIZE
    STEP: gl.constexpr = ROWS // PARTS
    PADDED: gl.constexpr = (HEIGHT + 63) // 64 * 64
    xs, words, scales, zeros = shared
    x_ptrs, is_x, words_ptrs, word_row, scales_ptrs, zeros_ptrs, scale_row = source
    slot = turn % STAGES
    row_block, block = 0, turn
    if SPAN > 1:
        row_block, block = turn // NUM_BLOCKS, turn % NUM_BLOCKS
    is_turn = turn < SPAN * NUM_BLOCKS
    for plane in gl.static_range(4):
        is_column = is_x & is_turn
        if K % 128 != 0:
            k = gl.arange(0, 32, layout=gl.SliceLayout(0, copy_layout(WARPS)))
            is_column = is_column & (block * 128 + plane * 32 + k < K)[None, :]
        async_copy.async_copy_global_to_shared(
            xs[plane].index(slot), x_ptrs + block * 128 + plane * 32, mask=is_column
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


@gluon.jit
def load_block(shared, slot, ROUTES: gl.constexpr, WARPS: gl.constexpr):
    """Words of a block, and scales and zero points of its groups, from its buffers."""
    _, words, scales, zeros = shared
    row: gl.constexpr = gl.SliceLayout(1, operand_layout(ROUTES, WARPS))
    scale, zero = (), ()
    for span in gl.static_range(len(scales)):
        scale = scale + (scales[span].index(slot).load(row),)
    for span in gl.static_range(len(zeros)):
        zero = zero + (zeros[span].index(slot).load(row),)
    return words[0].index(slot).load(operand_layout(ROUTES, WARPS)), scale, zero


@gluon.jit
def numbers_of_plane(loaded, PLANE: gl.constexpr):
    """Weights `[rows, 32]` of a plane of a block."""
    words, scales, zeros = loaded
    span: gl.constexpr = PLANE * len(scales) // 4
    scale = scales[span]
    dtype: gl.constexpr = scale.dtype
    BASE: gl.constexpr = 128.0 if dtype == gl.bfloat16 else 1024.0
    if len(zeros) == 0:
        zero = gl.full(words.shape, BASE + 8, dtype, layout=words.type.layout)
    else:
        zero = (zeros[span].to(gl.float32) + BASE).to(dtype)[:, None]
    return unpack(words, scale[:, None], zero, PLANE)


@gluon.jit
def multiply(numbers, x, acc, rest, ROUTES: gl.constexpr, REST: gl.constexpr, WARPS: gl.constexpr):
    """Start acc + numbers x^T, and the same of the REST routes after the first ROUTES."""
    acc = warpgroup_mma(numbers, x.slice(0, ROUTES).permute((1, 0)), acc, is_async=True)
    if REST > 0:
        same = gl.convert_layout(numbers, operand_layout(REST, WARPS), assert_trivial=True)
        rest = warpgroup_mma(same, x.slice(ROUTES, REST).permute((1, 0)), rest, is_async=True)
    return acc, rest


@gluon.jit
def wait(count: gl.constexpr, acc, rest, numbers, REST: gl.constexpr):
    """Until at most so many planes are in the making; `numbers` are free from then on."""
    if REST > 0:
        acc, rest, numbers = warpgroup_mma_wait(2 * count, [acc, rest, numbers])
    else:
        acc, numbers = warpgroup_mma_wait(count, [acc, numbers])
    return acc, rest, numbers


@gluon.jit
def start(
    source,
    K: gl.constexpr, HEIGHT: gl.constexpr, PARTS: gl.constexpr, GROUP_SIZE: gl.constexpr,
    ROWS: gl.constexpr, SPAN: gl.constexpr, BLOCK_M: gl.constexpr, ROUTES: gl.constexpr,
    STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Buffers, the first copies, and what `products` takes of the first block.

    source is x_ptrs `[BLOCK_M, 32]` at column 0 and which of its rows there are; words_ptrs
    `[ROWS, 32]` at block 0 (`words_of_rows`) and their rows; scales_ptrs and zeros_ptrs (a tuple
    of one, or empty) `[ROWS]` at group 0 and their rows. W has PARTS matrices of HEIGHT rows; ROWS
    are the operand's of one row block, and a program has SPAN of them.
    """
    gl.static_assert(STAGES >= 3)
    GROUPS: gl.constexpr = 1 if GROUP_SIZE == K else (127 + GROUP_SIZE) // GROUP_SIZE
    dtype: gl.constexpr = source[0].dtype.element_ty
    plane_s: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    words_s: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [1, 0])
    row_s: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    shared = (
        buffers(dtype, 4, [STAGES, BLOCK_M, 32], plane_s),
        buffers(gl.int16, 1, [STAGES, ROWS, 32], words_s),
        buffers(dtype, GROUPS, [STAGES, ROWS], row_s),
        buffers(gl.uint8, GROUPS * len(source[5]), [STAGES, ROWS], row_s),
    )
    for turn in gl.static_range(STAGES - 1):
        copy_block(shared, source, turn, K, HEIGHT, PARTS, GROUP_SIZE, ROWS, SPAN, STAGES, WARPS)
    async_copy.wait_group(STAGES - 2)
    fence_async_shared()
    now = load_block(shared, 0, ROUTES, WARPS)
    return shared, now, numbers_of_plane(now, 0)


@gluon.jit
def products(
    shared, source, now, a0, first,
    K: gl.constexpr, HEIGHT: gl.constexpr, PARTS: gl.constexpr, GROUP_SIZE: gl.constexpr,
    ROWS: gl.constexpr, SPAN: gl.constexpr, ROUTES: gl.constexpr, REST: gl.constexpr,
    STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """W x^T of a row block: `[ROWS, ROUTES]` and `[ROWS, REST]` fp32; then the next row block's
    first block. `now` and a0 are those of turn `first`.
    """
    NUM_BLOCKS: gl.constexpr = (K + 127) // 128
    xs = shared[0]
    acc = gl.zeros([ROWS, ROUTES], gl.float32, layout=product_layout(ROUTES, WARPS))
    rest = acc
    if REST > 0:
        rest = gl.zeros([ROWS, REST], gl.float32, layout=product_layout(REST, WARPS))
    for turn in range(first, first + NUM_BLOCKS):
        slot = turn % STAGES
        acc, rest = multiply(a0, xs[0].index(slot), acc, rest, ROUTES, REST, WARPS)
        a1 = numbers_of_plane(now, 1)
        acc, rest = multiply(a1, xs[1].index(slot), acc, rest, ROUTES, REST, WARPS)
        acc, rest, a0 = wait(1, acc, rest, a0, REST)
        # Past the barrier here every warp is done with the block before, and the next is there.
        async_copy.wait_group(STAGES - 3)
        fence_async_shared()
        copy_block(
            shared, source, turn + STAGES - 1,
            K, HEIGHT, PARTS, GROUP_SIZE, ROWS, SPAN, STAGES, WARPS,
        )  # fmt: skip
        a2 = numbers_of_plane(now, 2)
        acc, rest = multiply(a2, xs[2].index(slot), acc, rest, ROUTES, REST, WARPS)
        acc, rest, a1 = wait(1, acc, rest, a1, REST)
        a3 = numbers_of_plane(now, 3)
        acc, rest = multiply(a3, xs[3].index(slot), acc, rest, ROUTES, REST, WARPS)
        now = load_block(shared, (turn + 1) % STAGES, ROUTES, WARPS)
        acc, rest, a2 = wait(1, acc, rest, a2, REST)
        a0 = numbers_of_plane(now, 0)
    acc, rest, a0 = wait(0, acc, rest, a0, REST)
    return acc, rest, now, a0


@gluon.constexpr_function
def store_layout(WIDTH, WARPS):
    """Of rows of so many 16-bit numbers: 16 bytes a thread."""
    threads = min(WIDTH // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // threads, threads], [WARPS, 1], [1, 0])


@gluon.jit
def store_rows(
    tile, out_ptr, route_ids_ptr, first, num_rows, column, START: gl.constexpr,
    STRIDE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Store `tile` `[columns, routes]`, routes START.. of a program's, a route a row of out.

    A route's row is its id, or its place where route_ids_ptr is None; rows lie STRIDE apart.
    """
    WIDTH: gl.constexpr = tile.shape[0]
    ROUTES: gl.constexpr = tile.shape[1]
    shared_l: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    row_l: gl.constexpr = store_layout(WIDTH, WARPS)
    turned = gl.allocate_shared_memory(tile.dtype, [ROUTES, WIDTH], shared_l)
    turned.store(gl.permute(tile, (1, 0)))
    m = START + gl.arange(0, ROUTES, layout=gl.SliceLayout(1, row_l))
    rows = (first + m).to(gl.int64)
    if route_ids_ptr is not None:
        rows = gl.load(route_ids_ptr + rows, mask=m < num_rows, other=0).to(gl.int64)
    n = column + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, row_l))
    mask = (m < num_rows)[:, None]
    if STRIDE % WIDTH != 0:
        mask = mask & (n < STRIDE)[None, :]
    gl.store(out_ptr + rows[:, None] * STRIDE + n[None, :], turned.load(row_l), mask=mask)
