"""`firesteel bench cpu`: packed experts against transformers' own bf16 `grouped_mm`, in one run.

Both models have the same numbers: the second is the first expanded to bf16. Their runs alternate,
so that whatever else the machine does slows both; each pair of runs starts with the other one.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table
from torch import Tensor

from firesteel.cli.bench.expand import expand_model
from firesteel.cli.bench.records import context, progress, writer
from firesteel.cli.bench.synthetic import SHAPES, write_checkpoint
from firesteel.cli.console import format_bytes, stdout, table
from firesteel.cli.host import quiet_host, require_host
from firesteel.errors import FiresteelError, InvalidArgumentError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["CpuRequest", "Timing", "run", "time_model"]

HOST_IMPLEMENTATION = "grouped_mm"
MAX_RELATIVE_DIFFERENCE = 0.05
"""Of the logits of the two models at the median token."""


@dataclass(frozen=True, kw_only=True)
class CpuRequest:
    """The options of `firesteel bench cpu`; exactly one of model and shape is given.

    Raises
        InvalidArgumentError: a shape is unknown, a path is not there, or a number is wrong.
    """

    model: Path | None = None
    shape: str | None = None
    prefill: int = 512
    decode: int = 64
    repeats: int = 5
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.shape is not None and self.shape not in SHAPES:
            raise InvalidArgumentError(
                f"--shape: got {self.shape!r}, must be one of {', '.join(SHAPES)}"
            )
        if self.model is not None and not self.model.is_dir():
            raise InvalidArgumentError(f"--model: got {str(self.model)!r}, must be a folder")
        for name in ("prefill", "decode", "repeats", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidArgumentError(f"--{name}: got {value}, must be 1 or more")


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of each run of one model."""

    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)


def run(request: CpuRequest, *, as_json: bool, out: Path | None) -> None:
    """Measure, and print the ratio of speeds.

    Raises
        FiresteelError: the model is at fault, or the two do not agree on logits.
    """
    require_host()
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    with (
        quiet_host(),
        writer(out, as_json=as_json) as write,
        progress() as say,
        _checkpoint(request) as path,
    ):
        from firesteel.integrations.transformers import load_model, load_report

        # Before the run: the commit of the code in memory, and the load that is not ours.
        made_by = context(torch.device("cpu"))
        say("loading")
        packed = load_model(path, device="cpu")
        report = load_report(packed)
        say("expanding to bf16")
        dense = expand_model(packed, HOST_IMPLEMENTATION)
        ids = _ids(request, packed.config)
        difference = _compare(packed, dense, ids)
        ours, theirs = _measure(request, packed, dense, ids, say)
        record = {
            "bench": "cpu",
            "model": request.shape or str(request.model),
            "stored": dict(report.experts),
            "dtype": str(packed.dtype).removeprefix("torch."),
            "prefill_tokens": request.prefill,
            "decode_steps": request.decode,
            "repeats": request.repeats,
            "firesteel": _rates(request, ours),
            "transformers": {"experts": HOST_IMPLEMENTATION, **_rates(request, theirs)},
            "prefill_ratio": _median_ratio(theirs.prefill, ours.prefill),
            "decode_ratio": _median_ratio(theirs.decode, ours.decode),
            "relative_difference": difference,
            "experts_bytes": report.experts_bytes,
            "experts_bf16_bytes": report.experts_bf16_bytes,
            **made_by,
        }
        write(record)
    if not as_json:
        stdout().print(_table(record))


@contextmanager
def _checkpoint(request: CpuRequest) -> Generator[Path]:
    if request.shape is None:
        assert request.model is not None
        yield request.model
        return
    with tempfile.TemporaryDirectory(prefix="firesteel-") as folder:
        write_checkpoint(Path(folder), SHAPES[request.shape])
        yield Path(folder)


def _ids(request: CpuRequest, config: PreTrainedConfig) -> Tensor:
    total = request.prefill + request.decode
    if total > config.max_position_embeddings:
        raise InvalidArgumentError(
            f"--prefill, --decode: got {total} tokens in all, must be at most "
            f"{config.max_position_embeddings} (the model's context)"
        )
    generator = torch.Generator().manual_seed(0)
    return torch.randint(config.vocab_size, (1, total), generator=generator)


@torch.no_grad()
def _compare(packed: PreTrainedModel, dense: PreTrainedModel, ids: Tensor) -> float:
    """The median over tokens of |difference| / |logits|; also warms both models up.

    Raises
        FiresteelError: they differ by more than rounding, so no speed is worth reporting.
    """
    ours = packed(input_ids=ids, use_cache=False).logits[0].float()
    theirs = dense(input_ids=ids, use_cache=False).logits[0].float()
    difference = ((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).median().item()
    if not difference <= MAX_RELATIVE_DIFFERENCE:
        raise FiresteelError(
            f"logits: firesteel and transformers differ by {difference:.3g} at the median token, "
            f"must be at most {MAX_RELATIVE_DIFFERENCE}: no speed is reported"
        )
    return difference


def _measure(
    request: CpuRequest,
    packed: PreTrainedModel,
    dense: PreTrainedModel,
    ids: Tensor,
    say: Callable[[str], None],
) -> tuple[Timing, Timing]:
    ours, theirs = Timing(), Timing()
    order = [(packed, ours), (dense, theirs)]
    for repeat in range(request.repeats):
        say(f"run {repeat + 1} of {request.repeats}")
        for model, timing in order if repeat % 2 == 0 else order[::-1]:
            prefill, decode = time_model(model, ids, request.prefill)
            timing.prefill.append(prefill)
            timing.decode.append(decode)
    return ours, theirs


@torch.no_grad()
def time_model(model: PreTrainedModel, ids: Tensor, prefill: int) -> tuple[float, float]:
    """Seconds of one forward of the first `prefill` ids, and of one step for each of the rest.

    ids is int64 `[1, T]`. The steps are given their tokens, so that every model does the same work.
    """
    start = time.perf_counter()
    output = model(input_ids=ids[:, :prefill], use_cache=True, logits_to_keep=1)
    middle = time.perf_counter()
    cache = output.past_key_values
    for at in range(prefill, ids.shape[1]):
        cache = model(
            input_ids=ids[:, at : at + 1], past_key_values=cache, use_cache=True
        ).past_key_values
    return middle - start, time.perf_counter() - middle


def _rates(request: CpuRequest, timing: Timing) -> dict[str, Any]:
    return {
        "prefill_seconds": timing.prefill,
        "decode_seconds": timing.decode,
        "prefill_tokens_per_second": request.prefill / statistics.median(timing.prefill),
        "decode_tokens_per_second": request.decode / statistics.median(timing.decode),
    }


def _median_ratio(theirs: list[float], ours: list[float]) -> float:
    return statistics.median(theirs) / statistics.median(ours)


def _table(record: dict[str, Any]) -> Table:
    title = (
        f"{record['model']}: experts {format_bytes(record['experts_bytes'])} packed, "
        f"{format_bytes(record['experts_bf16_bytes'])} as bf16; "
        f"{record['machine']['threads']} threads"
    )
    made = table("", "firesteel, tokens/s>", "transformers bf16, tokens/s>", "ratio>", title=title)
    for phase, count in (("prefill", "prefill_tokens"), ("decode", "decode_steps")):
        key = f"{phase}_tokens_per_second"
        made.add_row(
            f"{phase} {record[count]}",
            f"{record['firesteel'][key]:.1f}",
            f"{record['transformers'][key]:.1f}",
            f"{record[f'{phase}_ratio']:.2f}",
        )
    return made
