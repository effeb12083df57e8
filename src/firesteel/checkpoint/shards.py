"""What one rank holds of a layer's experts: some of them (expert parallel), or a part of each.

Tensor parallel ranks share the intermediate axis: a rank has some rows of gate and up and the same
columns of down, and what the ranks give adds up to the whole layer. Which columns these are no one
outside of the layer can tell, so ranks need not have equally many: runs of whole units
(`cut_unit`), and of down matrices that name the groups of their columns (act-order) whole groups,
which are other columns in each expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from firesteel.checkpoint.files import Reader
from firesteel.checkpoint.layers import ExpertLayer
from firesteel.checkpoint.sources import BiasSource, Source
from firesteel.errors import InvalidArgumentError, UnsupportedError
from firesteel.formats.base import Matrix, Scheme
from firesteel.formats.shard import (
    columns_of_groups,
    columns_scheme,
    cut_unit,
    rows_scheme,
    split,
    take_columns,
    take_rows,
)

__all__ = ["cuts", "expert_map", "shard_layer"]


def expert_map(num_experts: int, held: Sequence[int]) -> Tensor:
    """The place of each expert among those held, -1 of others: int32 `[num_experts]`.

    Raises
        InvalidArgumentError: an expert that there is not, or one twice.
    """
    found = torch.full((num_experts,), -1, dtype=torch.int32)
    _check_held(num_experts, held)
    found[list(held)] = torch.arange(len(held), dtype=torch.int32)
    return found


def shard_layer(
    layer: ExpertLayer, *, held: Sequence[int] | None = None, rank: int = 0, count: int = 1
) -> ExpertLayer:
    """A layer of what one rank has of another.

    Args:
        layer: a whole layer, read and packed by firesteel.
        held: the experts that the rank has, in this order; all by default.
        rank, count: which of how many ranks that share each of those experts.

    Returns
        A layer whose sources read parts. Biases of down belong to the first rank, so that they are
        added once; those of others are zeros.

    Raises
        InvalidArgumentError: a rank or an expert that there is not.
        UnsupportedError: more ranks than parts that the formats allow.
    """
    if not 0 <= rank < count:
        raise InvalidArgumentError(f"rank: got {rank}, must be 0 to {count - 1}")
    num_experts = len(layer.sources[0])
    held = range(num_experts) if held is None else held
    _check_held(num_experts, held)
    if count == 1:
        return replace(
            layer,
            sources=tuple(tuple(of_part[e] for e in held) for of_part in layer.sources),
            biases=tuple(tuple(of_part[e] for e in held) for of_part in layer.biases),
        )
    sources: tuple[list[Source], ...] = ([], [], [])
    biases: tuple[list[BiasSource], ...] = ([], [], [])
    for expert in held:
        whole = [of_part[expert] for of_part in layer.sources]
        cut = cuts(layer.prefix, [source.scheme for source in whole], count)[rank]
        own = _Own(whole[2], cut)
        for part in range(3):
            is_down = part == 2
            sources[part].append((_Columns if is_down else _Rows)(whole[part], own))
            if layer.biases:
                bias = layer.biases[part][expert]
                biases[part].append(_FirstBias(bias, rank) if is_down else _RowsBias(bias, own))
    return replace(
        layer,
        sources=tuple(map(tuple, sources)),
        biases=tuple(map(tuple, biases)) if layer.biases else (),
    )


def cuts(where: str, schemes: Sequence[Scheme], count: int) -> tuple[range, ...]:
    """The columns of down that each rank has, or where they name their groups the groups.

    Args:
        where: what is cut, for the message.
        schemes: of gate, up and down of an expert.
        count: ranks that share it.

    Raises
        UnsupportedError: more ranks than parts that the formats allow.
    """
    down = schemes[2]
    size, unit, name = down.k, cut_unit(schemes), "columns"
    if down.has_group_index:
        size, unit, name = down.num_groups, 1, "groups"
    found = split(size, count, unit)
    # Every rank refuses, lest the others go on and wait for one that does not come.
    if not all(found):
        raise UnsupportedError(
            f"{where}: got {count} ranks, {size} {name} of {unit} each make at most "
            f"{-(-size // unit)} parts"
        )
    return found


def _check_held(num_experts: int, held: Sequence[int]) -> None:
    if len(set(held)) != len(held) or any(not 0 <= e < num_experts for e in held):
        raise InvalidArgumentError(
            f"held: got {list(held)}, must be different experts of 0 to {num_experts - 1}"
        )


class _Own:
    """The columns of an expert's down that a rank has, and so its rows of gate and up."""

    def __init__(self, down: Source, cut: range) -> None:
        self._down = down
        self._cut = cut
        self._found: Tensor | None = None
        # Of groups that columns name it matters how many there are, not which.
        size = down.scheme.group_size
        columns = range(size * len(cut)) if down.scheme.has_group_index else cut
        self.scheme = columns_scheme(down.scheme, columns)

    def columns(self, reader: Reader) -> range | Tensor:
        """Which they are; where they name their groups the matrix is read to know, once."""
        if not self._down.scheme.has_group_index:
            return self._cut
        if self._found is None:
            self._found = columns_of_groups(self._down.scheme, self._down.read(reader), self._cut)
        return self._found


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of gate or up."""

    whole: Source
    own: _Own

    @property
    def scheme(self) -> Scheme:
        """As `Source`'s."""
        return rows_scheme(self.whole.scheme, self.own.scheme.k)

    def read(self, reader: Reader) -> Matrix:
        """As `Source`'s."""
        rows = self.own.columns(reader)
        return take_rows(self.whole.scheme, self.whole.read(reader), rows)[1]


@dataclass(frozen=True, slots=True)
class _Columns:
    """Columns of down."""

    whole: Source
    own: _Own

    @property
    def scheme(self) -> Scheme:
        """As `Source`'s."""
        return self.own.scheme

    def read(self, reader: Reader) -> Matrix:
        """As `Source`'s."""
        columns = self.own.columns(reader)
        scheme, matrix = take_columns(self.whole.scheme, self.whole.read(reader), columns)
        assert scheme == self.scheme
        return matrix


@dataclass(frozen=True, slots=True)
class _RowsBias:
    """Of a bias of gate or up what belongs to rows."""

    whole: BiasSource
    own: _Own

    def read(self, reader: Reader) -> Tensor:
        """As `BiasSource`'s."""
        rows = self.own.columns(reader)
        at = slice(rows.start, rows.stop) if isinstance(rows, range) else rows
        return self.whole.read(reader)[at]


@dataclass(frozen=True, slots=True)
class _FirstBias:
    """A bias of down, which one rank adds; the zeros of others."""

    whole: BiasSource
    rank: int

    def read(self, reader: Reader) -> Tensor:
        """As `BiasSource`'s."""
        bias = self.whole.read(reader)
        return bias if self.rank == 0 else torch.zeros_like(bias)
