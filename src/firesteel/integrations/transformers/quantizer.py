"""firesteel as a transformers quantizer: the hooks that `from_pretrained` calls, in their order."""

# transformers' hooks are typed by what its base class happens to return (None, set()).
# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false
from __future__ import annotations

import copy
import re
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ExpertsInterface
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from firesteel.checkpoint.files import Checkpoint
from firesteel.checkpoint.layers import scan
from firesteel.errors import CheckpointError, InvalidArgumentError
from firesteel.formats.quantize import parse_recipe
from firesteel.integrations.transformers.fill import fill
from firesteel.integrations.transformers.plan import LoadPlan, patterns_of, plan_load
from firesteel.integrations.transformers.report import LoadReport
from firesteel.integrations.transformers.save import saved_config, stored_tensors
from firesteel.modules.activation import stored_activation
from firesteel.modules.kernels import attach_kernels, host_settings
from firesteel.modules.packed import (
    IMPLEMENTATION,
    PackedExperts,
    PackedLinear,
    experts_forward,
)

__all__ = ["METHOD", "FiresteelConfig", "FiresteelQuantizer"]

METHOD = "firesteel"

ExpertsInterface.register(IMPLEMENTATION, experts_forward)


@register_quantization_config(METHOD)
class FiresteelConfig(QuantizationConfigMixin):
    """The quantization_config that makes transformers hand a checkpoint to firesteel.

    Args:
        checkpoint: the checkpoint's own quantization_config; {} for a plain one.
        recipe: how to quantise the experts of a plain checkpoint, for instance "int4-g128".
    """

    def __init__(
        self,
        checkpoint: Mapping[str, Any] | None = None,
        recipe: str | None = None,
        quant_method: str = METHOD,
    ) -> None:
        if quant_method != METHOD:
            raise InvalidArgumentError(f"quant_method: got {quant_method!r}, must be {METHOD!r}")
        self.quant_method = METHOD
        self.checkpoint = dict(checkpoint or {})
        self.recipe = recipe
        self.saved: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """What `save_pretrained` writes: the config of the checkpoint that it writes."""
        if self.saved is not None:
            return copy.deepcopy(self.saved)
        return {
            "quant_method": METHOD,
            "checkpoint": copy.deepcopy(self.checkpoint),
            "recipe": self.recipe,
        }


@register_quantizer(METHOD)
class FiresteelQuantizer(HfQuantizer):
    """Replaces experts and quantised linears by packed modules and fills them from the files."""

    requires_calibration = False
    quantization_config: FiresteelConfig

    def __init__(self, quantization_config: FiresteelConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        # A wrong variable ends here, not when all weights are read.
        self._settings = host_settings()
        self._plan: LoadPlan | None = None
        self._dtypes: dict[str, torch.dtype] = {}
        self._shapes: dict[str, torch.Size] = {}
        self.report: LoadReport | None = None

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Refuse what would lose weights: disk offload drops what it has not seen in the file."""
        del args
        device_map = kwargs.get("device_map")
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise InvalidArgumentError("device_map: got 'disk', packed experts stay in memory")

    def update_weight_conversions(
        self, weight_conversions: list[Any], model: Any = None
    ) -> list[Any]:
        """The host's conversions as they are: they serve the layers that firesteel leaves to it."""
        del model
        return weight_conversions

    def is_serializable(self, safe_serialization: Any = None) -> bool:
        """A packed model saves as the format that it came from."""
        del safe_serialization
        return True

    @property
    def is_trainable(self) -> bool:
        """Packed weights have no gradient."""
        return False

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        files = kwargs.get("checkpoint_files")
        if not files:
            raise CheckpointError(
                "checkpoint: firesteel loads from files, from_pretrained was given none"
            )
        recipe = self.quantization_config.recipe
        checkpoint = Checkpoint.open(Path(files[0]).parent)
        theirs, ours = {Path(file).name for file in files}, set(checkpoint.files.values())
        if theirs != ours:
            raise CheckpointError(
                f"checkpoint: transformers reads {sorted(theirs)}, firesteel {sorted(ours)}; "
                "no variant and no transformers_weights may choose other files"
            )
        contents = scan(checkpoint, None if recipe is None else parse_recipe(recipe))
        plan = plan_load(model, contents)
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        with torch.device("meta"):
            for path, experts in _experts(model, plan, dtype):
                model.set_submodule(path, experts)
            for path, source in plan.packed.items():
                linear = model.get_submodule(path)
                model.set_submodule(path, PackedLinear(source.scheme, linear.bias, dtype))
        _hide_from_host(model, plan)
        model.config._experts_implementation = IMPLEMENTATION
        self._plan = plan
        self._dtypes = _dtypes_of(model, dtype)
        self._shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        del kwargs
        assert self._plan is not None
        for name, tensor in model.state_dict().items():
            # transformers 5.16 compares no shapes where a quantizer is at work,
            if tensor.shape != self._shapes[name]:
                raise CheckpointError(
                    f"tensor {name}: shape {list(tensor.shape)}, "
                    f"the config gives {list(self._shapes[name])}"
                )
        for name, parameter in model.named_parameters():
            # and leaves what it renames or merges in the type that the file has.
            parameter.data = parameter.data.to(self._dtypes[name])
        report = fill(model, self._plan)
        kernels = attach_kernels(
            map(model.get_submodule, self._plan.experts),
            map(model.get_submodule, self._plan.packed),
            top_k=model.config.num_experts_per_tok,
            dtype=model.dtype,
            settings=self._settings,
        )
        self.report = report.with_kernels(kernels)
        self.quantization_config.saved = saved_config(self._plan)
        return model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The state dict in the checkpoint's own format, under its own names."""
        assert self._plan is not None
        return stored_tensors(model, self._plan), {}


def _dtypes_of(model: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The type that each parameter of a skeleton must have once loaded."""
    kept = "|".join(map(re.escape, model._get_dtype_plan(dtype)))
    is_kept = re.compile(rf"(?:^|\.)(?:{kept})(?:\.|$)")
    return {
        name: torch.float32 if kept and is_kept.search(name) else parameter.dtype
        for name, parameter in model.named_parameters()
    }


def _experts(
    model: Any, plan: LoadPlan, dtype: torch.dtype
) -> Generator[tuple[str, PackedExperts]]:
    """The modules of packed experts by their paths."""
    if not plan.experts:
        return
    # Once: a config may say of each of thousands of modules how it is quantised.
    activation = stored_activation(plan.contents.family, model.config.to_dict())
    for path, layer in plan.experts.items():
        experts = PackedExperts(
            model.config,
            plan.contents.geometry,
            (layer.schemes(0, 1), layer.schemes(2)),
            activation,
            dtype if layer.biases else None,
        )
        yield path, experts


def _hide_from_host(model: Any, plan: LoadPlan) -> None:
    """Tell transformers which names are firesteel's, so that it neither reports nor misses them."""
    unexpected = set(model._keys_to_ignore_on_load_unexpected or ())
    layers = sorted({layer.layer for layer in plan.experts.values()})
    if layers:
        numbers = "|".join(map(str, layers))
        unexpected.add(rf"layers\.(?:{numbers})\.(?:mlp|block_sparse_moe)\.experts\.")
    unexpected.update(rf"layers\.{layer}\." for layer in plan.contents.predictors)
    unexpected.update(patterns_of(plan.claimed))
    missing = set(model._keys_to_ignore_on_load_missing or ())
    own = [
        f"{path}.{name}"
        for path in (*plan.experts, *plan.packed)
        for name, _ in model.get_submodule(path).named_buffers()
    ]
    missing.update(patterns_of([*own, *(f"{path}.weight" for path in plan.expanded)]))
    model._keys_to_ignore_on_load_unexpected = unexpected
    model._keys_to_ignore_on_load_missing = missing
