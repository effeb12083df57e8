"""What `firesteel tune` times: that every candidate fits its layer, and that none is left out."""

from dataclasses import fields, replace

import pytest

from firesteel.cli.tune.candidates import (
    BOTH_FIELDS,
    DOWN_FIELDS,
    GATE_UP_FIELDS,
    Candidate,
    Job,
    groups_of,
    incumbent_of,
    jobs_of,
    join,
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
    "relu2": replace(SMALL, activation=Activation(name="relu2")),
}


def test_each_field_of_a_tile_belongs_to_one_product() -> None:
    """A field that is new must be among the options of one or both, or it would not be tuned."""
    known = (*BOTH_FIELDS, *GATE_UP_FIELDS, *DOWN_FIELDS)
    assert sorted(known) == sorted(field.name for field in fields(Tile))


def test_direct_counts_share_a_tile_and_others_have_their_own() -> None:
    assert jobs_of(GLM, (64, 1, 4, 5, 1)) == (
        Job("direct", (1, 4)),
        Job("sorted", (5,)),
        Job("sorted", (64,)),
    )
    assert jobs_of(GLM, (64,)) == (Job("sorted", (64,)),)
    invariant = replace(GLM, batch_invariant=True)
    assert jobs_of(invariant, (64, 1)) == (Job("batch_invariant", (1, 64)),)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_every_candidate_is_one_that_its_layer_can_take(name: str, batch_invariant: bool) -> None:
    spec = replace(SPECS[name], batch_invariant=batch_invariant)
    for job in jobs_of(spec, COUNTS):
        groups = groups_of(spec, job, SHARED)
        incumbent = incumbent_of(spec, job)
        assert groups[0].start == incumbent
        assert len({group.start.tile.rows for group in groups}) == len(groups)
        for group in groups:
            rows = group.start.tile.rows
            assert group.gate_up
            assert group.down
            for candidate in group.gate_up:
                assert join(candidate, group.start).tile.down == candidate.tile.down
                assert candidate.tile.rows == rows
            for candidate in group.down:
                assert join(group.start, candidate) == candidate
            for candidate in group.all:
                made = with_candidate(spec, candidate)
                # Its table may be written, and is what every call takes.
                assert parse_table(format_table(made.table), name="candidate", where="")
                for count in job.counts:
                    assert incumbent_of(made, replace(job, counts=(count,))) == candidate


def test_candidates_launch_what_they_say() -> None:
    (direct, *_, large) = jobs_of(GLM, COUNTS)
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


def test_rows_are_about_those_of_an_expert() -> None:
    def rows(count: int) -> list[int]:
        (job,) = jobs_of(GLM, (count,))
        return [group.start.tile.rows for group in groups_of(GLM, job, SHARED)]

    # Routes an expert: a quarter, 2, 8, 32, 256.
    assert rows(8) == [8, 16]
    assert rows(64) == [8, 16]
    assert sorted(rows(256)) == [8, 16]
    assert sorted(rows(1024)) == [16, 32, 64]
    assert sorted(rows(8192)) == [64, 128]


def test_less_shared_memory_leaves_fewer_candidates() -> None:
    (job,) = jobs_of(GLM, (8192,))
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
