# pyright: basic
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# ruff: noqa: ANN001, ANN201, ANN202
"""Scores of decode on Hopper, in Gluon: e4m3 keys, and rows that make two products."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from firesteel.indexer.ptx import scatter, uniform
from firesteel.indexer.score import clamped_length, larger
from firesteel.indexer.wgmma import (
    copy_pages,
    key_buffers,
    no_product,
    queries,
    row_layout,
    score_layout,
    score_pair,
)

__all__ = ["decode_scores_wgmma_kernel"]


@gluon.jit
def pages_of(table_ptr, number, step, pages):
    """The pages `number` and `number + step` of a request; -1 from `pages` on."""
    after = number + step
    return (
        gl.load(table_ptr + number, mask=number < pages, other=-1),
        gl.load(table_ptr + after, mask=after < pages, other=-1),
    )


@gluon.jit
def store_page(
    found, best, rows, context, half: gl.constexpr, ROWS: gl.constexpr, PTX: gl.constexpr
):  # fmt: skip
    """Scores of a page, `number` or `number + step`, to their places; the largest so far."""
    place, length, is_row = rows
    table, number, step, pages, scores_ptr = context
    own = number + half * step
    position = own * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, score_layout(ROWS)))[:, None]
    is_seen = (position < length) & (table[half] >= 0)
    found = gl.where(is_seen, found, float("-inf"))
    # A pair has a first page; past the last one nothing is written.
    mask = is_row
    if half > 0:
        mask = own < pages
        if is_row is not None:
            mask = is_row & mask
    scatter(scores_ptr, place + position, found, mask, PTX)
    return larger(best, found)


@gluon.jit
def store_maxima(maxima_ptr, best, row, is_row, ROWS: gl.constexpr, PTX: gl.constexpr):
    """This program's 64 maxima of each row, beside those of the other programs of a request."""
    columns = gl.num_programs(1) * 64
    t = gl.arange(0, 64, layout=gl.SliceLayout(1, score_layout(ROWS)))[:, None]
    own_ptr = maxima_ptr + row * columns + gl.program_id(1) * 64
    scatter(own_ptr, t, best, is_row, PTX)


@gluon.jit(
    do_not_specialize=["stride_table", "page_stride", "width", "stride_scores", "first_request"],
    do_not_specialize_on_alignment=["w_ptr", "page_table_ptr", "seq_lens_ptr"],
)
def decode_scores_wgmma_kernel(
    q_ptr,
    w_ptr,
    values_ptr,
    scales_ptr,
    page_table_ptr,
    seq_lens_ptr,
    scores_ptr,
    maxima_ptr,
    arrived_ptr,
    stride_table: gl.int64,
    page_stride: gl.int64,
    width: gl.int64,
    stride_scores: gl.int64,
    first_request: gl.int64,
    H: gl.constexpr,
    ROWS: gl.constexpr,
    ROW_BLOCK: gl.constexpr,
    REST_BLOCK: gl.constexpr,
    HEAD_BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    PTX: gl.constexpr,
    PDL: gl.constexpr,
):
    """scores[r, t] = k_scale[t] * sum over h of w[r, h] * relu(q[r, h] . k[t])

    Arguments, grid, numerics and range are those of decode_scores_kernel, of e4m3 keys and a
    REST_BLOCK.

    Key       which pointers are None, constexprs; num_warps is 4.
    Oracle    decode_scores_reference
    """
    if PDL:
        # The next launch may take its place now: it waits for the end of this one.
        gdc_launch_dependents()
        gdc_wait()
    own_b = gl.program_id(0).to(gl.int64)
    b = first_request + own_b
    own_row = own_b * ROWS
    j = gl.arange(0, ROW_BLOCK, layout=row_layout(ROW_BLOCK))[None, :]
    rest = ROW_BLOCK + gl.arange(0, REST_BLOCK, layout=row_layout(REST_BLOCK))[None, :]
    # None where a block has no more rows than there are.
    is_row, is_rest = None, None
    if ROW_BLOCK > ROWS:
        is_row = j < ROWS
    if ROW_BLOCK + REST_BLOCK > ROWS:
        is_rest = rest < ROWS
    first, step = gl.program_id(1), gl.num_programs(1)
    if arrived_ptr is not None:
        # Of rows past the last one nothing.
        own = gl.arange(0, 8, layout=gl.BlockedLayout([1], [32], [4], [0]))
        is_own = (own < ROWS) & (first == 0)
        gl.store(arrived_ptr + own_row + own, own * 0, mask=is_own)
    seq_len = gl.load(seq_lens_ptr + b)
    capacity = width * 64
    pages = (clamped_length(seq_len, ROWS - 1, ROWS, capacity) + 63) // 64
    pages = uniform(pages.to(gl.int32), PTX)
    # Read before the length is known, so that one wait is for both.
    call_row = first_request * ROWS + own_row
    own_q, own_w = queries(q_ptr, w_ptr, call_row, ROWS, H, ROW_BLOCK, HEAD_BLOCK)
    rest_q, rest_w = queries(
        q_ptr, w_ptr, call_row + ROW_BLOCK, ROWS - ROW_BLOCK, H, REST_BLOCK, HEAD_BLOCK
    )
    q, w = (own_q, rest_q), (own_w, rest_w)
    if first >= pages:
        return
    # A slice's scores are fewer than 2**31.
    place = ((own_row + j) * stride_scores * 64).to(gl.int32)
    rest_place = ((own_row + rest) * stride_scores * 64).to(gl.int32)
    rows = (
        (place, clamped_length(seq_len, j, ROWS, capacity).to(gl.int32), is_row),
        (rest_place, clamped_length(seq_len, rest, ROWS, capacity).to(gl.int32), is_rest),
    )
    table_ptr = page_table_ptr + b * stride_table
    buffers = key_buffers(STAGES)
    for pair in gl.static_range(STAGES - 1):
        number = first + pair * 2 * step
        table = pages_of(table_ptr, number, step, pages)
        copy_pages(buffers, pair, values_ptr, scales_ptr, page_stride, table, STAGES)
    ahead = pages_of(table_ptr, first + (STAGES - 1) * 2 * step, step, pages)
    table = pages_of(table_ptr, first, step, pages)
    best = (
        gl.full([64, ROW_BLOCK], float("-inf"), gl.float32, layout=score_layout(ROW_BLOCK)),
        gl.full([64, REST_BLOCK], float("-inf"), gl.float32, layout=score_layout(REST_BLOCK)),
    )
    dots, never = (no_product(q[0]), no_product(q[1])), pages < 0
    for pair in range(0, (pages - first + 2 * step - 1) // (2 * step)):
        number = first + pair * 2 * step
        copy_pages(buffers, pair + STAGES - 1, values_ptr, scales_ptr, page_stride, ahead, STAGES)
        ahead = pages_of(table_ptr, number + STAGES * 2 * step, step, pages)
        next_table = pages_of(table_ptr, number + 2 * step, step, pages)
        async_copy.wait_group(STAGES - 1)
        fence_async_shared()
        context = (table, number, step, pages, scores_ptr)
        best, dots = score_pair(
            buffers, pair, q, w, dots, never, best, rows, context, store_page,
            ROW_BLOCK, REST_BLOCK, HEAD_BLOCK, STAGES, PTX,
        )  # fmt: skip
        table = next_table
    async_copy.wait_group(0)
    if maxima_ptr is not None:
        store_maxima(maxima_ptr, best[0], own_row + j, is_row, ROW_BLOCK, PTX)
        store_maxima(maxima_ptr, best[1], own_row + rest, is_rest, REST_BLOCK, PTX)
