"""Each kind of wrong selection is found, and right ones are let pass."""

import math

import pytest
import torch
from torch import Tensor

from firesteel.cli.bench.indexer_checks import (
    DOT_ROUNDING,
    bound_fault,
    difference,
    layout_fault,
    score_bound,
    score_fault,
)

K = 4
HOLE = -math.inf


def rows(*values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def selection(*values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# The second row's positions start at key 1.
STARTS = torch.tensor([0, 1])
SCORES = rows([5, 1, 4, 3, 2, 1], [HOLE, 9, HOLE, 7, HOLE, HOLE])
RIGHT = selection([0, 2, 3, 4], [0, 2, -1, -1])
BOUND = torch.full_like(SCORES, 0.25)


def test_a_right_selection_passes() -> None:
    assert difference(RIGHT, RIGHT.clone()) is None
    assert layout_fault(RIGHT, torch.tensor([6, 3])) is None
    assert bound_fault(RIGHT, SCORES, BOUND, STARTS) is None


def test_a_difference_is_named_where_it_comes_first() -> None:
    found = RIGHT.clone()
    found[1, 1:3] = 8
    assert difference(found, RIGHT) == "row 1, place 1: got 8, must be 2"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([0, 2, 3, -2], "row 7, place 3: got -2, neither a position nor -1"),
        ([0, 2, 3, 6], "row 7, place 3: got 6, past the row's keys"),
        ([0, -1, 2, 3], "row 7, place 2: got 2, a position after -1"),
        ([-1, 0, -1, -1], "row 7, place 1: got 0, a position after -1"),
        ([0, 3, 2, 4], "row 7, place 2: got 2, not above the one before"),
        ([0, 2, 2, 3], "row 7, place 2: got 2, not above the one before"),
        ([0, -77, -77, -77], "row 7, place 1: got -77, neither"),
    ],
)
def test_a_layout_that_is_wrong(wrong: list[int], message: str) -> None:
    found = layout_fault(
        selection(wrong, [0, 2, -1, -1]), torch.tensor([6, 3]), torch.tensor([7, 9])
    )
    assert found is not None
    assert found.startswith(message)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        # One of score 1 for one of 2, which differ by more than twice the bound.
        ([[0, 1, 2, 3], [0, 2, -1, -1]], "row 3: selects key 1, of score 1 within 0.25"),
        ([[1, 2, 3, 4], [0, 2, -1, -1]], "row 3: selects key 1, of score 1 within 0.25"),
        ([[0, 2, 3, -1], [0, 2, -1, -1]], "row 3: selects 3 keys, must be 4"),
        ([[0, 2, 3, 4], [0, -1, -1, -1]], "row 4: selects 1 keys, must be 2"),
        ([[0, 2, 3, 4], [0, 1, 2, -1]], "row 4: selects key 2, which has no score"),
        ([[0, 2, 3, 4], [-1, -1, -1, -1]], "row 4: selects 0 keys, must be 2"),
    ],
)
def test_a_key_that_must_not_be_selected(wrong: list[list[int]], message: str) -> None:
    found = bound_fault(selection(*wrong), SCORES, BOUND, STARTS, rows=torch.tensor([3, 4]))
    assert found is not None
    assert found.startswith(message)


def test_a_key_that_must_be_selected_but_for_another_bound() -> None:
    """A key of a wide bound may be selected, yet not in place of one that is surely better."""
    bound = BOUND.clone()
    bound[0, 1] = 10
    found = bound_fault(selection([1, 2, 3, 4], [0, 2, -1, -1]), SCORES, bound, STARTS)
    assert found is not None
    # Key 0, of score 5, lies above what the fourth can be: 4.25 at most.
    assert found.startswith("row 0: leaves out key 0, of score 5 within 0.25")
    assert bound_fault(selection([0, 1, 2, 3], [0, 2, -1, -1]), SCORES, bound, STARTS) is None


def test_within_the_bound_either_key_passes() -> None:
    wide = torch.full_like(SCORES, 0.5)
    for chosen in ([0, 1, 2, 3], [0, 2, 3, 4], [0, 2, 3, 5]):
        assert bound_fault(selection(chosen, [0, 2, -1, -1]), SCORES, wide, STARTS) is None
    for chosen in ([0, 1, 3, 5], [1, 3, 4, 5]):
        assert bound_fault(selection(chosen, [0, 2, -1, -1]), SCORES, wide, STARTS) is not None


def test_any_selection_of_scores_within_the_bound_passes() -> None:
    """And one of which a key is exchanged for one a few bounds lower does not."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(20, 300, generator=generator, dtype=torch.float64)
    bound = torch.rand(20, 300, generator=generator, dtype=torch.float64) * 0.02
    starts = torch.zeros(20, dtype=torch.int64)
    for _ in range(20):
        noise = torch.rand(scores.shape, generator=generator, dtype=torch.float64) * 2 - 1
        chosen = (scores + noise * bound).topk(64).indices.sort(dim=1).values
        assert bound_fault(chosen.int(), scores, bound, starts) is None
    order = scores.argsort(dim=1, descending=True)
    for row in range(20):
        chosen = order[:, :64].clone()
        chosen[row, 60] = order[row, 85]
        fault = bound_fault(chosen.sort(dim=1).values.int(), scores, bound, starts)
        assert fault is not None
        assert fault.startswith(f"row {row}: selects key {int(order[row, 85])},")


def test_fewer_keys_than_are_wanted_must_all_be_selected() -> None:
    scores, bound = rows([3, HOLE, 1]), torch.ones(1, 3).double()
    start = torch.tensor([0])
    assert bound_fault(selection([0, 2, -1, -1]), scores, bound, start) is None
    assert bound_fault(selection([0, -1, -1, -1]), scores, bound, start) is not None


def test_selected_scores_have_the_largest_error_in_parts_of_the_magnitudes() -> None:
    magnitudes = torch.full_like(SCORES, 16.0)
    selected = torch.tensor([[5.0, 4.0, 3.0, 2.0], [9.0, 7.0, HOLE, HOLE]])
    given = (RIGHT, SCORES, magnitudes, STARTS)
    assert score_fault(selected, *given, num_heads=8) == (None, 0.0)
    selected[1, 1] += 2.0**-8
    assert score_fault(selected, *given, num_heads=8) == (None, 2.0**-12)
    selected[0, 3] += 0.5
    fault, error = score_fault(selected, *given, num_heads=8, rows=torch.tensor([3, 4]))
    assert fault == ("row 3, place 3: got a score of 2.5, off by 0.0312 of its terms' magnitudes")
    assert error == 2.0**-5


def test_a_sum_of_zeros_has_no_error_but_none() -> None:
    magnitudes = torch.zeros_like(SCORES)
    selected = torch.tensor([[5.0, 4.0, 3.0, 2.0], [9.0, 7.0, HOLE, HOLE]])
    assert score_fault(selected, RIGHT, SCORES, magnitudes, STARTS, num_heads=8) == (None, 0.0)
    selected[0, 0] = 5.5
    fault, error = score_fault(selected, RIGHT, SCORES, magnitudes, STARTS, num_heads=8)
    assert fault is not None
    assert error == math.inf


@pytest.mark.parametrize(
    ("row", "place", "value", "words"),
    [
        (0, 1, HOLE, "must be a number"),
        (0, 2, math.nan, "must be a number"),
        (1, 2, 0.0, "must be -inf"),
        (1, 3, math.nan, "must be -inf"),
    ],
)
def test_a_score_where_none_is_and_none_where_one_is(
    row: int, place: int, value: float, words: str
) -> None:
    selected = torch.tensor([[5.0, 4.0, 3.0, 2.0], [9.0, 7.0, HOLE, HOLE]])
    selected[row, place] = value
    given = (RIGHT, SCORES, torch.ones_like(SCORES), STARTS)
    fault, _ = score_fault(selected, *given, num_heads=8)
    assert fault is not None
    assert fault.startswith(f"row {row}, place {place}: got a score of ")
    assert fault.endswith(words)


def test_the_bound_has_room_for_the_matrix_unit_and_for_fp32() -> None:
    assert float(score_bound(torch.tensor(1.0).double(), 64)) == pytest.approx(
        1.01 * (DOT_ROUNDING["e4m3"] + 65 * 2.0**-24)
    )
