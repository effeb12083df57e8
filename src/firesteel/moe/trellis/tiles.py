"""How the products of EXL3 layers are cut, by measurement on an H200.

Every choice depends on the sizes of a layer and on counts alone, so that a plan is the same
everywhere; other GPUs take the same cuts.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

__all__ = ["Cut", "cut_of", "few_spans", "span_of", "tile_rows"]

STREAM_ROWS = 16
"""Most rows of a tile that `mma.sync` multiplies."""

_PROGRAMS = 1056
"""Programs that keep an H200 busy: 8 on each of its 132 multiprocessors."""


class Cut(NamedTuple):
    """How a product is cut.

    Fields
        rows      rows of x of a program
        span      blocks of 128 rows of the matrix that it does one after the other
        split_k   spans of K that programs share
        warps, stages
        is_wgmma  whether it is the kernel that only Hopper runs
    """

    rows: int
    span: int = 1
    split_k: int = 1
    warps: int = 2
    stages: int = 3
    is_wgmma: bool = False


def tile_rows(rows_per_matrix: float, *, wgmma: bool) -> int:
    """Rows of a tile where matrices have so many rows on average."""
    if rows_per_matrix <= 5:
        return 8
    if rows_per_matrix <= 12 or not wgmma:
        return STREAM_ROWS
    return 64 if rows_per_matrix <= 40 else 128


def cut_of(rows: int, height: int, width: int) -> Cut:
    """Of tiles of so many rows, and matrices of `height` times `width` blocks of 128."""
    if rows > STREAM_ROWS:
        span = gcd(height, 4) if width <= 8 else 1
        return Cut(rows, span, warps=8 if rows == 128 else 4, stages=4, is_wgmma=True)
    return Cut(rows, span_of(height, width), warps=2, stages=3)


def span_of(height: int, width: int) -> int:
    """Row blocks of a program, where a row block has so few blocks that it should do several."""
    return gcd(height, 2) if width <= 8 else 1


def few_spans(programs: int, width: int) -> int:
    """Spans of K where there are so few programs; each a whole number of blocks, at least 3."""
    spans = 1
    while spans < 16 and programs * spans < _PROGRAMS and width % (2 * spans) == 0:
        if width // (2 * spans) < 3:
            break
        spans *= 2
    return spans
