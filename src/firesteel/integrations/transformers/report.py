"""What a load did: which layers are packed, which are the host's own, and the bytes of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from firesteel.checkpoint.layers import ExpertLayer
from firesteel.formats.base import Scheme
from firesteel.formats.stored import GROUP_SIZES
from firesteel.formats.tiled_int4 import TiledInt4Weights
from firesteel.formats.trellis_matrix import TrellisScheme
from firesteel.integrations.transformers.plan import LoadPlan
from firesteel.modules.kernels import KernelReport

__all__ = ["LoadReport", "describe", "plain_report", "report_of"]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What firesteel loaded and what it left to transformers.

    Fields
        family            title of the model family
        experts           description of each storage of expert layers to the number of layers
        linears           the same for dense linears that stay packed
        expanded          modules whose weight was expanded exactly into the host's parameter
        ignored           quantised layers of the file that the host's model does not have
        host_experts      expert layers that the checkpoint stores plain: transformers' parameters
        experts_bytes     bytes of the packed experts in memory
        experts_bf16_bytes  bytes that they would take as bf16
        linears_bytes, linears_bf16_bytes  the same for dense linears
        backend, device   what runs the experts: "triton" kernels, "torch", or "torch-int4" where
                          they are held as PyTorch's own packed int4 product for CPUs reads them
        seconds           time to read and pack
        kernels           which layers run on kernels, and why others do not
    """

    family: str
    experts: Mapping[str, int]
    linears: Mapping[str, int]
    expanded: tuple[str, ...]
    ignored: tuple[str, ...]
    host_experts: int
    experts_bytes: int
    experts_bf16_bytes: int
    linears_bytes: int
    linears_bf16_bytes: int
    backend: str
    device: str
    seconds: float
    extras: Mapping[str, Tensor] = field(default_factory=dict, repr=False, compare=False)
    kernels: KernelReport = field(default_factory=KernelReport, repr=False, compare=False)

    def with_kernels(self, kernels: KernelReport) -> LoadReport:
        """The report once layers were put on kernels."""
        backends = ["triton"] * bool(kernels.num_layers)
        backends += [self.backend] * (kernels.num_layers < sum(self.experts.values()))
        return replace(self, kernels=kernels, backend=", ".join(backends) or self.backend)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: every field but the tensors."""
        return {
            "family": self.family,
            "experts": dict(self.experts),
            "linears": dict(self.linears),
            "expanded": list(self.expanded),
            "ignored": list(self.ignored),
            "host_experts": self.host_experts,
            "experts_bytes": self.experts_bytes,
            "experts_bf16_bytes": self.experts_bf16_bytes,
            "linears_bytes": self.linears_bytes,
            "linears_bf16_bytes": self.linears_bf16_bytes,
            "backend": self.backend,
            "device": self.device,
            "seconds": round(self.seconds, 3),
            "kernels": self.kernels.as_dict(),
        }


def describe(scheme: Scheme) -> str:
    """A scheme in a few words: "gptq int4 g128 asymmetric act-order"."""
    if isinstance(scheme, TrellisScheme):
        return f"{scheme.format} {scheme.element}"
    words = [scheme.format, scheme.element]
    is_channel = scheme.group_size == scheme.k and scheme.k not in GROUP_SIZES
    words.append("channel" if is_channel else f"g{scheme.group_size}")
    if scheme.has_zero_points:
        words.append("asymmetric")
    if scheme.has_group_index:
        words.append("act-order")
    return " ".join(words)


def _storages(layer: ExpertLayer) -> list[str]:
    """How the matrices of a layer are stored, each way once, in order of projections."""
    schemes = dict.fromkeys(source.scheme for part in layer.sources for source in part)
    return list(dict.fromkeys(map(describe, schemes)))


def report_of(
    model: Any, plan: LoadPlan, extras: Mapping[str, Tensor], seconds: float
) -> LoadReport:
    """The report of a filled model."""
    modules = [model.get_submodule(path) for path in plan.experts]
    linears = [model.get_submodule(path) for path in plan.packed]
    geometry = plan.contents.geometry
    weights = 3 * geometry.num_experts * geometry.hidden_size * geometry.intermediate_size
    stacks = [module.gate_up for module in modules]
    device = next(stacks[0].buffers()).device if stacks else model.device
    return LoadReport(
        family=plan.contents.family.title,
        experts=Counter(" / ".join(_storages(layer)) for layer in plan.experts.values()),
        linears=Counter(describe(source.scheme) for source in plan.packed.values()),
        expanded=tuple(plan.expanded),
        ignored=plan.ignored,
        host_experts=plan.host_experts,
        experts_bytes=sum(module.num_bytes for module in modules),
        experts_bf16_bytes=2 * weights * len(modules),
        linears_bytes=sum(module.packed.num_bytes for module in linears),
        linears_bf16_bytes=sum(2 * s.scheme.n * s.scheme.k for s in plan.packed.values()),
        backend=_backend(stacks),
        device=str(device),
        seconds=seconds,
        extras=extras,
    )


def _backend(stacks: Sequence[Any]) -> str:
    names = {"torch-int4" if isinstance(s, TiledInt4Weights) else "torch" for s in stacks}
    return ", ".join(sorted(names)) or "torch"


def plain_report(plan: LoadPlan, model: Any) -> LoadReport:
    """The report of a model whose experts are transformers' own parameters."""
    geometry = plan.contents.geometry
    weights = 3 * geometry.num_experts * geometry.hidden_size * geometry.intermediate_size
    return LoadReport(
        family=plan.contents.family.title,
        experts={},
        linears={},
        expanded=(),
        ignored=plan.ignored,
        host_experts=plan.host_experts,
        experts_bytes=model.dtype.itemsize * weights * plan.host_experts,
        experts_bf16_bytes=2 * weights * plan.host_experts,
        linears_bytes=0,
        linears_bf16_bytes=0,
        backend="torch",
        device=str(model.device),
        seconds=0.0,
    )
