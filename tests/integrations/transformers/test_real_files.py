"""Files that the formats' own tools wrote, loaded whole: logits and tokens of the model in them.

`reference.json` has, for each prompt, what a bf16 model with the tool's own decoded weights gave:
its last logits, eight greedy tokens, and their `clearness` (least lead of a chosen token or expert,
as a part of the spread of the candidates).
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from firesteel.formats.base import TensorHeader
from firesteel.formats.registry import detect
from firesteel.integrations.transformers import firesteel_config, load_model, load_report
from tests.integrations.transformers.compare import (
    assert_same,
    assert_same_bits,
    assert_saved,
    buffers,
    digests,
    files_of,
    packed_experts,
    run,
)

ROOT = Path(__file__).parents[2] / "data" / "checkpoints"
FOLDERS = sorted(path.name for path in ROOT.iterdir() if (path / "reference.json").exists())
# One of each tool, for the oldest host.
TOOLS = ("llmcompressor", "ct0.17", "autoround", "gptqmodel", "modelopt")
ONE_A_TOOL = [next(name for name in FOLDERS if name.startswith(tool)) for tool in TOOLS]
# The reference rounds to bf16, by 2**-9 of a number at most, about 15 times a layer in two layers
# and thrice at the head; so does a model here, in sums of another order. Independent roundings move
# a logit by 2**-9 * sqrt(2 * 33 / 3) = 0.009 of the logits' spread, and the worst of the 400 logits
# of a file by 3.5 times that, 0.032. Attention's softmax and the norms after it make errors up to
# thrice as large.
BF16_BOUND = 0.1
"""Largest difference from the reference's logits, as a part of their standard deviation."""
CLEAR = 2 * BF16_BOUND
"""Two logits that each move by the bound keep their order if they are so far apart."""


def oracle_of_files(path: Path) -> Any:
    """The host's Qwen3-MoE in fp32 with every weight of the files dequantised."""
    config = AutoConfig.from_pretrained(path)
    stored = files_of(path)
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in stored.items():
        layer, _, suffix = name.rpartition(".")
        layers.setdefault(layer, {})[suffix] = tensor
    state: dict[str, Tensor] = {}
    for layer, tensors in layers.items():
        form = detect(config.quantization_config, tensors)
        if form is None:
            state.update({f"{layer}.{key}": tensor.float() for key, tensor in tensors.items()})
            continue
        headers = {key: TensorHeader(tuple(t.shape), t.dtype) for key, t in tensors.items()}
        scheme = form.scheme(config.quantization_config, layer, headers)
        state[f"{layer}.weight"] = form.unpack(scheme, tensors).dequantize(scheme)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack(
                [state.pop(f"{prefix}.{e}.{part}.weight") for e in range(config.num_experts)]
            )
            for part in ("gate_proj", "up_proj", "down_proj")
        )
        state[f"{prefix}.gate_up_proj"] = torch.cat([gate, up], dim=1)
        state[f"{prefix}.down_proj"] = down
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.set_experts_implementation("eager")
    model.load_state_dict(state, strict=True)
    return model.eval()


def test_every_tool_has_a_checkpoint():
    assert len(set(ONE_A_TOOL)) == len(TOOLS)
    assert len(FOLDERS) >= 25


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.host] * (name in ONE_A_TOOL)) for name in FOLDERS],
)
def test_a_real_file_gives_the_oracle_s_numbers_and_its_tokens(tmp_path, name):
    path = ROOT / name
    before = digests(path)
    reference = json.loads((path / "reference.json").read_text())
    model = load_model(path, dtype=torch.float32)
    wanted = oracle_of_files(path)
    for prompt in reference["prompts"][1::2]:
        assert_same(model, wanted, torch.tensor([prompt["prompt"]]))
    report = load_report(model)
    assert sum(report.experts.values()) == len(packed_experts(model)) > 0
    dense = [entry["name"] for entry in reference["linears"] if ".experts." not in entry["name"]]
    assert sum(report.linears.values()) + len(report.expanded) == len(dense)
    model = load_model(path)
    model.save_pretrained(tmp_path / "out")
    assert_saved(tmp_path / "out", files_of(path), model.dtype)
    assert_same_bits(buffers(load_model(tmp_path / "out")), buffers(model))
    assert digests(path) == before


@pytest.mark.parametrize("name", FOLDERS)
def test_a_real_file_gives_the_reference_s_logits_and_tokens(name):
    reference = json.loads((ROOT / name / "reference.json").read_text())
    model = load_model(ROOT / name, attn_implementation="eager")
    # The reference's whole model was cast to bf16, and its rotary frequencies with it.
    model.model.rotary_emb.to(torch.bfloat16)
    for prompt in reference["prompts"]:
        wanted = torch.tensor(prompt["logits"])
        start = len(prompt["prompt"])
        ids = torch.tensor([prompt["prompt"] + prompt["greedy"]])
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[0].float()
        bound = BF16_BOUND * wanted.std()
        assert (logits[start - 1] - wanted).abs().max() <= bound
        for step, token in enumerate(prompt["greedy"], start - 1):
            assert logits[step].max() - logits[step, token] <= 2 * bound
        if prompt["clearness"] > CLEAR:
            tokens = run(model, ids[:, :start])[1]
            assert tokens[0].tolist() == prompt["greedy"]


def test_enough_prompts_are_clear():
    files = (json.loads((ROOT / name / "reference.json").read_text()) for name in FOLDERS)
    clear = [p["clearness"] > CLEAR for reference in files for p in reference["prompts"]]
    assert sum(clear) >= 20


@pytest.mark.host
@pytest.mark.parametrize("name", ONE_A_TOOL)
def test_the_host_s_own_call_gives_the_same(name):
    config = firesteel_config(ROOT / name)
    model = AutoModelForCausalLM.from_pretrained(ROOT / name, config=config)
    wanted = load_model(ROOT / name)
    assert model.config._experts_implementation == "firesteel"
    assert load_report(model).as_dict() | {"seconds": 0} == load_report(wanted).as_dict() | {
        "seconds": 0
    }
    assert_same_bits(buffers(model), buffers(wanted))
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    assert all(map(torch.equal, run(model, ids), run(wanted, ids)))
