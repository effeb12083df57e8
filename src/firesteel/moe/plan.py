"""`select`: the only chooser of a MoE layer's launches; the plan enumerates it.

R = M * top_k routes take one of two ways:

    direct  up to E / 8 routes (at least one token's): nothing is sorted, each route is a tile
            gate_up, activate (where K is long enough to split), down, combine
    packed  routes are sorted by expert and cut into tiles of 8 to 128 rows
            place (past 4096 routes count and scatter), gate_up, down, combine

On Hopper the products of tiles with many rows are those of `gate_up_wgmma` and `down_wgmma`.

How large tiles are, and how FC1 and FC2 cut them, the spec's table says (`firesteel.moe.tuning`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from firesteel.errors import InvalidArgumentError
from firesteel.launch.binary import has_gluon
from firesteel.launch.kernel import Argument, Kernel, Launch, Stride
from firesteel.launch.key import Constexpr
from firesteel.launch.spec import Flags, Region
from firesteel.moe.activate import activate_kernel
from firesteel.moe.combine import combine_kernel
from firesteel.moe.down import down_kernel
from firesteel.moe.gate_up import gate_up_kernel
from firesteel.moe.route import count_kernel, place_kernel, scatter_kernel

if TYPE_CHECKING:
    from firesteel.moe.spec import MoeSpec, StoredWeights
    from firesteel.moe.tuning import Tile

__all__ = ["KERNELS", "num_blocks", "select", "tile_of", "workspace"]

COUNT = Kernel(count_kernel)
PLACE = Kernel(place_kernel)
SCATTER = Kernel(scatter_kernel)
GATE_UP = Kernel(gate_up_kernel)
ACTIVATE = Kernel(activate_kernel)
DOWN = Kernel(down_kernel)
COMBINE = Kernel(combine_kernel)
_PORTABLE = (COUNT, PLACE, SCATTER, GATE_UP, ACTIVATE, DOWN, COMBINE)
_HOPPER: tuple[Kernel, ...] = ()
if has_gluon():
    from firesteel.moe.down_wgmma import down_wgmma_kernel
    from firesteel.moe.gate_up_wgmma import gate_up_wgmma_kernel

    GATE_UP_WGMMA = Kernel(gate_up_wgmma_kernel)
    DOWN_WGMMA = Kernel(down_wgmma_kernel)
    _HOPPER = (GATE_UP_WGMMA, DOWN_WGMMA)
KERNELS = (*_PORTABLE, *_HOPPER)


MAX_HISTOGRAM = 4096
"""Most routes that one program counts by itself."""

BLOCK_R = 1024
"""Routes that such a program scans at a time."""

CHUNK_R = 512
"""Routes of a program where each counts and places its own."""

BLOCK_K, BLOCK_ACTIVATE = 1024, 512
"""Columns of a program of combine, and of activate."""


def tile_of(spec: MoeSpec, num_routes: int) -> Tile:
    """The tile of so many sorted routes."""
    if spec.batch_invariant:
        return spec.tiles.batch_invariant
    each = num_routes / spec.num_experts
    found = spec.tiles.of_wgmma(each) if _has_wgmma(spec) else None
    return found or spec.tiles.of_sorted(each)


def _has_wgmma(spec: MoeSpec) -> bool:
    """Whether Hopper's own kernels read such weights: int4 with scales of the layer's type."""
    stored = (spec.w13, spec.w2)
    return spec.wgmma and all(s.element == "int4" and s.scale == spec.dtype for s in stored)


def num_blocks(num_routes: int, num_experts: int, rows: int) -> int:
    """Tiles that any routing of so many routes fits in, each expert's last one padded.

    3072 tokens of top-8 of 256 experts in tiles of 64 rows need 636.
    """
    if num_routes < num_experts:
        slots = min(num_routes * rows, num_routes + num_experts * (rows - 1))
    else:
        slots = num_routes + num_experts * (rows - 1)
    return -(-slots // rows)


def is_direct(spec: MoeSpec, num_routes: int) -> bool:
    """Whether routes are so few that most experts have one at most."""
    return not spec.batch_invariant and num_routes <= max(spec.top_k, spec.num_experts // 8)


def split_k(spec: MoeSpec) -> int:
    """Spans of K that direct programs of FC1 share; 1 where K is short."""
    spans = spec.tiles.split_k
    return spans if spec.hidden_size >= 4 * spans * 128 else 1


def workspace(spec: MoeSpec, num_tokens: int) -> tuple[Region, ...]:
    """The regions of a call of so many tokens."""
    routes, e = num_tokens * spec.top_k, spec.num_experts
    tiles = spec.tiles
    # Of the smallest tiles there are most.
    smallest = min(tile.rows for _, tile in tiles.sorted)
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
            *_route(spec, ids, routes, tile.rows),
            _gate_up(spec, None, tile, routes, tiles),
            _down(spec, None, tile, routes, tiles),
            _combine(spec, ids, num_tokens),
        )
    direct = spec.tiles.direct
    gate_up = _gate_up(spec, ids, direct, routes, routes)
    return (
        gate_up,
        *((_activate(spec, ids, routes),) if gate_up.grid[2] > 1 else ()),
        _down(spec, ids, direct, routes, routes),
        _combine(spec, ids, num_tokens),
    )


def _route(spec: MoeSpec, ids: str, routes: int, rows: int) -> tuple[Launch, ...]:
    """Sort routes by expert and lay out tiles."""
    types: dict[str, str | None] = {"topk_ids_ptr": f"*{ids}", **_map_type(spec), "R": "i64"}
    arguments: dict[str, Argument] = {"topk_ids_ptr": "topk_ids", "R": routes, **_map(spec)}
    tables = {f"{name}_ptr": "*i32" for name in _TABLES}
    places: dict[str, Argument] = {f"{name}_ptr": name for name in _TABLES}
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


def _gate_up(spec: MoeSpec, ids: str | None, tile: Tile, routes: int, tiles: int) -> Launch:
    if tile.is_wgmma:
        return _gate_up_wgmma(spec, tile, tiles)
    spans = split_k(spec) if ids else 1
    is_split = spans > 1
    # What is left to `activate` is absent here.
    weighs = spec.weight_on_input and not is_split
    stored = replace(spec.w13, has_bias=spec.w13.has_bias and not is_split)
    types: dict[str, str | None] = {
        "x_ptr": f"*{spec.dtype}",
        **_weight_types(spec, stored),
        **_tile_types(spec, ids),
        "topk_weights_ptr": "*fp32" if weighs else None,
        "hidden_ptr": None if is_split else f"*{spec.dtype}",
        "partials_ptr": "*fp32" if is_split else None,
        "stride_x": "i64",
        "R": "i64",
    }
    columns, warps, stages = tile.gate_up
    constexprs = {
        **_sizes(spec, spec.w13, ids),
        "TOP_K": spec.top_k,
        **(_ungated(spec) if is_split else _activation(spec)),
        "BLOCK_M": tile.rows,
        "BLOCK_N": columns,
        "SPLIT_K": spans,
        "JOINT": tile.is_joint,
        "PAIRS": True,
    }
    key = GATE_UP.key(types, constexprs, num_warps=warps, num_stages=stages, pdl=spec.pdl)
    arguments: dict[str, Argument] = {
        "x_ptr": "x",
        **_weights(stored, "w13"),
        **_tile(spec, ids),
        **({"partials_ptr": "partials"} if is_split else {"hidden_ptr": "hidden"}),
        "stride_x": Stride("x"),
        "R": routes,
    }
    if weighs:
        arguments["topk_weights_ptr"] = "topk_weights"
    grid = (-(-spec.intermediate_size // columns), tiles, spans)
    return GATE_UP.launch(key, grid, arguments)


def _activate(spec: MoeSpec, ids: str, routes: int) -> Launch:
    types: dict[str, str | None] = {
        "partials_ptr": "*fp32",
        "bias_ptr": f"*{spec.dtype}" if spec.w13.has_bias else None,
        "topk_ids_ptr": f"*{ids}",
        **_map_type(spec),
        "topk_weights_ptr": "*fp32" if spec.weight_on_input else None,
        "hidden_ptr": f"*{spec.dtype}",
        "R": "i64",
    }
    constexprs = {
        "N": spec.intermediate_size,
        "E": spec.num_experts,
        "NUM_GLOBAL": spec.num_global_experts,
        **_activation(spec),
        "SPLIT_K": split_k(spec),
        "BLOCK_N": BLOCK_ACTIVATE,
        "PDL": spec.pdl,
    }
    key = ACTIVATE.key(types, constexprs, pdl=spec.pdl)
    arguments: dict[str, Argument] = {
        "partials_ptr": "partials",
        "topk_ids_ptr": "topk_ids",
        **_map(spec),
        "hidden_ptr": "hidden",
        "R": routes,
    }
    if spec.w13.has_bias:
        arguments["bias_ptr"] = "w13.bias"
    if spec.weight_on_input:
        arguments["topk_weights_ptr"] = "topk_weights"
    grid = (routes, -(-spec.intermediate_size // BLOCK_ACTIVATE), 1)
    return ACTIVATE.launch(key, grid, arguments)


def _down(spec: MoeSpec, ids: str | None, tile: Tile, routes: int, tiles: int) -> Launch:
    if tile.is_wgmma:
        return _down_wgmma(spec, tile, tiles)
    types: dict[str, str | None] = {
        "hidden_ptr": f"*{spec.dtype}",
        **_weight_types(spec, spec.w2),
        **_tile_types(spec, ids),
        "y_ptr": f"*{spec.dtype}",
        "R": "i64",
    }
    rows, span, warps, stages = tile.down
    constexprs = {
        **_sizes(spec, spec.w2, ids),
        "BLOCK_M": tile.rows,
        "BLOCK_N": rows,
        "SPAN": span,
        "PAIRS": True,
    }
    key = DOWN.key(types, constexprs, num_warps=warps, num_stages=stages, pdl=spec.pdl)
    arguments: dict[str, Argument] = {
        "hidden_ptr": "hidden",
        **_weights(spec.w2, "w2"),
        **_tile(spec, ids),
        "y_ptr": "y",
        "R": routes,
    }
    return DOWN.launch(key, (-(-spec.hidden_size // (rows * span)), tiles, 1), arguments)


def _gate_up_wgmma(spec: MoeSpec, tile: Tile, tiles: int) -> Launch:
    columns, warps, stages = tile.gate_up
    types: dict[str, str | None] = {
        "x_ptr": f"*{spec.dtype}",
        **_weight_types(spec, spec.w13),
        "topk_weights_ptr": "*fp32" if spec.weight_on_input else None,
        **{f"{name}_ptr": "*i32" for name in _TABLES},
        "hidden_ptr": f"*{spec.dtype}",
        "stride_x": "i64",
    }
    constexprs = {
        "K": spec.hidden_size,
        "N": spec.intermediate_size,
        "TOP_K": spec.top_k,
        "GROUP_SIZE": spec.w13.group_size,
        **_activation(spec),
        "BLOCK_M": tile.rows,
        "BLOCK_N": columns,
        "STAGES": stages,
        "WARPS": warps,
        "PDL": spec.pdl,
    }
    key = GATE_UP_WGMMA.key(types, constexprs, num_warps=warps, pdl=spec.pdl)
    arguments: dict[str, Argument] = {
        "x_ptr": "x",
        **_weights(spec.w13, "w13"),
        **_tile(spec, None),
        "hidden_ptr": "hidden",
        "stride_x": Stride("x"),
    }
    if spec.weight_on_input:
        arguments["topk_weights_ptr"] = "topk_weights"
    grid = (-(-spec.intermediate_size // columns), tiles, 1)
    return GATE_UP_WGMMA.launch(key, grid, arguments)


def _down_wgmma(spec: MoeSpec, tile: Tile, tiles: int) -> Launch:
    rows, span, warps, stages = tile.down
    types: dict[str, str | None] = {
        "hidden_ptr": f"*{spec.dtype}",
        **_weight_types(spec, spec.w2),
        **{f"{name}_ptr": "*i32" for name in _TABLES},
        "y_ptr": f"*{spec.dtype}",
    }
    constexprs = {
        "K": spec.hidden_size,
        "N": spec.intermediate_size,
        "GROUP_SIZE": spec.w2.group_size,
        "BLOCK_M": tile.rows,
        "BLOCK_N": rows,
        "SPAN": span,
        "STAGES": stages,
        "WARPS": warps,
        "PDL": spec.pdl,
    }
    key = DOWN_WGMMA.key(types, constexprs, num_warps=warps, pdl=spec.pdl)
    arguments: dict[str, Argument] = {
        "hidden_ptr": "hidden",
        **_weights(spec.w2, "w2"),
        **_tile(spec, None),
        "y_ptr": "y",
    }
    return DOWN_WGMMA.launch(key, (-(-spec.hidden_size // (rows * span)), tiles, 1), arguments)


def _combine(spec: MoeSpec, ids: str, num_tokens: int) -> Launch:
    types: dict[str, str | None] = {
        "y_ptr": f"*{spec.dtype}",
        "topk_ids_ptr": f"*{ids}",
        **_map_type(spec),
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
        **_map(spec),
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


def _sizes(spec: MoeSpec, stored: StoredWeights, ids: str | None) -> dict[str, Constexpr]:
    """Sizes that a matrix kernel reads; the number of experts only where it reads ids."""
    return {
        "K": spec.hidden_size,
        "N": spec.intermediate_size,
        "E": spec.num_experts if ids else None,
        "NUM_GLOBAL": spec.num_global_experts if ids else None,
        "ELEMENT": stored.element,
        "GROUP_SIZE": stored.group_size,
        "DIVIDES": None if stored.global_scale == "none" else stored.global_scale == "divisor",
        "PDL": spec.pdl,
    }


def _activation(spec: MoeSpec) -> dict[str, Constexpr]:
    """The activation and its constants; those that its code does not read are None."""
    activation = spec.activation
    is_swiglu = activation.name == "swigluoai"
    return {
        "ACTIVATION": activation.name,
        "LIMIT": activation.clamp_limit,
        "ALPHA": activation.alpha if is_swiglu else None,
        "BETA": activation.beta if is_swiglu else None,
    }


def _ungated(spec: MoeSpec) -> dict[str, Constexpr]:
    """What products alone depend on: whether there are up rows."""
    name = None if spec.activation.is_gated else spec.activation.name
    return {"ACTIVATION": name, "LIMIT": None, "ALPHA": None, "BETA": None}


def _map_type(spec: MoeSpec) -> dict[str, str | None]:
    return {"expert_map_ptr": None if spec.num_global_experts is None else "*i32"}


def _map(spec: MoeSpec) -> dict[str, Argument]:
    return {} if spec.num_global_experts is None else {"expert_map_ptr": "expert_map"}


_TABLES = ("route_ids", "expert_offsets", "block_expert", "block_row", "num_blocks")


def _tile_types(spec: MoeSpec, ids: str | None) -> dict[str, str | None]:
    """Where a program finds its rows: in the ids themselves, or in the tables of `place`."""
    tables = {f"{name}_ptr": None if ids else "*i32" for name in _TABLES}
    if ids is None:
        return {"topk_ids_ptr": None, "expert_map_ptr": None, **tables}
    return {"topk_ids_ptr": f"*{ids}", **_map_type(spec), **tables}


def _tile(spec: MoeSpec, ids: str | None) -> dict[str, Argument]:
    if ids is None:
        return {f"{name}_ptr": name for name in _TABLES}
    return {"topk_ids_ptr": "topk_ids", **_map(spec)}


def _weight_types(spec: MoeSpec, stored: StoredWeights) -> dict[str, str | None]:
    return {
        "codes_ptr": "*i16",
        "scales_ptr": f"*{stored.operand_scale}",
        "zero_points_ptr": "*u8" if stored.has_zero_points else None,
        "global_scale_ptr": None if stored.global_scale == "none" else "*fp32",
        "bias_ptr": f"*{spec.dtype}" if stored.has_bias else None,
    }


def _weights(stored: StoredWeights, name: str) -> dict[str, Argument]:
    found: dict[str, Argument] = {"codes_ptr": f"{name}.codes", "scales_ptr": f"{name}.scales"}
    if stored.has_zero_points:
        found["zero_points_ptr"] = f"{name}.zero_points"
    if stored.global_scale != "none":
        found["global_scale_ptr"] = f"{name}.global_scale"
    if stored.has_bias:
        found["bias_ptr"] = f"{name}.bias"
    return found
