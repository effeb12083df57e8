# pyright: basic
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false, reportAssignmentType=false
# ruff: noqa: ANN001, ANN201, ANN202
"""Scores of prefill: a few rows of queries, each with a range of keys of its own."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from firesteel.indexer.score import page_keys, query_tile, store_scores, uniform

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
    first,
    last,
    scores_ptrs,
    is_scored,
    ROW_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PTX: tl.constexpr,
):
    """Scores of the keys [first, last), whole pages, of the rows that are to have them.

    is_scored of None are all rows. first is a multiple of 64; scores_ptrs `[ROW_BLOCK]` are of key
    0.
    """
    t = tl.arange(0, 64)
    d = tl.arange(0, 128)
    # The pipeline looks past the first even where there are none: no number may wrap around.
    first = tl.minimum(first, tl.maximum(last, 0))
    first, last = uniform(first, PTX), uniform(last, PTX)
    for at in tl.range(first, last, 64, num_stages=STAGES):
        key = at + t
        if page_table_ptr is not None:
            page = tl.load(page_table_ptr + table_start + at // 64).to(tl.int64)
            keys, scales, is_there = page_keys(values_ptr, scales_ptr, page, page_stride)
        else:
            # Past the last key it is read again: those scores are in no range.
            is_there, own = None, tl.minimum(key, last - 1)
            keys = tl.load(values_ptr + own.to(tl.int64)[:, None] * 128 + d[None, :])
            scales = tl.full((64,), 1.0, tl.float32)
            if scales_ptr is not None:
                scales = tl.load(scales_ptr + own)
        ptrs = scores_ptrs[None, :] + key[:, None]
        store_scores(keys, scales, is_there, q, w, ptrs, is_scored, ROW_BLOCK, HEAD_BLOCK)


@triton.jit(
    do_not_specialize=[
        *("stride_table", "page_stride", "capacity", "stride_scores", "span", "first_row", "R"),
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
    stride_table: tl.int64,
    page_stride: tl.int64,
    capacity: tl.int64,
    stride_scores: tl.int64,
    span: tl.int64,
    first_row: tl.int64,
    R: tl.int64,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
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

    scales is None of 16-bit keys. Scored are the rows from first_row on, before R, of which the
    first one's scores are the first row of `scores`; rows of scores lie stride_scores times 64
    apart. Keys that are outside of a row's range, but share a page or a block with others, have
    scores that mean nothing, and so have rows from R on. A key of a page that is missing (-1)
    scores -inf.

    Program (p, b) has the keys [p * span, (p + 1) * span) of block b, ROWS rows: what of them is in
    the range of one of the rows. Of several requests each stretch of rows is gone through alone.

    Grid      (spans of the capacity, blocks).
    Key       type of values, which pointers are None, constexprs.
    Numerics  as decode_scores_kernel's: the same bits whatever span and first_row are.
    Bytes     132 or 256 a key a block of rows, mostly from L2; 4 a key a row written
    Range     q, pages and scores may lie past 2**31, so offsets are int64; positions are int32.
              A negative request has no keys; one past page_table's rows is the caller's to prevent.
              span is a multiple of 64. Blocks are powers of two.
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
    q, w = query_tile(q_ptr, w_ptr, row, is_row, H, ROW_BLOCK, HEAD_BLOCK)
    scores_ptrs = scores_ptr + (row - first_row) * stride_scores * 64
    if row_request_ptr is None:
        is_some = end > begin
        lowest = tl.min(tl.where(is_some, begin, 2147483647), axis=0) // 64 * 64
        highest = tl.max(tl.where(is_some, end, 0), axis=0)
        score_keys(
            *(q, w, values_ptr),
            scales_ptr,
            page_table_ptr,
            *(stride_table, page_stride),
            tl.maximum(lowest, own_first).to(tl.int32),
            tl.minimum(highest, own_last).to(tl.int32),
            scores_ptrs,
            None,
            *(ROW_BLOCK, HEAD_BLOCK, STAGES, PTX),
        )
    else:
        request = tl.load(row_request_ptr + row, mask=is_row, other=-1)
        previous = tl.load(row_request_ptr + row - 1, mask=is_row & (j > 0), other=-1)
        stretch = tl.cumsum((request != previous).to(tl.int32), axis=0)
        for own in range(0, tl.max(stretch, axis=0) + 1):
            asked = tl.max(tl.where(stretch == own, request, -1), axis=0)
            highest = tl.max(tl.where(stretch == own, end, 0), axis=0)
            if asked >= 0:
                score_keys(
                    *(q, w, values_ptr),
                    scales_ptr,
                    page_table_ptr,
                    *(asked.to(tl.int64) * stride_table, page_stride),
                    own_first.to(tl.int32),
                    tl.minimum(highest, own_last).to(tl.int32),
                    *(scores_ptrs, is_row & (stretch == own), ROW_BLOCK, HEAD_BLOCK, STAGES, PTX),
                )
