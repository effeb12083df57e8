# pyright: basic
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# ruff: noqa: ANN001, ANN201, ANN202
"""What the Gluon kernels do with their products: scales of matrices, bias, activation, rows."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from firesteel.moe.gate_up import in_units
from firesteel.moe.tile import activate, unit_of_sums

__all__ = ["act_and_store", "add_and_store", "store_sums"]


@gluon.constexpr_function
def store_layout(WIDTH, WARPS):
    """Of rows of so many 16-bit numbers: 16 bytes a thread."""
    threads = min(WIDTH // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // threads, threads], [WARPS, 1], [1, 0])


@gluon.jit
def store_rows(
    tile, out_ptr, route_ids_ptr, first, num_rows, column, START: gl.constexpr,
    STRIDE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Store `tile` `[columns, routes]`, routes START.. of a program's, a route a row of out.

    A route's row is its id, or its place where route_ids_ptr is None; rows lie STRIDE apart.
    """
    WIDTH: gl.constexpr = tile.shape[0]
    ROUTES: gl.constexpr = tile.shape[1]
    shared_l: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    row_l: gl.constexpr = store_layout(WIDTH, WARPS)
    turned = gl.allocate_shared_memory(tile.dtype, [ROUTES, WIDTH], shared_l)
    turned.store(gl.permute(tile, (1, 0)))
    m = START + gl.arange(0, ROUTES, layout=gl.SliceLayout(1, row_l))
    rows = (first + m).to(gl.int64)
    if route_ids_ptr is not None:
        rows = gl.load(route_ids_ptr + rows, mask=m < num_rows, other=0).to(gl.int64)
    n = column + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, row_l))
    mask = (m < num_rows)[:, None]
    if STRIDE % WIDTH != 0:
        mask = mask & (n < STRIDE)[None, :]
    gl.store(out_ptr + rows[:, None] * STRIDE + n[None, :], turned.load(row_l), mask=mask)


@gluon.jit
def act_and_store(
    acc, global_scale_ptr, bias_ptr, topk_weights_ptr, route_ids_ptr, hidden_ptr, expert, first,
    num_rows, START: gl.constexpr, N: gl.constexpr, PARTS: gl.constexpr, ELEMENT: gl.constexpr,
    DIVIDES: gl.constexpr, ACTIVATION: gl.constexpr,
    LIMIT: gl.constexpr, ALPHA: gl.constexpr, BETA: gl.constexpr, BLOCK_N: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Rows of hidden from products `[PARTS * BLOCK_N, routes]` of routes START.. of a tile."""
    ROUTES: gl.constexpr = acc.shape[1]
    gate, up = acc, acc
    if PARTS == 2:
        # 8 gate rows, then their 8 up rows: a thread has both.
        parts = gl.reshape(acc, [BLOCK_N // 8, 2, 8, ROUTES])
        gate, up = gl.split(gl.permute(parts, (0, 2, 3, 1)))
        gate = gl.reshape(gate, [BLOCK_N, ROUTES])
        up = gl.reshape(up, [BLOCK_N, ROUTES])
    dtype: gl.constexpr = hidden_ptr.dtype.element_ty
    gate, up = in_units(gate, up, global_scale_ptr, expert, dtype, PARTS, ELEMENT, DIVIDES)
    if topk_weights_ptr is not None:
        m = START + gl.arange(0, ROUTES, layout=gl.SliceLayout(0, gate.type.layout))
        routes = first + m
        if route_ids_ptr is not None:
            routes = gl.load(route_ids_ptr + routes, mask=m < num_rows, other=0)
        weight = gl.load(topk_weights_ptr + routes, mask=m < num_rows, other=0.0).to(gl.float32)
        gate = gate * weight[None, :]
        up = up * weight[None, :]
    column = gl.program_id(0) * BLOCK_N
    if bias_ptr is not None:
        bias_ptr += expert * (PARTS * N)
        n = column + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, gate.type.layout))
        gate += gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
        if PARTS == 2:
            up += gl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
    acted = activate(gate, up, ACTIVATION, LIMIT, ALPHA, BETA).to(dtype)
    store_rows(acted, hidden_ptr, None, first, num_rows, column, START, N, WARPS)


@gluon.jit
def add_and_store(
    acc, global_scale_ptr, bias_ptr, route_ids_ptr, y_ptr, expert, first, num_rows, column,
    START: gl.constexpr, K: gl.constexpr, ELEMENT: gl.constexpr, DIVIDES: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Rows of y from products `[rows of w2, routes]` of routes START.. of a tile."""
    dtype: gl.constexpr = y_ptr.dtype.element_ty
    if ELEMENT != "int4" and ELEMENT != "int3":
        acc *= unit_of_sums(global_scale_ptr, expert, dtype, ELEMENT, DIVIDES)
    if bias_ptr is not None:
        bias_ptr += expert * K
        k = column + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, acc.type.layout))
        acc += gl.load(bias_ptr + k, mask=k < K, other=0.0).to(gl.float32)[:, None]
    store_rows(acc.to(dtype), y_ptr, route_ids_ptr, first, num_rows, column, START, K, WARPS)


@gluon.jit
def store_sums(
    acc, global_scale_ptr, partials_ptr, x_ptr, expert, first, num_rows,
    N: gl.constexpr, PARTS: gl.constexpr, ELEMENT: gl.constexpr, DIVIDES: gl.constexpr,
):  # fmt: skip
    """Sums of a span, before the activation, at their places in partials `[R, PARTS * N]`."""
    ROWS: gl.constexpr = acc.shape[0]
    q = gl.arange(0, ROWS, layout=gl.SliceLayout(1, acc.type.layout))
    m = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))
    if ELEMENT != "int4" and ELEMENT != "int3":
        dtype: gl.constexpr = x_ptr.dtype.element_ty
        unit = unit_of_sums(global_scale_ptr, expert * PARTS, dtype, ELEMENT, DIVIDES)
        other = unit
        if PARTS == 2:
            other = unit_of_sums(global_scale_ptr, expert * PARTS + 1, dtype, ELEMENT, DIVIDES)
        acc *= gl.where(q // 8 % PARTS == 0, unit, other)[:, None]
    n = gl.program_id(0) * (ROWS // PARTS) + q // (8 * PARTS) * 8 + q % 8
    places = (first + m).to(gl.int64)[None, :] * (PARTS * N) + (q // 8 % PARTS * N + n)[:, None]
    gl.store(partials_ptr + places, acc, mask=(m < num_rows)[None, :] & (n < N)[:, None])
