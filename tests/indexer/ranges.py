"""Kernels of prefill, run on a CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from firesteel.indexer.range_scores import range_scores_kernel
from firesteel.indexer.range_select import range_select_kernel
from firesteel.indexer.reference import decode_scores_reference
from tests.indexer.kernels import (
    STALE,
    Decode,
    Outputs,
    decode_case,
    e4m3,
    outputs_of,
    power,
    views,
    weights,
)
from tests.moe.kernels import Memory, launch


@dataclass(frozen=True)
class Prefill:
    """q `[M, H, 128]`, w `[M, H]`, ranges; keys contiguous, or the pages of a decode."""

    q: Tensor
    w: Tensor
    k_end: Tensor
    k_start: Tensor | None = None
    keys: Tensor | None = None
    scales: Tensor | None = None
    row_request: Tensor | None = None
    pages: Decode | None = None

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Of contiguous keys those that rows see."""
        found = []
        for start, end in zip(self.k_start.tolist(), self.k_end.tolist(), strict=True):
            begin = min(max(start, 0), len(self.keys))
            found.append((begin, max(begin, min(end, len(self.keys)))))
        return found


def paged_case(width: int, requests: list[int], ends: list[int]) -> Prefill:
    """Rows of eight heads over the pages of three requests, which have holes."""
    kind = {"generator": torch.Generator().manual_seed(10), "is_exact": True}
    return Prefill(
        q=e4m3(len(ends), 8, 128, **kind),
        w=weights(len(ends), 8, **kind),
        k_end=torch.tensor(ends, dtype=torch.int32),
        row_request=torch.tensor(requests, dtype=torch.int32),
        pages=decode_case([64 * width] * 3, width=width, missing=0.2, is_exact=True, seed=9),
    )


def paged_scores(case: Prefill) -> list[Tensor]:
    """Of each row the float64 scores of its keys."""
    pages, found = case.pages, []
    for row, request in enumerate(case.row_request.tolist()):
        seen = int(case.k_end[row]) if request >= 0 else 0
        query = (case.q[row][None, None], case.w[row][None, None])
        table = pages.page_table[max(request, 0)][None]
        found += decode_scores_reference(*query, *pages.pages, table, torch.tensor([seen]))[0]
    return found


@dataclass(frozen=True)
class RangeScores:
    """A kernel of prefill's scores, the rows of its blocks, more of its tile, and what runs it."""

    kernel: object
    rows: int
    tile: dict[str, int]
    start: Callable[..., None]

    def run(self, case: Prefill, *, span: int, group: int, first: int = 0) -> tuple[Tensor, Tensor]:
        """Scores and maxima of the rows from `first` on, stale where none were written.

        Inputs have no guards: what is read past their ends may be found out.
        """
        memory = Memory()
        heads, num_rows = case.q.shape[1], len(case.q) - first
        if case.pages is None:
            keys = (case.keys.clone(), case.scales.clone(), None)
            table_stride, page_stride, capacity = 0, 0, len(case.keys)
        else:
            table = case.pages.page_table.clone()
            keys = (*case.pages.views, table)
            table_stride, page_stride = table.stride(0), case.pages.page_stride // 16
            capacity = case.pages.width * 64
        stride, blocks = -(-capacity // 128) * 2, -(-num_rows // self.rows)
        sizes = {"dtype": torch.float32}
        scores = memory.poisoned(blocks * self.rows, stride * 64, **sizes).fill_(STALE)
        maxima = memory.poisoned(len(scores), 512, **sizes).fill_(STALE)
        self.start(
            *(self.kernel, (-(-capacity // span), blocks), case.q.clone(), case.w.clone(), *keys),
            *(case.row_request, case.k_start, case.k_end),
            *(scores, maxima, table_stride, page_stride, capacity, stride, span, group),
            *(first, first + num_rows),
            **{"H": heads, "HEAD_BLOCK": power(heads), "GROUPS": 512, "PTX": False, **self.tile},
        )
        memory.check()
        return scores[:num_rows], maxima[:num_rows]


def check_ranges(
    found: tuple[Tensor, Tensor], ranges: list[tuple[int, int]], wanted: list[Tensor], group: int
) -> None:
    """Of exact inputs: a row's scores, -inf for what shares a page with them, and maxima."""
    for scores, maxima, (begin, end), expected in zip(*found, ranges, wanted, strict=True):
        assert torch.equal(scores[begin:end].double().nan_to_num(7), expected.nan_to_num(7))
        if begin == end:
            continue
        assert scores[begin // 64 * 64 : begin].isneginf().all()
        assert scores[end : -(-end // 64) * 64].isneginf().all()
        seen = torch.full_like(scores, -math.inf)
        seen[begin:end] = scores[begin:end].where(~scores[begin:end].isnan(), -math.inf)
        for first in range(begin // group * group, end, group):
            cells = maxima[first // group * 64 :][:64]
            assert torch.equal(cells, seen[first : first + group].view(-1, 64).amax(0))


def run_ranges(
    case: Prefill,
    *,
    top_k: int = 16,
    row_block: int = 4,
    slice_rows: int = 8,
    span: int = 64,
    group: int = 64,
    groups: int = 256,
    size: int = 32,
) -> Outputs:
    """A prefill by range_scores and range_select, slice by slice; of `group` keys 64 maxima."""
    memory = Memory()
    num_rows = len(case.q)
    tile = replace_rows(case, row_block)
    ranges = [memory.holding(each) for each in (case.row_request, case.k_start, case.k_end)]
    if case.pages is None:
        keys = (memory.holding(case.keys), memory.holding(case.scales), None)
        table_stride, page_stride, capacity = 0, 0, len(case.keys)
    else:
        table = memory.holding(case.pages.page_table, padding=1)
        keys = (*views(memory.holding(case.pages.cache), case.pages.cache_dtype), table)
        table_stride, page_stride = table.stride(0), case.pages.page_stride // 16
        capacity = case.pages.width * 64
    stride = -(-capacity // 64)
    blocks = -(-slice_rows // row_block)
    # What an earlier call might have left: larger than any score.
    scores = memory.poisoned(blocks * row_block * stride * 64, dtype=torch.float32).fill_(STALE)
    maxima = memory.poisoned(blocks * row_block, groups, dtype=torch.float32).fill_(STALE)
    lists = memory.poisoned(slice_rows, size, dtype=torch.int64)
    outputs = outputs_of(memory, num_rows, top_k)
    given = list(vars(outputs).values())
    if case.pages is None:
        given[1] = None
    queries = (memory.holding(case.q), memory.holding(case.w))
    for first in range(0, num_rows, slice_rows):
        rows = min(slice_rows, num_rows - first)
        launch(
            *(range_scores_kernel, (-(-capacity // span), -(-rows // row_block)), *queries, *keys),
            *(*ranges, scores, maxima, table_stride, page_stride, capacity, stride, span, group),
            *(first, first + rows),
            **tile,
            GROUPS=groups,
        )
        launch(
            *(range_select_kernel, (rows,), scores, maxima, lists, keys[2], *ranges, *given),
            *(capacity, stride, group, table_stride, first, first + rows),
            **{"TOP_K": top_k, "GROUPS": groups, "SIZE": size, "CHUNK": 64},
            **{"WARPS": 1, "PTX": False},
        )
    memory.check()
    return outputs


def replace_rows(case: Prefill, row_block: int) -> dict[str, int]:
    """The tile of a prefill of so many rows a block."""
    heads = case.q.shape[1]
    tile = {"H": heads, "ROWS": row_block, "ROW_BLOCK": row_block}
    tile |= {"HEAD_BLOCK": power(heads), "SPLIT": row_block // 4 or 1}
    return {**tile, "STAGES": 2, "PTX": False}
