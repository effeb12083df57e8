"""The seeded Qwen3-MoE that every tool quantises.

The weights are drawn by hand, name by name, so that they depend on this file and on
torch's CPU generator only, and not on how a transformers version initialises modules.
"""

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

SEED = 20240


@dataclass(frozen=True, slots=True)
class BaseShape:
    """Sizes of a base model; all else is the same in every base.

    group_offset is the spread of the mean of 16 weights of a row. A large one makes groups
    of one sign, whose zero point is 0.
    """

    hidden_size: int = 128
    moe_intermediate_size: int = 64
    num_layers: int = 2
    head_dim: int = 32
    num_experts: int = 4
    vocab_size: int = 64
    num_heads: int = 2
    num_kv_heads: int = 1
    group_offset: float = 0.05

    @property
    def name(self) -> str:
        """A folder name that tells bases apart."""
        return (
            f"h{self.hidden_size}-i{self.moe_intermediate_size}"
            f"-l{self.num_layers}-d{self.head_dim}-o{self.group_offset}"
        )


ONE_LAYER = BaseShape(num_layers=1)
TWO_LAYERS = BaseShape(num_layers=2)


def config_dict(shape: BaseShape) -> dict[str, object]:
    """The config.json of a base, in transformers' own words."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "decoder_sparse_step": 1,
        "dtype": "bfloat16",
        "eos_token_id": None,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": 2 * shape.moe_intermediate_size,
        "max_position_embeddings": 512,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": shape.moe_intermediate_size,
        "norm_topk_prob": True,
        "num_attention_heads": shape.num_heads,
        "num_experts": shape.num_experts,
        "num_experts_per_tok": 2,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "output_router_logits": False,
        "pad_token_id": None,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.001,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": shape.vocab_size,
    }


def _tensor_shapes(shape: BaseShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of every tensor of the base, experts one by one."""
    hidden, inter, dim = shape.hidden_size, shape.moe_intermediate_size, shape.head_dim
    q_rows, kv_rows = shape.num_heads * dim, shape.num_kv_heads * dim
    yield "model.embed_tokens.weight", (shape.vocab_size, hidden)
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{norm}.weight", (hidden,)
        yield f"{prefix}.self_attn.q_proj.weight", (q_rows, hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (kv_rows, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (kv_rows, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, q_rows)
        yield f"{prefix}.self_attn.q_norm.weight", (dim,)
        yield f"{prefix}.self_attn.k_norm.weight", (dim,)
        yield f"{prefix}.mlp.gate.weight", (shape.num_experts, hidden)
        for expert in range(shape.num_experts):
            for proj, size in (
                ("gate_proj", (inter, hidden)),
                ("up_proj", (inter, hidden)),
                ("down_proj", (hidden, inter)),
            ):
                yield f"{prefix}.mlp.experts.{expert}.{proj}.weight", size
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (shape.vocab_size, hidden)


def draw(name: str, size: tuple[int, ...], group_offset: float) -> torch.Tensor:
    """One tensor, bf16, seeded by its name.

    Linears get row scales, group scales and row offsets that differ, so that a swapped
    scale, zero point, row or expert changes the logits by much.
    """
    gen = torch.Generator().manual_seed(SEED + zlib.crc32(name.encode()))
    if len(size) == 1:
        return (1.0 + 0.2 * torch.randn(size, generator=gen)).to(torch.bfloat16)
    std = 0.1
    if "embed_tokens" in name or "lm_head" in name:
        std = 0.3
    if name.endswith("mlp.gate.weight"):
        std = 0.5
    weight = std * torch.randn(size, generator=gen)
    if "_proj" in name:
        rows, cols = size
        row_scale = 0.5 + torch.rand(rows, 1, generator=gen)
        block_scale = (0.5 + torch.rand(rows, cols // 16, generator=gen)).repeat_interleave(16, 1)
        offset = torch.randn(rows, cols // 16, generator=gen).repeat_interleave(16, 1)
        weight = weight * row_scale * block_scale + group_offset * offset
    return weight.to(torch.bfloat16)


def write_base(shape: BaseShape, folder: Path) -> Path:
    """Write config.json and model.safetensors of a base under folder; return its path."""
    path = folder / shape.name
    path.mkdir(parents=True, exist_ok=True)
    tensors = {name: draw(name, size, shape.group_offset) for name, size in _tensor_shapes(shape)}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(config_dict(shape), indent=2, sort_keys=True)
    (path / "config.json").write_text(text + "\n")
    return path
