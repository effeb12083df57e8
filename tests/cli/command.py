"""Runs `firesteel` in this process and apart, and makes small checkpoints for it."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
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


# Each command in a child of its own, which has what was imported before and nothing else.
_IN_TURN = """
import gc, json, os, sys
folder, out, code, given = sys.argv[1:]
exec(code)
from firesteel.cli.main import app
# A child that ends does not go through what was there before.
gc.freeze()
for number, arguments in enumerate(json.loads(given)):
    child = os.fork()
    if not child:
        for handle, path in ((1, out or f"{folder}/{number}.out"), (2, f"{folder}/{number}.err")):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), handle)
        sys.argv[1:] = arguments
        app()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def run_in_turn(
    *commands: Sequence[object], code: str = "", out: str = ""
) -> list[subprocess.CompletedProcess[str]]:
    """As `run_apart`, but `code`, which may import what takes long, is run once for all commands.

    Args:
        commands: arguments of each.
        code: runs first, and prints nothing.
        out: a file that all of them have for stdout, which then is not read.
    """
    given = json.dumps([[str(a) for a in arguments] for arguments in commands])
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", _IN_TURN, folder, out, code, given]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, env=environment, check=True
        )
        assert done.stderr == ""
        found: list[subprocess.CompletedProcess[str]] = []
        for number, status in enumerate(done.stdout.split()):
            texts = [Path(folder, f"{number}.{name}") for name in ("out", "err")]
            shown = [path.read_text() if path.exists() else "" for path in texts]
            found.append(subprocess.CompletedProcess(commands[number], int(status), *shown))
    assert len(found) == len(commands)
    return found


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
