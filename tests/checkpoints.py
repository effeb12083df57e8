"""Writes tiny checkpoints of every supported family, in every format, and builds their oracle.

A checkpoint starts as a random model of the host's own class. `write` gives its tensors the names
that files of the family have, stores the chosen matrices with a format's own `pack`, and keeps the
weights that the stored numbers stand for. `oracle` is the host's model with those weights in its
own fused parameters: no packed module and no code of firesteel runs in it.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from firesteel.formats.base import Divisor, Multiplier, QuantizedMatrix, Scheme
from firesteel.formats.quantize import parse_recipe, quantize_matrix
from firesteel.formats.registry import format_named
from firesteel.formats.trellis import TrellisCode
from firesteel.formats.trellis_matrix import trellis_scheme
from tests.strategies import random_trellis

FAMILY_NAMES = (
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe",
    "glm_moe_dsa",
    "gpt_oss",
    "mixtral",
    "olmoe",
    "qwen3_moe",
)

_SIZES = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# Multi-head latent attention, one dense layer first, shared experts, groups of experts.
_LATENT = {
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "moe_intermediate_size": 64,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
}
_INDEXER = {"index_topk": 4, "index_head_dim": 64, "index_n_heads": 8}
_CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v3": _LATENT,
    "deepseek_v32": {**_LATENT, **_INDEXER},
    "glm4_moe": {
        "num_hidden_layers": 3,
        "intermediate_size": 96,
        "moe_intermediate_size": 64,
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "head_dim": 32,
        "use_qk_norm": True,
        "attention_bias": True,
    },
    "glm_moe_dsa": {**_LATENT, **_INDEXER, "indexer_types": ["full", "full", "shared"]},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 32, "sliding_window": 8},
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 4, "num_key_value_heads": 4},
    "qwen3_moe": {
        "num_hidden_layers": 3,
        "intermediate_size": 96,
        "moe_intermediate_size": 64,
        "num_experts": 4,
        "head_dim": 32,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
}
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_MIXTRAL = dict(zip(_PROJECTIONS, ("w1", "w3", "w2"), strict=True))
# Tensors of a fused checkpoint of gpt-oss keep the module's own names.
_GPT_OSS_FUSED = ("", "mxfp4-gpt-oss")


@dataclass(frozen=True, slots=True)
class Storage:
    """How a checkpoint stores its matrices.

    Fields
        format         name in the registry; "" for plain tensors
        recipe         what rounds the numbers; of exl3, whose numbers are random, the rates and
                       codebooks that matrices take in turn
        layout         the format's variant
        has_act_order  columns name their group
        dtype          of the weights that are rounded: it chooses the type of the scales
    """

    format: str
    recipe: str = ""
    layout: str = ""
    has_act_order: bool = False
    dtype: torch.dtype = torch.bfloat16


PLAIN = Storage("")
_HALF = torch.float16
STORAGES: dict[str, Storage] = {
    "ct-w4-g32": Storage("compressed-tensors", "int4-g32", "stream"),
    "ct-w4-g32-asym": Storage("compressed-tensors", "int4-g32-asym", "stream"),
    "ct-w4-actorder": Storage("compressed-tensors", "int4-g32-asym", "stream", True),
    "ct-w3-ten-a-word": Storage("compressed-tensors", "int3-g32", "ten-a-word"),
    "ct-w3-asym": Storage("compressed-tensors", "int3-g32-asym", "stream"),
    "ct-w8-channel": Storage("compressed-tensors", "int8-channel", "stream", dtype=_HALF),
    "gptq-w4-v1": Storage("gptq", "int4-g32", "v1", dtype=_HALF),
    "gptq-w4-v1-asym": Storage("gptq", "int4-g32-asym", "v1-without-g_idx", dtype=_HALF),
    "gptq-w4-v2-asym": Storage("gptq", "int4-g32-asym", "v2", dtype=_HALF),
    "gptq-w4-desc_act": Storage("gptq", "int4-g32-asym", "v1", True, dtype=_HALF),
    "gptq-w3-v2": Storage("gptq", "int3-g32", "v2", dtype=_HALF),
    "gptq-w8-channel": Storage("gptq", "int8-channel", "v1", dtype=_HALF),
    "awq-asym": Storage("awq", "int4-g32-asym", dtype=_HALF),
    "awq-sym": Storage("awq", "int4-g64", dtype=_HALF),
    "auto-round-gptq": Storage("auto-round", "int4-g32", "gptq:v1-without-g_idx", dtype=_HALF),
    "auto-round-awq": Storage("auto-round", "int4-g32-asym", "awq:", dtype=_HALF),
    "mxfp4": Storage("mxfp4", "mxfp4"),
    "nvfp4": Storage("nvfp4", "nvfp4"),
    "nvfp4-modelopt": Storage("nvfp4-modelopt", "nvfp4"),
    "exl3-3-mcg": Storage("exl3", "3-mcg"),
    "exl3-2.5-mul1": Storage("exl3", "2.5-mul1"),
    "exl3-4-3inst-signs": Storage("exl3", "4-3inst", "signs"),
    "exl3-whole-mcg": Storage("exl3", "3-mcg 2-mcg 4-mcg 5-mcg"),
    "exl3-mixed": Storage("exl3", "2-mcg 4-mul1 3-3inst 1-mcg 5.5-mul1 6-mcg"),
    "nf3": Storage("nf3", "nf3", "tile-64"),
    "mxfp4-gpt-oss": Storage("mxfp4-gpt-oss", "mxfp4"),
}
"""A storage for each format and each of its variants; the last one is gpt-oss' only."""


@dataclass(frozen=True, slots=True)
class Written:
    """A checkpoint on disk and what it stands for.

    Fields
        path     its folder
        family   its model_type
        tensors  what the files hold, by name
        state    the host's state dict with stored numbers in the place of what was rounded, fp32
        schemes  name of each quantised matrix to how it is stored
    """

    path: Path
    family: str
    tensors: dict[str, Tensor]
    state: dict[str, Tensor]
    schemes: dict[str, Scheme] = field(default_factory=dict)


def config_of(family: str, **overrides: Any) -> Any:
    """The host's config of a tiny model of the family."""
    return AutoConfig.for_model(family, **{**_SIZES, **_CONFIGS[family], **overrides})


def random_model(config: Any, seed: int = 0) -> nn.Module:
    """A model of the host's class in fp32, of bf16 numbers, whose experts and choices differ."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            numbers = torch.randn(tensor.shape, generator=generator)
            if tensor.ndim == 1 or name.endswith("_bias"):
                numbers = 0.2 * numbers + (1.0 if name.endswith("norm.weight") else 0.0)
            elif not name.endswith("embed_tokens.weight"):
                # Of order one after each product, so that no layer drowns another.
                numbers = numbers * (2.0 / tensor.shape[-1] ** 0.5)
            tensor.copy_(numbers.bfloat16().float())
    return model


def write(
    path: Path,
    family: str,
    storage: Storage = PLAIN,
    *,
    seed: int = 0,
    num_shards: int = 1,
    linears: bool = False,
    also: tuple[str, ...] = (),
    plain_layers: tuple[int, ...] = (),
    dtype: torch.dtype = torch.bfloat16,
    added: Mapping[str, Tensor] | None = None,
    **config_overrides: Any,
) -> Written:
    """Write a checkpoint into the new folder `path`.

    Args:
        storage: of the experts.
        num_shards: 1 for `model.safetensors`, else that many shards and their index.
        linears: store every other linear layer so too, but for routers and `lm_head`.
        also: ends of names of further weights to store so too.
        plain_layers: layers whose experts stay plain.
        dtype: of what is not quantised.
        added: more tensors for the file.
        config_overrides: other fields of the config.
    """
    config = config_of(family, **config_overrides)
    model = random_model(config, seed)
    writer = _Writer(family, storage, torch.Generator().manual_seed(seed + 1), dtype)
    for name, tensor in _own_tensors(model):
        layer = _layer_of(name)
        if ".mlp.experts." in name:
            writer.experts(name, tensor, storage if layer not in plain_layers else PLAIN)
        elif name.endswith(also) or (linears and _is_inner_linear(model, name)):
            writer.matrix(name, tensor)
        else:
            writer.plain(name, tensor)
    tensors = {**writer.tensors, **(added or {})}
    path.mkdir(parents=True)
    _write_config(path, config, writer, dtype)
    write_tensors(path, tensors, num_shards)
    return Written(path, family, tensors, writer.state, writer.schemes)


def oracle(written: Written, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The host's model of a written checkpoint, its dequantised weights in its own parameters."""
    config = AutoConfig.from_pretrained(written.path)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.set_experts_implementation("eager")
    missing, unexpected = model.load_state_dict(written.state, strict=False)
    tied = "lm_head.weight" if config.tie_word_embeddings else ""
    assert not set(missing) - {tied}, missing
    assert not unexpected, unexpected
    return model.eval()


def write_tensors(path: Path, tensors: Mapping[str, Tensor], num_shards: int = 1) -> None:
    """Write tensors as one file, or as shards and their index."""
    own = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if num_shards == 1:
        save_file(own, path / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(own)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        # Round robin: the tensors of one layer are in different shards.
        part = names[shard::num_shards]
        save_file({name: own[name] for name in part}, path / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def edit_config(path: Path, **fields: Any) -> None:
    """Change fields of `config.json`; None takes one away."""
    file = path / "config.json"
    config = {**json.loads(file.read_text()), **fields}
    file.write_text(json.dumps({key: v for key, v in config.items() if v is not None}))


class _Writer:
    """Collects the tensors of a file and the state that they stand for."""

    def __init__(
        self, family: str, storage: Storage, generator: torch.Generator, dtype: torch.dtype
    ) -> None:
        self.family = family
        self.storage = storage
        self.generator = generator
        self.dtype = dtype
        self.tensors: dict[str, Tensor] = {}
        self.state: dict[str, Tensor] = {}
        self.schemes: dict[str, Scheme] = {}

    def plain(self, name: str, tensor: Tensor) -> None:
        # Routers' corrections are fp32 in real files.
        stored = tensor if name.endswith("e_score_correction_bias") else tensor.to(self.dtype)
        self.state[name] = stored.float()
        self.tensors[self._file_name(name)] = stored.clone()

    def matrix(self, name: str, weight: Tensor) -> None:
        """A linear layer of its own."""
        layer = self._file_name(name).removesuffix(".weight")
        self.state[name] = self._store(layer, weight, self.storage)

    def experts(self, name: str, fused: Tensor, storage: Storage) -> None:
        """A fused parameter of the host, `[E, n, k]` or as gpt-oss has it."""
        if self.family == "gpt_oss":
            self._gpt_oss_experts(name, fused, storage)
            return
        prefix, _, projection = name.rpartition(".")
        read = []
        for expert, matrix in enumerate(fused):
            parts = matrix.chunk(2) if projection == "gate_up_proj" else [matrix]
            names = _PROJECTIONS[:2] if len(parts) == 2 else _PROJECTIONS[2:]
            layers = [f"{prefix}.{expert}.{part}" for part in names]
            layers = [self._file_name(layer) for layer in layers]
            pairs = zip(layers, parts, strict=True)
            read.append(torch.cat([self._store(layer, part, storage) for layer, part in pairs]))
        self.state[name] = torch.stack(read)

    def _gpt_oss_experts(self, name: str, fused: Tensor, storage: Storage) -> None:
        """`[E, k, n]` with gate and up interleaved, and biases `[E, n]`."""
        if storage.format not in _GPT_OSS_FUSED:
            self._linearised_experts(name, fused, storage)
        elif storage.format == "" or name.endswith("_bias"):
            self.plain(name, fused)
        else:
            packed, read = [], []
            for matrix in fused:
                scheme, numbers = self._round(matrix.T, storage)
                packed.append(format_named(scheme.format).pack(scheme, numbers))
                read.append(numbers.dequantize(scheme).T)
                self.schemes[name] = scheme
            for suffix in packed[0]:
                self.tensors[f"{name}_{suffix}"] = torch.stack([each[suffix] for each in packed])
            self.state[name] = torch.stack(read).contiguous()

    def _linearised_experts(self, name: str, fused: Tensor, storage: Storage) -> None:
        """As llmcompressor stores gpt-oss: a linear layer of its own for each projection."""
        prefix, _, projection = name.rpartition(".")
        is_bias = projection.endswith("_bias")
        read = []
        for expert, matrix in enumerate(fused):
            rows = matrix if is_bias else matrix.T
            is_fused = projection.startswith("gate_up_proj")
            parts = (rows[0::2], rows[1::2]) if is_fused else (rows,)
            own = torch.empty_like(rows)
            for index, (part, linear) in enumerate(
                zip(parts, _PROJECTIONS[:2] if is_fused else _PROJECTIONS[2:], strict=True)
            ):
                layer = f"{prefix}.{expert}.{linear}"
                if is_bias:
                    self.tensors[f"{layer}.bias"] = part.to(self.dtype)
                    own[index :: len(parts)] = part.to(self.dtype).float()
                else:
                    own[index :: len(parts)] = self._store(layer, part, storage)
            read.append(own if is_bias else own.T)
        self.state[name] = torch.stack(read).contiguous()

    def _store(self, layer: str, weight: Tensor, storage: Storage) -> Tensor:
        """Put the tensors of one matrix into the file; the weights that they stand for."""
        if storage.format == "":
            self.tensors[f"{layer}.weight"] = weight.to(self.dtype).contiguous()
            return weight.to(self.dtype).float()
        scheme, matrix = self._round(weight, storage)
        self.schemes[layer] = scheme
        for suffix, tensor in format_named(scheme.format).pack(scheme, matrix).items():
            self.tensors[f"{layer}.{suffix}"] = tensor
        return matrix.dequantize(scheme)

    def _round(self, weight: Tensor, storage: Storage) -> tuple[Scheme, Any]:
        """Round to the numbers that the storage holds."""
        if storage.format == "exl3":
            codes = storage.recipe.split()
            bits, codebook = codes[len(self.schemes) % len(codes)].split("-")
            code = TrellisCode(float(bits), codebook)
            scheme = trellis_scheme(*weight.shape, code, storage.layout)
            return scheme, random_trellis(scheme, self.generator)
        order = None
        if storage.has_act_order:
            order = torch.randperm(weight.shape[1], generator=self.generator)
            weight = weight[:, order]
        own, matrix = quantize_matrix(weight.to(storage.dtype), parse_recipe(storage.recipe))
        scheme = replace(own, format=storage.format, layout=storage.layout)
        if order is not None:
            scheme = replace(scheme, has_group_index=True)
            matrix = _in_file_order(scheme, matrix, order)
        if storage.format == "nvfp4-modelopt":
            assert isinstance(matrix.global_scale, Divisor)
            value = Multiplier(1 / matrix.global_scale.value)
            scheme = replace(scheme, global_scale="multiplier")
            matrix = replace(matrix, global_scale=value)
        return scheme, matrix

    def _file_name(self, name: str) -> str:
        if self.family != "mixtral":
            return name
        name = name.replace(".mlp.", ".block_sparse_moe.")
        for ours, theirs in _MIXTRAL.items():
            if ".experts." in name:
                name = name.replace(f".{ours}", f".{theirs}")
        return name


def _in_file_order(scheme: Scheme, matrix: QuantizedMatrix, order: Tensor) -> QuantizedMatrix:
    """Columns that were rounded in `order`, back in their own."""
    codes = torch.empty_like(matrix.codes)
    codes[:, order] = matrix.codes
    index = torch.empty(scheme.k, dtype=torch.int32)
    index[order] = (torch.arange(scheme.k) // scheme.group_size).int()
    return replace(matrix, codes=codes, group_index=index)


def _own_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The state dict without what a tied weight repeats."""
    is_tied = model.config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if not (is_tied and name == "lm_head.weight"):
            yield name, tensor


def _layer_of(name: str) -> int | None:
    words = name.split(".")
    return int(words[words.index("layers") + 1]) if "layers" in words else None


def _is_inner_linear(model: nn.Module, name: str) -> bool:
    path, _, suffix = name.rpartition(".")
    is_linear = isinstance(model.get_submodule(path), nn.Linear)
    return is_linear and suffix == "weight" and path != "lm_head"


def _write_config(path: Path, config: Any, writer: _Writer, dtype: torch.dtype) -> None:
    fields = config.to_dict()
    fields["architectures"] = [type(AutoModelForCausalLM.from_config(config)).__name__]
    fields["dtype"] = str(dtype).removeprefix("torch.")
    if writer.schemes:
        scheme = next(iter(writer.schemes.values()))
        if writer.storage.recipe.endswith("-channel"):
            # No group size that a group may have: the config must say "one scale a row".
            scheme = replace(scheme, k=96, group_size=96)
        fields["quantization_config"] = format_named(scheme.format).config(scheme)
    (path / "config.json").write_text(json.dumps(fields, indent=2))
