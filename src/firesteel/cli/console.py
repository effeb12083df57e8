"""Where commands print: results on stdout, everything else on stderr, and errors as one line."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Mapping
from typing import Any, NoReturn, cast

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from firesteel.errors import FiresteelError

__all__ = ["ErrorGroup", "fail", "format_bytes", "print_json", "stderr", "stdout", "table", "write"]

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130

_PLAIN_WIDTH = 160

# BadParameter is a UsageError; the names of its bases moved when typer took click in.
_UsageError = cast("type[Exception]", typer.BadParameter.__mro__[1])


class ErrorGroup(TyperGroup):
    """The root of the commands: what users did wrong ends in one line, not in a traceback."""

    def main(self, *args: Any, standalone_mode: bool = True, **kwargs: Any) -> object:
        """Parse, run, and exit with 0, 2 (an error of the user's or of a file) or 130 (Ctrl-C)."""
        if not standalone_mode:
            return super().main(*args, standalone_mode=False, **kwargs)
        try:
            result = super().main(*args, standalone_mode=False, **kwargs)
        except FiresteelError as error:
            fail(str(error))
        except _UsageError as error:
            fail(cast(Any, error).format_message())
        except (typer.Abort, KeyboardInterrupt):
            sys.exit(EXIT_INTERRUPTED)
        except OSError as error:
            # One that names a file is of another kind.
            if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EPIPE):
                raise
            _drop_output()
            # A reader that has seen enough, as `head` has, is no error to speak of.
            if error.errno == errno.EPIPE:
                sys.exit(EXIT_ERROR)
            fail(f"stdout: cannot be written: {error.strerror}")
        # An exit that a command asked for comes back as its code; commands return None.
        sys.exit(result if isinstance(result, int) else 0)


def _drop_output() -> None:
    """Send what is still to be written nowhere, or Python would fail over it once more at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def fail(message: str) -> NoReturn:
    """Print `error: message` on one line of stderr and exit with 2."""
    typer.echo(f"error: {_one_line(message)}", err=True)
    sys.exit(EXIT_ERROR)


def _one_line(message: str) -> str:
    words = message.split()
    return "".join(c if c.isprintable() else "?" for c in " ".join(words))


def stdout() -> Console:
    """The console of results; wide where it is no terminal, so that no cell is cut."""
    return _console(Console(markup=False, emoji=False))


def stderr() -> Console:
    """The console of everything that is not a result."""
    return _console(Console(stderr=True, markup=False, emoji=False))


def _console(console: Console) -> Console:
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    return console


def write(text: str) -> None:
    """Write text to stdout as it is: no markup, no wrapping, no newline added."""
    typer.echo(text, nl=False)


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object on one line of stdout."""
    typer.echo(json.dumps(value))


def table(*columns: str, title: str | None = None) -> Table:
    """An empty table whose columns after the first are right-aligned when their header ends in `>`.

    Cells are text: brackets in a name are no markup.
    """
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        name = column.removesuffix(">")
        made.add_column(name, justify="right" if name != column else "left", overflow="fold")
    return made


def format_bytes(num_bytes: int) -> str:
    """`5.2 MB`: three digits and a decimal unit."""
    value = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{num_bytes} B" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"
