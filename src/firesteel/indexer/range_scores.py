# pyright: basic
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false, reportAssignmentType=false
# ruff: noqa: ANN001, ANN201, ANN202
"""Scores of prefill: a few rows of queries, each with a range of keys of its own."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from firesteel.indexer.ptx import scatter, uniform
from firesteel.indexer.score import key_scores, larger, page_keys, query_tile

__all__ = ["clamped_ranges", "range_scores_kernel"]


@triton.jit
def clamped_ranges(k_start_ptr, k_end_ptr, row, is_row, capacity):
    """(begin, end) of rows, int32 in [0, capacity]; k_start_ptr None: 0. Empty where no row is."""
    end = tl.load(k_end_ptr + row, mask=is_row, other=0).to(tl.int64)
    begin = end * 0
    if k_start_ptr is not None:
        begin = tl.load(k_start_ptr + row, mask=is_row, other=0).to(tl.int64)
    begin = tl.minimum(tl.maximum(begin, 0), capacity).to(tl.int32)
    return begin, tl.minimum(tl.maximum(end, 0), capacity).to(tl.int32)


@triton.jit
def score_keys(
    q,
    w,
    values_ptr,
    scales_ptr,
    page_table_ptr,
    table_start,
    page_stride,
    begin,
    count,
    first,
    last,
    scores_ptr,
    maxima_ptr,
    place,
    cell,
    group,
    is_scored,
    ROW_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    PTX: tl.constexpr,
):
    """Scores of the keys [first, last), whole pages, and the largest of each group of theirs.

    A row has `count` keys from `begin` on, `[1, ROW_BLOCK]`, and -inf for others; is_scored of None
    are all rows. first is a multiple of 64; place and cell are those of a row's first score and
    maximum.
    """
    t = tl.arange(0, 64)
    d = tl.arange(0, 128)
    # The pipeline looks past the first even where there are none: no number may wrap around.
    first = tl.minimum(first, tl.maximum(last, 0))
    first, last = uniform(first, PTX), uniform(last, PTX)
    best = tl.full((64, ROW_BLOCK), float("-inf"), tl.float32)
    number = first // group
    group_last = (number + 1) * group
    if page_table_ptr is not None:
        table_ptr = page_table_ptr + table_start
        page = tl.load(table_ptr + first // 64, mask=first < last, other=-1)
    for at in tl.range(first, last, 64, num_stages=STAGES):
        key = at + t
        if page_table_ptr is not None:
            # Carried, so that the pipeline of keys does not wait for a pipeline of pages.
            following = tl.load(table_ptr + tl.minimum(at + 64, last - 1) // 64)
            keys, scales, is_there = page_keys(values_ptr, scales_ptr, page, page_stride)
        else:
            # Past the last key it is read again: that is in no range.
            own = tl.minimum(key, last - 1)
            keys = tl.load(values_ptr + own.to(tl.int64)[:, None] * 128 + d[None, :])
            scales = tl.full((64,), 1.0, tl.float32)
            if scales_ptr is not None:
                scales = tl.load(scales_ptr + own)
        found = key_scores(keys, scales, q, w, ROW_BLOCK, HEAD_BLOCK, SPLIT)
        # One comparison, since a negative position is past any count.
        is_seen = (key[:, None] - begin).to(tl.uint32, bitcast=True) < count
        if page_table_ptr is not None:
            is_seen &= is_there[:, None]
        found = tl.where(is_seen, found, float("-inf"))
        scatter(scores_ptr, place + key[:, None], found, is_scored, PTX)
        best = larger(best, found)
        is_end = (at + 64 >= group_last) | (at + 64 >= last)
        is_stored = is_end if is_scored is None else is_scored & is_end
        scatter(maxima_ptr, cell + number * 64 + t[:, None], best, is_stored, PTX)
        best = tl.where(is_end, float("-inf"), best)
        number += is_end.to(tl.int32)
        group_last += tl.where(is_end, group, 0)
        if page_table_ptr is not None:
            page = following


@triton.jit(
    do_not_specialize=[
        *("stride_table", "page_stride", "capacity", "stride_scores", "span", "group"),
        *("first_row", "R"),
    ],
    do_not_specialize_on_alignment=[
        *("w_ptr", "page_table_ptr", "row_request_ptr", "k_start_ptr", "k_end_ptr"),
    ],
)
def range_scores_kernel(
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
    stride_table: tl.int64,
    page_stride: tl.int64,
    capacity: tl.int64,
    stride_scores: tl.int64,
    span: tl.int64,
    group: tl.int64,
    first_row: tl.int64,
    R: tl.int64,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    GROUPS: tl.constexpr,
    STAGES: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """scores[r, t] = k_scale[t] * sum over h of w[r, h] * relu(q[r, h] . k[t]), t in r's range

    name             shape                     dtype  layout           traffic
    q, w             [R, H, 128], [R, H]       as values, fp32; contiguous, read by each program
    values, scales   [bytes] or [T, 128], [T]  e4m3 or 16-bit, fp32; read once a block of rows
    page_table       [B, width]                int32  unit last stride  None: keys are contiguous
    row_request      [R]                       int32  contiguous       requests of rows, of pages
    k_start, k_end   [R]                       int32  contiguous       k_start None: 0
    scores           [rows, C]                 fp32   rows apart       ranges, in whole pages
    maxima           [rows, GROUPS]            fp32   contiguous       groups with keys of ranges

    scales is None of 16-bit keys. Scored are the rows from first_row on, before R, of which the
    first one's scores are the first row of `scores`; rows of scores lie stride_scores times 64
    apart. Of a page with a key of one of a block's ranges all keys are scored, for all of its
    rows, those from R on too: -inf where they are outside of a row's range, or the page is missing
    (-1).

    maxima[r, g * 64 + t] is the largest score of the keys t of the `group` keys, whole pages, from
    g * group on; written where some of them are in the range of a row of the block.

    Program (p, b) has the keys [p * span, (p + 1) * span) of block b, ROWS rows: what of them is in
    the range of one of the rows. Of several requests each stretch of rows is gone through alone.

    Grid      (spans of the capacity, blocks).
    Key       type of values, which pointers are None, constexprs.
    Numerics  as decode_scores_kernel's: the same bits whatever span and first_row are.
    Bytes     132 or 256 a key a block of rows, mostly from L2; 4 a key a row written
    Range     q, pages and scores may lie past 2**31, so offsets are int64; positions are int32.
              A negative request has no keys; one past page_table's rows is the caller's to prevent.
              span is a multiple of group, and that of 64; GROUPS / 64 groups are at least as
              many as the capacity has. Blocks are powers of two.
    Oracle    range_scores_reference
    """
    if PDL:
        # The next launch may take its place now: it waits for the end of this one.
        gdc_launch_dependents()
        gdc_wait()
    j = tl.arange(0, ROW_BLOCK)
    row = first_row + tl.program_id(1).to(tl.int64) * ROWS + j
    is_row = (j < ROWS) & (row < R)
    begin, end = clamped_ranges(k_start_ptr, k_end_ptr, row, is_row, capacity)
    own_first = tl.program_id(0).to(tl.int64) * span
    own_last = own_first + span
    # Read before the ranges are known, so that one wait is for both.
    block_row = first_row + tl.program_id(1).to(tl.int64) * ROWS
    count = tl.minimum(ROWS, R - block_row)
    q, w = query_tile(q_ptr, w_ptr, block_row, count, H, ROW_BLOCK, HEAD_BLOCK, SPLIT)
    own_row = (row - first_row)[None, :]
    # A slice's scores and maxima are fewer than 2**31.
    place = (own_row * stride_scores * 64).to(tl.int32)
    cell = (own_row * GROUPS).to(tl.int32)
    seen = tl.maximum(end - begin, 0).to(tl.uint32)[None, :]
    group = group.to(tl.int32)
    if row_request_ptr is None:
        is_some = end > begin
        lowest = tl.min(tl.where(is_some, begin, 2147483647), axis=0) // 64 * 64
        highest = tl.max(tl.where(is_some, end, 0), axis=0)
        score_keys(
            *(q, w, values_ptr),
            scales_ptr,
            page_table_ptr,
            *(stride_table, page_stride, begin[None, :], seen),
            tl.maximum(lowest, own_first).to(tl.int32),
            tl.minimum(highest, own_last).to(tl.int32),
            *(scores_ptr, maxima_ptr, place, cell, group),
            None,
            *(ROW_BLOCK, HEAD_BLOCK, SPLIT, STAGES, PTX),
        )
    else:
        request = tl.load(row_request_ptr + row, mask=is_row, other=-1)
        previous = tl.load(row_request_ptr + row - 1, mask=is_row & (j > 0), other=-1)
        stretch = tl.cumsum((request != previous).to(tl.int32), axis=0)
        for own in range(0, tl.max(stretch, axis=0) + 1):
            is_own = stretch == own
            asked = tl.max(tl.where(is_own, request, -1), axis=0)
            highest = tl.max(tl.where(is_own, end, 0), axis=0)
            if asked >= 0:
                score_keys(
                    *(q, w, values_ptr),
                    scales_ptr,
                    page_table_ptr,
                    *(asked.to(tl.int64) * stride_table, page_stride, begin[None, :], seen),
                    own_first.to(tl.int32),
                    tl.minimum(highest, own_last).to(tl.int32),
                    *(scores_ptr, maxima_ptr, place, cell, group),
                    (is_row & is_own)[None, :],
                    *(ROW_BLOCK, HEAD_BLOCK, SPLIT, STAGES, PTX),
                )
