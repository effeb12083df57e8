"""Where one matrix of a checkpoint is, and how to read it.

A source knows the tensors, the slice of a tensor that all experts share, and the rows of a slice
that gate and up share. What it gives is always one projection of one expert (or one dense layer).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from firesteel.checkpoint.families import expert_name
from firesteel.checkpoint.files import Reader
from firesteel.errors import CheckpointError, InvalidArgumentError
from firesteel.formats.base import Matrix, Scheme
from firesteel.formats.quantize import Recipe, quantize_matrix
from firesteel.formats.registry import format_named

__all__ = [
    "BiasSource",
    "PlainSource",
    "QuantizedSource",
    "RoundedSource",
    "Source",
    "StoredBias",
]


class Source(Protocol):
    """A matrix that can be read as codes and scales."""

    @property
    def scheme(self) -> Scheme:
        """How the matrix is stored once read."""
        ...

    def read(self, reader: Reader) -> Matrix:
        """The matrix in memory of its own."""
        ...


class BiasSource(Protocol):
    """A bias vector that can be read."""

    def read(self, reader: Reader) -> Tensor:
        """The vector; may share memory with the file."""
        ...


@dataclass(frozen=True, slots=True)
class QuantizedSource:
    """A matrix stored in a quantised format.

    Fields
        layer    the layer's name, for messages
        scheme   how it is stored
        tensors  suffix to the tensor's name
        index    the expert, where all experts of a layer share a tensor
        rows     the rows of that slice
    """

    layer: str
    scheme: Scheme
    tensors: Mapping[str, str]
    index: int | None = None
    rows: slice = field(default_factory=lambda: slice(None))

    def fitted(self, shape: Sequence[int] | None, taker: str) -> QuantizedSource:
        """The same with the shape of the matrix that takes it, which some formats pad.

        Args:
            shape: of a matrix `[n, k]`; anything else does not fit.
            taker: whose it is, for messages.

        Raises
            CheckpointError: it is stored in another shape.
        """
        scheme = None
        if shape is not None and len(shape) == 2:
            scheme = self.scheme.fitted(shape[0], shape[1])
        if scheme is None:
            stored = [self.scheme.n, self.scheme.k]
            raise CheckpointError(f"{self.layer}: stored as {stored}, {taker} is {shape}")
        return replace(self, scheme=scheme)

    def read(self, reader: Reader) -> Matrix:
        """Read and unpack.

        Raises
            CheckpointError: a tensor cannot be read or its bytes are not of the scheme.
        """
        form = format_named(self.scheme.format)
        needed = form.tensors(self.scheme)
        stored: dict[str, Tensor] = {}
        for suffix in needed:
            tensor = reader.tensor(self.tensors[suffix], self.index)
            stored[suffix] = tensor if self.index is None else tensor[self.rows]
        try:
            return form.unpack(self.scheme, stored)
        except CheckpointError as error:
            raise CheckpointError(f"{self.layer}: {error}") from error


@dataclass(frozen=True, slots=True)
class PlainSource:
    """A matrix stored in 16 or 32 bits; fields as in `QuantizedSource`.

    `is_transposed` says that the slice is stored `[k, n]`.
    """

    layer: str
    tensor: str
    index: int | None = None
    rows: slice = field(default_factory=lambda: slice(None))
    is_transposed: bool = False

    def read(self, reader: Reader) -> Tensor:
        """The matrix `[n, k]`; may share memory with the file."""
        tensor = reader.tensor(self.tensor, self.index)
        if self.is_transposed:
            tensor = tensor.T
        return tensor if self.index is None else tensor[self.rows]


@dataclass(frozen=True, slots=True)
class RoundedSource:
    """A plain matrix that is quantised when it is read."""

    plain: PlainSource
    recipe: Recipe
    scheme: Scheme

    def stored_name(self, prefix: str, expert: int, part: int) -> str:
        """The name of the layer once it is stored: its own, or of a shared tensor one an expert."""
        if self.plain.index is None:
            return self.plain.tensor.removesuffix(".weight")
        return expert_name(prefix, expert, part)

    def read(self, reader: Reader) -> Matrix:
        """Read and round to the recipe's nearest codes.

        Raises
            CheckpointError: the weights hold NaN or infinity.
            InvalidArgumentError: the recipe cannot store them.
        """
        weight = self.plain.read(reader)
        if not torch.isfinite(weight).all():
            raise CheckpointError(f"{self.plain.layer}: weight holds NaN or infinity")
        try:
            _, matrix = quantize_matrix(weight, self.recipe)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{self.plain.layer}: {error}") from error
        return matrix


@dataclass(frozen=True, slots=True)
class StoredBias:
    """A bias vector in a file; fields as in `PlainSource`."""

    tensor: str
    index: int | None = None
    rows: slice = field(default_factory=lambda: slice(None))

    def read(self, reader: Reader) -> Tensor:
        """The vector; may share memory with the file."""
        return reader.tensor(self.tensor, self.index)[self.rows]
