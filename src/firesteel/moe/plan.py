"""`select`: the only chooser of a MoE layer's launches; the plan enumerates it.

R = M * top_k routes take one of two ways:

    direct  up to E / 8 routes (at least one token's): nothing is sorted, each route is a tile
            gate_up, activate (where K is long enough to split), down, combine
    packed  routes are sorted by expert and cut into tiles of 8 to 128 rows
            place (past 4096 routes count and scatter), gate_up, down, combine

Where the table has a tile for Hopper's own kernels, the products are those of `gate_up_stream` and
`down_stream` (up to 16 rows, direct or packed), or of `gate_up_wgmma` and `down_wgmma`.

How large tiles are, and how FC1 and FC2 cut them, the spec's table says (`firesteel.moe.tuning`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from firesteel.errors import InvalidArgumentError
from firesteel.launch.kernel import Argument, Kernel, Launch, Stride
from firesteel.launch.key import Constexpr
from firesteel.launch.spec import Flags, Region
from firesteel.moe.combine import combine_kernel
from firesteel.moe.products import (
    PRODUCT_KERNELS,
    STREAM_ROWS,
    TABLES,
    Routed,
    activate,
    down,
    gate_up,
    map_argument,
    map_type,
    split_k,
)
from firesteel.moe.route import count_kernel, place_kernel, scatter_kernel

if TYPE_CHECKING:
    from firesteel.moe.spec import MoeSpec
    from firesteel.moe.tuning import Tile

__all__ = [
    "CHUNK_R",
    "KERNELS",
    "MAX_HISTOGRAM",
    "has_wgmma",
    "hopper_tile",
    "is_direct",
    "num_blocks",
    "route",
    "select",
    "tile_of",
    "workspace",
]


COUNT = Kernel(count_kernel)
PLACE = Kernel(place_kernel)
SCATTER = Kernel(scatter_kernel)
COMBINE = Kernel(combine_kernel)

KERNELS = (COUNT, PLACE, SCATTER, *PRODUCT_KERNELS, COMBINE)

MAX_HISTOGRAM = 4096
"""Most routes that one program counts by itself."""

BLOCK_R = 1024
"""Routes that such a program scans at a time."""

CHUNK_R = 512
"""Routes of a program where each counts and places its own."""

BLOCK_K = 1024
"""Columns of a program of combine."""


def tile_of(spec: MoeSpec, num_routes: int) -> Tile:
    """The tile of so many sorted routes."""
    if spec.batch_invariant:
        return spec.tiles.batch_invariant
    tile = hopper_tile(spec, num_routes)
    return tile or spec.tiles.of_sorted(num_routes / spec.num_experts)


def _direct_tile(spec: MoeSpec, num_routes: int) -> Tile:
    """The tile of so many routes that are not sorted."""
    tile = hopper_tile(spec, num_routes)
    # Of Hopper's own kernels those of larger tiles take sorted routes only.
    return tile if tile and tile.rows <= STREAM_ROWS else spec.tiles.direct


def hopper_tile(spec: MoeSpec, num_routes: int) -> Tile | None:
    """The tile of so many routes on Hopper's own kernels; None where others take them.

    A tile that was measured for a layer with gate and up rows may have more warps than FC1 of one
    without has rows for.
    """
    if not has_wgmma(spec):
        return None
    tile = spec.tiles.of_wgmma(num_routes / spec.num_experts)
    if tile and 16 * tile.gate_up.warps > spec.num_parts * tile.gate_up.columns:
        return None
    return tile


def has_wgmma(spec: MoeSpec) -> bool:
    """Whether Hopper's own kernels read a layer: of one element, integers with scales of its type.

    Rows of every matrix must start at multiples of 8 numbers, since no copy is below 4 bytes.
    """
    w13, w2 = spec.w13, spec.w2
    is_one = w13.element == w2.element and spec.intermediate_size % 8 == 0
    is_integer = w13.element in ("int3", "int4")
    return spec.wgmma and is_one and (not is_integer or w13.scale == w2.scale == spec.dtype)


def num_blocks(num_routes: int, num_experts: int, rows: int) -> int:
    """Tiles that any routing of so many routes fits in, each expert's last one padded.

    3072 tokens of top-8 of 256 experts in tiles of 64 rows need 636.
    """
    if num_routes < num_experts:
        slots = min(num_routes * rows, num_routes + num_experts * (rows - 1))
    else:
        slots = num_routes + num_experts * (rows - 1)
    return -(-slots // rows)


def is_direct(spec: Routed, num_routes: int) -> bool:
    """Whether routes are so few that most experts have one at most."""
    return not spec.batch_invariant and num_routes <= max(spec.top_k, spec.num_experts // 8)


def workspace(spec: MoeSpec, num_tokens: int) -> tuple[Region, ...]:
    """The regions of a call of so many tokens."""
    routes, e = num_tokens * spec.top_k, spec.num_experts
    tiles = spec.tiles
    # Of the smallest tiles there are most.
    smallest = min(tile.rows for *_, tile in (*tiles.sorted, *tiles.wgmma))
    blocks = num_blocks(routes, e, tiles.batch_invariant.rows if spec.batch_invariant else smallest)
    chunks = -(-routes // CHUNK_R) * (routes > MAX_HISTOGRAM)
    direct = min(routes, max(spec.top_k, e // 8)) * (split_k(spec) > 1)
    sums = (tiles.split_k, direct, spec.num_parts * spec.intermediate_size)
    return (
        Region("counts", "i32", (chunks, e)),
        Region("route_ids", "i32", (routes,)),
        Region("expert_offsets", "i32", (e + 1,)),
        Region("block_expert", "i32", (blocks,)),
        Region("block_row", "i32", (blocks,)),
        Region("num_blocks", "i32", (1,)),
        Region("partials", "fp32", (0,) if spec.batch_invariant else sums),
        Region("hidden", spec.dtype, (routes, spec.intermediate_size)),
        Region("y", spec.dtype, (routes, spec.hidden_size)),
    )


def select(spec: MoeSpec, num_tokens: int, flags: Flags) -> tuple[Launch, ...]:
    """The launches of a call of so many tokens, in order.

    Raises
        InvalidArgumentError: a negative token count.
    """
    if num_tokens < 0:
        raise InvalidArgumentError(f"num_tokens: got {num_tokens}, must not be negative")
    if num_tokens == 0:
        return ()
    ids = dict(flags)["ids"]
    routes = num_tokens * spec.top_k
    if not is_direct(spec, routes):
        tile = tile_of(spec, routes)
        tiles = num_blocks(routes, spec.num_experts, tile.rows)
        return (
            *route(spec, ids, routes, tile.rows),
            gate_up(spec, None, tile, routes, tiles),
            down(spec, None, tile, routes, tiles),
            _combine(spec, ids, num_tokens),
        )
    direct = _direct_tile(spec, routes)
    return (
        gate_up(spec, ids, direct, routes, routes),
        *((activate(spec, ids, routes),) if split_k(spec) > 1 else ()),
        down(spec, ids, direct, routes, routes),
        _combine(spec, ids, num_tokens),
    )


def route(spec: Routed, ids: str, routes: int, rows: int) -> tuple[Launch, ...]:
    """Sort routes by expert and lay out tiles."""
    types: dict[str, str | None] = {"topk_ids_ptr": f"*{ids}", **map_type(spec), "R": "i64"}
    arguments: dict[str, Argument] = {"topk_ids_ptr": "topk_ids", "R": routes, **map_argument(spec)}
    tables = {f"{name}_ptr": "*i32" for name in TABLES}
    places: dict[str, Argument] = {f"{name}_ptr": name for name in TABLES}
    constexprs: dict[str, Constexpr] = {
        "E": spec.num_experts,
        "NUM_GLOBAL": spec.num_global_experts,
        "E_BLOCK": _power_of_two(spec.num_experts),
        "BLOCK_R": BLOCK_R,
        "PDL": spec.pdl,
    }
    if routes <= MAX_HISTOGRAM:
        key = PLACE.key({**types, **tables, "tile_rows": "i64"}, constexprs, pdl=spec.pdl)
        grid = (spec.num_experts, 1, 1)
        return (PLACE.launch(key, grid, {**arguments, **places, "tile_rows": rows}),)
    types["counts_ptr"] = "*i32"
    arguments["counts_ptr"] = "counts"
    constexprs["BLOCK_R"] = CHUNK_R
    count = COUNT.key(types, constexprs, pdl=spec.pdl)
    scatter = SCATTER.key(
        {**types, **tables, "tile_rows": "i64"}, constexprs, num_warps=8, pdl=spec.pdl
    )
    grid = (-(-routes // CHUNK_R), 1, 1)
    return (
        COUNT.launch(count, grid, arguments),
        SCATTER.launch(scatter, grid, {**arguments, **places, "tile_rows": rows}),
    )


def _combine(spec: MoeSpec, ids: str, num_tokens: int) -> Launch:
    types: dict[str, str | None] = {
        "y_ptr": f"*{spec.dtype}",
        "topk_ids_ptr": f"*{ids}",
        **map_type(spec),
        "topk_weights_ptr": None if spec.weight_on_input else "*fp32",
        "out_ptr": f"*{spec.dtype}",
        "stride_out": "i64",
        "M": "i64",
    }
    key = COMBINE.key(
        types,
        {
            "K": spec.hidden_size,
            "E": spec.num_experts,
            "NUM_GLOBAL": spec.num_global_experts,
            "TOP_K": spec.top_k,
            "BLOCK_K": BLOCK_K,
            "PDL": spec.pdl,
        },
        pdl=spec.pdl,
    )
    arguments: dict[str, Argument] = {
        "y_ptr": "y",
        "topk_ids_ptr": "topk_ids",
        **map_argument(spec),
        "out_ptr": "out",
        "stride_out": Stride("out"),
        "M": num_tokens,
    }
    if not spec.weight_on_input:
        arguments["topk_weights_ptr"] = "topk_weights"
    return COMBINE.launch(key, (num_tokens, -(-spec.hidden_size // BLOCK_K), 1), arguments)


@lru_cache(maxsize=256)
def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()
