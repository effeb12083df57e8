"""How the products of EXL3 layers are cut.

Measured on an H200 for experts at a few token counts (`2026-11-30-exl3-cuts.jsonl`); where one cut
gives way to the next between those, and the cuts of linears, are by judgement. Every choice depends
on the sizes of a layer and on counts alone, so that a plan is the same everywhere; other GPUs take
the same cuts.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd
from typing import NamedTuple

__all__ = [
    "FEW_ROWS",
    "STREAM_ROWS",
    "Cut",
    "cut_of",
    "few_spans",
    "hit_experts",
    "rows_of_sums",
    "tile_rows",
]

STREAM_ROWS = 16
"""Most rows of a tile that `mma.sync` multiplies."""

FEW_ROWS = 5
"""Rows a matrix, on average, up to which tiles have 8."""

_PROGRAMS = 1700
"""Nearly as many programs of two warps as an H200 runs at once, which is 14 on a multiprocessor."""


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
    stages: int = 2
    is_wgmma: bool = False


def tile_rows(rows_per_matrix: float, *, wgmma: bool) -> int:
    """Rows of a tile where matrices have so many rows on average."""
    if rows_per_matrix <= FEW_ROWS:
        return 8
    if rows_per_matrix <= 12 or not wgmma:
        return STREAM_ROWS
    if rows_per_matrix <= 20:
        return 32
    return 64 if rows_per_matrix <= 40 else 128


def cut_of(rows: int, height: int, width: int, *, programs: float | None = None) -> Cut:
    """Of tiles of so many rows, and matrices of `height` times `width` blocks of 128.

    Args:
        programs: row blocks of all tiles, where K may be split.
    """
    if rows > STREAM_ROWS:
        span = gcd(height, 4) if width <= 8 else 1
        return Cut(rows, span, warps=8 if rows == 128 else 4, stages=4, is_wgmma=True)
    if programs is not None:
        return Cut(rows, split_k=few_spans(programs, width))
    return Cut(rows, span=gcd(height, 2) if width <= 8 else 1)


def few_spans(programs: float, width: int) -> int:
    """Spans of K where there are so few programs; each a whole number of blocks, at least 3."""
    spans = 1
    while spans < 16 and programs * spans < _PROGRAMS and width % (2 * spans) == 0:
        if width // (2 * spans) < 3:
            break
        spans *= 2
    return spans


def rows_of_sums(calls: Iterable[tuple[int, Cut]]) -> tuple[int, ...]:
    """Rows of the sums that calls of up to 0, 1, 2, ... tokens leave where K is split.

    Args:
        calls: of 1, 2, ... tokens the rows, and their cut.
    """
    found = [0]
    for rows, cut in calls:
        found.append(max(found[-1], rows * cut.split_k * (cut.split_k > 1)))
    return tuple(found)


def hit_experts(num_experts: int, routes: int) -> float:
    """Experts that so many routes reach on average, if all are equally likely."""
    # Squared and multiplied here: a library's power may differ from machine to machine.
    missed, base, power = 1.0, 1.0 - 1.0 / num_experts, routes
    while power:
        if power & 1:
            missed *= base
        base *= base
        power >>= 1
    return num_experts * (1.0 - missed)
