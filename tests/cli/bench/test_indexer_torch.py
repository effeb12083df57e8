"""The benchmark's oracle and baseline, against the library's own oracles, which are plain loops."""

import math

import pytest
import torch
from torch import Tensor

from firesteel.cli.bench import indexer_torch
from firesteel.cli.bench.indexer_cases import Case
from firesteel.cli.bench.indexer_checks import DOT_ROUNDING, score_bound
from firesteel.cli.bench.indexer_inputs import Inputs, exact_inputs, random_inputs
from firesteel.cli.bench.indexer_torch import (
    baseline_bytes,
    blocks,
    exact_selection,
    select_in_torch,
)
from firesteel.indexer.reference import score_bound_reference, top_k_reference
from tests.cli.bench.indexer_fake import CPU, oracle_scores

CASES = [
    Case(name="decode", requests=9, rows=2, heads=8, context=700, top_k=512),
    Case(name="one", requests=1, rows=1, heads=16, context=1100, top_k=512),
    Case(name="prefill", mode="prefill", requests=1, rows=40, heads=8, context=700, top_k=512),
    Case(name="bf16", requests=2, rows=2, heads=8, context=700, top_k=512, cache_dtype="bf16"),
    Case(
        **{"name": "fp16", "mode": "prefill", "requests": 1, "rows": 9, "heads": 8},
        **{"context": 600, "top_k": 512, "cache_dtype": "fp16"},
    ),
]
BY_NAME = {"argvalues": CASES, "ids": [case.name for case in CASES]}


def inputs_of(case: Case, kind: str) -> Inputs:
    if kind == "random":
        return random_inputs(case, CPU, 1)[0]
    return exact_inputs(case, CPU, is_ragged=kind == "ragged")


@pytest.fixture(autouse=True)
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few at a time that every case has several blocks and parts."""
    monkeypatch.setattr(indexer_torch, "_ORACLE_PRODUCTS", 4000)
    monkeypatch.setattr(indexer_torch, "_BASELINE_PRODUCTS", 30_000)
    monkeypatch.setattr(indexer_torch, "_BLOCK_ROWS", 7)


@pytest.mark.parametrize("case", **BY_NAME)
@pytest.mark.parametrize("kind", ["random", "exact", "ragged"])
def test_scores_are_the_library_s_oracle_s(case: Case, kind: str) -> None:
    inputs = inputs_of(case, kind)
    wanted = oracle_scores(inputs)
    seen = 0
    for block in blocks(inputs):
        scores = block.scores().scores
        if kind != "random":
            assert torch.equal(block.scores(is_exact=True).scores, scores)
        for row in range(len(scores)):
            assert block.rows[row] == seen
            start, end = int(block.starts[row]), int(block.ends[row])
            own = wanted[seen].nan_to_num(nan=-math.inf, neginf=-math.inf)
            assert len(own) == max(0, end - start)
            assert torch.allclose(scores[row, start:end], own, rtol=1e-12, atol=1e-12)
            assert (scores[row, :start] == -math.inf).all()
            assert (scores[row, max(start, end) :] == -math.inf).all()
            seen += 1
    assert seen == len(wanted) == case.requests * case.rows


def test_of_a_long_prefill_rows_are_spread_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(name="long", mode="prefill", requests=1, rows=50, heads=8, context=600, top_k=512)
    inputs = random_inputs(case, CPU, 1)[0]
    # Room for 20 rows: every third.
    each = 8 * 128 * 600
    monkeypatch.setattr(indexer_torch, "_MOST_WIDE", 20.5 * each)
    monkeypatch.setattr(indexer_torch, "_MOST_EXACT", 50 * each)
    rows = torch.cat([block.rows for block in blocks(inputs)])
    assert rows.tolist() == list(range(1, 50, 3))
    assert sum(len(block.rows) for block in blocks(inputs, is_exact=True)) == 50
    for block in blocks(inputs):
        assert torch.equal(block.q.float(), inputs["q"].float()[block.rows])
        assert torch.equal(block.ends, inputs["k_end"][block.rows].long())


@pytest.mark.parametrize("case", **BY_NAME)
def test_the_bound_is_the_library_s(case: Case) -> None:
    for block in blocks(random_inputs(case, CPU, 1)[0]):
        magnitudes = block.scores(has_magnitudes=True).magnitudes
        assert magnitudes is not None
        for row in range(min(2, len(magnitudes))):
            given = (block.q[row], block.w[row], block.values, block.scales)
            wanted = score_bound_reference(*given, dot_rounding=DOT_ROUNDING[case.cache_dtype])
            found = score_bound(magnitudes[row], case.heads, case.cache_dtype)
            assert torch.allclose(found, wanted, rtol=1e-12)


@pytest.mark.parametrize("case", **BY_NAME)
@pytest.mark.parametrize("kind", ["exact", "ragged"])
def test_exact_selections_are_the_library_s(case: Case, kind: str) -> None:
    inputs = inputs_of(case, kind)
    wanted = [top_k_reference(scores.tolist(), 512) for scores in oracle_scores(inputs)]
    found: list[Tensor] = []
    for block in blocks(inputs):
        found.append(exact_selection(block.scores().scores, block.starts, 512))
    assert torch.cat(found).tolist() == wanted


def test_a_selection_by_hand() -> None:
    hole = -math.inf
    scores = torch.tensor(
        [[1.0, 2.0, 2.0, hole, 2.0, -0.0, 0.0], [hole, hole, hole, 3.5, -8.0, hole, hole]]
    ).double()
    starts = torch.tensor([0, 2])
    assert exact_selection(scores, starts, 3).tolist() == [[1, 2, 4], [1, 2, -1]]
    assert exact_selection(scores, starts, 5).tolist() == [[0, 1, 2, 4, 5], [1, 2, -1, -1, -1]]
    # Of fewer keys than are wanted.
    assert exact_selection(scores, starts, 9)[0].tolist() == [0, 1, 2, 4, 5, 6, -1, -1, -1]


def test_scores_that_are_no_multiples_are_not_judged() -> None:
    with pytest.raises(AssertionError, match="promises"):
        exact_selection(torch.tensor([[0.3]]).double(), torch.tensor([0]), 1)


@pytest.mark.parametrize("case", **BY_NAME)
def test_the_baseline_selects_the_oracle_s_keys(case: Case) -> None:
    """In fp32 it may differ from float64 in a key or two near the k-th."""
    inputs = random_inputs(case, CPU, 1)[0]
    found = select_in_torch(inputs, 512)
    assert found.shape == (case.requests * case.rows, 512)
    for row, scores in enumerate(oracle_scores(inputs)):
        wanted = set(top_k_reference(scores.tolist(), 512))
        assert len(wanted & set(found[row].tolist())) >= 510


def test_the_baseline_s_memory_by_hand() -> None:
    """Twice: products in fp32, keys as bytes and in bf16, 24 bytes a score of torch.topk."""
    decode = random_inputs(CASES[0], CPU, 1)[0]
    # 11 pages; a request has 2 * 8 * 704 products, so two go at a time.
    assert baseline_bytes(decode) == 2 * (4 * 2 * 11264 + 384 * 2 * 704 + 24 * 4 * 704)
    prefill = random_inputs(CASES[2], CPU, 1)[0]
    # A row has 8 * 700 products, so five go at a time; all have the same keys.
    assert baseline_bytes(prefill) == 2 * (4 * 5 * 5600 + 384 * 700 + 24 * 5 * 700)
