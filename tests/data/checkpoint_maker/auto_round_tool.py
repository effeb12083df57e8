"""GPTQ, AWQ and native checkpoints, exported and decoded by auto-round (plain rounding)."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from auto_round import AutoRound
from auto_round.export.export_to_awq.utils import dequantize_gemm
from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from checkpoint_maker.base import ONE_LAYER, TWO_LAYERS, BaseShape, write_base
from checkpoint_maker.staging import Decoded, publish, versions, write_decoded

PACKAGES = ("auto-round", "transformers", "torch")


@dataclass(frozen=True, slots=True)
class Case:
    """One export; attention is quantised too unless ignore names it."""

    name: str
    format: str
    bits: int = 4
    symmetric: bool = True
    ignore: str = ""
    attention_bits: int | None = None
    shape: BaseShape = ONE_LAYER


CASES = (
    Case("autoround-gptq-w4-g32-sym-attn", "auto_gptq", shape=TWO_LAYERS),
    Case("autoround-gptq-w4-g32-asym", "auto_gptq", 4, False, "self_attn"),
    Case("autoround-gptq-w3-g32-asym-attn", "auto_gptq", 3, False),
    Case("autoround-awq-w4-g32-asym-attn", "auto_awq", 4, False),
    Case("autoround-awq-w4-g32-sym", "auto_awq", 4, True, "self_attn"),
    Case("autoround-native-w4-g32-sym", "auto_round", 4, True, "self_attn"),
    Case("autoround-native-w4-g32-sym-mixed", "auto_round", attention_bits=8),
    Case("autoround-native-w4-g32-asym-attn", "auto_round", 4, False),
    Case("autoround-native-w3-g32-sym-attn", "auto_round", 3),
    Case("autoround-native-w3-g32-asym-attn", "auto_round", 3, False),
    Case("autoround-native-w8-g32-sym-attn", "auto_round", 8),
)


def _tokenizer() -> PreTrainedTokenizerFast:
    """The least tokenizer that auto-round accepts; rounding never calls it."""
    words = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")


def _quantize(case: Case, base: Path, out: Path) -> Path:
    """Round a base and export it; return the folder that auto-round chose."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    layer_config = {}
    if case.attention_bits is not None:
        layer_config["self_attn"] = {"bits": case.attention_bits}
    rounder = AutoRound(
        model,
        _tokenizer(),
        bits=case.bits,
        group_size=32,
        sym=case.symmetric,
        iters=0,
        disable_opt_rtn=True,
        device_map="cpu",
        ignore_layers=case.ignore,
        layer_config=layer_config,
    )
    return Path(rounder.quantize_and_save(str(out), format=case.format)[1])


def _run_linear(tensors: dict[str, torch.Tensor], packing: str) -> torch.Tensor:
    """Weight [N, K] fp16: auto-round's torch QuantLinear applied to the identity."""
    qweight, scales = tensors["qweight"], tensors["scales"]
    out_features = scales.shape[1]
    group = 32
    in_features = scales.shape[0] * group
    bits = qweight.shape[0] * 32 // in_features
    module = qlinear_torch if packing == "auto_round" else qlinear_torch_zp
    linear = module.QuantLinear(bits, group, in_features, out_features, False)
    for name in ("qweight", "qzeros", "scales"):
        getattr(linear, name).copy_(tensors[name])
    return linear(torch.eye(in_features, dtype=torch.float16)).t()


def _decode(folder: Path) -> Decoded:
    """Weights as the QuantLinear of the checkpoint's packing decodes them."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    packing = config.get("packing_format", config["quant_method"])
    tensors = load_file(folder / "model.safetensors")
    weights = {}
    for name in sorted(n.removesuffix(".qweight") for n in tensors if n.endswith(".qweight")):
        local = {part: tensors[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales")}
        if "awq" in packing:
            weight = dequantize_gemm(local["qweight"], local["qzeros"], local["scales"], 4, 32).t()
        else:
            weight = _run_linear(local, packing)
        weights[name] = weight
    if "awq" in packing:
        return Decoded(weights, "auto_round.export.export_to_awq.utils.dequantize_gemm")
    module = "qlinear_torch" if packing == "auto_round" else "qlinear_torch_zp"
    return Decoded(weights, f"auto_round_extension.torch.{module}.QuantLinear on the identity")


def make(case: Case, work: Path, tool: str) -> None:
    """Make one checkpoint of this tool."""
    base = write_base(case.shape, work / "base")
    made = _quantize(case, base, work / "made" / case.name)
    target = publish(made, case.name)
    write_decoded(
        target,
        work,
        tool="auto-round",
        tool_versions=versions(*PACKAGES),
        command=f"python make_checkpoints.py {tool} --only {case.name}",
        decoded=_decode(target),
    )
