"""`select` of an EXL3 linear: rotate, multiply, rotate.

Rows of x are in order, and tiles of them share one matrix. Tiles have 8 or 16 rows as long as that
makes few programs, which then share K: decoding a matrix again for each tile costs less than
leaving most multiprocessors idle. Beyond it they are those of `moe.trellis.tiles`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from firesteel.errors import InvalidArgumentError
from firesteel.formats.trellis_matrix import padded
from firesteel.launch import Launch, Region
from firesteel.moe.trellis.launches import Experts, Matrices, finish, product, rotate
from firesteel.moe.trellis.tiles import (
    STREAM_ROWS,
    Cut,
    cut_of,
    few_spans,
    rows_of_sums,
    tile_rows,
)

if TYPE_CHECKING:
    from firesteel.moe.trellis.linear import TrellisLinearSpec

__all__ = ["select", "workspace"]


FEW_PROGRAMS = 160
"""Row blocks times tiles of 16 rows, up to which larger tiles would have too few programs.

By count: a block of 128 x 128 weights and 16 rows takes a multiprocessor about 950 cycles, and a
program of larger tiles, which does not share K, about 1200 a block.
"""


def _matrices(spec: TrellisLinearSpec) -> Matrices:
    return Matrices("w", spec.stored, 1, padded(spec.out_features), padded(spec.in_features))


def _cut(spec: TrellisLinearSpec, num_tokens: int) -> Cut:
    height, width = padded(spec.out_features) // 128, padded(spec.in_features) // 128
    rows = 8 if num_tokens <= 8 else STREAM_ROWS
    programs = height * -(-num_tokens // rows)
    if num_tokens > STREAM_ROWS and (programs > FEW_PROGRAMS or height > FEW_PROGRAMS):
        return cut_of(tile_rows(num_tokens, wgmma=spec.wgmma), height, width)
    spans = few_spans(programs, width)
    return Cut(rows, split_k=spans, warps=4, stages=3) if spans > 1 else cut_of(rows, height, width)


@lru_cache(maxsize=64)
def _partials(spec: TrellisLinearSpec) -> tuple[int, ...]:
    """Rows of the sums that calls of 0, 1, 2, ... rows leave to `finish`; the last: of more."""
    counts = range(1, STREAM_ROWS * FEW_PROGRAMS + 1)
    return rows_of_sums((count, _cut(spec, count)) for count in counts)


def workspace(spec: TrellisLinearSpec, num_tokens: int) -> tuple[Region, ...]:
    """The regions of a call of so many rows."""
    k, n = padded(spec.in_features), padded(spec.out_features)
    partials = _partials(spec)
    return (
        Region("rotated", "fp16", (num_tokens, k)),
        Region("partials", "fp32", (partials[min(num_tokens, len(partials) - 1)], n)),
        Region("products", "fp16", (num_tokens, n)),
    )


def select(spec: TrellisLinearSpec, num_tokens: int) -> tuple[Launch, ...]:
    """The launches of a call of so many rows, in order.

    Raises
        InvalidArgumentError: a negative number of rows.
    """
    if num_tokens < 0:
        raise InvalidArgumentError(f"num_tokens: got {num_tokens}, must not be negative")
    if num_tokens == 0:
        return ()
    one, cut, matrices = Experts(None), _cut(spec, num_tokens), _matrices(spec)
    tiles = -(-num_tokens // cut.rows)
    return (
        rotate(
            one,
            matrices,
            dtype=spec.dtype,
            size=spec.in_features,
            rows=num_tokens,
            to="rotated",
            pdl=spec.pdl,
        ),
        product(
            one,
            matrices,
            cut,
            x="rotated",
            y="products",
            rows=num_tokens,
            tiles=tiles,
            pdl=spec.pdl,
        ),
        finish(
            one,
            matrices,
            dtype=spec.dtype,
            size=spec.out_features,
            num_tokens=num_tokens,
            products="products",
            split_k=cut.split_k,
            has_weights=False,
            pdl=spec.pdl,
        ),
    )
