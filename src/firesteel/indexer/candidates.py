# pyright: basic
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false, reportAssignmentType=false
# ruff: noqa: ANN001, ANN201, ANN202
"""Lists of candidates, which kernels keep in memory: int64, the score's bits below, its position.

They lie in the order of positions. A kernel that keeps what reaches a bound may find more than its
list holds: it then goes through all scores again, a few at a time beside the best so far.
"""

import triton
import triton.language as tl

from firesteel.indexer.select import (
    ordered_keys,
    ranks,
    scores_of,
    taken,
    threshold,
    threshold_from,
)

__all__ = ["bound_of", "keep_best", "keep_part", "load_chunk", "load_list", "split_candidates"]


@triton.jit
def store_candidates(list_ptr, place, scores, positions, mask, PTX: tl.constexpr):
    """fp32 scores and int32 positions to places of a list. By PTX as `scatter`."""
    bits = scores.to(tl.int32, bitcast=True)
    if PTX:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b64 a; setp.ne.b32 p, $5, 0; "
            "mad.wide.s32 a, $2, 8, $1; @p st.global.v2.b32 [a], {$3, $4}; mov.b32 $0, 0; }",
            "=r,l,r,r,r,r",
            [list_ptr.to(tl.int64), place, bits, positions, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        both = (bits.to(tl.int64) & 0xFFFFFFFF) | (positions.to(tl.int64) << 32)
        tl.store(list_ptr + place, both, mask=mask)


@triton.jit
def split_candidates(candidates, is_live):
    """(keys, positions) of int64 candidates: uint32, 0 of those that are not live, and int32."""
    scores = (candidates & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(is_live, ordered_keys(scores), 0), (candidates >> 32).to(tl.int32)


@triton.jit
def load_list(list_ptr, count, SIZE: tl.constexpr):
    """(keys, positions) of a list's first `count` candidates, then keys of 0."""
    t = tl.arange(0, SIZE)
    # Sixteen at a time, which the compiler sees to be aligned.
    is_read = t < (count + 15) // 16 * 16
    candidates = tl.load(list_ptr + t, mask=is_read, other=0, cache_modifier=".cg")
    return split_candidates(candidates, t < count)


@triton.jit
def compact(
    list_ptr,
    count,
    floor,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    WARPS: tl.constexpr,
    PTX: tl.constexpr,
):
    """Leave the best TOP_K of a list's first `count`, more than TOP_K: (floor, least).

    No score of the list is below floor, before and after; `least` is what scores must reach from
    now.

    Those that come later, and so have higher positions, lose ties: that score is the next above
    the TOP_K-th.
    """
    keys, positions = load_list(list_ptr, count, SIZE)
    least, ties, surplus, _ = threshold_from(keys, ordered_keys(floor), count, TOP_K, WARPS)
    is_taken, place = taken(keys, least, ties, surplus, WARPS)
    # All have read what is written below; and nothing is read before it is there.
    tl.debug_barrier()
    store_candidates(list_ptr, place, scores_of(keys), positions, is_taken, PTX)
    tl.debug_barrier()
    return scores_of(least), scores_of(least + 1)


@triton.jit
def bound_of(best, TOP_K: tl.constexpr, WARPS: tl.constexpr):
    """The least score that may be selected, where `best` are the largest of groups of scores.

    As TOP_K groups have a score each, the TOP_K-th of those is at most the TOP_K-th of all. Some
    more scores than need be may reach it: those of an eighth of TOP_K groups, which saves passes.
    """
    least, _, _, _ = threshold(ordered_keys(best), TOP_K, TOP_K // 8, WARPS)
    # -inf is never selected.
    return scores_of(tl.maximum(least, 1))


@triton.jit
def load_chunk(scores_ptr, start, last, CHUNK: tl.constexpr):
    """Scores start..start+CHUNK-1 of a row, up to `last` in whole pages, then -inf.

    start is a multiple of 64.
    """
    t = tl.arange(0, CHUNK)
    # Whole pages, which the compiler sees to be aligned: it reads 16 bytes at a time.
    is_read = t < (last - start + 63) // 64 * 64
    return tl.load(scores_ptr + start + t, mask=is_read, other=float("-inf"))


@triton.jit
def keep_part(
    scores,
    scores_ptr,
    list_ptr,
    first,
    last,
    begin,
    least,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    WARPS: tl.constexpr,
    PTX: tl.constexpr,
):
    """How many of a row's scores first..last-1 reach `least`, which -inf does not.

    The list has them, with positions from `begin` on, chunk by chunk as long as it holds them.
    first is a multiple of 64; what shares a page with the row's keys and is none has -inf. `scores`
    are the first chunk; each further one is read while the one before is looked at.
    """
    t = tl.arange(0, CHUNK)
    count = tl.full((), 0, tl.int32)
    for start in range(first, last, CHUNK):
        is_kept = scores >= least
        place, more = ranks(is_kept.to(tl.int32), WARPS)
        if count + more <= SIZE:
            store_candidates(list_ptr, count + place, scores, start - begin + t, is_kept, PTX)
        scores = load_chunk(scores_ptr, start + CHUNK, last, CHUNK)
        count += more
    return count


@triton.jit
def keep_best(
    scores_ptr,
    list_ptr,
    begin,
    end,
    TOP_K: tl.constexpr,
    SIZE: tl.constexpr,
    WARPS: tl.constexpr,
    PTX: tl.constexpr,
):
    """(count, floor): how many of a row's scores begin..end-1 the list has, and their floor.

    They are the best of them: as many as half of SIZE, however many are equal.
    """
    CHUNK: tl.constexpr = SIZE // 2
    count = tl.full((), 0, tl.int32)
    # None is below the floor; later ones must reach `least`.
    floor = scores_of(tl.full((), 1, tl.uint32))
    least = floor
    for start in range(begin // 64 * 64, end, CHUNK):
        scores = load_chunk(scores_ptr, start, end, CHUNK)
        last = tl.minimum(start + CHUNK, end)
        own_ptr = list_ptr + count
        count += keep_part(
            *(scores, scores_ptr, own_ptr, start, last, begin, least, SIZE, CHUNK, WARPS, PTX)
        )
        tl.debug_barrier()
        if count > SIZE // 2:
            floor, least = compact(list_ptr, count, floor, SIZE, TOP_K, WARPS, PTX)
            count = tl.full((), TOP_K, tl.int32)
    return count, floor
