# pyright: basic
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false, reportAssignmentType=false
# ruff: noqa: ANN001, ANN201, ANN202
"""Routing: routes sorted by expert, and the table of tiles that the weight kernels work through.

A route is a pair of a token and a slot; its expert is the one of `topk_ids`, or the one that
`expert_map` gives for it. A route whose expert is not in [0, E) is none, and is not placed.

Tiles lie in order of experts, but those of experts whose last tile has more routes come first: what
starts last is then short, and fewer multiprocessors wait for the end. Routes count in units of 32,
as the kernels of large tiles multiply them, so that small tiles keep the order of experts.

Example: ids [1, 0, -1, 1, 1], E 3, tile_rows 2 give counts [1, 3, 0], route_ids [1, 0, 3, 4],
expert_offsets [0, 1, 4, 4], num_blocks 3, block_expert [0, 1, 1], block_row [0, 1, 3].
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from firesteel.moe.tile import local_expert

__all__ = ["count_kernel", "place_kernel", "scatter_kernel"]


@triton.jit
def count_chunk(owners, E_BLOCK: tl.constexpr):
    """How many of `owners` each expert is, `[E_BLOCK]` int32."""
    # A histogram has no bin for none, so those are counted in bin 0 and taken out again.
    num_lost = tl.sum((owners < 0).to(tl.int32), axis=0)
    counts = tl.histogram(tl.maximum(owners, 0).to(tl.int32), E_BLOCK)
    return counts - tl.where(tl.arange(0, E_BLOCK) == 0, num_lost, 0)


@triton.jit
def last_units(counts, rows):
    """Units of 32 routes, at most 4, in the last tile of experts that have any."""
    return tl.minimum(((counts - 1) % rows + 32) // 32, 4)


@triton.jit
def first_tiles(counts, tiles, rows):
    """The first tile of each expert, and how many there are in all."""
    units = last_units(counts, rows)
    first = tl.zeros_like(tiles)
    num_tiles = 0
    for fewer in tl.static_range(4):
        is_next = units == 4 - fewer
        own = tl.where(is_next, tiles, 0)
        first = tl.where(is_next, num_tiles + tl.cumsum(own, axis=0) - own, first)
        num_tiles += tl.sum(own, axis=0)
    return first, num_tiles


@triton.jit(
    do_not_specialize=["R"], do_not_specialize_on_alignment=["topk_ids_ptr", "expert_map_ptr"]
)
def count_kernel(
    topk_ids_ptr,
    expert_map_ptr,
    counts_ptr,
    R: tl.int64,
    E: tl.constexpr,
    NUM_GLOBAL: tl.constexpr,
    E_BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """counts[c, e] = number of routes of chunk c whose expert is e

    name        shape         dtype        layout      traffic
    topk_ids    [R]           int32/int64  contiguous  read once
    expert_map  [NUM_GLOBAL]  int32        contiguous  or None; read at each route
    counts      [chunks, E]   int32        contiguous  written once; needs no init

    Grid      (chunks,) of BLOCK_R routes each.
    Key       dtypes, whether there is a map, constexprs.
    Numerics  integers; the same bits every run.
    Bytes     R * (bytes of an id) + 4 * chunks * E
    Range     R below 2**31. E_BLOCK is a power of two, at least E, at most 2048.
    Oracle    count_reference
    """
    if PDL:
        gdc_wait()
    chunk = tl.program_id(0)
    routes = chunk * BLOCK_R + tl.arange(0, BLOCK_R)
    owners = local_expert(topk_ids_ptr, expert_map_ptr, routes, routes < R, E, NUM_GLOBAL)
    bins = tl.arange(0, E_BLOCK)
    counts_ptrs = counts_ptr + chunk.to(tl.int64) * E + bins
    tl.store(counts_ptrs, count_chunk(owners, E_BLOCK), mask=(bins < E) & (R > 0))


@triton.jit(
    do_not_specialize=["R", "tile_rows"],
    do_not_specialize_on_alignment=["topk_ids_ptr", "expert_map_ptr"],
)
def scatter_kernel(
    topk_ids_ptr,
    expert_map_ptr,
    counts_ptr,
    route_ids_ptr,
    expert_offsets_ptr,
    block_expert_ptr,
    block_row_ptr,
    num_blocks_ptr,
    R: tl.int64,
    tile_rows: tl.int64,
    E: tl.constexpr,
    NUM_GLOBAL: tl.constexpr,
    E_BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """What place_kernel does, with a program a chunk of routes, from the counts of chunks

    Arguments are those of place_kernel, and counts `[chunks, E]` of count_kernel, read by each
    program.

    Grid      (chunks,) of BLOCK_R routes each; a program also writes its share of the tiles.
    Key       dtypes, whether there is a map, constexprs.
    Numerics  integers; the same bits every run.
    Bytes     4 * chunks**2 * E from L2, 2 * R * (bytes of an id), 4 * R written
    Range     R below 2**31. E_BLOCK is a power of two, at least E, at most 2048.
    Oracle    place_reference
    """
    if PDL:
        gdc_wait()
    # As many tiles at a time as a program compares with every expert in its registers.
    TILES: tl.constexpr = max(16384 // E_BLOCK, 1)
    chunk, chunks = tl.program_id(0), tl.num_programs(0)
    bins = tl.arange(0, E_BLOCK)
    # Nothing is counted where prewarm launches it with nothing.
    is_expert = (bins < E) & (R > 0)
    counts = tl.zeros((E_BLOCK,), dtype=tl.int32)
    before = tl.zeros((E_BLOCK,), dtype=tl.int32)
    own = tl.zeros((E_BLOCK,), dtype=tl.int32)
    counts_ptrs = counts_ptr + bins
    for other in range(0, chunks):
        row = tl.load(counts_ptrs, mask=is_expert, other=0)
        counts_ptrs += E
        before += tl.where(other < chunk, row, 0)
        own += tl.where(other == chunk, row, 0)
        counts += row
    # One where prewarm launches it with nothing.
    rows = tl.maximum(tile_rows, 1).to(tl.int32)
    tiles = (counts + (rows - 1)) // rows
    first_place = tl.cumsum(counts, axis=0) - counts
    first_tile, num_tiles = first_tiles(counts, tiles, rows)
    if chunk == 0:
        tl.store(expert_offsets_ptr + bins, first_place, mask=is_expert)
        tl.store(expert_offsets_ptr + E, tl.sum(counts, axis=0), mask=R > 0)
        tl.store(num_blocks_ptr, num_tiles)
    for start in range(chunk * TILES, num_tiles, chunks * TILES):
        tile = start + tl.arange(0, TILES)
        place = tile[:, None] - first_tile[None, :]
        is_own = (place >= 0) & (place < tiles[None, :])
        expert = tl.sum(tl.where(is_own, bins[None, :], 0), axis=1)
        row = tl.sum(tl.where(is_own, (first_place - first_tile * rows)[None, :], 0), axis=1)
        is_tile = tile < num_tiles
        tl.store(block_expert_ptr + tile, expert, mask=is_tile)
        tl.store(block_row_ptr + tile, row + tile * rows, mask=is_tile)
    routes = chunk * BLOCK_R + tl.arange(0, BLOCK_R)
    owners = local_expert(topk_ids_ptr, expert_map_ptr, routes, routes < R, E, NUM_GLOBAL)
    # Sorted by expert, then by place in the chunk; those of none last.
    owners = tl.where(owners < 0, E, owners).to(tl.int32)
    sorted_keys = tl.sort(owners * BLOCK_R + tl.arange(0, BLOCK_R))
    owners = sorted_keys // BLOCK_R
    # The place of an expert's first route of the chunk, less those of experts before it here.
    shift = first_place + before - (tl.cumsum(own, axis=0) - own)
    place = tl.gather(shift, tl.minimum(owners, E - 1), axis=0) + tl.arange(0, BLOCK_R)
    route = chunk * BLOCK_R + sorted_keys % BLOCK_R
    tl.store(route_ids_ptr + place, route, mask=owners < E)


@triton.jit
def count_all(
    topk_ids_ptr,
    expert_map_ptr,
    R,
    E: tl.constexpr,
    NUM_GLOBAL: tl.constexpr,
    E_BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Routes of every expert, `[E_BLOCK]` int32."""
    counts = tl.zeros((E_BLOCK,), dtype=tl.int32)
    for start in range(0, R, BLOCK_R):
        routes = start + tl.arange(0, BLOCK_R)
        owners = local_expert(topk_ids_ptr, expert_map_ptr, routes, routes < R, E, NUM_GLOBAL)
        counts += count_chunk(owners, E_BLOCK)
    return counts


@triton.jit(
    do_not_specialize=["R", "tile_rows"],
    do_not_specialize_on_alignment=["topk_ids_ptr", "expert_map_ptr"],
)
def place_kernel(
    topk_ids_ptr,
    expert_map_ptr,
    route_ids_ptr,
    expert_offsets_ptr,
    block_expert_ptr,
    block_row_ptr,
    num_blocks_ptr,
    R: tl.int64,
    tile_rows: tl.int64,
    E: tl.constexpr,
    NUM_GLOBAL: tl.constexpr,
    E_BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sort routes by expert, stable, and cut each expert's into tiles of tile_rows

    name            shape         dtype        layout      traffic
    topk_ids        [R]           int32/int64  contiguous  read 2 E times
    expert_map      [NUM_GLOBAL]  int32        contiguous  or None; read at each route
    route_ids       [R]           int32        contiguous  the routed first; the rest not written
    expert_offsets  [E + 1]       int32        contiguous  written once; needs no init
    block_expert    [tiles]       int32        contiguous  num_blocks written; the rest as it was
    block_row       [tiles]       int32        contiguous  as block_expert
    num_blocks      [1]           int32        contiguous  written once; needs no init

    Grid      (E,); one program places one expert's routes and writes its tiles.
    Key       dtypes, whether there is a map, constexprs.
    Numerics  integers; the same bits every run.
    Bytes     2 * E * R * (bytes of an id), from L2 but for the first; 4 * R written
    Range     R below 2**31. E_BLOCK is a power of two, at least E, at most 2048: a wider histogram
              does not fit the registers.
    Oracle    place_reference
    """
    if PDL:
        gdc_wait()
    expert = tl.program_id(0)
    bins = tl.arange(0, E_BLOCK)
    counts = count_all(topk_ids_ptr, expert_map_ptr, R, E, NUM_GLOBAL, E_BLOCK, BLOCK_R)
    # One where prewarm launches it with nothing.
    rows = tl.maximum(tile_rows, 1).to(tl.int32)
    tiles = (counts + (rows - 1)) // rows
    first_place = tl.sum(tl.where(bins < expert, counts, 0), axis=0)
    units = last_units(counts, rows)
    own_units = tl.sum(tl.where(bins == expert, units, 0), axis=0)
    is_before = (units > own_units) | ((units == own_units) & (bins < expert))
    first_tile = tl.sum(tl.where(is_before, tiles, 0), axis=0)
    num_tiles = tl.sum(tl.where(bins == expert, tiles, 0), axis=0)
    tl.store(expert_offsets_ptr + expert, first_place)
    if expert == E - 1:
        tl.store(expert_offsets_ptr + E, tl.sum(counts, axis=0))
        tl.store(num_blocks_ptr, tl.sum(tiles, axis=0))
    for start in range(0, num_tiles, 64):
        tile = start + tl.arange(0, 64)
        is_tile = tile < num_tiles
        tl.store(block_expert_ptr + first_tile + tile, tl.zeros_like(tile) + expert, mask=is_tile)
        tl.store(block_row_ptr + first_tile + tile, first_place + tile * rows, mask=is_tile)
    place = first_place
    for start in range(0, R, BLOCK_R):
        routes = start + tl.arange(0, BLOCK_R)
        owners = local_expert(topk_ids_ptr, expert_map_ptr, routes, routes < R, E, NUM_GLOBAL)
        is_mine = owners == expert
        rank = tl.cumsum(is_mine.to(tl.int32), axis=0)
        tl.store(route_ids_ptr + place + rank - 1, routes.to(tl.int32), mask=is_mine)
        place += tl.sum(is_mine.to(tl.int32), axis=0)
