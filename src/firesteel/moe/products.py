"""The launches of a layer's products: FC1, FC2, and `activate` where FC1 is split along K.

Which tile they have, `firesteel.moe.plan` says, from the spec's table.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from firesteel.launch.binary import has_gluon
from firesteel.launch.kernel import Argument, Kernel, Launch, Stride
from firesteel.launch.key import Constexpr
from firesteel.moe.activate import activate_kernel
from firesteel.moe.down import down_kernel
from firesteel.moe.gate_up import gate_up_kernel

if TYPE_CHECKING:
    from firesteel.moe.spec import MoeSpec, StoredWeights
    from firesteel.moe.tuning import Tile

__all__ = [
    "HOPPER",
    "PRODUCT_KERNELS",
    "STREAM_ROWS",
    "TABLES",
    "activate",
    "down",
    "gate_up",
    "map_argument",
    "map_type",
    "split_k",
]

GATE_UP = Kernel(gate_up_kernel)
ACTIVATE = Kernel(activate_kernel)
DOWN = Kernel(down_kernel)


def _hopper_kernels() -> tuple[Kernel, ...]:
    """FC1 and FC2 in Gluon; none where Triton has not that."""
    if not has_gluon():
        return ()
    from firesteel.moe.down_stream import down_stream_kernel
    from firesteel.moe.down_wgmma import down_wgmma_kernel
    from firesteel.moe.gate_up_stream import gate_up_stream_kernel
    from firesteel.moe.gate_up_wgmma import gate_up_wgmma_kernel

    return (
        Kernel(gate_up_stream_kernel),
        Kernel(down_stream_kernel),
        Kernel(gate_up_wgmma_kernel, target="sm_90"),
        Kernel(down_wgmma_kernel, target="sm_90"),
    )


HOPPER = _hopper_kernels()
"""FC1 and FC2 of tiles of few rows, then of many."""
PRODUCT_KERNELS = (GATE_UP, ACTIVATE, DOWN, *HOPPER)

STREAM_ROWS = 16
"""Most routes of a tile whose products are `mma.sync`, where the tile is one of Hopper's."""

BLOCK_ACTIVATE = 512
"""Columns of a program of activate."""

TABLES = ("route_ids", "expert_offsets", "block_expert", "block_row", "num_blocks")
"""What `place` makes for the products."""


def split_k(spec: MoeSpec) -> int:
    """Spans of K that direct programs of FC1 share; 1 where K is short."""
    spans = spec.tiles.split_k
    return spans if spec.hidden_size >= 4 * spans * 128 else 1


def gate_up(spec: MoeSpec, ids: str | None, tile: Tile, routes: int, tiles: int) -> Launch:
    """FC1 and the activation; sums alone where they are split. With ids each route is a tile."""
    if tile.is_wgmma and tile.rows > STREAM_ROWS:
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
    }
    if tile.is_wgmma:
        kernel, constexprs = HOPPER[0], {**constexprs, "STAGES": stages, "WARPS": warps}
        key = kernel.key(types, constexprs, num_warps=warps, pdl=spec.pdl)
    else:
        kernel, constexprs = GATE_UP, {**constexprs, "JOINT": tile.is_joint, "PAIRS": True}
        key = kernel.key(types, constexprs, num_warps=warps, num_stages=stages, pdl=spec.pdl)
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
    return kernel.launch(key, grid, arguments)


def activate(spec: MoeSpec, ids: str, routes: int) -> Launch:
    """What is left of FC1 where its sums are split."""
    types: dict[str, str | None] = {
        "partials_ptr": "*fp32",
        "bias_ptr": f"*{spec.dtype}" if spec.w13.has_bias else None,
        "topk_ids_ptr": f"*{ids}",
        **map_type(spec),
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
        **map_argument(spec),
        "hidden_ptr": "hidden",
        "R": routes,
    }
    if spec.w13.has_bias:
        arguments["bias_ptr"] = "w13.bias"
    if spec.weight_on_input:
        arguments["topk_weights_ptr"] = "topk_weights"
    grid = (routes, -(-spec.intermediate_size // BLOCK_ACTIVATE), 1)
    return ACTIVATE.launch(key, grid, arguments)


def down(spec: MoeSpec, ids: str | None, tile: Tile, routes: int, tiles: int) -> Launch:
    """FC2. With ids each route is a tile."""
    if tile.is_wgmma and tile.rows > STREAM_ROWS:
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
    }
    if tile.is_wgmma:
        kernel, constexprs = HOPPER[1], {**constexprs, "STAGES": stages, "WARPS": warps}
        key = kernel.key(types, constexprs, num_warps=warps, pdl=spec.pdl)
    else:
        kernel, constexprs = DOWN, {**constexprs, "PAIRS": True}
        key = kernel.key(types, constexprs, num_warps=warps, num_stages=stages, pdl=spec.pdl)
    arguments: dict[str, Argument] = {
        "hidden_ptr": "hidden",
        **_weights(spec.w2, "w2"),
        **_tile(spec, ids),
        "y_ptr": "y",
        "R": routes,
    }
    return kernel.launch(key, (-(-spec.hidden_size // (rows * span)), tiles, 1), arguments)


def _gate_up_wgmma(spec: MoeSpec, tile: Tile, tiles: int) -> Launch:
    columns, warps, stages = tile.gate_up
    types: dict[str, str | None] = {
        "x_ptr": f"*{spec.dtype}",
        **_weight_types(spec, spec.w13),
        "topk_weights_ptr": "*fp32" if spec.weight_on_input else None,
        **{f"{name}_ptr": "*i32" for name in TABLES},
        "hidden_ptr": f"*{spec.dtype}",
        "stride_x": "i64",
    }
    constexprs = {
        "K": spec.hidden_size,
        "N": spec.intermediate_size,
        "TOP_K": spec.top_k,
        "ELEMENT": spec.w13.element,
        "GROUP_SIZE": spec.w13.group_size,
        "DIVIDES": _divides(spec.w13),
        **_activation(spec),
        "BLOCK_M": tile.rows,
        "BLOCK_N": columns,
        "STAGES": stages,
        "WARPS": warps,
        "PDL": spec.pdl,
    }
    kernel = HOPPER[2]
    key = kernel.key(types, constexprs, num_warps=warps, pdl=spec.pdl)
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
    return kernel.launch(key, grid, arguments)


def _down_wgmma(spec: MoeSpec, tile: Tile, tiles: int) -> Launch:
    rows, span, warps, stages = tile.down
    types: dict[str, str | None] = {
        "hidden_ptr": f"*{spec.dtype}",
        **_weight_types(spec, spec.w2),
        **{f"{name}_ptr": "*i32" for name in TABLES},
        "y_ptr": f"*{spec.dtype}",
    }
    constexprs = {
        "K": spec.hidden_size,
        "N": spec.intermediate_size,
        "ELEMENT": spec.w2.element,
        "GROUP_SIZE": spec.w2.group_size,
        "DIVIDES": _divides(spec.w2),
        "BLOCK_M": tile.rows,
        "BLOCK_N": rows,
        "SPAN": span,
        "STAGES": stages,
        "WARPS": warps,
        "PDL": spec.pdl,
    }
    kernel = HOPPER[3]
    key = kernel.key(types, constexprs, num_warps=warps, pdl=spec.pdl)
    arguments: dict[str, Argument] = {
        "hidden_ptr": "hidden",
        **_weights(spec.w2, "w2"),
        **_tile(spec, None),
        "y_ptr": "y",
    }
    return kernel.launch(key, (-(-spec.hidden_size // (rows * span)), tiles, 1), arguments)


def _sizes(spec: MoeSpec, stored: StoredWeights, ids: str | None) -> dict[str, Constexpr]:
    """Sizes that a matrix kernel reads; the number of experts only where it reads ids."""
    return {
        "K": spec.hidden_size,
        "N": spec.intermediate_size,
        "E": spec.num_experts if ids else None,
        "NUM_GLOBAL": spec.num_global_experts if ids else None,
        "ELEMENT": stored.element,
        "GROUP_SIZE": stored.group_size,
        "DIVIDES": _divides(stored),
        "PDL": spec.pdl,
    }


def _divides(stored: StoredWeights) -> bool | None:
    return None if stored.global_scale == "none" else stored.global_scale == "divisor"


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


def map_type(spec: MoeSpec) -> dict[str, str | None]:
    """The type of the map of experts, which some layers have."""
    return {"expert_map_ptr": None if spec.num_global_experts is None else "*i32"}


def map_argument(spec: MoeSpec) -> dict[str, Argument]:
    """And its tensor."""
    return {} if spec.num_global_experts is None else {"expert_map_ptr": "expert_map"}


def _tile_types(spec: MoeSpec, ids: str | None) -> dict[str, str | None]:
    """Where a program finds its rows: in the ids themselves, or in the tables of `place`."""
    tables = {f"{name}_ptr": None if ids else "*i32" for name in TABLES}
    if ids is None:
        return {"topk_ids_ptr": None, "expert_map_ptr": None, **tables}
    return {"topk_ids_ptr": f"*{ids}", **map_type(spec), **tables}


def _tile(spec: MoeSpec, ids: str | None) -> dict[str, Argument]:
    if ids is None:
        return {f"{name}_ptr": name for name in TABLES}
    return {"topk_ids_ptr": "topk_ids", **map_argument(spec)}


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
