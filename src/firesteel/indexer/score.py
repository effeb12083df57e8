# pyright: basic
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false, reportAssignmentType=false
# ruff: noqa: ANN001, ANN201, ANN202
"""Scores of keys: a page of 64 is the rows of a product, all heads of a few rows its columns.

A thread of a Hopper's product has two neighbouring columns of each eight. So columns that lie side
by side are two heads of a row, then two of the next: most heads of a row meet in one thread, where
their sum costs no more than their products with w. Warp groups that share columns each have whole
rows.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from firesteel.indexer.ptx import scatter, uniform

__all__ = [
    "clamped_length",
    "decode_scores_kernel",
    "key_scores",
    "larger",
    "page_keys",
    "query_tile",
]


@triton.jit
def clamped_length(seq_len, row, ROWS: tl.constexpr, capacity):
    """Keys that row `row` of ROWS sees, int64 in [0, capacity]; a negative length is 0."""
    return tl.minimum(tl.maximum(seq_len.to(tl.int64) - (ROWS - 1 - row), 0), capacity)


@triton.jit
def query_tile(
    q_ptr,
    w_ptr,
    first,
    count,
    H: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """q as [128, ROW_BLOCK * HEAD_BLOCK] and w as [ROW_BLOCK * HEAD_BLOCK] of rows from `first` on.

    Columns are ordered, and w is halved, as `key_scores` has it. Heads past H and rows past `count`
    have zeros.
    """
    NEAR: tl.constexpr = ROW_BLOCK // SPLIT
    column = tl.arange(0, ROW_BLOCK * HEAD_BLOCK)
    row = column // (NEAR * HEAD_BLOCK) * NEAR + column // 2 % NEAR
    head = column // (2 * NEAR) % (HEAD_BLOCK // 2) * 2 + column % 2
    at = (first + row) * H + head
    is_some = (row < count) & (head < H)
    d = tl.arange(0, 128)
    q = tl.load(q_ptr + at[None, :] * 128 + d[:, None], mask=is_some[None, :], other=0.0)
    w = tl.load(w_ptr + at, mask=is_some, other=0.0)
    return q, w * 0.5 if q.dtype.primitive_bitwidth == 8 else w


@triton.jit
def page_keys(values_ptr, scales_ptr, page, page_stride):
    """(keys [64, 128], scales [64]) of a page, whose stride is in units of 16 bytes.

    Zeros where page is negative, which is not read; ones for the scales that 16-bit keys lack.
    """
    t = tl.arange(0, 64)
    d = tl.arange(0, 128)
    is_there = (t >= 0) & (page >= 0)
    start = tl.maximum(page, 0).to(tl.int64) * page_stride
    UNIT: tl.constexpr = 128 // values_ptr.dtype.element_ty.primitive_bitwidth
    keys_ptrs = values_ptr + start * UNIT + (t[:, None] * 128 + d[None, :])
    keys = tl.load(keys_ptrs, mask=is_there[:, None], other=0.0)
    if scales_ptr is not None:
        scales = tl.load(scales_ptr + start * 4 + 2048 + t, mask=is_there, other=0.0)
    else:
        scales = tl.full((64,), 1.0, tl.float32)
    return keys, scales, is_there


@triton.jit
def key_scores(
    keys,
    scales,
    q,
    w,
    ROW_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """[T, ROW_BLOCK] fp32 of keys [T, 128], scales [T], q [128, ROW_BLOCK * HEAD_BLOCK].

    Columns: SPLIT parts of whole rows; in each pairs of heads, of which pair every row has its own
    two side by side.
    """
    T: tl.constexpr = keys.shape[0]
    NEAR: tl.constexpr = ROW_BLOCK // SPLIT
    # Pairs of a row in eight columns: threads of their own.
    APART: tl.constexpr = max(4 // NEAR, 1)
    PAIRS: tl.constexpr = HEAD_BLOCK // 2 // APART
    dots = tl.dot(keys, q)
    # relu. A NaN stays one: it must not become 0, which could be selected.
    if keys.dtype.primitive_bitwidth == 8:
        # Twice what is positive, of which w is half, is as exact, and an addition takes half of a
        # maximum's time. Products of e4m3 are far from infinity.
        dots += tl.abs(dots)
    else:
        dots = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL)
    sums = tl.reshape(dots * w[None, :], (T, SPLIT, PAIRS, APART, NEAR, 2))
    # Within a thread, and then between those that have heads of the same row.
    sums = tl.sum(tl.sum(tl.sum(sums, axis=2), axis=4), axis=2)
    return tl.reshape(sums, (T, ROW_BLOCK)) * scales[:, None]


@triton.jit
def larger(best, found):
    """The larger of two each; a NaN is not larger, as none is selected."""
    return tl.where(found > best, found, best)


@triton.jit
def store_maxima(maxima_ptr, best, row, is_row):
    """This program's 64 maxima of each row, beside those of the other programs of a request."""
    columns = tl.num_programs(1) * 64
    at = row[None, :] * columns + tl.program_id(1) * 64 + tl.arange(0, 64)[:, None]
    tl.store(maxima_ptr + at, best, mask=is_row[None, :])


@triton.jit(
    do_not_specialize=["stride_table", "page_stride", "width", "stride_scores", "first_request"],
    do_not_specialize_on_alignment=["w_ptr", "page_table_ptr", "seq_lens_ptr"],
)
def decode_scores_kernel(
    q_ptr,
    w_ptr,
    values_ptr,
    scales_ptr,
    page_table_ptr,
    seq_lens_ptr,
    scores_ptr,
    maxima_ptr,
    arrived_ptr,
    stride_table: tl.int64,
    page_stride: tl.int64,
    width: tl.int64,
    stride_scores: tl.int64,
    first_request: tl.int64,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """scores[r, t] = k_scale[t] * sum over h of w[r, h] * relu(q[r, h] . k[t])

    name        shape              dtype  layout            traffic
    q           [B, ROWS, H, 128]  as values  contiguous    read by each program of its request
    w           [B, ROWS, H]       fp32   contiguous        as q
    values      [bytes]            e4m3 or 16-bit; the cache, live pages read once
    scales      [bytes]            fp32   the cache again   as values; None of 16-bit keys
    page_table  [B, width]         int32  unit last stride  live entries read once
    seq_lens    [B]                int32  contiguous        read by each program of its request
    scores      [S * ROWS, C]      fp32   rows apart        live pages written; the rest as it was
    maxima      [S * ROWS, P, 64]  fp32   contiguous        written once; or None
    arrived     [S * ROWS]         int32  contiguous        written once, zeros; None as maxima

    Scored are S requests, from first_request on, of which the first one's scores are the first.
    Pages lie page_stride times 16 bytes apart, rows of scores stride_scores times 64. A page is
    written whole for every row: keys past a row's own length score -inf, and so do those of a page
    that is missing (-1).

    Program p has pages p, p + P, ... of its request, and maxima[r, p, t] is the largest score of
    those pages' keys t: keys far from each other, so that a stretch of good ones does not meet in
    one maximum. Programs without a page write none. arrived is for filter_kernel to count in.

    A product has ROW_BLOCK rows; those that are left, of 3, 5 or 6, a second one of REST_BLOCK.

    Grid      (S, P); the P programs of a request share its live pages, whatever width is.
    Key       type of values, which pointers are None, H, ROWS, blocks, SPLIT, STAGES.
    Numerics  exact products; sums of 128, and of H, in fp32 on the order of the layout, which is
              the same for every page; the same bits whatever B, P and the lengths are. On Hopper
              e4m3 products are added with fewer bits than fp32 has (score_bound_reference). A NaN
              in a key, or as its scale, is its score.
    Bytes     8448 or 16384 a live page; S * P * ROWS * H * (4 + 128 numbers) from L2; written
              4 * ROWS * 64 a live page, and a program with maxima
    Range     pages and scores may lie past 2**31, so offsets are int64. Blocks are powers of
              two; ROW_BLOCK + REST_BLOCK is at least ROWS, HEAD_BLOCK at least H; SPLIT at most
              ROW_BLOCK.
    Oracle    decode_scores_reference
    """
    if PDL:
        # The next launch may take its place now: it waits for the end of this one.
        gdc_launch_dependents()
        gdc_wait()
    own_b = tl.program_id(0).to(tl.int64)
    b = first_request + own_b
    j = tl.arange(0, ROW_BLOCK)
    rest = ROW_BLOCK + tl.arange(0, max(REST_BLOCK, 1))
    # None where a block has no more rows than there are.
    is_row, is_rest = None, None
    if ROW_BLOCK > ROWS:
        is_row = (j < ROWS)[None, :]
    if ROW_BLOCK + REST_BLOCK > ROWS:
        is_rest = (rest < ROWS)[None, :]
    own_row = own_b * ROWS
    if arrived_ptr is not None:
        own = tl.arange(0, 8)
        is_own = (own < ROWS) & (tl.program_id(1) == 0)
        tl.store(arrived_ptr + own_row + own, tl.zeros((8,), tl.int32), mask=is_own)
    seq_len = tl.load(seq_lens_ptr + b)
    capacity = width * 64
    length = clamped_length(seq_len, j, ROWS, capacity).to(tl.int32)[None, :]
    rest_length = clamped_length(seq_len, rest, ROWS, capacity).to(tl.int32)[None, :]
    pages = ((clamped_length(seq_len, ROWS - 1, ROWS, capacity) + 63) // 64).to(tl.int32)
    pages = uniform(pages, PTX)
    first, step = tl.program_id(1), tl.num_programs(1)
    # Read before the length is known, so that one wait is for both.
    call_row = first_request * ROWS + own_row
    q, w = query_tile(q_ptr, w_ptr, call_row, ROWS, H, ROW_BLOCK, HEAD_BLOCK, SPLIT)
    if REST_BLOCK > 0:
        REST_SPLIT: tl.constexpr = min(SPLIT, REST_BLOCK)
        rest_q, rest_w = query_tile(
            *(q_ptr, w_ptr, call_row + ROW_BLOCK, ROWS - ROW_BLOCK),
            *(H, REST_BLOCK, HEAD_BLOCK, REST_SPLIT),
        )
        rest_best = tl.full((64, REST_BLOCK), float("-inf"), tl.float32)
        rest_place = ((own_row + rest) * stride_scores * 64).to(tl.int32)[None, :]
    if first >= pages:
        return
    best = tl.full((64, ROW_BLOCK), float("-inf"), tl.float32)
    place = ((own_row + j) * stride_scores * 64).to(tl.int32)[None, :]
    t = tl.arange(0, 64)
    table_ptr = page_table_ptr + b * stride_table
    page = tl.load(table_ptr + first)
    for number in tl.range(first, pages, step, num_stages=STAGES):
        # Carried, so that the pipeline of keys does not wait for a pipeline of pages.
        following = tl.load(table_ptr + tl.minimum(number + step, pages - 1))
        keys, scales, is_there = page_keys(values_ptr, scales_ptr, page, page_stride)
        position = (number * 64 + t)[:, None]
        found = key_scores(keys, scales, q, w, ROW_BLOCK, HEAD_BLOCK, SPLIT)
        found = tl.where(is_there[:, None] & (position < length), found, float("-inf"))
        scatter(scores_ptr, place + position, found, is_row, PTX)
        best = larger(best, found)
        if REST_BLOCK > 0:
            found = key_scores(keys, scales, rest_q, rest_w, REST_BLOCK, HEAD_BLOCK, REST_SPLIT)
            found = tl.where(is_there[:, None] & (position < rest_length), found, float("-inf"))
            scatter(scores_ptr, rest_place + position, found, is_rest, PTX)
            rest_best = larger(rest_best, found)
        page = following
    if maxima_ptr is not None:
        store_maxima(maxima_ptr, best, own_row + j, j < ROWS)
        if REST_BLOCK > 0:
            store_maxima(maxima_ptr, rest_best, own_row + rest, rest < ROWS)
