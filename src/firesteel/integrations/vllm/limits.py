"""What the plugin refuses of an engine's options and layers, before any weight is read.

Nothing here imports vLLM: its configs and layers come as they are, and are asked for what they say.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from firesteel.checkpoint.families import Geometry
from firesteel.errors import UnsupportedError
from firesteel.integrations.vllm.support import METHOD
from firesteel.moe.activation import Activation

__all__ = [
    "activation_of",
    "check_draft",
    "check_graphs",
    "check_layer",
    "check_load_format",
    "check_workspace",
    "draft_of",
    "held_experts",
]

# By the engine's names.
_ACTIVATIONS = {
    "SILU": "silu",
    "SWIGLUOAI": "swigluoai",
    "SWIGLUOAI_UNINTERLEAVE": "swigluoai",
}
# The engine reads the checkpoint's own safetensors with these, or nothing.
_LOAD_FORMATS = (
    "auto",
    "hf",
    "safetensors",
    "fastsafetensors",
    "instanttensor",
    "runai_streamer",
    "dummy",
)
# With "auto" the engine takes these before others.
_CONSOLIDATED = "consolidated*.safetensors"


def check_load_format(load_config: Any, path: Path) -> None:
    """Refuse to load with an engine that reads other files than firesteel.

    Args:
        load_config: the engine's.
        path: the folder of the checkpoint.

    Raises
        UnsupportedError: a load format of other files, or "auto" with Mistral's own beside.
    """
    load_format = str(load_config.load_format)
    if load_format not in _LOAD_FORMATS:
        raise UnsupportedError(
            f"load_format: got {load_format!r}, must be one of {', '.join(_LOAD_FORMATS)}"
        )
    if load_format == "auto" and (others := sorted(file.name for file in path.glob(_CONSOLIDATED))):
        raise UnsupportedError(
            f"load_format: got 'auto', with which the engine reads {others[0]} in {path}, must be "
            "'safetensors'"
        )


def check_draft(config: Any, predictors: Sequence[str]) -> None:
    """Refuse a draft model that firesteel would load, before it or its target is read.

    One that is no model of its own (layers of the target that predict tokens) may be plain.

    Args:
        config: the engine's, of the target or of the draft.
        predictors: quantised matrices of the target's layers that predict tokens.

    Raises
        UnsupportedError: it is quantised.
    """
    speculative = config.speculative_config
    if speculative is None:
        return
    draft = speculative.draft_model_config
    if draft is None:
        return
    is_other = speculative.method == "draft_model" or draft.model != config.model_config.model
    if is_other and draft.quantization == METHOD:
        raise UnsupportedError(
            f"speculative_config: got the quantised draft model {draft.model}, must be plain: "
            "vLLM's loaders of draft models do not let firesteel read"
        )
    # vLLM has one method for all kinds of such layers.
    if not is_other and speculative.method == "mtp" and predictors:
        raise UnsupportedError(
            f"speculative_config: got method 'mtp', must be another or None: {predictors[0]} is "
            "quantised, and vLLM's loaders of draft models do not let firesteel read"
        )


def draft_of(config: Any) -> Literal["other", "target"] | None:
    """What predicts tokens: another model, none of firesteel's, layers of the target, or neither.

    Args:
        config: the engine's, which `check_draft` let pass.
    """
    speculative = config.speculative_config
    if speculative is None or speculative.draft_model_config is None:
        return None
    if speculative.draft_model_config.model != config.model_config.model:
        return "other"
    return "target" if speculative.method == "mtp" else None


def check_layer(layer: Any, ranks: Any, geometry: Geometry, *, hidden_size: int) -> None:
    """Refuse a layer of experts that firesteel would not run right.

    Every rank refuses what one of them cannot do, so that none reads weights meanwhile.

    Args:
        layer: the engine's module.
        ranks: the engine's sizes of what experts are spread over.
        geometry: of the checkpoint.
        hidden_size: of the engine's model.

    Raises
        UnsupportedError: the first reason.
    """
    if hidden_size != geometry.hidden_size:
        raise UnsupportedError(
            f"hidden_size: got {hidden_size}, the checkpoint's is {geometry.hidden_size}"
        )
    if layer.apply_router_weight_on_input:
        raise UnsupportedError("apply_router_weight_on_input: got True, must be False")
    # Ranks of these give each other their tokens, more than the engine lets a rank have.
    for name, size in (
        ("data_parallel_size", ranks.dp_size),
        ("prefill_context_parallel_size", ranks.pcp_size),
    ):
        if size != 1:
            raise UnsupportedError(
                f"{name}: got {size}, must be 1: experts of firesteel see a rank's own tokens"
            )
    if ranks.use_all2all_kernels:
        raise UnsupportedError(
            f"all2all_backend: {ranks.all2all_backend} sends tokens to experts, which must see "
            "all tokens; run without sequence parallel experts"
        )
    if ranks.enable_eplb:
        raise UnsupportedError("enable_eplb: got True, must be False: experts stay where they are")
    if ranks.ep_size > geometry.num_experts:
        raise UnsupportedError(
            f"enable_expert_parallel: got {ranks.ep_size} ranks, must be at most one for each of "
            f"{geometry.num_experts} experts"
        )


def held_experts(expert_map: Tensor | None, geometry: Geometry, num_experts: int) -> list[int]:
    """The experts of a rank in the order of their places.

    Args:
        expert_map: the engine's: the place of each expert, -1 of those of other ranks.
        geometry: of the checkpoint.
        num_experts: that the engine has for this rank.

    Raises
        UnsupportedError: others than those of the checkpoint.
    """
    if expert_map is None:
        held = list(range(geometry.num_experts))
    else:
        places = {place: e for e, place in enumerate(expert_map.tolist()) if place >= 0}
        held = [places[place] for place in sorted(places)]
    if len(held) != num_experts:
        raise UnsupportedError(
            f"num_experts: got {num_experts}, the checkpoint has {len(held)} for this rank; "
            "copies of experts are not supported"
        )
    return held


def activation_of(layer: Any, stored: Activation) -> Activation:
    """The engine's activation in our words.

    Args:
        stored: the checkpoint's, for constants that the engine's model does not pass.

    Raises
        UnsupportedError: it is not the checkpoint's.
    """
    name = _ACTIVATIONS.get(layer.activation.name)
    if name != stored.name:
        raise UnsupportedError(
            f"activation: got {layer.activation.value!r}, must be the checkpoint's {stored.name}"
        )
    given: dict[str, float | None] = {"limit": layer.swiglu_limit}
    if name == "swigluoai":
        given |= {"alpha": layer.swiglu_alpha, "beta": layer.swiglu_beta}
    return replace(stored, **{key: value for key, value in given.items() if value is not None})


def check_graphs(refused: Collection[str], device: torch.device, *, is_eager: bool) -> None:
    """Refuse layers without kernels where the engine would capture them in CUDA graphs.

    Args:
        refused: why layers keep the PyTorch path.

    Raises
        UnsupportedError: there are some.
    """
    if refused and device.type == "cuda" and not is_eager:
        raise UnsupportedError(
            f"enforce_eager: got False, must be True since {'; '.join(refused)}: the "
            "PyTorch path waits for the device, which a CUDA graph cannot hold"
        )


def check_workspace(num_bytes: int, free_bytes: int, max_tokens: int) -> None:
    """Refuse a limit of tokens whose workspace has no room beside the weights.

    Args:
        num_bytes: of the workspace.
        free_bytes: of the device, without what modules have taken.
        max_tokens: the engine's limit.

    Raises
        UnsupportedError: there is less room.
    """
    if num_bytes > free_bytes:
        raise UnsupportedError(
            f"max_num_batched_tokens: got {max_tokens}, for which kernels need a workspace of "
            f"{num_bytes:,} bytes, must be lower: {free_bytes:,} bytes are free beside the weights"
        )
