"""A table of tiles that is the tests' own, and what calls take of any table, by its rule alone."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from firesteel.moe.plan import is_direct
from firesteel.moe.spec import MoeSpec
from firesteel.moe.tuning import Tile
from firesteel.moe.tuning_file import read_table

FIXED_FILE = Path(__file__).parent / "tables" / "fixed.json"
FIXED = read_table(FIXED_FILE)
"""Rows of one shape and recipe, of every mode. Those that ship change where they are tuned anew;
these do not, so a test may say how many keys they give and where each range ends."""


def tile_at(spec: MoeSpec, num_tokens: int) -> tuple[bool, Tile]:
    """Whether a call sorts its routes, and its tile."""
    routes, tiles = num_tokens * spec.top_k, spec.tiles
    each = routes / spec.num_experts
    is_sorted = not is_direct(spec, routes)
    if spec.batch_invariant:
        return is_sorted, tiles.batch_invariant
    if spec.wgmma:
        for first, below, tile in tiles.wgmma:
            # Of direct routes those of up to 16 rows alone.
            if first <= each < below and (is_sorted or tile.rows <= 16):
                return is_sorted, tile
    if is_sorted:
        return True, next(tile for bound, tile in tiles.sorted if each < bound)
    return False, tiles.direct


def gate_up_cuts(spec: MoeSpec, counts: Iterable[int]) -> list[tuple[object, ...]]:
    """The ways in which FC1 is cut at some counts, in the order in which they come up."""
    found = (tile_at(spec, count) for count in counts)
    return list(
        dict.fromkeys(
            (is_sorted, tile.is_wgmma, tile.rows, tile.gate_up, tile.is_joint)
            for is_sorted, tile in found
        )
    )


def down_cuts(spec: MoeSpec, counts: Iterable[int]) -> list[tuple[object, ...]]:
    """The same of FC2."""
    found = (tile_at(spec, count) for count in counts)
    return list(
        dict.fromkeys((is_sorted, tile.is_wgmma, tile.rows, tile.down) for is_sorted, tile in found)
    )
