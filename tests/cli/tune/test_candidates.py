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
)
from firesteel.launch import plan
from firesteel.moe.activation import Activation
from firesteel.moe.plan import select
from firesteel.moe.products import split_k
from firesteel.moe.spec import GEOMETRIES, MoeSpec, StoredWeights, geometry
from firesteel.moe.tuning import Tile
from firesteel.moe.tuning_file import format_table, parse_table

GLM = geometry("glm-5.2", tensor_parallel=4)
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
    assert jobs_of(GLM, (64, 1, 4, 5, 1)) == (
        Job("direct", (1, 4)),
        Job("sorted", (5,)),
        Job("sorted", (64,)),
    )
    assert jobs_of(GLM, (64,)) == (Job("sorted", (64,)),)
    invariant = replace(GLM, batch_invariant=True)
    assert jobs_of(invariant, (64, 1024)) == (Job("batch_invariant", (64, 1024)),)


def test_hoppers_own_kernels_have_a_job_after_that_of_the_others() -> None:
    counts = (1, 127, 128, 1024)
    direct, few = Job("direct", (1,)), Job("sorted", (127,))
    both = [Job(mode, (count,)) for count in (128, 1024) for mode in ("sorted", "wgmma")]
    # Less than four routes an expert are too few.
    assert jobs_of(GLM, counts) == (direct, few, *both)
    assert jobs_of(GLM, counts, ("wgmma",)) == (both[1], both[3])
    assert jobs_of(GLM, counts, ("direct", "sorted")) == (direct, few, both[0], both[2])
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
    for job in jobs_of(GLM, COUNTS, ("wgmma",)):
        for group in groups_of(GLM, job, SHARED):
            for candidate in group.all:
                spec = with_candidate(GLM, candidate)
                launches = {
                    launch.key.name: launch.key
                    for launch in select(spec, job.counts[0], (("ids", "i32"),))
                }
                gate_up, down = launches["gate_up_wgmma_kernel"], launches["down_wgmma_kernel"]
                constants, tile = dict(gate_up.constexprs), candidate.tile
                names = ("BLOCK_M", "BLOCK_N", "WARPS", "STAGES")
                assert tuple(constants[n] for n in names) == (tile.rows, *tile.gate_up)
                constants = dict(down.constexprs)
                names = ("BLOCK_N", "SPAN", "WARPS", "STAGES")
                assert tuple(constants[n] for n in names) == tile.down


def test_a_search_of_hoppers_tiles_is_short() -> None:
    jobs = jobs_of(GLM, (256, 512, 1024, 2048, 3072, 8192), ("wgmma",))
    sizes = [len({c for g in groups_of(GLM, job, SHARED) for c in g.all}) for job in jobs]
    assert max(sizes) <= 76
    assert sum(sizes) / len(sizes) <= 60


def test_another_recipes_tile_is_only_a_start_where_it_fits() -> None:
    """That of g128 fits in memory that the scales of g32 pass."""
    (job,) = jobs_of(GLM, (8192,), ("wgmma",))
    now = known_of(GLM, job)
    assert now is not None
    down_bytes = 3 * (256 * 128 + 66 * 256) + 2 * 128 * 256
    assert groups_of(GLM, job, down_bytes)[0].start == now
    other = replace(GLM, w13=StoredWeights(group_size=32), w2=StoredWeights(group_size=32))
    first, second = groups_of(other, job, down_bytes)
    # It is timed, and what the compiler asks for decides.
    assert (first.start, first.gate_up, first.down) == (now, (), ())
    assert second.start.tile.rows == now.tile.rows
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
    (job,) = jobs_of(SMALL, (1,))
    (group,) = groups_of(SMALL, job, SHARED)
    assert {candidate.split_k for candidate in group.all} == {1} == {split_k(SMALL)}


def test_a_table_of_a_candidate_serves_every_count() -> None:
    tile = replace(GLM.tiles.direct, rows=32)
    spec = with_candidate(GLM, Candidate(tile, 2))
    assert spec.table.shapes == (shape_of(GLM),)
    keys = plan(spec, 300, flags={"ids": ["i32"]}).keys
    blocks = [dict(key.constexprs).get("BLOCK_M") for key in keys]
    assert set(blocks) - {None} == {32}
