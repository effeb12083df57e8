"""The routing kernels against their oracles: integers, so equal."""

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from firesteel.moe.reference import count_reference, place_reference
from firesteel.moe.route import count_kernel, place_kernel, scatter_kernel
from tests.moe.kernels import Placed, Routing, routings, run_count, run_on_nothing, run_place

pytestmark = pytest.mark.interpret


def many_experts(num_experts: int, *ids: int) -> Routing:
    return Routing(torch.tensor([ids], dtype=torch.int32), num_experts)


def check_placed(placed: Placed, routing: Routing, rows: int) -> None:
    """Against the oracle; what no route or tile has is as it was."""
    wanted = place_reference(
        routing.topk_ids, routing.num_experts, block_m=rows, expert_map=routing.expert_map
    )
    num_blocks = len(wanted.block_expert)
    assert placed.num_blocks.tolist() == [num_blocks]
    assert placed.expert_offsets.tolist() == wanted.expert_offsets
    for table, part in (
        (placed.route_ids, wanted.route_ids),
        (placed.block_expert, wanted.block_expert),
        (placed.block_row, wanted.block_row),
    ):
        assert table.tolist() == part + [-1] * (len(table) - len(part))


@given(routing=routings(max_tokens=20), block_r=st.sampled_from((1, 16, 128)))
@example(routing=many_experts(3, 0, 2, -1, 2), block_r=2)
@settings(max_examples=60)
def test_counts_are_the_oracle_s(routing: Routing, block_r: int) -> None:
    assume(routing.num_routes)
    counts = run_count(routing, block_r=block_r)
    ids = routing.topk_ids.flatten()
    assert counts.tolist() == [
        count_reference(chunk, routing.num_experts, expert_map=routing.expert_map)
        for chunk in ids.split(block_r)
    ]


@given(
    routing=routings(max_tokens=20),
    rows=st.sampled_from((1, 2, 8, 16, 32, 64)),
    block_r=st.sampled_from((32, 64, 256)),
    has_counts=st.booleans(),
)
@settings(max_examples=80)
def test_places_and_tiles_are_the_oracle_s(
    routing: Routing, rows: int, block_r: int, has_counts: bool
) -> None:
    # Without routes nothing is launched.
    has_counts = has_counts and routing.num_routes > 0
    counts = run_count(routing, block_r=block_r) if has_counts else None
    placed = run_place(routing, rows=rows, counts=counts, block_r=block_r)
    check_placed(placed, routing, rows)


def test_the_example_of_the_module() -> None:
    routing = Routing(torch.tensor([[1, 0, -1, 1, 1]]), 3)
    counts = run_count(routing, block_r=4)
    assert counts.tolist() == [[1, 2, 0], [0, 1, 0]]
    placed = run_place(routing, rows=2)
    assert placed.route_ids.tolist() == [1, 0, 3, 4, -1]
    assert placed.expert_offsets.tolist() == [0, 1, 4, 4]
    assert placed.num_blocks.tolist() == [3]
    assert placed.block_expert[:3].tolist() == [0, 1, 1]
    assert placed.block_row[:3].tolist() == [0, 1, 3]


@pytest.mark.parametrize("has_counts", [True, False])
def test_more_than_1024_experts(has_counts: bool) -> None:
    routing = many_experts(1030, 1029, 0, 1024, 1029, 1030, 7, -1, 1023)
    counts = run_count(routing, block_r=32) if has_counts else None
    if counts is not None:
        assert counts[0].nonzero().flatten().tolist() == [0, 7, 1023, 1024, 1029]
    check_placed(run_place(routing, rows=2, counts=counts, block_r=32), routing, 2)


def test_an_expert_with_more_tiles_than_a_program_writes_at_once() -> None:
    routing = Routing(torch.ones(70, 2, dtype=torch.int64), 3)
    for counts in (None, run_count(routing, block_r=64)):
        check_placed(run_place(routing, rows=1, counts=counts, block_r=64), routing, 1)


def test_tiles_of_no_rows_are_tiles_of_one() -> None:
    """What a launch on empty work passes must not divide by it."""
    routing = Routing(torch.tensor([[1, 0, -1, 1, 1]]), 3)
    check_placed(run_place(routing, rows=0), routing, 1)


@pytest.mark.parametrize("has_counts", [True, False])
@pytest.mark.parametrize("rows", [8, 16, 32, 64, 128])
def test_an_expert_s_last_tile_is_cut_at_each_size(rows: int, has_counts: bool) -> None:
    """Of 130 routes of expert 1, after 3 of expert 0: a tile starts every `rows` places."""
    routing = Routing(torch.tensor([[0] * 3 + [1] * 130]), 2)
    counts = run_count(routing, block_r=64) if has_counts else None
    placed = run_place(routing, rows=rows, counts=counts, block_r=64)
    check_placed(placed, routing, rows)
    starts = list(range(3, 133, rows))
    assert placed.block_row[: len(starts) + 1].tolist() == [0, *starts]


@given(
    sizes=st.lists(st.integers(0, 150), min_size=2, max_size=6),
    rows=st.sampled_from((16, 32, 64, 128)),
    has_counts=st.booleans(),
)
@example(sizes=[3, 128, 0, 40, 70, 100], rows=128, has_counts=True)
@settings(max_examples=30)
def test_long_tiles_come_first(sizes: list[int], rows: int, has_counts: bool) -> None:
    assume(sum(sizes))
    owners = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    routing = Routing(owners.flip(0)[:, None], len(sizes))
    counts = run_count(routing, block_r=256) if has_counts else None
    placed = run_place(routing, rows=rows, counts=counts, block_r=256)
    check_placed(placed, routing, rows)
    num_blocks = int(placed.num_blocks)
    last = [(sizes[expert] - 1) % rows // 32 for expert in placed.block_expert[:num_blocks]]
    assert last == sorted(last, reverse=True)


def test_an_id_that_is_an_expert_s_only_in_its_low_32_bits_is_no_route() -> None:
    routing = Routing(torch.tensor([[2**32, 2**32 + 1, 1]]), 2)
    assert run_count(routing).tolist() == [[0, 1]]
    mapped = Routing(routing.topk_ids, 2, expert_map=torch.tensor([0, 1], dtype=torch.int32))
    assert run_count(mapped).tolist() == [[0, 1]]
    check_placed(run_place(mapped), mapped, 16)


@pytest.mark.parametrize("has_map", [True, False])
def test_empty_work_ends(has_map: bool) -> None:
    common = {"E": 256, "NUM_GLOBAL": 512, "E_BLOCK": 256, "BLOCK_R": 32, "dtypes": {}}
    absent = set() if has_map else {1}
    run_on_nothing(count_kernel, num_pointers=3, num_integers=1, absent=absent, **common)
    run_on_nothing(place_kernel, num_pointers=7, num_integers=2, absent=absent, **common)
    run_on_nothing(scatter_kernel, num_pointers=8, num_integers=2, absent=absent, **common)
