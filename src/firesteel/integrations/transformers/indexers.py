"""`swap_indexers`: the host's sparse-attention indexers select by `firesteel.indexer`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import nn

from firesteel.device import device_target
from firesteel.errors import InvalidArgumentError, UnsupportedError
from firesteel.indexer.spec import MAX_KEYS, PageWriterSpec
from firesteel.integrations.transformers.index_kernels import (
    IndexKernels,
    IndexSpecs,
    index_specs,
)
from firesteel.launch import Ready, plan, prewarm
from firesteel.launch.spec import Spec
from firesteel.settings import Settings

if TYPE_CHECKING:
    from firesteel.integrations.transformers.index_modules import SwappedIndexer

__all__ = ["IndexerOptions", "IndexerReport", "restore_indexers", "swap_indexers", "swap_with"]

IndexKeys = Literal["e4m3", "host"]
KERNELS = "kernels"

MakeKernels = Callable[[IndexSpecs, torch.device], IndexKernels]
"""Kernels for specs on a device; `UnsupportedError` where there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerOptions:
    """As `swap_indexers` takes them.

    Raises
        InvalidArgumentError: a value is not allowed.
    """

    keys: str = "e4m3"
    max_keys: int = 32768
    max_requests: int = 8
    max_rows: int = 4096
    check_masks: bool = True

    def __post_init__(self) -> None:
        if self.keys not in get_args(IndexKeys):
            allowed = ", ".join(get_args(IndexKeys))
            raise InvalidArgumentError(f"keys: got {self.keys!r}, must be one of {allowed}")
        most = {"max_keys": MAX_KEYS, "max_requests": 1 << 16, "max_rows": 1 << 20}
        for name, limit in most.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
                raise InvalidArgumentError(
                    f"{name}: got {value!r}, must be an integer from 1 to {limit}"
                )


@dataclass(frozen=True, slots=True)
class IndexerReport:
    """Which indexers of a model run on kernels, and why others do not.

    Fields
        keys        how index keys are kept: "e4m3" or "host"
        layers      path of each indexer to "kernels", or to the reason why it runs on PyTorch
                    operators
        num_shared  layers without an indexer, which take another layer's selection
        ready       the prewarmed plans, of each device once
    """

    keys: str
    layers: Mapping[str, str]
    num_shared: int
    ready: tuple[Ready, ...] = field(default=(), repr=False, compare=False)

    @property
    def num_layers(self) -> int:
        """Indexers on kernels."""
        return sum(way == KERNELS for way in self.layers.values())

    @property
    def refused(self) -> dict[str, int]:
        """Of the others: reason to number of layers."""
        return dict(Counter(way for way in self.layers.values() if way != KERNELS))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles go without what belongs to this process and device."""
        return (IndexerReport, (self.keys, dict(self.layers), self.num_shared))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "keys": self.keys,
            "layers": self.num_layers,
            "refused": self.refused,
            "shared": self.num_shared,
            "plans": [
                {
                    "title": ready.plan.spec.title,
                    "max_tokens": ready.plan.max_tokens,
                    "target": ready.target,
                    "launcher": ready.launcher,
                    **ready.audit.as_dict(),
                }
                for ready in self.ready
            ],
        }


def swap_indexers(
    model: nn.Module,
    *,
    keys: IndexKeys = "e4m3",
    max_keys: int = 32768,
    max_requests: int = 8,
    max_rows: int = 4096,
    check_masks: bool = True,
    settings: Settings | None = None,
) -> IndexerReport:
    """Let the sparse-attention indexers of a GLM-MoE-DSA or DeepSeek-V3.2 model select by ours.

    On a CUDA device they are planned, prewarmed and bound; elsewhere, and where no kernels exist,
    they run on PyTorch operators, and the report says why. Parameters, their names and what is
    saved stay as they are. A model that is swapped already is swapped anew. See docs/indexer.md.

    Args:
        model: on its devices already; moving or converting it later takes its indexers off the
            kernels, and copies and pickles go without them.
        keys: "e4m3" keeps index keys in 8 bits with a scale each; "host" in the model's own type.
        max_keys: of a request. On kernels a cache takes whole pages for so many at its first call.
        max_requests: of a batch, beams included; on kernels.
        max_rows: new tokens of a launch; a longer prefill runs in slices of it.
        check_masks: look at the mask once a forward, which waits for the GPU; False promises that
            masks are causal, but for padding whose keys no later mask shows (such keys are lost).
        settings: the environment's by default.

    Raises
        UnsupportedError: the model has no such indexer, or one of a subclass or whose forward was
            replaced.
        InvalidArgumentError: an option or setting has a value that is not allowed.
    """
    options = IndexerOptions(
        keys=keys,
        max_keys=max_keys,
        max_requests=max_requests,
        max_rows=max_rows,
        check_masks=check_masks,
    )
    return swap_with(
        model, options, _prewarmed(Settings.from_env() if settings is None else settings)
    )


def swap_with(model: nn.Module, options: IndexerOptions, make: MakeKernels) -> IndexerReport:
    """`swap_indexers` with kernels that `make` makes."""
    from firesteel.integrations.transformers.index_modules import (
        SWAPPED,
        IndexerState,
        SharedState,
    )

    restore_indexers(model)
    kinds = tuple(SWAPPED)
    found = {path: each for path, each in model.named_modules() if isinstance(each, kinds)}
    if not found:
        raise UnsupportedError(
            f"model: {type(model).__name__} has no indexer, must be of "
            f"{', '.join(kind.__name__.removesuffix('Indexer') for kind in SWAPPED)}"
        )
    for path, module in found.items():
        _check_forward(path, module, kinds)
    made: dict[tuple[IndexSpecs, torch.device], IndexKernels] = {}
    layers: dict[str, str] = {}
    kernels_of: dict[str, IndexKernels | None] = {}
    for path, module in found.items():
        kernels_of[path] = None
        try:
            key = (_specs_of(module, options), _device_of(module))
            if key not in made:
                made[key] = make(*key)
            kernels_of[path] = made[key]
            layers[path] = KERNELS
        except UnsupportedError as error:
            layers[path] = str(error)
    shared = SharedState(sum(each is not None for each in kernels_of.values()))
    for path, module in found.items():
        state = IndexerState(options.keys, options.check_masks, kernels_of[path], shared)
        module.firesteel = state  # pyright: ignore
        _become(module, SWAPPED[type(module)])
    ready = tuple(each for kernels in made.values() for each in kernels.ready.values())
    return IndexerReport(options.keys, layers, _num_shared(model), ready)


def restore_indexers(model: nn.Module) -> int:
    """Give a model its own indexers back; returns how many were swapped.

    A cache that was filled while they were swapped is of no use to it, but for one of "host" keys
    without kernels.
    """
    from firesteel.integrations.transformers.index_modules import SWAPPED

    hosts = {swapped: host for host, swapped in SWAPPED.items()}
    found: list[SwappedIndexer] = [
        module  # pyright: ignore
        for module in model.modules()
        if type(module) in hosts
    ]
    for module in found:
        _become(module, hosts[type(module)])
        del module.firesteel
    return len(found)


def _check_forward(path: str, module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> None:
    """Refuse a module whose forward is not the host's, but for the hooks of accelerate.

    Raises
        UnsupportedError: it is of a subclass, or its forward was replaced.
    """
    if type(module) not in kinds:
        raise UnsupportedError(
            f"{path}: is a {type(module).__name__}, a subclass whose own forward would be lost, "
            f"must be one of {', '.join(kind.__name__ for kind in kinds)}"
        )
    inner = module.__dict__.get("_old_forward", module.__dict__.get("forward"))
    if inner is not None and getattr(inner, "__func__", None) is not type(module).forward:
        raise UnsupportedError(
            f"{path}.forward: was replaced on the module by {inner!r}, must be the class's own"
        )


def _become(module: nn.Module, kind: type[nn.Module]) -> None:
    """Make a module one of another class, under the hooks that it may have."""
    module.__class__ = kind
    for name in ("_old_forward", "forward"):
        inner = module.__dict__.get(name)
        if getattr(inner, "__self__", None) is module:
            setattr(module, name, MethodType(kind.forward, module))


def _num_shared(model: nn.Module) -> int:
    modules: list[Any] = list(model.modules())
    return sum(getattr(each, "indexer", each) is None for each in modules)


def _specs_of(module: Any, options: IndexerOptions) -> IndexSpecs:
    return index_specs(
        num_heads=module.n_heads,
        head_dim=module.head_dim,
        top_k=module.index_topk,
        # Projections may be packed; the norm never is.
        dtype=module.k_norm.weight.dtype,
        keys=options.keys,
        max_keys=options.max_keys,
        max_requests=options.max_requests,
        max_rows=options.max_rows,
    )


def _device_of(module: Any) -> torch.device:
    device: torch.device = module.k_norm.weight.device
    return device


def _prewarmed(settings: Settings) -> MakeKernels:
    def make(specs: IndexSpecs, device: torch.device) -> IndexKernels:
        if device.type != "cuda":
            raise UnsupportedError(f"device: {device}, kernels need a CUDA device")

        def prepare(spec: Spec, max_tokens: int) -> Ready:
            flags = {"slots": ("i64",)} if isinstance(spec, PageWriterSpec) else None
            return prewarm(
                plan(spec, max_tokens, flags=flags),
                device=device,
                settings=settings,
                show_progress=sys.stderr.isatty(),
            )

        return IndexKernels(specs.for_target(device_target(device)), device, prepare)

    return make
