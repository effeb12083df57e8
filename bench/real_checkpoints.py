"""Loads every checkpoint in tests/data and compares it with the reference of its own tool.

One JSON line a checkpoint: tokens that agree, greatest logits error relative to the greatest logit,
bytes of the experts packed and as bf16. The "before" of the same files is in tests/data/README.md.

    python bench/real_checkpoints.py [--out FILE]
"""

from __future__ import annotations

import argparse
import json
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from firesteel.integrations.transformers import load_model, load_report

CHECKPOINTS = Path(__file__).parents[1] / "tests" / "data" / "checkpoints"


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="append the lines to this file too")
    out = parser.parse_args().out
    logging.disable_progress_bar()
    for folder in sorted(CHECKPOINTS.iterdir()):
        line = json.dumps(measure(folder))
        print(line, flush=True)
        if out is not None:
            with out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


def measure(folder: Path) -> dict[str, Any]:
    """Load one checkpoint and run the prompts of its reference."""
    reference = json.loads((folder / "reference.json").read_text(encoding="utf-8"))
    model = load_model(folder, device="cpu", dtype=torch.bfloat16, attn_implementation="eager")
    equal, total, worst = 0, 0, 0.0
    for prompt in reference["prompts"]:
        ids, expected = torch.tensor([prompt["prompt"]]), prompt["greedy"]
        with torch.no_grad():
            logits = model(ids).logits[0, -1].float()
        wanted = torch.tensor(prompt["logits"])
        worst = max(worst, float((logits - wanted).abs().max() / wanted.abs().max()))
        tokens = greedy(model, ids, len(expected))
        equal += sum(a == b for a, b in zip(tokens, expected, strict=True))
        total += len(expected)
    report = load_report(model)
    return {
        "bench": "real_checkpoints",
        "checkpoint": folder.name,
        "experts": next(iter(report.experts)),
        "tokens_equal": equal,
        "tokens": total,
        "logits_error": round(worst, 4),
        "experts_bytes": report.experts_bytes,
        "experts_bf16_bytes": report.experts_bf16_bytes,
        "device": "cpu",
        "date": date.today().isoformat(),
        "versions": {name: version(name) for name in ("firesteel", "torch", "transformers")},
    }


@torch.no_grad()
def greedy(model: torch.nn.Module, ids: torch.Tensor, num_tokens: int) -> list[int]:
    """The next tokens by the greatest logit, with the whole prefix run anew at each."""
    for _ in range(num_tokens):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, -num_tokens:].tolist()


if __name__ == "__main__":
    main()
