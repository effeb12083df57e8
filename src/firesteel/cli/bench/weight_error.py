"""How far the experts of a quantised checkpoint are from those of the plain one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from torch import Tensor

from firesteel.checkpoint.files import Checkpoint, Reader
from firesteel.checkpoint.layers import Contents, scan
from firesteel.checkpoint.sources import RoundedSource, Source
from firesteel.formats.quantize import parse_recipe

__all__ = ["weight_error"]

# To find plain matrices takes some recipe; nothing is rounded by it. It takes every shape.
_ANY = "int8-channel"


def weight_error(plain: Path, recipe: str | Path) -> float | None:
    """Sum of the squared errors of all experts' weights, by the sum of the weights' squares.

    Of noise around 0 that is the mean squared error by the variance. None where `plain` is not a
    plain checkpoint, or that of a folder has other experts.

    Args:
        recipe: what rounds the plain experts, or the folder where they are stored quantised.

    Raises
        FiresteelError: a checkpoint cannot be read, or the recipe cannot store its experts.
    """
    opened = Checkpoint.open(plain)
    if opened.quantization:
        return None
    originals = scan(opened, parse_recipe(_ANY))
    if isinstance(recipe, Path):
        quantized = scan(Checkpoint.open(recipe))
    else:
        quantized = scan(opened, parse_recipe(recipe))
    if originals.geometry != quantized.geometry:
        return None
    error = energy = 0.0
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(contents.checkpoint.reader()) for contents in (originals, quantized)
        )
        for before, after in zip(_sources(originals), _sources(quantized), strict=True):
            assert isinstance(before, RoundedSource)
            weight = before.plain.read(first).double()
            energy += float(weight.square().sum())
            error += float((_read(after, second) - weight).square().sum())
    return error / energy if energy else None


def _read(source: Source, reader: Reader) -> Tensor:
    """The matrix that is stored, float64."""
    return source.read(reader).dequantize(source.scheme).double()


def _sources(contents: Contents) -> Iterator[Source]:
    """Every matrix of every expert, in one order."""
    for layer in contents.experts:
        for sources in layer.sources:
            yield from sources
