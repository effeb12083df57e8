# pyright: basic
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false, reportAssignmentType=false
# ruff: noqa: ANN001, ANN201, ANN202
"""Scores of keys: a page of 64 is the rows of a product, all heads of a few rows its columns."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = [
    "clamped_length",
    "decode_scores_kernel",
    "page_keys",
    "query_tile",
    "store_scores",
    "uniform",
]


@triton.jit
def uniform(value, PTX: tl.constexpr):
    """An int32 scalar, of which the assembler then knows that all threads of a warp have the same.

    A loop up to what was loaded, or found by a sum, it would else take for one that threads leave
    at different times, and keep nothing of it in registers of the warp.
    """
    if PTX:
        value = tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;",
            "=r,r",
            [value],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return value


@triton.jit
def clamped_length(seq_len, row, ROWS: tl.constexpr, capacity):
    """Keys that row `row` of ROWS sees, int64 in [0, capacity]; a negative length is 0."""
    return tl.minimum(tl.maximum(seq_len.to(tl.int64) - (ROWS - 1 - row), 0), capacity)


@triton.jit
def query_tile(
    q_ptr, w_ptr, row, is_row, H: tl.constexpr, ROW_BLOCK: tl.constexpr, HEAD_BLOCK: tl.constexpr
):
    """q as [128, ROW_BLOCK * HEAD_BLOCK] and w as [ROW_BLOCK * HEAD_BLOCK] of rows [ROW_BLOCK].

    Heads past H and rows that are none have zeros.
    """
    heads = tl.arange(0, HEAD_BLOCK)
    at = row[:, None] * H + heads[None, :]
    is_head = is_row[:, None] & (heads < H)[None, :]
    COLUMNS: tl.constexpr = ROW_BLOCK * HEAD_BLOCK
    at = tl.reshape(at, (COLUMNS,))
    is_head = tl.reshape(is_head.to(tl.int32), (COLUMNS,)) > 0
    d = tl.arange(0, 128)
    q = tl.load(q_ptr + at[None, :] * 128 + d[:, None], mask=is_head[None, :], other=0.0)
    return q, tl.load(w_ptr + at, mask=is_head, other=0.0)


@triton.jit
def page_keys(values_ptr, scales_ptr, page, page_stride):
    """(keys [64, 128], scales [64]) of a page, whose stride is in units of 16 bytes.

    Zeros where page is negative, which is not read; ones for the scales that 16-bit keys lack.
    """
    t = tl.arange(0, 64)
    d = tl.arange(0, 128)
    is_there = (t >= 0) & (page >= 0)
    start = tl.maximum(page, 0) * page_stride
    UNIT: tl.constexpr = 128 // values_ptr.dtype.element_ty.primitive_bitwidth
    keys_ptrs = values_ptr + start * UNIT + (t[:, None] * 128 + d[None, :])
    keys = tl.load(keys_ptrs, mask=is_there[:, None], other=0.0)
    if scales_ptr is not None:
        scales = tl.load(scales_ptr + start * 4 + 2048 + t, mask=is_there, other=0.0)
    else:
        scales = tl.full((64,), 1.0, tl.float32)
    return keys, scales, is_there


@triton.jit
def key_scores(keys, scales, q, w, ROW_BLOCK: tl.constexpr, HEAD_BLOCK: tl.constexpr):
    """[T, ROW_BLOCK] fp32 of keys [T, 128], scales [T], q [128, ROW_BLOCK * HEAD_BLOCK]."""
    dots = tl.dot(keys, q)
    # A NaN stays one: it must not become 0, which could be selected.
    weighted = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL) * w[None, :]
    if ROW_BLOCK == 1:
        sums = tl.sum(weighted, axis=1)[:, None]
    else:
        T: tl.constexpr = keys.shape[0]
        sums = tl.sum(tl.reshape(weighted, (T, ROW_BLOCK, HEAD_BLOCK)), axis=2)
    return sums * scales[:, None]


@triton.jit
def store_scores(
    keys,
    scales,
    is_there,
    q,
    w,
    scores_ptrs,
    is_row,
    ROW_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
):
    """Scores of 64 keys to scores_ptrs [64, ROW_BLOCK]; -inf of keys that are not there.

    is_there and is_row of None are all keys and all rows.
    """
    found = key_scores(keys, scales, q, w, ROW_BLOCK, HEAD_BLOCK)
    if is_there is not None:
        found = tl.where(is_there[:, None], found, float("-inf"))
    if is_row is None:
        tl.store(scores_ptrs, found)
    else:
        tl.store(scores_ptrs, found, mask=is_row[None, :])
    return found


@triton.jit
def larger(best, found, position, length):
    """best [64, ROW_BLOCK], or found where it is larger and before its row's length."""
    # A NaN is not larger, as none is selected.
    is_larger = (found > best) & (position[:, None] < length[None, :])
    return tl.where(is_larger, found, best)


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
    Pages lie page_stride times 16 bytes apart, rows of scores stride_scores times 64. A key of a
    page that is missing (-1) scores -inf. A page is written whole for every row: keys past a row's
    own length have scores that mean nothing.

    Program p has pages p, p + P, ... of its request, and maxima[r, p, t] is the largest score, up
    to the row's length, of those pages' keys t: keys far from each other, so that a stretch of good
    ones does not meet in one maximum. Programs without a page write none. arrived is for
    filter_kernel to count in.

    A product has ROW_BLOCK rows; those that are left, of 3, 5 or 6, a second one of REST_BLOCK.

    Grid      (S, P); the P programs of a request share its live pages, whatever width is.
    Key       type of values, which pointers are None, H, ROWS, blocks, STAGES.
    Numerics  exact products; sums of 128, and of H, in fp32 on the order of the layout, which is
              the same for every page; the same bits whatever B, P and the lengths are. On Hopper
              e4m3 products are added with fewer bits than fp32 has (score_bound_reference). A NaN
              in a key, or as its scale, is its score.
    Bytes     8448 or 16384 a live page; S * P * ROWS * H * (4 + 128 numbers) from L2; written
              4 * ROWS * 64 a live page, and a program with maxima
    Range     pages and scores may lie past 2**31, so offsets are int64. Blocks are powers of
              two; ROW_BLOCK + REST_BLOCK is at least ROWS, HEAD_BLOCK at least H.
    Oracle    decode_scores_reference
    """
    if PDL:
        # The next launch may take its place now: it waits for the end of this one.
        gdc_launch_dependents()
        gdc_wait()
    own_b = tl.program_id(0).to(tl.int64)
    b = first_request + own_b
    j = tl.arange(0, ROW_BLOCK)
    row = own_b * ROWS + j
    rest = ROW_BLOCK + tl.arange(0, max(REST_BLOCK, 1))
    rest_row = own_b * ROWS + rest
    first_row = first_request * ROWS
    if arrived_ptr is not None:
        own = tl.arange(0, 8)
        is_own = (own < ROWS) & (tl.program_id(1) == 0)
        tl.store(arrived_ptr + own_b * ROWS + own, tl.zeros((8,), tl.int32), mask=is_own)
    seq_len = tl.load(seq_lens_ptr + b)
    capacity = width * 64
    length = clamped_length(seq_len, j, ROWS, capacity)
    rest_length = clamped_length(seq_len, rest, ROWS, capacity)
    pages = ((clamped_length(seq_len, ROWS - 1, ROWS, capacity) + 63) // 64).to(tl.int32)
    pages = uniform(pages, PTX)
    first, step = tl.program_id(1), tl.num_programs(1)
    # Read before the length is known, so that one wait is for both.
    q, w = query_tile(q_ptr, w_ptr, first_row + row, j < ROWS, H, ROW_BLOCK, HEAD_BLOCK)
    if REST_BLOCK > 0:
        rest_q, rest_w = query_tile(
            *(q_ptr, w_ptr, first_row + rest_row, rest < ROWS, H, REST_BLOCK, HEAD_BLOCK)
        )
    if first >= pages:
        return
    best = tl.full((64, ROW_BLOCK), float("-inf"), tl.float32)
    if REST_BLOCK > 0:
        rest_best = tl.full((64, REST_BLOCK), float("-inf"), tl.float32)
    t = tl.arange(0, 64)
    table_ptr = page_table_ptr + b * stride_table
    for number in tl.range(first, pages, step, num_stages=STAGES):
        page = tl.load(table_ptr + number).to(tl.int64)
        keys, scales, is_there = page_keys(values_ptr, scales_ptr, page, page_stride)
        position = number * 64 + t
        at = scores_ptr + position[:, None]
        ptrs = at + row[None, :] * stride_scores * 64
        found = store_scores(keys, scales, is_there, q, w, ptrs, j < ROWS, ROW_BLOCK, HEAD_BLOCK)
        if maxima_ptr is not None:
            best = larger(best, found, position, length)
        if REST_BLOCK > 0:
            ptrs = at + rest_row[None, :] * stride_scores * 64
            found = store_scores(
                *(keys, scales, is_there, rest_q, rest_w, ptrs, rest < ROWS),
                *(REST_BLOCK, HEAD_BLOCK),
            )
            if maxima_ptr is not None:
                rest_best = larger(rest_best, found, position, rest_length)
    if maxima_ptr is not None:
        store_maxima(maxima_ptr, best, row, j < ROWS)
        if REST_BLOCK > 0:
            store_maxima(maxima_ptr, rest_best, rest_row, rest < ROWS)
