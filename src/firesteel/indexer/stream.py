# pyright: basic
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false, reportAssignmentType=false
# ruff: noqa: ANN001, ANN201, ANN202
"""Scores and selection in one program, whose memory does not grow with the context.

A program has a few rows, and works through their keys a chunk at a time: the chunk's scores go to
scratch of its own, which stays in L2, and those above the k-th score so far join the selection so
far. Strictly above is exact: what came before has lower positions, and wins ties.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from firesteel.indexer.score import clamped_length, page_keys, query_tile, store_scores
from firesteel.indexer.select import (
    as_candidates,
    candidate_keys,
    candidate_positions,
    count_selectable,
    ordered_keys,
    ranks,
    threshold,
    write_selected,
)

__all__ = ["stream_kernel"]


@triton.jit
def join_chunk(
    scratch_ptr, kept_ptr, position, first, last, CHUNK: tl.constexpr, TOP_K: tl.constexpr
):
    """Let the scores first..last-1 of a row's chunk join the candidates kept.

    The chunk's first score is that of `position`.
    """
    t = tl.arange(0, CHUNK)
    # Read whole, 16 bytes at a time, what is not a score included.
    is_seen = (t >= first) & (t < last)
    keys = tl.where(is_seen, ordered_keys(tl.load(scratch_ptr + t)), 0)
    kept = tl.load(kept_ptr + tl.arange(0, TOP_K))
    kept_keys = candidate_keys(kept)
    # 0 while there are holes.
    least = tl.min(kept_keys, axis=0)
    keys = tl.where(keys > least, keys, 0)
    fresh = count_selectable(keys)
    # All have read what is written below.
    tl.debug_barrier()
    if fresh > 0:
        prefix, shift, ties, _ = threshold(keys, kept_keys, TOP_K, 0, True)
        stays, place = ranks(kept_keys, prefix, shift, ties)
        is_tie = ((kept_keys >> shift) == (prefix >> shift)) & stays
        ties -= tl.sum(is_tie.to(tl.int32), axis=0)
        num_stay = tl.sum(stays.to(tl.int32), axis=0)
        tl.store(kept_ptr + place, kept, mask=stays)
        is_taken, place = ranks(keys, prefix, shift, ties)
        tl.store(kept_ptr + num_stay + place, as_candidates(keys, position + t), mask=is_taken)


@triton.jit
def score_chunk(
    q,
    w,
    rest_q,
    rest_w,
    values_ptr,
    scales_ptr,
    page_table_ptr,
    table_start,
    page_stride,
    first,
    last,
    scratch_ptr,
    ROW_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Scores of the keys [first, last) to scratch [ROW_BLOCK + REST_BLOCK, CHUNK], whole pages.

    first is a multiple of 64.
    """
    t = tl.arange(0, 64)
    d = tl.arange(0, 128)
    j = tl.arange(0, ROW_BLOCK)
    for at in tl.range(first, last, 64, num_stages=STAGES):
        key = at + t
        if page_table_ptr is not None:
            page = tl.load(page_table_ptr + table_start + at // 64).to(tl.int64)
            keys, scales, is_there = page_keys(values_ptr, scales_ptr, page, page_stride)
        else:
            is_there = key < last
            keys_ptrs = values_ptr + key.to(tl.int64)[:, None] * 128 + d[None, :]
            keys = tl.load(keys_ptrs, mask=is_there[:, None], other=0.0)
            scales = tl.full((64,), 1.0, tl.float32)
            if scales_ptr is not None:
                scales = tl.load(scales_ptr + key, mask=is_there, other=0.0)
        place = scratch_ptr + (at - first + t)[:, None]
        ptrs = place + j[None, :] * CHUNK
        store_scores(keys, scales, is_there, q, w, ptrs, j >= 0, ROW_BLOCK, HEAD_BLOCK)
        if REST_BLOCK > 0:
            rest = ROW_BLOCK + tl.arange(0, REST_BLOCK)
            ptrs = place + rest[None, :] * CHUNK
            store_scores(
                *(keys, scales, is_there, rest_q, rest_w, ptrs, rest >= 0),
                *(REST_BLOCK, HEAD_BLOCK),
            )


@triton.jit
def stream_segment(
    q,
    w,
    rest_q,
    rest_w,
    values_ptr,
    scales_ptr,
    page_table_ptr,
    table_start,
    page_stride,
    begin,
    end,
    part,
    parts,
    scratch_ptr,
    kept_ptr,
    stride_kept,
    ROWS: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Let this part of the keys of rows' ranges [begin, end) join their candidates, kept.

    Ranges are int32; a row whose range is empty keeps what it has.
    """
    is_some = end > begin
    lowest = tl.min(tl.where(is_some, begin, 2147483647), axis=0) // 64 * 64
    highest = tl.max(tl.where(is_some, end, 0), axis=0)
    units = (tl.maximum(highest - lowest, 0) + 63) // 64
    share = (units + parts - 1) // parts * 64
    first = lowest + part * share
    last = tl.minimum(highest, first + share)
    j = tl.arange(0, begin.shape[0])
    for start in range(first, last, CHUNK):
        stop = tl.minimum(last, start + CHUNK)
        score_chunk(
            *(q, w, rest_q, rest_w, values_ptr),
            scales_ptr,
            page_table_ptr,
            *(table_start, page_stride, start, stop, scratch_ptr),
            *(ROW_BLOCK, REST_BLOCK, HEAD_BLOCK, CHUNK, STAGES),
        )
        tl.debug_barrier()
        for row in range(0, ROWS):
            own_begin = tl.sum(tl.where(j == row, begin, 0), axis=0)
            own_end = tl.minimum(tl.sum(tl.where(j == row, end, 0), axis=0), stop)
            if tl.maximum(own_begin, start) < own_end:
                join_chunk(
                    *(scratch_ptr + row * CHUNK, kept_ptr + row * stride_kept),
                    *(start - own_begin, own_begin - start, own_end - start),
                    *(CHUNK, TOP_K),
                )
        tl.debug_barrier()


@triton.jit(
    do_not_specialize=["stride_table", "page_stride", "capacity", "R", "blocks", "parts"],
    do_not_specialize_on_alignment=[
        "w_ptr",
        "page_table_ptr",
        "seq_lens_ptr",
        "row_request_ptr",
        "k_start_ptr",
        "k_end_ptr",
    ],
)
def stream_kernel(
    q_ptr,
    w_ptr,
    values_ptr,
    scales_ptr,
    page_table_ptr,
    seq_lens_ptr,
    row_request_ptr,
    k_start_ptr,
    k_end_ptr,
    scratch_ptr,
    kept_ptr,
    indices_ptr,
    slots_ptr,
    selected_scores_ptr,
    stride_table: tl.int64,
    page_stride: tl.int64,
    capacity: tl.int64,
    R: tl.int64,
    blocks: tl.int64,
    parts: tl.int64,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """indices[r] = the TOP_K keys of row r's range with the largest scores; see docs/indexer.md

    name             shape                  dtype  layout           traffic
    q, w             [R, H, 128], [R, H]    as values, fp32; contiguous, read once a part
    values, scales   [bytes] or [T, 128], [T]  e4m3 or 16-bit, fp32; read once a block of rows
    page_table       [B, width]             int32  unit last stride  None: keys are contiguous
    seq_lens         [B]                    int32  contiguous       decode: ROWS rows a request
    row_request      [R]                    int32  contiguous       paged prefill: requests of rows
    k_start, k_end   [R]                    int32  contiguous       prefill; k_start None: 0
    scratch          [G, BLOCK, CHUNK]      fp32   contiguous       written, then read, a chunk
    kept             [slots, TOP_K]         int64  contiguous       read and written a chunk
    indices, slots, selected_scores         as select_kernel's; written where parts is 1

    scales is None of 16-bit keys. BLOCK is ROW_BLOCK + REST_BLOCK. Positions are relative to
    k_start. With several parts a row keeps `kept[r, part]`, for select_kernel to fold; with one,
    `kept[program, row of the block]` is the program's own.

    Grid      (G,), persistent; program p has blocks p, p + G, ... of ROWS rows, times parts.
    Key       type of values, which pointers are None, constexprs.
    Numerics  scores as decode_scores_kernel's; the selection is exact whatever CHUNK and parts are.
    Bytes     132 or 256 a key a block of rows; G * BLOCK * (4 * CHUNK + 8 * TOP_K) stay in L2
    Range     q, pages and kept may lie past 2**31, so offsets are int64; positions are int32.
              A negative request has no keys; one past page_table's rows is the caller's to prevent.
    Oracle    decode_scores_reference, range_scores_reference and top_k_reference
    """
    if PDL:
        # The next launch may take its place now: it waits for the end of this one.
        gdc_launch_dependents()
        gdc_wait()
    pid = tl.program_id(0).to(tl.int64)
    BLOCK: tl.constexpr = ROW_BLOCK + REST_BLOCK
    # Ranges of rows are vectors, whose lengths are powers of two.
    RANGES: tl.constexpr = ROW_BLOCK if REST_BLOCK == 0 else 2 * ROW_BLOCK
    j = tl.arange(0, RANGES)
    holes = tl.full((TOP_K,), 0, tl.int64)
    scratch = scratch_ptr + pid * (BLOCK * CHUNK)
    num_parts = tl.maximum(parts, 1)
    for item in range(pid, blocks * num_parts, tl.num_programs(0)):
        block, part = item // num_parts, (item % num_parts).to(tl.int32)
        row = block * ROWS + j
        is_row = (j < ROWS) & (row < R)
        kept, stride_kept = kept_ptr + pid * (BLOCK * TOP_K), tl.full((), TOP_K, tl.int64)
        if num_parts > 1:
            kept = kept_ptr + (block * ROWS * num_parts + part) * TOP_K
            stride_kept = num_parts * TOP_K
        num_rows = tl.sum(is_row.to(tl.int32), axis=0)
        for own in range(0, num_rows):
            tl.store(kept + own * stride_kept + tl.arange(0, TOP_K), holes)
        tl.debug_barrier()
        mine = tl.arange(0, ROW_BLOCK)
        mine_row = block * ROWS + mine
        is_mine = (mine < ROWS) & (mine_row < R)
        q, w = query_tile(q_ptr, w_ptr, mine_row, is_mine, H, ROW_BLOCK, HEAD_BLOCK)
        rest_q, rest_w = q, w
        if REST_BLOCK > 0:
            rest = ROW_BLOCK + tl.arange(0, REST_BLOCK)
            rest_row = block * ROWS + rest
            is_rest = (rest < ROWS) & (rest_row < R)
            rest_q, rest_w = query_tile(q_ptr, w_ptr, rest_row, is_rest, H, REST_BLOCK, HEAD_BLOCK)
        if seq_lens_ptr is not None:
            seq_len = tl.load(seq_lens_ptr + block)
            begin = tl.zeros((RANGES,), tl.int32)
            end = clamped_length(seq_len, j, ROWS, capacity).to(tl.int32)
        else:
            end = tl.load(k_end_ptr + row, mask=is_row, other=0).to(tl.int64)
            begin = tl.zeros((RANGES,), tl.int64)
            if k_start_ptr is not None:
                begin = tl.load(k_start_ptr + row, mask=is_row, other=0).to(tl.int64)
            begin = tl.minimum(tl.maximum(begin, 0), capacity).to(tl.int32)
            end = tl.minimum(tl.maximum(end, 0), capacity).to(tl.int32)
        end = tl.where(is_row, end, 0)
        if row_request_ptr is not None:
            request = tl.load(row_request_ptr + row, mask=is_row, other=-1)
            for own in range(0, num_rows):
                asked = tl.sum(tl.where(j == own, request, 0), axis=0)
                before = tl.sum(tl.where(j == own - 1, request, 0), axis=0)
                if (asked >= 0) & ((own == 0) | (asked != before)):
                    stream_segment(
                        *(q, w, rest_q, rest_w, values_ptr),
                        scales_ptr,
                        page_table_ptr,
                        asked.to(tl.int64) * stride_table,
                        page_stride,
                        begin,
                        tl.where(request == asked, end, 0),
                        *(part, num_parts.to(tl.int32), scratch, kept, stride_kept),
                        *(ROWS, ROW_BLOCK, REST_BLOCK, HEAD_BLOCK, TOP_K, CHUNK, STAGES),
                    )
        else:
            stream_segment(
                *(q, w, rest_q, rest_w, values_ptr),
                scales_ptr,
                page_table_ptr,
                *(block * stride_table, page_stride, begin, end),
                *(part, num_parts.to(tl.int32), scratch, kept, stride_kept),
                *(ROWS, ROW_BLOCK, REST_BLOCK, HEAD_BLOCK, TOP_K, CHUNK, STAGES),
            )
        if num_parts == 1:
            for own in range(0, num_rows):
                candidates = tl.load(kept + own * stride_kept + tl.arange(0, TOP_K))
                keys = candidate_keys(candidates)
                if row_request_ptr is not None:
                    b = tl.maximum(tl.load(row_request_ptr + block * ROWS + own), 0).to(tl.int64)
                else:
                    b = block
                write_selected(
                    *(keys, candidate_positions(candidates), keys != 0, tl.arange(0, TOP_K)),
                    *(count_selectable(keys), block * ROWS + own),
                    page_table_ptr,
                    b * stride_table,
                    indices_ptr,
                    slots_ptr,
                    selected_scores_ptr,
                    TOP_K,
                )
        tl.debug_barrier()
