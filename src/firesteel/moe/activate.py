# pyright: basic
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false
# ruff: noqa: ANN001, ANN201
"""What is left of FC1 where its sums were split along K: adding them up, and the activation."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from firesteel.moe.tile import activate, local_expert

__all__ = ["activate_kernel"]


@triton.jit(
    do_not_specialize=["R"],
    do_not_specialize_on_alignment=["topk_ids_ptr", "expert_map_ptr", "topk_weights_ptr"],
)
def activate_kernel(
    partials_ptr,
    bias_ptr,
    topk_ids_ptr,
    expert_map_ptr,
    topk_weights_ptr,
    hidden_ptr,
    R: tl.int64,
    N: tl.constexpr,
    E: tl.constexpr,
    NUM_GLOBAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """hidden[r] = act(sum over s of partials[s, r] * topk_weights[r] + bias[e])

    name          shape                dtype        layout      traffic
    partials      [SPLIT_K, R, P*N]    fp32         contiguous  read once
    bias          [E, P*N]             fp           contiguous  a route's expert; or None
    topk_ids      [R]                  int32/int64  contiguous  read ceil(N / BLOCK_N) times
    expert_map    [NUM_GLOBAL]         int32        contiguous  likewise; or None
    topk_weights  [R]                  fp           contiguous  None: not on the input
    hidden        [R, N]               fp           contiguous  written once; needs no init

    P is 2 (gate, then up), or 1 where the activation has no up. The rows of routes without an
    expert are neither read nor written.

    Grid      (R, ceil(N / BLOCK_N)); programs with r >= R return.
    Key       dtypes, which pointers are None, constexprs.
    Numerics  fp32 sum in the order of the spans; one rounding to hidden's dtype.
    Bytes     4 * SPLIT_K * R * P*N + 2 * R * N
    Range     R * SPLIT_K * P*N may pass 2**31, so offsets are int64.
    Oracle    activate_reference
    """
    if PDL:
        gdc_wait()
    IS_GATED: tl.constexpr = ACTIVATION != "relu2"
    ROWS: tl.constexpr = 2 * N if IS_GATED else N
    route = tl.program_id(0).to(tl.int64)
    expert = local_expert(topk_ids_ptr, expert_map_ptr, route, route < R, E, NUM_GLOBAL)
    if expert < 0:
        return
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    gate = tl.zeros((BLOCK_N,), dtype=tl.float32)
    up = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for span in tl.static_range(SPLIT_K):
        ptrs = partials_ptr + (span * R + route) * ROWS + n
        gate += tl.load(ptrs, mask=n < N, other=0.0)
        if IS_GATED:
            up += tl.load(ptrs + N, mask=n < N, other=0.0)
    if topk_weights_ptr is not None:
        weight = tl.load(topk_weights_ptr + route).to(tl.float32)
        gate = gate * weight
        up = up * weight
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + expert * ROWS + n
        gate += tl.load(bias_ptrs, mask=n < N, other=0.0).to(tl.float32)
        if IS_GATED:
            up += tl.load(bias_ptrs + N, mask=n < N, other=0.0).to(tl.float32)
    acted = activate(gate, up, ACTIVATION, LIMIT, ALPHA, BETA)
    tl.store(hidden_ptr + route * N + n, acted.to(hidden_ptr.dtype.element_ty), mask=n < N)
