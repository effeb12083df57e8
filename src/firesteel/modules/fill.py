"""Fills packed modules from a checkpoint, matrix by matrix."""

from __future__ import annotations

from typing import Any

from firesteel.checkpoint.files import Reader
from firesteel.checkpoint.layers import ExpertLayer
from firesteel.errors import CheckpointError
from firesteel.formats.packed import PackedWeights
from firesteel.formats.tiled_int4 import TiledInt4Weights, can_tile
from firesteel.modules.packed import PackedExperts

__all__ = ["check_zero_biases", "fill_experts", "settle"]


def check_zero_biases(layer: ExpertLayer, reader: Reader) -> None:
    """Refuse a bias that the family does not have, unless it holds zeros.

    Raises
        CheckpointError: it names the first.
    """
    for name in layer.zero_biases:
        if bool(reader.tensor(name).any()):
            raise CheckpointError(
                f"tensor {name}: holds other numbers than 0, experts of this family have no bias"
            )


def fill_experts(module: PackedExperts, layer: ExpertLayer, reader: Reader) -> None:
    """Read every matrix and bias of a layer's experts into the module.

    Raises
        CheckpointError: a tensor cannot be read, its bytes are not of its scheme, or the layer has
            a bias of no use.
    """
    check_zero_biases(layer, reader)
    for part, sources in enumerate(layer.sources):
        stack = module.down if part == 2 else module.gate_up
        for expert, source in enumerate(sources):
            stack.write(expert, part % 2, source.read(reader))
    for part, biases in enumerate(layer.biases):
        bias = module.down_bias if part == 2 else module.gate_up_bias
        assert bias is not None
        rows = bias.shape[1] // (1 if part == 2 else 2)
        for expert, source in enumerate(biases):
            target = bias[expert, rows * (part % 2) : rows * (part % 2 + 1)]
            target.copy_(source.read(reader))


def settle(module: Any) -> None:
    """Put each filled stack into the form that its device multiplies fastest."""
    for name, child in list(module.named_children()):
        if isinstance(child, PackedWeights) and can_tile(child):
            setattr(module, name, TiledInt4Weights(child))
