"""The indexer on PyTorch operators, for any number of heads, columns and keys, on any device.

It goes through rows, and through keys where one row's are too many, in chunks: scores of single
heads, `[B, S, H, T]`, are never there at once. The selection is that of the kernels: the exact set
of the fp32 scores, ties to the lowest position, NaN and -inf never.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["round_to_e4m3", "select_largest", "top_k_keys"]

MAX_SCORES = 1 << 25
"""Most scores of single heads at a time, 128 MiB."""
SPAN_UNIT = 1024
"""Keys of a chunk are a multiple of it."""

_LARGEST = 448.0
_SMALLEST_SCALE = 2.0**-126

Mask = Callable[[Tensor, slice, slice], Tensor]
"""Given scores `[B, s, t]` of these rows and keys, the same with -inf at keys that are hidden."""


def round_to_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """Values e4m3 `[.., D]` and scales fp32 `[..]` of x, as the page writer rounds keys.

    scale = max |x| / 448, at least 2^-126, and 1 of zeros alone; value = x / scale, clamped to
    +-448. A NaN stays one.
    """
    wide = x.float()
    largest = wide.abs().nan_to_num(nan=0.0, posinf=math.inf).amax(dim=-1)
    # By a tensor: a GPU multiplies by the reciprocal of a number instead, which rounds otherwise.
    scales = (
        (largest / torch.full_like(largest, _LARGEST))
        .clamp(min=_SMALLEST_SCALE)
        .masked_fill(largest == 0, 1.0)
    )
    values = (wide / scales.unsqueeze(-1)).clamp(-_LARGEST, _LARGEST)
    return values.to(torch.float8_e4m3fn), scales


def select_largest(scores: Tensor, top_k: int) -> Tensor:
    """Positions int64 `[.., top_k]` of the largest of scores `[.., T]`: ascending, then -1.

    Ties go to the lowest position; NaN and -inf are never selected. `top_k` is at most T.
    """
    if top_k == 0:
        return scores.new_empty((*scores.shape[:-1], 0), dtype=torch.int64)
    num_keys = scores.shape[-1]
    scores = scores.masked_fill(scores.isnan(), -math.inf)
    least = scores.topk(top_k, dim=-1).values[..., -1:]
    is_above = scores > least
    is_tie = (scores == least) & (scores > -math.inf)
    num_ties = top_k - is_above.sum(dim=-1, keepdim=True)
    is_taken = is_above | (is_tie & (is_tie.cumsum(dim=-1) <= num_ties))
    positions = torch.arange(num_keys, device=scores.device).expand_as(scores)
    positions = positions.masked_fill(~is_taken, num_keys)
    found = positions.topk(top_k, dim=-1, largest=False, sorted=True).values
    return found.masked_fill(found == num_keys, -1)


def top_k_keys(
    q: Tensor,
    w: Tensor,
    keys: Tensor,
    mask: Mask,
    *,
    top_k: int,
    key_scales: Tensor | None = None,
    dot_scale: float = 1.0,
    max_scores: int = MAX_SCORES,
) -> Tensor:
    """Positions int32 `[B, S, min(top_k, T)]` of the best keys of each row: ascending, then -1.

    score[s, t] = key_scale[t] * sum over h of w[s, h] * relu(dot_scale * (q[s, h] . key[t])), all
    in fp32.

    Args:
        q: `[B, S, H, D]` of any floating type, contiguous.
        w: `[B, S, H]` fp32.
        keys: `[B, T, D]` of any floating type.
        mask: hides keys of rows.
        key_scales: `[B, T]` fp32; 1 by default.
        max_scores: of single heads that may be there at a time.
    """
    batch, num_rows, heads, _ = q.shape
    num_keys = keys.shape[1]
    width = min(top_k, num_keys)
    found = q.new_empty((batch, num_rows, width), dtype=torch.int32)
    each = max(1, batch * heads)
    span = num_keys
    if each * num_keys > max_scores:
        span = max(1, max_scores // (each * SPAN_UNIT)) * SPAN_UNIT
    step = max(1, max_scores // max(1, each * span))
    for row in range(0, num_rows, step):
        rows = slice(row, min(row + step, num_rows))
        best: tuple[Tensor, Tensor] | None = None
        for start in range(0, num_keys, span):
            part = slice(start, min(start + span, num_keys))
            scores = _scores(q[:, rows], w[:, rows], keys[:, part], dot_scale)
            if key_scales is not None:
                scores *= key_scales[:, None, part]
            best = _joined(best, mask(scores, rows, part), start, width)
        if best is not None:
            found[:, rows] = best[1]
    return found


def _scores(q: Tensor, w: Tensor, keys: Tensor, dot_scale: float) -> Tensor:
    """Scores `[B, s, t]`, without the keys' scales."""
    batch, rows, heads, size = q.shape
    # One product a request: with a dimension for rows torch would copy the keys for each.
    columns = q.float().reshape(batch, rows * heads, size)
    dots = torch.matmul(columns, keys.transpose(-1, -2).float())
    dots = dots.mul_(dot_scale).relu_().view(batch, rows, heads, -1)
    return torch.matmul(w.unsqueeze(-2), dots).squeeze(-2)


def _joined(
    best: tuple[Tensor, Tensor] | None, scores: Tensor, start: int, width: int
) -> tuple[Tensor, Tensor]:
    """Scores and positions of the best so far, of which a chunk from `start` on joins the rest.

    What is kept has lower positions than the chunk, and stands before it: so ties go the right way.
    """
    positions = torch.arange(start, start + scores.shape[-1], device=scores.device)
    positions = positions.expand_as(scores)
    if best is not None:
        scores = torch.cat([best[0], scores], dim=-1)
        positions = torch.cat([best[1], positions], dim=-1)
    place = select_largest(scores, min(width, scores.shape[-1]))
    is_hole, place = place < 0, place.clamp(min=0)
    scores = scores.gather(-1, place).masked_fill(is_hole, -math.inf)
    return scores, positions.gather(-1, place).masked_fill(is_hole, -1)
