"""NVFP4 checkpoints, calibrated on random ids and decoded by nvidia-modelopt."""

from dataclasses import dataclass
from pathlib import Path

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from checkpoint_maker.base import ONE_LAYER, BaseShape, write_base
from checkpoint_maker.staging import Decoded, publish, versions, write_decoded

PACKAGES = ("nvidia-modelopt", "transformers", "torch")
SAMPLES, SAMPLE_TOKENS, BLOCK = 4, 256, 16


@dataclass(frozen=True, slots=True)
class Case:
    """One checkpoint of a preset of modelopt, by its name in mtq."""

    name: str
    preset: str
    shape: BaseShape = ONE_LAYER


CASES = (
    Case("modelopt-nvfp4-w4-g16-sym", "NVFP4_EXPERTS_ONLY_CFG"),
    Case("modelopt-nvfp4a16-w4-g16-sym-attn", "W4A16_NVFP4_CFG"),
)


def _calibrate(model: PreTrainedModel) -> None:
    """Show random prompts to a model; the presets with input scales need it."""
    gen = torch.Generator().manual_seed(1)
    for _ in range(SAMPLES):
        ids = torch.randint(model.config.vocab_size, (1, SAMPLE_TOKENS), generator=gen)
        model(input_ids=ids)


def _decode(folder: Path) -> Decoded:
    """Weights [N, K] bf16 as modelopt's NVFP4QTensor dequantises them."""
    tensors = load_file(folder / "model.safetensors")
    weights = {}
    for name in sorted(n.removesuffix("_scale_2") for n in tensors if n.endswith("weight_scale_2")):
        packed = tensors[name]
        shape = torch.Size((packed.shape[0], 2 * packed.shape[1]))
        weights[name.removesuffix(".weight")] = NVFP4QTensor(
            shape, torch.bfloat16, packed
        ).dequantize(
            scale=tensors[f"{name}_scale"],
            double_scale=tensors[f"{name}_scale_2"],
            block_sizes={-1: BLOCK},
        )
    return Decoded(weights, "modelopt NVFP4QTensor.dequantize")


def make(case: Case, work: Path, tool: str) -> None:
    """Make one checkpoint of this tool."""
    base = write_base(case.shape, work / "base")
    out = work / "made" / case.name
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    mtq.quantize(model, getattr(mtq, case.preset), _calibrate)
    export_hf_checkpoint(model, export_dir=str(out))
    target = publish(out, case.name)
    write_decoded(
        target,
        work,
        tool="nvidia-modelopt",
        tool_versions=versions(*PACKAGES),
        command=f"python make_checkpoints.py {tool} --only {case.name}",
        decoded=_decode(target),
    )
