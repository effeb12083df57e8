"""A few layers of a real model as a checkpoint of random weights, written quickly.

Weights are normal, of a spread at which no part of a layer drowns another, so that logits show what
the experts give. A few matrices are rounded to nearest by the recipe; each expert has one of them
with its rows moved round, so that no two experts of a layer are the same and none of them costs
more than a copy. Everything else has the names and shapes of the host's own model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from firesteel.checkpoint.families import PROJECTIONS, Geometry, family_of
from firesteel.cli.bench.synthetic import SHAPES, Shape, Shards
from firesteel.errors import InvalidArgumentError
from firesteel.formats.quantize import parse_recipe, quantize_matrix
from firesteel.formats.registry import format_named

__all__ = ["STACKS", "stack_config", "write_stack"]

_IGNORE = ("re:.*self_attn.*", "re:.*mlp[.]gate$", "re:.*shared_experts.*", "lm_head")
_EXPERT_GAIN = 2.0
_DRAWN = 8
"""Matrices of each projection that are drawn and rounded."""
_ROWS = 32
"""Rows are moved round by multiples of it: packed zero points hold up to 32 rows in a word."""
_CONTEXT = 4096
_VOCABULARY = 1024

_GLM = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "dtype": "bfloat16",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_shared_experts": 1,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
    "vocab_size": _VOCABULARY,
    "max_position_embeddings": _CONTEXT,
}
_GLM_5_2 = _GLM | {
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 32,
}
_GLM_TINY = _GLM | {
    "hidden_size": 256,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "index_topk": 2048,
    "index_head_dim": 64,
    "index_n_heads": 8,
}
_QWEN3_TINY = Shape(
    num_layers=1,
    num_experts=16,
    top_k=2,
    hidden_size=256,
    intermediate_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
)


def _qwen3(shape: Shape) -> Callable[[int], dict[str, Any]]:
    return lambda layers: replace(shape, num_layers=layers).config()


def _glm(config: dict[str, Any]) -> Callable[[int], dict[str, Any]]:
    # The real model's first layers have no experts; these all have.
    return lambda layers: {
        **config,
        "num_hidden_layers": layers,
        "first_k_dense_replace": 0,
        "mlp_layer_types": ["sparse"] * layers,
    }


STACKS: dict[str, Callable[[int], dict[str, Any]]] = {
    "qwen3-30b-a3b": _qwen3(SHAPES["qwen3-30b-layers"]),
    "glm-5.2": _glm(_GLM_5_2),
    "qwen3-tiny": _qwen3(_QWEN3_TINY),
    "glm-tiny": _glm(_GLM_TINY),
}
"""From a number of layers to `config.json`; the tiny ones show in seconds that all works.

The vocabulary is 1024, so that what a step costs is what its layers cost.
"""


def stack_config(model: str, layers: int) -> dict[str, Any]:
    """`config.json` of so many layers of a model, without a quantization_config.

    Raises
        InvalidArgumentError: no such model, or no layers.
    """
    if model not in STACKS:
        raise InvalidArgumentError(f"--model: got {model!r}, must be one of {', '.join(STACKS)}")
    if layers < 1:
        raise InvalidArgumentError(f"--layers: got {layers}, must be 1 or more")
    return STACKS[model](layers)


def write_stack(folder: Path, config: dict[str, Any], recipe: str) -> None:
    """Write a checkpoint of `config`, its experts quantised by `recipe`, a shard a layer.

    Raises
        InvalidArgumentError: no such recipe, or one that does not fit the sizes.
    """
    parsed = parse_recipe(recipe)
    geometry = Geometry.of(family_of(config), config)
    generator = torch.Generator().manual_seed(0)
    # [3][_DRAWN]: the stored tensors of each drawn matrix.
    drawn: list[list[dict[str, Tensor]]] = []
    for part in range(len(PROJECTIONS)):
        drawn.append([])
        for _ in range(min(_DRAWN, geometry.num_experts)):
            weight = _normal(geometry.shape(part), generator, _EXPERT_GAIN)
            scheme, matrix = quantize_matrix(weight, parsed)
            drawn[-1].append(format_named(scheme.format).pack(scheme, matrix))
    shards = Shards(folder, geometry.num_layers + 1)
    others = _other_tensors(config, generator)
    for layer in range(geometry.num_layers):
        prefix = f"model.layers.{layer}."
        own = {name: others.pop(name) for name in list(others) if name.startswith(prefix)}
        shards.add(own | _experts(f"{prefix}mlp.experts", layer, geometry, drawn))
    shards.add(others)
    shards.close({**config, "quantization_config": parsed.config(_IGNORE)})


def _experts(
    prefix: str, layer: int, geometry: Geometry, drawn: list[list[dict[str, Tensor]]]
) -> dict[str, Tensor]:
    """The stored tensors of a layer's experts; a layer starts at another variant than the last."""
    tensors: dict[str, Tensor] = {}
    for part, name in enumerate(PROJECTIONS):
        n, _ = geometry.shape(part)
        num_drawn = len(drawn[part])
        assert n // _ROWS * num_drawn >= geometry.num_experts
        for expert in range(geometry.num_experts):
            turn, which = divmod((expert + layer) % geometry.num_experts, num_drawn)
            for suffix, tensor in drawn[part][which].items():
                moved = _move_rows(tensor, turn * _ROWS, n)
                tensors[f"{prefix}.{expert}.{name}.{suffix}"] = moved
    return tensors


def _move_rows(tensor: Tensor, rows: int, n: int) -> Tensor:
    """A stored tensor of a matrix of n rows whose rows are moved round; a scalar of it as it is."""
    if tensor.ndim < 2:
        return tensor.clone()
    moved, rest = divmod(rows * tensor.shape[0], n)
    assert rest == 0
    return tensor.roll(moved, 0)


def _normal(shape: tuple[int, ...], generator: torch.Generator, gain: float = 1.0) -> Tensor:
    """Weights whose product with numbers of spread 1 has spread `gain`."""
    return (torch.randn(shape, generator=generator) * (gain / shape[-1] ** 0.5)).bfloat16()


def _other_tensors(config: dict[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
    """All of the host's model but the experts: norms of ones, corrections of zeros."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    found: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if ".mlp.experts." in name:
            continue
        if name.endswith("embed_tokens.weight"):
            found[name] = torch.randn(tensor.shape, generator=generator).bfloat16()
        elif tensor.ndim > 1:
            found[name] = _normal(tuple(tensor.shape), generator)
        elif name.endswith("norm.weight"):
            found[name] = torch.ones(tensor.shape, dtype=torch.bfloat16)
        else:
            dtype = torch.float32 if name.endswith("correction_bias") else torch.bfloat16
            found[name] = torch.zeros(tensor.shape, dtype=dtype)
    return found
