"""Quantise bf16/ to int4-g128/ with llmcompressor: W4A16, groups of 128, symmetric.

Attention and expert linears become int4; the router, the embedding and the head it is tied
to stay bf16. GPTQ is calibrated with rows of the text the model was trained on, never with
the held-out text.

    python quantize.py
"""

import argparse
import json
import sysconfig
from pathlib import Path

import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

HERE = Path(__file__).parent
IGNORE = ["lm_head", r"re:.*mlp\.gate$"]
CALIBRATION = (
    "argparse.py",
    "ast.py",
    "asyncio/base_events.py",
    "collections/__init__.py",
    "dataclasses.py",
    "email/message.py",
    "http/client.py",
    "inspect.py",
    "logging/__init__.py",
    "pathlib.py",
    "shutil.py",
    "subprocess.py",
    "tarfile.py",
    "threading.py",
    "tkinter/__init__.py",
    "unittest/case.py",
)


def calibration_rows(tokenizer: PreTrainedTokenizerBase, *, length: int, per_file: int) -> Dataset:
    """Return per_file rows of `length` token ids from each file of CALIBRATION."""
    lib = Path(sysconfig.get_path("stdlib"))
    rows: list[list[int]] = []
    for name in CALIBRATION:
        ids = tokenizer((lib / name).read_text("utf-8"), add_special_tokens=False).input_ids
        step = (len(ids) - length) // per_file
        rows.extend(ids[i * step : i * step + length] for i in range(per_file))
    return Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * length for _ in rows]})


def quantize(source: Path, out: Path, *, method: str) -> None:
    """Write the W4A16 form of the checkpoint `source` to the folder `out`."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    if method == "gptq":
        rows = calibration_rows(tokenizer, length=512, per_file=8)
        oneshot(
            model=model,
            dataset=rows,
            recipe=GPTQModifier(targets="Linear", scheme="W4A16", ignore=IGNORE),
            max_seq_length=512,
            num_calibration_samples=len(rows),
            shuffle_calibration_samples=False,
        )
    else:
        oneshot(
            model=model,
            recipe=QuantizationModifier(targets="Linear", scheme="W4A16", ignore=IGNORE),
        )
    model.save_pretrained(out, save_compressed=True)
    tokenizer.save_pretrained(out)
    config = json.loads((out / "config.json").read_text("utf-8"))
    config.pop("_name_or_path", None)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def main() -> None:
    """Read the command line and quantise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, default=HERE / "bf16")
    parser.add_argument("--out", type=Path, default=HERE / "int4-g128")
    parser.add_argument("--method", default="gptq", choices=("gptq", "round"))
    options = parser.parse_args()
    quantize(options.source, options.out, method=options.method)


if __name__ == "__main__":
    main()
