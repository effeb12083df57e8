"""Measure a checkpoint on heldout.txt and print greedy completions.

Expert tensors of int4-g128/ are dequantised by transformers, which needs compressed-tensors.

    python evaluate.py bf16
    python evaluate.py int4-g128
"""

import argparse
import math
import time
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3MoeForCausalLM,
)

HERE = Path(__file__).parent
END = "<|endoftext|>"
PROMPTS = (
    "def __init__(self",
    "import os\n",
    "    for i in range(",
    "    if not isinstance(",
    "class Error(",
    "    with open(",
    "    while True:\n        line = ",
)


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Tensor:
    """Return the token ids of texts, [T] int64: an end-of-text token before each text."""
    ids: list[int] = []
    for text in texts:
        ids.append(tokenizer.eos_token_id)
        ids.extend(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)
    return torch.tensor(ids)


@torch.no_grad()
def held_out_loss(model: Qwen3MoeForCausalLM, ids: Tensor, context: int) -> float:
    """Return the mean nats per token of ids [T], in disjoint windows of `context` tokens."""
    model.eval()
    nats = 0.0
    for start in range(0, len(ids) - 1, context):
        row = ids[start : start + context + 1]
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=row[None, :-1], use_cache=False).logits[0].float()
        nats += torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum").item()
    model.train()
    return nats / (len(ids) - 1)


@torch.no_grad()
def expert_report(model: Qwen3MoeForCausalLM, ids: Tensor, context: int) -> list[str]:
    """Return a line per layer: each expert's share of the routes, and how alike experts are."""
    config = model.config
    counts = torch.zeros(config.num_hidden_layers, config.num_experts)
    for start in range(0, len(ids) - 1, context):
        row = ids[None, start : start + context]
        logits = model(input_ids=row, use_cache=False, output_router_logits=True).router_logits
        for layer, one in enumerate(logits):
            chosen = one.topk(config.num_experts_per_tok, dim=-1).indices
            counts[layer] += torch.bincount(chosen.flatten(), minlength=config.num_experts)
    lines: list[str] = []
    off_diagonal = ~torch.eye(config.num_experts, dtype=torch.bool)
    for layer, block in enumerate(model.model.layers):
        shares = " ".join(f"{100 * share:5.1f}" for share in counts[layer] / counts[layer].sum())
        flat = torch.cat([p.float().flatten(1) for p in block.mlp.experts.parameters()], dim=1)
        unit = torch.nn.functional.normalize(flat, dim=1)
        alike = (unit @ unit.T)[off_diagonal]
        lines.append(
            f"layer {layer}     share of routes % {shares}   "
            f"cosine of two experts: mean {alike.mean():.4f} max {alike.max():.4f}"
        )
    return lines


@torch.no_grad()
def complete(model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str) -> str:
    """Return the prompt and its greedy completion of 64 tokens."""
    ids = tokenizer(END + prompt, return_tensors="pt").input_ids
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False
    )
    return tokenizer.decode(out[0, 1:], skip_special_tokens=True)


def evaluate(folder: Path, *, context: int) -> None:
    """Print the held-out loss of the checkpoint in folder, speeds, sizes and completions."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    text = (HERE / "heldout.txt").read_text("utf-8")
    ids = encode(tokenizer, [text])
    start = time.perf_counter()
    nats = held_out_loss(model, ids, context)
    seconds = time.perf_counter() - start
    model.eval()
    bits = nats * (len(ids) - 1) / len(text.encode()) / math.log(2)
    print(f"{folder.name}: {(folder / 'model.safetensors').stat().st_size} bytes")
    print(f"loss {nats:.4f}  perplexity {math.exp(nats):.3f}  bits/byte {bits:.4f}")
    print(f"read {len(ids) / seconds:.0f} tokens/s with {torch.get_num_threads()} threads")
    start = time.perf_counter()
    completions = [complete(model, tokenizer, prompt) for prompt in PROMPTS]
    seconds = time.perf_counter() - start
    print(f"wrote {64 * len(PROMPTS) / seconds:.0f} tokens/s at most")
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        print(f"--- {prompt!r}\n{completion}")


def main() -> None:
    """Read the command line and evaluate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--context", type=int, default=512)
    options = parser.parse_args()
    evaluate(options.folder, context=options.context)


if __name__ == "__main__":
    main()
