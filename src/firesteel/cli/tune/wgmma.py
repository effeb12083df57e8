"""How Hopper's own kernels may cut a layer: what `firesteel tune` times of them."""

from __future__ import annotations

from itertools import product

from firesteel.moe.products import STREAM_ROWS
from firesteel.moe.spec import BITS, MoeSpec, StoredWeights
from firesteel.moe.tuning import Down, GateUp

__all__ = ["MAX_ACCUMULATORS", "downs_of", "gate_ups_of", "is_narrow", "rows_of"]

MAX_ACCUMULATORS = 128
"""Sums that a thread may hold: of its 255 registers as many again go to operands and addresses."""

# Values to time, the likely ones first.
ROWS = (8, 16, 32, 64, 128)
GATE_UP_COLUMNS = (64, 128)
GATE_UP_WARPS_STAGES = ((8, 4), (8, 3), (4, 4), (4, 3))
DOWN_ROWS = (128, 256)
DOWN_SPANS = (8, 4, 16, 2, 1)
DOWN_WARPS_STAGES = ((8, 3), (8, 4), (4, 3))
# Of tiles of few rows, which wait for memory: more blocks ahead, and programs that are shorter.
STREAM_WARPS_STAGES = ((4, 4), (4, 3), (8, 4))
STREAM_DOWN_ROWS = (128, 64)
STREAM_DOWN_SPANS = (4, 1, 2, 8)


def rows_of(each: float) -> tuple[int, ...]:
    """Rows of tiles worth timing where an expert has so many routes on average, two at most.

    They are more than half of the routes and at most 4 times as many, and of those the nearest to
    1.5 times: some experts have more routes than others, and a tile is multiplied as far as it is
    filled.
    """
    near = [rows for rows in ROWS if each / 2 < rows <= 4 * each]
    if not near:
        near = [ROWS[0] if each < ROWS[0] else ROWS[-1]]
    near.sort(key=lambda rows: max(rows / (1.5 * each), 1.5 * each / rows))
    return tuple(near[:2])


def gate_ups_of(spec: MoeSpec, routes: int, shared_bytes: int) -> list[GateUp]:
    """FC1 in every way that fits, in tiles of so many routes."""
    row_bytes = _row_bytes(spec.w13, spec.hidden_size)
    found: list[GateUp] = []
    pairs = STREAM_WARPS_STAGES if routes <= STREAM_ROWS else GATE_UP_WARPS_STAGES
    for columns, (warps, stages) in product(GATE_UP_COLUMNS, pairs):
        rows = spec.num_parts * columns
        needed = stages * (256 * routes + row_bytes * rows)
        fits = _is_whole(routes, rows, warps) and needed <= shared_bytes
        if fits and is_narrow(columns, spec.intermediate_size):
            found.append(GateUp(columns, warps, stages))
    return found


def downs_of(spec: MoeSpec, routes: int, shared_bytes: int) -> list[Down]:
    """FC2 in every way that fits, in tiles of so many routes."""
    row_bytes = _row_bytes(spec.w2, spec.intermediate_size)
    found: list[Down] = []
    cuts = product(DOWN_ROWS, DOWN_SPANS, DOWN_WARPS_STAGES)
    if routes <= STREAM_ROWS:
        cuts = product(STREAM_DOWN_ROWS, STREAM_DOWN_SPANS, STREAM_WARPS_STAGES)
    for rows, span, (warps, stages) in cuts:
        # Sums are turned in memory of their own: by then the next row block is on its way.
        needed = stages * (256 * routes + row_bytes * rows) + 2 * routes * rows
        fits = _is_whole(routes, rows, warps) and needed <= shared_bytes
        if fits and is_narrow(rows * span, spec.hidden_size):
            found.append(Down(rows, span, warps, stages))
    return found


def is_narrow(columns: int, size: int) -> bool:
    """Whether programs of so many columns of a matrix reach little beyond its end."""
    return columns < size + 64


def _is_whole(routes: int, rows: int, warps: int) -> bool:
    """Whether warps of 16 rows of weights, of wgmma in fours, share the sums and hold them."""
    is_shared = rows % (16 * warps) == 0 and (routes <= STREAM_ROWS or warps % 4 == 0)
    return is_shared and routes * rows <= MAX_ACCUMULATORS * 32 * warps


def _row_bytes(stored: StoredWeights, k: int) -> int:
    """Of 128 columns of a row: codes, and 16 bits and perhaps a byte of each group of them."""
    groups = 1 if stored.group_size == k else -(-128 // stored.group_size)
    return 16 * BITS[stored.element] + groups * (2 + stored.has_zero_points)
