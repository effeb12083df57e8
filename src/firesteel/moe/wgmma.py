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
weights dequantised to that type, rounded once; of nf3 in bf16 that is the format's own rounding.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from firesteel.moe.narrow import e5m3_scales
from firesteel.moe.pipeline import (
    buffers,
    codes_of_plane,
    copy_block,
    fp4_of_plane,
    load_words,
    word_buffers,
)
from firesteel.moe.tile import fp4_scales

__all__ = ["products", "start"]


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


@gluon.jit
def load_block(
    shared, slot, ELEMENT: gl.constexpr, ROUTES: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Words of a block, and scales and zero points of its groups, from its buffers."""
    xs, words, scales, zeros = shared
    row: gl.constexpr = gl.SliceLayout(1, operand_layout(ROUTES, WARPS))
    scale, zero = (), ()
    for span in gl.static_range(len(scales)):
        loaded = scales[span].index(slot).load(row)
        if ELEMENT == "mxfp4" or ELEMENT == "nvfp4":
            loaded = fp4_scales(loaded, xs[0].dtype, ELEMENT)
        elif ELEMENT == "nf3":
            loaded = e5m3_scales(loaded, xs[0].dtype, xs[0].dtype)
        scale = scale + (loaded,)
    for span in gl.static_range(len(zeros)):
        zero = zero + (zeros[span].index(slot).load(row),)
    loaded = load_words(words, slot, operand_layout(ROUTES, WARPS), ELEMENT, WARPS)
    return loaded, scale, zero


@gluon.jit
def numbers_of_plane(
    loaded, ELEMENT: gl.constexpr, PLANE: gl.constexpr, ROUTES: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Weights `[rows, 32]` of a plane of a block: but of FP4 rounded once to the scales' type."""
    words, scales, zeros = loaded
    if ELEMENT == "mxfp4" or ELEMENT == "nvfp4":
        numbers = fp4_of_plane(words[0], scales, scales[0], PLANE)
    else:
        span: gl.constexpr = PLANE * len(scales) // 4
        zero = ()
        if len(zeros) > 0:
            zero = (zeros[span],)
        layout: gl.constexpr = operand_layout(ROUTES, WARPS)
        numbers = codes_of_plane(words, zero, scales[span], PLANE, layout, ELEMENT)
        numbers *= scales[span][:, None]
    return numbers


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
    STAGES: gl.constexpr, WARPS: gl.constexpr, ELEMENT: gl.constexpr,
):  # fmt: skip
    """Buffers, the first copies, and what `products` takes of the first block.

    source is as `copy_block` has it, x_ptrs `[BLOCK_M, 32]`.
    """
    gl.static_assert(STAGES >= 3)
    gl.static_assert(ROWS % (16 * WARPS) == 0)
    GROUPS: gl.constexpr = 1 if GROUP_SIZE == K else (127 + GROUP_SIZE) // GROUP_SIZE
    dtype: gl.constexpr = source[0].dtype.element_ty
    plane_s: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    row_s: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    shared = (
        buffers(dtype, 4, [STAGES, BLOCK_M, 32], plane_s),
        word_buffers(ELEMENT, STAGES, ROWS),
        buffers(source[5].dtype.element_ty, GROUPS, [STAGES, ROWS], row_s),
        buffers(gl.uint8, GROUPS * len(source[6]), [STAGES, ROWS], row_s),
    )
    for turn in gl.static_range(STAGES - 1):
        copy_block(
            shared, source, turn, SPAN * ((K + 127) // 128),
            K, HEIGHT, PARTS, GROUP_SIZE, ROWS, SPAN, STAGES, ELEMENT,
        )  # fmt: skip
    async_copy.wait_group(STAGES - 2)
    fence_async_shared()
    now = load_block(shared, 0, ELEMENT, ROUTES, WARPS)
    return shared, now, numbers_of_plane(now, ELEMENT, 0, ROUTES, WARPS)


@gluon.jit
def products(
    shared, source, now, a0, first,
    K: gl.constexpr, HEIGHT: gl.constexpr, PARTS: gl.constexpr, GROUP_SIZE: gl.constexpr,
    ROWS: gl.constexpr, SPAN: gl.constexpr, ROUTES: gl.constexpr, REST: gl.constexpr,
    STAGES: gl.constexpr, WARPS: gl.constexpr, ELEMENT: gl.constexpr,
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
        a1 = numbers_of_plane(now, ELEMENT, 1, ROUTES, WARPS)
        acc, rest = multiply(a1, xs[1].index(slot), acc, rest, ROUTES, REST, WARPS)
        acc, rest, a0 = wait(1, acc, rest, a0, REST)
        # Past the barrier here every warp is done with the block before, and the next is there.
        async_copy.wait_group(STAGES - 3)
        fence_async_shared()
        copy_block(
            shared, source, turn + STAGES - 1, SPAN * NUM_BLOCKS,
            K, HEIGHT, PARTS, GROUP_SIZE, ROWS, SPAN, STAGES, ELEMENT,
        )  # fmt: skip
        a2 = numbers_of_plane(now, ELEMENT, 2, ROUTES, WARPS)
        acc, rest = multiply(a2, xs[2].index(slot), acc, rest, ROUTES, REST, WARPS)
        acc, rest, a1 = wait(1, acc, rest, a1, REST)
        a3 = numbers_of_plane(now, ELEMENT, 3, ROUTES, WARPS)
        acc, rest = multiply(a3, xs[3].index(slot), acc, rest, ROUTES, REST, WARPS)
        now = load_block(shared, (turn + 1) % STAGES, ELEMENT, ROUTES, WARPS)
        acc, rest, a2 = wait(1, acc, rest, a2, REST)
        a0 = numbers_of_plane(now, ELEMENT, 0, ROUTES, WARPS)
    acc, rest, a0 = wait(0, acc, rest, a0, REST)
    return acc, rest, now, a0
