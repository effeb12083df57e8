"""`select` of the indexer's operations: the only chooser of their launches; the plan enumerates it.

    write     one launch
    tiled     decode whose scores fit the workspace: decode_scores, then select of each span of
              16384 keys, then select of what those left, until one span is left
    filtered  the same of requests that may have more than 8192 keys: decode_scores, which leaves
              maxima of groups of keys too, then filter
    stream    decode of more, and all prefill: stream; then select, where the keys of a row were
              shared among programs

All ways give the same bits: scores have one order of additions, and the selection is exact.
Nothing here asks a device: how many programs keep a GPU busy is a constant.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from firesteel.errors import InvalidArgumentError
from firesteel.indexer.launches import (
    Groups,
    Keys,
    Outputs,
    Ranges,
    Tile,
    decode_scores,
    filter_scores,
    select,
    stream,
    write_pages,
)
from firesteel.launch.kernel import Launch, Stride
from firesteel.launch.spec import Flags, Region

if TYPE_CHECKING:
    from firesteel.indexer.spec import DecodeSpec, PageWriterSpec, PrefillSpec

__all__ = [
    "MAX_WORKSPACE",
    "decode_tile",
    "decode_workspace",
    "is_filtered",
    "is_tiled",
    "levels",
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
SCORE_PROGRAMS = 528
"""Of decode_scores, about: four for each of an H200's 132 multiprocessors."""
FILTERED_KEYS = 8192
"""Most keys of a request from which a select of all is no slower than a filter."""
FILTER_PROGRAMS = 132
"""Of filter, at most while rows are fewer: one for each."""
FILTER_FINAL = 4096
"""Keys that may reach a filter's bound before it goes through all of them again."""
FILTER_PARTS = 16
"""Programs of filter that share a row, at most."""
STREAM_PROGRAMS = 264
"""Of stream: two for each."""
CHUNK = 8192
"""Keys whose scores a program of stream selects from at a time."""
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
        stages=2 if is_wide else 3,
    )


def decode_tile(spec: DecodeSpec) -> Tile:
    """All rows of a request in one product, so that its keys are read once.

    Few columns are one warp group's, and no sum over heads is one over two of them.
    """
    tile = _tile(spec.num_heads, spec.rows, spec.cache_dtype)
    return replace(tile, warps=4) if tile.block * tile.head_block <= 64 else tile


def prefill_tile(spec: PrefillSpec) -> Tile:
    """As many rows as a product has columns for, at most eight."""
    rows = min(8, MAX_COLUMNS // _power(spec.num_heads))
    return _tile(spec.num_heads, rows, spec.cache_dtype)


def levels(capacity: int, top_k: int) -> list[int]:
    """Spans of each level of selection of so many keys; the last has one."""
    found = [-(-capacity // SPAN)]
    while found[-1] > 1:
        found.append(-(-found[-1] * top_k // SPAN))
    return found


def is_filtered(spec: DecodeSpec) -> bool:
    """Whether calls whose scores fit the workspace are filtered."""
    if spec.is_filtered is not None:
        return spec.is_filtered
    return spec.capacity > FILTERED_KEYS


def _groups(num_requests: int) -> Groups:
    """So many programs that a GPU is busy, and so many groups that few keys pass the bound."""
    if num_requests > 4:
        return Groups(columns=64, shares=1, max_shares=1)
    return Groups(columns=128, shares=4 // _power(num_requests), max_shares=4)


def _filter_parts(num_rows: int) -> int:
    """A power of two."""
    return min(FILTER_PARTS, max(1, _power(FILTER_PROGRAMS // num_rows + 1) // 2))


def _filter_bytes(spec: DecodeSpec, num_rows: int) -> dict[str, int]:
    """Of each region of the filtered route, for so many rows or fewer."""
    programs = max(num_rows, FILTER_PROGRAMS)
    # Requests times programs: 512 of 1, 2, 4 or 8 requests, 64 each of more.
    columns = max(512, 64 * -(-num_rows // spec.rows))
    return {
        # The last row's last chunk is read whole.
        "scores": 4 * (num_rows * spec.capacity + CHUNK),
        "candidates": 8 * programs * FILTER_FINAL,
        "maxima": 4 * 64 * columns * spec.rows,
        "counts": 4 * programs,
        "arrived": 4 * num_rows,
    }


def _row_bytes(spec: DecodeSpec) -> tuple[int, int]:
    """Of a row of the tiled route: its scores, and the first level's candidates."""
    spans = levels(spec.capacity, spec.top_k)[0]
    return 4 * spec.capacity, 8 * spec.top_k * spans * (spans > 1)


def _max_tiled(spec: DecodeSpec) -> int:
    """Most requests whose scores fit the workspace, beside the candidates of either route."""
    streamed, kept = _stream_bytes(decode_tile(spec), spec.top_k)
    scores, candidates = _row_bytes(spec)
    if is_filtered(spec):
        # What is left beside what few rows take, and what each of many adds beside its scores.
        left = max(0, MAX_WORKSPACE - kept - sum(_filter_bytes(spec, 0).values()))
        more = 8 * FILTER_FINAL + 4 * 64 * 64 + 8
        return min(left // (scores + more), max(0, left - streamed) // more) // spec.rows
    rows = min(MAX_WORKSPACE // (scores + candidates), (MAX_WORKSPACE - kept) // scores)
    return rows // spec.rows


def is_tiled(spec: DecodeSpec, num_requests: int) -> bool:
    """Whether a call's scores fit the workspace."""
    return num_requests <= _max_tiled(spec)


def _stream_sizes(tile: Tile) -> tuple[int, int]:
    """Programs of stream, and keys of a chunk: twice and half with few warps."""
    return (2 * STREAM_PROGRAMS, CHUNK // 2) if tile.warps == 4 else (STREAM_PROGRAMS, CHUNK)


def _stream_bytes(tile: Tile, top_k: int) -> tuple[int, int]:
    programs, chunk = _stream_sizes(tile)
    return 4 * chunk * programs * tile.block, 8 * top_k * programs * tile.block


def _regions(**num_bytes: int) -> tuple[Region, ...]:
    return tuple(Region(name, "u8", (each,)) for name, each in num_bytes.items())


def decode_workspace(spec: DecodeSpec, num_requests: int) -> tuple[Region, ...]:
    """`scores` and `candidates`, which change places from level to level; more for a filter."""
    rows = min(num_requests, _max_tiled(spec)) * spec.rows
    if is_filtered(spec):
        sizes = _filter_bytes(spec, rows)
        if rows == 0:
            sizes = dict.fromkeys(sizes, 0)
    else:
        scores, candidates = (rows * size for size in _row_bytes(spec))
        sizes = {"scores": scores, "candidates": candidates}
    if not is_tiled(spec, num_requests):
        scores, candidates = _stream_bytes(decode_tile(spec), spec.top_k)
        sizes["scores"] = max(sizes["scores"], scores)
        sizes["candidates"] = max(sizes["candidates"], candidates)
    return _regions(**sizes)


def prefill_workspace(spec: PrefillSpec, num_rows: int) -> tuple[Region, ...]:
    """Of every program a chunk of scores and the candidates kept."""
    scores, candidates = _stream_bytes(prefill_tile(spec), spec.top_k)
    is_some = num_rows > 0
    return _regions(scores=scores * is_some, candidates=candidates * is_some)


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
    if num_requests == 0:
        return ()
    if not is_tiled(spec, num_requests):
        return _stream_decode(spec, num_requests)
    num_rows = num_requests * spec.rows
    groups = _groups(num_requests) if is_filtered(spec) else None
    programs = min(spec.width, -(-SCORE_PROGRAMS // num_requests))
    scores = decode_scores(
        _pages(spec),
        decode_tile(spec),
        requests=num_requests,
        programs=programs if groups is None else groups.programs,
        width=spec.width,
        has_maxima=groups is not None,
        pdl=spec.pdl,
    )
    if groups is None:
        return (scores, *_select_levels(spec, num_rows))
    return (scores, _filter(spec, groups, num_rows))


def _filter(spec: DecodeSpec, groups: Groups, num_rows: int) -> Launch:
    return filter_scores(
        _outputs(spec),
        groups,
        num_rows=num_rows,
        rows=spec.rows,
        parts=_filter_parts(num_rows),
        max_parts=FILTER_PARTS,
        final=FILTER_FINAL,
        chunk=CHUNK,
        width=spec.width,
        table_stride=Stride("page_table"),
        warps=16,
        pdl=spec.pdl,
    )


def _select_levels(spec: DecodeSpec, num_rows: int) -> list[Launch]:
    """The selections of scores, level by level; regions take turns."""
    spans = levels(spec.capacity, spec.top_k)
    span = max(1024, min(SPAN, _power(spec.capacity)))
    regions = ("scores", "candidates")
    outputs = _outputs(spec)
    found: list[Launch] = []
    stride = spec.width
    for level, count in enumerate(spans):
        found.append(
            select(
                Ranges(seq_lens=True),
                outputs,
                num_rows=num_rows,
                rows=spec.rows,
                spans=count,
                span=span,
                level=level,
                source=regions[level % 2],
                stride=stride,
                to=None if count == 1 else regions[(level + 1) % 2],
                width=spec.width,
                table_stride=Stride("page_table"),
                warps=_select_warps(span),
                pdl=spec.pdl,
            )
        )
        stride = count
    return found


def _pages(spec: DecodeSpec) -> Keys:
    return Keys(dtype=spec.element, page_stride=spec.page_stride, table_stride=Stride("page_table"))


def _outputs(spec: DecodeSpec | PrefillSpec) -> Outputs:
    return Outputs(top_k=spec.top_k, slots=spec.has_slots, scores=spec.has_scores)


def _select_warps(span: int) -> int:
    return max(4, min(16, span // 512))


def _num_parts(tile: Tile, blocks: int, capacity: int, top_k: int) -> int:
    """Programs that share the keys of a block: what is left of a GPU, as one span folds them."""
    programs, chunk = _stream_sizes(tile)
    return max(1, min(programs // blocks, SPAN // top_k, -(-capacity // chunk)))


def _stream_decode(spec: DecodeSpec, num_requests: int) -> tuple[Launch, ...]:
    return _stream(
        spec,
        decode_tile(spec),
        _pages(spec),
        Ranges(seq_lens=True),
        num_rows=num_requests * spec.rows,
        blocks=num_requests,
    )


def select_prefill(spec: PrefillSpec, num_rows: int) -> tuple[Launch, ...]:
    """The launches of so many rows, in order.

    Raises
        InvalidArgumentError: a negative count.
    """
    _check_count(num_rows)
    if num_rows == 0:
        return ()
    tile = prefill_tile(spec)
    keys, ranges = Keys(dtype=spec.element), Ranges(k_start=True, k_end=True)
    if spec.width is not None:
        keys = replace(keys, page_stride=spec.page_stride, table_stride=spec.width)
        ranges = Ranges(row_request=True, k_end=True)
    blocks = -(-num_rows // tile.rows)
    return _stream(spec, tile, keys, ranges, num_rows=num_rows, blocks=blocks)


def _stream(
    spec: DecodeSpec | PrefillSpec,
    tile: Tile,
    keys: Keys,
    ranges: Ranges,
    *,
    num_rows: int,
    blocks: int,
) -> tuple[Launch, ...]:
    programs, chunk = _stream_sizes(tile)
    parts = _num_parts(tile, blocks, spec.capacity, spec.top_k)
    streamed = stream(
        keys,
        ranges,
        _outputs(spec),
        tile,
        num_rows=num_rows,
        blocks=blocks,
        parts=parts,
        programs=min(programs, blocks * parts),
        capacity=spec.capacity,
        chunk=chunk,
        pdl=spec.pdl,
    )
    if parts == 1:
        return (streamed,)
    return (streamed, _fold(spec, tile, keys, ranges, num_rows=num_rows, parts=parts))


def _fold(
    spec: DecodeSpec | PrefillSpec,
    tile: Tile,
    keys: Keys,
    ranges: Ranges,
    *,
    num_rows: int,
    parts: int,
) -> Launch:
    """The selection of what the parts of each row kept."""
    return select(
        Ranges(row_request=ranges.row_request),
        _outputs(spec),
        num_rows=num_rows,
        rows=tile.rows,
        spans=1,
        span=SPAN,
        level=1,
        source="candidates",
        stride=parts,
        to=None,
        width=spec.width or 0,
        table_stride=keys.table_stride,
        warps=_select_warps(SPAN),
        pdl=spec.pdl,
    )
