# pyright: basic
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false, reportAssignmentType=false
# ruff: noqa: ANN001, ANN201
"""FC2 of the MoE layer: the down product of packed weights, one row a route."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from firesteel.moe.tile import add_block, find_tile, load_columns, unit_of_sums, word_offsets

__all__ = ["down_kernel"]


@triton.jit(
    do_not_specialize=["R"], do_not_specialize_on_alignment=["topk_ids_ptr", "expert_map_ptr"]
)
def down_kernel(
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
    R: tl.int64,
    K: tl.constexpr,
    N: tl.constexpr,
    E: tl.constexpr,
    NUM_GLOBAL: tl.constexpr,
    ELEMENT: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    DIVIDES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPAN: tl.constexpr,
    PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[r] = w2[e] @ hidden[p] + bias[e], r = route_ids[p]

    name         shape                        dtype        layout      traffic
    hidden       [R, N]                       fp           contiguous  read K / BLOCK_N times
    codes        [E, K/64, N/128, 64, 32]     int16        contiguous  a tile's expert, once
    scales       [E, G, K]                    fp or uint8  contiguous  as codes
    zero_points  [E, G, K]                    uint8        contiguous  as codes; None: 8, int3's 4
    global_scale [E, 1]                       fp32         contiguous  as codes; or None
    bias         [E, K]                       fp           contiguous  as codes; or None
    topk_ids     [R]                          int32/int64  contiguous  read in direct mode
    expert_map   [NUM_GLOBAL]                 int32        contiguous  likewise; or None
    route_ids..num_blocks                     int32        as place_kernel writes them; None: direct
    y            [R, K]                       fp           contiguous  written once; needs no init

    K / 64 and N / 128 are rounded up, and codes past K and N are 0; 3-bit codes are [.., 3, 64, 8].
    The modes are those of
    gate_up_kernel: hidden is read by place, or by route in direct mode; y is by route in both. The
    rows of routes without an expert are not written. BLOCK_N counts rows of w2, that is along K; a
    program does SPAN blocks of them one after the other, since a block has few columns.

    Grid      (ceil(K / (BLOCK_N * SPAN)), tiles), with R tiles in direct mode; tiles past the last
              return.
    Key       dtypes, which pointers are None, constexprs.
    Numerics  fp32 sums over a group's 32, 64 or 128 columns, scaled, summed in order: so nf3's
              weights are value * scale, not rounded to bf16; of FP4 one sum, of exact weights
              (`fp4_scales`), scaled; one rounding to hidden's dtype. A row's bits do not depend on
              other rows.
    Bytes     tiles * K * (N * bits/8 + G * bytes of a scale) + 2*R*K + 2*R*N * ceil(K / BLOCK_N)
    Range     offsets between rows and experts are int64; within an expert int32.
    Oracle    down_reference
    """
    if PDL:
        gdc_wait()
    NUM_BLOCKS: tl.constexpr = (N + 127) // 128
    NUM_GROUPS: tl.constexpr = N // GROUP_SIZE
    PADDED: tl.constexpr = (K + 63) // 64 * 64
    TILE: tl.constexpr = 1536 if ELEMENT == "nf3" or ELEMENT == "int3" else 2048
    tl.static_assert(PADDED // 64 * NUM_BLOCKS * TILE < 2**31)
    tl.static_assert(BLOCK_N % 64 == 0)
    tl.static_assert(GROUP_SIZE == N or GROUP_SIZE % 128 == 0 or GROUP_SIZE <= 64)
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
    rows = tl.arange(0, BLOCK_N)
    codes_ptr += expert * (PADDED // 64 * NUM_BLOCKS * TILE)
    words = word_offsets(rows, NUM_BLOCKS, ELEMENT)
    scales_ptr += expert * (NUM_GROUPS * K)
    if zero_points_ptr is not None:
        zero_points_ptr += expert * (NUM_GROUPS * K)
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    # Blocks of rows and of columns in one loop, so that loads run ahead from one to the next.
    for step in range(SPAN * NUM_BLOCKS):
        row_block = tl.program_id(0) * SPAN + step // NUM_BLOCKS
        block = step % NUM_BLOCKS
        k = row_block * BLOCK_N + rows
        x0 = load_columns(hidden_rows, is_row, block * 128, 0, N)
        x1 = load_columns(hidden_rows, is_row, block * 128, 1, N)
        x2 = load_columns(hidden_rows, is_row, block * 128, 2, N)
        x3 = load_columns(hidden_rows, is_row, block * 128, 3, N)
        acc = add_block(
            acc,
            codes_ptr + row_block * (BLOCK_N // 64 * NUM_BLOCKS * TILE) + words,
            scales_ptr + k,
            None if zero_points_ptr is None else zero_points_ptr + k,
            None if K % (BLOCK_N * SPAN) == 0 else k < K,
            None if PADDED % (BLOCK_N * SPAN) == 0 else (k < PADDED)[:, None],
            block,
            x0,
            x1,
            x2,
            x3,
            N,
            K,
            GROUP_SIZE,
            ELEMENT,
            PAIRS,
        )
        if block == NUM_BLOCKS - 1:
            if ELEMENT != "int4" and ELEMENT != "int3":
                dtype: tl.constexpr = hidden_ptr.dtype.element_ty
                acc *= unit_of_sums(global_scale_ptr, expert, dtype, ELEMENT, DIVIDES)
            if bias_ptr is not None:
                bias = tl.load(bias_ptr + expert * K + k, mask=k < K, other=0.0)
                acc += bias.to(tl.float32)[:, None]
            y_ptrs = y_ptr + routes[:, None] * K + k[None, :]
            mask = is_row[:, None] & (k < K)[None, :]
            tl.store(y_ptrs, tl.trans(acc).to(y_ptr.dtype.element_ty), mask=mask)
            acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
