"""Puts a loaded model's expert layers on GPU kernels: planned and prewarmed once, then bound."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from firesteel.device import device_target, is_capturing, stream_getter
from firesteel.errors import UnsupportedError
from firesteel.formats.packed import PackedWeights
from firesteel.formats.trellis_weights import TrellisWeights
from firesteel.integrations.transformers.modules import PackedExperts
from firesteel.launch import Arena, Ready, plan, prewarm
from firesteel.moe.layer import MoeLayer, operand_tensors, trellis_tensors
from firesteel.moe.spec import MoeSpec
from firesteel.moe.supports import check_scale_range, moe_spec_of
from firesteel.moe.trellis.spec import TrellisMoeSpec
from firesteel.moe.trellis.supports import trellis_moe_spec_of, united
from firesteel.moe.tuning_file import table_of_device
from firesteel.settings import Settings

__all__ = ["KernelReport", "LayerKernels", "attach_kernels"]

log = logging.getLogger(__name__)

LayerSpec = MoeSpec | TrellisMoeSpec

MANY_STREAMS = 4
"""Streams with an arena each that need no explaining."""


@dataclass(slots=True)
class KernelReport:
    """Which expert layers run on kernels.

    Fields
        num_layers  layers that do
        refused     of the others: reason to number of layers
        ready       the prewarmed plans, one a geometry and device
    """

    num_layers: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    ready: list[Ready] = field(default_factory=list)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles go without what belongs to this process and device."""
        return (KernelReport, (self.num_layers, dict(self.refused)))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "layers": self.num_layers,
            "refused": dict(self.refused),
            "plans": [
                {
                    "title": ready.plan.spec.title,
                    "table": ready.plan.spec.as_dict().get("table", {}).get("name"),
                    "max_tokens": ready.plan.max_tokens,
                    "target": ready.target,
                    "launcher": ready.launcher,
                    **ready.audit.as_dict(),
                }
                for ready in self.ready
            ],
        }


class LayerKernels:
    """A layer's kernels, with an arena for each stream that calls it.

    Under torch.compile it is always the first arena: the compiled code must run on one stream.
    """

    def __init__(self, ready: Ready, tensors: Mapping[str, Tensor], arenas: _Arenas) -> None:
        self._ready = ready
        self._tensors = dict(tensors)
        self._arenas = arenas
        self._layers: dict[int, MoeLayer] = {}
        self._stream_of = stream_getter(ready.device)
        self._first = MoeLayer(ready, self._tensors, arenas.first)

    def __call__(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """The layer's output: `[M, K]` from x `[M, K]`, ids and weights `[M, top_k]`."""
        if torch.compiler.is_compiling():
            return self._first(x, topk_ids, topk_weights)
        stream = self._stream_of(self._ready.device.index or 0)
        layer = self._layers.get(stream)
        if layer is None:
            layer = self._new_stream(stream)
        return layer(x, topk_ids, topk_weights)

    def _new_stream(self, stream: int) -> MoeLayer:
        if is_capturing(self._ready.device):
            # Memory taken during capture would be the graph's; the order of replays is its owner's.
            return self._first
        arena = self._arenas.of(stream)
        is_first = arena is self._arenas.first
        layer = self._first if is_first else MoeLayer(self._ready, self._tensors, arena)
        return self._layers.setdefault(stream, layer)


class _Arenas:
    """The arenas of one device: one a stream, each large enough for every plan there."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._num_bytes = num_bytes
        self._device = device
        self.first = Arena.allocate(num_bytes, device)
        self._by_stream: dict[int, Arena] = {}
        self._lock = threading.Lock()

    def of(self, stream: int) -> Arena:
        """The arena of a stream, allocated when a stream is first seen."""
        with self._lock:
            found = self._by_stream.get(stream)
            if found is None:
                found = self._by_stream[stream] = self._new(stream)
            return found

    def _new(self, stream: int) -> Arena:
        # Compiled code may have taken the first one on a stream that is not known here.
        if not self._by_stream and self.first.owner in (None, stream):
            return self.first
        log.info("stream %#x: an arena of %d bytes", stream, self._num_bytes)
        if len(self._by_stream) == MANY_STREAMS:
            log.warning(
                "experts were called on more than %d streams: each keeps an arena of %d bytes; "
                "call the model on fewer streams, or lower FIRESTEEL_MAX_TOKENS",
                MANY_STREAMS,
                self._num_bytes,
            )
        return Arena.allocate(self._num_bytes, self._device)


def attach_kernels(
    model: Any, modules: Mapping[str, PackedExperts], settings: Settings | None = None
) -> KernelReport:
    """Plan, prewarm and bind the kernels of every expert layer on a GPU that has them.

    A layer of a format without kernels keeps the PyTorch path; the report says why.

    Args:
        model: as loaded.
        modules: its expert layers by path.
        settings: the environment's by default.
    """
    settings = Settings.from_env() if settings is None else settings
    report = KernelReport()
    specs: dict[str, tuple[LayerSpec, torch.device]] = {}
    for path, module in modules.items():
        try:
            specs[path] = (_spec_of(module, model), _device_of(module))
        except UnsupportedError as error:
            report.refused[str(error)] = report.refused.get(str(error), 0) + 1
    same = united([spec for spec, _ in specs.values() if isinstance(spec, TrellisMoeSpec)])
    for path, (spec, device) in specs.items():
        if isinstance(spec, TrellisMoeSpec):
            specs[path] = (same[spec], device)
    ready: dict[tuple[LayerSpec, torch.device], Ready] = {}
    for key in dict.fromkeys(specs.values()):
        spec, device = key
        ready[key] = prewarm(
            plan(spec, settings.max_tokens),
            device=device,
            settings=settings,
            show_progress=sys.stderr.isatty(),
        )
    arenas = {
        device: _Arenas(
            max(r.plan.workspace.num_bytes for (_, d), r in ready.items() if d == device), device
        )
        for device in {device for _, device in ready}
    }
    for path, key in specs.items():
        module = modules[path]
        module.kernels = LayerKernels(ready[key], _tensors_of(module), arenas[key[1]])
        report.num_layers += 1
    report.ready = list(ready.values())
    return report


def _device_of(module: PackedExperts) -> torch.device:
    """The one device of a layer's buffers."""
    devices = {buffer.device for buffer in module.buffers()}
    if len(devices) != 1:
        raise UnsupportedError(f"experts: on {sorted(map(str, devices))}, must be on one device")
    return devices.pop()


def _tensors_of(module: PackedExperts) -> dict[str, Tensor]:
    """What the kernels of a layer are bound to."""
    w13, w2 = module.gate_up, module.down
    biases = {"bias13": module.gate_up_bias, "bias2": module.down_bias}
    if isinstance(w13, TrellisWeights) and isinstance(w2, TrellisWeights):
        return trellis_tensors(w13, w2, **biases)
    assert isinstance(w13, PackedWeights)
    assert isinstance(w2, PackedWeights)
    return operand_tensors(w13, w2, **biases)


def _spec_of(module: PackedExperts, model: Any) -> LayerSpec:
    """What a layer's kernels must be planned for.

    Raises
        UnsupportedError: no kernels for its device, format, scales or activation.
    """
    device = _device_of(module)
    if device.type != "cuda":
        raise UnsupportedError(f"device: {device}, kernels need a CUDA device")
    given: dict[str, Any] = {
        "num_experts": module.num_experts,
        "hidden_size": module.hidden_dim,
        "intermediate_size": module.intermediate_dim,
        "top_k": model.config.num_experts_per_tok,
        "activation": module.activation,
        "dtype": model.dtype,
        "has_bias": module.gate_up_bias is not None,
    }
    w13, w2, target = module.gate_up, module.down, device_target(device)
    if isinstance(w13, TrellisWeights) and isinstance(w2, TrellisWeights):
        return trellis_moe_spec_of(w13.schemes, w2.schemes, **given).for_target(target)
    for stack in (w13, w2):
        if not isinstance(stack, PackedWeights):
            raise UnsupportedError(f"weights: {type(stack).__name__}, kernels read PackedWeights")
    assert isinstance(w13, PackedWeights)
    assert isinstance(w2, PackedWeights)
    spec = moe_spec_of(w13.scheme, w2.scheme, **given)
    check_scale_range(spec, w13=w13.scales, w2=w2.scales)
    return replace(spec.for_target(target), table=table_of_device(device))
