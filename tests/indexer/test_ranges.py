"""Prefill: whatever is sliced, split or ragged, the oracle's selection."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from firesteel.indexer.range_scores import range_scores_kernel
from firesteel.indexer.range_select import range_select_kernel
from firesteel.indexer.reference import (
    range_scores_reference,
    top_k_reference,
)
from tests.indexer.kernels import (
    Outputs,
    key_scales,
    numbers,
    weights,
    with_holes,
)
from tests.indexer.ranges import (
    Prefill,
    RangeScores,
    check_ranges,
    paged_case,
    paged_scores,
    run_ranges,
)
from tests.moe.kernels import launch, run_on_nothing

pytestmark = pytest.mark.interpret


def check(found: Outputs, wanted: list[Tensor], tables: list[list[int]] | None) -> None:
    """Against float64 scores, which those of exact inputs equal."""
    top_k = found.indices.shape[1]
    for row, scores in enumerate(wanted):
        expected = top_k_reference(scores.tolist(), top_k)
        assert found.indices[row].tolist() == expected
        there = [t for t in expected if t >= 0]
        rest = top_k - len(there)
        assert found.scores[row].tolist() == [float(scores[t]) for t in there] + [-math.inf] * rest
        if tables is not None:
            slots = [64 * tables[row][t // 64] + t % 64 for t in there]
            assert found.slots[row].tolist() == slots + [-1] * rest


def prefill_case(
    num_rows: int, num_keys: int, *, heads: int = 8, seed: int = 0, cache_dtype: str = "e4m3"
) -> Prefill:
    """Rows with ranges of every kind over contiguous keys."""
    generator = torch.Generator().manual_seed(seed)
    kind = {"generator": generator, "is_exact": True}
    types = {**kind, "cache_dtype": cache_dtype}
    keys, scales = numbers(num_keys, 128, **types), None
    if cache_dtype == "e4m3":
        scales = key_scales(num_keys, **kind)
    else:
        keys = with_holes(keys, generator)
    start = torch.randint(-5, num_keys, (num_rows,), generator=generator)
    length = torch.randint(-3, num_keys, (num_rows,), generator=generator)
    end = torch.where(torch.arange(num_rows) % 5 == 4, 2**31 - 1, start + length)
    return Prefill(
        q=numbers(num_rows, heads, 128, **types),
        w=weights(num_rows, heads, **kind),
        keys=keys,
        scales=scales,
        k_start=start.int(),
        k_end=end.int(),
    )


@pytest.mark.parametrize(
    ("num_rows", "row_block", "span", "group", "size", "cache_dtype"),
    [(11, 4, 64, 64, 64, "e4m3"), (5, 8, 128, 128, 32, "fp16"), (3, 2, 256, 128, 256, "e4m3")],
)
def test_prefill_of_contiguous_keys(
    num_rows: int, row_block: int, span: int, group: int, size: int, cache_dtype: str
) -> None:
    case = prefill_case(num_rows, 250, seed=num_rows, cache_dtype=cache_dtype)
    tiles = {"row_block": row_block, "span": span, "group": group}
    found = run_ranges(case, **tiles, size=size)
    ranges = list(zip(case.k_start.tolist(), case.k_end.tolist(), strict=True))
    check(found, range_scores_reference(case.q, case.w, case.keys, case.scales, ranges), None)


@pytest.mark.parametrize(("row_block", "span", "group"), [(4, 64, 64), (8, 384, 192)])
def test_prefill_of_pages(row_block: int, span: int, group: int) -> None:
    """Blocks of rows of several requests, and rows of none."""
    requests = [0, 0, 0, 1, 1, 2, 2, 2, 2, 0, -1]
    ends = [1, 70, 256, 0, 130, -1, 64, 65, 2**31 - 1, 255, 200]
    case = paged_case(4, requests, ends)
    found = run_ranges(case, row_block=row_block, span=span, group=group)
    tables = [case.pages.page_table[max(request, 0)].tolist() for request in requests]
    check(found, paged_scores(case), tables)


def test_scores_and_maxima_of_a_range() -> None:
    """Several groups of several pages of a program, and a last one that has fewer keys."""
    case = prefill_case(5, 600, seed=3)
    tile = {"ROWS": 4, "ROW_BLOCK": 4, "SPLIT": 2, "STAGES": 2}
    found = RangeScores(range_scores_kernel, 4, tile, launch).run(case, span=512, group=256)
    wanted = range_scores_reference(case.q, case.w, case.keys, case.scales, case.ranges)
    check_ranges(found, case.ranges, wanted, 256)


def test_rows_without_keys_read_no_score() -> None:
    """A block of them, whose pages no other row of it sees."""
    ranges = [(0, 250)] * 4 + [(100, 100), (130, 129), (249, 249), (300, 300)]
    start, end = torch.tensor(ranges, dtype=torch.int32).unbind(1)
    case = replace(prefill_case(8, 250), k_start=start.clone(), k_end=end.clone())
    found = run_ranges(case)
    assert (found.indices[4:] == -1).all()
    assert (found.scores[4:] == -math.inf).all()


@pytest.mark.parametrize("kind", ["all equal", "ascending", "descending"])
def test_ties_and_orders(kind: str) -> None:
    """More equal keys than a list holds; and keys of which the last, or the first, are selected."""
    num_keys = 256
    case = prefill_case(2, num_keys)
    values = torch.ones(num_keys, 128).to(torch.float8_e4m3fn)
    scales = torch.arange(1, num_keys + 1).float()
    scales = torch.ones(num_keys) if kind == "all equal" else scales
    scales = scales.flip(0) if kind == "descending" else scales
    case = replace(
        case,
        q=torch.ones(2, 8, 128).to(torch.float8_e4m3fn),
        w=torch.ones(2, 8),
        keys=values,
        scales=scales,
        k_start=torch.tensor([0, 3], dtype=torch.int32),
        k_end=torch.tensor([256, 256], dtype=torch.int32),
    )
    ranges = [(0, 256), (3, 256)]
    found = run_ranges(case)
    check(found, range_scores_reference(case.q, case.w, values, scales, ranges), None)


def test_empty_work_ends() -> None:
    constants = {"H": 8, "ROWS": 2, "ROW_BLOCK": 2, "HEAD_BLOCK": 8, "SPLIT": 1, "STAGES": 2}
    constants |= {"GROUPS": 64, "PTX": False}
    kind: dict[str, Any] = {"dtypes": {}, "absent": set()}
    kind["integers"] = {5: 64}
    run_on_nothing(range_scores_kernel, num_pointers=10, num_integers=8, **kind, **constants)
    constants = {"TOP_K": 16, "GROUPS": 64, "SIZE": 32, "CHUNK": 64, "WARPS": 1}
    constants["PTX"] = False
    kind |= {"dtypes": {0: torch.float32, 1: torch.float32, 2: torch.int64}, "integers": {2: 64}}
    run_on_nothing(range_select_kernel, num_pointers=10, num_integers=6, **kind, **constants)
