# pyright: basic
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# ruff: noqa: ANN001, ANN201, ANN202
"""Scores of prefill on Hopper, in Gluon: e4m3 keys, and rows that make two products."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from firesteel.indexer.ptx import scatter, uniform
from firesteel.indexer.range_scores import clamped_ranges
from firesteel.indexer.score import larger
from firesteel.indexer.wgmma import (
    copy_keys,
    copy_pages,
    key_buffers,
    no_product,
    queries,
    row_layout,
    score_layout,
    score_pair,
)

__all__ = ["range_scores_wgmma_kernel"]


@gluon.jit
def copy_pair(buffers, pair, source, pages, at, STAGES: gl.constexpr):
    """Start the copy of the keys of a pair, from `at` on, as one group."""
    values_ptr, scales_ptr, table_ptr, page_stride, last = source
    if table_ptr is not None:
        copy_pages(buffers, pair, values_ptr, scales_ptr, page_stride, pages, STAGES)
    else:
        for half in gl.static_range(2):
            key = (at + half * 64).to(gl.int64)
            copy_keys(
                buffers, pair % STAGES * 2 + half, values_ptr + key * 128, scales_ptr + key,
                last - at - half * 64,
            )  # fmt: skip
        async_copy.commit_group()


@gluon.jit
def pages_at(source, at):
    """The pages of a pair of keys from `at` on; -1 where there is none. Of contiguous keys 0."""
    table_ptr, last = source[2], source[4]
    pages = (at * 0, at * 0)
    if table_ptr is not None:
        pages = (
            gl.load(table_ptr + at // 64, mask=at < last, other=-1),
            gl.load(table_ptr + at // 64 + 1, mask=at + 64 < last, other=-1),
        )
    return pages


@gluon.jit
def store_page(
    found, best, rows, context, half: gl.constexpr, ROWS: gl.constexpr, PTX: gl.constexpr
):  # fmt: skip
    """Scores of a page to their places; the largest so far."""
    begin, end, place, _, is_scored = rows
    pages, at, scores_ptr = context
    key = at + half * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, score_layout(ROWS)))[:, None]
    is_seen = (key >= begin) & (key < end) & (pages[half] >= 0)
    found = gl.where(is_seen, found, float("-inf"))
    scatter(scores_ptr, place + key, found, is_scored, PTX)
    return larger(best, found)


@gluon.jit
def store_group(
    best, rows, number, is_end, maxima_ptr, ROWS: gl.constexpr, PTX: gl.constexpr
):  # fmt: skip
    """At the end of a group the largest of it; the next `best`."""
    _, _, _, cell, is_scored = rows
    t = gl.arange(0, 64, layout=gl.SliceLayout(1, score_layout(ROWS)))[:, None]
    is_stored = is_end
    if is_scored is not None:
        is_stored = is_scored & is_end
    scatter(maxima_ptr, cell + number * 64 + t, best, is_stored, PTX)
    return gl.where(is_end, float("-inf"), best)


@gluon.jit
def score_keys(
    buffers, q, w, rows, source, first, scores_ptr, maxima_ptr, group,
    ROWS: gl.constexpr, HEAD_BLOCK: gl.constexpr, STAGES: gl.constexpr, PTX: gl.constexpr,
):  # fmt: skip
    """Scores of the keys [first, last), some, and the largest of each group of theirs.

    By pairs of pages, the last one whole too. Tuples of two have a part of each product: q, half of
    w, and rows: which keys they see, from where to where, `[1, ROWS]`, the places of their first
    scores and maxima, and which are scored, None all. source is where keys are, and last.
    """
    last = source[4]
    for pair in gl.static_range(STAGES - 1):
        at = first + pair * 128
        copy_pair(buffers, pair, source, pages_at(source, at), at, STAGES)
    nothing = gl.full([64, ROWS], float("-inf"), gl.float32, layout=score_layout(ROWS))
    best = (nothing, nothing)
    dots, never = (no_product(q[0]), no_product(q[1])), last < 0
    number = first // group
    group_last = (number + 1) * group
    pages, ahead = pages_at(source, first), pages_at(source, first + (STAGES - 1) * 128)
    for pair in range(0, (last - first + 127) // 128):
        at = first + pair * 128
        next_at = at + (STAGES - 1) * 128
        copy_pair(buffers, pair + STAGES - 1, source, ahead, next_at, STAGES)
        next_pages = pages_at(source, at + 128)
        ahead = pages_at(source, next_at + 128)
        async_copy.wait_group(STAGES - 1)
        fence_async_shared()
        context = (pages, at, scores_ptr)
        best, dots = score_pair(
            buffers, pair, q, w, dots, never, best, rows, context, store_page, ROWS, ROWS,
            HEAD_BLOCK, STAGES, PTX,
        )  # fmt: skip
        is_end = (at + 128 >= group_last) | (at + 128 >= last)
        best = (
            store_group(best[0], rows[0], number, is_end, maxima_ptr, ROWS, PTX),
            store_group(best[1], rows[1], number, is_end, maxima_ptr, ROWS, PTX),
        )
        pages = next_pages
        number += is_end.to(gl.int32)
        group_last += gl.where(is_end, group, 0)
    async_copy.wait_group(0)


@gluon.jit
def rows_of(
    k_start_ptr, k_end_ptr, row, is_row, first_row, capacity, stride_scores, GROUPS: gl.constexpr
):  # fmt: skip
    """(begin, end, place, cell) of rows; a slice's scores and maxima are fewer than 2**31."""
    begin, end = clamped_ranges(k_start_ptr, k_end_ptr, row, is_row, capacity)
    own = row - first_row
    return begin, end, (own * stride_scores * 64).to(gl.int32), (own * GROUPS).to(gl.int32)


@gluon.jit(
    do_not_specialize=[
        *("stride_table", "page_stride", "capacity", "stride_scores", "span", "group"),
        *("first_row", "R"),
    ],
    do_not_specialize_on_alignment=[
        *("w_ptr", "page_table_ptr", "row_request_ptr", "k_start_ptr", "k_end_ptr"),
    ],
)
def range_scores_wgmma_kernel(
    q_ptr,
    w_ptr,
    values_ptr,
    scales_ptr,
    page_table_ptr,
    row_request_ptr,
    k_start_ptr,
    k_end_ptr,
    scores_ptr,
    maxima_ptr,
    stride_table: gl.int64,
    page_stride: gl.int64,
    capacity: gl.int64,
    stride_scores: gl.int64,
    span: gl.int64,
    group: gl.int64,
    first_row: gl.int64,
    R: gl.int64,
    H: gl.constexpr,
    ROW_BLOCK: gl.constexpr,
    HEAD_BLOCK: gl.constexpr,
    GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
    PTX: gl.constexpr,
    PDL: gl.constexpr,
):
    """scores[r, t] = k_scale[t] * sum over h of w[r, h] * relu(q[r, h] . k[t]), t in r's range

    Arguments, grid, numerics and range are those of range_scores_kernel, of e4m3 keys. A block has
    twice ROW_BLOCK rows, in two products. Rows of a request stand together.

    Key       which pointers are None, constexprs; num_warps is 4.
    Oracle    range_scores_reference
    """
    if PDL:
        # The next launch may take its place now: it waits for the end of this one.
        gdc_launch_dependents()
        gdc_wait()
    block_row = first_row + gl.program_id(1).to(gl.int64) * (2 * ROW_BLOCK)
    own_first = gl.program_id(0).to(gl.int64) * span
    own_last = own_first + span
    group = group.to(gl.int32)
    # Read before the ranges are known, so that one wait is for both.
    q_a, w_a = queries(q_ptr, w_ptr, block_row, R - block_row, H, ROW_BLOCK, HEAD_BLOCK)
    row_b = block_row + ROW_BLOCK
    q_b, w_b = queries(q_ptr, w_ptr, row_b, R - row_b, H, ROW_BLOCK, HEAD_BLOCK)
    buffers = key_buffers(STAGES)
    row_a = block_row + gl.arange(0, ROW_BLOCK, layout=row_layout(ROW_BLOCK))
    row_b = row_a + ROW_BLOCK
    begin_a, end_a, place_a, cell_a = rows_of(
        k_start_ptr, k_end_ptr, row_a, row_a < R, first_row, capacity, stride_scores, GROUPS
    )
    begin_b, end_b, place_b, cell_b = rows_of(
        k_start_ptr, k_end_ptr, row_b, row_b < R, first_row, capacity, stride_scores, GROUPS
    )
    if row_request_ptr is None:
        lowest = gl.minimum(
            gl.min(gl.where(end_a > begin_a, begin_a, 2147483647), axis=0),
            gl.min(gl.where(end_b > begin_b, begin_b, 2147483647), axis=0),
        )
        highest = gl.maximum(
            gl.max(gl.where(end_a > begin_a, end_a, 0), axis=0),
            gl.max(gl.where(end_b > begin_b, end_b, 0), axis=0),
        )
        first = gl.maximum(lowest // 128 * 128, own_first).to(gl.int32)
        last = gl.minimum(highest, own_last).to(gl.int32)
        if first < last:
            first, last = uniform(first, PTX), uniform(last, PTX)
            source = (values_ptr, scales_ptr, None, page_stride, last)
            rows = (
                (begin_a[None, :], end_a[None, :], place_a[None, :], cell_a[None, :], None),
                (begin_b[None, :], end_b[None, :], place_b[None, :], cell_b[None, :], None),
            )
            score_keys(
                buffers, (q_a, q_b), (w_a, w_b), rows, source, first, scores_ptr, maxima_ptr, group,
                ROW_BLOCK, HEAD_BLOCK, STAGES, PTX,
            )  # fmt: skip
    else:
        request_a = gl.load(row_request_ptr + row_a, mask=row_a < R, other=-1)
        request_b = gl.load(row_request_ptr + row_b, mask=row_b < R, other=-1)
        for own in range(0, gl.minimum(R - block_row, 2 * ROW_BLOCK).to(gl.int32)):
            row_ptr = row_request_ptr + block_row + own
            asked = gl.load(row_ptr)
            previous = gl.load(row_ptr - 1, mask=own > 0, other=-1)
            is_a, is_b = request_a == asked, request_b == asked
            highest = gl.maximum(
                gl.max(gl.where(is_a, end_a, 0), axis=0), gl.max(gl.where(is_b, end_b, 0), axis=0)
            )
            first = own_first.to(gl.int32)
            last = gl.minimum(highest, own_last).to(gl.int32)
            if (asked >= 0) & (asked != previous) & (first < last):
                last = uniform(last, PTX)
                table_ptr = page_table_ptr + asked.to(gl.int64) * stride_table
                source = (values_ptr, scales_ptr, table_ptr, page_stride, last)
                rows = (
                    (
                        begin_a[None, :], end_a[None, :], place_a[None, :], cell_a[None, :],
                        is_a[None, :],
                    ),
                    (
                        begin_b[None, :], end_b[None, :], place_b[None, :], cell_b[None, :],
                        is_b[None, :],
                    ),
                )  # fmt: skip
                score_keys(
                    buffers, (q_a, q_b), (w_a, w_b), rows, source, first, scores_ptr, maxima_ptr,
                    group, ROW_BLOCK, HEAD_BLOCK, STAGES, PTX,
                )  # fmt: skip
