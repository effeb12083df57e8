"""Writes a packed model back as the checkpoint it came from: same names, same format, same bits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from firesteel.checkpoint.families import expert_name
from firesteel.checkpoint.layers import ExpertLayer
from firesteel.checkpoint.sources import QuantizedSource, RoundedSource, Source, StoredBias
from firesteel.formats.quantize import ALL_BUT_EXPERTS
from firesteel.formats.registry import format_named
from firesteel.integrations.transformers.plan import LoadPlan
from firesteel.modules.packed import PackedExperts

__all__ = ["saved_config", "stored_tensors"]


def saved_config(plan: LoadPlan) -> dict[str, Any] | None:
    """The quantization_config of the checkpoint that `stored_tensors` makes.

    None for a plain checkpoint that stays plain.
    """
    contents = plan.contents
    if contents.checkpoint.quantization:
        return dict(contents.checkpoint.quantization)
    sources = [layer.sources[0][0] for layer in plan.experts.values()]
    if not sources:
        return None
    assert isinstance(sources[0], RoundedSource)
    return sources[0].recipe.config(ignore=ALL_BUT_EXPERTS)


def stored_tensors(model: Any, plan: LoadPlan) -> dict[str, Tensor]:
    """The state dict with each packed module replaced by the tensors of its format.

    Takes as much memory again as the packed weights.
    """
    extras = model.hf_quantizer.report.extras
    own = tuple(f"{path}." for path in (*plan.experts, *plan.packed))
    state: dict[str, Tensor] = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not name.startswith(own) or name.endswith(".bias")
    }
    for path, layer in plan.experts.items():
        module = model.get_submodule(path)
        state = {name: t for name, t in state.items() if not name.startswith(f"{path}.")}
        state.update(_expert_tensors(module, layer))
    for path, source in plan.packed.items():
        matrix = model.get_submodule(path).packed.read(0, 0)
        state.update(_named(format_named(source.scheme.format).pack(source.scheme, matrix), source))
    for path in plan.expanded:
        del state[f"{path}.weight"]
    state.update(extras)
    return state


def _expert_tensors(module: PackedExperts, layer: ExpertLayer) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    # tensor name -> expert -> (rows, slice) of a tensor that all experts share
    shared: dict[str, dict[int, list[tuple[slice, Tensor]]]] = defaultdict(dict)
    for part, sources in enumerate(layer.sources):
        stack = module.down if part == 2 else module.gate_up
        for expert, source in enumerate(sources):
            matrix = stack.read(expert, part % 2)
            packed = format_named(source.scheme.format).pack(source.scheme, matrix)
            if isinstance(source, QuantizedSource) and source.index is not None:
                for suffix, tensor in packed.items():
                    slices = shared[source.tensors[suffix]].setdefault(expert, [])
                    slices.append((source.rows, tensor))
            else:
                tensors.update(_named(packed, source, layer.prefix, expert, part))
    for name, experts in shared.items():
        tensors[name] = torch.stack([_merge(experts[e]) for e in range(len(experts))])
    tensors.update(_bias_tensors(module, layer))
    return tensors


def _named(
    packed: Mapping[str, Tensor],
    source: Source,
    prefix: str = "",
    expert: int = 0,
    part: int = 0,
) -> dict[str, Tensor]:
    if isinstance(source, QuantizedSource):
        return {source.tensors[suffix]: tensor for suffix, tensor in packed.items()}
    assert isinstance(source, RoundedSource)
    layer = source.stored_name(prefix, expert, part)
    return {f"{layer}.{suffix}": tensor for suffix, tensor in packed.items()}


def _merge(slices: list[tuple[slice, Tensor]]) -> Tensor:
    """Rows of gate and up back into the tensor that holds both."""
    if len(slices) == 1:
        return slices[0][1]
    first = slices[0][1]
    merged = first.new_empty(sum(tensor.shape[0] for _, tensor in slices), *first.shape[1:])
    for rows, tensor in slices:
        merged[rows] = tensor
    return merged


def _bias_tensors(module: PackedExperts, layer: ExpertLayer) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    shared: dict[str, dict[int, list[tuple[slice, Tensor]]]] = defaultdict(dict)
    for part, sources in enumerate(layer.biases):
        bias = module.down_bias if part == 2 else module.gate_up_bias
        assert bias is not None
        rows = bias.shape[1] // (1 if part == 2 else 2)
        for expert, source in enumerate(sources):
            assert isinstance(source, StoredBias)
            own = bias[expert, rows * (part % 2) : rows * (part % 2 + 1)]
            if isinstance(layer.sources[part][expert], RoundedSource) and source.index is not None:
                # The weight gets tensors of its own, so its bias stands beside them.
                tensors[f"{expert_name(layer.prefix, expert, part)}.bias"] = own.clone()
            elif source.index is None:
                tensors[source.tensor] = own.clone()
            else:
                shared[source.tensor].setdefault(expert, []).append((source.rows, own))
    for name, experts in shared.items():
        tensors[name] = torch.stack([_merge(experts[e]) for e in range(len(experts))])
    return tensors
