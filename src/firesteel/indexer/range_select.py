# pyright: basic
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false, reportAssignmentType=false
# ruff: noqa: ANN001, ANN201
"""Exact selection of prefill: one program a row, which drops nearly all scores by a bound.

range_scores leaves the largest of each of many groups of keys that lie apart: the TOP_K-th largest
of those is a bound that every selected score reaches, and few others do. The program keeps what
reaches it, and selects from that.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from firesteel.indexer.candidates import (
    bound_of,
    keep_best,
    keep_part,
    load_chunk,
    load_list,
)
from firesteel.indexer.range_scores import clamped_ranges
from firesteel.indexer.select import ordered_keys, taken, threshold_from, write_selected

__all__ = ["range_select_kernel"]


@triton.jit(
    do_not_specialize=["capacity", "stride_scores", "group", "stride_table", "first_row", "R"],
    do_not_specialize_on_alignment=[
        *("page_table_ptr", "row_request_ptr", "k_start_ptr", "k_end_ptr"),
    ],
)
def range_select_kernel(
    scores_ptr,
    maxima_ptr,
    lists_ptr,
    page_table_ptr,
    row_request_ptr,
    k_start_ptr,
    k_end_ptr,
    indices_ptr,
    slots_ptr,
    selected_scores_ptr,
    capacity: tl.int64,
    stride_scores: tl.int64,
    group: tl.int64,
    stride_table: tl.int64,
    first_row: tl.int64,
    R: tl.int64,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    WARPS: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """The TOP_K largest scores of each row's range, in the order of positions

    name             shape            dtype  layout      traffic
    scores           [rows, C]        fp32   rows apart  a row's range read once
    maxima           [rows, GROUPS]   fp32   contiguous  read once; those of a range's groups count
    lists            [rows, SIZE]     int64  contiguous  candidates written, then read, once
    page_table       [B, width]       int32  unit last stride  read for slots
    row_request      [R]              int32  contiguous  of pages; a negative one has no keys
    k_start, k_end   [R]              int32  contiguous  k_start None: 0
    indices          [R, TOP_K]       int32  contiguous  written once, no init; from k_start on
    slots            [R, TOP_K]       int32  contiguous  as indices; or None
    selected_scores  [R, TOP_K]       fp32   contiguous  as indices; or None

    Selected from are the rows from first_row on, before R, of which the first one's scores are the
    first row of `scores`; rows of scores lie stride_scores times 64 apart.

    Example: TOP_K 2, scores [5, 1, 7, 7 | 9, NaN] with maxima [9, 1, 7, 7]: the second is 7, which
    positions 2, 3 and 4 reach, and of those [2, 4] are selected.

    Grid      (rows,).
    Key       which pointers are None, constexprs; WARPS is num_warps.
    Numerics  exact; the same bits every run.
    Bytes     4 a key of a range, 4 * GROUPS a row; 16 a key that reaches the bound; where those are
              more than SIZE, 4 a key again
    Range     rows * C may pass 2**31, so row offsets are int64. GROUPS, SIZE and CHUNK are powers
              of two; SIZE is at least 2 * TOP_K, GROUPS at least TOP_K.
    Oracle    top_k_reference
    """
    if PDL:
        # The next launch may take its place now: it waits for the end of this one.
        gdc_launch_dependents()
        gdc_wait()
    own = tl.program_id(0).to(tl.int64)
    row = first_row + own
    begin, end = clamped_ranges(k_start_ptr, k_end_ptr, row, row < R, capacity)
    b = row
    if row_request_ptr is not None:
        b = tl.load(row_request_ptr + row, mask=row < R, other=-1).to(tl.int64)
        end = tl.where(b < 0, 0, end)
    # Of an empty row no page was scored: nothing is read.
    end = tl.where(end > begin, end, begin // 64 * 64)
    row_scores_ptr = scores_ptr + own * stride_scores * 64
    list_ptr = lists_ptr + own * SIZE
    # Before the range is known; what is read of others' groups does not count.
    cell = tl.arange(0, GROUPS)
    best = tl.load(maxima_ptr + own * GROUPS + cell)
    group = group.to(tl.int32)
    is_own = (cell >= begin // group * 64) & (cell < (end + group - 1) // group * 64)
    best = tl.where(is_own & (end > begin), best, float("-inf"))
    first = begin // 64 * 64
    # Before the bound is found, which takes a while.
    scores = load_chunk(row_scores_ptr, first, end, CHUNK)
    least = bound_of(best, TOP_K, WARPS)
    count = keep_part(
        *(scores, row_scores_ptr, list_ptr, first, end, begin, least, SIZE, CHUNK, WARPS, PTX)
    )
    if count > SIZE:
        tl.debug_barrier()
        count, least = keep_best(row_scores_ptr, list_ptr, begin, end, TOP_K, SIZE, WARPS, PTX)
    # What all threads wrote comes before what is read.
    tl.debug_barrier()
    keys, positions = load_list(list_ptr, count, SIZE)
    floor = ordered_keys(least)
    kth, ties, surplus, total = threshold_from(keys, floor, count, TOP_K, WARPS)
    is_taken, place = taken(keys, kth, ties, surplus, WARPS)
    if row < R:
        write_selected(
            *(keys, positions, is_taken, place, total, row),
            page_table_ptr,
            tl.maximum(b, 0) * stride_table,
            indices_ptr,
            slots_ptr,
            selected_scores_ptr,
            *(TOP_K, PTX),
        )
