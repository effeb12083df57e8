"""Random weights and calls of a MoE layer, for measurements and checks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from firesteel.formats.trellis_weights import MATRIX_UNIT
from firesteel.launch.key import DTYPES
from firesteel.moe.spec import BITS
from firesteel.moe.trellis.spec import LayerSpec, StoredTrellis, TrellisMoeSpec

__all__ = ["Call", "random_call", "random_weights", "routings_of"]

_IDS = {"i32": torch.int32, "i64": torch.int64}
# Of random scales: the lowest byte, and the first above the highest.
_SCALE_BYTES = {"mxfp4": (118, 121), "nvfp4": (0x38, 0x40), "nf3": (40, 56)}


@dataclass(frozen=True, slots=True)
class Call:
    """The tensors of one call, in the order in which a layer takes them."""

    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    out: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All four."""
        return (self.x, self.topk_ids, self.topk_weights, self.out)

    def rows(self, num_tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The first so many tokens of each."""
        x, ids, weights, out = (tensor[:num_tokens] for tensor in self.tensors)
        return (x, ids, weights, out)


def random_weights(spec: LayerSpec, device: torch.device, seed: int = 0) -> dict[str, Tensor]:
    """A tensor for each operand that a layer keeps: uniform codes, scales of a trained spread.

    A group of MXFP4 has a scale of 2**-9 to 2**-7, one of NVFP4 1 to 2 times the matrix's 2**-8,
    one of NF3 2**-6 to 2**-4.
    """
    generator = torch.Generator(device).manual_seed(seed)
    if isinstance(spec, TrellisMoeSpec):
        return _random_trellises(spec, device, generator)
    found: dict[str, Tensor] = {}
    for operand in spec.operands((("ids", "i32"),)):
        if operand.is_per_call:
            continue
        shape, dtype = operand.shape_for(0), DTYPES[operand.dtype]
        if operand.name.endswith(".codes"):
            tensor = torch.empty(shape, dtype=dtype, device=device)
            tensor.random_(-(1 << 15), 1 << 15, generator=generator)
        elif operand.name.endswith(".scales") and dtype == torch.uint8:
            stored = spec.w13 if operand.name.startswith("w13") else spec.w2
            lowest, highest = _SCALE_BYTES[stored.element]
            tensor = torch.empty(shape, dtype=dtype, device=device)
            tensor.random_(lowest, highest, generator=generator)
        elif operand.name.endswith(".global_scale"):
            stored = spec.w13 if operand.name.startswith("w13") else spec.w2
            value = 2.0**8 if stored.global_scale == "divisor" else 2.0**-8
            tensor = torch.full(shape, value, dtype=dtype, device=device)
        elif operand.name.endswith(".zero_points"):
            tensor = torch.empty(shape, dtype=dtype, device=device)
            stored = spec.w13 if operand.name.startswith("w13") else spec.w2
            tensor.random_(0, 1 << BITS[stored.element], generator=generator)
        elif operand.name == "expert_map":
            tensor = torch.arange(shape[0], dtype=dtype, device=device) % spec.num_experts
        else:
            spread = torch.rand(shape, generator=generator, device=device)
            tensor = ((spread + 0.5) * 0.005).to(dtype)
        found[operand.name] = tensor
    return found


def _random_trellises(
    spec: TrellisMoeSpec, device: torch.device, generator: torch.Generator
) -> dict[str, Tensor]:
    """Uniform words, matrices of all rates in turn, and scales that give weights of 0.02."""
    found: dict[str, Tensor] = {}
    for operand in spec.operands((("ids", "i32"),)):
        if operand.is_per_call or operand.is_any_size:
            continue
        shape, dtype = operand.shape_for(0), DTYPES[operand.dtype]
        if operand.name.endswith(".matrices"):
            stored = spec.w13 if operand.name.startswith("w13") else spec.w2
            table, units = _random_table(stored, shape, spec)
            words = torch.empty(units * MATRIX_UNIT // 4, dtype=torch.int32, device=device)
            words.random_(-(1 << 31), 1 << 31, generator=generator)
            found[f"{operand.name.split('.')[0]}.words"] = words
            tensor = table.to(device)
        elif operand.name == "expert_map":
            tensor = torch.arange(shape[0], dtype=dtype, device=device) % spec.num_experts
        else:
            size = 0.016 if operand.name.endswith(".svh") else 1.0
            size = 0.005 if operand.name.endswith(".bias") else size
            spread = torch.rand(shape, generator=generator, device=device) + 0.5
            signs = torch.randint(0, 2, shape, generator=generator, device=device) * 2 - 1
            tensor = (spread * signs * size).to(dtype)
        found[operand.name] = tensor
    return found


def _random_table(
    stored: StoredTrellis, shape: tuple[int, ...], spec: TrellisMoeSpec
) -> tuple[Tensor, int]:
    """Where matrices of all rates in turn begin, and the units that they take."""
    units = spec.padded_hidden // 128 * (spec.padded_intermediate // 128)
    count = shape[0] * shape[1]
    bits = torch.tensor([stored.rates[at % len(stored.rates)] for at in range(count)])
    ends = (bits * units).cumsum(0)
    table = torch.stack((ends - bits * units, bits), dim=-1)
    return table.to(torch.int32).view(shape), int(ends[-1])


def routings_of(num_tokens: int) -> int:
    """Calls to rotate, so many that what one reads is out of the cache when it comes again."""
    return 16 if num_tokens <= 8 else 8 if num_tokens <= 256 else 4


def random_call(
    spec: LayerSpec,
    num_tokens: int,
    device: torch.device,
    *,
    ids: str = "i32",
    seed: int = 0,
    zipf: bool = False,
) -> Call:
    """Activations of unit spread, distinct experts a token, router weights that sum to 1.

    Experts are equally likely, or, with `zipf`, number i as likely as 1 / (i + 1).
    """
    generator = torch.Generator(device).manual_seed(seed)
    k, experts = spec.hidden_size, spec.num_global_experts or spec.num_experts
    dtype = DTYPES[spec.dtype]
    x = torch.randn(num_tokens, k, generator=generator, device=device).to(dtype)
    scores = torch.rand(num_tokens, experts, generator=generator, device=device)
    if zipf:
        # The largest of u ** (i + 1): drawing without replacement by weight 1 / (i + 1).
        scores = scores ** torch.arange(1, experts + 1, device=device)
    values, chosen = scores.topk(spec.top_k, dim=1)
    values = torch.rand(values.shape, generator=generator, device=device) + 0.1
    weights = values / values.sum(1, keepdim=True)
    return Call(x, chosen.to(_IDS[ids]), weights.float(), torch.full_like(x, torch.nan))
