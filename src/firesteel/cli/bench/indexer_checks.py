"""What can be wrong with a selection; each check gives the first fault in words, or None."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = [
    "DOT_ROUNDING",
    "bound_fault",
    "difference",
    "layout_fault",
    "score_bound",
    "score_fault",
]

DOT_ROUNDING = {"e4m3": 2.0**-10, "bf16": 2.0**-16, "fp16": 2.0**-16}
"""What a Hopper's sum of 128 products may be off by, as a part of the sum of the magnitudes.

By the type of the keys. Judgement, not a measurement: of e4m3 it keeps 13 bits below the leading
one of each sum, of 16-bit ones it adds up in fp32. The record has what was seen, `score_error`.
"""


def _first(is_wrong: Tensor) -> tuple[int, int] | None:
    """Row and place of the first fault of `[r, n]`."""
    rows = is_wrong.any(dim=1)
    if not bool(rows.any()):
        return None
    row = int(rows.int().argmax())
    return row, int(is_wrong[row].int().argmax())


def _number(rows: Tensor | None, row: int) -> int:
    return row if rows is None else int(rows[row])


def difference(found: Tensor, wanted: Tensor, rows: Tensor | None = None) -> str | None:
    """Where two results `[r, k]` differ.

    Args:
        rows: the rows' numbers `[r]`, for the message; here and below from 0 by default.
    """
    at = _first(found != wanted)
    if at is None:
        return None
    row = _number(rows, at[0])
    return f"row {row}, place {at[1]}: got {found[at].item()}, must be {wanted[at].item()}"


def layout_fault(indices: Tensor, lengths: Tensor, rows: Tensor | None = None) -> str | None:
    """Whether indices `[r, k]` of rows of these lengths are ascending, packed left, then -1."""
    there = indices >= 0
    both = there[:, 1:] & there[:, :-1]
    no = torch.zeros_like(there)[:, :1]
    kinds = {
        "neither a position nor -1": indices < -1,
        "past the row's keys": indices >= lengths[:, None],
        "a position after -1": torch.cat((no, there[:, 1:] & ~there[:, :-1]), dim=1),
        "not above the one before": torch.cat(
            (no, both & (indices[:, 1:] <= indices[:, :-1])), dim=1
        ),
    }
    for words, is_wrong in kinds.items():
        at = _first(is_wrong)
        if at is not None:
            row = _number(rows, at[0])
            return f"row {row}, place {at[1]}: got {indices[at].item()}, {words}"
    return None


def score_bound(magnitudes: Tensor, num_heads: int, cache_dtype: str = "e4m3") -> Tensor:
    """How far fp32 scores may lie from float64, as `score_bound_reference` has it."""
    rounding = DOT_ROUNDING[cache_dtype] + (num_heads + 1) * 2.0**-24
    return 1.01 * rounding * magnitudes + 2.0**-140


def bound_fault(
    indices: Tensor, scores: Tensor, bound: Tensor, starts: Tensor, rows: Tensor | None = None
) -> str | None:
    """Whether a selection can be that of scores which lie within a bound of these.

    Any such scores have top_k keys at or above the k-th largest `score - bound`, and no more than
    that above the k-th largest `score + bound`. So a key whose `score + bound` is below the first
    cannot be selected, and one whose `score - bound` is above the second must be.

    Args:
        indices: `[r, k]` from `starts` on, as `layout_fault` lets pass.
        scores, bound: `[r, T]`; -inf of a key that must never be selected.
        rows: as `difference` has it.
    """
    top_k, total = indices.shape[1], scores.shape[1]
    places = (indices.long() + starts[:, None]).masked_fill(indices < 0, total)
    chosen = torch.zeros(len(scores), total + 1, dtype=torch.bool, device=scores.device)
    chosen = chosen.scatter_(1, places, True)[:, :total]
    allowed = scores > -math.inf
    at = _first(chosen & ~allowed)
    if at is not None:
        return f"row {_number(rows, at[0])}: selects key {at[1]}, which has no score"
    count, wanted = chosen.sum(dim=1), allowed.sum(dim=1).clamp(max=top_k)
    at = _first((count != wanted)[:, None])
    if at is not None:
        row = at[0]
        number, selects = _number(rows, row), int(count[row])
        return f"row {number}: selects {selects} keys, must be {int(wanted[row])}"
    lower, upper = scores - bound, scores + bound
    least, most = _kth(lower, top_k), _kth(upper, top_k)
    for words, limit, is_wrong in (
        ("selects", least, chosen & (upper < least)),
        ("leaves out", most, allowed & ~chosen & (lower > most)),
    ):
        at = _first(is_wrong)
        if at is not None:
            row = _number(rows, at[0])
            return (
                f"row {row}: {words} key {at[1]}, of score {scores[at].item():.9g} "
                f"within {bound[at].item():.3g}, where the {top_k}-th largest is "
                f"{'at least' if words == 'selects' else 'at most'} {limit[at[0]].item():.9g}"
            )
    return None


def _kth(scores: Tensor, k: int) -> Tensor:
    """The k-th largest of each row `[r, 1]`; -inf where there are fewer."""
    if scores.shape[1] < k:
        return torch.full_like(scores[:, :1], -math.inf)
    return scores.topk(k).values[:, -1:]


def score_fault(
    selected: Tensor,
    indices: Tensor,
    scores: Tensor,
    magnitudes: Tensor,
    starts: Tensor,
    *,
    num_heads: int,
    cache_dtype: str = "e4m3",
    rows: Tensor | None = None,
) -> tuple[str | None, float]:
    """Whether selected scores `[r, k]` are near float64 and then -inf, and their error.

    The error is the largest distance as a part of the sum of the magnitudes.
    """
    there = indices >= 0
    at = _first((there != selected.isfinite()) | (~there & (selected != -math.inf)))
    if at is not None:
        words = "must be a number" if there[at] else "must be -inf"
        place = f"row {_number(rows, at[0])}, place {at[1]}"
        return f"{place}: got a score of {selected[at].item()}, {words}", 0.0
    places = (indices.long() + starts[:, None]).clamp(min=0)
    error = (selected.double() - scores.gather(1, places)).abs().masked_fill(~there, 0.0)
    sums = magnitudes.gather(1, places)
    parts = torch.where(error > 0, error / sums, 0.0)
    largest = float(parts.max())
    at = _first(error > score_bound(sums, num_heads, cache_dtype))
    if at is not None:
        row = _number(rows, at[0])
        return (
            f"row {row}, place {at[1]}: got a score of {selected[at].item():.9g}, off by "
            f"{parts[at].item():.3g} of its terms' magnitudes",
            largest,
        )
    return None, largest
