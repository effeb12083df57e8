"""`firesteel bench quality`: perplexity on held-out text, plain and with quantised experts."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table
from torch import Tensor

from firesteel.checkpoint.files import Checkpoint
from firesteel.cli.bench.records import context, progress, writer
from firesteel.cli.bench.stored_experts import StoredExperts, stored_experts
from firesteel.cli.console import format_bytes, stdout, table
from firesteel.cli.host import has_tokenizer, load_tokenizer, quiet_host, require_host
from firesteel.cli.request import check_device
from firesteel.device import default_device
from firesteel.errors import CheckpointError, InvalidArgumentError
from firesteel.formats.quantize import parse_recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["DEFAULT_RECIPES", "QualityRequest", "Window", "measure", "run", "windows"]

PLAIN = "bf16"
DEFAULT_RECIPES = (
    PLAIN,
    "int8-g128",
    "int4-g128",
    "int4-g32",
    "int3-g128",
    "mxfp4",
    "nvfp4",
    "nf3",
)

_BATCH = 8


@dataclass(frozen=True, kw_only=True)
class QualityRequest:
    """The options of `firesteel bench quality`; with `divergence` the plain model runs beside each.

    Raises
        InvalidArgumentError: a recipe is unknown, a path is not there, or a number is wrong.
    """

    model: Path
    text: Path
    recipes: tuple[str, ...]
    window: int = 512
    stride: int = 256
    device: str | None = None
    divergence: bool = False

    def __post_init__(self) -> None:
        if self.window < 2:
            raise InvalidArgumentError(f"--window: got {self.window}, must be 2 or more")
        if not 1 <= self.stride <= self.window:
            raise InvalidArgumentError(
                f"--stride: got {self.stride}, must be 1 to {self.window} (the window)"
            )
        if not self.model.is_dir():
            raise InvalidArgumentError(f"--model: got {str(self.model)!r}, must be a folder")
        if not self.text.is_file():
            raise InvalidArgumentError(f"--text: got {str(self.text)!r}, must be a file")
        for recipe in self.recipes:
            _folder_of(recipe)
        check_device(self.device)


def _folder_of(recipe: str) -> Path | None:
    """The folder that an entry of `--recipes` names; None for "bf16" and for a recipe.

    Raises
        InvalidArgumentError: it is none of these.
    """
    if recipe == PLAIN:
        return None
    try:
        parse_recipe(recipe)
    except InvalidArgumentError as error:
        if recipe and Path(recipe).is_dir():
            return Path(recipe)
        raise InvalidArgumentError(
            f"--recipes: {recipe!r} is neither {PLAIN}, a folder, nor a recipe: {error}"
        ) from error
    return None


@dataclass(frozen=True, slots=True)
class Window:
    """`size` inputs from `start` on; the predictions from `first` on (within it) are scored."""

    start: int
    first: int


def windows(num_targets: int, size: int, stride: int) -> list[Window]:
    """Windows of `size` inputs each that together score every target exactly once.

    Target t is predicted by input t. Windows start every `stride` inputs, the last one as late as
    it can; each scores what the one before has not, so all but the first give a target at least
    `size - stride` inputs of context. `size` must be at most `num_targets`.
    """
    starts = list(range(0, num_targets - size, stride))
    starts.append(num_targets - size)
    found: list[Window] = []
    scored = 0
    for start in starts:
        found.append(Window(start, scored - start))
        scored = start + size
    return found


@dataclass(frozen=True, slots=True)
class Score:
    """What a model makes of the text.

    Fields
        nats        that it needs for all tokens
        divergence  of all tokens, the sum over the vocabulary of p * log(p / q), in nats: p of the
                    plain model, q of this one; None without a plain model
    """

    nats: float
    divergence: float | None


@torch.no_grad()
def measure(
    model: PreTrainedModel,
    ids: Tensor,
    *,
    window: int,
    stride: int,
    plain: PreTrainedModel | None = None,
) -> Score:
    """Score `ids[1:]`, given what comes before each; ids is int64 `[T]`."""
    num_targets = ids.numel() - 1
    size = min(window, num_targets)
    nats = divergence = 0.0
    found = windows(num_targets, size, stride)
    for at in range(0, len(found), _BATCH):
        batch = found[at : at + _BATCH]
        rows = torch.stack([ids[w.start : w.start + size + 1] for w in batch]).to(model.device)
        logs = _log_probabilities(model, rows)
        nats -= _scored(logs.gather(-1, rows[:, 1:, None]).squeeze(-1), batch)
        if plain is not None:
            wanted = _log_probabilities(plain, rows)
            divergence += _scored((wanted.exp() * (wanted - logs)).sum(-1), batch)
    return Score(nats, None if plain is None else divergence)


def _log_probabilities(model: PreTrainedModel, rows: Tensor) -> Tensor:
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return logits.float().log_softmax(-1)


def _scored(each: Tensor, batch: Sequence[Window]) -> float:
    """The sum over the predictions of each window that are scored."""
    return sum(each[i, w.first :].double().sum().item() for i, w in enumerate(batch))


def run(request: QualityRequest, *, as_json: bool, out: Path | None) -> None:
    """Measure every recipe; print a table, or a JSON object a line as soon as it is known.

    Raises
        FiresteelError: the model, the text or a recipe is at fault.
    """
    require_host()
    records: list[dict[str, Any]] = []
    device = default_device() if request.device is None else torch.device(request.device)
    # Before the run: the commit of the code in memory, and the load that is not ours.
    made_by = context(device)
    with quiet_host(), writer(out, as_json=as_json) as write, progress() as say:
        ids, num_bytes = read_text(request)
        plain = _load(request, PLAIN) if request.divergence else None
        for recipe in request.recipes:
            say(f"perplexity of {recipe}")
            record = _measure_recipe(request, recipe, ids, num_bytes, plain) | made_by
            write(record)
            records.append(record)
    if not as_json:
        stdout().print(_table(records))


def read_text(request: QualityRequest) -> tuple[Tensor, int]:
    """Token ids of the text, after one end-of-text token where there is one; and its bytes.

    Raises
        InvalidArgumentError: the model has no tokenizer, its context is below the window, or the
            text is no UTF-8 or shorter than two tokens.
    """
    if not has_tokenizer(request.model):
        raise InvalidArgumentError(f"--model: {request.model} has no tokenizer")
    context_size = Checkpoint.open(request.model).config.get("max_position_embeddings")
    if isinstance(context_size, int) and request.window > context_size:
        raise InvalidArgumentError(
            f"--window: got {request.window}, must be at most {context_size} (the model's context)"
        )
    try:
        text = request.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"--text: cannot be read: {error}") from error
    tokenizer = load_tokenizer(request.model)
    ids: list[int] = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    for first in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if isinstance(first, int):
            ids.insert(0, first)
            break
    if len(ids) < 2:
        raise InvalidArgumentError(f"--text: got {len(ids)} tokens, must be 2 or more")
    return torch.tensor(ids), len(text.encode())


def _load(request: QualityRequest, recipe: str) -> PreTrainedModel:
    from firesteel.integrations.transformers import load_model

    folder = _folder_of(recipe)
    quantize = None if folder is not None or recipe == PLAIN else recipe
    return load_model(folder or request.model, quantize=quantize, device=request.device)


def _measure_recipe(
    request: QualityRequest,
    recipe: str,
    ids: Tensor,
    num_bytes: int,
    plain: PreTrainedModel | None,
) -> dict[str, Any]:
    from firesteel.integrations.transformers import load_report

    folder = _folder_of(recipe)
    path = folder or request.model
    model = _load(request, recipe)
    _check_vocabulary(model, ids, path)
    report = load_report(model)
    if recipe == PLAIN:
        stored = StoredExperts(report.experts_bf16_bytes, 0.0)
    else:
        stored = stored_experts(request.model, folder or recipe)
    start = time.perf_counter()
    score = measure(model, ids, window=request.window, stride=request.stride, plain=plain)
    seconds = time.perf_counter() - start
    num_targets = ids.numel() - 1
    return {
        "bench": "quality",
        "recipe": recipe,
        "model": str(path),
        "text": str(request.text),
        "stored": dict(report.experts) or "plain",
        "perplexity": math.exp(score.nats / num_targets),
        "nats_per_token": score.nats / num_targets,
        "bits_per_byte": score.nats / math.log(2) / num_bytes,
        "divergence": None if score.divergence is None else score.divergence / num_targets,
        "tokens": num_targets,
        "bytes": num_bytes,
        "window": request.window,
        "stride": request.stride,
        "experts_bytes": report.experts_bytes,
        "experts_bf16_bytes": report.experts_bf16_bytes,
        "file_bytes": stored.num_bytes,
        "weight_error": stored.error,
        "dtype": str(model.dtype).removeprefix("torch."),
        "backend": report.backend,
        "seconds": round(seconds, 3),
    }


def _check_vocabulary(model: PreTrainedModel, ids: Tensor, path: Path) -> None:
    if int(ids.max()) >= model.config.vocab_size:
        raise CheckpointError(
            f"{path}: has a vocabulary of {model.config.vocab_size}, "
            f"the tokenizer of --model gives token {int(ids.max())}"
        )


def _table(records: Sequence[dict[str, Any]]) -> Table:
    made = table(
        "recipe", "perplexity>", "bits a byte>", "tokens>", "experts>", "as bf16>", "seconds>"
    )
    for record in records:
        made.add_row(
            record["recipe"],
            f"{record['perplexity']:.4f}",
            f"{record['bits_per_byte']:.4f}",
            str(record["tokens"]),
            format_bytes(record["experts_bytes"]),
            format_bytes(record["experts_bf16_bytes"]),
            f"{record['seconds']:.1f}",
        )
    return made
