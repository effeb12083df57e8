"""Runs `firesteel` in this process and apart, and makes small checkpoints for it."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner, Result

from firesteel.cli.bench.synthetic import Shape
from firesteel.cli.main import app

ROOT = Path(__file__).parents[2]
CHECKPOINTS = ROOT / "tests" / "data" / "checkpoints"
INT4 = CHECKPOINTS / "llmcompressor-ct-w4-g32-sym"

SHAPE = Shape(
    num_layers=2,
    num_experts=4,
    top_k=2,
    hidden_size=128,
    intermediate_size=256,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    vocab_size=64,
    context=64,
)
"""The geometry of the checkpoints that tests write: in_features of 128 and of 256."""


def invoke(*arguments: object) -> Result:
    """Run in this process; an exception that is no exit is raised here."""
    return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)


def invoke_json(*arguments: object) -> dict:
    """The one JSON object that a command prints with --json, and nothing else on stdout."""
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    return json.loads(line)


def run_apart(*arguments: object, code: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run in a process of its own, its output piped; `code` runs first."""
    start = f"{code or ''}\nfrom firesteel.cli.main import app\napp()"
    command = [sys.executable, "-c", start, *map(str, arguments)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)


def assert_error(result: Result, *words: str) -> None:
    """The command ended with code 2, one line on stderr that has `words`, and no other output."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    for word in words:
        assert word in line


def write_tokenizer(folder: Path, vocab_size: int = 64) -> None:
    """A tokenizer of the words `w0`, `w1`, ...: word i is token i."""
    vocabulary = {f"w{i}": i for i in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
