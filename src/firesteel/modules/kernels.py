"""Puts a loaded model's expert layers on GPU kernels: planned and prewarmed once, then bound."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from firesteel.device import device_target, is_capturing, stream_getter, wait_for_stream
from firesteel.errors import UnsupportedError
from firesteel.formats.packed import PackedWeights
from firesteel.formats.trellis_matrix import TrellisScheme
from firesteel.formats.trellis_weights import TrellisWeights
from firesteel.launch import Arena, Ready, plan, prewarm
from firesteel.launch.store import Bundle
from firesteel.launch.workspace import Workspace
from firesteel.modules.packed import PackedExperts, PackedLinear
from firesteel.moe.layer import MoeLayer, operand_tensors
from firesteel.moe.spec import ID_DTYPES, MoeSpec
from firesteel.moe.supports import check_scale_range, moe_spec_of
from firesteel.moe.trellis.layer import TrellisLinear, linear_tensors, trellis_tensors
from firesteel.moe.trellis.linear import PlannedSpec, TrellisLinearSpec
from firesteel.moe.trellis.spec import LayerSpec, TrellisMoeSpec
from firesteel.moe.trellis.supports import (
    trellis_linear_spec_of,
    trellis_moe_spec_of,
    united,
)
from firesteel.moe.tuning_file import table_of_device
from firesteel.settings import Settings

__all__ = [
    "Arenas",
    "KernelReport",
    "LayerKernels",
    "attach_kernels",
    "host_settings",
    "why_no_kernels",
    "workspace_bytes",
]

log = logging.getLogger(__name__)

Layer = Callable[..., Tensor]
"""A `MoeLayer` or a `TrellisLinear`."""

Planned = tuple[PlannedSpec, torch.device]

MANY_STREAMS = 4
"""Streams with an arena each that need no explaining."""


@dataclass(slots=True)
class KernelReport:
    """Which expert layers, and which linears, run on kernels.

    Fields
        num_layers       layers that do
        refused          of the others: reason to number of layers
        num_linears      EXL3 linears that do, and
        refused_linears  those that do not
        ready            the prewarmed plans, one a geometry and device
        arenas           the workspaces that they share, of each device
    """

    num_layers: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    num_linears: int = 0
    refused_linears: dict[str, int] = field(default_factory=dict)
    ready: list[Ready] = field(default_factory=list)
    arenas: list[Arenas] = field(default_factory=list)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles go without what belongs to this process and device."""
        counts = (self.num_layers, dict(self.refused))
        return (KernelReport, (*counts, self.num_linears, dict(self.refused_linears)))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "layers": self.num_layers,
            "refused": dict(self.refused),
            "linears": self.num_linears,
            "refused_linears": dict(self.refused_linears),
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
            "arenas": [arenas.as_dict() for arenas in self.arenas],
        }


class LayerKernels:
    """A layer's kernels, with an arena for each stream that calls it, or one for all.

    Under torch.compile it is always the first arena: the compiled code must run on one stream.
    """

    def __init__(
        self,
        ready: Ready,
        tensors: Mapping[str, Tensor],
        arenas: Arenas,
        kind: Callable[[Ready, dict[str, Tensor], Arena], Layer] = MoeLayer,
    ) -> None:
        self._ready = ready
        self._tensors = dict(tensors)
        self._arenas = arenas
        self._kind = kind
        self._layers: dict[int, Layer] = {}
        self._stream_of = stream_getter(ready.device)
        self._first = kind(ready, self._tensors, arenas.first)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The layer's output: `[M, K]` from x `[M, K]`, ids and weights `[M, top_k]`.

        Of a linear `[M, n]` from x alone.
        """
        if torch.compiler.is_compiling():
            return self._first(*inputs)
        stream = self._stream_of(self._ready.device.index or 0)
        if self._arenas.is_one:
            with self._arenas.turn:
                self._arenas.hand_to(stream)
                return self._first(*inputs)
        layer = self._layers.get(stream)
        if layer is None:
            layer = self._new_stream(stream)
        return layer(*inputs)

    def _new_stream(self, stream: int) -> Layer:
        if is_capturing(self._ready.device):
            # Memory taken during capture would be the graph's; the order of replays is its owner's.
            return self._first
        arena = self._arenas.of(stream)
        is_first = arena is self._arenas.first
        layer = self._first if is_first else self._kind(self._ready, self._tensors, arena)
        return self._layers.setdefault(stream, layer)


class Arenas:
    """The arenas of one device, each large enough for every plan there: one a stream, or one.

    Args:
        is_one: streams use the first arena in turn, and none is allocated later.

    Fields
        first  the arena of the first stream, or of all
        turn   held while a stream uses the one arena, from `hand_to` to its last launch
    """

    def __init__(self, num_bytes: int, device: torch.device, *, is_one: bool = False) -> None:
        self._num_bytes = num_bytes
        self._device = device
        self.is_one = is_one
        self.turn = threading.Lock()
        self.first = Arena.allocate(num_bytes, device)
        self._by_stream: dict[int, Arena] = {}
        self._lock = threading.Lock()

    def as_dict(self) -> dict[str, Any]:
        """Where they are, bytes of each, and how many there are; for JSON."""
        with self._lock:
            count = len({id(arena) for arena in (self.first, *self._by_stream.values())})
        return {"device": str(self._device), "bytes": self._num_bytes, "count": count}

    def of(self, stream: int) -> Arena:
        """The arena of a stream, allocated when a stream is first seen."""
        with self._lock:
            found = self._by_stream.get(stream)
            if found is None:
                found = self._by_stream[stream] = self._new(stream)
            return found

    def hand_to(self, stream: int) -> None:
        """Give the first arena to the current stream, which waits for the last one's calls.

        Whoever calls holds `turn` until its launches are enqueued. A stream under capture is let
        through, as by the arena itself: its replays are in the order that their caller gives them.

        Raises
            ArenaError: the last stream is under capture.
        """
        owner = self.first.owner
        if owner not in (None, stream) and not is_capturing(self._device):
            wait_for_stream(self._device, owner)
            self.first.release()

    def _new(self, stream: int) -> Arena:
        # Compiled code may have taken the first one on a stream that is not known here.
        if not self._by_stream and self.first.owner in (None, stream):
            return self.first
        log.info("stream %#x: an arena of %d bytes", stream, self._num_bytes)
        if len(self._by_stream) == MANY_STREAMS:
            log.warning(
                "kernels were called on more than %d streams: each keeps an arena of %d bytes; "
                "call the model on fewer streams, or lower FIRESTEEL_MAX_TOKENS",
                MANY_STREAMS,
                self._num_bytes,
            )
        return Arena.allocate(self._num_bytes, self._device)


def attach_kernels(
    experts: Iterable[PackedExperts],
    linears: Iterable[PackedLinear] = (),
    *,
    top_k: int,
    dtype: torch.dtype,
    ids: Sequence[str] = ID_DTYPES,
    one_arena: bool = False,
    settings: Settings | None = None,
) -> KernelReport:
    """Plan, prewarm and bind the kernels of every layer on a GPU that has them.

    A layer of a format without kernels keeps the PyTorch path; the report says why. Of linears
    those of EXL3 have kernels.

    Args:
        experts: expert layers of a model, filled.
        linears: its packed linears, filled.
        top_k: experts a token.
        dtype: of hidden states.
        ids: types of expert ids that calls come with, "i32" or "i64"; both by default.
        one_arena: streams share a device's workspace, each call after the last, so that none is
            allocated later; else each stream has its own, and streams run side by side.
        settings: the environment's by default.
    """
    settings = Settings.from_env() if settings is None else settings
    report = KernelReport()
    wanted: list[tuple[PackedExperts | PackedLinear, Planned]] = []
    for module in (*experts, *linears):
        is_linear = isinstance(module, PackedLinear)
        if is_linear and not isinstance(module.packed, TrellisWeights):
            continue
        try:
            spec = _linear_spec_of(module) if is_linear else _spec_of(module, top_k, dtype)
            if not is_linear:
                _check_scales(module, spec)
            wanted.append((module, (spec, _device_of(module))))
        except UnsupportedError as error:
            refused = report.refused_linears if is_linear else report.refused
            refused[str(error)] = refused.get(str(error), 0) + 1
    wanted = _sharing_plans(wanted)
    ready: dict[Planned, Ready] = {}
    for key in dict.fromkeys(key for _, key in wanted):
        spec, device = key
        flags = {"ids": ids} if "ids" in spec.flags() else {}
        ready[key] = prewarm(
            plan(spec, spec.planned_tokens(settings.max_tokens), flags=flags),
            device=device,
            settings=settings,
            show_progress=sys.stderr.isatty(),
        )
    arenas = {
        device: _arenas(
            max(r.plan.workspace.num_bytes for (_, d), r in ready.items() if d == device),
            device,
            is_one=one_arena,
        )
        for device in {device for _, device in ready}
    }
    for module, key in wanted:
        if isinstance(module, PackedLinear):
            assert isinstance(module.packed, TrellisWeights)
            tensors = linear_tensors(module.packed)
            module.kernels = LayerKernels(ready[key], tensors, arenas[key[1]], TrellisLinear)
            report.num_linears += 1
        else:
            module.kernels = LayerKernels(ready[key], _tensors_of(module), arenas[key[1]])
            report.num_layers += 1
    report.ready = list(ready.values())
    report.arenas = list(arenas.values())
    return report


def _arenas(num_bytes: int, device: torch.device, *, is_one: bool) -> Arenas:
    try:
        return Arenas(num_bytes, device, is_one=is_one)
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(
            f"workspace: {num_bytes:,} bytes of kernels do not fit on {device}; lower "
            "FIRESTEEL_MAX_TOKENS, in vLLM --max-num-batched-tokens"
        ) from error


def host_settings() -> Settings:
    """`Settings.from_env`, before a host reads weights: what is wrong ends there, not after them.

    Raises
        InvalidArgumentError: of a variable, or of the bundle that it names.
    """
    settings = Settings.from_env()
    if settings.bundle is not None:
        Bundle(settings.bundle)
    return settings


def workspace_bytes(
    module: PackedExperts, *, top_k: int, dtype: torch.dtype, max_tokens: int
) -> int:
    """Of the workspace that a layer's kernels will take, before it is filled.

    Raises
        UnsupportedError: it has no kernels.
    """
    spec = _spec_of(module, top_k, dtype)
    return Workspace.of(spec.workspace(spec.planned_tokens(max_tokens))).num_bytes


def why_no_kernels(module: PackedExperts, *, top_k: int, dtype: torch.dtype) -> str | None:
    """Why a layer would keep the PyTorch path, as far as that is known before it is filled.

    None where nothing speaks against kernels; `attach_kernels` looks at its scales too.
    """
    try:
        _spec_of(module, top_k, dtype)
    except UnsupportedError as error:
        return str(error)
    return None


def _sharing_plans(
    wanted: Sequence[tuple[PackedExperts | PackedLinear, Planned]],
) -> list[tuple[PackedExperts | PackedLinear, Planned]]:
    """The same, of EXL3 one spec for all that differ in their rates alone."""
    specs = [spec for _, (spec, _) in wanted]
    same: dict[PlannedSpec, PlannedSpec] = {
        **united([spec for spec in specs if isinstance(spec, TrellisMoeSpec)]),
        **united([spec for spec in specs if isinstance(spec, TrellisLinearSpec)]),
    }
    return [(module, (same.get(spec, spec), device)) for module, (spec, device) in wanted]


def _device_of(module: PackedExperts | PackedLinear) -> torch.device:
    """The one device of a layer's buffers."""
    devices = {buffer.device for buffer in module.buffers()}
    if len(devices) != 1:
        raise UnsupportedError(f"weights: on {sorted(map(str, devices))}, must be on one device")
    return devices.pop()


def _tensors_of(module: PackedExperts) -> dict[str, Tensor]:
    """What the kernels of a layer are bound to."""
    w13, w2 = module.gate_up, module.down
    others = {
        "bias13": module.gate_up_bias,
        "bias2": module.down_bias,
        "expert_map": module.expert_map,
    }
    if isinstance(w13, TrellisWeights) and isinstance(w2, TrellisWeights):
        return trellis_tensors(w13, w2, **others)
    assert isinstance(w13, PackedWeights)
    assert isinstance(w2, PackedWeights)
    return operand_tensors(w13, w2, **others)


def _linear_spec_of(module: PackedLinear) -> TrellisLinearSpec:
    """What the kernels of an EXL3 linear must be planned for.

    Raises
        UnsupportedError: no kernels for its device, rate or sizes.
    """
    device = _device_of(module)
    if device.type != "cuda":
        raise UnsupportedError(f"device: {device}, kernels need a CUDA device")
    scheme = module.packed.scheme
    assert isinstance(scheme, TrellisScheme)
    spec = trellis_linear_spec_of(scheme, dtype=module.dtype)
    return spec.for_target(device_target(device))


def _spec_of(module: PackedExperts, top_k: int, dtype: torch.dtype) -> LayerSpec:
    """What a layer's kernels must be planned for.

    Raises
        UnsupportedError: no kernels for its device, format or activation.
    """
    device = _device_of(module)
    if device.type != "cuda":
        raise UnsupportedError(f"device: {device}, kernels need a CUDA device")
    expert_map = module.expert_map
    given: dict[str, Any] = {
        "num_experts": module.num_experts,
        "hidden_size": module.hidden_dim,
        "intermediate_size": module.intermediate_dim,
        "top_k": top_k,
        "activation": module.activation,
        "dtype": dtype,
        "has_bias": module.gate_up_bias is not None,
        "num_global_experts": None if expert_map is None else expert_map.numel(),
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
    return replace(spec.for_target(target), table=table_of_device(device))


def _check_scales(module: PackedExperts, spec: PlannedSpec) -> None:
    """Refuse scales that kernels do not hold.

    Raises
        UnsupportedError: a scale is too large.
    """
    if isinstance(spec, MoeSpec):
        w13, w2 = module.gate_up, module.down
        assert isinstance(w13, PackedWeights)
        assert isinstance(w2, PackedWeights)
        check_scale_range(spec, w13=w13.scales, w2=w2.scales)
