# pyright: basic
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false
# ruff: noqa: ANN001, ANN201
"""The end of the MoE layer: a token's rows, one a slot, weighted and summed."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from firesteel.moe.tile import local_expert

__all__ = ["combine_kernel"]


@triton.jit(
    do_not_specialize=["stride_out", "M"],
    do_not_specialize_on_alignment=["topk_ids_ptr", "expert_map_ptr", "topk_weights_ptr"],
)
def combine_kernel(
    y_ptr,
    topk_ids_ptr,
    expert_map_ptr,
    topk_weights_ptr,
    out_ptr,
    stride_out: tl.int64,
    M: tl.int64,
    K: tl.constexpr,
    E: tl.constexpr,
    NUM_GLOBAL: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[m] = sum over slots j that have an expert of topk_weights[m, j] * y[m * TOP_K + j]

    name          shape         dtype        layout            traffic
    y             [R, K]        fp           contiguous        read once; only rows with an expert
    topk_ids      [M, TOP_K]    int32/int64  contiguous        read ceil(K / BLOCK_K) times
    expert_map    [NUM_GLOBAL]  int32        contiguous        likewise; or None
    topk_weights  [M, TOP_K]    fp           contiguous        likewise; None: ones
    out           [M, K]        fp           unit last stride  written once; needs no init

    Rows of out lie stride_out times 16 bytes apart.

    Grid      (M, ceil(K / BLOCK_K)); one program owns one K block of a token.
    Key       dtypes, which pointers are None, constexprs.
    Numerics  fp32 sum in slot order, one rounding to out's dtype; the same bits every run.
    Bytes     2*R*K + 2*M*K + (4 + bytes of an id)*R*ceil(K / BLOCK_K)
    Range     R * K and M * stride_out may pass 2**31, so row offsets are int64.
    Oracle    combine_reference
    """
    if PDL:
        gdc_wait()
    # Elements of 16 bytes: multiplied out here, so that the compiler sees how rows are aligned.
    UNIT: tl.constexpr = 128 // out_ptr.dtype.element_ty.primitive_bitwidth
    m = tl.program_id(0).to(tl.int64)
    if m >= M:
        return
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_K,), dtype=tl.float32)
    for j in tl.static_range(TOP_K):
        route = m * TOP_K + j
        expert = local_expert(topk_ids_ptr, expert_map_ptr, route, m < M, E, NUM_GLOBAL)
        is_route = expert >= 0
        y = tl.load(y_ptr + route * K + k, mask=(k < K) & is_route, other=0.0).to(tl.float32)
        if topk_weights_ptr is not None:
            y = y * tl.load(topk_weights_ptr + route, mask=is_route, other=0.0).to(tl.float32)
        acc += y
    tl.store(out_ptr + m * stride_out * UNIT + k, acc.to(out_ptr.dtype.element_ty), mask=k < K)
