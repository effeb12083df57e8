"""The lines that benchmarks write: what was measured, and all that it depends on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from firesteel.cli.console import print_json, stderr
from firesteel.cli.environment import commit, cpu_name, versions
from firesteel.device import device_name
from firesteel.errors import InvalidArgumentError

__all__ = ["Writer", "context", "progress", "writer"]


class Writer(Protocol):
    """Takes one record."""

    def __call__(self, record: dict[str, Any]) -> None:
        """Write it out at once."""
        ...


def context(device: torch.device) -> dict[str, Any]:
    """Date, commit, versions and machine, as they are now: part of every record."""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": commit(),
        "versions": versions(),
        "device": str(device),
        "machine": {
            "name": device_name(device) or cpu_name(),
            "cpus": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "load": load_average(),
        },
    }


def load_average() -> float | None:
    """Runnable processes over the last minute, this one included; None where unknown."""
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):
        return None


@contextmanager
def writer(out: Path | None, *, as_json: bool) -> Generator[Writer]:
    """A function that prints a record, where asked for, and appends it to the file `out`.

    Raises
        InvalidArgumentError: the file cannot be opened.
    """
    try:
        file = None if out is None else out.open("a", encoding="utf-8")
    except OSError as error:
        raise InvalidArgumentError(f"--out: {error}") from error

    def write(record: dict[str, Any]) -> None:
        if as_json:
            print_json(record)
        if file is not None:
            file.write(json.dumps(record) + "\n")
            file.flush()

    try:
        yield write
    finally:
        if file is not None:
            file.close()


@contextmanager
def progress() -> Generator[Callable[[str], None]]:
    """A function that says on stderr what runs now; silent where that is no terminal."""
    console = stderr()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("", total=None)

        def say(text: str) -> None:
            bar.update(task, description=text)

        yield say
