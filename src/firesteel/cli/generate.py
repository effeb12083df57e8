"""`firesteel generate`: load, generate, and say what it cost."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from rich.table import Table
from torch import Tensor

from firesteel.checkpoint.families import family_of
from firesteel.checkpoint.files import Checkpoint, resolve
from firesteel.cli.console import format_bytes, print_json, stderr, table, write
from firesteel.cli.environment import versions
from firesteel.cli.host import quiet_host, require_host
from firesteel.cli.request import Prompt, Request, read_prompt
from firesteel.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.generation.streamers import BaseStreamer

    from firesteel.integrations.transformers import LoadReport

__all__ = ["Generation", "generate", "run"]


@dataclass(frozen=True, kw_only=True)
class Generation:
    """New tokens and the time they took.

    Fields
        token_ids        the new tokens, without the prompt
        text             of the new tokens; None without a tokenizer
        prefill_seconds  from the call to the first new token
        decode_seconds   from the first new token to the last
    """

    token_ids: tuple[int, ...]
    text: str | None
    prefill_seconds: float
    decode_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """New tokens a second, prefill included."""
        return len(self.token_ids) / (self.prefill_seconds + self.decode_seconds)


class _Clock:
    """The streamer that `model.generate` calls: notes times, hands tokens on to another."""

    def __init__(self, inner: BaseStreamer | None) -> None:
        self.times: list[float] = []
        self._inner = inner

    def put(self, value: Tensor) -> None:
        """Called with the prompt, then with each new token."""
        self.times.append(time.perf_counter())
        if self._inner is not None:
            self._inner.put(value)

    def end(self) -> None:
        """Called after the last token."""
        if self._inner is not None:
            self._inner.end()


def run(request: Request, *, as_json: bool) -> None:
    """Load the checkpoint, print what it generates and, on stderr, what that cost.

    Raises
        FiresteelError: the request or the checkpoint is at fault.
    """
    require_host()
    with quiet_host():
        from firesteel.integrations.transformers import load_model, load_report

        path = resolve(request.checkpoint)
        config = Checkpoint.open(path).config
        family_of(config)
        prompt = read_prompt(request, path, config)
        model = load_model(
            path,
            quantize=request.quantize,
            device=request.device,
            dtype=request.dtype,
            allow_unexpected=request.allow_unexpected,
        )
        streams = not as_json and prompt.tokenizer is not None and sys.stdout.isatty()
        result = generate(model, prompt, request, streams=streams)
        report = load_report(model)
    if as_json:
        print_json(_as_dict(prompt, result, report))
        return
    if not streams:
        write(_plain_text(prompt, result) + "\n")
    stderr().print(_summary(prompt, result, report))


def generate(
    model: PreTrainedModel, prompt: Prompt, request: Request, *, streams: bool = False
) -> Generation:
    """Generate after `prompt`; with `streams`, print text to stdout as it comes."""
    from transformers import TextStreamer

    inner = None
    if streams and prompt.tokenizer is not None:
        inner = TextStreamer(prompt.tokenizer, skip_special_tokens=True)
    clock = _Clock(inner)
    torch.manual_seed(request.seed)
    options: dict[str, Any] = {"do_sample": False}
    if request.temperature > 0:
        options = {"do_sample": True, "temperature": request.temperature}
    if model.generation_config.pad_token_id is None:
        # Nothing is padded: one prompt. A value only stops transformers from guessing aloud.
        options["pad_token_id"] = 0
    ids = torch.tensor([prompt.ids], device=model.device)
    start = time.perf_counter()
    try:
        # The type of a model that has a head is not in transformers' annotations.
        output = cast(Any, model).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=request.max_new_tokens,
            num_beams=1,
            num_return_sequences=1,
            streamer=clock,
            tokenizer=prompt.tokenizer,
            **options,
        )
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"generation_config.json: transformers refuses to generate with it: {error}"
        ) from error
    token_ids = tuple(output[0, ids.shape[1] :].tolist())
    first, last = clock.times[1], clock.times[-1]
    text = None
    if prompt.tokenizer is not None:
        text = str(prompt.tokenizer.decode(list(token_ids), skip_special_tokens=True))
    return Generation(
        token_ids=token_ids,
        text=text,
        prefill_seconds=first - start,
        decode_seconds=last - first,
    )


def _plain_text(prompt: Prompt, result: Generation) -> str:
    """Prompt and new text; without a tokenizer, the new ids."""
    if prompt.tokenizer is None:
        return ",".join(map(str, result.token_ids))
    ids = [*prompt.ids, *result.token_ids]
    return str(prompt.tokenizer.decode(ids, skip_special_tokens=True))


def _as_dict(prompt: Prompt, result: Generation, report: LoadReport) -> dict[str, Any]:
    return {
        "prompt_ids": list(prompt.ids),
        "token_ids": list(result.token_ids),
        "text": result.text,
        "tokens_per_second": result.tokens_per_second,
        "prefill_seconds": result.prefill_seconds,
        "decode_seconds": result.decode_seconds,
        "experts_bytes": report.experts_bytes,
        "experts_bf16_bytes": report.experts_bf16_bytes,
        "backend": report.backend,
        "device": report.device,
        "load": report.as_dict(),
        "versions": versions(),
    }


def _summary(prompt: Prompt, result: Generation, report: LoadReport) -> Table:
    new = len(result.token_ids)
    rows = [("tokens", f"{len(prompt.ids)} of prompt, {new} new")]
    prefill = len(prompt.ids) / result.prefill_seconds
    speeds = f"prefill {prefill:.1f} tokens/s"
    if new > 1:
        speeds += f", decode {(new - 1) / result.decode_seconds:.1f} tokens/s"
    rows.append(("speed", speeds))
    size = format_bytes(report.experts_bytes)
    if report.experts_bytes != report.experts_bf16_bytes:
        ratio = report.experts_bf16_bytes / report.experts_bytes
        size += f" packed, {format_bytes(report.experts_bf16_bytes)} as bf16 ({ratio:.2f}x)"
    rows.append(("experts", size))
    rows += [("", f"{_count(n, 'layer')} {what}") for what, n in report.experts.items()]
    if report.host_experts:
        rows.append(("", f"{_count(report.host_experts, 'layer')} plain, transformers' own"))
    rows.append(("backend", _backend(report)))
    rows += [
        ("linears", f"{_count(n, 'linear')} {what}, packed") for what, n in report.linears.items()
    ]
    if report.expanded:
        expanded = _count(len(report.expanded), "module")
        rows.append(("", f"{expanded} expanded exactly into transformers' own weights"))
    if report.ignored:
        ignored = _count(len(report.ignored), "module")
        rows.append(("ignored", f"{ignored} of the file that the model does not have"))
    made = table("", "")
    made.show_header = False
    for name, value in rows:
        made.add_row(name, value)
    return made


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _backend(report: LoadReport) -> str:
    text = f"{report.backend} on {report.device}"
    for ready in report.kernels.ready:
        text += f"; {ready.launcher} launcher, {ready.audit.prewarmed}"
    if report.device.startswith("cuda"):
        for reason, count in report.kernels.refused.items():
            text += f"; {_count(count, 'layer')} on the PyTorch path: {reason}"
        for reason, count in report.kernels.refused_linears.items():
            text += f"; {_count(count, 'linear')} on the PyTorch path: {reason}"
    return text
