"""The oracles themselves: worked examples, and other ways to the same numbers."""

import math

import pytest
import torch

from firesteel.indexer.reference import (
    decode_scores_reference,
    live_length,
    quantize_reference,
    range_scores_reference,
    top_k_reference,
)
from tests.indexer.kernels import E4M3


def test_scales_and_values_of_a_worked_example() -> None:
    keys = torch.zeros(4, 128)
    keys[0, :3] = torch.tensor([-896.0, 1.0, 448.0])
    keys[1, 0] = 448 * 1.25
    keys[3, 0] = 1e-42
    values, scales = quantize_reference(keys)
    assert scales.tolist() == [2.0, 1.25, 1.0, 2.0**-126]
    assert values[0, :3].tolist() == [-448.0, 0.5, 224.0]
    assert values[1, 0] == 448
    assert not values[2].float().any()
    values, scales = quantize_reference(keys, power_of_two=True)
    assert scales.tolist() == [2.0, 2.0, 1.0, 2.0**-126]
    assert values[1, 0] == 288.0  # 280, a tie between 272 and 288, goes to the even mantissa


def test_a_nan_stays_one_and_counts_not_in_the_scale() -> None:
    keys = torch.full((1, 128), 448.0)
    keys[0, 5] = math.nan
    values, scales = quantize_reference(keys)
    assert scales.tolist() == [1.0]
    assert values.float().isnan().nonzero().tolist() == [[0, 5]]


@pytest.mark.parametrize(
    ("scores", "wanted"),
    [
        ([3.0, 1.0, 2.0], [0, 2]),
        ([1.0, 1.0, 1.0], [0, 1]),
        ([0.0, -0.0, 0.0], [0, 1]),
        ([-0.0, 0.0, 1.0], [0, 2]),
        ([math.nan, -math.inf, -3.4028234663852886e38], [2, -1]),
        ([math.inf, math.nan, 1.0], [0, 2]),
        ([], [-1, -1]),
    ],
)
def test_selection_of_a_worked_example(scores: list[float], wanted: list[int]) -> None:
    assert top_k_reference(scores, 2) == wanted


def test_selection_of_distinct_scores_is_torch_s() -> None:
    scores = torch.randperm(500, generator=torch.Generator().manual_seed(3)).float()
    wanted = scores.topk(70).indices.sort().values
    assert top_k_reference(scores.tolist(), 70) == wanted.tolist()


def test_lengths_are_clamped() -> None:
    assert [live_length(10, row, 3, 64) for row in range(3)] == [8, 9, 10]
    assert [live_length(1, row, 3, 64) for row in range(3)] == [0, 0, 1]
    assert [live_length(-(2**31), row, 8, 64) for row in range(8)] == [0] * 8
    assert [live_length(65, row, 3, 64) for row in range(3)] == [63, 64, 64]


def test_scores_of_a_worked_example() -> None:
    q = torch.zeros(1, 1, 2, 128).to(E4M3)
    q[0, 0, 0, 0], q[0, 0, 1, 1] = 1.0, 2.0
    keys = torch.zeros(1, 64, 128).to(E4M3)
    keys[0, 0, 0], keys[0, 0, 1] = 3.0, 1.0
    keys[0, 1, 0] = -1.0
    scales = torch.ones(1, 64) / 2
    w = torch.tensor([[[10.0, -1.0]]])
    table = torch.tensor([[0, -1]], dtype=torch.int32)
    (((scores),),) = decode_scores_reference(q, w, keys, scales, table, torch.tensor([66]))
    # 10 * relu(3) - relu(2), and 10 * relu(-1), each times a half.
    assert scores[:2].tolist() == [14.0, 0.0]
    assert scores[64:].tolist() == [-math.inf] * 2
    found = range_scores_reference(q[0], w[0], keys[0], scales[0], [(-5, 2)])
    assert found[0].tolist() == [14.0, 0.0]
