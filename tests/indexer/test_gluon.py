"""Hopper's own scores on a CPU, against float64; copies land as late as they may, and early."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from firesteel.indexer.launches import HOPPER
from firesteel.indexer.reference import decode_scores_reference, range_scores_reference
from tests.indexer.kernels import (
    STALE,
    Decode,
    Prefill,
    Selection,
    decode_case,
    e4m3,
    run_scores,
    weights,
)
from tests.indexer.test_ranges import prefill_case
from tests.indexer.test_score import check_scores
from tests.moe.gluon_emulator import Block, run
from tests.moe.kernels import Memory

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


def range_scores(
    case: Prefill, *, span: int, group: int, lands_early: bool, first: int = 0
) -> tuple[Tensor, Tensor]:
    """Scores and maxima of the rows from `first` on, stale where none were written.

    Inputs have no guards: what is read past their ends is found out.
    """
    memory = Memory()
    num_rows, heads = case.q.shape[:2]
    num_rows -= first
    if case.pages is None:
        keys = (case.keys.clone(), case.scales.clone(), None)
        table_stride, page_stride, capacity = 0, 0, len(case.keys)
    else:
        table = case.pages.page_table.clone()
        keys = (*case.pages.views, table)
        table_stride, page_stride = table.stride(0), case.pages.page_stride // 16
        capacity = case.pages.width * 64
    stride = -(-capacity // 128) * 2
    scores = memory.poisoned(-(-num_rows // 8) * 8, stride * 64, dtype=torch.float32).fill_(STALE)
    maxima = memory.poisoned(len(scores), 512, dtype=torch.float32).fill_(STALE)
    emulate(
        *(HOPPER[1].function, (-(-capacity // span), len(scores) // 8)),
        *(case.q.clone(), case.w.clone(), *keys),
        *(case.row_request, case.k_start, case.k_end),
        *(scores, maxima, table_stride, page_stride, capacity, stride, span, group),
        *(first, first + num_rows),
        **{"H": heads, "ROW_BLOCK": 4, "HEAD_BLOCK": 8, "GROUPS": 512, "STAGES": 2, "PTX": False},
        lands_early=lands_early,
    )
    memory.check()
    return scores[:num_rows], maxima[:num_rows]


def check(
    found: tuple[Tensor, Tensor], ranges: list[tuple[int, int]], wanted: list[Tensor], group: int
) -> None:
    """Of exact inputs: a row's scores, -inf for what shares a page with them, and maxima."""
    for scores, maxima, (begin, end), expected in zip(*found, ranges, wanted, strict=True):
        assert torch.equal(scores[begin:end].double().nan_to_num(7), expected.nan_to_num(7))
        assert scores[begin // 64 * 64 : begin].isneginf().all()
        assert scores[end : -(-end // 64) * 64].isneginf().all()
        seen = torch.full_like(scores, -math.inf)
        seen[begin:end] = scores[begin:end].where(~scores[begin:end].isnan(), -math.inf)
        for first in range(begin // group * group, end, group):
            cells = maxima[first // group * 64 :][:64]
            assert torch.equal(cells, seen[first : first + group].view(-1, 64).amax(0))


@LANDS_EARLY
@pytest.mark.parametrize(("span", "group", "least"), [(128, 128, -5), (512, 256, 150)])
def test_prefill_of_contiguous_keys(span: int, group: int, least: int, lands_early: bool) -> None:
    """Ranges that begin before the first key; and none before the second half of a group."""
    case = prefill_case(11, 650, seed=span)
    case = replace(case, k_start=case.k_start.clamp(min=least))
    ranges = []
    for start, end in zip(case.k_start.tolist(), case.k_end.tolist(), strict=True):
        begin = min(max(start, 0), 650)
        ranges.append((begin, max(begin, min(max(end, 0), 650))))
    wanted = range_scores_reference(case.q, case.w, case.keys, case.scales, ranges)
    for first in (0, 3):
        found = range_scores(case, span=span, group=group, lands_early=lands_early, first=first)
        check(found, ranges[first:], wanted[first:], group)


@LANDS_EARLY
def test_prefill_of_pages(lands_early: bool) -> None:
    """Blocks of rows of several requests, and rows of none."""
    pages: Decode = decode_case([448] * 3, width=7, missing=0.2, is_exact=True, seed=9)
    kind = {"generator": torch.Generator().manual_seed(10), "is_exact": True}
    requests = torch.tensor([0, 0, 1, 1, 1, 1, 1, 2, 2, 2, -1], dtype=torch.int32)
    ends = torch.tensor([1, 70, 448, 0, 130, -1, 64, 65, 2**31 - 1, 255, 200], dtype=torch.int32)
    case = Prefill(
        q=e4m3(11, 8, 128, **kind),
        w=weights(11, 8, **kind),
        k_end=ends,
        row_request=requests,
        pages=pages,
    )
    found = range_scores(case, span=384, group=128, lands_early=lands_early)
    ranges, wanted = [], []
    for row, (request, end) in enumerate(zip(requests.tolist(), ends.tolist(), strict=True)):
        seen = min(max(end, 0), 448) if request >= 0 else 0
        one = replace(
            pages,
            q=case.q[row].view(1, 1, 8, 128),
            w=case.w[row].view(1, 1, 8),
            page_table=pages.page_table[max(request, 0)][None],
            seq_lens=torch.tensor([seen]),
        )
        args = (one.q, one.w, *one.pages, one.page_table, one.seq_lens)
        ranges.append((0, seen))
        wanted.append(decode_scores_reference(*args)[0][0])
    check(found, ranges, wanted, 128)
