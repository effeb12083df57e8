"""What `firesteel generate` was asked for, checked before any weight is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firesteel.cli.host import has_tokenizer, load_tokenizer
from firesteel.device import default_device
from firesteel.errors import CheckpointError, InvalidArgumentError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["DEVICES", "DTYPES", "Prompt", "Request", "check_device", "parse_ids", "read_prompt"]

DEVICES = ("cpu", "cuda")
DTYPES = ("auto", "bfloat16", "float16", "float32")
_MAX_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of one generation, as the user gave them.

    Raises
        InvalidArgumentError: a value is not allowed, or prompt and prompt_ids are not exactly one.
    """

    checkpoint: str
    prompt: str | None = None
    prompt_ids: str | None = None
    max_new_tokens: int = 64
    seed: int = 0
    temperature: float = 0.0
    quantize: str | None = None
    device: str | None = None
    dtype: str = "auto"
    allow_unexpected: bool = False

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.prompt_ids is None):
            given = "neither" if self.prompt is None else "both"
            raise InvalidArgumentError(
                f"--prompt, --prompt-ids: got {given}, exactly one must be given"
            )
        if self.prompt is not None and not self.prompt:
            raise InvalidArgumentError("--prompt: got '', must not be empty")
        if self.max_new_tokens < 1:
            raise InvalidArgumentError(
                f"--max-new-tokens: got {self.max_new_tokens}, must be 1 or more"
            )
        if not 0 <= self.seed <= _MAX_SEED:
            raise InvalidArgumentError(f"--seed: got {self.seed}, must be 0 to {_MAX_SEED}")
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise InvalidArgumentError(
                f"--temperature: got {self.temperature}, must be 0 (greedy) or positive"
            )
        if self.dtype not in DTYPES:
            raise InvalidArgumentError(
                f"--dtype: got {self.dtype!r}, must be one of {', '.join(DTYPES)}"
            )
        check_device(self.device)


def check_device(device: str | None) -> None:
    """Check a `--device`.

    Raises
        InvalidArgumentError: it is not known, or this machine has none.
    """
    if device is None:
        return
    if device not in DEVICES:
        raise InvalidArgumentError(f"--device: got {device!r}, must be one of {', '.join(DEVICES)}")
    if device == "cuda" and default_device().type != "cuda":
        raise InvalidArgumentError("--device: got 'cuda', and torch finds no GPU here; use cpu")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Token ids, and the tokenizer where the checkpoint has one."""

    ids: tuple[int, ...]
    tokenizer: PreTrainedTokenizerBase | None


def read_prompt(request: Request, path: Path, config: Mapping[str, Any]) -> Prompt:
    """The prompt as ids that the model of `config` has room for.

    Raises
        InvalidArgumentError: ids that are none or outside the vocabulary, a prompt without a
            tokenizer, or more tokens than the model's context.
        CheckpointError: the tokenizer cannot be read, or the config lacks vocab_size.
    """
    tokenizer = load_tokenizer(path) if has_tokenizer(path) else None
    vocab_size = config.get("vocab_size")
    if isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or vocab_size < 1:
        raise CheckpointError(
            f"config.json: vocab_size is {vocab_size!r}, must be a positive integer"
        )
    if request.prompt_ids is not None:
        ids = parse_ids(request.prompt_ids, vocab_size)
    elif tokenizer is None:
        raise InvalidArgumentError(
            f"--prompt: {path} has no tokenizer; give token ids instead: --prompt-ids 1,2,3"
        )
    else:
        ids = _encode(tokenizer, request.prompt or "", vocab_size)
    _check_context(len(ids), request.max_new_tokens, config)
    return Prompt(ids=ids, tokenizer=tokenizer)


def parse_ids(text: str, vocab_size: int) -> tuple[int, ...]:
    """Token ids out of `1,2,3`.

    Raises
        InvalidArgumentError: one is no integer or not in `[0, vocab_size)`; or there is none.
    """
    ids: list[int] = []
    for word in text.split(","):
        try:
            ids.append(int(word))
        except ValueError as error:
            raise InvalidArgumentError(
                f"--prompt-ids: got {word.strip()!r} in {text!r}, must be integers with commas "
                "between: 1,2,3"
            ) from error
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidArgumentError(
                f"--prompt-ids: got {token}, must be 0 to {vocab_size - 1} (the model's vocabulary)"
            )
    return tuple(ids)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, vocab_size: int) -> tuple[int, ...]:
    ids = tuple(int(token) for token in tokenizer(text)["input_ids"])
    if not ids:
        raise InvalidArgumentError(f"--prompt: {text!r} gives no token")
    if max(ids) >= vocab_size:
        raise CheckpointError(
            f"tokenizer: gives token {max(ids)}, the model's vocabulary ends at {vocab_size - 1}"
        )
    return ids


def _check_context(num_prompt: int, max_new_tokens: int, config: Mapping[str, Any]) -> None:
    context = config.get("max_position_embeddings")
    if not isinstance(context, int) or isinstance(context, bool):
        return
    if num_prompt >= context:
        raise InvalidArgumentError(
            f"prompt: got {num_prompt} tokens, must be fewer than {context} (the model's context)"
        )
    if num_prompt + max_new_tokens > context:
        raise InvalidArgumentError(
            f"--max-new-tokens: got {max_new_tokens} after {num_prompt} tokens of prompt, must be "
            f"{context - num_prompt} or fewer (the model's context is {context})"
        )
