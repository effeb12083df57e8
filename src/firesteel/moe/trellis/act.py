# pyright: basic
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# ruff: noqa: ANN001, ANN201
"""What is between FC1 and FC2 of an EXL3 layer: rotations on both sides of the activation."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from firesteel.moe.tile import activate, local_expert
from firesteel.moe.trellis.rotate import (
    as_operand,
    block_layout,
    hadamard,
    operand_layout,
    rotated_layout,
)

__all__ = ["act_kernel", "load_products"]


@gluon.jit
def load_products(y_ptr, partials_ptr, place, span_size, mask, SPLIT_K: gl.constexpr):
    """Products in fp16 as a matrix kernel stored them, or the sum of the spans of K it left."""
    if partials_ptr is None:
        y = gl.load(y_ptr + place, mask=mask, other=0.0)
    else:
        total = gl.load(partials_ptr + place, mask=mask, other=0.0)
        for span in gl.static_range(1, SPLIT_K):
            total += gl.load(partials_ptr + span * span_size + place, mask=mask, other=0.0)
        y = total.to(gl.float16)
    return y


@gluon.jit(
    do_not_specialize=["R"],
    do_not_specialize_on_alignment=["topk_ids_ptr", "expert_map_ptr"],
)
def act_kernel(
    products_ptr,
    partials_ptr,
    svh_ptr,
    bias_ptr,
    suh_ptr,
    topk_ids_ptr,
    expert_map_ptr,
    hidden_ptr,
    R: gl.int64,
    N: gl.constexpr,
    E: gl.constexpr,
    NUM_GLOBAL: gl.constexpr,
    ACTIVATION: gl.constexpr,
    LIMIT: gl.constexpr,
    ALPHA: gl.constexpr,
    BETA: gl.constexpr,
    SPLIT_K: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """hidden[r] = H (suh[e] * act(H products[r] * svh[e] + bias[e]))

    name        shape              dtype        layout            traffic
    products    [R, P, NP]         fp16         contiguous        read once
    partials    [SPLIT_K, R, P*NP] fp32         contiguous        in products' place; or None
    svh         [E, P, NP]         fp16         contiguous        a route's expert
    bias        [E, P*N]           fp           contiguous        likewise; or None
    suh         [E, 1, NP]         fp16         contiguous        likewise; that of down
    topk_ids    [R]                int32/int64  contiguous        read once a program
    expert_map  [NUM_GLOBAL]       int32        contiguous        or None
    hidden      [R, NP]            fp16         `as_operand`      written once; needs no init

    P is 2 (gate, then up), or 1 where the activation has no up; NP is N rounded up to 128s, and act
    is 0 past N. Rows of routes without an expert are neither read nor written. A warp has 1024 / P
    columns of a route.

    Grid      (ceil(R / WARPS), ceil(NP / (1024 / P))).
    Key       dtypes, which pointers are None, constexprs; WARPS is num_warps.
    Numerics  sums of spans in order, rounded to fp16; fp32 up to suh, one rounding to fp16; fp32
              sums of the rotation, one rounding to fp16.
    Bytes     R * NP * (2 * P + 2), or 4 * SPLIT_K * P in place of 2 * P
    Range     R * P * NP may pass 2**31, so row offsets are int64.
    Oracle    act_reference
    """
    if PDL:
        gdc_wait()
    PARTS: gl.constexpr = 1 if ACTIVATION == "relu2" else 2
    NP: gl.constexpr = (N + 127) // 128 * 128
    EACH: gl.constexpr = 8 // PARTS
    layout: gl.constexpr = block_layout(WARPS)
    # Row b of the blocks: 8 a route, of which gate and up of one place stand side by side.
    b = gl.arange(0, 8 * WARPS, layout=gl.SliceLayout(1, layout))
    route = gl.program_id(0).to(gl.int64) * WARPS + b // 8
    expert = local_expert(topk_ids_ptr, expert_map_ptr, route, route < R, E, NUM_GLOBAL)
    block = gl.program_id(1) * EACH + b % 8 // PARTS
    is_block = (expert >= 0) & (block * 128 < NP)
    k = gl.arange(0, 128, layout=gl.SliceLayout(0, layout))
    place = (route * PARTS + b % PARTS) * NP + block * 128
    products = load_products(
        products_ptr, partials_ptr, place[:, None] + k[None, :], R * (PARTS * NP),
        is_block[:, None], SPLIT_K,
    )  # fmt: skip
    y = hadamard(products, WARPS)
    y_l: gl.constexpr = rotated_layout(WARPS)
    b = gl.arange(0, 8 * WARPS, layout=gl.SliceLayout(1, y_l))
    route = gl.program_id(0).to(gl.int64) * WARPS + b // 8
    expert = local_expert(topk_ids_ptr, expert_map_ptr, route, route < R, E, NUM_GLOBAL)
    block = gl.program_id(1) * EACH + b % 8 // PARTS
    k = gl.arange(0, 128, layout=gl.SliceLayout(0, y_l))
    is_in = (expert >= 0)[:, None] & (block[:, None] * 128 + k[None, :] < N)
    place = (expert * PARTS + b % PARTS) * NP + block * 128
    y *= gl.load(svh_ptr + place[:, None] + k[None, :], mask=is_in, other=0.0).to(gl.float32)
    if bias_ptr is not None:
        place = (expert * PARTS + b % PARTS) * N + block * 128
        bias = gl.load(bias_ptr + place[:, None] + k[None, :], mask=is_in, other=0.0)
        y += bias.to(gl.float32)
    gate, up = y, y
    if PARTS == 2:
        parts = gl.permute(gl.reshape(y, [4 * WARPS, 2, 128]), (0, 2, 1))
        gate, up = gl.split(parts)
    acted = activate(gate, up, ACTIVATION, LIMIT, ALPHA, BETA)
    acted_l: gl.constexpr = acted.type.layout
    b = gl.arange(0, EACH * WARPS, layout=gl.SliceLayout(1, acted_l))
    route = gl.program_id(0).to(gl.int64) * WARPS + b // EACH
    expert = local_expert(topk_ids_ptr, expert_map_ptr, route, route < R, E, NUM_GLOBAL)
    block = gl.program_id(1) * EACH + b % EACH
    k = gl.arange(0, 128, layout=gl.SliceLayout(0, acted_l))
    is_in = (expert >= 0)[:, None] & (block[:, None] * 128 + k[None, :] < N)
    place = expert * NP + block * 128
    suh = gl.load(suh_ptr + place[:, None] + k[None, :], mask=is_in, other=0.0).to(gl.float32)
    # What is past N is 0, whatever the activation makes of it.
    scaled = gl.where(is_in, acted * suh, 0.0).to(gl.float16)
    if PARTS == 2:
        # Half as many blocks are left as a warp rotates: each twice.
        scaled = gl.reshape(gl.permute(gl.join(scaled, scaled), (0, 2, 1)), [8 * WARPS, 128])
    hidden = as_operand(hadamard(gl.convert_layout(scaled, layout), WARPS), WARPS)
    b = gl.arange(0, 8 * WARPS, layout=gl.SliceLayout(1, operand_layout(WARPS)))
    route = gl.program_id(0).to(gl.int64) * WARPS + b // 8
    expert = local_expert(topk_ids_ptr, expert_map_ptr, route, route < R, E, NUM_GLOBAL)
    block = gl.program_id(1) * EACH + b % 8 // PARTS
    k = gl.arange(0, 128, layout=gl.SliceLayout(0, operand_layout(WARPS)))
    place = (route * NP + block * 128)[:, None] + k[None, :]
    is_mine = (expert >= 0) & (block * 128 < NP) & (b % PARTS == 0)
    gl.store(hidden_ptr + place, hidden, mask=is_mine[:, None])
