"""`select`: the only chooser of a MoE layer's launches; the plan enumerates it.

R = M * top_k routes take one of two ways:

    direct  up to E / 8 routes (at least one token's): nothing is sorted, each route is a tile
            gate_up, down, combine
    packed  routes are sorted by expert and cut into tiles of BLOCK_M rows
            place (with count before it, past 4096 routes), gate_up, down, combine
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from firesteel.errors import InvalidArgumentError
from firesteel.launch.kernel import Argument, Kernel, Launch, Stride
from firesteel.launch.key import Constexpr
from firesteel.launch.spec import Flags, Region
from firesteel.moe.combine import combine_kernel
from firesteel.moe.down import down_kernel
from firesteel.moe.gate_up import gate_up_kernel
from firesteel.moe.route import count_kernel, place_kernel

if TYPE_CHECKING:
    from firesteel.moe.spec import Int4Weights, MoeSpec

__all__ = ["KERNELS", "block_m", "num_blocks", "select", "workspace"]

COUNT = Kernel(count_kernel)
PLACE = Kernel(place_kernel)
GATE_UP = Kernel(gate_up_kernel)
DOWN = Kernel(down_kernel)
COMBINE = Kernel(combine_kernel)
KERNELS = (COUNT, PLACE, GATE_UP, DOWN, COMBINE)

SMALL_TILE, LARGE_TILE = 16, 64
"""Rows of a tile: few tokens an expert, and many."""

DIRECT_ROWS = 16
"""Rows of a direct tile, of which one is used: the fewest that a matrix instruction takes here."""

MAX_HISTOGRAM = 4096
"""Most routes that one program counts by itself."""

MAX_HISTOGRAM_EXPERTS = 2048
"""Most experts for which it does: their counts stand in its registers."""

BLOCK_R = 1024
"""Routes that a program scans at a time."""

BLOCK_N, BLOCK_K = 64, 1024


def block_m(spec: MoeSpec, num_routes: int) -> int:
    """Rows of a tile: the small tile while experts have under 0.9 of one on average."""
    if spec.batch_invariant:
        return LARGE_TILE
    return SMALL_TILE if num_routes < _tile_switch(spec) else LARGE_TILE


def _tile_switch(spec: MoeSpec) -> int:
    """Routes from which tiles are large."""
    return max(1, spec.num_experts * SMALL_TILE * 9 // 10)


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


def workspace(spec: MoeSpec, num_tokens: int) -> tuple[Region, ...]:
    """The regions of a call of so many tokens."""
    routes, e = num_tokens * spec.top_k, spec.num_experts
    # Of small tiles there are more, and no count needs less than a smaller one.
    blocks = num_blocks(routes, e, LARGE_TILE if spec.batch_invariant else SMALL_TILE)
    return (
        Region("counts", "i32", (e,)),
        Region("route_ids", "i32", (routes,)),
        Region("expert_offsets", "i32", (e + 1,)),
        Region("block_expert", "i32", (blocks,)),
        Region("block_row", "i32", (blocks,)),
        Region("num_blocks", "i32", (1,)),
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
    if is_direct(spec, routes):
        tile, grid_rows, before = DIRECT_ROWS, routes, ()
    else:
        tile = block_m(spec, routes)
        grid_rows = num_blocks(routes, spec.num_experts, tile)
        before = _route(spec, ids, routes, tile)
    direct_ids = ids if is_direct(spec, routes) else None
    return (
        *before,
        _gate_up(spec, direct_ids, tile, routes, grid_rows),
        _down(spec, direct_ids, tile, routes, grid_rows),
        _combine(spec, ids, num_tokens),
    )


def _route(spec: MoeSpec, ids: str, routes: int, tile: int) -> tuple[Launch, ...]:
    """Sort routes by expert and lay out tiles."""
    one_launch = routes <= _histogram_limit(spec)
    types: dict[str, str | None] = {
        "topk_ids_ptr": f"*{ids}",
        **_map_type(spec),
        "counts_ptr": None if one_launch else "*i32",
        "R": "i64",
    }
    tables = ("route_ids", "expert_offsets", "block_expert", "block_row", "num_blocks")
    arguments: dict[str, Argument] = {"topk_ids_ptr": "topk_ids", "R": routes, **_map(spec)}
    if not one_launch:
        arguments["counts_ptr"] = "counts"
    common = {"E": spec.num_experts, "NUM_GLOBAL": spec.num_global_experts, "PDL": spec.pdl}
    block_r = _power_of_two(_histogram_limit(spec)) if one_launch else BLOCK_R
    place = PLACE.key(
        {**types, **{f"{name}_ptr": "*i32" for name in tables}},
        {
            **common,
            "E_BLOCK": _power_of_two(spec.num_experts),
            "BLOCK_M": tile,
            "BLOCK_R": block_r,
        },
        pdl=spec.pdl,
    )
    placed = PLACE.launch(
        place,
        (spec.num_experts, 1, 1),
        {**arguments, **{f"{name}_ptr": name for name in tables}},
    )
    if one_launch:
        return (placed,)
    count = COUNT.key(types, {**common, "BLOCK_R": BLOCK_R}, pdl=spec.pdl)
    return (COUNT.launch(count, (spec.num_experts, 1, 1), arguments), placed)


def _histogram_limit(spec: MoeSpec) -> int:
    """Most routes that are counted and placed in one launch.

    The tile grows at the same count where that is within reach, so that each way of placing is
    compiled for one tile only.
    """
    if spec.num_experts > MAX_HISTOGRAM_EXPERTS:
        return 0
    if spec.batch_invariant:
        return MAX_HISTOGRAM
    return min(MAX_HISTOGRAM, _tile_switch(spec) - 1)


def _gate_up(spec: MoeSpec, ids: str | None, tile: int, routes: int, rows: int) -> Launch:
    weights = "fp32" if spec.weight_on_input else None
    types: dict[str, str | None] = {
        "x_ptr": f"*{spec.dtype}",
        **_weight_types(spec, spec.w13),
        **_tile_types(spec, ids),
        "topk_weights_ptr": None if weights is None else f"*{weights}",
        "hidden_ptr": f"*{spec.dtype}",
        "stride_x": "i64",
        "R": "i64",
    }
    activation = spec.activation
    key = GATE_UP.key(
        types,
        {
            **_sizes(spec, spec.w13, ids),
            "TOP_K": spec.top_k,
            "ACTIVATION": activation.name,
            **_constants(spec),
            "BLOCK_M": tile,
            "BLOCK_N": BLOCK_N,
        },
        num_stages=3,
        pdl=spec.pdl,
    )
    arguments: dict[str, Argument] = {
        "x_ptr": "x",
        **_weights(spec.w13, "w13"),
        **_tile(spec, ids),
        "hidden_ptr": "hidden",
        "stride_x": Stride("x"),
        "R": routes,
    }
    if weights is not None:
        arguments["topk_weights_ptr"] = "topk_weights"
    grid = (-(-spec.intermediate_size // BLOCK_N), rows, 1)
    return GATE_UP.launch(key, grid, arguments)


def _down(spec: MoeSpec, ids: str | None, tile: int, routes: int, rows: int) -> Launch:
    types: dict[str, str | None] = {
        "hidden_ptr": f"*{spec.dtype}",
        **_weight_types(spec, spec.w2),
        **_tile_types(spec, ids),
        "y_ptr": f"*{spec.dtype}",
        "R": "i64",
    }
    key = DOWN.key(
        types,
        {**_sizes(spec, spec.w2, ids), "BLOCK_M": tile, "BLOCK_N": BLOCK_N},
        num_stages=3,
        pdl=spec.pdl,
    )
    arguments: dict[str, Argument] = {
        "hidden_ptr": "hidden",
        **_weights(spec.w2, "w2"),
        **_tile(spec, ids),
        "y_ptr": "y",
        "R": routes,
    }
    return DOWN.launch(key, (-(-spec.hidden_size // BLOCK_N), rows, 1), arguments)


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


def _sizes(spec: MoeSpec, stored: Int4Weights, ids: str | None) -> dict[str, Constexpr]:
    """Sizes that a matrix kernel reads; the number of experts only where it reads ids."""
    return {
        "K": spec.hidden_size,
        "N": spec.intermediate_size,
        "E": spec.num_experts if ids else None,
        "NUM_GLOBAL": spec.num_global_experts if ids else None,
        "GROUP_SIZE": stored.group_size,
        "PDL": spec.pdl,
    }


def _constants(spec: MoeSpec) -> dict[str, Constexpr]:
    """The activation's constants; those that its code does not read are None."""
    activation = spec.activation
    is_swiglu = activation.name == "swigluoai"
    return {
        "LIMIT": activation.clamp_limit,
        "ALPHA": activation.alpha if is_swiglu else None,
        "BETA": activation.beta if is_swiglu else None,
    }


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


def _weight_types(spec: MoeSpec, stored: Int4Weights) -> dict[str, str | None]:
    return {
        "codes_ptr": "*i16",
        "scales_ptr": f"*{stored.scale}",
        "zero_points_ptr": "*u8" if stored.has_zero_points else None,
        "bias_ptr": f"*{spec.dtype}" if stored.has_bias else None,
    }


def _weights(stored: Int4Weights, name: str) -> dict[str, Argument]:
    found: dict[str, Argument] = {"codes_ptr": f"{name}.codes", "scales_ptr": f"{name}.scales"}
    if stored.has_zero_points:
        found["zero_points_ptr"] = f"{name}.zero_points"
    if stored.has_bias:
        found["bias_ptr"] = f"{name}.bias"
    return found
