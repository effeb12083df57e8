# pyright: basic
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# ruff: noqa: ANN001, ANN201, ANN202
"""The end of an EXL3 layer: products rotated, scaled, weighted and summed over slots."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from firesteel.moe.tile import local_expert
from firesteel.moe.trellis.act import load_products
from firesteel.moe.trellis.rotate import block_layout, hadamard, rotated_layout

__all__ = ["finish_kernel"]


@gluon.constexpr_function
def sum_layout(WARPS):
    """Of the 1024 columns of a program."""
    return gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])


@gluon.jit
def slots_of(
    products_ptr, partials_ptr, svh_ptr, bias_ptr, topk_ids_ptr, expert_map_ptr, topk_weights_ptr,
    m, M, start, N: gl.constexpr, E: gl.constexpr, NUM_GLOBAL: gl.constexpr, TOP_K: gl.constexpr,
    SPLIT_K: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Terms of slots start.. of the sum, a slot a warp: fp32 `[8 * WARPS, 128]`, 8 blocks each."""
    NP: gl.constexpr = (N + 127) // 128 * 128
    layout: gl.constexpr = block_layout(WARPS)
    b = gl.arange(0, 8 * WARPS, layout=gl.SliceLayout(1, layout))
    k = gl.arange(0, 128, layout=gl.SliceLayout(0, layout))
    column = (gl.program_id(1) * 8 + b % 8)[:, None] * 128 + k[None, :]
    route, expert = experts_of(
        topk_ids_ptr, expert_map_ptr, m, M, start + b // 8, E, NUM_GLOBAL, TOP_K
    )
    products = load_products(
        products_ptr, partials_ptr, (route * NP)[:, None] + column, M * (TOP_K * NP),
        (column < NP) & (expert >= 0)[:, None], SPLIT_K,
    )  # fmt: skip
    y = hadamard(products, WARPS)
    y_l: gl.constexpr = rotated_layout(WARPS)
    b = gl.arange(0, 8 * WARPS, layout=gl.SliceLayout(1, y_l))
    k = gl.arange(0, 128, layout=gl.SliceLayout(0, y_l))
    column = (gl.program_id(1) * 8 + b % 8)[:, None] * 128 + k[None, :]
    route, expert = experts_of(
        topk_ids_ptr, expert_map_ptr, m, M, start + b // 8, E, NUM_GLOBAL, TOP_K
    )
    is_in = (column < N) & (expert >= 0)[:, None]
    svh_ptrs = svh_ptr + (expert * NP)[:, None] + column
    y *= gl.load(svh_ptrs, mask=is_in, other=0.0).to(gl.float32)
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + (expert * N)[:, None] + column
        y += gl.load(bias_ptrs, mask=is_in, other=0.0).to(gl.float32)
    if topk_weights_ptr is not None:
        weights = gl.load(topk_weights_ptr + route, mask=expert >= 0, other=0.0)
        y *= weights.to(gl.float32)[:, None]
    return y


@gluon.jit
def experts_of(
    topk_ids_ptr, expert_map_ptr, m, M, slot, E: gl.constexpr, NUM_GLOBAL: gl.constexpr,
    TOP_K: gl.constexpr,
):  # fmt: skip
    """Routes of slots of a token, and their experts; -1 of none."""
    route = m * TOP_K + slot
    is_slot = (slot < TOP_K) & (m < M)
    if topk_ids_ptr is not None:
        expert = local_expert(topk_ids_ptr, expert_map_ptr, route, is_slot, E, NUM_GLOBAL)
    else:
        expert = gl.where(is_slot, 0, -1).to(gl.int64)
    return route, expert


@gluon.jit(
    do_not_specialize=["stride_out", "M"],
    do_not_specialize_on_alignment=["topk_ids_ptr", "expert_map_ptr", "topk_weights_ptr"],
)
def finish_kernel(
    products_ptr,
    partials_ptr,
    svh_ptr,
    bias_ptr,
    topk_ids_ptr,
    expert_map_ptr,
    topk_weights_ptr,
    out_ptr,
    stride_out: gl.int64,
    M: gl.int64,
    N: gl.constexpr,
    E: gl.constexpr,
    NUM_GLOBAL: gl.constexpr,
    TOP_K: gl.constexpr,
    SPLIT_K: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """out[m] = sum over slots j that have an expert of w[r] * (H products[r] * svh[e] + bias[e])

    name          shape              dtype        layout            traffic
    products      [R, NP]            fp16         contiguous        read once
    partials      [SPLIT_K, R, NP]   fp32         contiguous        in products' place; or None
    svh           [E, 1, NP]         fp16         contiguous        a route's expert
    bias          [E, N]             fp           contiguous        likewise; or None
    topk_ids      [R]                int32/int64  contiguous        None: every row has expert 0
    expert_map    [NUM_GLOBAL]       int32        contiguous        or None
    topk_weights  [R]                fp32         contiguous        None: ones
    out           [M, N]             fp           unit last stride  written once; needs no init

    r is m * TOP_K + j, w the router weights; NP is N rounded up to 128s. Rows of out lie stride_out
    times 16 bytes apart.

    Grid      (M, ceil(NP / 1024)); programs with m >= M return. A warp has every WARPS-th slot.
    Key       dtypes, which pointers are None, constexprs; WARPS is num_warps.
    Numerics  sums of spans in order, rounded to fp16; fp32 from there, slots summed in order; one
              rounding to out's dtype. The same bits every run.
    Bytes     2 * R * NP, or 4 * SPLIT_K in place of 2; and those of out
    Range     R * NP and M * stride_out may pass 2**31, so row offsets are int64.
    Oracle    finish_reference
    """
    if PDL:
        gdc_wait()
    UNIT: gl.constexpr = 128 // out_ptr.dtype.element_ty.primitive_bitwidth
    m = gl.program_id(0).to(gl.int64)
    if m >= M:
        return
    layout: gl.constexpr = sum_layout(WARPS)
    terms_s: gl.constexpr = gl.SwizzledSharedLayout(4, 2, 4, [1, 0])
    terms = gl.allocate_shared_memory(gl.float32, [8 * WARPS, 128], terms_s)
    total = gl.zeros([8, 128], gl.float32, layout=layout)
    for turn in gl.static_range((TOP_K + WARPS - 1) // WARPS):
        y = slots_of(
            products_ptr, partials_ptr, svh_ptr, bias_ptr, topk_ids_ptr, expert_map_ptr,
            topk_weights_ptr, m, M, turn * WARPS, N, E, NUM_GLOBAL, TOP_K, SPLIT_K, WARPS,
        )  # fmt: skip
        terms.store(y)
        for slot in gl.static_range(WARPS):
            total += terms.slice(8 * slot, 8).load(layout)
    block = gl.program_id(1) * 8 + gl.arange(0, 8, layout=gl.SliceLayout(1, layout))
    k = gl.arange(0, 128, layout=gl.SliceLayout(0, layout))
    column = block[:, None] * 128 + k[None, :]
    out_ptrs = out_ptr + m * stride_out * UNIT + column
    gl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=column < N)
