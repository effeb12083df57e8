"""The launches of a layer's products: FC1, FC2, and `activate` where FC1 is split along K.

Which tile they have, `firesteel.moe.plan` says, from the spec's table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

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
    "Routed",
    "activate",
    "down",
    "gate_up",
    "map_argument",
    "map_type",
    "split_k",
]


class Routed(Protocol):
    """What routing reads of a layer's spec."""

    @property
    def num_experts(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    @property
    def num_global_experts(self) -> int | None: ...
    @property
    def batch_invariant(self) -> bool: ...
    @property
    def pdl(self) -> bool: ...


class Product(NamedTuple):
    """The kernels of FC1 or FC2; where Triton has no Gluon there is but the first.

    Fields
        portable  of every GPU
        stream    Hopper's own of tiles of few rows
        wgmma     and of many, whose routes are sorted
    """

    portable: Kernel
    stream: Kernel | None = None
    wgmma: Kernel | None = None


def _products() -> tuple[Product, Product]:
    """FC1 and FC2."""
    gate_up, down = Product(Kernel(gate_up_kernel)), Product(Kernel(down_kernel))
    if not has_gluon():
        return gate_up, down
    from firesteel.moe.down_stream import down_stream_kernel
    from firesteel.moe.down_wgmma import down_wgmma_kernel
    from firesteel.moe.gate_up_stream import gate_up_stream_kernel
    from firesteel.moe.gate_up_wgmma import gate_up_wgmma_kernel

    return (
        gate_up._replace(
            stream=Kernel(gate_up_stream_kernel),
            wgmma=Kernel(gate_up_wgmma_kernel, target="sm_90"),
        ),
        down._replace(
            stream=Kernel(down_stream_kernel),
            wgmma=Kernel(down_wgmma_kernel, target="sm_90"),
        ),
    )


GATE_UP, DOWN = _products()
ACTIVATE = Kernel(activate_kernel)
HOPPER = tuple(each for each in (*GATE_UP[1:], *DOWN[1:]) if each is not None)
"""Hopper's own kernels; none where Triton has no Gluon."""
PRODUCT_KERNELS = (GATE_UP.portable, ACTIVATE, DOWN.portable, *HOPPER)

STREAM_ROWS = 16
"""Most routes of a tile whose products are `mma.sync`, where the tile is one of Hopper's."""

BLOCK_ACTIVATE = 512
"""Columns of a program of activate."""

TABLES = ("route_ids", "expert_offsets", "block_expert", "block_row", "num_blocks")
"""What `place` makes for the products."""

# Parameters that kernels in Gluon have not, and those of sorted routes alone have not either.
_PORTABLE = frozenset(("JOINT", "PAIRS"))
_DIRECT = frozenset(
    ("topk_ids_ptr", "expert_map_ptr", "partials_ptr", "R", "E", "NUM_GLOBAL", "SPLIT_K")
)

T = TypeVar("T")


def split_k(spec: MoeSpec) -> int:
    """Spans of K that direct programs of FC1 share; 1 where K is short."""
    spans = spec.tiles.split_k
    return spans if spec.hidden_size >= 4 * spans * 128 else 1


def gate_up(spec: MoeSpec, ids: str | None, tile: Tile, routes: int, tiles: int) -> Launch:
    """FC1 and the activation; sums alone where they are split. With ids each route is a tile."""
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
    return _launch(GATE_UP, tile, types, constexprs, arguments, grid, warps=warps, stages=stages)


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
    arguments: dict[str, Argument] = {
        "hidden_ptr": "hidden",
        **_weights(spec.w2, "w2"),
        **_tile(spec, ids),
        "y_ptr": "y",
        "R": routes,
    }
    grid = (-(-spec.hidden_size // (rows * span)), tiles, 1)
    return _launch(DOWN, tile, types, constexprs, arguments, grid, warps=warps, stages=stages)


def _launch(
    product: Product,
    tile: Tile,
    types: Mapping[str, str | None],
    constexprs: Mapping[str, Constexpr],
    arguments: Mapping[str, Argument],
    grid: tuple[int, int, int],
    *,
    warps: int,
    stages: int,
) -> Launch:
    """The launch of a tile's kernel of a product."""
    pdl = bool(constexprs["PDL"])
    if not tile.is_wgmma:
        kernel = product.portable
        key = kernel.key(types, constexprs, num_warps=warps, num_stages=stages, pdl=pdl)
        return kernel.launch(key, grid, arguments)
    kernel, absent = product.stream, _PORTABLE
    if tile.rows > STREAM_ROWS:
        kernel, absent = product.wgmma, _PORTABLE | _DIRECT
    assert kernel is not None
    constexprs = {**_without(constexprs, absent), "STAGES": stages, "WARPS": warps}
    key = kernel.key(_without(types, absent), constexprs, num_warps=warps, pdl=pdl)
    return kernel.launch(key, grid, _without(arguments, absent))


def _without(found: Mapping[str, T], names: frozenset[str]) -> dict[str, T]:
    return {name: value for name, value in found.items() if name not in names}


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


def map_type(spec: Routed) -> dict[str, str | None]:
    """The type of the map of experts, which some layers have."""
    return {"expert_map_ptr": None if spec.num_global_experts is None else "*i32"}


def map_argument(spec: Routed) -> dict[str, Argument]:
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
