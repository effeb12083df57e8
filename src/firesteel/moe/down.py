# pyright: basic
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false
# ruff: noqa: ANN001, ANN201
"""FC2 of the MoE layer: the down product of int4 weights, one row a route."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from firesteel.moe.tile import add_block, find_tile, load_columns

__all__ = ["down_kernel"]


@triton.jit(
    do_not_specialize=["R"], do_not_specialize_on_alignment=["topk_ids_ptr", "expert_map_ptr"]
)
def down_kernel(
    hidden_ptr,
    codes_ptr,
    scales_ptr,
    zero_points_ptr,
    bias_ptr,
    topk_ids_ptr,
    expert_map_ptr,
    route_ids_ptr,
    expert_offsets_ptr,
    block_expert_ptr,
    block_row_ptr,
    num_blocks_ptr,
    y_ptr,
    R: tl.int64,
    K: tl.constexpr,
    N: tl.constexpr,
    E: tl.constexpr,
    NUM_GLOBAL: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[r] = w2[e] @ hidden[p] + bias[e], r = route_ids[p]

    name         shape             dtype        layout      traffic
    hidden       [R, N]            fp           contiguous  read ceil(K / BLOCK_N) times
    codes        [E, K, N/128, 32] int16        contiguous  a tile's expert, once
    scales       [E, K, G]         fp           contiguous  as codes
    zero_points  [E, K, G]         uint8        contiguous  as codes; None: 8
    bias         [E, K]            fp           contiguous  as codes; or None
    topk_ids     [R]               int32/int64  contiguous  read in direct mode
    expert_map   [NUM_GLOBAL]      int32        contiguous  likewise; or None
    route_ids..num_blocks          int32        as place_kernel writes them; None: direct mode
    y            [R, K]            as hidden    contiguous  written once; needs no init

    N / 128 is rounded up, and codes past N are 0. The modes are those of gate_up_kernel: hidden
    is read by place, or by route in direct mode; y is by route in both. The rows of routes
    without an expert are not written. BLOCK_N counts rows of w2, that is along K.

    Grid      (ceil(K / BLOCK_N), tiles), with R tiles in direct mode; tiles past the last return.
    Key       dtypes, which pointers are None, constexprs.
    Numerics  fp32 sums over a group's 32, 64 or 128 columns, scaled, summed in order; one
              rounding to hidden's dtype. A row's bits do not depend on other rows.
    Bytes     tiles * K * (N/2 + G * bytes of a scale) + 2*R*K + 2*R*N * ceil(K / BLOCK_N)
    Range     offsets between rows and experts are int64; within an expert int32.
    Oracle    down_reference
    """
    if PDL:
        gdc_wait()
    NUM_BLOCKS: tl.constexpr = (N + 127) // 128
    NUM_GROUPS: tl.constexpr = N // GROUP_SIZE
    tl.static_assert(K * NUM_BLOCKS * 32 < 2**31)
    tl.static_assert(
        GROUP_SIZE == 32 or GROUP_SIZE == 64 or GROUP_SIZE % 128 == 0 or GROUP_SIZE == N
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
    hidden_rows = hidden_ptr + places * N
    k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_out = k < K
    codes_ptrs = codes_ptr + expert * (K * NUM_BLOCKS * 32)
    codes_ptrs = codes_ptrs + k[:, None] * (NUM_BLOCKS * 32) + tl.arange(0, 32)[None, :]
    scales_ptrs = scales_ptr + expert * (K * NUM_GROUPS) + k * NUM_GROUPS
    zeros_ptrs = None
    if zero_points_ptr is not None:
        zeros_ptrs = zero_points_ptr + expert * (K * NUM_GROUPS) + k * NUM_GROUPS
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for block in range(NUM_BLOCKS):
        x0 = load_columns(hidden_rows, is_row, block * 128, 0, N)
        x1 = load_columns(hidden_rows, is_row, block * 128, 1, N)
        x2 = load_columns(hidden_rows, is_row, block * 128, 2, N)
        x3 = load_columns(hidden_rows, is_row, block * 128, 3, N)
        acc = add_block(
            acc, codes_ptrs, scales_ptrs, zeros_ptrs, is_out, block, x0, x1, x2, x3, N, GROUP_SIZE
        )
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert * K + k, mask=is_out, other=0.0)
        acc += bias.to(tl.float32)[:, None]
    y_ptrs = y_ptr + routes[:, None] * K + k[None, :]
    mask = is_row[:, None] & is_out[None, :]
    tl.store(y_ptrs, tl.trans(acc).to(y_ptr.dtype.element_ty), mask=mask)
