"""The command line of `firesteel`: parses commands and nothing else.

The modules that do the work import torch, and some transformers; each command imports its own, so
that `--help` is quick and `inspect` needs no host.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import firesteel
from firesteel.cli.bench.commands import bench
from firesteel.cli.console import ErrorGroup
from firesteel.cli.options import (
    BatchInvariantOption,
    CheckpointArgument,
    CheckpointOption,
    DeviceOption,
    EpOption,
    IdsOption,
    JsonOption,
    MaxTokensOption,
    ModelOption,
    RecipeOption,
    TableOption,
    TpOption,
    counts_of,
)

__all__ = ["app"]

app = typer.Typer(
    cls=ErrorGroup,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Quantised mixture-of-experts checkpoints, with the experts kept packed.",
)
app.add_typer(bench, name="bench")

_IDS = "int32,int64"


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
def quantize(
    *,
    checkpoint: CheckpointArgument,
    recipe: Annotated[
        str, typer.Option(help="How experts are to be stored: int4-g128, mxfp4, exl3-3.0-mcg, ...")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write: new, or empty.")],
    as_json: JsonOption = False,
) -> None:
    """Write a plain checkpoint again with its experts quantised. Needs no host.

    A run that was stopped goes on where it was when it is made again.
    """
    from firesteel.cli.quantizing import QuantizeRequest, run

    run(QuantizeRequest(checkpoint=checkpoint, recipe=recipe, out=out), as_json=as_json)


@app.command()
def env(*, as_json: JsonOption = False) -> None:
    """Versions, machine, and the formats and families that are supported."""
    from firesteel.cli.environment import run

    run(as_json=as_json)


@app.command()
def plan(
    *,
    model: ModelOption = None,
    checkpoint: CheckpointOption = None,
    tp: TpOption = 1,
    ep: EpOption = 1,
    recipe: RecipeOption = None,
    max_tokens: MaxTokensOption = None,
    ids: IdsOption = _IDS,
    batch_invariant: BatchInvariantOption = False,
    table: TableOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print every kernel that a MoE layer can launch, from 0 tokens to the most. Needs no GPU."""
    from firesteel.cli.planning import PlanChoice, run

    choice = PlanChoice(
        model=model,
        checkpoint=checkpoint,
        tp=tp,
        ep=ep,
        recipe=recipe,
        max_tokens=max_tokens,
        ids=ids,
        batch_invariant=batch_invariant,
        table=table,
    )
    run(choice, as_json=as_json)


@app.command()
def build(
    *,
    target: Annotated[str, typer.Option(help="GPUs, with commas between: sm_90,sm_120.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The bundle: new, or an empty folder.")],
    model: ModelOption = None,
    checkpoint: CheckpointOption = None,
    tp: TpOption = 1,
    ep: EpOption = 1,
    recipe: RecipeOption = None,
    max_tokens: MaxTokensOption = None,
    ids: IdsOption = _IDS,
    batch_invariant: BatchInvariantOption = False,
    table: TableOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compile every kernel of a plan into a bundle, from which a GPU machine loads. Needs no GPU.

    FIRESTEEL_COMPILE_THREADS, FIRESTEEL_CACHE and FIRESTEEL_CACHE_DIR are as docs/environment.md
    says. The bundle is written whole or not at all.
    """
    from firesteel.cli.building import BuildRequest, run
    from firesteel.cli.planning import PlanChoice

    choice = PlanChoice(
        model=model,
        checkpoint=checkpoint,
        tp=tp,
        ep=ep,
        recipe=recipe,
        max_tokens=max_tokens,
        ids=ids,
        batch_invariant=batch_invariant,
        table=table,
    )
    run(BuildRequest(choice=choice, targets=target, out=out), as_json=as_json)


@app.command()
def audit(
    *,
    traffic: Annotated[
        list[Path],
        typer.Option(
            metavar="FILE",
            help="Token counts: one a line, # for comments; or a JSON list. May be repeated.",
        ),
    ],
    model: ModelOption = None,
    checkpoint: CheckpointOption = None,
    plan_file: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            metavar="FILE.json",
            help="Instead of --model: what run time launches, as plan --json prints it. Of another "
            "library, max_tokens and keys, each with the token ranges that use it.",
        ),
    ] = None,
    prewarmed: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            help="A JSON list of the keys that a warm-up compiled; those of the plan by default.",
        ),
    ] = None,
    tp: TpOption = 1,
    recipe: RecipeOption = None,
    max_tokens: MaxTokensOption = None,
    ids: IdsOption = _IDS,
    batch_invariant: BatchInvariantOption = False,
    table: TableOption = None,
    as_json: JsonOption = False,
) -> None:
    """Replay token counts through a plan: which keys they reach, and which were not prewarmed.

    Exits with 0 when no launch misses and no count is beyond the plan, else with 1. Needs no GPU.
    """
    from firesteel.cli.auditing import AuditRequest, run
    from firesteel.cli.planning import PlanChoice

    choice = PlanChoice(
        model=model,
        checkpoint=checkpoint,
        tp=tp,
        recipe=recipe,
        max_tokens=max_tokens,
        ids=ids,
        batch_invariant=batch_invariant,
        table=table,
    )
    request = AuditRequest(
        choice=choice, traffic=tuple(traffic), plan_file=plan_file, prewarmed=prewarmed
    )
    if not run(request, as_json=as_json):
        raise typer.Exit(1)


@app.command()
def tune(
    *,
    out: Annotated[Path, typer.Option(metavar="FILE.json", help="The table to write.")],
    merge: Annotated[
        bool,
        typer.Option("--merge", help="Keep the file's rows of other shapes, recipes and modes."),
    ] = False,
    shape: Annotated[
        str, typer.Option("--shape", "--model", help="A model, and -tpN for one of N ranks.")
    ] = "glm-5.2-tp4",
    recipe: Annotated[str, typer.Option(help="How experts are stored.")] = "int4-g128",
    m: Annotated[
        str, typer.Option("--m", help="Token counts, with commas between.")
    ] = "1,8,32,64,256,1024,3072,8192",
    minutes: Annotated[float, typer.Option(help="After which nothing more is timed.")] = 4.0,
    batch_invariant: Annotated[
        bool,
        typer.Option("--batch-invariant", help="The tile of batch invariant layers, no other."),
    ] = False,
    wgmma: Annotated[bool, typer.Option(help="Hopper's own kernels too, which sm_90 has.")] = True,
    only_wgmma: Annotated[
        bool, typer.Option("--only-wgmma", help="The tiles of those kernels, no other.")
    ] = False,
    portable: Annotated[
        bool,
        typer.Option(help="Of others, tiles of at most 99 KiB of shared memory, as any GPU has."),
    ] = True,
    table: TableOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time tiles of a MoE layer on a GPU, and write the table from which plans choose them.

    Starts from --table and replaces a tile only by one that is faster by more than the noise. What
    is not tuned stays as it was. docs/tuning.md has the rules.
    """
    from firesteel.cli.tune.run import TuneRequest, run

    request = TuneRequest(
        out=out,
        merge=merge,
        shape=shape,
        recipe=recipe,
        sizes=counts_of("--m", "token counts", m),
        minutes=minutes,
        batch_invariant=batch_invariant,
        wgmma=wgmma,
        only_wgmma=only_wgmma,
        portable=portable,
        device=device,
        table=table,
    )
    run(request, as_json=as_json)
