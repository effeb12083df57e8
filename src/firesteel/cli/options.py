"""Options that several commands take. Imports nothing that is slow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from firesteel.errors import InvalidArgumentError

__all__ = [
    "BatchInvariantOption",
    "CheckpointArgument",
    "CheckpointOption",
    "DeviceOption",
    "EpOption",
    "IdsOption",
    "JsonOption",
    "MaxTokensOption",
    "ModelOption",
    "OutOption",
    "RecipeOption",
    "TableOption",
    "TpOption",
    "check_counts",
    "counts_of",
]

CheckpointArgument = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help="A folder, or a hub name (owner/name).")
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout and nothing else.")]
OutOption = Annotated[Path | None, typer.Option("--out", help="Also append each line to a file.")]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="cpu or cuda; the GPU if there is one.")
]

ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME",
        help="glm-5.2, deepseek-v3, qwen3-30b-a3b, gpt-oss-120b or mixtral-8x7b.",
    ),
]
CheckpointOption = Annotated[
    Path | None,
    typer.Option("--checkpoint", metavar="FOLDER", help="Instead of --model: reads its headers."),
]
TpOption = Annotated[
    int,
    typer.Option(
        "--tp",
        metavar="N",
        help="Ranks that share each expert, cut as vLLM's ranks cut it: parts may be unlike.",
    ),
]
EpOption = Annotated[
    int,
    typer.Option(
        "--ep",
        metavar="N",
        help="Ranks among which experts are shared out whole, as vLLM does with expert parallel; "
        "not with --tp.",
    ),
]
RecipeOption = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        help="How experts are stored: int4-g32, int4-g64 or int4-g128, each also with -asym; mxfp4 "
        "or nvfp4. "
        "By default int4-g128 with --model, and what the checkpoint has with --checkpoint.",
    ),
]
MaxTokensOption = Annotated[
    int | None,
    typer.Option(
        "--max-tokens", metavar="N", help="Largest token count; FIRESTEEL_MAX_TOKENS, else 4096."
    ),
]
IdsOption = Annotated[
    str, typer.Option("--ids", help="Types of expert ids that callers pass: int32, int64 or both.")
]
BatchInvariantOption = Annotated[
    bool,
    typer.Option("--batch-invariant", help="A row has the same bits at every token count."),
]
TableOption = Annotated[
    str | None,
    typer.Option(
        "--table",
        metavar="FILE",
        help="Tiles by measurement: a file of `firesteel tune`, or the name of a table that ships. "
        "By default the one nearest to the GPU, and h200 where none is involved.",
    ),
]


def counts_of(option: str, what: str, text: str) -> tuple[int, ...]:
    """Counts from "1,8,64"; what they count is for the message.

    Raises
        InvalidArgumentError: they are none.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdecimal() for word in words):
        raise InvalidArgumentError(f"{option}: got {text!r}, must be {what} with commas between")
    return tuple(int(word) for word in words)


def check_counts(option: str, what: str, counts: Sequence[int]) -> None:
    """Refuse no counts, and one of 0.

    Raises
        InvalidArgumentError: they are such.
    """
    if not counts or min(counts) < 1:
        raise InvalidArgumentError(f"{option}: got {list(counts)}, must be {what} from 1")
