"""The candidates that `firesteel tune` times: which tiles there are to choose from, in one place.

FC1 and FC2 share the rows of a tile. So for each number of rows the candidates of FC1 are timed
beside one FC2, those of FC2 beside one FC1, and the best of both are put together.

A count has two jobs where Hopper's own kernels read the weights: of the kernels that every GPU
runs, then of those, which must beat the best of the first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from firesteel.cli.tune import wgmma
from firesteel.cli.tune.wgmma import MAX_ACCUMULATORS
from firesteel.moe.plan import has_wgmma, hopper_tile, is_direct
from firesteel.moe.products import STREAM_ROWS, split_k
from firesteel.moe.spec import MoeSpec
from firesteel.moe.tuning import (
    INFINITY,
    MODES,
    Down,
    GateUp,
    LayerTiles,
    Mode,
    Shape,
    Tile,
    TileTable,
    recipe_name,
)

__all__ = [
    "Candidate",
    "Group",
    "Job",
    "groups_of",
    "incumbent_of",
    "jobs_of",
    "join",
    "known_of",
    "shape_of",
    "with_candidate",
    "with_tiles",
]

# Values to time, each with each, the likely ones first.
ROWS = (8, 16, 32, 64, 128)
GATE_UP_COLUMNS = (64, 128)
GATE_UP_JOINT = (False, True)
GATE_UP_WARPS_STAGES = ((4, 3), (4, 4), (8, 3), (4, 2), (8, 4), (8, 2))
SPLITS = (4, 2, 8, 1)
DOWN_ROWS = (64, 128)
DOWN_SPANS = (4, 2, 8, 1)
DOWN_WARPS_STAGES = ((4, 3), (8, 3), (2, 3), (4, 4), (4, 2))


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is timed: a tile, and of direct routes the spans of K."""

    tile: Tile
    split_k: int = 1


@dataclass(frozen=True, slots=True)
class Job:
    """Calls that will take one tile, and so are chosen for together.

    Fields
        mode    of the rows that the job gives
        counts  token counts to time; of several the geometric mean decides
    """

    mode: Mode
    counts: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.mode.replace('_', ' ')} {', '.join(map(str, self.counts))}"


@dataclass(frozen=True, slots=True)
class Group:
    """`start`, and candidates that differ from it in one product."""

    start: Candidate
    gate_up: tuple[Candidate, ...]
    down: tuple[Candidate, ...]

    @property
    def all(self) -> tuple[Candidate, ...]:
        """Each once."""
        return tuple(dict.fromkeys((self.start, *self.gate_up, *self.down)))


def jobs_of(
    spec: MoeSpec, counts: tuple[int, ...], modes: Collection[Mode] = MODES
) -> tuple[Job, ...]:
    """Direct counts together, each other count by itself; of a batch invariant layer all.

    Args:
        spec: the layer.
        counts: of tokens.
        modes: that are chosen for, of those which the layer has.
    """
    counts = tuple(sorted(set(counts)))
    if spec.batch_invariant:
        jobs = [Job("batch_invariant", counts)]
    else:
        direct = tuple(count for count in counts if is_direct(spec, count * spec.top_k))
        jobs = []
        for each in (direct, *((count,) for count in counts if count not in direct)):
            if not each:
                continue
            jobs.append(Job("direct" if each == direct else "sorted", each))
            if has_wgmma(spec):
                jobs.append(Job("wgmma", each))
    return tuple(job for job in jobs if job.mode in modes)


def _routes_each(spec: MoeSpec, num_tokens: int) -> float:
    """Routes that an expert has on average."""
    return num_tokens * spec.top_k / spec.num_experts


def shape_of(spec: MoeSpec) -> Shape:
    """What a table's rows for a layer say that they were measured for."""
    stored = spec.w13
    recipe = recipe_name(stored.element, stored.group_size, stored.has_zero_points)
    return Shape(spec.hidden_size, spec.intermediate_size, recipe)


def incumbent_of(spec: MoeSpec, job: Job) -> Candidate:
    """What the calls of a job take now; of "wgmma" what they would take without those kernels."""
    tiles = spec.tiles
    if job.mode == "batch_invariant":
        return Candidate(tiles.batch_invariant)
    if is_direct(spec, job.counts[0] * spec.top_k):
        return Candidate(tiles.direct, split_k(spec))
    return Candidate(tiles.of_sorted(_routes_each(spec, job.counts[0])))


def known_of(spec: MoeSpec, job: Job) -> Candidate | None:
    """Of "wgmma" the tile of those kernels that calls take now, if they take one."""
    routes = job.counts[0] * spec.top_k
    tile = hopper_tile(spec, routes) if job.mode == "wgmma" else None
    return None if tile is None or not _takes(spec, job, tile) else Candidate(tile)


def _takes(spec: MoeSpec, job: Job, tile: Tile) -> bool:
    """Whether calls of a job can take such a tile: routes that are not sorted, one of few rows."""
    return tile.rows <= STREAM_ROWS or not is_direct(spec, job.counts[0] * spec.top_k)


def with_candidate(spec: MoeSpec, candidate: Candidate) -> MoeSpec:
    """The layer with a table of the candidate alone."""
    tile = candidate.tile
    if tile.is_wgmma:
        return with_tiles(spec, replace(spec.tiles, wgmma=((0.0, INFINITY, tile),)))
    return with_tiles(spec, LayerTiles(((INFINITY, tile),), tile, candidate.split_k, tile))


def with_tiles(spec: MoeSpec, tiles: LayerTiles) -> MoeSpec:
    """The layer with a table of its own, of these tiles."""
    base = spec.table
    table = TileTable(
        name="candidate",
        device=base.device,
        compute_capability=base.compute_capability,
        date=base.date,
        torch=base.torch,
        triton=base.triton,
        rows=tiles.rows(shape_of(spec)),
    )
    return replace(spec, table=table)


def join(gate_up: Candidate, down: Candidate) -> Candidate:
    """FC1 of one candidate and FC2 of another."""
    return replace(gate_up, tile=replace(gate_up.tile, down=down.tile.down))


def groups_of(spec: MoeSpec, job: Job, shared_bytes: int) -> tuple[Group, ...]:
    """All candidates of a job, in groups of what both products share; what is in use first.

    Args:
        spec: the layer, with the table to start from.
        job: of `jobs_of`.
        shared_bytes: shared memory that a program may have.
    """
    if job.mode == "wgmma":
        return _wgmma_groups(spec, job, shared_bytes)
    incumbent = incumbent_of(spec, job)
    rows = _rows_of(spec, job, incumbent)
    starts = [incumbent, *(_start(spec, incumbent, each) for each in rows)]
    return tuple(
        Group(
            start,
            tuple(_gate_ups(spec, job, start, shared_bytes)),
            tuple(_downs(spec, start, shared_bytes)),
        )
        for start in dict.fromkeys(starts)
    )


def _rows_of(spec: MoeSpec, job: Job, incumbent: Candidate) -> tuple[int, ...]:
    """Rows of tiles worth timing: about as many as an expert has routes, and the incumbent's."""
    own = incumbent.tile.rows
    if job.mode == "direct":
        # A tile has one route, and no product is of fewer columns than 8.
        return (own,)
    middle = own
    if job.mode == "sorted":
        each = _routes_each(spec, job.counts[0])
        middle = next((rows for rows in ROWS if rows >= each), ROWS[-1])
    near = [rows for rows in ROWS if middle // 2 <= rows <= 2 * middle]
    return tuple(dict.fromkeys((own, *near)))


def _start(spec: MoeSpec, incumbent: Candidate, rows: int) -> Candidate:
    """The incumbent, or for other rows what the table has for them elsewhere."""
    if incumbent.tile.rows == rows:
        return incumbent
    known = [tile for _, tile in spec.tiles.sorted if tile.rows == rows]
    return replace(incumbent, tile=known[0] if known else replace(incumbent.tile, rows=rows))


def _gate_ups(spec: MoeSpec, job: Job, start: Candidate, shared_bytes: int) -> Iterator[Candidate]:
    """FC1 in every way that fits, with the FC2 of `start`."""
    # What is not gated has one part, and one route has too few columns to join parts for.
    can_join = spec.num_parts == 2 and job.mode != "direct"
    splits = SPLITS if job.mode == "direct" else (start.split_k,)
    for columns, is_joint, (warps, stages), split in product(
        GATE_UP_COLUMNS, GATE_UP_JOINT, GATE_UP_WARPS_STAGES, splits
    ):
        if is_joint and not can_join:
            continue
        tile = replace(start.tile, gate_up=GateUp(columns, warps, stages), is_joint=is_joint)
        candidate = Candidate(tile, split)
        fits = _fits(tile.rows, spec.num_parts * columns, warps, stages, shared_bytes)
        # K must be long enough for so many spans.
        is_narrow = wgmma.is_narrow(columns, spec.intermediate_size)
        is_split = job.mode != "direct" or split_k(with_candidate(spec, candidate)) == split
        if fits and is_narrow and is_split and candidate != start:
            yield candidate


def _downs(spec: MoeSpec, start: Candidate, shared_bytes: int) -> Iterator[Candidate]:
    """FC2 in every way that fits, with the FC1 of `start`."""
    for rows, span, (warps, stages) in product(DOWN_ROWS, DOWN_SPANS, DOWN_WARPS_STAGES):
        down = Down(rows, span, warps, stages)
        candidate = replace(start, tile=replace(start.tile, down=down))
        fits = _fits(start.tile.rows, rows, warps, stages, shared_bytes)
        if fits and wgmma.is_narrow(rows * span, spec.hidden_size) and candidate != start:
            yield candidate


def _fits(routes: int, weights: int, warps: int, stages: int, shared_bytes: int) -> bool:
    """Whether a program of so many rows of weights can have its sums and its loads ahead.

    A block is 128 columns of 16 bits of the routes and half a byte a weight; of `stages` blocks one
    is in registers. The compiler may ask for more, which is seen once it has.
    """
    ahead = (stages - 1) * 128 * (2 * routes + weights // 2)
    return routes * weights <= MAX_ACCUMULATORS * 32 * warps and ahead <= shared_bytes


def _wgmma_groups(spec: MoeSpec, job: Job, shared_bytes: int) -> tuple[Group, ...]:
    """Those of Hopper's own kernels; the tile that the table has for the count first."""
    now = known_of(spec, job)
    groups: list[Group] = []
    for rows in wgmma.rows_of(_routes_each(spec, job.counts[0])):
        gate_ups = wgmma.gate_ups_of(spec, rows, shared_bytes)
        downs = wgmma.downs_of(spec, rows, shared_bytes)
        if not gate_ups or not downs:
            continue
        # What the table has for these rows, here or elsewhere: that of another recipe may not fit.
        tiles = [now.tile] if now is not None else []
        tiles += [tile for _, _, tile in spec.tiles.wgmma if tile.rows == rows]
        tiles.append(Tile(rows, gate_ups[0], False, downs[0], is_wgmma=True))
        start = next(tile for tile in tiles if _is_one_of(tile, rows, gate_ups, downs))
        fc1 = [replace(start, gate_up=each) for each in gate_ups if each != start.gate_up]
        fc2 = [replace(start, down=each) for each in downs if each != start.down]
        group = Group(Candidate(start), tuple(map(Candidate, fc1)), tuple(map(Candidate, fc2)))
        groups.append(group)
    if now is not None and now not in [group.start for group in groups]:
        groups.append(Group(now, (), ()))
    return tuple(sorted(groups, key=lambda group: group.start != now))


def _is_one_of(tile: Tile, rows: int, gate_ups: Sequence[GateUp], downs: Sequence[Down]) -> bool:
    return tile.rows == rows and tile.gate_up in gate_ups and tile.down in downs
