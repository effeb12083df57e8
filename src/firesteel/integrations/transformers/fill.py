"""Streams a checkpoint into packed modules, matrix by matrix, a layer's files mapped at once."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from firesteel.checkpoint.files import Reader
from firesteel.checkpoint.layers import ExpertLayer
from firesteel.checkpoint.sources import QuantizedSource
from firesteel.formats.packed import PackedWeights
from firesteel.formats.tiled_int4 import TiledInt4Weights, can_tile
from firesteel.integrations.transformers.modules import PackedExperts, PackedLinear
from firesteel.integrations.transformers.plan import LoadPlan
from firesteel.integrations.transformers.report import LoadReport, report_of
from firesteel.progress import progress_bar

__all__ = ["fill", "fill_experts", "settle"]


def fill(model: Any, plan: LoadPlan) -> LoadReport:
    """Read every matrix of the plan into its module.

    Raises
        CheckpointError: a tensor cannot be read, or its bytes are not of its scheme.
    """
    start = time.perf_counter()
    checkpoint = plan.contents.checkpoint
    layers = [*plan.experts.items(), *plan.packed.items(), *plan.expanded.items()]
    with progress_bar("packing", len(layers), show=True) as step, torch.no_grad():
        for path, item in layers:
            module = model.get_submodule(path)
            # A reader a layer: closing it lets go of the mapped file.
            with checkpoint.reader() as reader:
                if isinstance(item, ExpertLayer):
                    fill_experts(module, item, reader)
                elif isinstance(module, PackedLinear):
                    module.packed.write(0, 0, item.read(reader))
                else:
                    _fill_weight(module.weight, item, reader)
            settle(module)
            step()
        with checkpoint.reader() as reader:
            # Saving gives these back: of an expanded weight the host only holds the rounded one.
            expanded = [n for source in plan.expanded.values() for n in source.tensors.values()]
            kept = [*plan.extras, *expanded]
            extras = {name: reader.tensor(name).clone() for name in kept}
    return report_of(model, plan, extras, time.perf_counter() - start)


def fill_experts(module: PackedExperts, layer: ExpertLayer, reader: Reader) -> None:
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


def _fill_weight(weight: Tensor, source: QuantizedSource, reader: Reader) -> None:
    """Expand into a parameter of the host's own, rounded to its type once."""
    weight.copy_(source.read(reader).dequantize(source.scheme))
