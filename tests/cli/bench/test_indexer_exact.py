"""A right operation is found exact; one that is wrong in any way is not, and it is said how."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from firesteel.cli.bench import indexer_exact
from firesteel.cli.bench.indexer_cases import Case
from firesteel.cli.bench.indexer_exact import Found, verify
from firesteel.cli.bench.indexer_inputs import Inputs, random_inputs
from firesteel.cli.bench.indexer_torch import select_in_torch
from firesteel.indexer.pages import PAGE_BYTES, page_views
from firesteel.indexer.reference import top_k_reference
from tests.cli.bench.indexer_fake import CPU, FakeOperation, Spoil, oracle_scores

CASES = [
    Case(name="decode", requests=2, rows=2, heads=8, context=600, top_k=512),
    Case(name="one", requests=1, rows=1, heads=8, context=600, top_k=512),
    Case(name="prefill", mode="prefill", requests=1, rows=7, heads=8, context=600, top_k=512),
    Case(name="prefill of a row", mode="prefill", requests=1, rows=1, context=700, top_k=512),
]
HALVES = Case(name="bf16", requests=2, rows=1, heads=8, context=600, top_k=512, cache_dtype="bf16")
BY_NAME = {"argvalues": CASES, "ids": [case.name for case in CASES]}
DECODE = CASES[0]
Outputs = Mapping[str, Tensor]


@pytest.fixture(autouse=True)
def no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has no graphs: a replay is a run."""

    def captured(functions: Sequence[Callable[[], object]]) -> SimpleNamespace:
        (function,) = functions
        function()
        return SimpleNamespace(replay=function)

    monkeypatch.setattr(indexer_exact, "captured", captured)


def check(case: Case, spoil: Spoil | None = None, baseline: Tensor | None = None) -> Found:
    ready = partial(FakeOperation, spoil=spoil)
    operation = ready(case.spec(), case.count)
    return verify(case, operation, ready, random_inputs(case, CPU, 2), baseline=baseline)


@pytest.mark.parametrize("case", [*CASES, HALVES], ids=[*BY_NAME["ids"], "bf16"])
def test_a_right_operation_is_exact(case: Case) -> None:
    selected = select_in_torch(random_inputs(case, CPU, 2)[0], 512).sort(dim=1).values
    found = check(case, baseline=selected)
    assert found.differs is None
    assert found.baseline_fault is None
    # Scores are rounded to fp32 once, and so are off by half a unit of the last place at most.
    assert found.score_error is not None
    assert 2.0**-30 < found.score_error < 2.0**-23
    assert found.tied_rows > 0


def is_exact(inputs: Inputs) -> bool:
    """Whether inputs are those that have NaN scales."""
    if "key_scales" in inputs:
        return bool(inputs["key_scales"].isnan().any())
    return bool(page_views(inputs["cache"], PAGE_BYTES)[1].isnan().any())


def first_rows(outputs: Outputs) -> Tensor:
    return outputs["indices"].view(-1, outputs["indices"].shape[-1])


def swapped(_: FakeOperation, __: int, inputs: Inputs, outputs: Outputs) -> None:
    rows = first_rows(outputs)
    rows[0, :2] = rows[0, :2].flip(0)


def dropped(_: FakeOperation, __: int, inputs: Inputs, outputs: Outputs) -> None:
    rows = first_rows(outputs)
    last = int((rows[0] >= 0).sum()) - 1
    if last >= 0:
        rows[0, last] = -1


def no_tail(_: FakeOperation, __: int, inputs: Inputs, outputs: Outputs) -> None:
    rows = first_rows(outputs)
    rows[rows < 0] = 0


def with_hole(_: FakeOperation, __: int, inputs: Inputs, outputs: Outputs) -> None:
    """The first position that was left out instead of the one after it."""
    row = first_rows(outputs)[0]
    jump = (row[1:] - row[:-1] > 1).nonzero()
    if len(jump):
        row[int(jump[0]) + 1] = row[int(jump[0])] + 1


@pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=["decode", "prefill"])
@pytest.mark.parametrize("spoil", [swapped, dropped, no_tail, with_hole])
def test_set_order_holes_and_tail_of_exact_inputs(case: Case, spoil: Spoil) -> None:
    found = check(case, spoil)
    assert found.differs is not None
    assert found.differs.split(":")[0] in ("exact inputs", "ragged exact inputs")
    assert found.score_error is None


def test_a_tie_that_goes_to_the_higher_position() -> None:
    """As the oracle selects of positions that are counted from the end."""

    def spoil(_: FakeOperation, __: int, inputs: Inputs, outputs: Outputs) -> None:
        for row, scores in enumerate(oracle_scores(inputs)):
            count, last = outputs["indices"].shape[-1], len(scores) - 1
            best = [last - t for t in top_k_reference(scores.flip(0).tolist(), count) if t >= 0]
            first_rows(outputs)[row] = torch.tensor(sorted(best) + [-1] * (count - len(best)))

    found = check(DECODE, spoil)
    assert found.differs is not None
    assert found.differs.startswith("exact inputs: row ")


def only_random(spoil: Spoil) -> Spoil:
    def only(operation: FakeOperation, run: int, inputs: Inputs, outputs: Outputs) -> None:
        if not is_exact(inputs):
            spoil(operation, run, inputs, outputs)

    return only


def other_each_run(_: FakeOperation, run: int, __: Inputs, outputs: Outputs) -> None:
    """Two runs on exact inputs, then the first on random ones."""
    if run == 3:
        first_rows(outputs)[1, 5] += 1


def other_in_a_graph(_: FakeOperation, run: int, __: Inputs, outputs: Outputs) -> None:
    if run == 5:
        first_rows(outputs)[1, 5] += 1


def other_in_another_batch(operation: FakeOperation, _: int, __: Inputs, outputs: Outputs) -> None:
    if operation.count != DECODE.count:
        first_rows(outputs)[1, 5] += 1


def other_with_scores(operation: FakeOperation, _: int, __: Inputs, outputs: Outputs) -> None:
    if operation.spec.has_scores:
        first_rows(outputs)[1, 5] += 1


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (other_each_run, "a second run: row 1, place 5: got "),
        (other_in_a_graph, "the replay of a graph: row 1, place 5: got "),
        (other_in_another_batch, "a call of another number of requests or rows: row 1, place 5"),
        (other_with_scores, "with scores beside: row 1, place 5: got "),
    ],
)
def test_bits_that_are_not_the_same(spoil: Spoil, words: str) -> None:
    found = check(DECODE, only_random(spoil))
    assert found.differs is not None
    assert found.differs.startswith(words)


def shifted(_: FakeOperation, __: int, inputs: Inputs, outputs: Outputs) -> None:
    """The worst keys of the last row, in order: a set that only scores can tell is wrong."""
    worst = oracle_scores(inputs)[-1].sort().indices[:512].sort().values
    first_rows(outputs)[-1] = worst


def unordered(_: FakeOperation, __: int, inputs: Inputs, outputs: Outputs) -> None:
    rows = first_rows(outputs)
    rows[-1] = rows[-1].flip(0)


@pytest.mark.parametrize(
    ("case", "counts"),
    [(CASES[0], {2, 1}), (CASES[1], {1, 2}), (CASES[2], {7, 2}), (CASES[3], {1, 2})],
    ids=[case.name for case in CASES],
)
def test_another_batch_is_of_another_count(case: Case, counts: set[int]) -> None:
    seen: set[int] = set()

    def note(operation: FakeOperation, _: int, inputs: Inputs, __: Outputs) -> None:
        assert len(inputs["w"]) == operation.count
        seen.add(operation.count)

    assert check(case, note).differs is None
    assert seen == counts


@pytest.mark.parametrize(
    ("spoil", "words"),
    [(shifted, "row 3: selects key "), (unordered, "row 3, place 1: got ")],
)
def test_random_inputs_of_which_another_set_is_selected(spoil: Spoil, words: str) -> None:
    found = check(DECODE, only_random(spoil))
    assert found.differs is not None
    assert found.differs.startswith(words)


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (3, 1000.5, "off by"),
        (4, math.nan, "must be a number"),
        (511, -math.inf, "must be a number"),
    ],
)
def test_scores_beside_that_are_wrong(place: int, value: float, words: str) -> None:
    def spoil(_: FakeOperation, __: int, ___: Inputs, outputs: Outputs) -> None:
        if "selected_scores" in outputs:
            outputs["selected_scores"].view(-1, 512)[2, place] = value

    found = check(DECODE, spoil)
    assert found.differs is not None
    assert found.differs.startswith(f"row 2, place {place}: got a score of {value}")
    assert words in found.differs


def test_a_baseline_that_is_wrong_is_told_and_is_not_the_indexer_s_fault() -> None:
    selected = select_in_torch(random_inputs(DECODE, CPU, 2)[0], 512).sort(dim=1).values
    selected[2] = torch.arange(512)
    found = check(DECODE, baseline=selected)
    assert found.differs is None
    assert found.baseline_fault is not None
    assert found.baseline_fault.startswith("row 2: ")
