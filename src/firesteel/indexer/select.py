# pyright: basic
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false, reportAssignmentType=false
# ruff: noqa: ANN001, ANN201, ANN202
"""Exact selection: the top_k of scores held in registers, by counting digits of ordered keys.

A score becomes a 32-bit key that orders as scores do, 0 for what is never selected (NaN, -inf, a
hole). The key of the k-th score is found three bits at a time from the top: of the keys that
agree so far, count how many have each digit, and take the largest digit at or above which there are
enough. The first digits are counted from the largest key down, which finds many bits at once. As
soon as all keys of a digit are wanted there is nothing left to find. Keys equal to the k-th one are
taken from the lowest position up, by an index-ordered count. Nothing depends on the order in which
threads come, so the same bits come out on every run.

Candidates are what levels of selection leave to later ones: int32, a list of keys, 0 for a hole,
then one of positions, in the order of positions.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from firesteel.indexer.ptx import scatter
from firesteel.indexer.score import clamped_length

__all__ = [
    "ordered_keys",
    "ranks",
    "scores_of",
    "select_kernel",
    "taken",
    "threshold",
    "threshold_from",
    "write_selected",
]


@triton.jit
def ordered_keys(scores):
    """uint32 keys of fp32 scores that order alike; -0 is 0; only NaN and -inf have key 0."""
    # A NaN is no larger than anything; -0 + 0 is 0.
    bits = (tl.where(scores > float("-inf"), scores, float("-inf")) + 0.0).to(
        tl.int32, bitcast=True
    )
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True) - 0x007FFFFF


@triton.jit
def scores_of(keys):
    """The fp32 scores of uint32 keys; -inf of 0."""
    bits = (keys + 0x007FFFFF).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits & 0x7FFFFFFF, ~bits).to(tl.float32, bitcast=True)


@triton.jit
def count_selectable(keys):
    """How many keys are not 0."""
    return tl.sum((keys != 0).to(tl.int32), axis=0)


@triton.jit
def digit_counts(keys, prefix, shift, WARPS: tl.constexpr):
    """Keys by how many times 2^shift they lie above prefix: uint32 of digits 0|4, 1|5, 2|6, 3|7.

    The lower digit's count is in the lower 16 bits. That of digit 0 has all keys that lie elsewhere
    too. A key adds one to four bits of a word, eight keys a word; words are widened to bytes, those
    of a thread added, then to 16 bits, and added over a warp and over warps: four sums for all
    digits.
    """
    COUNT: tl.constexpr = keys.shape[0]
    KEYS: tl.constexpr = min(COUNT, 8)
    # As many as a thread has, and as bytes hold.
    WORDS: tl.constexpr = min(max(COUNT // KEYS // (32 * WARPS), 1), 16)
    SIZE: tl.constexpr = COUNT // KEYS // WORDS
    LANES: tl.constexpr = min(SIZE, 32)
    # Keys below prefix wrap around, and so lie far above. Eight digits up is digit 0 again.
    place = tl.minimum((keys - prefix) >> shift, 8) * 4
    one = tl.full((COUNT,), 1, tl.uint32)
    # A rotation, which takes an instruction less than a shift.
    one = (one << (place & 31)) | (one >> ((32 - place) & 31))
    words = tl.sum(tl.reshape(one, (COUNT // KEYS, KEYS), can_reorder=True), axis=1)
    # Reshaped and added at once, as before: so words of one thread are.
    even = tl.reshape(words & 0x0F0F0F0F, (SIZE, WORDS), can_reorder=True)
    odd = tl.reshape((words >> 4) & 0x0F0F0F0F, (SIZE, WORDS), can_reorder=True)
    even, odd = tl.sum(even, axis=1), tl.sum(odd, axis=1)
    low = tl.join(even & 0x00FF00FF, odd & 0x00FF00FF)
    high = tl.join((even >> 8) & 0x00FF00FF, (odd >> 8) & 0x00FF00FF)
    found = tl.reshape(tl.join(low, high), (SIZE // LANES, LANES, 2, 2))
    # Over a warp apart: integers of 32 bits that one instruction adds.
    found = tl.sum(tl.sum(found, axis=1), axis=0)
    low, high = tl.split(found)
    zero, one = tl.split(low)
    two, three = tl.split(high)
    return zero, one, two, three


@triton.jit
def at_least(zero, one, two, three):
    """Counts of keys whose digit is at least 0|4, 1|5, 2|6, 3|7 of its four; of digit_counts'."""
    two += three
    one += two
    return zero + one, one, two, three


@triton.jit
def narrowed(zero, one, two, three, inside, prefix, shift, ties):
    """(prefix, ties, inside) once the counts of digits at `shift` are known; ties is at least 1.

    `inside` keys had the prefix, of which `ties` are wanted. The digit is the largest at or above
    which there are as many. Scalars, not vectors of counts: each step of a sum over threads would
    cost more than all of this.
    """
    zero, one, two, three = at_least(zero, one, two, three)
    wanted = ties.to(tl.uint32)
    upper = zero >> 16
    is_upper = upper >= wanted
    half = tl.where(is_upper, 16, 0).to(tl.uint32)
    above = tl.where(is_upper, 0, upper)
    whole = tl.where(is_upper, upper, inside.to(tl.uint32))
    digit = tl.where(is_upper, 4, 0).to(tl.uint32)
    three = ((three >> half) & 0xFFFF) + above
    two = ((two >> half) & 0xFFFF) + above
    one = ((one >> half) & 0xFFFF) + above
    found = tl.where(one >= wanted, one, whole)
    found = tl.where(two >= wanted, two, found)
    found = tl.where(three >= wanted, three, found)
    more = tl.where(one >= wanted, two, one)
    more = tl.where(two >= wanted, three, more)
    above = tl.where(three >= wanted, above, more)
    digit += (one >= wanted).to(tl.uint32) + (two >= wanted).to(tl.uint32)
    digit += (three >= wanted).to(tl.uint32)
    inside = (found - above).to(tl.int32)
    return prefix + (digit << shift), ties - above.to(tl.int32), inside


@triton.jit
def search(keys, least, left, inside, ties, SLACK: tl.constexpr, WARPS: tl.constexpr):
    """(least, ties, surplus): the least key to take, of which `ties` are wanted, `surplus` not.

    `inside` keys are in the window of `least`, of 2^(3 left), and `ties` of them are wanted.
    """
    while left > 0:
        left -= 1
        shift = (left * 3).to(tl.uint32)
        zero, one, two, three = digit_counts(keys, least, shift, WARPS)
        least, ties, inside = narrowed(zero, one, two, three, inside, least, shift, ties)
        left = tl.where(inside - ties <= SLACK, 0, left)
    return least, ties, inside - ties


@triton.jit
def threshold(keys, TOP_K: tl.constexpr, SLACK: tl.constexpr, WARPS: tl.constexpr):
    """(least, ties, surplus, total): take keys from least on; of those equal, where surplus, ties.

    total is how many are taken: TOP_K, or as many as are not 0. Without a surplus all keys from
    `least` on are taken, `total` of them; with one, `ties` of those equal to it. The search ends
    once at most SLACK keys more than wanted are left: with a SLACK, `least` is a bound that TOP_K
    keys reach, and `surplus` more.
    """
    # Sign, and all of the exponent but a bit: most often the k-th key is at most six below the
    # largest there, and one pass finds the first eight bits.
    least = (tl.maximum(tl.max(keys, axis=0) >> 24, 7) - 7) << 24
    shift = tl.full((), 24, tl.uint32)
    zero, one, two, three = digit_counts(keys, least, shift, WARPS)
    total = tl.full((), TOP_K, tl.int32)
    ties, inside = total, tl.full((), keys.shape[0], tl.int32)
    upper, lower, _, _ = at_least(zero, one, two, three)
    # Of digit 1 at least.
    if (upper >> 16) + (lower & 0xFFFF) >= TOP_K:
        least, ties, inside = narrowed(zero, one, two, three, inside, least, shift, ties)
        left = tl.where(inside - ties <= SLACK, 0, 8)
    else:
        found = count_selectable(keys)
        # Where all are wanted, those are all keys from 1 on.
        left = tl.where(found > TOP_K, 11, 0)
        least = (found <= TOP_K).to(tl.uint32)
        total = tl.minimum(found, TOP_K)
        ties = total
        inside = tl.where(found > TOP_K, inside, total)
    least, ties, surplus = search(keys, least, left, inside, ties, SLACK, WARPS)
    return least, ties, surplus, total


@triton.jit
def threshold_from(keys, floor, count, TOP_K: tl.constexpr, WARPS: tl.constexpr):
    """threshold without a slack, of `count` keys from `floor` on, which is not 0; others are below.

    Keys that a bound has left are near each other: fewer digits tell them apart.
    """
    # Eight digits are at least as wide as what lies between.
    wide = (tl.max(keys, axis=0) - floor).to(tl.float32).to(tl.int32, bitcast=True) >> 23
    left = (tl.maximum(wide - 129, 0) + 2) // 3 + 1
    left = tl.where(count > TOP_K, left, 0)
    total = tl.minimum(count, TOP_K)
    # A window ends at 2^32 at most, so that what is below it does not wrap around into it. The
    # widest begins at 0, and so has what is not a key in it too.
    window = tl.full((), 1, tl.uint32) << (tl.minimum(left, 10) * 3).to(tl.uint32)
    floor = tl.minimum(floor, tl.where(left > 10, 0, 0xFFFFFFFF - (window - 1)))
    inside = tl.where(left > 10, keys.shape[0], count)
    least, ties, surplus = search(keys, floor, left, inside, total, 0, WARPS)
    surplus = tl.where(count > TOP_K, surplus, 0)
    return least, ties, surplus, total


@triton.jit
def ranks(is_one, WARPS: tl.constexpr):
    """(places, total): how many of is_one, zeros and ones by position, are before each; and in all.

    A thread has four neighbours, as every load of scores gives them to it, then as many of the next
    THREADS times four, and so on: four such turns are counted in one sum over threads, 16 bits
    each.
    """
    COUNT: tl.constexpr = is_one.shape[0]
    NEAR: tl.constexpr = min(COUNT, 4)
    THREADS: tl.constexpr = min(32 * WARPS, COUNT // NEAR)
    TURNS: tl.constexpr = COUNT // (THREADS * NEAR)
    FIELDS: tl.constexpr = min(TURNS, 4)
    cells = tl.reshape(is_one, (TURNS // FIELDS, FIELDS, THREADS, NEAR))
    shifts = (tl.arange(0, FIELDS) * 16).to(tl.uint64)[None, :, None]
    own = tl.sum(tl.sum(cells, axis=3).to(tl.uint64) << shifts, axis=1)
    # Of a turn all are before the first of the next.
    whole = tl.sum(own, axis=1)
    earlier = (whole << 16) + (whole << 32) + (whole << 48)
    before = tl.cumsum(own, axis=1) - own + earlier[:, None]
    turns = ((whole + earlier) >> (16 * (FIELDS - 1))) & 0xFFFF
    total = tl.sum(turns, axis=0).to(tl.int32)
    if TURNS > FIELDS:
        turns = tl.cumsum(turns, axis=0) - turns
        turns += (turns << 16) + (turns << 32) + (turns << 48)
        before += turns[:, None]
    first = ((before[:, None, :] >> shifts) & 0xFFFF).to(tl.int32)
    return tl.reshape(first[:, :, :, None] + tl.cumsum(cells, axis=3) - cells, (COUNT,)), total


@triton.jit
def taken(keys, least, ties, surplus, WARPS: tl.constexpr):
    """(is_taken, place): which keys threshold takes, and the place of each that is, from 0."""
    is_taken = (keys >= least).to(tl.int32)
    if surplus > 0:
        # The first so many of those equal.
        is_tie = (keys == least).to(tl.int32)
        place, _ = ranks(is_tie, WARPS)
        is_taken = tl.where((is_tie > 0) & (place >= ties), 0, is_taken)
    place, _ = ranks(is_taken, WARPS)
    return is_taken > 0, place


@triton.jit
def write_selected(
    keys,
    positions,
    is_taken,
    place,
    total,
    row,
    page_table_ptr,
    table_start,
    indices_ptr,
    slots_ptr,
    selected_scores_ptr,
    TOP_K: tl.constexpr,
    PTX: tl.constexpr,
):
    """A row's outputs: positions, and where asked for their slots and scores; -1 and -inf after."""
    at = row * TOP_K
    tail = tl.arange(0, TOP_K)
    is_tail = tail >= total
    scatter(indices_ptr + at, place, positions, is_taken, PTX)
    if slots_ptr is not None:
        pages_ptrs = page_table_ptr + table_start + positions // 64
        page = tl.load(pages_ptrs, mask=is_taken, other=0)
        scatter(slots_ptr + at, place, page * 64 + positions % 64, is_taken, PTX)
    if selected_scores_ptr is not None:
        scatter(selected_scores_ptr + at, place, scores_of(keys), is_taken, PTX)
    if total < TOP_K:
        none = tl.full((TOP_K,), -1, tl.int32)
        tl.store(indices_ptr + at + tail, none, mask=is_tail)
        if slots_ptr is not None:
            tl.store(slots_ptr + at + tail, none, mask=is_tail)
        if selected_scores_ptr is not None:
            holes = tl.full((TOP_K,), float("-inf"), tl.float32)
            tl.store(selected_scores_ptr + at + tail, holes, mask=is_tail)


@triton.jit(
    do_not_specialize=["stride", "stride_table", "width", "first_row", "R"],
    do_not_specialize_on_alignment=["page_table_ptr", "seq_lens_ptr"],
)
def select_kernel(
    scores_ptr,
    from_ptr,
    page_table_ptr,
    seq_lens_ptr,
    to_ptr,
    indices_ptr,
    slots_ptr,
    selected_scores_ptr,
    stride: tl.int64,
    stride_table: tl.int64,
    width: tl.int64,
    first_row: tl.int64,
    R: tl.int64,
    ROWS: tl.constexpr,
    TOP_K: tl.constexpr,
    SPAN: tl.constexpr,
    BEFORE: tl.constexpr,
    LEVEL: tl.constexpr,
    IS_ONE: tl.constexpr,
    WARPS: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """The TOP_K largest of each SPAN scores of a row, in the order of positions

    name             shape         dtype  layout            traffic
    scores           [R, C]        fp32   rows apart        level 0: live keys read once
    from             [R, 2, S']    int32  contiguous        later levels: live candidates read once
    page_table       [B, width]    int32  unit last stride  read for slots
    seq_lens         [B]           int32  contiguous        read once
    to               [R, 2, S]     int32  contiguous        TOP_K a live span written; or None
    indices          [R, TOP_K]    int32  contiguous        written once, no init; or None
    slots            [R, TOP_K]    int32  contiguous        as indices; or None
    selected_scores  [R, TOP_K]    fp32   contiguous        as indices; or None

    R rows are selected from: those from first_row on of the rows that lengths and outputs
    are of. Rows of scores lie stride times 64 apart, and so end in whole pages; rows of `from` have
    stride times TOP_K candidates. A level's candidates are TOP_K a span, holes (0) last, in `to`
    for each of the grid's spans. A span past a row's length is not written, and not read: the next
    level knows the length too. Spans of the levels before have BEFORE keys each. The last level, of
    one span, writes the outputs.

    With IS_ONE all scores of a row are one span, and are read whatever its length is: the read does
    not wait for the length.

    Example: TOP_K 2, SPAN 4, scores [5, 1, 7, 7 | 9, NaN] give candidates of positions
    [2, 3 | 4, hole], and those, as one span of level 1, [2, 4]: of the tied 7s the first.

    Grid      (R, spans).
    Key       which pointers are None, constexprs; WARPS is num_warps.
    Numerics  exact; the same bits every run, whatever SPAN and the levels are.
    Bytes     4 a live key or 8 a live candidate read; 8 * TOP_K a live span, at the last level
              4 * TOP_K an output of a row, written
    Range     R * C may pass 2**31, so row offsets are int64. SPAN is a power of two, at most 32768.
    Oracle    top_k_reference
    """
    if PDL:
        # The next launch may take its place now: it waits for the end of this one.
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    if row >= R:
        return
    span = tl.program_id(1)
    call_row = first_row + row
    b = call_row // ROWS
    length = clamped_length(tl.load(seq_lens_ptr + b), call_row % ROWS, ROWS, width * 64)
    # Candidates of the level before: TOP_K for each of its live spans.
    for _ in tl.static_range(LEVEL):
        length = (length + BEFORE - 1) // BEFORE * TOP_K
    begin = span.to(tl.int64) * SPAN
    # Every row has outputs; of no keys too.
    if (begin >= length) & (span > 0):
        return
    t = tl.arange(0, SPAN)
    live = tl.minimum(length - begin, SPAN).to(tl.int32)
    # Whole units, which the compiler sees to be aligned: it reads 16 bytes at a time.
    UNIT: tl.constexpr = 64 if LEVEL == 0 else min(TOP_K, 64)
    is_read = t < (live + (UNIT - 1)) // UNIT * UNIT
    if IS_ONE:
        is_read = t < width * 64
    if LEVEL == 0:
        scores = tl.load(scores_ptr + row * stride * 64 + begin + t, mask=is_read, other=0.0)
        keys = tl.where(t < live, ordered_keys(scores), 0)
        positions = begin.to(tl.int32) + t
    else:
        list_ptr = from_ptr + row * stride * (2 * TOP_K)
        keys = tl.load(list_ptr + begin + t, mask=is_read, other=0).to(tl.uint32, bitcast=True)
    least, ties, surplus, total = threshold(keys, TOP_K, 0, WARPS)
    is_taken, place = taken(keys, least, ties, surplus, WARPS)
    if LEVEL > 0:
        positions = tl.load(list_ptr + stride * TOP_K + begin + t, mask=is_taken, other=0)
    if to_ptr is not None:
        size = tl.num_programs(1) * TOP_K
        own_ptr = to_ptr + row * size * 2 + span * TOP_K
        scatter(own_ptr, place, keys.to(tl.int32, bitcast=True), is_taken, PTX)
        scatter(own_ptr + size, place, positions, is_taken, PTX)
        tail = tl.arange(0, TOP_K)
        tl.store(own_ptr + tail, tl.full((TOP_K,), 0, tl.int32), mask=tail >= total)
    else:
        write_selected(
            keys,
            positions,
            is_taken,
            place,
            total,
            call_row,
            page_table_ptr,
            b * stride_table,
            indices_ptr,
            slots_ptr,
            selected_scores_ptr,
            TOP_K,
            PTX,
        )
