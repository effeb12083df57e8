"""Float64 oracles of the indexer's kernels and of the whole; plain loops, no code shared with them.

The whole has two halves that meet at fp32 scores. `decode_scores_reference` and
`range_scores_reference` give the scores in float64, which a kernel's lie within a bound of;
`top_k_reference` is what must be selected of given scores, exactly.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = [
    "decode_scores_reference",
    "live_length",
    "quantize_reference",
    "range_scores_reference",
    "round_reference",
    "score_bound_reference",
    "top_k_reference",
]

_LARGEST = 448.0
_SMALLEST_SCALE = 2.0**-126


def quantize_reference(keys: Tensor, *, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """Values `[T, 128]` e4m3 and scales `[T]` fp32 of keys `[T, 128]` of any floating type.

    scale = amax / 448, rounded to fp32 and at least 2^-126; 1 of a token that is all zeros. The
    power of two is the next at or above. A value is key / scale rounded to fp32, clamped to +-448,
    rounded to e4m3, to nearest even both times. A NaN stays one, and counts not in the amax.
    """
    wide = keys.float()
    amax = wide.abs().nan_to_num(nan=0.0, posinf=math.inf).amax(dim=1)
    scales = (amax / _LARGEST).clamp(min=_SMALLEST_SCALE)
    if power_of_two:
        exponents = [math.ceil(math.log2(s)) if s < math.inf else 128 for s in scales.tolist()]
        scales = torch.tensor([_power(exponent) for exponent in exponents]).reshape(-1)
    scales = torch.where(amax == 0, 1.0, scales).float()
    values = (wide / scales[:, None]).clamp(-_LARGEST, _LARGEST)
    return values.to(torch.float8_e4m3fn), scales


def round_reference(keys: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys `[T, 128]` as bf16 or fp16, to nearest even; a NaN stays one, past the range is inf."""
    return keys.to(dtype)


def _power(exponent: int) -> float:
    return 2.0**exponent if exponent < 128 else math.inf


def live_length(seq_len: int, row: int, rows: int, capacity: int) -> int:
    """Keys that row `row` of a request's `rows` sees."""
    return min(max(seq_len - (rows - 1 - row), 0), capacity)


def _scores(q: Tensor, w: Tensor, values: Tensor, scales: Tensor | None) -> Tensor:
    """One row's scores of keys: q `[H, 128]`, w `[H]`, values `[T, 128]`, scales `[T]` or None."""
    dots = torch.einsum("hd,td->ht", q.double(), values.double())
    sums = (w.double()[:, None] * dots.relu()).sum(dim=0)
    return sums if scales is None else sums * scales.double()


def decode_scores_reference(
    q: Tensor,
    w: Tensor,
    keys: Tensor,
    key_scales: Tensor | None,
    page_table: Tensor,
    seq_lens: Tensor,
) -> list[list[Tensor]]:
    """Scores in float64 of each row of each request, of the keys that it sees.

    q `[B, n, H, 128]`, w `[B, n, H]`, keys `[pages, 64, 128]` and key_scales `[pages, 64]` as
    `page_views` gives them (None of 16-bit keys), page_table `[B, width]`, seq_lens `[B]`. Keys of
    a missing page are -inf.
    """
    found: list[list[Tensor]] = []
    rows, capacity = q.shape[1], page_table.shape[1] * 64
    for b, seq_len in enumerate(seq_lens.tolist()):
        of_request: list[Tensor] = []
        for j in range(rows):
            length = live_length(seq_len, j, rows, capacity)
            parts = [torch.empty(0, dtype=torch.float64)]
            for page in page_table[b, : -(-length // 64)].tolist():
                if page < 0:
                    parts.append(torch.full((64,), -math.inf, dtype=torch.float64))
                else:
                    scales = None if key_scales is None else key_scales[page]
                    parts.append(_scores(q[b, j], w[b, j], keys[page], scales))
            of_request.append(torch.cat(parts)[:length])
        found.append(of_request)
    return found


def range_scores_reference(
    q: Tensor, w: Tensor, keys: Tensor, key_scales: Tensor | None, ranges: list[tuple[int, int]]
) -> list[Tensor]:
    """Scores in float64 of rows q `[M, H, 128]`, each of the keys `[start, end)` of its range.

    keys `[T, 128]` and key_scales `[T]`, None of 16-bit keys; ranges are clamped to the keys that
    there are.
    """
    found: list[Tensor] = []
    for row, (start, end) in enumerate(ranges):
        first = min(max(start, 0), len(keys))
        last = min(max(end, first), len(keys))
        scales = None if key_scales is None else key_scales[first:last]
        found.append(_scores(q[row], w[row], keys[first:last], scales))
    return found


def score_bound_reference(
    q: Tensor,
    w: Tensor,
    values: Tensor,
    scales: Tensor | None,
    *,
    dot_rounding: float = 128 * 2.0**-24,
) -> Tensor:
    """How far one row's fp32 scores `[T]` may lie from float64; arguments as `_scores` has them.

    Products of e4m3 and of 16-bit values are exact while they stay in fp32's range. The sum of 128
    is off by `dot_rounding` of the sum of the magnitudes (fp32 in any order: 127 roundings of
    2^-24; a matrix unit that keeps fewer bits has more). relu enlarges no error. Each head's
    weight, the sum over H heads and the scale are H + 1 more roundings of the sum of the
    magnitudes.
    """
    q, w, values = q.double().abs(), w.double().abs(), values.double().abs()
    magnitudes = (w[:, None] * torch.einsum("hd,td->ht", q, values)).sum(dim=0)
    rounding = dot_rounding + (len(w) + 1) * 2.0**-24
    if scales is not None:
        magnitudes *= scales.double().abs()
    return 1.01 * rounding * magnitudes + 2.0**-140


def top_k_reference(scores: list[float], top_k: int) -> list[int]:
    """Positions of the top_k largest scores: ascending, ties to the lowest, then -1 to the end.

    NaN and -inf are never selected; -0 equals 0.
    """
    allowed = [t for t, score in enumerate(scores) if score > -math.inf]
    best = sorted(allowed, key=lambda t: (-scores[t], t))[:top_k]
    return sorted(best) + [-1] * (top_k - len(best))
