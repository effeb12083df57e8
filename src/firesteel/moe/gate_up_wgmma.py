# pyright: basic
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# ruff: noqa: ANN001, ANN201, ANN202
"""FC1 of the MoE layer on Hopper where experts have many rows; `gate_up_kernel` is its twin."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_wait

from firesteel.moe.epilogue import act_and_store
from firesteel.moe.pipeline import copy_layout, row_layout, tile_words, word_layout, words_of_rows
from firesteel.moe.wgmma import products, start

__all__ = ["gate_up_wgmma_kernel"]


@gluon.jit
def gate_up_tile(
    x_ptr, codes_ptr, scales_ptr, zero_points_ptr, global_scale_ptr, bias_ptr, topk_weights_ptr,
    route_ids_ptr, hidden_ptr, stride_x, expert, first, num_rows,
    K: gl.constexpr, N: gl.constexpr, TOP_K: gl.constexpr, ELEMENT: gl.constexpr,
    GROUP_SIZE: gl.constexpr, DIVIDES: gl.constexpr,
    ACTIVATION: gl.constexpr, LIMIT: gl.constexpr, ALPHA: gl.constexpr, BETA: gl.constexpr,
    ROUTES: gl.constexpr, REST: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """A tile of at most ROUTES + REST routes; pointers to weights are those of its expert."""
    PARTS: gl.constexpr = 2 if ACTIVATION != "relu2" else 1
    ROWS: gl.constexpr = PARTS * BLOCK_N
    BLOCK_M: gl.constexpr = ROUTES if REST == 0 else 2 * ROUTES
    NUM_BLOCKS: gl.constexpr = (K + 127) // 128
    TILE: gl.constexpr = tile_words(ELEMENT)
    PADDED: gl.constexpr = (N + 63) // 64 * 64
    copy_l: gl.constexpr = copy_layout(WARPS)
    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, copy_l))
    is_row = m < num_rows
    routes = gl.load(route_ids_ptr + first + m, mask=is_row, other=0).to(gl.int64)
    k = gl.arange(0, 32, layout=gl.SliceLayout(0, copy_l))
    x_ptrs = x_ptr + ((routes // TOP_K) * stride_x)[:, None] + k[None, :]
    # Rows of the operand: 8 gate rows, then the up rows of the same columns.
    q = gl.arange(0, ROWS, layout=gl.SliceLayout(1, word_layout(ELEMENT, WARPS)))
    part, row = q // 8 % PARTS, q // (8 * PARTS) * 8 + q % 8
    column = gl.program_id(0) * BLOCK_N
    words_ptrs = codes_ptr + gl.program_id(0) * (BLOCK_N // 64 * NUM_BLOCKS * TILE)
    words_ptrs += (part * (PADDED // 64 * NUM_BLOCKS * TILE))[:, None]
    words_ptrs += words_of_rows(row, NUM_BLOCKS, ELEMENT, WARPS)
    word_row = column + row
    q = gl.arange(0, ROWS, layout=row_layout(WARPS))
    part, row = q // 8 % PARTS, q // (8 * PARTS) * 8 + q % 8
    scales_ptrs = scales_ptr + part * N + column + row
    zeros_ptrs = ()
    if zero_points_ptr is not None:
        zeros_ptrs = (zero_points_ptr + part * N + column + row,)
    source = (
        x_ptrs, is_row[:, None], k, words_ptrs, word_row, scales_ptrs, zeros_ptrs, column + row,
    )  # fmt: skip
    shared, now, a0 = start(
        source, K, N, PARTS, GROUP_SIZE, ROWS, 1, BLOCK_M, ROUTES, STAGES, WARPS, ELEMENT
    )
    acc, rest, now, a0 = products(
        shared, source, now, a0, 0,
        K, N, PARTS, GROUP_SIZE, ROWS, 1, ROUTES, REST, STAGES, WARPS, ELEMENT,
    )  # fmt: skip
    # What is stored next may lie where the last copies, which are empty, go.
    async_copy.wait_group(0)
    act_and_store(
        acc, global_scale_ptr, bias_ptr, topk_weights_ptr, route_ids_ptr, hidden_ptr, expert,
        first, num_rows, 0, N, PARTS, ELEMENT, DIVIDES, ACTIVATION, LIMIT, ALPHA, BETA, BLOCK_N,
        WARPS,
    )  # fmt: skip
    if REST > 0:
        act_and_store(
            rest, global_scale_ptr, bias_ptr, topk_weights_ptr, route_ids_ptr, hidden_ptr, expert,
            first, num_rows, ROUTES, N, PARTS, ELEMENT, DIVIDES, ACTIVATION, LIMIT, ALPHA, BETA,
            BLOCK_N, WARPS,
        )  # fmt: skip


@gluon.jit(
    do_not_specialize=["stride_x"],
    do_not_specialize_on_alignment=["topk_weights_ptr"],
)
def gate_up_wgmma_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    zero_points_ptr,
    global_scale_ptr,
    bias_ptr,
    topk_weights_ptr,
    route_ids_ptr,
    expert_offsets_ptr,
    block_expert_ptr,
    block_row_ptr,
    num_blocks_ptr,
    hidden_ptr,
    stride_x: gl.int64,
    K: gl.constexpr,
    N: gl.constexpr,
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
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """hidden[p] = act(w13[e] @ x[r // TOP_K] * topk_weights[r] + bias[e]), r = route_ids[p]

    Arguments, grid and range are those of gate_up_kernel where routes are sorted. A tile of few
    routes is multiplied as 32, 64, 96 or 128 of them, up to BLOCK_M.

    Key       dtypes, which pointers are None, constexprs; WARPS is num_warps.
    Numerics  int4 weights dequantised to x's dtype, rounded once, FP4 as gate_up_kernel's; fp32
              sums in order of columns; activation in fp32; one rounding to x's dtype. A row's bits
              do not depend on others.
    Oracle    gate_up_reference
    """
    if PDL:
        gdc_wait()
    PARTS: gl.constexpr = 2 if ACTIVATION != "relu2" else 1
    NUM_BLOCKS: gl.constexpr = (K + 127) // 128
    TILE: gl.constexpr = tile_words(ELEMENT)
    PART: gl.constexpr = (N + 63) // 64 * NUM_BLOCKS * TILE
    NUM_GROUPS: gl.constexpr = K // GROUP_SIZE
    UNIT: gl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    gl.static_assert(PARTS * PART < 2**31)
    gl.static_assert(BLOCK_N % 64 == 0)
    tile = gl.program_id(1)
    if tile >= gl.load(num_blocks_ptr):
        return
    expert = gl.load(block_expert_ptr + tile).to(gl.int64)
    first = gl.load(block_row_ptr + tile)
    num_rows = gl.minimum(gl.load(expert_offsets_ptr + expert + 1) - first, BLOCK_M)
    codes_ptr += expert * (PARTS * PART)
    scales_ptr += expert * (NUM_GROUPS * PARTS * N)
    if zero_points_ptr is not None:
        zero_points_ptr += expert * (NUM_GROUPS * PARTS * N)
    for size in gl.static_range(BLOCK_M // 32):
        if (num_rows > 32 * size) & (num_rows <= 32 * size + 32):
            ROUTES: gl.constexpr = 32 if size == 0 else 128 if size == 3 else 64
            gate_up_tile(
                x_ptr, codes_ptr, scales_ptr, zero_points_ptr, global_scale_ptr, bias_ptr,
                topk_weights_ptr, route_ids_ptr, hidden_ptr, stride_x * UNIT, expert, first,
                num_rows, K, N, TOP_K, ELEMENT, GROUP_SIZE, DIVIDES, ACTIVATION, LIMIT, ALPHA, BETA,
                ROUTES, 32 if size == 2 else 0, BLOCK_N, STAGES, WARPS,
            )  # fmt: skip
