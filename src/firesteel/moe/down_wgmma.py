# pyright: basic
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# ruff: noqa: ANN001, ANN201, ANN202
"""FC2 of the MoE layer on Hopper where experts have many rows; `down_kernel` is its twin."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from firesteel.moe.epilogue import add_and_store
from firesteel.moe.pipeline import copy_layout, row_layout, tile_words, word_layout, words_of_rows
from firesteel.moe.wgmma import products, start

__all__ = ["down_wgmma_kernel"]


@gluon.jit
def down_tile(
    hidden_ptr, codes_ptr, scales_ptr, zero_points_ptr, global_scale_ptr, bias_ptr,
    route_ids_ptr, y_ptr, expert, first, num_rows,
    K: gl.constexpr, N: gl.constexpr, ELEMENT: gl.constexpr, GROUP_SIZE: gl.constexpr,
    DIVIDES: gl.constexpr, ROUTES: gl.constexpr,
    REST: gl.constexpr, BLOCK_N: gl.constexpr, SPAN: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """A tile of at most ROUTES + REST routes; pointers to weights are those of its expert."""
    BLOCK_M: gl.constexpr = ROUTES if REST == 0 else 2 * ROUTES
    NUM_BLOCKS: gl.constexpr = (N + 127) // 128
    TILE: gl.constexpr = tile_words(ELEMENT)
    copy_l: gl.constexpr = copy_layout(WARPS)
    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, copy_l))
    is_row = m < num_rows
    n = gl.arange(0, 32, layout=gl.SliceLayout(0, copy_l))
    hidden_ptrs = hidden_ptr + ((first + m).to(gl.int64) * N)[:, None] + n[None, :]
    column = gl.program_id(0) * (BLOCK_N * SPAN)
    row = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, word_layout(ELEMENT, WARPS)))
    words_ptrs = codes_ptr + gl.program_id(0) * (BLOCK_N * SPAN // 64 * NUM_BLOCKS * TILE)
    words_ptrs += words_of_rows(row, NUM_BLOCKS, ELEMENT, WARPS)
    scale_row = column + gl.arange(0, BLOCK_N, layout=row_layout(WARPS))
    zeros_ptrs = ()
    if zero_points_ptr is not None:
        zeros_ptrs = (zero_points_ptr + scale_row,)
    source = (
        hidden_ptrs, is_row[:, None], n, words_ptrs, column + row, scales_ptr + scale_row,
        zeros_ptrs, scale_row,
    )  # fmt: skip
    shared, now, a0 = start(
        source, N, K, 1, GROUP_SIZE, BLOCK_N, SPAN, BLOCK_M, ROUTES, STAGES, WARPS, ELEMENT
    )
    for span in range(gl.minimum(SPAN, (K - column + BLOCK_N - 1) // BLOCK_N)):
        acc, rest, now, a0 = products(
            shared, source, now, a0, span * NUM_BLOCKS,
            N, K, 1, GROUP_SIZE, BLOCK_N, SPAN, ROUTES, REST, STAGES, WARPS, ELEMENT,
        )  # fmt: skip
        add_and_store(
            acc, global_scale_ptr, bias_ptr, route_ids_ptr, y_ptr, expert, first, num_rows,
            column, 0, K, ELEMENT, DIVIDES, WARPS,
        )  # fmt: skip
        if REST > 0:
            add_and_store(
                rest, global_scale_ptr, bias_ptr, route_ids_ptr, y_ptr, expert, first, num_rows,
                column, ROUTES, K, ELEMENT, DIVIDES, WARPS,
            )  # fmt: skip
        column += BLOCK_N


@gluon.jit
def down_wgmma_kernel(
    hidden_ptr,
    codes_ptr,
    scales_ptr,
    zero_points_ptr,
    global_scale_ptr,
    bias_ptr,
    route_ids_ptr,
    expert_offsets_ptr,
    block_expert_ptr,
    block_row_ptr,
    num_blocks_ptr,
    y_ptr,
    K: gl.constexpr,
    N: gl.constexpr,
    ELEMENT: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    DIVIDES: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SPAN: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """y[r] = w2[e] @ hidden[p] + bias[e], r = route_ids[p]

    Arguments, grid and range are those of down_kernel where routes are sorted. A tile of few routes
    is multiplied as 32, 64, 96 or 128 of them, up to BLOCK_M.

    Key       dtypes, which pointers are None, constexprs; WARPS is num_warps.
    Numerics  int4 weights dequantised to hidden's dtype, rounded once, FP4 as down_kernel's; fp32
              sums in order of columns; one rounding to hidden's dtype. A row's bits do not depend
              on others.
    Oracle    down_reference
    """
    if PDL:
        gdc_wait()
    NUM_BLOCKS: gl.constexpr = (N + 127) // 128
    TILE: gl.constexpr = tile_words(ELEMENT)
    PADDED: gl.constexpr = (K + 63) // 64 * 64
    NUM_GROUPS: gl.constexpr = N // GROUP_SIZE
    gl.static_assert(PADDED // 64 * NUM_BLOCKS * TILE < 2**31)
    gl.static_assert(BLOCK_N % 64 == 0)
    tile = gl.program_id(1)
    if tile >= gl.load(num_blocks_ptr):
        return
    expert = gl.load(block_expert_ptr + tile).to(gl.int64)
    first = gl.load(block_row_ptr + tile)
    num_rows = gl.minimum(gl.load(expert_offsets_ptr + expert + 1) - first, BLOCK_M)
    codes_ptr += expert * (PADDED // 64 * NUM_BLOCKS * TILE)
    scales_ptr += expert * (NUM_GROUPS * K)
    if zero_points_ptr is not None:
        zero_points_ptr += expert * (NUM_GROUPS * K)
    for size in gl.static_range(BLOCK_M // 32):
        if (num_rows > 32 * size) & (num_rows <= 32 * size + 32):
            ROUTES: gl.constexpr = 32 if size == 0 else 128 if size == 3 else 64
            down_tile(
                hidden_ptr, codes_ptr, scales_ptr, zero_points_ptr, global_scale_ptr, bias_ptr,
                route_ids_ptr, y_ptr, expert, first, num_rows, K, N, ELEMENT, GROUP_SIZE, DIVIDES,
                ROUTES, 32 if size == 2 else 0, BLOCK_N, SPAN, STAGES, WARPS,
            )  # fmt: skip
