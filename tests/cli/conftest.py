"""Checkpoints of random weights that several modules read."""

from pathlib import Path

import pytest

from firesteel.cli.bench.synthetic import write_checkpoint, write_plain_checkpoint
from tests.cli.command import SHAPE, write_tokenizer


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
