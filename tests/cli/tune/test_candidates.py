"""What `firesteel tune` times: that every candidate fits its layer, and that none is left out."""

from dataclasses import fields, replace
from itertools import pairwise

import pytest

from firesteel.cli.tune.candidates import (
    Candidate,
    Job,
    groups_of,
    incumbent_of,
    jobs_of,
    join,
    known_of,
    shape_of,
    with_candidate,
    with_tiles,
)
from firesteel.launch import plan
from firesteel.moe.activation import Activation
from firesteel.moe.plan import select
from firesteel.moe.products import split_k
from firesteel.moe.spec import GEOMETRIES, MoeSpec, StoredWeights, geometry
from firesteel.moe.tuning import INFINITY, Down, GateUp, LayerTiles, Tile
from firesteel.moe.tuning_file import format_table, parse_table
from tests.moe.tiles import FIXED

GLM = replace(geometry("glm-5.2", tensor_parallel=4), table=FIXED)
SMALL = MoeSpec(hidden_size=256, intermediate_size=96, num_experts=8, top_k=2,
                w2=StoredWeights(group_size=32))  # fmt: skip
COUNTS = (1, 2, 8, 64, 1024, 8192)
SHARED = 227 * 1024
SPECS = {
    **{name: geometry(name, group_size=32) for name in GEOMETRIES},
    "glm-5.2-tp4": GLM,
    "small": SMALL,
    "int4-g32-asym": geometry("glm-5.2", group_size=32, has_zero_points=True),
    "mxfp4": geometry("glm-5.2", tensor_parallel=4, element="mxfp4"),
    "nvfp4": geometry("qwen3-30b-a3b", element="nvfp4"),
    "relu2": replace(SMALL, activation=Activation(name="relu2")),
}


def test_each_field_of_a_tile_is_tuned() -> None:
    """A field that is new must have candidates that differ in it, and FC2 of one joins FC1's."""
    tiles = [
        candidate.tile
        for job in jobs_of(GLM, (1, 1024))
        for group in groups_of(GLM, job, SHARED)
        for candidate in group.all
    ]
    for field in fields(Tile):
        values = {getattr(tile, field.name) for tile in tiles}
        assert len(values) > 1, field.name
        if field.name in ("gate_up", "down"):
            for each in zip(*values, strict=True):
                assert len(set(each)) > 1, field.name
    for first, second in pairwise(dict.fromkeys(tiles)):
        assert join(Candidate(first), Candidate(second)).tile == replace(first, down=second.down)


def test_direct_counts_share_a_tile_and_others_have_their_own() -> None:
    spec = replace(GLM, wgmma=False)
    assert jobs_of(spec, (64, 1, 4, 5, 1)) == (
        Job("direct", (1, 4)),
        Job("sorted", (5,)),
        Job("sorted", (64,)),
    )
    assert jobs_of(spec, (64,)) == (Job("sorted", (64,)),)
    assert jobs_of(invariant_of(GLM), (64, 1024)) == (Job("batch_invariant", (64, 1024)),)


def invariant_of(spec: MoeSpec) -> MoeSpec:
    return replace(spec, batch_invariant=True)


def test_hoppers_own_kernels_have_a_job_after_that_of_the_others() -> None:
    counts = (1024, 5, 4, 1)
    others = (Job("direct", (1, 4)), Job("sorted", (5,)), Job("sorted", (1024,)))
    # Of direct counts too it is one for all of them.
    wgmma = tuple(Job("wgmma", job.counts) for job in others)
    both = tuple(job for pair in zip(others, wgmma, strict=True) for job in pair)
    assert jobs_of(GLM, counts) == both
    assert jobs_of(GLM, counts, ("wgmma",)) == wgmma
    assert jobs_of(GLM, counts, ("direct", "sorted")) == others
    assert not any(job.mode == "wgmma" for job in jobs_of(invariant_of(GLM), counts))
    for other in (
        replace(GLM, wgmma=False),
        replace(GLM, w2=SPECS["mxfp4"].w2),
        replace(GLM, w2=replace(GLM.w2, scale="fp32")),
    ):
        assert {job.mode for job in jobs_of(other, counts)} == {"direct", "sorted"}


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_every_candidate_is_one_that_its_layer_can_take(name: str, batch_invariant: bool) -> None:
    spec = replace(SPECS[name], batch_invariant=batch_invariant)
    for job in jobs_of(spec, COUNTS):
        groups = groups_of(spec, job, SHARED)
        incumbent = incumbent_of(spec, job)
        is_wgmma = job.mode == "wgmma"
        now = known_of(spec, job)
        if not is_wgmma:
            assert groups[0].start == incumbent
            assert now is None
            assert len({group.start.tile.rows for group in groups}) == len(groups)
        elif now is not None:
            assert groups[0].start == now
        assert any(group.gate_up for group in groups)
        for group in groups:
            rows = group.start.tile.rows
            # What the table has may be of rows that are not worth more.
            assert bool(group.gate_up) == bool(group.down)
            assert group.gate_up or group.start == now
            for candidate in group.gate_up:
                assert join(candidate, group.start).tile.down == candidate.tile.down
                assert candidate.tile.rows == rows
            for candidate in group.down:
                assert join(group.start, candidate) == candidate
            for candidate in group.all:
                made = with_candidate(spec, candidate)
                # Its table may be written, and is what every call takes.
                assert parse_table(format_table(made.table), name="candidate", where="")
                assert candidate.tile.is_wgmma == is_wgmma
                take = known_of if is_wgmma else incumbent_of
                for count in job.counts:
                    assert take(made, replace(job, counts=(count,))) == candidate


def test_candidates_launch_what_they_say() -> None:
    (direct, *_, large) = jobs_of(GLM, COUNTS, ("direct", "sorted"))
    for job in (direct, large):
        for group in groups_of(GLM, job, SHARED):
            for candidate in group.all:
                spec = with_candidate(GLM, candidate)
                launches = {
                    launch.key.name: launch.key
                    for launch in select(spec, job.counts[-1], (("ids", "i32"),))
                }
                gate_up, down = launches["gate_up_kernel"], launches["down_kernel"]
                constants = dict(gate_up.constexprs)
                tile = candidate.tile
                assert (constants["BLOCK_N"], gate_up.num_warps, gate_up.num_stages) == tile.gate_up
                assert constants["SPLIT_K"] == (candidate.split_k if job.mode == "direct" else 1)
                assert dict(down.constexprs)["SPAN"] == tile.down.span


def test_candidates_of_hopper_launch_what_they_say() -> None:
    kinds = set()
    for job in jobs_of(GLM, COUNTS, ("wgmma",)):
        for group in groups_of(GLM, job, SHARED):
            for candidate in group.all:
                spec = with_candidate(GLM, candidate)
                launches = {
                    launch.key.name: launch.key
                    for launch in select(spec, job.counts[0], (("ids", "i32"),))
                }
                tile = candidate.tile
                kind = "stream" if tile.rows <= 16 else "wgmma"
                kinds.add((kind, "activate_kernel" in launches))
                gate_up, down = launches[f"gate_up_{kind}_kernel"], launches[f"down_{kind}_kernel"]
                constants = dict(gate_up.constexprs)
                names = ("BLOCK_M", "BLOCK_N", "WARPS", "STAGES")
                assert tuple(constants[n] for n in names) == (tile.rows, *tile.gate_up)
                if kind == "stream":
                    # Direct routes share K among as many programs as they do on other kernels.
                    is_direct = job.counts == (1, 2)
                    assert constants["SPLIT_K"] == (split_k(GLM) if is_direct else 1)
                constants = dict(down.constexprs)
                names = ("BLOCK_N", "SPAN", "WARPS", "STAGES")
                assert tuple(constants[n] for n in names) == tile.down
    assert kinds == {("stream", True), ("stream", False), ("wgmma", False)}


def wgmma_everywhere(spec: MoeSpec, *, rows: int) -> MoeSpec:
    """The layer with a table that has a tile of Hopper's own kernels for every count."""
    tile = Tile(rows, GateUp(128, 8, 3), False, Down(128, 1, 8, 3), is_wgmma=True)
    return with_tiles(spec, replace(spec.tiles, wgmma=((0.0, INFINITY, tile),)))


@pytest.mark.parametrize("name", SPECS)
def test_a_direct_count_has_no_tile_of_more_than_16_rows(name: str) -> None:
    """Nor one that its table has at that count: kernels of larger tiles take sorted routes only."""
    for rows in (8, 16, 32, 128):
        spec = wgmma_everywhere(SPECS[name], rows=rows)
        direct, large = Job("wgmma", (1,)), Job("wgmma", (8192,))
        assert {direct, large} < set(jobs_of(spec, (1, 8192)))
        now = known_of(spec, direct)
        assert (now is not None) == (rows <= 16)
        assert now is None or now.tile.rows == rows
        large_now = known_of(spec, large)
        assert large_now is not None
        assert large_now.tile.rows == rows
        found = {c.tile.rows for g in groups_of(spec, direct, SHARED) for c in g.all}
        assert found == {8, *((rows,) if now else ())}


def test_what_hoppers_tiles_must_beat_is_what_calls_take_without_them() -> None:
    tiles = LayerTiles(
        ((1.0, GLM.tiles.sorted[1][1]), (INFINITY, GLM.tiles.sorted[2][1])),
        replace(GLM.tiles.direct, rows=16),
        8,
        GLM.tiles.batch_invariant,
        wgmma_everywhere(GLM, rows=8).tiles.wgmma,
    )
    spec = with_tiles(GLM, tiles)
    assert spec.tiles == tiles
    # Direct counts share K.
    assert incumbent_of(spec, Job("wgmma", (1, 4))) == Candidate(tiles.direct, 8)
    assert incumbent_of(spec, Job("wgmma", (5,))) == Candidate(tiles.sorted[0][1])
    assert incumbent_of(spec, Job("wgmma", (64,))) == Candidate(tiles.sorted[1][1])
    # To time one of theirs is to time the layer with it, which has the same spans.
    ((_, _, tile),) = tiles.wgmma
    assert with_candidate(spec, Candidate(tile)).tiles == tiles


def test_a_search_of_hoppers_tiles_is_short() -> None:
    """As short as docs/tuning.md says, but for the tile in use."""
    bare = with_tiles(GLM, replace(GLM.tiles, wgmma=()))
    counts = (*(2**n for n in range(14)), *(3 * 2**n for n in range(12)))
    jobs = jobs_of(bare, counts, ("wgmma",))
    sizes = [len({c for g in groups_of(bare, job, SHARED) for c in g.all}) for job in jobs]
    assert (min(sizes), max(sizes)) == (25, 74)
    assert sum(sizes) / len(sizes) <= 45
    for job in jobs_of(GLM, counts, ("wgmma",)):
        assert sum(len(group.all) for group in groups_of(GLM, job, SHARED)) <= 75


def test_another_recipes_tile_is_only_a_start_where_it_fits() -> None:
    """That of g128 fits in memory that the scales of g32 pass."""
    tile = Tile(128, GateUp(128, 8, 4), False, Down(256, 8, 8, 3), is_wgmma=True)
    spec = with_tiles(GLM, replace(GLM.tiles, wgmma=((0.0, INFINITY, tile),)))
    (job,) = jobs_of(spec, (8192,), ("wgmma",))
    now = known_of(spec, job)
    assert now == Candidate(tile)
    down_bytes = 3 * (256 * 128 + 66 * 256) + 2 * 128 * 256
    assert groups_of(spec, job, down_bytes)[0].start == now
    other = replace(spec, w13=StoredWeights(group_size=32), w2=StoredWeights(group_size=32))
    first, second = groups_of(other, job, down_bytes)
    # It is timed, and what the compiler asks for decides.
    assert (first.start, first.gate_up, first.down) == (now, (), ())
    assert second.start.tile.rows == tile.rows
    assert second.start != now


def test_rows_are_about_those_of_an_expert() -> None:
    def rows(count: int) -> list[int]:
        (job,) = jobs_of(GLM, (count,), ("sorted",))
        return [group.start.tile.rows for group in groups_of(GLM, job, SHARED)]

    # Routes an expert: a quarter, 2, 8, 32, 256.
    assert rows(8) == [8, 16]
    assert rows(64) == [8, 16]
    assert sorted(rows(256)) == [8, 16]
    assert sorted(rows(1024)) == [16, 32, 64]
    assert sorted(rows(8192)) == [64, 128]


def test_less_shared_memory_leaves_fewer_candidates() -> None:
    for job in jobs_of(GLM, (1024,)):
        many, few = (groups_of(GLM, job, size) for size in (SHARED, 64 * 1024))
        assert sum(len(g.all) for g in few) < sum(len(g.all) for g in many)


def test_a_short_k_is_not_split_into_spans_that_it_has_not() -> None:
    (job,) = jobs_of(SMALL, (1,), ("direct",))
    (group,) = groups_of(SMALL, job, SHARED)
    assert {candidate.split_k for candidate in group.all} == {1} == {split_k(SMALL)}


def test_a_table_of_a_candidate_serves_every_count() -> None:
    tile = replace(GLM.tiles.direct, rows=32)
    spec = with_candidate(GLM, Candidate(tile, 2))
    assert spec.table.shapes == (shape_of(GLM),)
    keys = plan(spec, 300, flags={"ids": ["i32"]}).keys
    blocks = [dict(key.constexprs).get("BLOCK_M") for key in keys]
    assert set(blocks) - {None} == {32}
