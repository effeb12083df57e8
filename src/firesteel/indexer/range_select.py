# pyright: basic
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false, reportAssignmentType=false
# ruff: noqa: ANN001, ANN201, ANN202
"""Exact selection of prefill: one program a row, which finds a bound of its own.

The program reads its row's scores twice. First it finds the largest of each of GROUPS groups of
keys that lie apart: the TOP_K-th largest of those is a bound that every selected score reaches, and
few others do. Then it keeps what reaches the bound, and selects from that.
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


@triton.jit
def maxima_of(scores_ptr, begin, end, GROUPS: tl.constexpr):
    """The largest of each group of a row's scores begin..end-1, GROUPS apart; -inf of none."""
    TURNS: tl.constexpr = 4
    t = tl.arange(0, GROUPS)
    length = tl.maximum(end - begin, 0).to(tl.uint32)
    best = tl.full((GROUPS,), float("-inf"), tl.float32)
    for start in range(begin // 64 * 64, end, TURNS * GROUPS):
        scores = ()
        # All are read before one is looked at.
        for turn in tl.static_range(TURNS):
            scores += (load_chunk(scores_ptr, start + turn * GROUPS, end, GROUPS),)
        for turn in tl.static_range(TURNS):
            # One comparison, since a negative position is past any length. A NaN is not larger, as
            # none is selected.
            position = (start + turn * GROUPS - begin + t).to(tl.uint32, bitcast=True)
            is_larger = (scores[turn] > best) & (position < length)
            best = tl.where(is_larger, scores[turn], best)
    return best


@triton.jit(
    do_not_specialize=["capacity", "stride_scores", "stride_table", "first_row", "R"],
    do_not_specialize_on_alignment=[
        *("page_table_ptr", "row_request_ptr", "k_start_ptr", "k_end_ptr"),
    ],
)
def range_select_kernel(
    scores_ptr,
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
    stride_table: tl.int64,
    first_row: tl.int64,
    R: tl.int64,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    WARPS: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """The TOP_K largest scores of each row's range, in the order of positions

    name             shape            dtype  layout      traffic
    scores           [rows, C]        fp32   rows apart  a row's range read twice
    lists            [rows, SIZE]     int64  contiguous  candidates written, then read, once
    page_table       [B, width]       int32  unit last stride  read for slots
    row_request      [R]              int32  contiguous  of pages; a negative one has no keys
    k_start, k_end   [R]              int32  contiguous  k_start None: 0
    indices          [R, TOP_K]       int32  contiguous  written once, no init; from k_start on
    slots            [R, TOP_K]       int32  contiguous  as indices; or None
    selected_scores  [R, TOP_K]       fp32   contiguous  as indices; or None

    Selected from are the rows from first_row on, before R, of which the first one's scores are the
    first row of `scores`; rows of scores lie stride_scores times 64 apart.

    Example: TOP_K 2, GROUPS 4, scores [5, 1, 7, 7 | 9, NaN] have maxima [9, 1, 7, 7]; the second
    is 7, which positions 2, 3 and 4 reach, and of those [2, 4] are selected.

    Grid      (rows,).
    Key       which pointers are None, constexprs; WARPS is num_warps.
    Numerics  exact; the same bits every run.
    Bytes     8 a key of a range, from L2 as far as it holds them; 16 a key that reaches the bound;
              where those are more than SIZE, 4 a key again
    Range     rows * C may pass 2**31, so row offsets are int64. GROUPS and SIZE are powers of two;
              SIZE is at least 2 * TOP_K, GROUPS at least TOP_K.
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
    row_scores_ptr = scores_ptr + own * stride_scores * 64
    list_ptr = lists_ptr + own * SIZE
    best = maxima_of(row_scores_ptr, begin, end, GROUPS)
    first = begin // 64 * 64
    # Before the bound is found, which takes a while.
    scores = load_chunk(row_scores_ptr, first, end, GROUPS)
    least = bound_of(best, TOP_K, WARPS)
    count = keep_part(
        *(scores, row_scores_ptr, list_ptr, first, end, begin, least, SIZE, GROUPS, WARPS, PTX)
    )
    if count > SIZE:
        tl.debug_barrier()
        count, least = keep_best(row_scores_ptr, list_ptr, begin, end, TOP_K, SIZE, WARPS, PTX)
    # What all threads wrote comes before what is read.
    tl.debug_barrier()
    keys, positions = load_list(list_ptr, count, SIZE)
    floor = ordered_keys(least)
    kth, ties, surplus, total = threshold_from(keys, floor, count, TOP_K, WARPS)
    is_taken, place = taken(keys, kth, ties, surplus, WARPS, 2)
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
