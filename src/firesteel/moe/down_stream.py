# pyright: basic
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# ruff: noqa: ANN001, ANN201
"""FC2 of the MoE layer in Gluon where experts have few rows; `down_kernel` is its twin."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from firesteel.moe.epilogue import add_and_store
from firesteel.moe.pipeline import row_layout, tile_words, word_layout, words_of_rows
from firesteel.moe.stream import begin, stream_products, x_layout
from firesteel.moe.tile import find_tile

__all__ = ["down_stream_kernel"]


@gluon.jit(
    do_not_specialize=["R"], do_not_specialize_on_alignment=["topk_ids_ptr", "expert_map_ptr"]
)
def down_stream_kernel(
    hidden_ptr,
    codes_ptr,
    scales_ptr,
    zero_points_ptr,
    global_scale_ptr,
    bias_ptr,
    topk_ids_ptr,
    expert_map_ptr,
    route_ids_ptr,
    expert_offsets_ptr,
    block_expert_ptr,
    block_row_ptr,
    num_blocks_ptr,
    y_ptr,
    R: gl.int64,
    K: gl.constexpr,
    N: gl.constexpr,
    E: gl.constexpr,
    NUM_GLOBAL: gl.constexpr,
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

    Arguments, modes, grid, numerics and range are those of down_kernel.

    Key       dtypes, which pointers are None, constexprs; WARPS is num_warps.
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
    expert, first, num_rows = find_tile(
        topk_ids_ptr, expert_map_ptr, route_ids_ptr, expert_offsets_ptr, block_expert_ptr,
        block_row_ptr, num_blocks_ptr, gl.program_id(1), R, E, NUM_GLOBAL, BLOCK_M,
    )  # fmt: skip
    if num_rows <= 0:
        return
    x_l: gl.constexpr = x_layout(WARPS)
    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, x_l))
    n = gl.arange(0, 128, layout=gl.SliceLayout(0, x_l))
    hidden_ptrs = hidden_ptr + ((first + m).to(gl.int64) * N)[:, None] + n[None, :]
    column = gl.program_id(0) * (BLOCK_N * SPAN)
    row = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, word_layout(ELEMENT, WARPS)))
    words_ptrs = codes_ptr + expert * (PADDED // 64 * NUM_BLOCKS * TILE)
    words_ptrs += gl.program_id(0) * (BLOCK_N * SPAN // 64 * NUM_BLOCKS * TILE)
    words_ptrs += words_of_rows(row, NUM_BLOCKS, ELEMENT, WARPS)
    scale_row = column + gl.arange(0, BLOCK_N, layout=row_layout(WARPS))
    scale_place = expert * (NUM_GROUPS * K) + scale_row
    zeros_ptrs = ()
    if zero_points_ptr is not None:
        zeros_ptrs = (zero_points_ptr + scale_place,)
    source = (
        hidden_ptrs, (m < num_rows)[:, None], n, words_ptrs, column + row,
        scales_ptr + scale_place, zeros_ptrs, scale_row,
    )  # fmt: skip
    last = SPAN * NUM_BLOCKS
    shared = begin(source, 0, last, N, K, 1, GROUP_SIZE, BLOCK_N, SPAN, BLOCK_M, STAGES, ELEMENT)
    for span in range(gl.minimum(SPAN, (K - column + BLOCK_N - 1) // BLOCK_N)):
        acc = stream_products(
            shared, source, span * NUM_BLOCKS, (span + 1) * NUM_BLOCKS, last,
            N, K, 1, GROUP_SIZE, BLOCK_N, SPAN, BLOCK_M, STAGES, WARPS, ELEMENT,
        )  # fmt: skip
        add_and_store(
            acc, global_scale_ptr, bias_ptr, route_ids_ptr, y_ptr, expert, first, num_rows,
            column, 0, K, ELEMENT, DIVIDES, WARPS,
        )  # fmt: skip
        column += BLOCK_N
