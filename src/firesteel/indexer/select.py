# pyright: basic
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false, reportAssignmentType=false
# ruff: noqa: ANN001, ANN201, ANN202
"""Exact selection: the top_k of scores held in registers, by counting digits of ordered keys.

A score becomes a 32-bit key that orders as scores do, 0 for what is never selected (NaN, -inf, a
hole). The key of the k-th score is found three bits at a time from the top: of the keys that
agree so far, count how many have each digit, and take the largest digit at or above which there are
enough. The first digits are counted from the largest key down, which finds eight bits at once. As
soon as all keys of a digit are wanted there is nothing left to find. Keys equal to the k-th one are
taken from the lowest position up, by an index-ordered count. Nothing depends on the order in which
threads come, so the same bits come out on every run.

Candidates are what selections leave to later ones: int64, the key above, the position below; 0 is a
hole. They lie in the order of positions.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from firesteel.indexer.score import clamped_length

__all__ = [
    "as_candidates",
    "candidate_keys",
    "count_selectable",
    "ordered_keys",
    "ranks",
    "select_kernel",
    "threshold",
    "write_selected",
]


@triton.jit
def ordered_keys(scores):
    """uint32 keys of fp32 scores that order alike; -0 is 0; only NaN and -inf have key 0."""
    bits = scores.to(tl.int32, bitcast=True)
    bits = tl.where(bits == -2147483648, 0, bits)
    keys = tl.where(bits < 0, ~bits, bits | -2147483648)
    is_never = ((bits & 0x7FFFFFFF) > 0x7F800000) | (bits == -8388608)
    return tl.where(is_never, 0, keys).to(tl.uint32, bitcast=True)


@triton.jit
def scores_of(keys):
    """The fp32 scores of uint32 keys that are not 0."""
    bits = keys.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits & 0x7FFFFFFF, ~bits).to(tl.float32, bitcast=True)


@triton.jit
def as_candidates(keys, positions):
    """int64 of uint32 keys and int32 positions."""
    return (keys.to(tl.uint64) << 32 | positions.to(tl.uint64)).to(tl.int64, bitcast=True)


@triton.jit
def candidate_keys(candidates):
    """The uint32 keys of candidates."""
    return (candidates.to(tl.uint64, bitcast=True) >> 32).to(tl.uint32)


@triton.jit
def candidate_positions(candidates):
    """The int32 positions of candidates."""
    return (candidates & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def count_selectable(keys):
    """How many keys are not 0."""
    return tl.sum((keys != 0).to(tl.int32), axis=0)


@triton.jit
def digit_counts(keys, prefix, shift):
    """(even, odd): keys by how many times 2^shift they lie above prefix, 0 to 7 times.

    Counts are 16 bits each: those of 0, 2, 4 and 6 in the uint64 even, from its lowest bits up, the
    others in odd. A key adds one to four bits of an int32, eight keys a word; words are widened to
    bytes, those of a thread added, then to 16 bits and added over the block, all in one
    reduction. So a key costs one addition, and not one a digit.
    """
    COUNT: tl.constexpr = keys.shape[0]
    KEYS: tl.constexpr = min(COUNT, 8)
    # As many as a thread of sixteen warps has.
    WORDS: tl.constexpr = max(min(COUNT // 4096, 4), 1)
    # Keys below prefix wrap around, and so lie far above.
    left = (keys - prefix) >> shift
    one = tl.where(left < 8, tl.full((COUNT,), 1, tl.uint32) << ((left << 2) & 31), 0)
    words = tl.sum(tl.reshape(one, (COUNT // KEYS, KEYS), can_reorder=True), axis=1)
    # Reshaped and added at once, as before: so words of one thread are.
    SHAPE: tl.constexpr = (COUNT // KEYS // WORDS, WORDS)
    even = tl.sum(tl.reshape(words & 0x0F0F0F0F, SHAPE, can_reorder=True), axis=1)
    odd = tl.sum(tl.reshape((words >> 4) & 0x0F0F0F0F, SHAPE, can_reorder=True), axis=1)
    widened = tl.join(even, odd).to(tl.uint64)
    widened = (widened | (widened << 16)) & 0x0000FFFF0000FFFF
    widened = (widened | (widened << 8)) & 0x00FF00FF00FF00FF
    return tl.split(tl.sum(widened, axis=0))


@triton.jit
def at_least(even, odd):
    """Counts, 16 bits each, of keys whose digit is at least 0, 2, 4, 6; of digit_counts' counts."""
    sums = even + odd
    sums += sums >> 16
    return sums + (sums >> 32)


@triton.jit
def narrowed(even, odd, prefix, shift, ties):
    """(prefix, ties, inside) once the counts of digits at `shift` are known; ties is at least 1.

    The digit is the largest at or above which there are `ties` keys; `inside` keys have it, and
    the new ties are how many of those are wanted. Scalars, not vectors of counts: each step of a
    sum over threads would cost more than all of this.
    """
    sums = at_least(even, odd)
    wanted = ties.to(tl.uint64)
    pair = ((sums >> 16) & 0xFFFF >= wanted).to(tl.uint64)
    pair += ((sums >> 32) & 0xFFFF >= wanted).to(tl.uint64)
    pair += (sums >> 48 >= wanted).to(tl.uint64)
    place = pair * 16
    above = ((sums >> 16) >> place) & 0xFFFF
    upper = (odd >> place) & 0xFFFF
    lower = (even >> place) & 0xFFFF
    is_upper = above + upper >= wanted
    above = tl.where(is_upper, above, above + upper)
    inside = tl.where(is_upper, upper, lower).to(tl.int32)
    digit = (pair * 2 + is_upper.to(tl.uint64)).to(tl.uint32)
    return prefix + (digit << shift), ties - above.to(tl.int32), inside


@triton.jit
def threshold(keys, earlier, TOP_K: tl.constexpr, SLACK: tl.constexpr, HAS_EARLIER: tl.constexpr):
    """(prefix, shift, ties, total): take keys whose top bits pass prefix's, and ties that equal.

    total is how many are taken: TOP_K, or as many as there are. `earlier` are more keys, whose
    positions are all lower. The search ends once at most SLACK keys more than wanted have the
    prefix; with a SLACK, prefix is a bound that TOP_K keys reach, and few more.
    """
    # Sign, and all of the exponent but a bit: most often the k-th key is at most seven below the
    # largest there, and one pass finds the first eight bits.
    top = tl.max(keys, axis=0)
    if HAS_EARLIER:
        top = tl.maximum(top, tl.max(earlier, axis=0))
    prefix = (tl.maximum(top >> 24, 7) - 7) << 24
    shift = tl.full((), 24, tl.uint32)
    even, odd = digit_counts(keys, prefix, shift)
    if HAS_EARLIER:
        more_even, more_odd = digit_counts(earlier, prefix, shift)
        even, odd = even + more_even, odd + more_odd
    total = tl.full((), TOP_K, tl.int32)
    ties = total
    # Holes are 0, and so in no window but the lowest.
    if (prefix > 0) & (at_least(even, odd) & 0xFFFF >= TOP_K):
        prefix, ties, inside = narrowed(even, odd, prefix, shift, ties)
        left = tl.where(inside - ties <= SLACK, 0, 8)
    else:
        found = count_selectable(keys)
        if HAS_EARLIER:
            found += count_selectable(earlier)
        total = tl.minimum(found, TOP_K)
        ties = total
        # Where all are wanted, every key that is not 0 passes the prefix 0.
        prefix, shift = prefix * 0, shift * 0
        left = tl.where(total < found, 11, 0)
    while left > 0:
        left -= 1
        shift = (left * 3).to(tl.uint32)
        even, odd = digit_counts(keys, prefix, shift)
        if HAS_EARLIER:
            more_even, more_odd = digit_counts(earlier, prefix, shift)
            even, odd = even + more_even, odd + more_odd
        prefix, ties, inside = narrowed(even, odd, prefix, shift, ties)
        left = tl.where(inside - ties <= SLACK, 0, left)
    return prefix, shift, ties, total


@triton.jit
def ranks(keys, prefix, shift, ties):
    """(is_taken, place): which keys are taken, and the place of each that is, from 0.

    Both counts, of keys above the threshold and of its ties, are one sum: 16 bits each.
    """
    left, wanted = keys >> shift, prefix >> shift
    is_above = (left > wanted) & (keys != 0)
    is_tie = (left == wanted) & (keys != 0)
    packed = (is_above.to(tl.int32) << 16) | is_tie.to(tl.int32)
    counted = tl.cumsum(packed, axis=0)
    num_above, num_ties = counted >> 16, counted & 0xFFFF
    is_taken = is_above | (is_tie & (num_ties <= ties))
    return is_taken, num_above + tl.minimum(num_ties, ties) - 1


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
):
    """A row's outputs: positions, and where asked for their slots and scores; -1 and -inf after."""
    at = row * TOP_K
    tl.store(indices_ptr + at + place, positions, mask=is_taken)
    tail = tl.arange(0, TOP_K)
    is_tail = tail >= total
    tl.store(indices_ptr + at + tail, tl.full((TOP_K,), -1, tl.int32), mask=is_tail)
    if slots_ptr is not None:
        pages_ptrs = page_table_ptr + table_start + positions // 64
        page = tl.load(pages_ptrs, mask=is_taken, other=0)
        tl.store(slots_ptr + at + place, page * 64 + positions % 64, mask=is_taken)
        tl.store(slots_ptr + at + tail, tl.full((TOP_K,), -1, tl.int32), mask=is_tail)
    if selected_scores_ptr is not None:
        tl.store(selected_scores_ptr + at + place, scores_of(keys), mask=is_taken)
        holes = tl.full((TOP_K,), float("-inf"), tl.float32)
        tl.store(selected_scores_ptr + at + tail, holes, mask=is_tail)


@triton.jit(
    do_not_specialize=["stride", "stride_table", "width", "R"],
    do_not_specialize_on_alignment=["page_table_ptr", "seq_lens_ptr", "row_request_ptr"],
)
def select_kernel(
    scores_ptr,
    from_ptr,
    page_table_ptr,
    seq_lens_ptr,
    row_request_ptr,
    to_ptr,
    indices_ptr,
    slots_ptr,
    selected_scores_ptr,
    stride: tl.int64,
    stride_table: tl.int64,
    width: tl.int64,
    R: tl.int64,
    ROWS: tl.constexpr,
    TOP_K: tl.constexpr,
    SPAN: tl.constexpr,
    LEVEL: tl.constexpr,
    IS_ONE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The TOP_K largest of each SPAN scores of a row, in the order of positions

    name             shape         dtype  layout            traffic
    scores           [R, C]        fp32   rows apart        level 0: live keys read once
    from             [R, S']       int64  contiguous        later levels: live candidates read once
    page_table       [B, width]    int32  unit last stride  read for slots
    seq_lens         [B]           int32  contiguous        read once; None: all of S' is live
    row_request      [R]           int32  contiguous        read for slots; None: r / ROWS
    to               [R, S]        int64  contiguous        TOP_K a live span written; or None
    indices          [R, TOP_K]    int32  contiguous        written once, no init; or None
    slots            [R, TOP_K]    int32  contiguous        as indices; or None
    selected_scores  [R, TOP_K]    fp32   contiguous        as indices; or None

    Rows of scores lie stride times 64 apart, and so end in whole pages; rows of `from` have stride
    times TOP_K candidates. A level's candidates are TOP_K a span, holes (0) last, in `to` for each
    of the grid's spans. A span past a row's length is not written, and not
    read: the next level knows the length too. The last level, of one span, writes the outputs.

    With IS_ONE all scores of a row are one span, and are read whatever its length is: the read does
    not wait for the length.

    Example: TOP_K 2, SPAN 4, scores [5, 1, 7, 7 | 9, NaN] give candidates of positions
    [2, 3 | 4, hole], and those, as one span of level 1, [2, 4]: of the tied 7s the first.

    Grid      (R, spans).
    Key       which pointers are None, constexprs.
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
    b = row // ROWS
    if row_request_ptr is not None:
        b = tl.maximum(tl.load(row_request_ptr + row), 0).to(tl.int64)
    if seq_lens_ptr is not None:
        length = clamped_length(tl.load(seq_lens_ptr + b), row % ROWS, ROWS, width * 64)
        # Candidates of the level before: TOP_K for each of its live spans.
        for _ in tl.static_range(LEVEL):
            length = (length + SPAN - 1) // SPAN * TOP_K
    else:
        length = stride * TOP_K
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
        from_ptrs = from_ptr + row * stride * TOP_K + begin + t
        keys = candidate_keys(tl.load(from_ptrs, mask=is_read, other=0))
    prefix, shift, ties, total = threshold(keys, keys, TOP_K, 0, False)
    is_taken, place = ranks(keys, prefix, shift, ties)
    if LEVEL > 0:
        # Read again: held from the start, positions would take as many registers as keys. Another
        # policy keeps the compiler from seeing that the reads are the same.
        again = tl.load(from_ptrs, mask=is_taken, other=0, eviction_policy="evict_first")
        positions = candidate_positions(again)
    if to_ptr is not None:
        start = (row * tl.num_programs(1) + span) * TOP_K
        tl.store(to_ptr + start + place, as_candidates(keys, positions), mask=is_taken)
        tail = tl.arange(0, TOP_K)
        tl.store(to_ptr + start + tail, tl.full((TOP_K,), 0, tl.int64), mask=tail >= total)
    else:
        write_selected(
            keys,
            positions,
            is_taken,
            place,
            total,
            row,
            page_table_ptr,
            b * stride_table,
            indices_ptr,
            slots_ptr,
            selected_scores_ptr,
            TOP_K,
        )
