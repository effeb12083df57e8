"""GPTQ v1 and v2 checkpoints, calibrated on random ids and decoded by gptqmodel."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from checkpoint_maker.base import ONE_LAYER, BaseShape, write_base
from checkpoint_maker.staging import Decoded, publish, versions, write_decoded

# The library's worker pool refuses machines of two cores unless told a number.
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")

from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from gptqmodel.quantization import FORMAT

PACKAGES = ("gptqmodel", "transformers", "torch")
EXPERTS_ONLY = {"-:.*self_attn": {}}
SAMPLES, SAMPLE_TOKENS = 4, 256


@dataclass(frozen=True, slots=True)
class Case:
    """One checkpoint in a GPTQ layout; the router and lm_head always stay bf16."""

    name: str
    format: str = "gptq"
    bits: int = 4
    group: int = 32
    symmetric: bool = True
    desc_act: bool = False
    attention: bool = False
    shape: BaseShape = ONE_LAYER


CASES = (
    Case("gptqmodel-gptq-w4-g32-sym-attn", attention=True),
    Case("gptqmodel-gptqv2-w4-g32-asym", "gptq_v2", symmetric=False),
    Case("gptqmodel-gptqv2-w3-g32-sym-attn", "gptq_v2", bits=3, attention=True),
    Case("gptqmodel-gptq-w3-g32-asym", bits=3, symmetric=False),
    Case(
        "gptqmodel-gptq-w4-g32-asym-borrow",
        symmetric=False,
        shape=BaseShape(num_layers=1, group_offset=0.2),
    ),
    Case("gptqmodel-gptq-w8-g32-sym-attn", bits=8, attention=True),
    Case("gptqmodel-gptq-w4-g32-sym-attn-desc_act", desc_act=True, attention=True),
)


def _samples(vocab_size: int) -> list[dict[str, torch.Tensor]]:
    """Random prompts to calibrate on."""
    gen = torch.Generator().manual_seed(1)
    size = (1, SAMPLE_TOKENS)
    return [
        {
            "input_ids": torch.randint(vocab_size, size, generator=gen),
            "attention_mask": torch.ones(size, dtype=torch.long),
        }
        for _ in range(SAMPLES)
    ]


def _quantize(case: Case, base: Path, out: Path) -> None:
    """Run GPTQ on a base and save it."""
    config = QuantizeConfig(
        bits=case.bits,
        group_size=case.group,
        sym=case.symmetric,
        desc_act=case.desc_act,
        format=FORMAT(case.format),
        dynamic=None if case.attention else EXPERTS_ONLY,
        device="cpu",
        offload_to_disk=False,
    )
    model = GPTQModel.load(str(base), config)
    model.quantize(_samples(case.shape.vocab_size), batch_size=1)
    model.save(str(out))


def _decode(folder: Path) -> Decoded:
    """Weights [N, K] fp16 as gptqmodel's torch kernel decodes a checkpoint it loads."""
    model = GPTQModel.load(str(folder), backend=BACKEND.TORCH, device="cpu", dtype=torch.float16)
    weights = {
        name: module.dequantize_weight().t()
        for name, module in model.model.named_modules()
        if hasattr(module, "dequantize_weight")
    }
    return Decoded(weights, "gptqmodel TorchLinear.dequantize_weight after load in fp16")


def make(case: Case, work: Path, tool: str) -> None:
    """Make one checkpoint of this tool."""
    torch.manual_seed(0)
    base = write_base(case.shape, work / "base")
    out = work / "made" / case.name
    _quantize(case, base, out)
    target = publish(out, case.name)
    write_decoded(
        target,
        work,
        tool="gptqmodel",
        tool_versions=versions(*PACKAGES),
        command=f"python make_checkpoints.py {tool} --only {case.name}",
        decoded=_decode(target),
    )
