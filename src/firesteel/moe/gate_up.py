# pyright: basic
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false, reportAssignmentType=false
# ruff: noqa: ANN001, ANN201, ANN202
"""FC1 of the MoE layer: gate and up products of packed weights, and the activation between them."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from firesteel.moe.tile import (
    activate,
    add_block,
    find_tile,
    load_columns,
    unit_of_sums,
    word_offsets,
)

__all__ = ["gate_up_kernel"]


@triton.jit
def joint_products(
    x_rows, is_row, codes_ptr, scales_ptr, zero_points_ptr, start, end,
    K: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    ELEMENT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Gate and up products of blocks start..end, as one left operand: each has warps of its own."""
    NUM_BLOCKS: tl.constexpr = (K + 127) // 128
    PADDED: tl.constexpr = (N + 63) // 64 * 64
    TILE: tl.constexpr = 1536 if ELEMENT == "nf3" or ELEMENT == "int3" else 2048
    rows = tl.arange(0, PARTS * BLOCK_N)
    part, row = rows // BLOCK_N, rows % BLOCK_N
    column = tl.program_id(0) * BLOCK_N + row
    codes_ptrs = codes_ptr + word_offsets(row, NUM_BLOCKS, ELEMENT)
    codes_ptrs += (part * (PADDED // 64 * NUM_BLOCKS * TILE))[:, None]
    scales_ptrs = scales_ptr + part * N + column
    zeros_ptrs = None if zero_points_ptr is None else zero_points_ptr + part * N + column
    # Words past N are there, as zeros, up to a whole tile; scales are not.
    is_out = None if N % BLOCK_N == 0 else column < N
    is_tile = None if PADDED % BLOCK_N == 0 else (column < PADDED)[:, None]
    acc = tl.zeros((PARTS * BLOCK_N, BLOCK_M), dtype=tl.float32)
    for block in range(start, end):
        x0 = load_columns(x_rows, is_row, block * 128, 0, K)
        x1 = load_columns(x_rows, is_row, block * 128, 1, K)
        x2 = load_columns(x_rows, is_row, block * 128, 2, K)
        x3 = load_columns(x_rows, is_row, block * 128, 3, K)
        acc = add_block(
            acc, codes_ptrs, scales_ptrs, zeros_ptrs, is_out, is_tile, block,
            x0, x1, x2, x3, K, PARTS * N, GROUP_SIZE, ELEMENT, PAIRS,
        )  # fmt: skip
    gate, up = acc, acc
    if PARTS == 2:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (2, BLOCK_N, BLOCK_M)), (1, 2, 0)))
    return gate, up


@triton.jit
def parted_products(
    x_rows, is_row, codes_ptr, scales_ptr, zero_points_ptr, start, end,
    K: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    ELEMENT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Gate and up products of blocks start..end, one after the other by all warps."""
    NUM_BLOCKS: tl.constexpr = (K + 127) // 128
    PADDED: tl.constexpr = (N + 63) // 64 * 64
    TILE: tl.constexpr = 1536 if ELEMENT == "nf3" or ELEMENT == "int3" else 2048
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    codes_ptrs = codes_ptr + word_offsets(tl.arange(0, BLOCK_N), NUM_BLOCKS, ELEMENT)
    scales_ptrs = scales_ptr + n
    zeros_ptrs = None if zero_points_ptr is None else zero_points_ptr + n
    is_out = None if N % BLOCK_N == 0 else n < N
    is_tile = None if PADDED % BLOCK_N == 0 else (n < PADDED)[:, None]
    gate = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for block in range(start, end):
        x0 = load_columns(x_rows, is_row, block * 128, 0, K)
        x1 = load_columns(x_rows, is_row, block * 128, 1, K)
        x2 = load_columns(x_rows, is_row, block * 128, 2, K)
        x3 = load_columns(x_rows, is_row, block * 128, 3, K)
        gate = add_block(
            gate, codes_ptrs, scales_ptrs, zeros_ptrs, is_out, is_tile, block,
            x0, x1, x2, x3, K, PARTS * N, GROUP_SIZE, ELEMENT, PAIRS,
        )  # fmt: skip
        if PARTS == 2:
            # Up rows come N rows after their gate rows.
            up = add_block(
                up, codes_ptrs + PADDED // 64 * NUM_BLOCKS * TILE, scales_ptrs + N,
                None if zeros_ptrs is None else zeros_ptrs + N, is_out, is_tile, block,
                x0, x1, x2, x3, K, PARTS * N, GROUP_SIZE, ELEMENT, PAIRS,
            )  # fmt: skip
    return gate, up


@triton.jit
def in_units(
    gate, up, global_scale_ptr, expert, dtype: tl.constexpr, PARTS: tl.constexpr,
    ELEMENT: tl.constexpr, DIVIDES: tl.constexpr,
):  # fmt: skip
    """Sums of `add_block` times what they lack, which gate and up each have of their own."""
    if ELEMENT != "int4" and ELEMENT != "int3":
        gate *= unit_of_sums(global_scale_ptr, expert * PARTS, dtype, ELEMENT, DIVIDES)
        if PARTS == 2:
            up *= unit_of_sums(global_scale_ptr, expert * PARTS + 1, dtype, ELEMENT, DIVIDES)
    return gate, up


@triton.jit(
    do_not_specialize=["stride_x", "R"],
    do_not_specialize_on_alignment=["topk_ids_ptr", "expert_map_ptr", "topk_weights_ptr"],
)
def gate_up_kernel(
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
    stride_x: tl.int64,
    R: tl.int64,
    K: tl.constexpr,
    N: tl.constexpr,
    E: tl.constexpr,
    NUM_GLOBAL: tl.constexpr,
    TOP_K: tl.constexpr,
    ELEMENT: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    DIVIDES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_K: tl.constexpr,
    JOINT: tl.constexpr,
    PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):
    """hidden[p] = act(w13[e] @ x[r // TOP_K] * topk_weights[r] + bias[e]), r = route_ids[p]

    name          shape                dtype        layout            traffic
    x             [M, K]               fp           unit last stride  read ceil(N / BLOCK_N) times
    codes         [E, P, N/64, K/128, 64, 32]  int16  contiguous      a tile's expert, once
    scales        [E, G, P*N]          fp or uint8  contiguous        as codes
    zero_points   [E, G, P*N]          uint8        contiguous        as codes; None: 8, int3's 4
    global_scale  [E, P]               fp32         contiguous        as codes; or None
    bias          [E, P*N]             fp           contiguous        as codes; or None
    topk_ids      [R]                  int32/int64  contiguous        read in direct mode
    expert_map    [NUM_GLOBAL]         int32        contiguous        likewise; or None
    topk_weights  [R]                  fp           contiguous        None: not on the input
    route_ids..num_blocks              int32        as place_kernel writes them; None: direct mode
    hidden        [R, N]               as x         contiguous        written once; needs no init
    partials      [SPLIT_K, R, P*N]    fp32         contiguous        in hidden's place; or None

    P is 2 (gate rows, then up rows), or 1 where the activation has no up. N / 64 and K / 128 are
    rounded up, and codes past N and K are 0; 3-bit codes are [.., 3, 64, 8]. Rows of x lie stride_x
    times 16 bytes apart. Packed mode writes hidden[p] at place p of `route_ids`. Direct mode takes
    one route a tile and writes hidden[r]; the rows of routes without an expert stay. With partials
    (direct mode) a program sums one of SPLIT_K spans of K and writes its products as they are:
    `activate_kernel` does the rest. JOINT multiplies gate and up rows as one operand, each with
    warps of its own.

    Grid      (ceil(N / BLOCK_N), tiles, SPLIT_K), with R tiles in direct mode; tiles past the last
              return.
    Key       dtypes, which pointers are None, constexprs.
    Numerics  fp32 sums over a group's 32, 64 or 128 columns, scaled, summed in order: so nf3's
              weights are value * scale, not rounded to bf16; of FP4 one sum, of exact weights
              (`fp4_scales`), scaled; activation in fp32; one rounding to x's dtype. A row's bits do
              not depend on other rows.
    Bytes     tiles * P*N * (K * bits/8 + G * bytes of a scale) + 2*R*N + 2*R*K * ceil(N / BLOCK_N)
    Range     offsets between rows and experts are int64; within an expert int32.
    Oracle    gate_up_reference
    """
    if PDL:
        gdc_wait()
    IS_GATED: tl.constexpr = ACTIVATION != "relu2"
    PARTS: tl.constexpr = 2 if IS_GATED else 1
    ROWS: tl.constexpr = PARTS * N
    NUM_BLOCKS: tl.constexpr = (K + 127) // 128
    TILE: tl.constexpr = 1536 if ELEMENT == "nf3" or ELEMENT == "int3" else 2048
    PART: tl.constexpr = (N + 63) // 64 * NUM_BLOCKS * TILE
    NUM_GROUPS: tl.constexpr = K // GROUP_SIZE
    # Elements of 16 bytes: multiplied out here, so that the compiler sees how rows are aligned.
    UNIT: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    tl.static_assert(PARTS * PART < 2**31)
    tl.static_assert(BLOCK_N % 64 == 0)
    tl.static_assert(GROUP_SIZE == K or GROUP_SIZE % 128 == 0 or GROUP_SIZE <= 64)
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
    x_rows = x_ptr + (routes // TOP_K) * stride_x * UNIT
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    codes_ptr += expert * (PARTS * PART) + tl.program_id(0) * (BLOCK_N // 64 * NUM_BLOCKS * TILE)
    scales_ptr += expert * (NUM_GROUPS * ROWS)
    if zero_points_ptr is not None:
        zero_points_ptr += expert * (NUM_GROUPS * ROWS)
    span = tl.program_id(2)
    start, end = span * NUM_BLOCKS // SPLIT_K, (span + 1) * NUM_BLOCKS // SPLIT_K
    if JOINT:
        gate, up = joint_products(
            x_rows, is_row, codes_ptr, scales_ptr, zero_points_ptr, start, end,
            K, N, PARTS, GROUP_SIZE, ELEMENT, BLOCK_M, BLOCK_N, PAIRS,
        )  # fmt: skip
    else:
        gate, up = parted_products(
            x_rows, is_row, codes_ptr, scales_ptr, zero_points_ptr, start, end,
            K, N, PARTS, GROUP_SIZE, ELEMENT, BLOCK_M, BLOCK_N, PAIRS,
        )  # fmt: skip
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    gate, up = in_units(gate, up, global_scale_ptr, expert, dtype, PARTS, ELEMENT, DIVIDES)
    mask = is_row[:, None] & (n < N)[None, :]
    if partials_ptr is not None:
        partials_ptrs = partials_ptr + (span * R + places)[:, None] * ROWS + n[None, :]
        tl.store(partials_ptrs, tl.trans(gate), mask=mask)
        if IS_GATED:
            tl.store(partials_ptrs + N, tl.trans(up), mask=mask)
    else:
        if topk_weights_ptr is not None:
            weight = tl.load(topk_weights_ptr + routes, mask=is_row, other=0.0).to(tl.float32)
            gate = gate * weight[None, :]
            up = up * weight[None, :]
        if bias_ptr is not None:
            bias_ptrs = bias_ptr + expert * ROWS + n
            gate += tl.load(bias_ptrs, mask=n < N, other=0.0).to(tl.float32)[:, None]
            if IS_GATED:
                up += tl.load(bias_ptrs + N, mask=n < N, other=0.0).to(tl.float32)[:, None]
        acted = tl.trans(activate(gate, up, ACTIVATION, LIMIT, ALPHA, BETA))
        hidden_ptrs = hidden_ptr + places[:, None] * N + n[None, :]
        tl.store(hidden_ptrs, acted.to(hidden_ptr.dtype.element_ty), mask=mask)
