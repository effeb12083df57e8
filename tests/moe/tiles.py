"""A table of tiles that is the tests' own, and what calls take of any table, by its rule alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from firesteel.launch import LaunchKey
from firesteel.moe.plan import is_direct, select
from firesteel.moe.spec import ID_DTYPES, MoeSpec
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


def first_counts(spec: MoeSpec, max_tokens: int) -> list[int]:
    """Where a call is sorted first, or in two launches, and where each range of the table starts.

    Between two of them all calls launch the same keys, so that these give those of a plan.
    """
    tiles = spec.tiles
    bounds = [bound for bound, _ in tiles.sorted]
    bounds += [bound for first, below, _ in tiles.wgmma for bound in (first, below)]
    routes = [bound * spec.num_experts for bound in bounds if bound < math.inf]
    routes += [max(spec.top_k, spec.num_experts // 8) + 1, 4097]
    counts = {1, *(math.ceil(each / spec.top_k) for each in routes)}
    return sorted(count for count in counts if 1 <= count <= max_tokens)


def keys_of(spec: MoeSpec, max_tokens: int, ids: Sequence[str] = ID_DTYPES) -> list[LaunchKey]:
    """The keys of a plan, without planning every count; in its order."""
    counts = first_counts(spec, max_tokens)
    launches = (
        launch for each in ids for n in counts for launch in select(spec, n, (("ids", each),))
    )
    return list(dict.fromkeys(launch.key for launch in launches))


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
