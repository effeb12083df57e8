"""`firesteel quantize`: writes a plain checkpoint again with its experts quantised."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from firesteel.checkpoint.files import resolve
from firesteel.checkpoint.rounding import quantize_checkpoint
from firesteel.cli.console import format_bytes, print_json, stdout
from firesteel.formats.quantize import parse_recipe
from firesteel.progress import progress_bar

__all__ = ["QuantizeRequest", "run"]


@dataclass(frozen=True, kw_only=True)
class QuantizeRequest:
    """The options of `firesteel quantize`.

    Fields
        checkpoint  a plain checkpoint: a folder, or a hub name
        recipe      how experts are to be stored
        out         the folder to write
    """

    checkpoint: str
    recipe: str
    out: Path


def run(request: QuantizeRequest, *, as_json: bool) -> None:
    """Quantise, and print what was done.

    Raises
        FiresteelError: as `quantize_checkpoint`, or there is no such recipe.
    """
    start = time.monotonic()
    recipe = parse_recipe(request.recipe)
    path = resolve(request.checkpoint)
    with ExitStack() as stack:
        done = quantize_checkpoint(
            path,
            recipe,
            request.out,
            progress=lambda total: stack.enter_context(
                progress_bar("quantising experts", total, show=True)
            ),
        )
    seconds = time.monotonic() - start
    if as_json:
        print_json(
            {"path": str(request.out), "recipe": recipe.name, "seconds": seconds, **asdict(done)}
        )
        return
    earlier = f", {done.kept} of them by an earlier run" if done.kept else ""
    stdout().print(
        f"{request.out}: {done.matrices} matrices of {done.layers} layers as {recipe.name}"
        f"{earlier}; {format_bytes(done.bytes_before)} to {format_bytes(done.bytes_after)}, "
        f"{seconds:.0f} s",
        highlight=False,
        soft_wrap=True,
    )
