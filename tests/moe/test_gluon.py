"""Kernels in Gluon on a CPU, as the plan launches them, against the float64 oracle.

What a GPU adds to this is that the compiler keeps barriers where they belong; `test_layer_gpu.py`
sees that.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from firesteel.launch import Launch
from firesteel.launch.kernel import Stride
from firesteel.launch.key import DTYPES
from firesteel.moe.activation import Activation
from firesteel.moe.products import HOPPER, down, gate_up, split_k
from firesteel.moe.reference import place_reference
from firesteel.moe.spec import ROW_UNIT, MoeSpec, StoredWeights
from firesteel.moe.tuning import Down, GateUp, Tile
from tests.moe.gluon_emulator import run
from tests.moe.layers import Layer, random_layer

if not HOPPER:
    pytest.skip("needs Triton 3.6 or later, which has this Gluon", allow_module_level=True)

STREAM = Tile(8, GateUp(64, 4, 4), False, Down(64, 2, 4, 3), is_wgmma=True)
WIDE_STREAM = Tile(16, GateUp(64, 4, 3), False, Down(128, 1, 4, 4), is_wgmma=True)
WGMMA = Tile(64, GateUp(64, 4, 3), False, Down(128, 2, 8, 3), is_wgmma=True)
LARGE = Tile(128, GateUp(128, 8, 4), False, Down(256, 2, 8, 3), is_wgmma=True)
SMALL = MoeSpec(hidden_size=256, intermediate_size=128, num_experts=4, top_k=2)
# No whole number of blocks or tiles.
RAGGED = {"hidden_size": 352, "intermediate_size": 160}


def _stored(group_size: int, **changes: Any) -> dict[str, StoredWeights]:
    stored = StoredWeights(group_size=group_size, **changes)
    return {"w13": stored, "w2": stored}


def _fp4(element: str, **changes: Any) -> dict[str, StoredWeights]:
    stored = StoredWeights.fp4(element, **changes)
    return {"w13": stored, "w2": stored}


LONG = replace(SMALL, hidden_size=2048)
NF3 = dict.fromkeys(("w13", "w2"), StoredWeights.nf3())
NF3_BIASED = dict.fromkeys(("w13", "w2"), StoredWeights.nf3(has_bias=True))
CASES = {
    "g128": SMALL,
    "g64": replace(SMALL, **_stored(64)),
    "g32-asym": replace(SMALL, **_stored(32, has_zero_points=True)),
    "g32-asym-ragged": replace(SMALL, **RAGGED, **_stored(32, has_zero_points=True)),
    "g256": replace(SMALL, intermediate_size=256, **_stored(256)),
    "all-columns": replace(
        SMALL, **RAGGED, w13=StoredWeights(group_size=352), w2=StoredWeights(group_size=160)
    ),
    "fp16": replace(SMALL, dtype="fp16", **_stored(64, scale="fp16", has_zero_points=True)),
    "biased-swiglu": replace(
        SMALL, activation=Activation(name="swigluoai"), **_stored(64, has_bias=True)
    ),
    "relu2": replace(SMALL, activation=Activation(name="relu2")),
    "weight-on-input": replace(SMALL, weight_on_input=True, **_stored(128, has_bias=True)),
    "split": LONG,
    "split-biased": replace(LONG, weight_on_input=True, **_stored(128, has_bias=True)),
    "mxfp4": replace(SMALL, **_fp4("mxfp4")),
    "mxfp4-ragged": replace(SMALL, **RAGGED, **_fp4("mxfp4", has_bias=True)),
    "mxfp4-fp16": replace(SMALL, dtype="fp16", **_fp4("mxfp4")),
    "nvfp4": replace(SMALL, **_fp4("nvfp4")),
    "nvfp4-multiplier-split": replace(LONG, **_fp4("nvfp4", global_scale="multiplier")),
    "nvfp4-ragged": replace(SMALL, hidden_size=368, intermediate_size=144, **_fp4("nvfp4")),
    "nvfp4-fp16-relu2": replace(
        SMALL, dtype="fp16", activation=Activation(name="relu2"), **_fp4("nvfp4")
    ),
    "nf3": replace(SMALL, **NF3),
    "nf3-ragged": replace(SMALL, **RAGGED, **NF3_BIASED),
    "nf3-fp16-relu2": replace(
        SMALL, dtype="fp16", activation=Activation(name="relu2"), **NF3
    ),
    "int3-g32-asym-ragged": replace(
        SMALL, **RAGGED, **_stored(32, element="int3", has_zero_points=True)
    ),
    "int3-fp16": replace(SMALL, dtype="fp16", **_stored(64, element="int3", scale="fp16")),
    "int4-and-nvfp4": replace(SMALL, w2=StoredWeights.fp4("nvfp4")),
}  # fmt: skip


def _launch(launch: Launch, tensors: dict[str, Tensor], *, lands_early: bool) -> None:
    """Run a launch of the plan in the emulator."""
    arguments: dict[str, Any] = dict.fromkeys(p.name for p in launch.kernel.parameters)
    arguments |= dict(launch.key.constexprs)
    for (name, _), value in zip(launch.key.arguments, launch.arguments, strict=True):
        if isinstance(value, str):
            arguments[name] = tensors[value]
        elif isinstance(value, Stride):
            arguments[name] = tensors[value.tensor].stride(0) // ROW_UNIT
        else:
            arguments[name] = value
    run(launch.kernel.function, launch.grid, {**arguments, "PDL": False}, lands_early=lands_early)


def _rows(layer: Layer, x: Tensor, ids: Tensor, weights: Tensor, tile: Tile, early: bool) -> Tensor:
    """y `[R, K]` by route, by FC1 and FC2 of the plan; routes of no expert NaN."""
    spec, (num_tokens, top_k) = layer.spec, ids.shape
    is_direct = tile.rows == STREAM.rows and num_tokens == 1
    routes = num_tokens * top_k
    dtype = DTYPES[spec.dtype]
    placed = place_reference(ids, spec.num_experts, block_m=tile.rows)
    tables = {
        "route_ids": [*placed.route_ids, *[0] * (routes - len(placed.route_ids))],
        "expert_offsets": placed.expert_offsets,
        "block_expert": [*placed.block_expert, 0],
        "block_row": [*placed.block_row, 0],
        "num_blocks": [len(placed.block_expert)],
    }
    n, k = spec.intermediate_size, spec.hidden_size
    tensors: dict[str, Tensor] = {
        **layer.tensors("cpu"),
        **{name: torch.tensor(value, dtype=torch.int32) for name, value in tables.items()},
        "x": x,
        "topk_ids": ids,
        "topk_weights": weights,
        "hidden": torch.full((routes, n), torch.nan, dtype=dtype),
        "partials": torch.full((8, routes, spec.num_parts * n), torch.nan),
        "y": torch.full((routes, k), torch.nan, dtype=dtype),
    }
    kind = {torch.int32: "i32", torch.int64: "i64"}[ids.dtype] if is_direct else None
    # One tile more than there are, which must do nothing.
    tiles = routes if is_direct else len(placed.block_expert) + 1
    _launch(gate_up(spec, kind, tile, routes, tiles), tensors, lands_early=early)
    if is_direct and split_k(spec) > 1:
        tensors["hidden"] = _activated(layer, tensors, ids, split_k(spec)).to(dtype)
    _launch(down(spec, kind, tile, routes, tiles), tensors, lands_early=early)
    return tensors["y"]


def _activated(layer: Layer, tensors: dict[str, Tensor], ids: Tensor, spans: int) -> Tensor:
    """What `activate` makes of split sums."""
    spec, routes = layer.spec, ids.numel()
    sums = tensors["partials"].flatten()[: spans * routes * spec.num_parts * spec.intermediate_size]
    sums = sums.view(spans, routes, -1).sum(0)
    if spec.weight_on_input:
        sums = sums * tensors["topk_weights"].reshape(-1, 1)
    if layer.bias13 is not None:
        sums = sums + layer.bias13[ids.flatten().clamp(0, spec.num_experts - 1).long()].float()
    return spec.activation(sums)


@pytest.mark.parametrize(
    ("tile", "num_tokens"),
    [(STREAM, 1), (STREAM, 9), (WIDE_STREAM, 11), (WGMMA, 40), (LARGE, 150)],
    ids=["direct", "8", "16", "64", "128"],
)
@pytest.mark.parametrize("name", CASES)
def test_a_layer_is_the_oracle_s(name: str, tile: Tile, num_tokens: int) -> None:
    # When copies land is the same in all cases; each tile has cases of both.
    _check(name, tile, num_tokens, early=list(CASES).index(name) % 2 == 1)


@cache
def _layer(name: str) -> Layer:
    return random_layer(CASES[name])


def _check(name: str, tile: Tile, num_tokens: int, *, early: bool) -> None:
    layer = _layer(name)
    spec = layer.spec
    generator = torch.Generator().manual_seed(num_tokens)
    dtype = DTYPES[spec.dtype]
    # Rows further apart than they are long.
    x = torch.full((num_tokens, spec.hidden_size + 64), torch.nan, dtype=dtype)
    x = x[:, : spec.hidden_size]
    x.copy_(torch.randn(x.shape, generator=generator))
    # Most routes to two experts, so that their tiles are full and those of others are not.
    odds = torch.tensor([8.0, 4.0, 1.0, 1.0])
    draws = torch.rand(num_tokens, 4, generator=generator) ** (1 / odds)
    ids = draws.topk(spec.top_k).indices.int()
    if num_tokens > 1:
        ids[torch.rand(ids.shape, generator=generator) < 0.1] = -1
    weights = torch.rand(ids.shape, generator=generator)
    y = _rows(layer, x, ids, weights, tile, early).double().view(num_tokens, spec.top_k, -1)
    is_route = ids >= 0
    assert y[~is_route].isnan().all()
    if not spec.weight_on_input:
        y = y * weights.double()[..., None]
    out = torch.where(is_route[..., None], y, 0.0).sum(1)
    expected = layer.reference(x, ids, weights)
    # Roundings of weights, hidden and y, each of at most half an eps and of random sign.
    # The oracle has weights of nf3 rounded to bf16, as the format says.
    coarsest = torch.bfloat16 if spec.w13.element == "nf3" else dtype
    assert (out - expected).norm() <= 2 * torch.finfo(coarsest).eps * expected.norm()
