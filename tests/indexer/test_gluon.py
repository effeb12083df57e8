"""Hopper's own scores on a CPU, against float64; copies land as late as they may, and early."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from firesteel.indexer.launches import HOPPER
from firesteel.indexer.reference import range_scores_reference
from tests.indexer.kernels import (
    Selection,
    decode_case,
    run_scores,
)
from tests.indexer.ranges import RangeScores, check_ranges, paged_case, paged_scores
from tests.indexer.test_ranges import prefill_case
from tests.indexer.test_score import check_scores
from tests.moe.gluon_emulator import Block, run

if not HOPPER:
    pytest.skip("needs Triton 3.6 or later, which has this Gluon", allow_module_level=True)

LANDS_EARLY = pytest.mark.parametrize("lands_early", [False, True])


def emulate(
    kernel: Any, grid: tuple[int, ...], *arguments: object, lands_early: bool, **constexprs: object
) -> None:
    """As the interpreter would launch it."""
    values = [Block(torch.tensor(each)) if isinstance(each, int) else each for each in arguments]
    named = dict(zip(kernel.arg_names, values, strict=False))
    whole = (*grid, 1, 1)[:3]
    run(kernel, whole, {**named, **constexprs, "PDL": False}, lands_early=lands_early)


@LANDS_EARLY
@pytest.mark.parametrize(
    ("rows", "heads", "programs"), [(2, 64, 1), (3, 9, 2), (6, 32, 3), (7, 8, 1)]
)
def test_decode(rows: int, heads: int, programs: int, lands_early: bool) -> None:
    """Requests of many pages, of one, and of none; holes; rows that a block does not have."""
    lens = [330, 0, 64, 2**31 - 1]
    case = decode_case(lens, rows=rows, heads=heads, width=7, missing=0.2)
    start = partial(emulate, lands_early=lands_early)
    found = run_scores(case, programs=programs, with_maxima=True, emulate=start)
    later = run_scores(case, programs=programs, first=2, emulate=start)
    whole = found[2 * rows :, : 7 * 64]
    assert torch.equal(later.view(torch.int32), whole.view(torch.int32))
    scores, maxima = found[:, : 7 * 64], found[:, 7 * 64 :]
    check_scores(case, scores)
    wanted = Selection(scores, case.seq_lens, rows=rows).maxima(programs).flatten(1)
    assert torch.equal(maxima.view(torch.int32), wanted.view(torch.int32))


def hopper(lands_early: bool) -> RangeScores:
    """Hopper's own kernel, of blocks of eight rows."""
    tile = {"ROW_BLOCK": 4, "STAGES": 2}
    return RangeScores(HOPPER[1].function, 8, tile, partial(emulate, lands_early=lands_early))


@LANDS_EARLY
@pytest.mark.parametrize(("span", "group", "least"), [(128, 128, -5), (512, 256, 150)])
def test_prefill_of_contiguous_keys(span: int, group: int, least: int, lands_early: bool) -> None:
    """Ranges that begin before the first key; and none before the second half of a group."""
    case = prefill_case(11, 600, seed=span)
    case = replace(case, k_start=case.k_start.clamp(min=least))
    ranges = case.ranges
    wanted = range_scores_reference(case.q, case.w, case.keys, case.scales, ranges)
    for first in (0, 3):
        found = hopper(lands_early).run(case, span=span, group=group, first=first)
        check_ranges(found, ranges[first:], wanted[first:], group)


@LANDS_EARLY
def test_prefill_of_pages(lands_early: bool) -> None:
    """Blocks of rows of several requests, and rows of none."""
    requests = [0, 0, 1, 1, 1, 1, 1, 2, 2, 2, -1]
    ends = [1, 70, 448, 0, 130, -1, 64, 65, 2**31 - 1, 255, 200]
    case = paged_case(7, requests, ends)
    found = hopper(lands_early).run(case, span=384, group=128)
    wanted = paged_scores(case)
    check_ranges(found, [(0, len(scores)) for scores in wanted], wanted, 128)
