# pyright: basic
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false, reportAssignmentType=false
# ruff: noqa: ANN001, ANN201, ANN202
"""Exact selection from many scores of which nearly all are dropped by a bound.

decode_scores leaves maxima of groups of keys. As top_k groups have a key each, the top_k-th largest
maximum is at most the top_k-th largest score: no key below that bound is selected. Programs share a
row's scores, each writes those that reach the bound, in the order of positions, and the last one to
end selects from all of them. Should there be more than it holds in registers, it goes through all
scores of the row again, a few at a time beside the best so far: slower, and as exact.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from firesteel.indexer.candidates import (
    bound_of,
    keep_best,
    keep_part,
    load_chunk,
    split_candidates,
)
from firesteel.indexer.score import clamped_length
from firesteel.indexer.select import ordered_keys, taken, threshold_from, write_selected

__all__ = ["filter_kernel"]


@triton.jit
def least_score(
    maxima_ptr,
    programs,
    written,
    SHARES: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    WARPS: tl.constexpr,
):
    """The least score that may be selected, by 64 maxima each of the first `written` programs.

    A group has up to SHARES maxima, GROUPS apart.
    """
    group = tl.arange(0, GROUPS)
    best = tl.full((GROUPS,), float("-inf"), tl.float32)
    for share in tl.static_range(SHARES):
        at = share * GROUPS + group
        # Read whether written or not, so that the read does not wait for the length.
        found = tl.load(maxima_ptr + at, mask=at // 64 < programs, other=0.0)
        best = tl.maximum(best, tl.where(at // 64 < written, found, float("-inf")))
    return bound_of(best, TOP_K, WARPS)


@triton.jit
def kept_places(counts_ptr, parts, MAX_PARTS: tl.constexpr, FINAL: tl.constexpr):
    """(places [FINAL], total): where what the parts kept lies, one after the other, each to FINAL.

    Parts lie FINAL apart. Where total is more than FINAL, the rest are left out.
    """
    t = tl.arange(0, FINAL)
    at, end = t, tl.full((), 0, tl.int32)
    counts = ()
    # All are read at once.
    for part in tl.static_range(MAX_PARTS):
        counts += (tl.load(counts_ptr + part, mask=part < parts, other=0),)
    for part in tl.static_range(MAX_PARTS):
        # What comes after this part's, if any does.
        end += counts[part]
        at += tl.where(t >= end, FINAL - counts[part], 0)
    return at, end


@triton.jit(
    do_not_specialize=["stride_scores", "stride_table", "width", "programs", "first_row", "R"],
    do_not_specialize_on_alignment=["page_table_ptr", "seq_lens_ptr"],
)
def filter_kernel(
    scores_ptr,
    maxima_ptr,
    kept_ptr,
    counts_ptr,
    arrived_ptr,
    page_table_ptr,
    seq_lens_ptr,
    indices_ptr,
    slots_ptr,
    selected_scores_ptr,
    stride_scores: tl.int64,
    stride_table: tl.int64,
    width: tl.int64,
    programs: tl.int64,
    first_row: tl.int64,
    R: tl.int64,
    ROWS: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARES: tl.constexpr,
    GROUPS: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    FINAL: tl.constexpr,
    CHUNK: tl.constexpr,
    WARPS: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """The TOP_K largest scores of each row, in the order of positions

    name             shape              dtype  layout      traffic
    scores           [R, C]             fp32   rows apart  live keys read once
    maxima           [R, programs, 64]  fp32   contiguous  read by each program of its row
    kept             [R, P, FINAL]      int64  contiguous  candidates written, then read, once
    counts           [R, P]             int32  contiguous  as kept
    arrived          [R]                int32  contiguous  zeros; counted up to P
    page_table       [B, width]         int32  unit last stride  read for slots
    seq_lens         [B]                int32  contiguous  read by each program of its rows
    indices          [R, TOP_K]         int32  contiguous  written once, no init
    slots            [R, TOP_K]         int32  contiguous  as indices; or None
    selected_scores  [R, TOP_K]         fp32   contiguous  as indices; or None

    R rows are selected from: those from first_row on of the rows that lengths and outputs are of.
    Rows of scores lie stride_scores times 64 apart. maxima are those of `programs` of
    decode_scores, at most SHARES times GROUPS / 64, of which those that are equal modulo
    GROUPS / 64 have their groups in common; it also made `arrived` zeros, so that nothing need be
    left from call to call.

    Example: TOP_K 2, maxima [7, 9, 1, 5] of groups of scores [5, 1, 7, 7 | 9, NaN, ...]: the second
    largest is 7, and the scores from 7 on are those of positions 2, 3 and 4.

    Grid      (R, P), P at most MAX_PARTS.
    Key       which pointers are None, constexprs; WARPS is num_warps.
    Numerics  exact; the same bits every run: which program is the last changes nothing.
    Bytes     4 a live key; 256 * programs from L2, by each of P; 16 a key that reaches the bound;
              where those are more than FINAL, 4 a live key again
    Range     R * C may pass 2**31, so row offsets are int64. FINAL is at least 2 * TOP_K;
              GROUPS, FINAL and CHUNK are powers of two, at most 32768.
    Oracle    top_k_reference
    """
    if PDL:
        # The next launch may take its place now: it waits for the end of this one.
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    if row >= R:
        return
    part = tl.program_id(1)
    call_row = first_row + row
    b = call_row // ROWS
    seq_len = tl.load(seq_lens_ptr + b)
    length = clamped_length(seq_len, call_row % ROWS, ROWS, width * 64).to(tl.int32)
    # Pages are shared, and were written, up to the length of the request's last row.
    whole = clamped_length(seq_len, ROWS - 1, ROWS, width * 64).to(tl.int32)
    row_scores_ptr = scores_ptr + row * stride_scores * 64
    parts = tl.num_programs(1)
    row_kept_ptr = kept_ptr + row * parts * FINAL
    # A program without a page wrote nothing.
    written = tl.minimum(programs, (whole + 63) // 64)
    share = ((length + 63) // 64 + parts - 1) // parts * 64
    first = part * share
    last = tl.minimum(first + share, length)
    # Before the bound is found, which takes a while.
    scores = load_chunk(row_scores_ptr, first, last, CHUNK)
    row_maxima_ptr = maxima_ptr + row * programs * 64
    least = least_score(row_maxima_ptr, programs, written, SHARES, GROUPS, TOP_K, WARPS)
    own_ptr = row_kept_ptr + part * FINAL
    count = keep_part(
        *(scores, row_scores_ptr, own_ptr, first, last, 0, least, FINAL, CHUNK, WARPS, PTX)
    )
    row_counts_ptr = counts_ptr + row * parts
    tl.store(row_counts_ptr + part, count)
    # What all threads wrote comes before the count, and what others did before what follows.
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel") == parts - 1:
        tl.debug_barrier()
        t = tl.arange(0, FINAL)
        at, total = kept_places(row_counts_ptr, parts, MAX_PARTS, FINAL)
        at = tl.where(total > FINAL, t, at)
        if total > FINAL:
            total, least = keep_best(
                row_scores_ptr, row_kept_ptr, 0, length, TOP_K, FINAL, WARPS, PTX
            )
        kept = tl.load(row_kept_ptr + at, mask=t < total, other=0, cache_modifier=".cg")
        keys, positions = split_candidates(kept, t < total)
        floor = ordered_keys(least)
        best, ties, surplus, found = threshold_from(keys, floor, total, TOP_K, WARPS)
        is_taken, place = taken(keys, best, ties, surplus, WARPS)
        write_selected(
            *(keys, positions, is_taken, place, found, call_row),
            page_table_ptr,
            b * stride_table,
            indices_ptr,
            slots_ptr,
            selected_scores_ptr,
            TOP_K,
            PTX,
        )
