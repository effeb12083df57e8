"""Keeps transformers quiet where nobody watches, and reads what a checkpoint says to its host."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from firesteel.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["has_tokenizer", "load_tokenizer", "quiet_host", "require_host"]

# Any of these makes a folder one that has a tokenizer.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "tiktoken.model",
    "tekken.json",
)


def require_host() -> None:
    """Check that transformers can be imported.

    Raises
        UnsupportedError: it is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise UnsupportedError(
            f"transformers: cannot be imported ({error}), and this command runs models with it: "
            "pip install 'firesteel[transformers]'"
        ) from error
    del transformers


@contextmanager
def quiet_host() -> Generator[None]:
    """Silence transformers' bars, log lines and warnings unless stderr is a terminal."""
    if sys.stderr.isatty():
        yield
        return
    from transformers.utils import logging

    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()


def has_tokenizer(path: Path) -> bool:
    """Whether the folder has a file that a tokenizer is read from."""
    return any((path / name).is_file() for name in _TOKENIZER_FILES)


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in the folder. Code that a checkpoint brings is never run.

    Raises
        CheckpointError: it cannot be read.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    # The tokenizers library raises a bare Exception, transformers half a dozen types.
    except Exception as error:
        raise CheckpointError(
            f"tokenizer: transformers cannot read it from {path}: {type(error).__name__}: {error}"
        ) from error
