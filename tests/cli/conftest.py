"""Checkpoints of random weights that several modules read, and commands that load them apart."""

from pathlib import Path
from subprocess import CompletedProcess

import pytest

from firesteel.cli.bench.synthetic import write_checkpoint, write_plain_checkpoint
from tests.cli.command import SHAPE, run_in_turn, write_tokenizer


@pytest.fixture(scope="session")
def packed_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An int4-g128 checkpoint with a tokenizer."""
    folder = tmp_path_factory.mktemp("packed")
    write_checkpoint(folder, SHAPE)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bf16 checkpoint with a tokenizer."""
    folder = tmp_path_factory.mktemp("plain")
    write_plain_checkpoint(folder, SHAPE)
    write_tokenizer(folder)
    return folder


_HOST = """
import firesteel.cli.bench.quality, firesteel.integrations.transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.qwen3_moe import modeling_qwen3_moe
"""


@pytest.fixture(scope="session")
def piped(
    packed_folder: Path, plain_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, CompletedProcess[str]]:
    """Commands that load a model, with output that is no terminal, by the name of a test's choice.

    In one process and its children: the host is slow to import.
    """
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text(" ".join(f"w{number % 64}" for number in range(0, 1500, 11)))
    generate = ("generate", packed_folder, "--prompt", "w3", "--max-new-tokens", "2")
    quality = ("bench", "quality", "--model", plain_folder, "--text", text, "--json")
    size = ("--recipes", "bf16,mxfp4", "--window", "32", "--stride", "32")
    commands = {
        "generate": generate,
        "generate --json": (*generate, "--json"),
        "bench quality --json": (*quality, *size),
    }
    return dict(zip(commands, run_in_turn(*commands.values(), code=_HOST), strict=True))
