"""Choosers of the launches of the indexer's operations: the only ones; the plan enumerates them.

    write     one launch
    tiled     decode of up to 16384 keys a request: decode_scores, then select; of more, where asked
              for, select of each span of 16384 keys, then of what those left, until one is left
    filtered  decode of requests that may have more: decode_scores, which leaves maxima of groups of
              keys too, then filter
    ranged    prefill: range_scores, then range_select

A call whose scores would pass the workspace goes in slices: of requests, or of rows. All ways give
the same bits: scores have one order of additions, and the selection is exact. Nothing here asks a
device: how many programs keep a GPU busy is a constant.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from firesteel.errors import InvalidArgumentError
from firesteel.indexer.launches import (
    Groups,
    Keys,
    Outputs,
    Ranges,
    Tile,
    decode_scores,
    filter_scores,
    range_scores,
    range_select,
    select,
    write_pages,
)
from firesteel.indexer.pages import PAGE_TOKENS
from firesteel.launch.kernel import Launch, Stride
from firesteel.launch.spec import Flags, Region

if TYPE_CHECKING:
    from firesteel.indexer.spec import DecodeSpec, PageWriterSpec, PrefillSpec

__all__ = [
    "MAX_WORKSPACE",
    "decode_slice",
    "decode_tile",
    "decode_workspace",
    "is_filtered",
    "levels",
    "prefill_slice",
    "prefill_tile",
    "prefill_workspace",
    "select_decode",
    "select_prefill",
    "select_write",
]

MAX_WORKSPACE = 252_000_000
"""Most bytes that any call's launches leave to each other."""
SPAN = 16384
"""Scores that a program selects from at a time, in registers."""
MULTIPROCESSORS = 132
"""Of an H200; what is laid out for as many keeps others busy too."""
GROUP_PROGRAMS = 64
"""Programs of decode_scores of a request that leave groups of their own, 64 each."""
FILTERED_KEYS = SPAN
"""Most keys of a request from which a select of all, then of one span, is faster than a filter."""
FILTER_PROGRAMS = 264
"""Of filter, at most while rows are fewer: two for each multiprocessor."""
FILTER_FINAL = 4096
"""Scores that may reach a filter's bound before it goes through all of them again."""
FILTER_PARTS = 16
"""Programs of filter that share a row, at most: where rows are few; half as many of others."""
MAX_FILTER_CHUNK = 8192
"""Scores that a program of filter looks at a time, where rows are few; half as many of others."""
FEW_FILTERED = 8
"""Rows of which programs of filter have a multiprocessor each, and so all of its registers."""
SLICE_BYTES = 192 << 20
"""Scores and candidates of a slice of prefill, at most."""
SLICE_ROWS = 2 * MULTIPROCESSORS
"""Of a slice of prefill a multiple, where so many fit: as many programs of range_select there are
at once."""
FEW_SLICE_ROWS = 32
"""Of a smaller one: four blocks, of which 64 programs of range_scores each are a turn."""
RANGE_GROUPS = 4096
"""Groups of a row's scores, of which range_scores leaves the largest."""
RANGE_SIZE = 4096
"""As FILTER_FINAL."""
RANGE_CHUNK = 8192
"""Scores that range_select looks at a time."""
RANGE_PAGES, MIN_RANGE_PAGES = 128, 8
"""Of a program of range_scores, at most and at least, about."""
SELECT_REGISTERS = 128
"""Of a thread of filter and range_select: as many as let two programs of eight warps find room."""
WRITE_BLOCK = 4
"""Keys of a program of write_pages."""
MAX_COLUMNS = 256
"""Columns of a product of prefill: its rows times its heads."""


def _power(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _check_count(num_tokens: int) -> None:
    if num_tokens < 0:
        raise InvalidArgumentError(f"num_tokens: got {num_tokens}, must not be negative")


def _tile(heads: int, rows: int, cache_dtype: str) -> Tile:
    head_block = _power(heads)
    # A product has sixteen columns at least.
    least = 16 // head_block
    row_block, rest_block = max(_power(rows), least), 0
    if rows & (rows - 1):
        half = max(_power(rows) // 2, least)
        rest = max(_power(rows - half), least)
        if half + rest < row_block:
            row_block, rest_block = half, rest
    columns = (row_block + rest_block) * head_block
    # Twice the bytes: so that two programs, on sm_120 one, find room for their queries.
    is_wide = cache_dtype != "e4m3" and columns > MAX_COLUMNS // 2
    return Tile(
        heads=heads,
        rows=rows,
        row_block=row_block,
        rest_block=rest_block,
        head_block=head_block,
        warps=8 if columns <= MAX_COLUMNS else 16,
        stages=2 if is_wide else 4,
    )


def _wgmma_tile(spec: DecodeSpec | PrefillSpec, rows: int) -> Tile | None:
    """Of Hopper's own kernels, where so many rows make two products of at most 128 columns."""
    head_block = _power(spec.num_heads)
    block = _power(rows) // 2
    if not spec.wgmma or spec.cache_dtype != "e4m3" or not 1 <= block <= 128 // head_block:
        return None
    return Tile(
        heads=spec.num_heads,
        rows=rows,
        row_block=block,
        rest_block=_power(rows - block),
        head_block=head_block,
        warps=4,
        stages=2,
        registers=248,
        wgmma=True,
    )


def decode_tile(spec: DecodeSpec) -> Tile:
    """All rows of a request in one program, so that its keys are read once.

    Few columns are one warp group's, so that more programs find room, and no sum over heads is one
    over two of them.
    """
    tile = _wgmma_tile(spec, spec.rows)
    if tile is not None:
        return tile
    tile = _tile(spec.num_heads, spec.rows, spec.cache_dtype)
    columns = tile.block * tile.head_block
    if columns <= 64:
        return replace(tile, warps=4, stages=4)
    if tile.stages == 2:
        return tile
    if columns <= 192:
        # So that three programs find room.
        return replace(tile, warps=4, stages=3, registers=168)
    return replace(tile, stages=3)


def prefill_tile(spec: PrefillSpec) -> Tile:
    """As many rows as a product has columns for, at most eight."""
    rows = min(8, MAX_COLUMNS // _power(spec.num_heads))
    tile = _wgmma_tile(spec, rows)
    if tile is not None:
        return tile
    tile = _tile(spec.num_heads, rows, spec.cache_dtype)
    tile = replace(tile, stages=min(tile.stages, 3))
    # So that two programs find room.
    return replace(tile, registers=128) if tile.warps == 8 else tile


def levels(capacity: int, top_k: int) -> list[int]:
    """Spans of each level of selection of so many keys; the last has one."""
    found = [-(-capacity // SPAN)]
    while found[-1] > 1:
        found.append(-(-found[-1] * top_k // SPAN))
    return found


def is_filtered(spec: DecodeSpec) -> bool:
    """Whether a bound drops most scores before the selection."""
    if spec.is_filtered is not None:
        return spec.is_filtered
    return spec.capacity > FILTERED_KEYS


def _score_programs(tile: Tile, num_requests: int, least: int) -> int:
    """Of decode_scores, of a request: so many that all at once, or in turns, fill a GPU."""
    few = tile.block * tile.head_block <= 64
    resident = MULTIPROCESSORS * (2 if tile.wgmma or tile.warps > 4 else 4 if few else 3)
    turns = max(1, -(-least * num_requests // resident))
    return max(1, resident * turns // num_requests)


def _groups(tile: Tile, num_requests: int) -> Groups:
    """Programs share groups where they are more than have some of their own."""
    programs = _score_programs(tile, num_requests, GROUP_PROGRAMS)
    shares = 8 if num_requests <= 4 else 2
    return Groups(
        programs=min(programs, GROUP_PROGRAMS * shares), columns=GROUP_PROGRAMS, shares=shares
    )


def _filter_parts(num_rows: int) -> tuple[int, int]:
    """Programs that share a row, and the most that a filter is compiled for."""
    most = FILTER_PARTS if num_rows <= FEW_FILTERED else FILTER_PARTS // 2
    return min(most, max(1, FILTER_PROGRAMS // num_rows)), most


def _decode_bytes(spec: DecodeSpec, num_requests: int) -> dict[str, int]:
    """Of each region of a slice of so many requests, or fewer."""
    num_rows = num_requests * spec.rows
    if not is_filtered(spec):
        spans = levels(spec.capacity, spec.top_k)[0]
        return {
            "scores": 4 * spec.capacity * num_rows,
            "candidates": 8 * spec.top_k * spans * (spans > 1) * num_rows,
        }
    programs = max(num_rows, FILTER_PROGRAMS * (num_rows > 0))
    # Of few requests eight shares, of others two at most.
    maxima = GROUP_PROGRAMS * max(min(num_requests, 4) * 8, num_requests * 2)
    return {
        "scores": 4 * num_rows * spec.capacity,
        "candidates": 8 * programs * FILTER_FINAL,
        "maxima": 4 * 64 * maxima * spec.rows,
        "counts": 4 * programs,
        "arrived": 4 * num_rows,
    }


def decode_slice(spec: DecodeSpec) -> int:
    """Most requests whose scores fit the workspace, beside what selects from them."""

    def size(num_requests: int) -> int:
        return sum(_decode_bytes(spec, num_requests).values())

    # It grows with requests, by a row's scores at least.
    most = MAX_WORKSPACE // (4 * spec.capacity * spec.rows)
    return max(1, bisect_right(range(1, most + 1), MAX_WORKSPACE, key=size))


def decode_workspace(spec: DecodeSpec, num_requests: int) -> tuple[Region, ...]:
    """`scores` and `candidates`, which change places from level to level; more for a filter."""
    return _regions(**_decode_bytes(spec, min(num_requests, decode_slice(spec))))


def prefill_slice(spec: PrefillSpec) -> int:
    """Most rows whose scores are there at once: whole blocks, and turns of range_select."""
    block = prefill_tile(spec).rows
    row_bytes = 4 * _pages_of(spec) * PAGE_TOKENS + 8 * RANGE_SIZE + 4 * RANGE_GROUPS
    rows = SLICE_BYTES // row_bytes
    step = SLICE_ROWS if rows >= SLICE_ROWS else FEW_SLICE_ROWS if rows >= FEW_SLICE_ROWS else block
    return max(block, rows // step * step)


def _pages_of(spec: PrefillSpec) -> int:
    """From row to row of scores: whole pairs of pages."""
    return -(-spec.capacity // (2 * PAGE_TOKENS)) * 2


def prefill_workspace(spec: PrefillSpec, num_rows: int) -> tuple[Region, ...]:
    """Scores of a slice, and the candidates of its rows."""
    block = prefill_tile(spec).rows
    # Of whole blocks, whose scores are written for all their rows.
    rows = min(-(-num_rows // block) * block, prefill_slice(spec))
    scores = rows * _pages_of(spec) * PAGE_TOKENS
    lists = {"candidates": 8 * RANGE_SIZE * rows, "maxima": 4 * RANGE_GROUPS * rows}
    return _regions(scores=4 * scores, **lists)


def _regions(**num_bytes: int) -> tuple[Region, ...]:
    return tuple(Region(name, "u8", (each,)) for name, each in num_bytes.items())


def select_write(spec: PageWriterSpec, num_tokens: int, flags: Flags) -> tuple[Launch, ...]:
    """The launch of so many keys.

    Raises
        InvalidArgumentError: a negative count.
    """
    _check_count(num_tokens)
    if num_tokens == 0:
        return ()
    launch = write_pages(
        dtype=spec.dtype,
        cache_dtype=spec.element,
        slots=dict(flags)["slots"],
        page_stride=spec.page_stride,
        power_of_two=spec.power_of_two,
        num_tokens=num_tokens,
        block=WRITE_BLOCK,
        pdl=spec.pdl,
    )
    return (launch,)


def select_decode(spec: DecodeSpec, num_requests: int) -> tuple[Launch, ...]:
    """The launches of so many requests, in order.

    Raises
        InvalidArgumentError: a negative count.
    """
    _check_count(num_requests)
    step = decode_slice(spec)
    found: list[Launch] = []
    for first in range(0, num_requests, step):
        found += _decode_launches(spec, first, min(step, num_requests - first))
    return tuple(found)


def _decode_launches(spec: DecodeSpec, first: int, num_requests: int) -> tuple[Launch, ...]:
    """Of so many requests from `first` on."""
    tile = decode_tile(spec)
    groups = _groups(tile, num_requests) if is_filtered(spec) else None
    programs = min(spec.width, _score_programs(tile, num_requests, 1))
    if groups is not None:
        programs = groups.programs
    if not tile.wgmma and 2 * programs >= spec.width:
        # Of two pages at most there is nothing to be read ahead.
        tile = replace(tile, stages=2)
    scores = decode_scores(
        Keys(dtype=spec.element, page_stride=spec.page_stride, table_stride=Stride("page_table")),
        tile,
        first=first,
        requests=num_requests,
        programs=programs,
        width=spec.width,
        has_maxima=groups is not None,
        pdl=spec.pdl,
    )
    first_row, num_rows = first * spec.rows, num_requests * spec.rows
    if groups is None:
        return (scores, *_select_levels(spec, first_row, num_rows))
    is_few = num_rows <= FEW_FILTERED
    parts, max_parts = _filter_parts(num_rows)
    filtered = filter_scores(
        _outputs(spec),
        groups,
        first=first_row,
        num_rows=num_rows,
        rows=spec.rows,
        parts=parts,
        max_parts=max_parts,
        final=FILTER_FINAL,
        chunk=MAX_FILTER_CHUNK if is_few else MAX_FILTER_CHUNK // 2,
        width=spec.width,
        table_stride=Stride("page_table"),
        warps=16 if is_few else 8,
        registers=SELECT_REGISTERS,
        pdl=spec.pdl,
    )
    return (scores, filtered)


def _select_levels(spec: DecodeSpec, first_row: int, num_rows: int) -> list[Launch]:
    """The selections of scores, level by level; regions take turns."""
    spans = levels(spec.capacity, spec.top_k)
    regions = ("scores", "candidates")
    outputs = _outputs(spec)
    found: list[Launch] = []
    stride, size = spec.width, spec.capacity
    for level, count in enumerate(spans):
        span = max(1024, min(SPAN, _power(size)))
        found.append(
            select(
                outputs,
                first=first_row,
                num_rows=num_rows,
                rows=spec.rows,
                spans=count,
                span=span,
                before=SPAN,
                level=level,
                source=regions[level % 2],
                stride=stride,
                to=None if count == 1 else regions[(level + 1) % 2],
                width=spec.width,
                table_stride=Stride("page_table"),
                warps=max(4, min(16, span // 1024)),
                pdl=spec.pdl,
            )
        )
        stride, size = count, count * spec.top_k
    return found


def _outputs(spec: DecodeSpec | PrefillSpec) -> Outputs:
    return Outputs(top_k=spec.top_k, slots=spec.has_slots, scores=spec.has_scores)


def select_prefill(spec: PrefillSpec, num_rows: int) -> tuple[Launch, ...]:
    """The launches of so many rows, in order.

    Raises
        InvalidArgumentError: a negative count.
    """
    _check_count(num_rows)
    step = prefill_slice(spec)
    found: list[Launch] = []
    for first in range(0, num_rows, step):
        found += _prefill_launches(spec, first, min(step, num_rows - first))
    return tuple(found)


@lru_cache(maxsize=1 << 12)
def _prefill_launches(spec: PrefillSpec, first: int, rows: int) -> tuple[Launch, ...]:
    """Of so many rows from `first` on; kept, since most counts have most of their slices alike."""
    tile = prefill_tile(spec)
    keys, ranges = Keys(dtype=spec.element), Ranges(k_start=True)
    if spec.width is not None:
        keys = replace(keys, page_stride=spec.page_stride, table_stride=spec.width)
        ranges = Ranges(row_request=True)
    # All programs at once, or in turns that are full.
    blocks, resident = -(-rows // tile.rows), 2 * MULTIPROCESSORS
    turns = -(-_pages_of(spec) * blocks // (resident * RANGE_PAGES))
    pages = -(-_pages_of(spec) // max(1, resident * turns // blocks))
    # Groups of pairs of pages, as many as leave so many maxima; a program has whole ones.
    group = -(-_pages_of(spec) * PAGE_TOKENS // (2 * RANGE_GROUPS)) * 2
    pages = -(-max(MIN_RANGE_PAGES, pages) // group) * group
    of_both: dict[str, Any] = {
        "first": first,
        "num_rows": first + rows,
        "rows": rows,
        "capacity": spec.capacity,
        "stride": _pages_of(spec),
        "group": group * PAGE_TOKENS,
        "groups": RANGE_GROUPS,
        "pdl": spec.pdl,
    }
    return (
        range_scores(
            keys,
            ranges,
            tile,
            span=pages * PAGE_TOKENS,
            **of_both,
        ),
        range_select(
            keys,
            ranges,
            _outputs(spec),
            size=RANGE_SIZE,
            chunk=RANGE_CHUNK,
            # Of few programs each has a multiprocessor.
            warps=8 if rows > MULTIPROCESSORS else 16,
            registers=SELECT_REGISTERS,
            **of_both,
        ),
    )
