"""The command line of `firesteel bench`: parses it and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from firesteel.cli.options import (
    BatchInvariantOption,
    CheckpointOption,
    DeviceOption,
    JsonOption,
    MaxTokensOption,
    ModelOption,
    OutOption,
    RecipeOption,
    TableOption,
    TpOption,
    counts_of,
)

__all__ = ["bench"]

bench = typer.Typer(help="Measure, and print one JSON object a line with --json.")

_LITTLE = Path("examples/little_moe")


@bench.command()
def quality(
    *,
    model: Annotated[
        Path, typer.Option(help="A plain 16-bit checkpoint with a tokenizer.")
    ] = _LITTLE / "bf16",
    text: Annotated[Path, typer.Option(help="Text that it was not trained on.")] = _LITTLE
    / "heldout.txt",
    recipes: Annotated[
        str | None,
        typer.Option(
            help="With commas between: bf16, recipes of --quantize, folders of checkpoints "
            "that are quantised already."
        ),
    ] = None,
    window: Annotated[int, typer.Option(help="Tokens of a window.")] = 512,
    stride: Annotated[int, typer.Option(help="Tokens from a window to the next.")] = 256,
    divergence: Annotated[
        bool,
        typer.Option(
            "--divergence",
            help="Also how far predictions are from those of --model, which is run beside each.",
        ),
    ] = False,
    device: DeviceOption = None,
    as_json: JsonOption = False,
    out: OutOption = None,
) -> None:
    """Perplexity on held-out text, as it is and with the experts quantised on load."""
    from firesteel.cli.bench.quality import DEFAULT_RECIPES, QualityRequest, run

    if recipes is None:
        recipes = ",".join((*DEFAULT_RECIPES, str(_LITTLE / "int4-g128")))
    request = QualityRequest(
        model=model,
        text=text,
        recipes=tuple(recipe.strip() for recipe in recipes.split(",")),
        window=window,
        stride=stride,
        device=device,
        divergence=divergence,
    )
    run(request, as_json=as_json, out=out)


@bench.command()
def cpu(
    *,
    model: Annotated[Path, typer.Option(help="A quantised checkpoint.")] = _LITTLE / "int4-g128",
    shape: Annotated[
        str | None,
        typer.Option(help="Random weights instead of --model: qwen3-30b-layers."),
    ] = None,
    prefill: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 512,
    decode: Annotated[int, typer.Option(help="Steps of one token.")] = 64,
    repeats: Annotated[int, typer.Option(help="Interleaved runs of each.")] = 5,
    threads: Annotated[int | None, typer.Option(help="Of torch; all CPUs if not given.")] = None,
    as_json: JsonOption = False,
    out: OutOption = None,
) -> None:
    """Speed of packed experts against transformers' own bf16 grouped_mm, in one run."""
    from firesteel.cli.bench.cpu import CpuRequest, run

    request = CpuRequest(
        model=None if shape is not None else model,
        shape=shape,
        prefill=prefill,
        decode=decode,
        repeats=repeats,
        threads=threads,
    )
    run(request, as_json=as_json, out=out)


@bench.command()
def launch(
    *,
    model: ModelOption = None,
    checkpoint: CheckpointOption = None,
    tp: TpOption = 4,
    recipe: RecipeOption = None,
    max_tokens: MaxTokensOption = None,
    captures: Annotated[
        int, typer.Option(help="Random token counts to capture, besides 1 to 64.")
    ] = 100,
    table: TableOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
    out: OutOption = None,
) -> None:
    """Host time of a MoE layer call, and whether its plan is complete; GLM-5.2 by default.

    On a CPU against a driver that launches nothing.
    """
    from firesteel.cli.bench.launch import LaunchRequest, run
    from firesteel.cli.planning import PlanChoice

    choice = PlanChoice(
        model=model or (None if checkpoint else "glm-5.2"),
        checkpoint=checkpoint,
        tp=tp,
        recipe=recipe,
        max_tokens=8192 if max_tokens is None else max_tokens,
        table=table,
    )
    request = LaunchRequest(choice=choice, device=device, captures=captures)
    run(request, as_json=as_json, out=out)


@bench.command()
def moe(
    *,
    shape: Annotated[
        str, typer.Option(help="A model, and -tpN for one of N ranks.")
    ] = "glm-5.2-tp4",
    recipe: Annotated[str, typer.Option(help="How experts are stored.")] = "int4-g128",
    m: Annotated[
        str, typer.Option("--m", help="Token counts, with commas between.")
    ] = "1,8,32,64,256,1024,3072,8192",
    routing: Annotated[str, typer.Option(help="uniform or zipf.")] = "uniform",
    batch_invariant: BatchInvariantOption = False,
    baseline: Annotated[bool, typer.Option(help="Also time torch's bf16 products.")] = True,
    table: TableOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
    out: OutOption = None,
) -> None:
    """A whole MoE layer on a GPU, against its floor and torch's bf16 grouped products."""
    from firesteel.cli.bench.moe import MoeRequest, run

    request = MoeRequest(
        shape=shape,
        recipe=recipe,
        sizes=counts_of("--m", "token counts", m),
        routing=routing,
        batch_invariant=batch_invariant,
        baseline=baseline,
        table=table,
        device=device,
    )
    run(request, as_json=as_json, out=out)


@bench.command()
def indexer(
    *,
    cases: Annotated[
        str | None,
        typer.Option(
            "--case",
            help="Names with commas between; all if not given. turnkey-8k, -32k, -131k, -524k and "
            "-1m: 8 requests of 6 rows, 32 heads. one-8k and -131k: a row, 64 heads. batch-8k and "
            "-131k: 48 requests of a row, 64 heads. prefill-32k, -131k, -1m: 3072 rows, 32 heads.",
        ),
    ] = None,
    mode: Annotated[
        str | None, typer.Option(help="Of a case of one's own instead: decode or prefill.")
    ] = None,
    requests: Annotated[
        int | None, typer.Option(help="Of one's own case: 8, or 1 of a prefill.")
    ] = None,
    rows: Annotated[
        int | None, typer.Option(help="Of each request of one's own case: 6, or 3072 of a prefill.")
    ] = None,
    heads: Annotated[int | None, typer.Option(help="Of one's own case: 32.")] = None,
    context_length: Annotated[
        int | None,
        typer.Option("--context", help="Keys of each request of one's own case: 131072."),
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Of one's own case: 2048.")] = None,
    cache_dtype: Annotated[str, typer.Option(help="Of q and keys: e4m3, bf16 or fp16.")] = "e4m3",
    route: Annotated[str, typer.Option(help="Of a decode: auto, filtered or tiled.")] = "auto",
    baseline: Annotated[bool, typer.Option(help="Also time torch's products and topk.")] = True,
    device: DeviceOption = None,
    as_json: JsonOption = False,
    out: OutOption = None,
) -> None:
    """The indexer's scores and selection on a GPU, found right first, against floor and torch."""
    from firesteel.cli.bench.indexer import IndexerRequest, run
    from firesteel.cli.bench.indexer_cases import chosen_cases

    own = {
        "mode": mode,
        "requests": requests,
        "rows": rows,
        "heads": heads,
        "context": context_length,
        "top_k": top_k,
    }
    chosen = chosen_cases(cases, own, {"cache_dtype": cache_dtype, "route": route})
    run(IndexerRequest(cases=chosen, device=device, baseline=baseline), as_json=as_json, out=out)


@bench.command()
def decode(
    *,
    model: Annotated[
        str, typer.Option(help="qwen3-30b-a3b, glm-5.2, qwen3-tiny or glm-tiny.")
    ] = "qwen3-30b-a3b",
    layers: Annotated[int, typer.Option(help="How many of its layers.")] = 4,
    recipe: Annotated[str, typer.Option(help="How experts are stored.")] = "int4-g128",
    batch: Annotated[
        str, typer.Option(help="Sequences that decode together, with commas between.")
    ] = "1,8,64",
    context: Annotated[int, typer.Option(help="Places of the static cache.")] = 512,
    steps: Annotated[int, typer.Option(help="Steps of a run.")] = 32,
    repeats: Annotated[int, typer.Option(help="Runs of each.")] = 7,
    device: DeviceOption = None,
    as_json: JsonOption = False,
    out: OutOption = None,
) -> None:
    """Decode steps of a few layers of random weights, against transformers' own bf16 experts.

    Eager, and on a GPU as a CUDA graph too.
    """
    from firesteel.cli.bench.decode import DecodeRequest, run

    request = DecodeRequest(
        model=model,
        layers=layers,
        recipe=recipe,
        batches=counts_of("--batch", "numbers of sequences", batch),
        context=context,
        steps=steps,
        repeats=repeats,
        device=device,
    )
    run(request, as_json=as_json, out=out)
