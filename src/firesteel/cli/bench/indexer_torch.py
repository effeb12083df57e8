"""Oracle and baseline of `firesteel bench indexer`, on the device that is measured.

The oracle has every row's scores in float64, a block of rows at a time, and what must be selected
of scores that nothing rounds. It shares no code with the kernels. The baseline is what torch's
operators take for the same call: products in bf16, of fp16 keys in fp16, added up in fp32, and
torch.topk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from firesteel.cli.bench.indexer_inputs import UNIT, Inputs
from firesteel.indexer.pages import (
    CACHE_DTYPES,
    HEAD_SIZE,
    PAGE_TOKENS,
    page_bytes,
    page_values,
    page_views,
)

__all__ = [
    "Block",
    "Scores",
    "baseline_bytes",
    "blocks",
    "exact_selection",
    "select_in_torch",
]

# Products that the oracle, in float64, and the baseline, in fp32, hold at a time.
_ORACLE_PRODUCTS = 1 << 27
_BASELINE_PRODUCTS = 1 << 29
_BLOCK_ROWS = 256
# Multiplications of a check: a few seconds of an H200, in float64 and of integers in bf16.
_MOST_WIDE = 2e13
_MOST_EXACT = 1e15
_LEAST = -(2**63)


@dataclass(frozen=True)
class Scores:
    """Of a block of rows, in float64.

    Fields
        scores      [r, T]; -inf where a key is not the row's, is missing, or has a NaN
        magnitudes  [r, T]: the same sums of the magnitudes of all terms, which errors scale with
    """

    scores: Tensor
    magnitudes: Tensor | None = None


@dataclass(frozen=True)
class Block:
    """Rows that see the same keys.

    Fields
        rows    which of the call's, int64 [r]
        q, w    [r, H, 128] of the keys' type and [r, H]
        values  [T, 128]
        scales  [T]; 1 of 16-bit keys, NaN of a key that is missing
        starts  [r] int64: the first key of each row, at which its positions begin
        ends    [r] int64: past the last
    """

    rows: Tensor
    q: Tensor
    w: Tensor
    values: Tensor
    scales: Tensor
    starts: Tensor
    ends: Tensor

    def scores(self, *, has_magnitudes: bool = False, is_exact: bool = False) -> Scores:
        """Of each row and key.

        Args:
            is_exact: fp32 holds every sum, as of `exact_inputs`, and bf16 every number of q and
                keys, so that fast products are exact.
        """
        count, total = len(self.q), len(self.values)
        device = self.q.device
        found = torch.empty(count, total, dtype=torch.float64, device=device)
        magnitudes = torch.empty_like(found) if has_magnitudes else None
        q, w = self.q.flatten(0, 1), self.w.float()
        wide_q, wide_w = _wide(q), w.double()
        step = max(1, _ORACLE_PRODUCTS // len(q))
        for first in range(0, total, step):
            place = slice(first, first + step)
            scales = self.scales[place].double()
            if is_exact:
                keys = self.values[place].bfloat16().T
                dots = _products(q.bfloat16()[None], keys[None])[0]
                found[:, place] = _weighted(w, dots) * scales
                continue
            keys = _wide(self.values[place]).T
            found[:, place] = _weighted(wide_w, wide_q @ keys) * scales
            if magnitudes is not None:
                dots = wide_q.abs() @ keys.abs()
                magnitudes[:, place] = _weighted(wide_w.abs(), dots) * scales.abs()
        t = torch.arange(total, device=device)
        is_seen = (t >= self.starts[:, None]) & (t < self.ends[:, None])
        return Scores(found.masked_fill(~is_seen | found.isnan(), -math.inf), magnitudes)


def _wide(values: Tensor) -> Tensor:
    """In float64, of e4m3 by way of fp32: not every torch converts at once."""
    return values.float().double()


def _weighted(w: Tensor, dots: Tensor) -> Tensor:
    """[r, T]: the sum over heads of w [r, H] * relu(dots [r * H, T])."""
    count, heads = w.shape
    return torch.bmm(w.unsqueeze(1), dots.relu_().view(count, heads, -1)).squeeze(1)


def blocks(inputs: Inputs, *, is_exact: bool = False) -> Iterator[Block]:
    """Rows of a call: all of a decode, by request; of a prefill as many as a check has time for.

    Those are spread evenly, the last one among them.

    Args:
        is_exact: scores will be asked for as exact ones, which takes less time.
    """
    q, w = inputs["q"], inputs["w"]
    if "page_table" not in inputs:
        values, scales = inputs["keys"], _key_scales(inputs)
        starts = inputs["k_start"].long().clamp(0, len(values))
        ends = inputs["k_end"].long().clamp(0, len(values))
        each = w.shape[1] * HEAD_SIZE * len(values)
        most = max(1, int((_MOST_EXACT if is_exact else _MOST_WIDE) / each))
        stride = -(-len(q) // most)
        chosen = torch.arange((len(q) - 1) % stride, len(q), stride, device=q.device)
        as_bytes = q.view(torch.uint8)
        for rows in chosen.split(_BLOCK_ROWS):
            own = as_bytes[rows].view(q.dtype)
            yield Block(rows, own, w[rows], values, scales, starts[rows], ends[rows])
        return
    pages, page_scales = _views(inputs)
    requests, rows = q.shape[:2]
    width = inputs["page_table"].shape[1]
    drafts = torch.arange(rows - 1, -1, -1, device=q.device)
    for b in range(requests):
        length = inputs["seq_lens"][b].long()
        table = inputs["page_table"][b].long()
        starts_at = torch.arange(width, device=q.device) * PAGE_TOKENS
        is_there = (table >= 0) & (starts_at < length)
        own = table.where(is_there, 0)
        scales = page_scales[own].masked_fill(~is_there[:, None], math.nan)
        ends = (length - drafts).clamp(0, width * PAGE_TOKENS)
        yield Block(
            rows=torch.arange(b * rows, (b + 1) * rows, device=q.device),
            q=q[b],
            w=w[b],
            values=_taken(pages, own).flatten(0, 1),
            scales=scales.flatten(),
            starts=torch.zeros_like(ends),
            ends=ends,
        )


def _taken(pages: Tensor, which: Tensor) -> Tensor:
    """Pages by their numbers; as bytes, since torch indexes no e4m3 everywhere."""
    return pages.view(torch.uint8)[which].view(pages.dtype)


def _views(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The values `[pages, 64, 128]` and scales `[pages, 64]` of a cache; 1 of 16-bit keys."""
    cache, dtype = inputs["cache"], inputs["q"].dtype
    name = next(name for name, each in CACHE_DTYPES.items() if each == dtype)
    values = page_values(cache, page_bytes(name), name)
    if name == "e4m3":
        return values, page_views(cache, page_bytes(name))[1]
    return values, torch.ones((), device=cache.device).expand(values.shape[:2])


def _key_scales(inputs: Inputs) -> Tensor:
    """`[T]`, of contiguous keys; 1 of 16-bit ones."""
    keys = inputs["keys"]
    return inputs.get("key_scales", torch.ones((), device=keys.device).expand(len(keys)))


def _halves(values: Tensor) -> Tensor:
    """In 16 bits; bf16 of e4m3, which loses nothing."""
    return values if values.dtype == torch.float16 else values.bfloat16()


def exact_selection(scores: Tensor, starts: Tensor, top_k: int) -> Tensor:
    """What must be selected of scores `[r, T]` that are multiples of 1 / UNIT: `[r, top_k]` int32.

    Positions from each row's start, ascending, ties to the lowest; then -1. Scores become integers
    with the position below them, so that no two are equal.
    """
    total = scores.shape[1]
    is_there = scores > -math.inf
    units = scores.where(is_there, 0.0) * UNIT
    assert bool((units == units.round()).all()), "scores are not what exact_inputs promises"
    order = units.long() * 2**32 - torch.arange(total, device=scores.device)
    best, positions = order.masked_fill(~is_there, _LEAST).topk(min(top_k, total))
    positions = (positions - starts[:, None]).masked_fill(best == _LEAST, total)
    found = torch.full((len(scores), top_k), -1, dtype=torch.int32, device=scores.device)
    positions = positions.sort().values
    found[:, : positions.shape[1]] = positions.masked_fill(positions == total, -1).int()
    return found


def select_in_torch(inputs: Inputs, top_k: int) -> Tensor:
    """The same call by torch's operators: positions `[R, k]` in no order, k being top_k at most.

    For rows that all see their first keys, none missing. Products that do not fit at once are made
    of some requests or rows at a time.
    """
    q, w, step = inputs["q"], inputs["w"], _step(inputs)[0]
    if "page_table" not in inputs:
        # [1, T, 128]
        keys, scales = _halves(inputs["keys"])[None], _key_scales(inputs)[None]
        parts = zip(q.split(step), w.split(step), inputs["k_end"].split(step), strict=True)
        found = [_best(a[None], b[None], keys, scales, c[None], top_k) for a, b, c in parts]
        return torch.cat(found)
    pages, page_scales = _views(inputs)
    table = inputs["page_table"].long()
    drafts = torch.arange(q.shape[1] - 1, -1, -1, device=q.device)
    ends = inputs["seq_lens"][:, None] - drafts
    found: list[Tensor] = []
    for first in range(0, len(q), step):
        place = slice(first, first + step)
        keys = _halves(_taken(pages, table[place])).flatten(1, 2)
        scales = page_scales[table[place]].flatten(1)
        found.append(_best(q[place], w[place], keys, scales, ends[place], top_k))
    return torch.cat(found)


def _step(inputs: Inputs) -> tuple[int, int]:
    """Requests or rows that the baseline takes at a time, and the products of one."""
    w = inputs["w"]
    total = len(inputs["keys"]) if "keys" in inputs else inputs["page_table"].shape[1] * PAGE_TOKENS
    each = w[0].numel() * total
    return min(len(w), max(1, _BASELINE_PRODUCTS // each)), each


def baseline_bytes(inputs: Inputs) -> int:
    """About what `select_in_torch` holds at most, beside its inputs.

    Twice, for what it ran in before the graph is kept too: products and their relu in fp32, keys as
    bytes and in bf16, scores and what torch.topk makes of them.
    """
    step, each = _step(inputs)
    rows = step * inputs["w"][0].numel() // inputs["w"].shape[-1]
    total = each // inputs["w"][0].numel()
    keys = total if "keys" in inputs else step * total
    key_bytes = (2 + inputs["q"].dtype.itemsize) * HEAD_SIZE * keys
    return 2 * (4 * step * each + key_bytes + 24 * rows * total)


def _best(q: Tensor, w: Tensor, keys: Tensor, scales: Tensor, ends: Tensor, top_k: int) -> Tensor:
    """Of q `[B, n, H, 128]`, w `[B, n, H]`, keys `[B, T, 128]`, scales `[B, T]`, ends `[B, n]`."""
    requests, rows, heads = w.shape
    total = keys.shape[1]
    dots = _products(_halves(q).flatten(1, 2), keys.transpose(1, 2)).relu_()
    scores = torch.bmm(w.reshape(-1, 1, heads), dots.view(requests * rows, heads, total))
    scores = scores.view(requests, rows, total).mul_(scales[:, None])
    t = torch.arange(total, device=q.device)
    scores.masked_fill_(t >= ends[..., None], -math.inf)
    return scores.flatten(0, 1).topk(min(top_k, total), sorted=False).indices


def _products(a: Tensor, b: Tensor) -> Tensor:
    """Of 16-bit matrices in fp32: not rounded to bf16, which would select other keys."""
    if a.is_cuda:
        return torch.bmm(a, b, out_dtype=torch.float32)
    # A CPU has no such product; its fp32 is as exact.
    return torch.bmm(a.float(), b.float())
