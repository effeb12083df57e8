"""`firesteel generate` on a GPU: it runs on the kernels, says so, and picks the CPU's tokens."""

import json

import pytest
import torch

from firesteel.integrations.transformers import load_model
from tests.cli.command import ROOT, invoke, invoke_json

pytestmark = pytest.mark.gpu

LITTLE = ROOT / "examples" / "little_moe" / "int4-g128"
NEW_TOKENS = 24


def test_generate_runs_every_layer_on_kernels():
    layers = json.loads((LITTLE / "config.json").read_text())["num_hidden_layers"]
    options = ("--prompt", "def ", "--max-new-tokens", NEW_TOKENS, "--device", "cuda")
    found = invoke_json("generate", LITTLE, *options)
    assert (found["backend"], found["device"]) == ("triton", "cuda:0")
    kernels = found["load"]["kernels"]
    assert (kernels["layers"], kernels["refused"]) == (layers, {})
    (plan,) = kernels["plans"]
    # Each layer of the prompt's forward and of each new token but the last is three or more.
    assert plan["launches"] >= 3 * layers * len(found["token_ids"])
    assert plan["launched_unplanned"] == plan["misses"] == []
    assert "triton on cuda:0" in invoke("generate", LITTLE, *options).stderr


def test_tokens_on_kernels_are_the_likeliest_on_the_cpu():
    """Teacher-forced, so that a token that rounding decides does not end the comparison."""
    options = ("--prompt", "class Reader:", "--max-new-tokens", NEW_TOKENS, "--device", "cuda")
    found = invoke_json("generate", LITTLE, *options)
    chosen = torch.tensor(found["token_ids"])
    ids = torch.tensor([*found["prompt_ids"], *found["token_ids"]])
    model = load_model(LITTLE, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        logits = model(ids[None]).logits[0, len(found["prompt_ids"]) - 1 : -1]
    best = logits.max(-1)
    # bf16 errs by 2**-9 a rounding, and a logit by some of them: 0.02 of the largest one, as the
    # logits of models on kernels are held to. Two logits decide.
    behind = best.values - logits.gather(1, chosen[:, None])[:, 0]
    assert (behind <= 2 * 0.02 * logits.abs().amax(-1)).all()
    assert (chosen == best.indices).float().mean() >= 0.75
