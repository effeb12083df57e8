"""`firesteel bench decode`: tokens a second of a few layers of a model, eager and in CUDA graphs.

firesteel's packed experts against transformers' own on the same numbers in bf16, in one process.
All else of the two models is the same tensors, and is measured by itself too: what a step takes
beyond it is what its experts take.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table
from torch import Tensor, nn

from firesteel.cli.bench.decoder import Decoder, step_us
from firesteel.cli.bench.expand import expand_model
from firesteel.cli.bench.records import context, progress, writer
from firesteel.cli.bench.stacks import stack_config, write_stack
from firesteel.cli.console import stdout, table
from firesteel.cli.host import quiet_host, require_host
from firesteel.cli.options import check_counts
from firesteel.device import checked_device, default_device
from firesteel.errors import FiresteelError, InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from firesteel.integrations.transformers import LoadReport

__all__ = ["DecodeRequest", "relative_difference", "run", "tolerance"]

FIRESTEEL, NONE = "firesteel", "none"
REFERENCE = "grouped_mm"
HOST_IMPLEMENTATIONS = (REFERENCE, "batched_mm", "eager")
"""transformers' own that need nothing but torch; the first is its default, and the second what
`generate` decodes with on a GPU. Its others fetch kernels from the hub."""
_NO_EXPERTS = "firesteel-bench-none"
_ROUNDINGS = 18
_CHECKED_STEPS = 16


@dataclass(frozen=True, kw_only=True)
class DecodeRequest:
    """The options of `firesteel bench decode`.

    Fields
        model    a name of `STACKS`
        layers   how many of its layers
        recipe   how the experts are stored
        batches  sequences that decode together
        context  places of the static cache: attention reads all of them at each step
        steps    of a run, from an empty cache
        repeats  runs

    Raises
        InvalidArgumentError: a number is wrong.
    """

    model: str = "qwen3-30b-a3b"
    layers: int = 4
    recipe: str = "int4-g128"
    batches: tuple[int, ...] = (1, 8, 64)
    context: int = 512
    steps: int = 32
    repeats: int = 7
    device: str | None = None

    def __post_init__(self) -> None:
        check_counts("--batch", "numbers of sequences", self.batches)
        for name in ("context", "steps", "repeats"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(
                    f"--{name}: got {getattr(self, name)}, must be 1 or more"
                )
        if self.steps > self.context:
            raise InvalidArgumentError(
                f"--steps: got {self.steps}, must be at most --context {self.context}"
            )


def tolerance(layers: int) -> float:
    """How far two logits of the same weights may lie apart, as `relative_difference` says it.

    An expert layer rounds 18 times on the two ways together: host, three matrices, gate, up, silu,
    its product, FC2, the router's weight and the sum; kernels, three matrices, gate, up, the
    activation, FC2 and the sum. Each errs by at most 2**-9 of its value, independently of the
    others. Layers add up as if all pulled one way, and what follows at most doubles an error: a
    gate times an up is quadratic.
    """
    return 2 * layers * _ROUNDINGS**0.5 * 2.0**-9


def relative_difference(logits: Tensor, expected: Tensor) -> float:
    """|difference| / |expected| of the last dimension, the median over tokens.

    The median, since now and then rounding makes a router take another expert.
    """
    difference = (logits.double() - expected.double()).norm(dim=-1)
    return float((difference / expected.double().norm(dim=-1)).median())


def run(request: DecodeRequest, *, as_json: bool, out: Path | None) -> None:
    """Measure, and print a line for each kind of experts, batch, and eager or graph.

    Raises
        UnsupportedError: on a GPU, a recipe without kernels.
        FiresteelError: firesteel's logits are wrong; its lines then have no speed.
    """
    device = default_device() if request.device is None else checked_device(request.device)
    config = stack_config(request.model, request.layers)
    require_host()
    rows: list[dict[str, Any]] = []
    with (
        quiet_host(),
        writer(out, as_json=as_json) as write,
        progress() as say,
        tempfile.TemporaryDirectory(prefix="firesteel-") as folder,
    ):
        from firesteel.integrations.transformers import load_model, load_report

        # Before the run: the commit of the code in memory, and the load that is not ours.
        made_by = context(device)
        say("writing a checkpoint")
        write_stack(Path(folder), config, request.recipe)
        say("loading")
        packed = load_model(folder, device=device)
        report = load_report(packed)
        _require_kernels(report, request.layers, device)
        say("expanding to bf16")
        models = _Models(packed, expand_model(packed, REFERENCE), report)
        for row in _rows(request, models, device, say):
            rows.append({**row, **made_by})
            write(rows[-1])
    if not as_json:
        _print(rows)
    wrong = {row["reason"] for row in rows if row["experts"] == FIRESTEEL and row["is_wrong"]}
    if wrong:
        raise FiresteelError("; ".join(sorted(wrong)))


def _require_kernels(report: LoadReport, layers: int, device: torch.device) -> None:
    if device.type == "cuda" and report.kernels.num_layers != layers:
        reasons = "; ".join(report.kernels.refused)
        raise UnsupportedError(f"--recipe: {report.kernels.num_layers} of {layers} layers run on "
                               f"kernels: {reasons}")  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Models:
    """Both models, and what decodes with them gave."""

    packed: PreTrainedModel
    dense: PreTrainedModel
    report: LoadReport
    expected: dict[int, Tensor] = field(default_factory=dict)
    rest_us: dict[tuple[int, bool], float | None] = field(default_factory=dict)

    def with_experts(self, experts: str) -> PreTrainedModel:
        """The model whose experts run so."""
        if experts == FIRESTEEL:
            return self.packed
        name = _NO_EXPERTS if experts == NONE else experts
        self.dense.set_experts_implementation(name)
        return self.dense

    @property
    def launches(self) -> int:
        """Launches of kernels so far."""
        return sum(ready.audit.as_dict()["launches"] for ready in self.report.kernels.ready)


def _rows(
    request: DecodeRequest, models: _Models, device: torch.device, say: Callable[[str], None]
) -> Generator[dict[str, Any]]:
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(_NO_EXPERTS, _no_experts)
    generator = torch.Generator().manual_seed(0)
    vocabulary = models.dense.config.vocab_size
    tokens = {
        batch: torch.randint(vocabulary, (request.context, batch), generator=generator).to(device)
        for batch in request.batches
    }
    say(f"transformers {REFERENCE}, for its logits")
    for batch in request.batches:
        decoder = Decoder(models.with_experts(REFERENCE), tokens[batch])
        decoder.warm_up()
        models.expected[batch] = _logits(request, decoder, decoder.step)
    # transformers' last: a capture of theirs that fails then spoils nothing of ours.
    for experts in (NONE, FIRESTEEL, *HOST_IMPLEMENTATIONS):
        for batch in request.batches:
            say(f"{experts}, {batch} sequences")
            decoder = Decoder(models.with_experts(experts), tokens[batch])
            for measured in _measure(request, models, decoder, experts, batch):
                yield _row(request, models, experts, batch, measured)


def _no_experts(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """transformers' experts interface, for what is left of a step without experts."""
    del module, top_k_index, top_k_weights
    return hidden_states


def _measure(
    request: DecodeRequest, models: _Models, decoder: Decoder, experts: str, batch: int
) -> Generator[dict[str, Any]]:
    """What was seen of the step eager, then as a graph."""
    timed = partial(step_us, decoder=decoder, steps=request.steps, repeats=request.repeats)
    expected = models.expected[batch]
    try:
        decoder.warm_up()
        before = models.launches
        eager = _logits(request, decoder, decoder.step)
        launches = models.launches - before
        difference = relative_difference(eager, expected)
        found = {"graph": False, "times": timed(decoder.step), "relative_difference": difference}
    # Whatever transformers' code raises is the reason why it was not measured.
    except Exception as error:
        if experts == FIRESTEEL:
            raise
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        for graph in (False, True):
            yield {"graph": graph, "reason": reason}
        return
    if experts == FIRESTEEL:
        found["kernel_launches_per_step"] = launches / len(eager)
    yield found
    try:
        replay = decoder.capture()
    except UnsupportedError as error:
        yield {"graph": True, "reason": str(error)}
        return
    replayed = _logits(request, decoder, replay)
    yield {
        "graph": True,
        "times": timed(replay),
        "relative_difference": relative_difference(replayed, expected),
        "graph_equals_eager": torch.equal(replayed.view(torch.int16), eager.view(torch.int16)),
    }


def _logits(request: DecodeRequest, decoder: Decoder, step: Callable[[], Tensor]) -> Tensor:
    """Logits bf16 `[steps, B, vocabulary]` of the first steps, on the CPU."""
    decoder.reset()
    return torch.stack([step().cpu() for _ in range(min(_CHECKED_STEPS, request.steps))])


def _row(
    request: DecodeRequest, models: _Models, experts: str, batch: int, measured: dict[str, Any]
) -> dict[str, Any]:
    graph, times = measured["graph"], measured.pop("times", None)
    reason = measured.get("reason") or _what_is_wrong(request, experts, measured)
    us = statistics.median(times) if times and reason is None else None
    if experts == NONE:
        models.rest_us[batch, graph] = us
    rest = None if experts == NONE else models.rest_us[batch, graph]
    experts_us = None if us is None or rest is None else (us - rest) / request.layers
    return {
        "bench": "decode",
        "model": request.model,
        "layers": request.layers,
        "recipe": request.recipe,
        "batch": batch,
        "context": request.context,
        "steps": request.steps,
        "repeats": request.repeats,
        "experts": experts if experts in (NONE, FIRESTEEL) else f"transformers {experts}",
        "backend": models.report.backend if experts == FIRESTEEL else None,
        "step_us": us,
        "step_us_all": times if us is not None else None,
        "tokens_per_s": None if us is None else batch / us * 1e6,
        "layer_us": None if us is None else us / request.layers,
        "experts_us_a_layer": experts_us,
        "experts_share": None if us is None or rest is None else 1 - rest / us,
        "graph_equals_eager": None,
        "relative_difference": None,
        "tolerance": tolerance(request.layers),
        "kernel_launches_per_step": None,
        **measured,
        "reason": reason,
        "is_wrong": reason is not None and times is not None,
        "experts_bytes": models.report.experts_bytes,
        "experts_bf16_bytes": models.report.experts_bf16_bytes,
    }


def _what_is_wrong(request: DecodeRequest, experts: str, measured: dict[str, Any]) -> str | None:
    """Why a speed must not be reported; None if it may."""
    if experts == NONE:
        return None
    difference, most = measured["relative_difference"], tolerance(request.layers)
    if not difference <= most:
        return (
            f"logits: {experts} and transformers {REFERENCE} differ by {difference:.3g} at the "
            f"median token, must be at most {most:.3g}"
        )
    # transformers' own "eager" adds in the order of threads.
    if experts == FIRESTEEL and measured.get("graph_equals_eager") is False:
        return "logits: those of a graph's replay differ from those of the eager step"
    return None


def _print(rows: Sequence[dict[str, Any]]) -> None:
    first = rows[0]
    stdout().print(
        f"{first['layers']} layers of {first['model']}, {first['recipe']}, random weights, a "
        f"static cache of {first['context']} places"
    )
    stdout().print(_table(rows))
    for line in _unmeasured(rows):
        stdout().print(line, highlight=False, soft_wrap=True)


def _unmeasured(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Each reason why something has no time, and what it is the reason of."""
    found: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        if row["reason"]:
            kind = f"{row['experts']} {'graph' if row['graph'] else 'eager'}"
            found.setdefault(row["reason"], {}).setdefault(kind, []).append(str(row["batch"]))
    lines: list[str] = []
    for reason, kinds in found.items():
        names = [f"{kind}: {', '.join(batches)}" for kind, batches in kinds.items()]
        lines.append(f"{reason} ({'; '.join(names)})")
    return lines


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    made = table("experts", "batch>", "", "ms a step>", "tokens/s>", "ms a layer>",
                 "experts, ms a layer>", "share>", "difference>")  # fmt: skip
    for row in rows:
        if row["step_us"] is None:
            continue
        experts_us, share = row["experts_us_a_layer"], row["experts_share"]
        made.add_row(
            row["experts"],
            str(row["batch"]),
            "graph" if row["graph"] else "eager",
            f"{row['step_us'] / 1000:.3f}",
            f"{row['tokens_per_s']:.0f}",
            f"{row['layer_us'] / 1000:.3f}",
            "-" if experts_us is None else f"{experts_us / 1000:.3f}",
            "-" if share is None else f"{100 * share:.0f} %",
            f"{row['relative_difference']:.4f}",
        )
    return made
