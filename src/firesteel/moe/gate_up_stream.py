# pyright: basic
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# ruff: noqa: ANN001, ANN201
"""FC1 of the MoE layer in Gluon where experts have few rows; `gate_up_kernel` is its twin."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_wait

from firesteel.moe.epilogue import act_and_store, store_sums
from firesteel.moe.pipeline import row_layout, tile_words, word_layout, words_of_rows
from firesteel.moe.stream import begin, stream_products, x_layout
from firesteel.moe.tile import find_tile

__all__ = ["gate_up_stream_kernel"]


@gluon.jit(
    do_not_specialize=["stride_x", "R"],
    do_not_specialize_on_alignment=["topk_ids_ptr", "expert_map_ptr", "topk_weights_ptr"],
)
def gate_up_stream_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    zero_points_ptr,
    global_scale_ptr,
    bias_ptr,
    topk_ids_ptr,
    expert_map_ptr,
    topk_weights_ptr,
    route_ids_ptr,
    expert_offsets_ptr,
    block_expert_ptr,
    block_row_ptr,
    num_blocks_ptr,
    hidden_ptr,
    partials_ptr,
    stride_x: gl.int64,
    R: gl.int64,
    K: gl.constexpr,
    N: gl.constexpr,
    E: gl.constexpr,
    NUM_GLOBAL: gl.constexpr,
    TOP_K: gl.constexpr,
    ELEMENT: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    DIVIDES: gl.constexpr,
    ACTIVATION: gl.constexpr,
    LIMIT: gl.constexpr,
    ALPHA: gl.constexpr,
    BETA: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SPLIT_K: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """hidden[p] = act(w13[e] @ x[r // TOP_K] * topk_weights[r] + bias[e]), r = route_ids[p]

    Arguments, modes, grid, numerics and range are those of gate_up_kernel.

    Key       dtypes, which pointers are None, constexprs; WARPS is num_warps.
    Oracle    gate_up_reference
    """
    if PDL:
        gdc_wait()
    PARTS: gl.constexpr = 1 if ACTIVATION == "relu2" else 2
    ROWS: gl.constexpr = PARTS * BLOCK_N
    NUM_BLOCKS: gl.constexpr = (K + 127) // 128
    TILE: gl.constexpr = tile_words(ELEMENT)
    PADDED: gl.constexpr = (N + 63) // 64 * 64
    PART: gl.constexpr = PADDED // 64 * NUM_BLOCKS * TILE
    NUM_GROUPS: gl.constexpr = K // GROUP_SIZE
    UNIT: gl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    gl.static_assert(PARTS * PART < 2**31)
    gl.static_assert(BLOCK_N % 64 == 0)
    expert, first, num_rows = find_tile(
        topk_ids_ptr, expert_map_ptr, route_ids_ptr, expert_offsets_ptr, block_expert_ptr,
        block_row_ptr, num_blocks_ptr, gl.program_id(1), R, E, NUM_GLOBAL, BLOCK_M,
    )  # fmt: skip
    if num_rows <= 0:
        return
    x_l: gl.constexpr = x_layout(WARPS)
    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, x_l))
    is_row = m < num_rows
    routes = (first + m).to(gl.int64)
    if route_ids_ptr is not None:
        routes = gl.load(route_ids_ptr + routes, mask=is_row, other=0).to(gl.int64)
    k = gl.arange(0, 128, layout=gl.SliceLayout(0, x_l))
    x_ptrs = x_ptr + ((routes // TOP_K) * stride_x * UNIT)[:, None] + k[None, :]
    # Rows of the operand: 8 gate rows, then the up rows of the same columns.
    q = gl.arange(0, ROWS, layout=gl.SliceLayout(1, word_layout(ELEMENT, WARPS)))
    part, row = q // 8 % PARTS, q // (8 * PARTS) * 8 + q % 8
    column = gl.program_id(0) * BLOCK_N
    words_ptrs = codes_ptr + expert * (PARTS * PART)
    words_ptrs += gl.program_id(0) * (BLOCK_N // 64 * NUM_BLOCKS * TILE)
    words_ptrs += words_of_rows(row, NUM_BLOCKS, ELEMENT, WARPS) + (part * PART)[:, None]
    word_row = column + row
    q = gl.arange(0, ROWS, layout=row_layout(WARPS))
    part, row = q // 8 % PARTS, q // (8 * PARTS) * 8 + q % 8
    scale_place = expert * (NUM_GROUPS * PARTS * N) + part * N + column + row
    zeros_ptrs = ()
    if zero_points_ptr is not None:
        zeros_ptrs = (zero_points_ptr + scale_place,)
    source = (
        x_ptrs, is_row[:, None], k, words_ptrs, word_row, scales_ptr + scale_place, zeros_ptrs,
        column + row,
    )  # fmt: skip
    span = gl.program_id(2)
    start, end = span * NUM_BLOCKS // SPLIT_K, (span + 1) * NUM_BLOCKS // SPLIT_K
    shared = begin(source, start, end, K, N, PARTS, GROUP_SIZE, ROWS, 1, BLOCK_M, STAGES, ELEMENT)
    acc = stream_products(
        shared, source, start, end, end,
        K, N, PARTS, GROUP_SIZE, ROWS, 1, BLOCK_M, STAGES, WARPS, ELEMENT,
    )  # fmt: skip
    if partials_ptr is not None:
        store_sums(
            acc, global_scale_ptr, partials_ptr, x_ptr, expert, span * R + first, num_rows,
             N, PARTS, ELEMENT, DIVIDES,
        )  # fmt: skip
    else:
        # What is stored next may lie where the last copies, which are empty, go.
        async_copy.wait_group(0)
        act_and_store(
            acc, global_scale_ptr, bias_ptr, topk_weights_ptr, route_ids_ptr, hidden_ptr, expert,
            first, num_rows, 0, N, PARTS, ELEMENT, DIVIDES, ACTIVATION, LIMIT, ALPHA, BETA, BLOCK_N,
            WARPS,
        )  # fmt: skip
