"""Random layers: packed as kernels read them, and the same weights in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from firesteel.formats.base import Divisor, GlobalScale, Multiplier, QuantizedMatrix, Scheme
from firesteel.formats.packed import PackedWeights
from firesteel.moe.layer import operand_tensors
from firesteel.moe.reference import moe_reference
from firesteel.moe.spec import MoeSpec, StoredWeights

_SCALES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Layer:
    """One layer: tensors to bind, and dense float64 weights."""

    spec: MoeSpec
    w13: PackedWeights
    w2: PackedWeights
    dense13: Tensor
    dense2: Tensor
    bias13: Tensor | None
    bias2: Tensor | None
    expert_map: Tensor | None

    def tensors(self, device: str) -> dict[str, Tensor]:
        def there(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device)

        return operand_tensors(
            self.w13.to(device),
            self.w2.to(device),
            bias13=there(self.bias13),
            bias2=there(self.bias2),
            expert_map=there(self.expert_map),
        )

    def reference(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        return moe_reference(
            x.cpu(),
            self.dense13,
            self.dense2,
            topk_ids.cpu(),
            topk_weights.cpu(),
            activation=self.spec.activation,
            expert_map=self.expert_map,
            weight_on_input=self.spec.weight_on_input,
            bias13=self.bias13,
            bias2=self.bias2,
        )


def random_layer(spec: MoeSpec, seed: int = 0) -> Layer:
    generator = torch.Generator().manual_seed(seed)
    n, k = spec.intermediate_size, spec.hidden_size
    w13, dense13 = _stack(spec, spec.w13, n, k, spec.num_parts, generator)
    w2, dense2 = _stack(spec, spec.w2, k, n, 1, generator)
    dtype = _DTYPES[spec.dtype]

    def bias(stored: StoredWeights, rows: int) -> Tensor | None:
        if not stored.has_bias:
            return None
        return torch.randn(spec.num_experts, rows, generator=generator).to(dtype)

    expert_map = None
    if spec.num_global_experts is not None:
        # Some held elsewhere, the others in no order.
        places = torch.randperm(spec.num_global_experts, generator=generator)
        expert_map = torch.where(places < spec.num_experts, places, -1).int()
    return Layer(
        spec,
        w13,
        w2,
        dense13,
        dense2,
        bias(spec.w13, spec.num_parts * n),
        bias(spec.w2, k),
        expert_map,
    )


def _stack(
    spec: MoeSpec, stored: StoredWeights, n: int, k: int, parts: int, generator: torch.Generator
) -> tuple[PackedWeights, Tensor]:
    scheme = Scheme(
        format="compressed-tensors",
        element="e2m1" if "fp4" in stored.element else stored.element,
        n=n,
        k=k,
        group_size=stored.group_size,
        scale=stored.scale,
        has_zero_points=stored.has_zero_points,
        global_scale=stored.global_scale,
    )
    packed = PackedWeights(scheme, spec.num_experts, parts)
    dense = torch.empty(packed.shape, dtype=torch.float64)
    shape = (n, scheme.num_groups)
    for expert in range(spec.num_experts):
        for part in range(parts):
            end = 1 << scheme.bits
            codes = torch.randint(0, end, (n, k), generator=generator, dtype=torch.uint8)
            zero_points = None
            if stored.has_zero_points:
                zero_points = torch.randint(0, end, shape, generator=generator, dtype=torch.uint8)
            matrix = QuantizedMatrix(
                codes=codes,
                scales=_scales(stored, shape, generator),
                zero_points=zero_points,
                global_scale=_global_scale(stored, generator),
            )
            packed.write(expert, part, matrix)
            rows = slice(part * n, (part + 1) * n)
            dense[expert, rows] = matrix.dequantize(scheme, torch.float64)
    return packed, dense


def _scales(stored: StoredWeights, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Of a trained spread, as stored."""
    spread = (torch.rand(shape, generator=generator) + 0.5) * 0.02
    if stored.scale == "e8m0":
        return torch.randint(118, 123, shape, generator=generator).to(torch.uint8)
    if stored.scale == "e5m3":
        return torch.randint(32, 64, shape, generator=generator).to(torch.uint8)
    if stored.scale == "e4m3":
        return (spread * 12800).to(torch.float8_e4m3fn)
    return spread.to(_SCALES[stored.scale])


def _global_scale(stored: StoredWeights, generator: torch.Generator) -> GlobalScale | None:
    """What makes an E4M3 scale of 256 one of about 0.02."""
    value = (torch.rand((), generator=generator) + 0.5) / 12800
    if stored.global_scale == "none":
        return None
    return Divisor(1 / value) if stored.global_scale == "divisor" else Multiplier(value)
