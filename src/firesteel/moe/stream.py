# pyright: basic
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# ruff: noqa: ANN001, ANN201, ANN202, RUF005
"""The loop that FC1 and FC2 share in Gluon where experts have few rows.

A program multiplies row blocks of W by 8 or 16 routes with `mma.sync`, W on the left. Codes, scales
and x all come by `cp.async`, blocks of 128 columns STAGES - 1 ahead, so that nothing in the loop
waits for memory but for the block itself. Products of a group are summed, then scaled in fp32; FP4
weights are scaled before.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

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

__all__ = ["begin", "stream_products", "sum_layout", "x_layout"]


@gluon.constexpr_function
def sum_layout(WARPS):
    """Of products: each warp has 16 rows of W."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, 8])


@gluon.constexpr_function
def operand_layout(WARPS):
    """Of the numbers of W in those products."""
    return gl.DotOperandLayout(operand_index=0, parent=sum_layout(WARPS), k_width=2)


@gluon.constexpr_function
def x_layout(WARPS):
    """Of pointers to `[routes, 128]` of x: 16 bytes a thread."""
    return gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])


@gluon.jit
def begin(
    source, first, last,
    K: gl.constexpr, HEIGHT: gl.constexpr, PARTS: gl.constexpr, GROUP_SIZE: gl.constexpr,
    ROWS: gl.constexpr, SPAN: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    ELEMENT: gl.constexpr,
):  # fmt: skip
    """Buffers, and copies of the blocks of turns from `first` on. source is as `copy_block`'s."""
    gl.static_assert(STAGES >= 2)
    GROUPS: gl.constexpr = 1 if GROUP_SIZE == K else (127 + GROUP_SIZE) // GROUP_SIZE
    row_s: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    x_s: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    shared = (
        buffers(source[0].dtype.element_ty, 1, [STAGES, BLOCK_M, 128], x_s),
        word_buffers(ELEMENT, STAGES, ROWS),
        buffers(source[5].dtype.element_ty, GROUPS, [STAGES, ROWS], row_s),
        buffers(gl.uint8, GROUPS * len(source[6]), [STAGES, ROWS], row_s),
    )
    for ahead in gl.static_range(STAGES - 1):
        copy_block(
            shared, source, first + ahead, last,
            K, HEIGHT, PARTS, GROUP_SIZE, ROWS, SPAN, STAGES, ELEMENT,
        )  # fmt: skip
    return shared


@gluon.jit
def add_plane(part, numbers, x, PLANE: gl.constexpr, WARPS: gl.constexpr):
    """part + the product of the numbers of a plane with its 32 columns of x `[128, routes]`."""
    x_l: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=sum_layout(WARPS), k_width=2)
    return mma_v2(numbers, x.slice(32 * PLANE, 32).load(x_l), part)


@gluon.jit
def add_grouped_block(
    acc, words, scales, zeros, x, slot, ELEMENT: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """acc + the product of a block but of FP4: of each group a sum, which its scales multiply."""
    GROUPS: gl.constexpr = len(scales)
    sum_l: gl.constexpr = acc.type.layout
    words_l: gl.constexpr = operand_layout(WARPS)
    for span in gl.static_range(GROUPS):
        scale = scales[span].index(slot).load(gl.SliceLayout(1, sum_l))
        if ELEMENT == "nf3":
            scale = e5m3_scales(scale, x.dtype, gl.float32)
        scale = scale.to(gl.float32)
        zero = ()
        if len(zeros) > 0:
            zero = (zeros[span].index(slot).load(gl.SliceLayout(1, words_l)),)
        part = gl.zeros(acc.shape, gl.float32, layout=sum_l)
        for step in gl.static_range(4 // GROUPS):
            numbers = codes_of_plane(
                words, zero, x, span * (4 // GROUPS) + step, words_l, ELEMENT
            )  # fmt: skip
            part = add_plane(part, numbers, x, span * (4 // GROUPS) + step, WARPS)
        acc += part * scale[:, None]
    return acc


@gluon.jit
def add_fp4_block(acc, words, scales, x, slot, ELEMENT: gl.constexpr, WARPS: gl.constexpr):
    """acc + the product of a block of FP4, each weight scaled by itself, exactly."""
    rows = ()
    for span in gl.static_range(len(scales)):
        bits = scales[span].index(slot).load(gl.SliceLayout(1, operand_layout(WARPS)))
        rows = rows + (fp4_scales(bits, x.dtype, ELEMENT),)
    for plane in gl.static_range(4):
        acc = add_plane(acc, fp4_of_plane(words, rows, x, plane), x, plane, WARPS)
    return acc


@gluon.jit
def stream_products(
    shared, source, first, end, last,
    K: gl.constexpr, HEIGHT: gl.constexpr, PARTS: gl.constexpr, GROUP_SIZE: gl.constexpr,
    ROWS: gl.constexpr, SPAN: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr, ELEMENT: gl.constexpr,
):  # fmt: skip
    """W x^T of turns first..end, `[ROWS, BLOCK_M]` fp32; copies run on towards turn `last`."""
    gl.static_assert(ROWS % (16 * WARPS) == 0)
    xs, words, scales, zeros = shared
    sum_l: gl.constexpr = sum_layout(WARPS)
    acc = gl.zeros([ROWS, BLOCK_M], gl.float32, layout=sum_l)
    for turn in range(first, end):
        slot = turn % STAGES
        async_copy.wait_group(STAGES - 2)
        copy_block(
            shared, source, turn + STAGES - 1, last,
            K, HEIGHT, PARTS, GROUP_SIZE, ROWS, SPAN, STAGES, ELEMENT,
        )  # fmt: skip
        block = load_words(words, slot, operand_layout(WARPS), ELEMENT, WARPS)
        x = xs[0].index(slot).permute((1, 0))
        if ELEMENT == "mxfp4" or ELEMENT == "nvfp4":
            acc = add_fp4_block(acc, block[0], scales, x, slot, ELEMENT, WARPS)
        else:
            acc = add_grouped_block(acc, block, scales, zeros, x, slot, ELEMENT, WARPS)
    return acc
