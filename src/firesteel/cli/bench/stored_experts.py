"""What quantised experts take in a file, and how far they are from the plain ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from firesteel.checkpoint.files import Checkpoint
from firesteel.checkpoint.layers import Contents, scan
from firesteel.checkpoint.sources import RoundedSource, Source
from firesteel.formats.quantize import parse_recipe
from firesteel.formats.registry import format_named

__all__ = ["StoredExperts", "stored_experts"]

# To find plain matrices takes some recipe; nothing is rounded by it. It takes every shape.
_ANY = "int8-channel"


@dataclass(frozen=True, slots=True)
class StoredExperts:
    """All experts of a checkpoint.

    Fields
        num_bytes  of their tensors in a file
        error      sum of the squared errors of their weights, by the sum of the weights' squares:
                   of noise around 0 the mean squared error by the variance. None without plain
                   experts of that size
    """

    num_bytes: int
    error: float | None


def stored_experts(plain: Path, recipe: str | Path) -> StoredExperts:
    """Experts that `recipe` makes of those in the folder `plain`, or that are in a folder.

    Raises
        FiresteelError: a checkpoint cannot be read, or the recipe cannot store its experts.
    """
    opened = Checkpoint.open(plain)
    if isinstance(recipe, Path):
        quantized = scan(Checkpoint.open(recipe))
    else:
        quantized = scan(opened, parse_recipe(recipe))
    num_bytes = sum(map(_file_bytes, _sources(quantized)))
    if opened.quantization:
        return StoredExperts(num_bytes, None)
    originals = scan(opened, parse_recipe(_ANY))
    if originals.geometry != quantized.geometry or not num_bytes:
        return StoredExperts(num_bytes, None)
    return StoredExperts(num_bytes, _error(originals, quantized))


def _file_bytes(source: Source) -> int:
    tensors = format_named(source.scheme.format).tensors(source.scheme)
    return sum(header.num_bytes for header in tensors.values())


def _error(originals: Contents, quantized: Contents) -> float | None:
    error = energy = 0.0
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(contents.checkpoint.reader()) for contents in (originals, quantized)
        )
        for before, after in zip(_sources(originals), _sources(quantized), strict=True):
            assert isinstance(before, RoundedSource)
            weight = before.plain.read(first).double()
            rounded = after.read(second).dequantize(after.scheme).double()
            energy += float(weight.square().sum())
            error += float((rounded - weight).square().sum())
    return error / energy if energy else None


def _sources(contents: Contents) -> Iterator[Source]:
    """Every matrix of every expert, in one order; none of plain ones."""
    for layer in contents.experts:
        for sources in layer.sources:
            yield from sources
