# vLLM is not there where types are checked.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportAttributeAccessIssue=false
# pyright: reportUnknownParameterType=false
"""The experts of a layer in vLLM."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from firesteel.checkpoint.families import Geometry
from firesteel.checkpoint.layers import ExpertLayer
from firesteel.checkpoint.shards import shard_layer
from firesteel.integrations.vllm.limits import (
    activation_of,
    check_graphs,
    check_layer,
    held_experts,
)
from firesteel.integrations.vllm.linear import FiresteelHead, FiresteelLinear
from firesteel.integrations.vllm.model import Model
from firesteel.integrations.vllm.warmup import PlannedKernels
from firesteel.modules.fill import fill_experts, settle
from firesteel.modules.kernels import attach_kernels, why_no_kernels, workspace_bytes
from firesteel.modules.packed import PackedExperts
from firesteel.settings import Settings

__all__ = ["FiresteelExperts", "report"]

# vLLM shows what is logged under its own name alone.
log = init_logger("vllm.firesteel.experts")


class FiresteelExperts(FusedMoEMethodBase):
    """Packed experts of one layer: those of this rank, or its part of each.

    Args:
        moe: the engine's sizes and ranks.
        model: the checkpoint.
        layer: the whole layer in it.
        settings: of kernels; the engine's limit of tokens takes the place of theirs.
    """

    def __init__(
        self, moe: FusedMoEConfig, model: Model, layer: ExpertLayer, settings: Settings
    ) -> None:
        super().__init__(moe)
        self.model = model
        self._whole = layer
        self._own: ExpertLayer | None = None
        config = get_current_vllm_config()
        self._settings = replace(
            settings, max_tokens=config.scheduler_config.max_num_batched_tokens
        )
        self._is_eager: bool = config.model_config.enforce_eager
        # Where an operator finds a layer while the engine runs.
        self._layers: dict[str, Any] = config.compilation_config.static_forward_context

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Memory for the rank's packed experts, filled when the engine has loaded the rest.

        Ranks cut the intermediate axis where the format allows, not where the engine would.
        """
        del intermediate_size_per_partition, extra_weight_attrs
        geometry = self.model.contents.geometry
        ranks = self.moe.moe_parallel_config
        check_layer(layer, ranks, geometry, hidden_size=hidden_size)
        held = held_experts(layer.expert_map, geometry, num_experts)
        self._own = shard_layer(self._whole, held=held, rank=ranks.tp_rank, count=ranks.tp_size)
        layer.packed = PackedExperts(
            None,
            Geometry(
                num_layers=geometry.num_layers,
                num_experts=num_experts,
                hidden_size=hidden_size,
                intermediate_size=self._own.scheme(2).k,
            ),
            (self._own.schemes(0, 1), self._own.schemes(2)),
            activation_of(layer, self.model.activation),
            bias_dtype=params_dtype if self._own.biases else None,
            expert_map=layer.expert_map,
        )
        why = why_no_kernels(
            layer.packed, top_k=self.moe.experts_per_token, dtype=self.moe.in_dtype
        )
        device = next(layer.packed.buffers()).device
        check_graphs([why] if why else [], device, is_eager=self._is_eager)
        if why is None:
            self.model.max_tokens = self._settings.max_tokens
            self.model.workspace_bytes = max(
                self.model.workspace_bytes, self._workspace_bytes(layer.packed)
            )
        self.model.unfilled[layer.layer_name] = layer.packed
        _register()
        self._layers[_place(layer)] = layer.packed

    def _workspace_bytes(self, packed: PackedExperts) -> int:
        return workspace_bytes(
            packed,
            top_k=self.moe.experts_per_token,
            dtype=self.moe.in_dtype,
            max_tokens=self._settings.max_tokens,
        )

    def process_weights_after_loading(self, layer: Any) -> None:
        """Read the experts; of the last layer, plan and prewarm the kernels of all.

        So that happens before the engine measures what memory is left for its cache.
        """
        assert self._own is not None
        # Where the engine reads nothing itself (load_format dummy), nothing else has asked.
        self.model.check_room()
        self.model.read.append(layer.packed)
        with self.model.checkpoint.reader() as reader, torch.no_grad():
            fill_experts(layer.packed, self._own, reader)
        settle(layer.packed)
        self.model.filled[layer.layer_name] = self.model.unfilled.pop(layer.layer_name)
        if not self.model.unfilled:
            self._attach(next(layer.packed.buffers()).device)

    def _attach(self, device: torch.device) -> None:
        if device.type == "cuda":
            log.info("planning kernels for 0 to %d tokens", self._settings.max_tokens)
        kernels = attach_kernels(
            self.model.filled.values(),
            top_k=self.moe.experts_per_token,
            dtype=self.moe.in_dtype,
            ids=("i32",),
            # Experts run one after the other, also while the engine warms up on other streams.
            one_arena=True,
            settings=self._settings,
        )
        self.model.kernels = kernels
        # What only their scales say.
        check_graphs(kernels.refused, device, is_eager=self._is_eager)
        for ready in kernels.ready:
            PlannedKernels(ready).register_warmup()
        log.info("%s", self.model.summary())

    @property
    def topk_indices_dtype(self) -> torch.dtype:
        """Of the ids that the engine's routers give: the one type that is planned."""
        return torch.int32

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """None: no kernel of the engine reads the weights."""
        del layer

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """`[M, K]` of this rank's experts or parts; the engine adds up ranks."""
        del shared_experts, shared_experts_input
        if torch.compiler.is_compiling():
            operator: Any = torch.ops.firesteel.experts.default
            return operator(x, topk_weights, topk_ids, _place(layer))
        return layer.packed(x, topk_ids, topk_weights)


_library: list[torch.library.Library] = []


def _place(layer: Any) -> str:
    return f"firesteel.{layer.layer_name}"


def _register() -> None:
    """Make experts an operator, once a process: a compiler cannot trace into them."""
    if _library:
        return
    library = torch.library.Library("firesteel", "FRAGMENT")
    library.define("experts(Tensor x, Tensor topk_weights, Tensor topk_ids, str place) -> Tensor")
    for key in ("CPU", "CUDA"):
        library.impl("experts", _experts, key)
    torch.library.register_fake("firesteel::experts", _fake_experts, lib=library)
    _library.append(library)


def _experts(x: Tensor, topk_weights: Tensor, topk_ids: Tensor, place: str) -> Tensor:
    layer = get_forward_context().no_compile_layers[place]
    return layer(x, topk_ids, topk_weights)


def _fake_experts(x: Tensor, topk_weights: Tensor, topk_ids: Tensor, place: str) -> Tensor:
    del topk_weights, topk_ids, place
    return torch.empty_like(x)


def report(model: nn.Module) -> dict[str, Any] | None:
    """What firesteel packed of an engine's model, and the counters of its kernels, for JSON.

    None where it loaded none of it. `worker.WorkerExtension` lets an operator ask for it.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, FiresteelExperts | FiresteelLinear | FiresteelHead):
            return method.model.as_dict()
    return None
