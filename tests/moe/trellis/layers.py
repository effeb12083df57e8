"""Random EXL3 layers and linears: stacks as kernels read them, and the same weights in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from firesteel.formats.trellis import Codebook, TrellisCode
from firesteel.formats.trellis_matrix import TrellisScheme, trellis_scheme
from firesteel.formats.trellis_weights import TrellisWeights
from firesteel.launch.key import DTYPES
from firesteel.moe.reference import moe_reference
from firesteel.moe.trellis.layer import linear_tensors, trellis_tensors
from firesteel.moe.trellis.linear import TrellisLinearSpec
from firesteel.moe.trellis.spec import StoredTrellis, TrellisMoeSpec
from tests.strategies import random_trellis


@dataclass(frozen=True)
class TrellisLayer:
    """One layer: tensors to bind, and dense float64 weights."""

    spec: TrellisMoeSpec
    w13: TrellisWeights
    w2: TrellisWeights
    dense13: Tensor
    dense2: Tensor
    bias13: Tensor | None
    bias2: Tensor | None
    expert_map: Tensor | None

    def tensors(self, device: str) -> dict[str, Tensor]:
        """By name of the operands."""
        found = trellis_tensors(self.w13, self.w2, bias13=self.bias13, bias2=self.bias2)
        if self.expert_map is not None:
            found["expert_map"] = self.expert_map
        return {name: tensor.to(device) for name, tensor in found.items()}

    def reference(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """`[M, K]` in float64."""
        return moe_reference(
            x.cpu(),
            self.dense13,
            self.dense2,
            topk_ids.cpu(),
            topk_weights.cpu(),
            activation=self.spec.activation,
            expert_map=self.expert_map,
            bias13=self.bias13,
            bias2=self.bias2,
        )


def max_error(dtype: torch.dtype) -> float:
    """How large a layer's relative error may be, by norm, of results in dtype.

    Ten numbers on the way are rounded to fp16 (x * suh, rotations, products, weights), and the
    result once. Each has an error of eps / sqrt(12) at most, of any sign; twice that, since a gate
    counts in two factors.
    """
    half, last = torch.finfo(torch.float16).eps, torch.finfo(dtype).eps
    return 2 * math.sqrt((10 * half**2 + last**2) / 12)


def random_trellis_layer(spec: TrellisMoeSpec, seed: int = 0) -> TrellisLayer:
    """Matrices of all rates in turn; sums of about the size of x's numbers."""
    generator = torch.Generator().manual_seed(seed)
    e, k, n = spec.num_experts, spec.hidden_size, spec.intermediate_size
    w13, dense13 = _stack(spec.w13, (e, spec.num_parts, n, k), generator)
    w2, dense2 = _stack(spec.w2, (e, 1, k, n), generator)
    expert_map = None
    if spec.num_global_experts is not None:
        # Some held elsewhere, the others in no order.
        places = torch.randperm(spec.num_global_experts, generator=generator)
        expert_map = torch.where(places < e, places, -1).int()
    biases = [
        torch.randn(e, rows, generator=generator).to(DTYPES[spec.dtype])
        if stored.has_bias
        else None
        for stored, rows in ((spec.w13, spec.num_parts * n), (spec.w2, k))
    ]
    return TrellisLayer(spec, w13, w2, dense13, dense2, *biases, expert_map)


def random_trellis_linear(
    spec: TrellisLinearSpec, seed: int = 0
) -> tuple[dict[str, Tensor], Tensor, Tensor | None]:
    """Tensors by name of the operands, W `[out, in]` in float64, and its bias."""
    generator = torch.Generator().manual_seed(seed)
    shape = (1, 1, spec.out_features, spec.in_features)
    stack, dense = _stack(spec.stored, shape, generator)
    bias = None
    if spec.stored.has_bias:
        bias = torch.randn(1, spec.out_features, generator=generator).to(DTYPES[spec.dtype])
    tensors = linear_tensors(stack, bias=bias)
    return tensors, dense[0], None if bias is None else bias[0]


def _stack(
    stored: StoredTrellis, shape: tuple[int, int, int, int], generator: torch.Generator
) -> tuple[TrellisWeights, Tensor]:
    experts, parts, n, k = shape
    schemes: list[TrellisScheme] = []
    for place in range(experts * parts):
        rate = stored.rates[place % len(stored.rates)]
        code = TrellisCode(float(rate), cast(Codebook, stored.codebook))
        schemes.append(trellis_scheme(n, k, code))
    stack = TrellisWeights(schemes, experts, parts)
    dense = torch.empty(experts, parts * n, k, dtype=torch.float64)
    for place, scheme in enumerate(schemes):
        expert, part = divmod(place, parts)
        matrix = random_trellis(scheme, generator)
        stack.write(expert, part, matrix)
        dense[expert, part * n : (part + 1) * n] = matrix.dequantize(scheme, torch.float64)
    return stack, dense
