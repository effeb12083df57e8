"""What the host's mask says a row of new tokens may see, a few rows at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["IndexMask"]

MAX_FLAGS = 1 << 25
"""Most pairs of row and key that are looked at at a time."""


@dataclass(frozen=True, slots=True)
class IndexMask:
    """The mask of a call of an indexer, as the host gives it.

    Fields
        tensor        `[B or 1, S or 1, T]`: bool (True is seen) or floating (added to scores); None
                      where the host goes by `position_ids` alone
        position_ids  `[B or 1, S]`: a row sees the keys up to its own; read where tensor is None
        batch, num_rows, num_keys  B, S and T
    """

    tensor: Tensor | None
    position_ids: Tensor | None
    batch: int
    num_rows: int
    num_keys: int

    def hidden(self, rows: slice, keys: slice = slice(None)) -> Tensor:
        """bool `[B, s, t]`: pairs whose score must not count."""
        if self.tensor is None:
            assert self.position_ids is not None
            ids = self.position_ids[:, rows]
            positions = torch.arange(self.num_keys, device=ids.device)[keys]
            found = positions > ids[:, :, None]
        else:
            part = self._part(rows, keys)
            found = ~part if part.dtype == torch.bool else _is_hidden(part)
        return found.expand(self.batch, -1, -1)

    def apply(self, scores: Tensor, rows: slice, keys: slice) -> Tensor:
        """Scores `[B, s, t]` with what the mask adds, and -inf where it hides."""
        if self.tensor is not None and self.tensor.dtype != torch.bool:
            scores = scores + self._part(rows, keys)
        return scores.masked_fill(self.hidden(rows, keys), -math.inf)

    def first_hidden(self) -> Tensor:
        """int32 `[B, S, 1]`: the first key that is hidden from a row; -1 where none is."""
        found: list[Tensor] = []
        for rows in self.chunks():
            # Neither max nor argmax of bool exists on every device.
            is_hidden, first = self.hidden(rows).to(torch.int8).max(dim=-1, keepdim=True)
            found.append(first.masked_fill(is_hidden == 0, -1))
        return torch.cat(found, dim=1).int()

    def shows(self, lost: Tensor) -> Tensor:
        """bool `[]`: whether a row sees one of the keys that are lost, bool `[B, T]`."""
        found = torch.zeros((), dtype=torch.bool, device=lost.device)
        for rows in self.chunks():
            found |= (lost[:, None] & ~self.hidden(rows)).any()
        return found

    def seen(self, positions: Tensor) -> Tensor:
        """bool `[B, S]`: whether row s sees the key at `positions[b, s]`, int64."""
        found = [
            ~self.hidden(rows).gather(-1, positions[:, rows, None]).squeeze(-1)
            for rows in self.chunks()
        ]
        return torch.cat(found, dim=1)

    def differs(self, positions: Tensor, is_valid: Tensor) -> Tensor:
        """bool `[]`: whether a row sees other keys than the valid ones up to its own position.

        Args:
            positions: int64 `[B, S]`, of the rows' own tokens.
            is_valid: bool `[B, T]`.
        """
        found = torch.zeros((), dtype=torch.bool, device=is_valid.device)
        keys = torch.arange(self.num_keys, device=is_valid.device)
        for rows in self.chunks():
            hidden = self.hidden(rows)
            wanted = is_valid[:, None] & (keys <= positions[:, rows, None])
            found |= (hidden == wanted).any()
            if self.tensor is not None and self.tensor.dtype != torch.bool:
                part = self._part(rows, slice(None))
                found |= ((part != 0) & ~hidden).any()
        return found

    def chunks(self) -> Iterator[slice]:
        """Rows, a few at a time."""
        step = max(1, MAX_FLAGS // max(1, self.batch * self.num_keys))
        for start in range(0, max(self.num_rows, 1), step):
            yield slice(start, min(start + step, self.num_rows))

    def key(self) -> tuple[object, ...]:
        """Equal for the masks of one forward, as long as the host keeps them."""
        source = self.position_ids if self.tensor is None else self.tensor
        assert source is not None
        where = (source.storage_offset(), tuple(source.shape), self.tensor is None)
        return (StorageWeakRef(source.untyped_storage()), *where, self.batch, self.num_keys)

    def _part(self, rows: slice, keys: slice) -> Tensor:
        assert self.tensor is not None
        tensor = self.tensor.expand(-1, self.num_rows, -1)
        return tensor[:, rows, keys]


def _is_hidden(added: Tensor) -> Tensor:
    """What the host adds to hide a key: the least number of the mask's type, or -inf."""
    return added <= torch.finfo(added.dtype).min
