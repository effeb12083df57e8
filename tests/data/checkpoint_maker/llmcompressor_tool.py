"""compressed-tensors checkpoints, written and decoded by llmcompressor's own stack.

Also serves an older llmcompressor whose compressed-tensors packs 3-bit codes ten a word.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    preset_name_to_scheme,
)
from llmcompressor import oneshot
from llmcompressor.modeling.moe.linearize import linearize_moe
from llmcompressor.modifiers.quantization import QuantizationModifier
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from checkpoint_maker.base import ONE_LAYER, TWO_LAYERS, BaseShape, write_base
from checkpoint_maker.staging import Decoded, publish, versions, write_decoded

PACKAGES = ("llmcompressor", "compressed-tensors", "transformers", "torch")
EXPERTS_ONLY = ("lm_head", "re:.*mlp.gate$", "re:.*self_attn.*")
WITH_ATTENTION = ("lm_head", "re:.*mlp.gate$")


@dataclass(frozen=True, slots=True)
class Case:
    """One checkpoint: an integer scheme, or a preset of compressed-tensors by name."""

    name: str
    bits: int = 4
    group: int | None = 32
    symmetric: bool = True
    preset: str | None = None
    ignore: tuple[str, ...] = EXPERTS_ONLY
    shape: BaseShape = ONE_LAYER
    max_shard: str | None = None


CASES = (
    Case("llmcompressor-ct-w4-g32-sym", shape=TWO_LAYERS),
    Case(
        "llmcompressor-ct-w4-g32-asym-attn",
        symmetric=False,
        ignore=WITH_ATTENTION,
    ),
    Case(
        "llmcompressor-ct-w4-g128-sym-attn",
        group=128,
        ignore=WITH_ATTENTION,
        shape=BaseShape(moe_intermediate_size=128, head_dim=64, num_layers=1),
    ),
    Case(
        "llmcompressor-ct-w4-channel-sym-attn",
        group=None,
        ignore=WITH_ATTENTION,
    ),
    Case("llmcompressor-ct-w3-g32-sym-attn", bits=3, ignore=WITH_ATTENTION),
    Case("llmcompressor-ct-w3-g32-asym", bits=3, symmetric=False),
    Case(
        "llmcompressor-ct-w8-g32-sym-attn-sharded",
        bits=8,
        ignore=WITH_ATTENTION,
        max_shard="70KB",
    ),
    Case("llmcompressor-ct-w8-channel-sym", bits=8, group=None),
    Case(
        "llmcompressor-nvfp4a16-w4-g16-sym-attn",
        preset="NVFP4A16",
        ignore=WITH_ATTENTION,
        shape=TWO_LAYERS,
    ),
    Case("llmcompressor-mxfp4a16-w4-g32-sym", preset="MXFP4A16"),
)
OLD_CASES = (
    Case("ct0.17-ct-w3-g32-sym-attn", bits=3, ignore=WITH_ATTENTION),
    Case("ct0.17-ct-w3-g32-asym", bits=3, symmetric=False),
)


def _scheme(case: Case) -> QuantizationScheme:
    """The scheme of a case on every Linear that is not ignored."""
    if case.preset is not None:
        return preset_name_to_scheme(case.preset, ["Linear"])
    weights = QuantizationArgs(
        num_bits=case.bits,
        type="int",
        symmetric=case.symmetric,
        strategy="channel" if case.group is None else "group",
        group_size=case.group,
    )
    return QuantizationScheme(targets=["Linear"], weights=weights)


def _quantize(case: Case, base: Path, out: Path) -> None:
    """Quantise a base data-free, as a user of llmcompressor would, and save it."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    linearize_moe(model)
    recipe = QuantizationModifier(config_groups={"group_0": _scheme(case)}, ignore=[*case.ignore])
    oneshot(model=model, recipe=recipe, pipeline="datafree")
    extra = {} if case.max_shard is None else {"max_shard_size": case.max_shard}
    model.save_pretrained(out, save_compressed=True, **extra)


def _modules(folder: Path) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Each quantised module of a checkpoint with its tensors by local name."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(path))
    names = sorted(n.removesuffix(".weight_packed") for n in tensors if n.endswith("weight_packed"))
    for name in names:
        yield name, {k.rsplit(".", 1)[1]: v for k, v in tensors.items() if k.startswith(f"{name}.")}


def _decode(folder: Path) -> Decoded:
    """Weights as compressed_tensors' own compressor classes decompress them."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    scheme = QuantizationConfig(**config).config_groups["group_0"]
    weights = {}
    for name, tensors in _modules(folder):
        state = compressor.decompress(tensors, scheme)
        weights[name] = state["weight"]
    return Decoded(weights, f"compressed_tensors {compressor.__name__}.decompress")


def make(case: Case, work: Path, tool: str) -> None:
    """Make one checkpoint of this tool."""
    base = write_base(case.shape, work / "base")
    out = work / "made" / case.name
    _quantize(case, base, out)
    target = publish(out, case.name)
    write_decoded(
        target,
        work,
        tool="llmcompressor",
        tool_versions=versions(*PACKAGES),
        command=f"python make_checkpoints.py {tool} --only {case.name}",
        decoded=_decode(target),
    )
