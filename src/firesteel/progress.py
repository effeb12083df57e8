"""A progress bar with the time left, on stderr."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["progress_bar"]


@contextmanager
def progress_bar(title: str, total: int, *, show: bool) -> Generator[Callable[[], None]]:
    """Shows a bar while open; what it gives is called as each of `total` ends."""
    console = Console(stderr=True)
    # Into a file it would write an empty line.
    if not show or not total or not console.is_terminal:
        yield lambda: None
        return
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)
