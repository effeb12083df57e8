"""Which module of a transformers model takes which matrices of a checkpoint.

Pure: reads headers and the skeleton of the model (on the meta device), changes neither.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from firesteel.checkpoint.families import ANY_EXPERT_TENSOR, module_path
from firesteel.checkpoint.layers import CACHE_SCALES, Contents, ExpertLayer
from firesteel.checkpoint.sources import QuantizedSource
from firesteel.errors import CheckpointError

__all__ = ["LoadPlan", "check_shapes", "lacking", "patterns_of", "plan_load", "unplaced"]

_EXPERTS_MODULE = re.compile(r"(?:.*\.)?layers\.(\d+)\.mlp\.experts")
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.")
# Buffers that older checkpoints hold and every host computes.
_COMPUTED = re.compile(r"(?:.*\.)?rotary_emb\.inv_freq")


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What firesteel loads, and what it leaves to the host.

    Fields
        contents  the checkpoint
        experts   module path to the layer whose experts it takes
        packed    module path of each linear that stays packed
        expanded  module path of each module whose weight is expanded, exactly, into the host's own
                  parameter: modules that are no `nn.Linear`, or that the host keeps in fp32
        ignored   layers of the checkpoint that the host's model does not have and says so
                  (multi-token prediction)
        host_experts  layers of the model whose experts are plain: the host's own parameters
    """

    contents: Contents
    experts: dict[str, ExpertLayer]
    packed: dict[str, QuantizedSource]
    expanded: dict[str, QuantizedSource]
    ignored: tuple[str, ...]
    host_experts: int

    @property
    def extras(self) -> list[str]:
        """Tensors of the formats that nothing reads, kept so that saving gives them back."""
        experts = (name for layer in self.experts.values() for name in layer.extras)
        return [*experts, *self.contents.dense_extras]

    @property
    def claimed(self) -> list[str]:
        """Tensors of linears that the host must not report as unexpected."""
        sources = (*self.packed.values(), *self.expanded.values())
        names = {name for source in sources for name in source.tensors.values()}
        return sorted(names.union(self.contents.dense_extras))


def plan_load(model: nn.Module, contents: Contents) -> LoadPlan:
    """Match the checkpoint with the model.

    Raises
        CheckpointError: experts of the model are not in the checkpoint, a quantised matrix of the
            checkpoint has no module in the model, or its shape differs from the module's.
    """
    finder = _Finder(model, contents.predictors)
    ignored: list[str] = []
    experts: dict[str, ExpertLayer] = {}
    for layer in contents.experts:
        found = finder.find(module_path(layer.prefix))
        if found is not None:
            experts[found] = layer
        elif finder.is_ignored(layer.prefix + "."):
            ignored.append(layer.prefix)
        else:
            raise CheckpointError(
                f"{layer.prefix}: the model that the config describes has no such layer"
            )
    for name in finder.modules:
        if _EXPERTS_MODULE.fullmatch(name) and name not in experts:
            raise CheckpointError(f"{name}: missing, the checkpoint has no tensor of its experts")
    packed: dict[str, QuantizedSource] = {}
    expanded: dict[str, QuantizedSource] = {}
    for source in contents.dense:
        found = finder.find(module_path(source.layer))
        if found is None:
            if not finder.is_ignored(source.layer + "."):
                raise CheckpointError(
                    f"{source.layer}: the model that the config describes has no such layer"
                )
            ignored.append(source.layer)
            continue
        if found in packed or found in expanded:
            raise CheckpointError(f"{source.layer}: a second layer for the model's {found}")
        weight = getattr(finder.modules[found], "weight", None)
        shape = None if weight is None else list(weight.shape)
        source = source.fitted(shape, f"the model's {found}.weight")
        finder.check_not_tied(found, source.layer)
        stays_packed = type(finder.modules[found]) is nn.Linear and not finder.is_fp32(found)
        (packed if stays_packed else expanded)[found] = source
    packs = {path: layer for path, layer in experts.items() if layer.is_packed}
    num_plain = len(experts) - len(packs)
    return LoadPlan(contents, packs, packed, expanded, tuple(ignored), num_plain)


def lacking(model: nn.Module, plan: LoadPlan) -> list[str]:
    """Tensors of a model outside its experts that the checkpoint has in no form, sorted.

    Args:
        model: the skeleton that the plan was made for.
    """
    finder = _Finder(model, plan.contents.predictors)
    held: set[str] = set()
    for name in plan.contents.checkpoint.headers:
        held.update(finder.candidates(module_path(name)))
    held.update(f"{path}.weight" for path in (*plan.packed, *plan.expanded))
    held.update(finder.tied)
    return sorted(
        name for name in model.state_dict() if name not in held and not _EXPERTS_MODULE.match(name)
    )


def check_shapes(model: nn.Module, plan: LoadPlan) -> None:
    """Refuse a tensor that is stored plain in another shape than the model's.

    `scan` and `plan_load` see to experts and to what is quantised.

    Args:
        model: the skeleton that the plan was made for.

    Raises
        CheckpointError: it names the first.
    """
    finder = _Finder(model, plan.contents.predictors)
    state = model.state_dict()
    headers = plan.contents.checkpoint.headers
    for name in _plain(plan):
        own = next((n for n in finder.candidates(module_path(name)) if n in state), None)
        if own is not None and headers[name].shape != tuple(state[own].shape):
            raise CheckpointError(
                f"tensor {name}: shape {list(headers[name].shape)}, "
                f"the config gives {list(state[own].shape)}"
            )


def unplaced(model: nn.Module, plan: LoadPlan) -> list[str]:
    """Tensors outside of experts that the model has no place for and no host passes over, sorted.

    Args:
        model: the skeleton that the plan was made for.
    """
    finder = _Finder(model, plan.contents.predictors)
    state = model.state_dict()
    found: list[str] = []
    for name in _plain(plan):
        layer = _LAYER.match(name)
        if (
            any(own in state for own in finder.candidates(module_path(name)))
            or (layer is not None and int(layer[1]) >= plan.contents.geometry.num_layers)
            or finder.is_ignored(name)
            or name.rpartition(".")[2] in CACHE_SCALES
            or _COMPUTED.fullmatch(name)
        ):
            continue
        found.append(name)
    return sorted(found)


def _plain(plan: LoadPlan) -> list[str]:
    """Tensors that are no expert's and of no quantised matrix."""
    claimed = set(plan.claimed)
    return [
        name
        for name in plan.contents.checkpoint.headers
        if name not in claimed and ANY_EXPERT_TENSOR.fullmatch(name) is None
    ]


def patterns_of(names: Sequence[str]) -> list[str]:
    """Regular expressions that match exactly `names`, one for all layers of a kind.

    A model has tens of thousands of tensors and a few dozen kinds of them; matching each name
    against each would take seconds.
    """
    kinds: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in names:
        found = re.fullmatch(r"(.*\blayers\.)(\d+)(\..*)", name, re.DOTALL)
        if found is None:
            kinds[(name, "")].append("")
        else:
            kinds[(found[1], found[3])].append(found[2])
    return [
        rf"{re.escape(head)}(?:{'|'.join(sorted(set(layers), key=int))}){re.escape(tail)}$"
        if tail
        else rf"{re.escape(head)}$"
        for (head, tail), layers in kinds.items()
    ]


class _Finder:
    def __init__(self, model: Any, predictors: range) -> None:
        self.modules: dict[str, nn.Module] = dict(model.named_modules())
        self._base = str(getattr(model, "base_model_prefix", "") or "")
        ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        # Hosts name layers that predict further tokens for models of one size alone.
        own = [rf"layers\.{layer}\." for layer in predictors]
        self._ignored = [re.compile(pattern) for pattern in (*ignored, *own)]
        kept = (
            *(getattr(model, "_keep_in_fp32_modules", None) or ()),
            *(getattr(model, "_keep_in_fp32_modules_strict", None) or ()),
        )
        self.tied: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
        self._fp32 = [re.compile(rf"(?:^|\.){re.escape(name)}(?:\.|$)") for name in kept]

    def find(self, path: str) -> str | None:
        """The module's own path: a checkpoint may be of the model with or without its head."""
        return next((name for name in self.candidates(path) if name in self.modules), None)

    def candidates(self, name: str) -> tuple[str, str, str]:
        """What a name in a checkpoint may be called in the model."""
        return (name, f"{self._base}.{name}", name.removeprefix(f"{self._base}."))

    def is_ignored(self, name: str) -> bool:
        """Whether the host says that it leaves out tensors of this name."""
        return any(pattern.search(name) for pattern in self._ignored)

    def check_not_tied(self, path: str, layer: str) -> None:
        """Refuse a quantised weight in whose place the host would use another one.

        Raises
            CheckpointError: the config ties it.
        """
        source = self.tied.get(f"{path}.weight")
        if source is not None:
            raise CheckpointError(
                f"{layer}: quantised, but the config says tie_word_embeddings: true, "
                f"so that its weight is {source}"
            )

    def is_fp32(self, path: str) -> bool:
        """Whether the host keeps the module in fp32."""
        return any(pattern.search(f"{path}.weight") for pattern in self._fp32)
