import math
from dataclasses import replace

import pytest
import torch

from firesteel.cli.bench.indexer_cases import CASES, Case
from firesteel.cli.bench.indexer_inputs import (
    COLD_BYTES,
    calls_to_rotate,
    exact_inputs,
    poisoned_outputs,
    random_inputs,
)
from firesteel.cli.bench.indexer_torch import blocks
from firesteel.indexer.pages import PAGE_BYTES, page_views
from firesteel.launch.key import DTYPES
from tests.cli.bench.indexer_fake import CPU

DECODE = Case(name="decode", requests=9, rows=2, heads=8, context=700, top_k=512)
PREFILL = Case(name="prefill", mode="prefill", requests=1, rows=40, heads=8, context=700, top_k=512)


HALVES = [
    replace(DECODE, name="bf16", requests=2, cache_dtype="bf16"),
    replace(PREFILL, name="fp16", rows=4, cache_dtype="fp16"),
]


@pytest.mark.parametrize("case", [DECODE, PREFILL, *HALVES], ids=lambda case: case.name)
def test_inputs_are_of_the_operands_shapes(case: Case) -> None:
    made = [
        *random_inputs(case, CPU, 2),
        *(exact_inputs(case, CPU, is_ragged=is_ragged) for is_ragged in (False, True)),
    ]
    operands = case.spec(has_scores=True).operands(())
    outputs = poisoned_outputs(case.spec(has_scores=True), case.count, CPU)
    for inputs in made:
        tensors = {**inputs, **outputs}
        assert set(tensors) == {operand.name for operand in operands}
        for operand in operands:
            tensor = tensors[operand.name]
            assert tensor.dtype == DTYPES[operand.dtype]
            assert tensor.is_contiguous()
            if not operand.is_any_size:
                assert tuple(tensor.shape) == operand.shape_for(case.count)


def test_calls_share_no_page_and_lens_are_the_context() -> None:
    first, second = random_inputs(DECODE, CPU, 2)
    assert first["cache"] is second["cache"]
    pages = torch.cat((first["page_table"], second["page_table"])).flatten()
    assert pages.sort().values.tolist() == list(range(2 * 9 * 11))
    assert (first["seq_lens"] == 700).all()
    values, scales = page_views(first["cache"], PAGE_BYTES)
    assert len(values) == 2 * 9 * 11
    assert 0.9 < values.float().std() < 1.1
    assert (scales >= 0.1).all()


def test_prefill_s_rows_are_the_context_s_last() -> None:
    first, second = random_inputs(PREFILL, CPU, 2)
    assert first["k_end"].tolist() == list(range(661, 701))
    assert not first["k_start"].any()
    assert not torch.equal(first["keys"].float(), second["keys"].float())


@pytest.mark.parametrize("name", list(CASES))
def test_what_is_rotated_leaves_the_cache(name: str) -> None:
    case = CASES[name]
    calls = calls_to_rotate(case)
    # What comes between a call's keys and their next use: more than the 50 MB of L2.
    rows = case.requests * case.rows
    each = case.key_bytes + rows * (case.heads * 128 + 2048 * 4)
    assert (calls - 1) * each > COLD_BYTES / 3
    assert 2 <= calls <= 160
    # Of an H200's 139 GiB.
    assert calls * case.key_bytes < 4e9


@pytest.mark.parametrize("case", [DECODE, PREFILL], ids=lambda case: case.name)
@pytest.mark.parametrize("is_ragged", [False, True])
def test_exact_inputs_round_nowhere(case: Case, is_ragged: bool) -> None:
    """Every number between q and a score is a multiple of 1/8 below 2^18: in fp32, none is lost."""
    for block in blocks(exact_inputs(case, CPU, is_ragged=is_ragged)):
        q, values = block.q.double(), block.values.double()
        assert torch.equal(q, q.round())
        assert torch.equal(values, values.round())
        # The sum of the magnitudes too, so that no order of additions leaves 13 bits.
        assert float(torch.einsum("rhd,td->rht", q.abs(), values.abs()).max()) <= 512
        assert torch.equal(block.w * 2, (block.w * 2).round())
        found = block.scores(has_magnitudes=True)
        there = found.scores > -math.inf
        assert found.magnitudes is not None
        assert (found.magnitudes[there] < 2**18).all()
        assert torch.equal(found.scores[there].float().double(), found.scores[there])
        assert torch.equal((found.scores[there] * 8).round(), found.scores[there] * 8)


def test_exact_inputs_have_ties_and_holes_of_every_kind() -> None:
    whole = exact_inputs(DECODE, CPU, is_ragged=False)
    assert (whole["seq_lens"] == 700).all()
    assert 0 < (whole["page_table"] == -1).sum() < 30
    for inputs in (whole, exact_inputs(PREFILL, CPU, is_ragged=False)):
        for block in blocks(inputs):
            is_nan = block.scales.isnan().double().mean()
            assert 0 < is_nan < 0.5
            scores = block.scores().scores[0]
            there = scores[scores > -math.inf]
            assert len(there.unique()) < 0.7 * len(there)
    ragged = exact_inputs(DECODE, CPU, is_ragged=True)
    assert ragged["seq_lens"].tolist() == [513, 512, 511, 0, -3, 1, 357, 699, 513]
    # Past what is live there is no page at all.
    assert (ragged["page_table"][3] == 2**31 - 1).all()
    assert (ragged["page_table"][5, 1:] == 2**31 - 1).all()
    ranges = exact_inputs(PREFILL, CPU, is_ragged=True)
    lengths = ranges["k_end"] - ranges["k_start"]
    assert (lengths < 0).any() or (lengths < 100).any()
    assert (ranges["k_end"] > 700).any()
    assert ranges["k_start"].unique().numel() > 20
