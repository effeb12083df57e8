# pyright: basic
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false
# ruff: noqa: ANN001, ANN201
"""FC1 of the MoE layer: gate and up products of int4 weights, and the activation between them."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from firesteel.moe.tile import activate, add_block, find_tile, load_columns

__all__ = ["gate_up_kernel"]


@triton.jit(
    do_not_specialize=["stride_x", "R"],
    do_not_specialize_on_alignment=["topk_ids_ptr", "expert_map_ptr", "topk_weights_ptr"],
)
def gate_up_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    zero_points_ptr,
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
    stride_x: tl.int64,
    R: tl.int64,
    K: tl.constexpr,
    N: tl.constexpr,
    E: tl.constexpr,
    NUM_GLOBAL: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """hidden[p] = act(w13[e] @ x[r // TOP_K] * topk_weights[r] + bias[e]), r = route_ids[p]

    name          shape               dtype        layout            traffic
    x             [M, K]              fp           unit last stride  read ceil(N / BLOCK_N) times
    codes         [E, P*N, K/128, 32] int16        contiguous        a tile's expert, once
    scales        [E, P*N, G]         fp           contiguous        as codes
    zero_points   [E, P*N, G]         uint8        contiguous        as codes; None: 8
    bias          [E, P*N]            fp           contiguous        as codes; or None
    topk_ids      [R]                 int32/int64  contiguous        read in direct mode
    expert_map    [NUM_GLOBAL]        int32        contiguous        likewise; or None
    topk_weights  [R]                 fp           contiguous        None: not on the input
    route_ids..num_blocks             int32        as place_kernel writes them; None: direct mode
    hidden        [R, N]              as x         contiguous        written once; needs no init

    P is 2 (gate rows, then up rows), or 1 where the activation has no up. K / 128 is rounded up,
    and codes past K are 0. Packed mode writes hidden[p] at place p of `route_ids`. Direct mode
    takes one route a tile and writes hidden[r]; the rows of routes without an expert stay.

    Grid      (ceil(N / BLOCK_N), tiles), with R tiles in direct mode; tiles past the last return.
    Key       dtypes, which pointers are None, constexprs.
    Numerics  fp32 sums over a group's 32, 64 or 128 columns, scaled, summed in order; activation
              in fp32; one rounding to x's dtype. A row's bits do not depend on other rows.
    Bytes     tiles * P*N * (K/2 + G * bytes of a scale) + 2*R*N + 2*R*K * ceil(N / BLOCK_N)
    Range     offsets between rows and experts are int64; within an expert int32.
    Oracle    gate_up_reference
    """
    if PDL:
        gdc_wait()
    IS_GATED: tl.constexpr = ACTIVATION != "relu2"
    ROWS: tl.constexpr = 2 * N if IS_GATED else N
    NUM_BLOCKS: tl.constexpr = (K + 127) // 128
    NUM_GROUPS: tl.constexpr = K // GROUP_SIZE
    tl.static_assert(ROWS * NUM_BLOCKS * 32 < 2**31)
    tl.static_assert(
        GROUP_SIZE == 32 or GROUP_SIZE == 64 or GROUP_SIZE % 128 == 0 or GROUP_SIZE == K
    )
    expert, first, num_rows = find_tile(
        topk_ids_ptr,
        expert_map_ptr,
        route_ids_ptr,
        expert_offsets_ptr,
        block_expert_ptr,
        block_row_ptr,
        num_blocks_ptr,
        tl.program_id(1),
        R,
        E,
        NUM_GLOBAL,
        BLOCK_M,
    )
    if num_rows <= 0:
        return
    is_row = tl.arange(0, BLOCK_M) < num_rows
    places = (first + tl.arange(0, BLOCK_M)).to(tl.int64)
    routes = places
    if route_ids_ptr is not None:
        routes = tl.load(route_ids_ptr + places, mask=is_row, other=0).to(tl.int64)
    x_rows = x_ptr + (routes // TOP_K) * stride_x
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_out = n < N
    codes_ptrs = codes_ptr + expert * (ROWS * NUM_BLOCKS * 32)
    codes_ptrs = codes_ptrs + n[:, None] * (NUM_BLOCKS * 32) + tl.arange(0, 32)[None, :]
    scales_ptrs = scales_ptr + expert * (ROWS * NUM_GROUPS) + n * NUM_GROUPS
    zeros_ptrs = None
    if zero_points_ptr is not None:
        zeros_ptrs = zero_points_ptr + expert * (ROWS * NUM_GROUPS) + n * NUM_GROUPS
    gate = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for block in range(NUM_BLOCKS):
        x0 = load_columns(x_rows, is_row, block * 128, 0, K)
        x1 = load_columns(x_rows, is_row, block * 128, 1, K)
        x2 = load_columns(x_rows, is_row, block * 128, 2, K)
        x3 = load_columns(x_rows, is_row, block * 128, 3, K)
        gate = add_block(
            gate, codes_ptrs, scales_ptrs, zeros_ptrs, is_out, block, x0, x1, x2, x3, K, GROUP_SIZE
        )
        if IS_GATED:
            # Up rows come N rows after their gate rows.
            codes = codes_ptrs + N * NUM_BLOCKS * 32
            scales = scales_ptrs + N * NUM_GROUPS
            zeros = None if zeros_ptrs is None else zeros_ptrs + N * NUM_GROUPS
            up = add_block(up, codes, scales, zeros, is_out, block, x0, x1, x2, x3, K, GROUP_SIZE)
    if topk_weights_ptr is not None:
        weight = tl.load(topk_weights_ptr + routes, mask=is_row, other=0.0).to(tl.float32)
        gate = gate * weight[None, :]
        up = up * weight[None, :]
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + expert * ROWS + n
        gate += tl.load(bias_ptrs, mask=is_out, other=0.0).to(tl.float32)[:, None]
        if IS_GATED:
            up += tl.load(bias_ptrs + N, mask=is_out, other=0.0).to(tl.float32)[:, None]
    acted = tl.trans(activate(gate, up, ACTIVATION, LIMIT, ALPHA, BETA))
    hidden_ptrs = hidden_ptr + places[:, None] * N + n[None, :]
    mask = is_row[:, None] & is_out[None, :]
    tl.store(hidden_ptrs, acted.to(hidden_ptr.dtype.element_ty), mask=mask)
