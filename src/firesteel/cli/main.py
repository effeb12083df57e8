"""`firesteel inspect | generate | env | bench`: parses the command line and nothing else.

The modules that do the work import torch, and some transformers; each command imports its own, so
that `--help` is quick and `inspect` needs no host.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import firesteel
from firesteel.cli.console import ErrorGroup

__all__ = ["app"]

app = typer.Typer(
    cls=ErrorGroup,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Quantised mixture-of-experts checkpoints, with the experts kept packed.",
)
bench = typer.Typer(help="Measure, and print one JSON object a line with --json.")
app.add_typer(bench, name="bench")

CheckpointArgument = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help="A folder, or a hub name (owner/name).")
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout and nothing else.")]
OutOption = Annotated[Path | None, typer.Option("--out", help="Also append each line to a file.")]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="cpu or cuda; the GPU if there is one.")
]
_LITTLE = Path("examples/little_moe")


def _print_version(value: bool) -> None:
    if value:
        typer.echo(firesteel.__version__)
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Quantised mixture-of-experts checkpoints, with the experts kept packed."""
    del version
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def generate(
    *,
    checkpoint: CheckpointArgument,
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    prompt_ids: Annotated[
        str | None, typer.Option(help="Token ids to continue, 1,2,3: needs no tokenizer.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="At most so many new tokens.")] = 64,
    seed: Annotated[int, typer.Option(help="Of the random choices of a temperature.")] = 0,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    quantize: Annotated[
        str | None, typer.Option(help="Round the experts of a plain checkpoint: int4-g128.")
    ] = None,
    device: DeviceOption = None,
    dtype: Annotated[
        str, typer.Option(help="Of activations: auto, bfloat16, float16 or float32.")
    ] = "auto",
    allow_unexpected: Annotated[
        bool, typer.Option(help="Ignore tensors that the model has no place for.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Load a checkpoint, its experts packed, and print the text that it generates."""
    from firesteel.cli.generate import run
    from firesteel.cli.request import Request

    request = Request(
        checkpoint=checkpoint,
        prompt=prompt,
        prompt_ids=prompt_ids,
        max_new_tokens=max_new_tokens,
        seed=seed,
        temperature=temperature,
        quantize=quantize,
        device=device,
        dtype=dtype,
        allow_unexpected=allow_unexpected,
    )
    run(request, as_json=as_json)


@app.command()
def inspect(*, checkpoint: CheckpointArgument, as_json: JsonOption = False) -> None:
    """Say what a checkpoint holds, from its headers. A hub name is downloaded first."""
    from firesteel.cli.inspection import run

    run(checkpoint, as_json=as_json)


@app.command()
def env(*, as_json: JsonOption = False) -> None:
    """Versions, machine, and the formats and families that are supported."""
    from firesteel.cli.environment import run

    run(as_json=as_json)


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
