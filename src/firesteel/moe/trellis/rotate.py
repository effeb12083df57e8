# pyright: basic
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# ruff: noqa: ANN001, ANN201
"""The rotation of EXL3 in registers, and the kernel that rotates a layer's input.

A Hadamard matrix of 128 is one of 16, of k // 8, times one of 8, of k % 8. A warp rotates 8 blocks
of 128 columns at a time: H16 by `mma.sync`, whose products are exact and whose sums are fp32, and
H8 by adding and subtracting what a thread has.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_wait

from firesteel.moe.tile import local_expert

__all__ = [
    "as_operand",
    "block_layout",
    "hadamard",
    "log2",
    "operand_layout",
    "rotate_kernel",
    "rotated_layout",
]


@gluon.constexpr_function
def log2(value):
    return value.bit_length() - 1


@gluon.constexpr_function
def block_layout(WARPS):
    """Of blocks `[8 * WARPS, 128]` that are to be rotated: 8 blocks a warp, 4 threads a block."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [0, 64]],
        lane_bases=[[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8 << i, 0] for i in range(log2(WARPS))],
        block_bases=[],
        shape=[8 * WARPS, 128],
    )


@gluon.constexpr_function
def rotated_layout(WARPS):
    """Of blocks that were rotated: runs of 8 columns a thread."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [1, 0], [0, 64]],
        lane_bases=[[2, 0], [4, 0], [0, 8], [0, 16], [0, 32]],
        warp_bases=[[8 << i, 0] for i in range(log2(WARPS))],
        block_bases=[],
        shape=[8 * WARPS, 128],
    )


@gluon.jit
def hadamard(x, WARPS: gl.constexpr):
    """Each row of x times H128: fp32 in `rotated_layout`, of fp16 in `block_layout`."""
    BLOCKS: gl.constexpr = x.shape[0]
    sum_l: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[1, WARPS], instr_shape=[16, 8]
    )
    signs_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sum_l, k_width=2)
    x_l: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=sum_l, k_width=2)
    row = gl.arange(0, 16, layout=gl.SliceLayout(1, signs_l))
    column = gl.arange(0, 16, layout=gl.SliceLayout(0, signs_l))
    both = row[:, None] & column[None, :]
    both = both ^ (both >> 2)
    both = both ^ (both >> 1)
    signs = (1 - 2 * (both & 1)).to(gl.float16)
    turned = gl.permute(gl.reshape(x, [BLOCKS, 16, 8]), (1, 2, 0))
    turned = gl.convert_layout(gl.reshape(turned, [16, 8 * BLOCKS]), x_l)
    acc = mma_v2(signs, turned, gl.zeros([16, 8 * BLOCKS], gl.float32, layout=sum_l))
    # [16, 2, 2, 2, blocks]: each of the three bits of k % 8 comes last in turn.
    y = gl.permute(gl.reshape(acc, [16, 2, 2, 2, BLOCKS]), (0, 2, 3, 4, 1))
    a, b = gl.split(y)
    y = gl.permute(gl.join(a + b, a - b), (0, 2, 3, 4, 1))
    a, b = gl.split(y)
    y = gl.permute(gl.join(a + b, a - b), (0, 2, 3, 4, 1))
    a, b = gl.split(y)
    y = gl.permute(gl.join(a + b, a - b), (1, 0, 2, 3, 4))
    # A change of order in a thread's registers, and so of none but their names.
    y = gl.convert_layout(gl.reshape(y, [BLOCKS, 128]), rotated_layout(WARPS))
    return y * 0.08838834764831845


@gluon.constexpr_function
def operand_layout(WARPS):
    """Of rotated blocks in the order of `as_operand`."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 16], [0, 32], [1, 0], [0, 64]],
        lane_bases=[[2, 0], [4, 0], [0, 8], [0, 2], [0, 4]],
        warp_bases=[[8 << i, 0] for i in range(log2(WARPS))],
        block_bases=[],
        shape=[8 * WARPS, 128],
    )


@gluon.jit
def as_operand(y, WARPS: gl.constexpr):
    """Rotated blocks in fp16, in the order in which the products read columns of x.

    64 columns are those of 4 tiles. Column 16 * t + 8 * h + 2 * q + e of them, t the tile, goes to
    16 * q + 8 * h + 2 * t + e.
    """
    BLOCKS: gl.constexpr = y.shape[0]
    parts = gl.reshape(y.to(gl.float16), [BLOCKS, 2, 4, 2, 4, 2])
    moved = gl.reshape(gl.permute(parts, (0, 1, 4, 3, 2, 5)), [BLOCKS, 128])
    return gl.convert_layout(moved, operand_layout(WARPS))


@gluon.jit(
    do_not_specialize=["stride_x", "R"],
    do_not_specialize_on_alignment=["topk_ids_ptr", "expert_map_ptr"],
)
def rotate_kernel(
    x_ptr,
    suh_ptr,
    topk_ids_ptr,
    expert_map_ptr,
    rotated_ptr,
    stride_x: gl.int64,
    R: gl.int64,
    K: gl.constexpr,
    E: gl.constexpr,
    NUM_GLOBAL: gl.constexpr,
    TOP_K: gl.constexpr,
    PARTS: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """rotated[r, p] = H (x[r // TOP_K] * suh[e, p]), e the expert of route r

    name        shape        dtype        layout            traffic
    x           [M, K]       fp           unit last stride  read once a route
    suh         [E, P, KP]   fp16         contiguous        a route's expert
    topk_ids    [R]          int32/int64  contiguous        None: every row has expert 0
    expert_map  [NUM_GLOBAL] int32        contiguous        or None
    rotated     [R, P, KP]   fp16         `as_operand`      written once; needs no init

    P is PARTS, KP is K rounded up to 128s. Rows of x lie stride_x times 16 bytes apart. The rows of
    routes without an expert are not written.

    Grid      (R, ceil(KP / (1024 * WARPS))); programs with r >= R return.
    Key       dtypes, which pointers are None, constexprs; WARPS is num_warps.
    Numerics  x and then x * suh rounded to fp16, fp32 sums, one rounding to fp16.
    Bytes     R * (bytes of x * K + 4 * P * KP)
    Range     R * P * KP may pass 2**31, so row offsets are int64.
    Oracle    rotate_reference
    """
    if PDL:
        gdc_wait()
    KP: gl.constexpr = (K + 127) // 128 * 128
    UNIT: gl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    layout: gl.constexpr = block_layout(WARPS)
    route = gl.program_id(0).to(gl.int64)
    expert = gl.where(route < R, 0, -1).to(gl.int64)
    if topk_ids_ptr is not None:
        expert = local_expert(topk_ids_ptr, expert_map_ptr, route, route < R, E, NUM_GLOBAL)
    if expert < 0:
        return
    block = gl.program_id(1) * (8 * WARPS) + gl.arange(
        0, 8 * WARPS, layout=gl.SliceLayout(1, layout)
    )
    k = block[:, None] * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, layout))[None, :]
    x = gl.load(x_ptr + (route // TOP_K) * stride_x * UNIT + k, mask=k < K, other=0.0)
    for part in gl.static_range(PARTS):
        suh = gl.load(suh_ptr + (expert * PARTS + part) * KP + k, mask=k < KP, other=0.0)
        y = as_operand(hadamard(x.to(gl.float16) * suh, WARPS), WARPS)
        block = gl.program_id(1) * (8 * WARPS) + gl.arange(
            0, 8 * WARPS, layout=gl.SliceLayout(1, operand_layout(WARPS))
        )
        place = gl.arange(0, 128, layout=gl.SliceLayout(0, operand_layout(WARPS)))
        rows = rotated_ptr + (route * PARTS + part) * KP
        gl.store(rows + block[:, None] * 128 + place[None, :], y, mask=(block * 128 < KP)[:, None])
