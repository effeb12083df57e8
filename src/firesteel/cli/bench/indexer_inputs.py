"""Inputs of the indexer's calls, by operand: random ones, and ones that leave nothing to round."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from firesteel.cli.bench.indexer_cases import Case
from firesteel.indexer.pages import (
    HEAD_SIZE,
    PAGE_TOKENS,
    page_bytes,
    page_values,
    page_views,
)
from firesteel.indexer.spec import DecodeSpec, PrefillSpec
from firesteel.launch.key import DTYPES

__all__ = [
    "COLD_BYTES",
    "UNIT",
    "Inputs",
    "calls_to_rotate",
    "exact_inputs",
    "poisoned_outputs",
    "random_inputs",
]

Inputs = dict[str, Tensor]
"""What a call reads, by operand."""

COLD_BYTES = 160_000_000
"""What rotated calls read and write at least: three times an H200's L2."""
MAX_ROTATED = 160
UNIT = 8
"""Scores of `exact_inputs` are multiples of 1 / UNIT."""

# Keys that are drawn at a time.
_DRAWN = 1 << 20
_HOLES = 1 / 16
# A key in so many is one of its own; the others repeat it.
_REPEATS = 64
# A page that is none: whoever reads it reads past the cache.
_NO_PAGE = 2**31 - 1

_Keys = Callable[[int], tuple[Tensor, Tensor]]
"""So many keys: values `[n, 128]` of the case's type, scales `[n]` fp32, which 16 bits go without.
"""


def calls_to_rotate(case: Case) -> int:
    """Calls in turn, so many that what one reads has left L2 when it comes again; two at least."""
    rows = case.requests * case.rows
    row_bytes = case.heads * HEAD_SIZE * case.dtype.itemsize + 4 * case.top_k
    each = case.key_bytes + rows * row_bytes
    return min(MAX_ROTATED, max(2, -(-COLD_BYTES // each)))


def random_inputs(case: Case, device: torch.device, calls: int) -> list[Inputs]:
    """Inputs of unit spread for so many calls, no key of one in another.

    Weights are of both signs. Pages of all calls' requests lie mixed in one cache.
    """
    generator = torch.Generator(device).manual_seed(0)

    def keys(count: int) -> tuple[Tensor, Tensor]:
        values = torch.randn(count, HEAD_SIZE, generator=generator, device=device)
        scales = torch.rand(count, generator=generator, device=device) + 0.1
        return values.to(case.dtype), scales

    def rows(*shape: int) -> tuple[Tensor, Tensor]:
        q = torch.randn(*shape, HEAD_SIZE, generator=generator, device=device)
        return q.to(case.dtype), torch.randn(shape, generator=generator, device=device)

    if case.mode == "prefill":
        return [_prefill(case, keys, rows, device) for _ in range(calls)]
    cache, table = _pages(case, keys, calls, generator)
    found: list[Inputs] = []
    for pages in table.view(calls, case.requests, case.width):
        q, w = rows(case.requests, case.rows, case.heads)
        lens = torch.full((case.requests,), case.context, dtype=torch.int32, device=device)
        found.append({"cache": cache, "q": q, "w": w, "page_table": pages, "seq_lens": lens})
    return found


def exact_inputs(case: Case, device: torch.device, *, is_ragged: bool) -> Inputs:
    """Inputs whose scores no order of additions rounds, with ties and holes.

    q and keys are integers of magnitude 2 at most. So a sum of 128 products is an integer of
    magnitude 512 at most, ten bits with its sign, where a Hopper keeps 13 of a sum of e4m3 products
    below the leading one. Weights are halves from -1 to 1.5, scales powers of two from 1/4 to 4:
    a score is a multiple of 1/8 below 2^18, which fp32 holds. Each key stands in some 64 places, so
    ties are everywhere. A key in 16 has a NaN, as its scale or, of 16 bits, as its last number; of
    a decode also a page in 16 is missing.

    Args:
        is_ragged: requests and rows have lengths and ranges of all kinds, and not the case's.
    """
    generator = torch.Generator(device).manual_seed(1)
    few = max(8, case.context // _REPEATS)
    pool = _small(2, few, HEAD_SIZE, generator=generator).to(case.dtype)
    pool_scales = torch.exp2(_small(2, few, generator=generator))

    def keys(count: int) -> tuple[Tensor, Tensor]:
        which = torch.randint(few, (count,), generator=generator, device=device)
        is_hole = torch.rand(count, generator=generator, device=device) < _HOLES
        values = pool.view(torch.uint8)[which].view(case.dtype)
        if case.cache_dtype != "e4m3":
            values[is_hole, -1] = math.nan
        return values, pool_scales[which].masked_fill(is_hole, math.nan)

    def rows(*shape: int) -> tuple[Tensor, Tensor]:
        w = torch.randint(-2, 4, shape, generator=generator, device=device) / 2
        return _small(2, *shape, HEAD_SIZE, generator=generator).to(case.dtype), w

    if case.mode == "prefill":
        found = _prefill(case, keys, rows, device)
        if is_ragged:
            start = torch.randint(case.context, (case.rows,), generator=generator, device=device)
            length = torch.randint(
                -3, case.context, (case.rows,), generator=generator, device=device
            )
            found |= {"k_start": start.int(), "k_end": (start + length).int()}
        return found
    cache, table = _pages(case, keys, 1, generator)
    lens = torch.full((case.requests,), case.context, device=device)
    if is_ragged:
        lens = torch.tensor(_ragged_lengths(case), device=device)
    is_missing = torch.rand(table.shape, generator=generator, device=device) < _HOLES
    live = -(-lens.clamp(min=0) // PAGE_TOKENS)
    is_past = torch.arange(case.width, device=device) >= live[:, None]
    table = table.masked_fill(is_missing, -1).masked_fill(is_past, _NO_PAGE)
    q, w = rows(case.requests, case.rows, case.heads)
    return {"cache": cache, "q": q, "w": w, "page_table": table, "seq_lens": lens.int()}


def _ragged_lengths(case: Case) -> list[int]:
    """Around top_k, of padding, and long, in turn; none past the context."""
    k, long = case.top_k, case.context
    kinds = (k + 1, k, k - 1, 0, -3, 1, long // 2 + 7, long - 1)
    return [min(kinds[b % len(kinds)], long) for b in range(case.requests)]


def _small(largest: int, *shape: int, generator: torch.Generator) -> Tensor:
    """Integers of magnitude `largest` at most, as fp32."""
    device = generator.device
    return torch.randint(-largest, largest + 1, shape, generator=generator, device=device).float()


def _prefill(
    case: Case, keys: _Keys, rows: Callable[..., tuple[Tensor, Tensor]], device: torch.device
) -> Inputs:
    """Rows that are the last of the context, each with the keys up to its own."""
    values, scales = keys(case.context)
    q, w = rows(case.rows, case.heads)
    last = torch.arange(case.context - case.rows + 1, case.context + 1, device=device)
    return {
        "keys": values,
        **({"key_scales": scales} if case.cache_dtype == "e4m3" else {}),
        "q": q,
        "w": w,
        "k_start": torch.zeros_like(last, dtype=torch.int32),
        "k_end": last.int(),
    }


def _pages(
    case: Case, keys: _Keys, calls: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """A cache of so many calls' pages in any order, and the pages `[calls * requests, width]`."""
    device, stride = generator.device, page_bytes(case.cache_dtype)
    pages = calls * case.requests * case.width
    cache = torch.zeros(pages * stride, dtype=torch.uint8, device=device)
    values = page_values(cache, stride, case.cache_dtype).view(torch.uint8)
    scales = page_views(cache, stride)[1] if case.cache_dtype == "e4m3" else None
    step = _DRAWN // PAGE_TOKENS
    for first in range(0, pages, step):
        place = slice(first, min(first + step, pages))
        count = place.stop - place.start
        drawn, of_drawn = keys(count * PAGE_TOKENS)
        # As bytes: not every torch copies e4m3 with strides.
        values[place] = drawn.view(torch.uint8).view(count, PAGE_TOKENS, -1)
        if scales is not None:
            scales[place] = of_drawn.view(count, PAGE_TOKENS)
    order = torch.randperm(pages, generator=generator, device=device)
    return cache, order.view(-1, case.width).int()


def poisoned_outputs(
    spec: DecodeSpec | PrefillSpec, count: int, device: torch.device
) -> dict[str, Tensor]:
    """The tensors that a call of so many requests or rows writes, none of them right."""
    return {
        operand.name: torch.full(
            operand.shape_for(count), -77, dtype=DTYPES[operand.dtype], device=device
        )
        for operand in spec.operands(())
        if operand.is_written
    }
