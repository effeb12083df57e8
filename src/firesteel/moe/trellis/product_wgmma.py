# pyright: basic
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# ruff: noqa: ANN001, ANN201, ANN202, RUF005
"""The product of rotated rows with trellises on Hopper where matrices have many rows.

A program multiplies row blocks of 128 of a matrix by up to 128 rows of x with `wgmma`, the weights
on the left, in registers. Each is decoded once for all rows, to its number rounded to fp16, while
the product before runs. Words and x come by `cp.async`, half blocks of 64 columns through STAGES
buffers, so that two programs fit a multiprocessor.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra.cuda import gdc_wait

from firesteel.moe.epilogue import store_rows
from firesteel.moe.pipeline import buffers
from firesteel.moe.trellis.numbers import numbers_of, windows_of, words_before
from firesteel.moe.wgmma import multiply, operand_layout, product_layout, wait

__all__ = ["trellis_wgmma_kernel"]


@gluon.jit
def copy_half(
    shared, source, turn, last, BITS: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Start the copies of a turn's half block to its buffers, as one group; none from `last` on.

    They are masked, not skipped: a branch among `wgmma` would make each wait.
    """
    xs, words = shared
    x_ptrs, is_x, words_ptrs = source
    slot = turn % STAGES
    is_turn = turn < last
    for plane in gl.static_range(2):
        async_copy.async_copy_global_to_shared(
            xs[plane].index(slot), x_ptrs + (turn % HALVES) * 64 + 32 * plane, mask=is_x & is_turn
        )
    half_ptrs = words_ptrs + turn // 2 * (BITS * 512) + turn % 2 * 256
    for word in gl.static_range(BITS):
        async_copy.async_copy_global_to_shared(
            words[word].index(slot), half_ptrs + word * 512, mask=is_turn
        )
    async_copy.commit_group()


@gluon.jit
def load_windows(words, slot, BITS: gl.constexpr, WARPS: gl.constexpr):
    """Words of a half block, and what lies between them."""
    row_l: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [WARPS, 1], [1, 0])
    own = ()
    for word in gl.static_range(BITS):
        own = own + (words[word].index(slot).load(row_l),)
    return windows_of((words_before(own[BITS - 1], row_l),) + own)


@gluon.jit
def numbers_of_plane(
    windows, BITS: gl.constexpr, PLANE: gl.constexpr, CODEBOOK: gl.constexpr,
    ROUTES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Weights `[128, 32]` of a plane of a half block: the columns of two quarters."""
    layout: gl.constexpr = operand_layout(ROUTES, WARPS)
    first = numbers_of(windows, layout, BITS, 2 * PLANE, CODEBOOK)
    second = numbers_of(windows, layout, BITS, 2 * PLANE + 1, CODEBOOK)
    both = gl.reshape(gl.permute(gl.join(first, second), (0, 2, 1)), [128, 32])
    return gl.convert_layout(both, layout)


@gluon.jit
def multiply_blocks(
    shared, source, windows, a0, first, last,
    BITS: gl.constexpr, HALVES: gl.constexpr, CODEBOOK: gl.constexpr, ROUTES: gl.constexpr,
    REST: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Products of a row block: `[128, ROUTES]` and `[128, REST]` fp32; then the next one's first
    half block. `windows` and a0 are those of turn `first`.
    """
    xs, words = shared
    acc = gl.zeros([128, ROUTES], gl.float32, layout=product_layout(ROUTES, WARPS))
    rest = acc
    if REST > 0:
        rest = gl.zeros([128, REST], gl.float32, layout=product_layout(REST, WARPS))
    for turn in range(first, first + HALVES):
        slot = turn % STAGES
        acc, rest = multiply(a0, xs[0].index(slot), acc, rest, ROUTES, REST, WARPS)
        a1 = numbers_of_plane(windows, BITS, 1, CODEBOOK, ROUTES, WARPS)
        acc, rest = multiply(a1, xs[1].index(slot), acc, rest, ROUTES, REST, WARPS)
        acc, rest, a0 = wait(1, acc, rest, a0, REST)
        # Past the barrier here every warp is done with the half before, and the next is there.
        async_copy.wait_group(STAGES - 3)
        fence_async_shared()
        windows = load_windows(words, (turn + 1) % STAGES, BITS, WARPS)
        copy_half(shared, source, turn + STAGES - 1, last, BITS, HALVES, STAGES)
        a0 = numbers_of_plane(windows, BITS, 0, CODEBOOK, ROUTES, WARPS)
    acc, rest, a0 = wait(0, acc, rest, a0, REST)
    return acc, rest, windows, a0


@gluon.jit
def multiply_tile(
    x_ptr, words_ptr, route_ids_ptr, y_ptr, first, num_rows, part, row_block,
    K: gl.constexpr, N: gl.constexpr, PARTS: gl.constexpr, BITS: gl.constexpr,
    CODEBOOK: gl.constexpr, ROUTES: gl.constexpr, REST: gl.constexpr, SPAN: gl.constexpr,
    STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Row blocks of a matrix of BITS bits times ROUTES + REST rows of x."""
    HALVES: gl.constexpr = K // 64
    BLOCK_M: gl.constexpr = ROUTES + REST
    gl.static_assert(STAGES >= 3)
    x_l: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [WARPS, 1], [1, 0])
    m = gl.arange(0, BLOCK_M if REST == 0 else 128, layout=gl.SliceLayout(1, x_l))
    is_row = m < num_rows
    rows = (first + m).to(gl.int64)
    if route_ids_ptr is not None:
        rows = gl.load(route_ids_ptr + rows, mask=is_row, other=0).to(gl.int64)
    k = gl.arange(0, 32, layout=gl.SliceLayout(0, x_l))
    words_l: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    group = gl.arange(0, 64, layout=gl.SliceLayout(1, words_l))
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, words_l))
    source = (
        x_ptr + ((rows * PARTS + part) * K)[:, None] + k[None, :],
        is_row[:, None],
        words_ptr + row_block * (HALVES * BITS * 256) + group[:, None] * 4 + word[None, :],
    )
    plane_s: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    words_s: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 1, [1, 0])
    shared = (
        buffers(gl.float16, 2, [STAGES, m.shape[0], 32], plane_s),
        buffers(gl.int32, BITS, [STAGES, 64, 4], words_s),
    )
    last = SPAN * HALVES
    for ahead in gl.static_range(STAGES - 1):
        copy_half(shared, source, ahead, last, BITS, HALVES, STAGES)
    async_copy.wait_group(STAGES - 2)
    fence_async_shared()
    windows = load_windows(shared[1], 0, BITS, WARPS)
    a0 = numbers_of_plane(windows, BITS, 0, CODEBOOK, ROUTES, WARPS)
    column = (part * (N // 128) + row_block) * 128
    for span in range(0, SPAN):
        acc, rest, windows, a0 = multiply_blocks(
            shared, source, windows, a0, span * HALVES, last,
            BITS, HALVES, CODEBOOK, ROUTES, REST, STAGES, WARPS,
        )  # fmt: skip
        here = column + span * 128
        store_rows(
            acc.to(gl.float16), y_ptr, route_ids_ptr, first, num_rows, here, 0, PARTS * N, WARPS
        )
        if REST > 0:
            store_rows(
                rest.to(gl.float16), y_ptr, route_ids_ptr, first, num_rows, here, ROUTES,
                PARTS * N, WARPS,
            )  # fmt: skip


@gluon.jit(do_not_specialize=["R"])
def trellis_wgmma_kernel(
    x_ptr,
    words_ptr,
    matrices_ptr,
    route_ids_ptr,
    expert_offsets_ptr,
    block_expert_ptr,
    block_row_ptr,
    num_blocks_ptr,
    y_ptr,
    R: gl.int64,
    K: gl.constexpr,
    N: gl.constexpr,
    PARTS: gl.constexpr,
    RATES: gl.constexpr,
    CODEBOOK: gl.constexpr,
    BLOCK_M: gl.constexpr,
    SPAN: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """y[r, p] = What[e, p]^T x[r, p], r = route_ids[place]

    Arguments, grid and range are those of trellis_stream_kernel where routes are sorted, or rows
    are in order of one matrix; SPLIT_K is 1. A tile of few rows is multiplied as 32, 64, 96 or 128
    of them, up to BLOCK_M.

    Key       dtypes, which pointers are None, constexprs; WARPS is num_warps.
    Numerics  weights rounded to fp16, fp32 sums of products, one rounding to fp16. A row's bits do
              not depend on other rows.
    Oracle    product_reference
    """
    if PDL:
        gdc_wait()
    HEIGHT: gl.constexpr = N // 128
    gl.static_assert(HEIGHT % SPAN == 0)
    gl.static_assert(N * K // 4 < 2**31)
    tile = gl.program_id(1)
    if route_ids_ptr is not None:
        is_tile = tile < gl.load(num_blocks_ptr)
        expert = gl.load(block_expert_ptr + tile, mask=is_tile, other=0).to(gl.int64)
        first = gl.load(block_row_ptr + tile, mask=is_tile, other=0)
        end = gl.load(expert_offsets_ptr + expert + 1, mask=is_tile, other=0)
    else:
        expert, first, end = (tile * 0).to(gl.int64), tile * BLOCK_M, R.to(gl.int32)
    num_rows = gl.minimum(end - first, BLOCK_M)
    if num_rows <= 0:
        return
    part = gl.program_id(0) * SPAN // HEIGHT
    matrix = expert * PARTS + part
    words_ptr += gl.load(matrices_ptr + 2 * matrix).to(gl.int64) * 512
    bits = gl.load(matrices_ptr + 2 * matrix + 1)
    row_block = gl.program_id(0) * SPAN % HEIGHT
    for rate in gl.static_range(1, 9):
        # Apart: the first is known when the kernel is compiled.
        if RATES >> rate & 1:
            for size in gl.static_range(BLOCK_M // 32):
                is_size = (num_rows > 32 * size) & (num_rows <= 32 * size + 32)
                if (bits == rate) & is_size:
                    ROUTES: gl.constexpr = 32 if size == 0 else 128 if size == 3 else 64
                    multiply_tile(
                        x_ptr, words_ptr, route_ids_ptr, y_ptr, first, num_rows, part, row_block,
                        K, N, PARTS, rate, CODEBOOK, ROUTES, 32 if size == 2 else 0, SPAN, STAGES,
                        WARPS,
                    )  # fmt: skip
