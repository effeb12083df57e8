"""`select` of an EXL3 MoE layer: the only chooser of its launches; the plan enumerates it.

    direct  up to E / 8 routes (at least one token's): nothing is sorted, each route is a tile
    packed  routes are sorted by expert and cut into tiles
            place (past 4096 routes count and scatter)
    both    rotate, FC1, act, FC2, finish; of few routes FC1 is split along K

Rows are those of routes in every region: r = token * top_k + slot.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from firesteel.errors import InvalidArgumentError
from firesteel.launch import Flags, Launch, Region
from firesteel.moe.plan import CHUNK_R, MAX_HISTOGRAM, is_direct, num_blocks, route
from firesteel.moe.trellis.launches import Experts, Matrices, act, finish, product, rotate
from firesteel.moe.trellis.tiles import (
    FEW_ROWS,
    Cut,
    cut_of,
    few_spans,
    hit_experts,
    rows_of_sums,
    tile_rows,
)

if TYPE_CHECKING:
    from firesteel.moe.trellis.spec import TrellisMoeSpec

__all__ = ["select", "workspace"]


def _w13(spec: TrellisMoeSpec) -> Matrices:
    k, n = spec.padded_hidden, spec.padded_intermediate
    return Matrices("w13", spec.w13, spec.num_parts, n, k)


def _w2(spec: TrellisMoeSpec) -> Matrices:
    k, n = spec.padded_hidden, spec.padded_intermediate
    return Matrices("w2", spec.w2, 1, k, n)


def _rows(spec: TrellisMoeSpec, routes: int) -> int:
    """Rows of a tile of sorted routes."""
    if spec.batch_invariant:
        return 8
    return tile_rows(routes / spec.num_experts, wgmma=spec.wgmma)


def _first_cut(spec: TrellisMoeSpec, routes: int) -> Cut:
    """FC1's, whose sums `act` adds up where K is split."""
    w13 = _w13(spec)
    height, width = w13.n // 128, w13.k // 128
    if is_direct(spec, routes):
        spans = few_spans(w13.parts * height * routes, width)
        return Cut(8, split_k=spans, warps=4, stages=3)
    rows = _rows(spec, routes)
    if spec.batch_invariant or rows > 8:
        return cut_of(rows, height, width)
    programs = w13.parts * height * hit_experts(spec.num_experts, routes)
    return cut_of(rows, height, width, programs=programs)


def _second_cut(spec: TrellisMoeSpec, routes: int) -> Cut:
    """FC2's."""
    w2 = _w2(spec)
    if is_direct(spec, routes):
        return Cut(8, warps=4, stages=4)
    return cut_of(_rows(spec, routes), w2.n // 128, w2.k // 128)


@lru_cache(maxsize=64)
def _partials(spec: TrellisMoeSpec) -> tuple[int, ...]:
    """Rows of the sums that calls of up to 0, 1, 2, ... tokens leave to `act`; last: of more."""
    # Of more rows an expert tiles are larger, and never split.
    counts = range(1, FEW_ROWS * spec.num_experts // spec.top_k + 2)
    routes = (count * spec.top_k for count in counts)
    return rows_of_sums((each, _first_cut(spec, each)) for each in routes)


def workspace(spec: TrellisMoeSpec, num_tokens: int) -> tuple[Region, ...]:
    """The regions of a call of so many tokens.

    `rows` holds the rotated rows of x, and after FC1 FC2's products.
    """
    routes, e = num_tokens * spec.top_k, spec.num_experts
    blocks = num_blocks(routes, e, 8)
    chunks = -(-routes // CHUNK_R) * (routes > MAX_HISTOGRAM)
    n, k, parts = spec.padded_intermediate, spec.padded_hidden, spec.num_parts
    partials = _partials(spec)
    return (
        Region("counts", "i32", (chunks, e)),
        Region("route_ids", "i32", (routes,)),
        Region("expert_offsets", "i32", (e + 1,)),
        Region("block_expert", "i32", (blocks,)),
        Region("block_row", "i32", (blocks,)),
        Region("num_blocks", "i32", (1,)),
        Region("rows", "fp16", (routes, parts, k)),
        Region("partials", "fp32", (partials[min(num_tokens, len(partials) - 1)], parts * n)),
        Region("products", "fp16", (routes, parts, n)),
        Region("hidden", "fp16", (routes, n)),
    )


def select(spec: TrellisMoeSpec, num_tokens: int, flags: Flags) -> tuple[Launch, ...]:
    """The launches of a call of so many tokens, in order.

    Raises
        InvalidArgumentError: a negative token count.
    """
    if num_tokens < 0:
        raise InvalidArgumentError(f"num_tokens: got {num_tokens}, must not be negative")
    if num_tokens == 0:
        return ()
    ids, routes, pdl = dict(flags)["ids"], num_tokens * spec.top_k, spec.pdl
    experts = Experts(ids, spec.num_experts, spec.num_global_experts, spec.top_k)
    w13, w2 = _w13(spec), _w2(spec)
    first, second = _first_cut(spec, routes), _second_cut(spec, routes)
    if is_direct(spec, routes):
        placing, owner, tiles = (), experts, routes
    else:
        placing, owner = route(spec, ids, routes, first.rows), None
        tiles = num_blocks(routes, spec.num_experts, first.rows)
    bias = spec.dtype if spec.w13.has_bias else None
    return (
        *placing,
        rotate(
            experts, w13, dtype=spec.dtype, size=spec.hidden_size, rows=routes, to="rows", pdl=pdl
        ),
        product(owner, w13, first, x="rows", y="products", rows=routes, tiles=tiles, pdl=pdl),
        act(
            experts,
            spec.activation,
            size=spec.intermediate_size,
            rows=routes,
            split_k=first.split_k,
            bias=bias,
            pdl=pdl,
        ),
        product(owner, w2, second, x="hidden", y="rows", rows=routes, tiles=tiles, pdl=pdl),
        finish(
            experts,
            w2,
            dtype=spec.dtype,
            size=spec.hidden_size,
            num_tokens=num_tokens,
            products="rows",
            split_k=1,
            has_weights=True,
            pdl=pdl,
        ),
    )
