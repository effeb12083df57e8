"""Streams a checkpoint into a model's modules, a layer's files mapped at once."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from firesteel.checkpoint.files import Reader
from firesteel.checkpoint.layers import ExpertLayer
from firesteel.checkpoint.sources import QuantizedSource
from firesteel.integrations.transformers.plan import LoadPlan
from firesteel.integrations.transformers.report import LoadReport, report_of
from firesteel.modules.fill import fill_experts, settle
from firesteel.modules.packed import PackedLinear
from firesteel.progress import progress_bar

__all__ = ["fill"]


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


def _fill_weight(weight: Tensor, source: QuantizedSource, reader: Reader) -> None:
    """Expand into a parameter of the host's own, rounded to its type once."""
    weight.copy_(source.read(reader).dequantize(source.scheme))
