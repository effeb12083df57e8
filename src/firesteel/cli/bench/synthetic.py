"""Writes checkpoints of random weights in a real geometry: for measurements, not for text.

Codes are uniform and each group has one of a few near-equal scales, so that weights have the spread
of a trained model's and nothing about speed or memory depends on their values.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from firesteel.checkpoint.families import PROJECTIONS
from firesteel.formats.base import SCALE_DTYPES, QuantizedMatrix, Scheme
from firesteel.formats.packed import packed_bytes
from firesteel.formats.quantize import parse_recipe
from firesteel.formats.registry import format_named

__all__ = ["SHAPES", "Shape", "Shards", "write_checkpoint", "write_plain_checkpoint"]

_WEIGHT_STD = 0.02
_IGNORE = ("re:.*self_attn.*", "re:.*mlp[.]gate$", "lm_head")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Geometry of a Qwen3-MoE model."""

    num_layers: int
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    num_heads: int = 32
    num_kv_heads: int = 4
    head_dim: int = 128
    vocab_size: int = 1024
    context: int = 4096

    @property
    def layer_bf16_bytes(self) -> int:
        """Bytes of the experts of one layer as bf16."""
        return 2 * 3 * self.num_experts * self.hidden_size * self.intermediate_size

    def projection(self, name: str) -> tuple[int, int]:
        """`[n, k]` of an expert's projection."""
        if name == "down_proj":
            return (self.hidden_size, self.intermediate_size)
        return (self.intermediate_size, self.hidden_size)

    def config(self) -> dict[str, Any]:
        """`config.json` without a quantization_config."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "dtype": "bfloat16",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "moe_intermediate_size": self.intermediate_size,
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.top_k,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.context,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "eos_token_id": None,
            "bos_token_id": None,
        }


# Two layers of Qwen3-30B-A3B with a small vocabulary: what a layer costs does not depend on it.
SHAPES = {
    "qwen3-30b-layers": Shape(
        num_layers=2, num_experts=128, top_k=8, hidden_size=2048, intermediate_size=768
    )
}


def write_checkpoint(folder: Path, shape: Shape, recipe: str = "int4-g128") -> int:
    """Write a quantised checkpoint, one shard a layer; returns the bytes of its experts packed.

    Symmetric integer recipes only.
    """
    parsed = parse_recipe(recipe)
    generator = torch.Generator().manual_seed(0)
    total = 0

    def experts(layer: int) -> dict[str, Tensor]:
        nonlocal total
        tensors: dict[str, Tensor] = {}
        for expert in range(shape.num_experts):
            for name in PROJECTIONS:
                scheme = parsed.scheme(*shape.projection(name), torch.bfloat16)
                stored = format_named(scheme.format).pack(scheme, _matrix(scheme, generator))
                prefix = f"model.layers.{layer}.mlp.experts.{expert}.{name}"
                tensors |= {f"{prefix}.{suffix}": tensor for suffix, tensor in stored.items()}
                total += packed_bytes(scheme)
        return tensors

    config = {**shape.config(), "quantization_config": parsed.config(_IGNORE)}
    _write(folder, shape, config, experts)
    return total


def write_plain_checkpoint(folder: Path, shape: Shape) -> None:
    """Write a bf16 checkpoint, one shard a layer."""
    generator = torch.Generator().manual_seed(0)

    def experts(layer: int) -> dict[str, Tensor]:
        return {
            f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight": _normal(
                generator, *shape.projection(name)
            )
            for expert in range(shape.num_experts)
            for name in PROJECTIONS
        }

    _write(folder, shape, shape.config(), experts)


def _matrix(scheme: Scheme, generator: torch.Generator) -> QuantizedMatrix:
    codes = torch.randint(
        2**scheme.bits, (scheme.n, scheme.k), dtype=torch.uint8, generator=generator
    )
    # A uniform code has a standard deviation of 2**bits / sqrt(12).
    scale = _WEIGHT_STD * 12**0.5 / 2**scheme.bits
    spread = 0.5 + torch.rand(scheme.n, scheme.num_groups, generator=generator)
    return QuantizedMatrix(codes=codes, scales=(scale * spread).to(SCALE_DTYPES[scheme.scale]))


def _normal(generator: torch.Generator, *size: int) -> Tensor:
    return (torch.randn(*size, generator=generator) * _WEIGHT_STD).to(torch.bfloat16)


class Shards:
    """Writes a checkpoint shard by shard, so that the writer never holds more than one.

    Args:
        folder: which exists.
        count: shards to come.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self._folder = folder
        self._count = count
        self._num_written = 0
        self._weight_map: dict[str, str] = {}

    def add(self, tensors: dict[str, Tensor]) -> None:
        """Write the next shard."""
        self._num_written += 1
        name = f"model-{self._num_written:05d}-of-{self._count:05d}.safetensors"
        save_file(tensors, self._folder / name, metadata={"format": "pt"})
        self._weight_map.update(dict.fromkeys(tensors, name))

    def close(self, config: dict[str, Any]) -> None:
        """Write the index and `config.json`."""
        assert self._num_written == self._count
        index = {"metadata": {}, "weight_map": self._weight_map}
        for name, value in (("model.safetensors.index.json", index), ("config.json", config)):
            (self._folder / name).write_text(json.dumps(value, indent=2), encoding="utf-8")


def _write(
    folder: Path, shape: Shape, config: dict[str, Any], experts: Callable[[int], dict[str, Tensor]]
) -> None:
    """A shard a layer."""
    generator = torch.Generator().manual_seed(1)
    shards = Shards(folder, shape.num_layers + 1)
    for layer in range(shape.num_layers):
        shards.add(experts(layer) | _attention(layer, shape, generator))
    hidden = shape.hidden_size
    ends = {
        "model.embed_tokens.weight": _normal(generator, shape.vocab_size, hidden),
        "lm_head.weight": _normal(generator, shape.vocab_size, hidden),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }
    shards.add(ends)
    shards.close(config)


def _attention(layer: int, shape: Shape, generator: torch.Generator) -> dict[str, Tensor]:
    """All of a layer but its experts."""
    hidden, head = shape.hidden_size, shape.head_dim
    query, key = shape.num_heads * head, shape.num_kv_heads * head
    prefix = f"model.layers.{layer}"

    def ones(size: int) -> Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    return {
        f"{prefix}.self_attn.q_proj.weight": _normal(generator, query, hidden),
        f"{prefix}.self_attn.k_proj.weight": _normal(generator, key, hidden),
        f"{prefix}.self_attn.v_proj.weight": _normal(generator, key, hidden),
        f"{prefix}.self_attn.o_proj.weight": _normal(generator, hidden, query),
        f"{prefix}.self_attn.q_norm.weight": ones(head),
        f"{prefix}.self_attn.k_norm.weight": ones(head),
        f"{prefix}.input_layernorm.weight": ones(hidden),
        f"{prefix}.post_attention_layernorm.weight": ones(hidden),
        f"{prefix}.mlp.gate.weight": _normal(generator, shape.num_experts, hidden),
    }
