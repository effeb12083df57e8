"""What the operator sets, and the only reader of the environment.

`Settings.from_env()` reads every `FIRESTEEL_*` name once; whoever loads a model or makes a plan
ready calls it, and nothing reads the environment afterwards. Tests and programs pass a `Settings`
of their own.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, cast, get_args

from firesteel.errors import InvalidArgumentError

__all__ = ["MANIFEST", "OnMiss", "Settings", "environment_markdown"]

PREFIX = "FIRESTEEL_"
MANIFEST = "manifest.json"
"""The file that a bundle has."""

OnMiss = Literal["raise", "warn", "compile"]
LaunchWith = Literal["auto", "native", "python"]
Switch = Literal["on", "off"]
Claim = Literal["off", "auto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The operator's choices; none of them changes a result.

    Fields
        on_miss          what an unplanned launch does: "raise" an error, "warn" (log the same text,
                         then compile it) or "compile". Under CUDA graph capture it always raises.
        launcher         "auto" takes the native launcher where it was built, else the Python one
        compile_threads  threads that compile at once; 0 for one a CPU
        cache            "off" neither reads nor writes compiled kernels on disk
        cache_dir        where compiled kernels are kept
        bundle           what `firesteel build` made: kernels are loaded from it before the cache
                         and the compiler are asked
        max_tokens       largest token count that a model's layers are planned for; a longer call
                         runs in slices of it. vLLM's own limit takes its place there
        vllm             "auto" loads every quantised mixture of experts that vLLM is given and
                         firesteel reads; "off" only with `--quantization firesteel`

    Raises
        InvalidArgumentError: a value is not allowed.
    """

    on_miss: OnMiss = "raise"
    launcher: LaunchWith = "auto"
    compile_threads: int = 0
    cache: Switch = "on"
    cache_dir: Path = Path("~/.cache/firesteel")
    bundle: Path | None = None
    max_tokens: int = 4096
    vllm: Claim = "off"

    def __post_init__(self) -> None:
        _check_choice("on_miss", self.on_miss, get_args(OnMiss))
        _check_choice("launcher", self.launcher, get_args(LaunchWith))
        _check_choice("cache", self.cache, get_args(Switch))
        if not isinstance(cast(object, self.cache_dir), Path):
            raise InvalidArgumentError(f"cache_dir: got {self.cache_dir!r}, must be a Path")
        if not isinstance(cast(object, self.bundle), Path | None):
            raise InvalidArgumentError(f"bundle: got {self.bundle!r}, must be a Path or None")
        _check_count("compile_threads", self.compile_threads, 0)
        _check_count("max_tokens", self.max_tokens, 1)
        _check_choice("vllm", self.vllm, get_args(Claim))

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Settings with what `FIRESTEEL_*` variables say; `environ` is the process's by default.

        Raises
            InvalidArgumentError: an unknown name, or a value that is not allowed.
        """
        environ = os.environ if environ is None else environ
        found: dict[str, Any] = {}
        for name in sorted(environ):
            if not name.startswith(PREFIX):
                continue
            field = name.removeprefix(PREFIX).lower()
            if field not in _PARSERS or name != variable(field):
                raise InvalidArgumentError(f"{name}: no such variable{_nearest(name)}")
            found[field] = _PARSERS[field](name, environ[name].strip())
        return cls(**found)

    @property
    def cache_path(self) -> Path | None:
        """The folder of compiled kernels; None where the cache is off.

        Raises
            InvalidArgumentError: it is in a home folder that is not known.
        """
        if self.cache == "off":
            return None
        try:
            return self.cache_dir.expanduser()
        except RuntimeError as error:
            raise InvalidArgumentError(
                f"cache_dir: got {str(self.cache_dir)!r}, must be a folder that exists without a "
                f"home folder ({error}), or cache be off"
            ) from error


def variable(field: str) -> str:
    """The name of a field's environment variable."""
    return PREFIX + field.upper()


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidArgumentError(f"{name}: got {value!r}, must be one of {', '.join(allowed)}")


def _check_count(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidArgumentError(f"{name}: got {value!r}, must be an integer from {least}")


def _choice(*allowed: str) -> Callable[[str, str], str]:
    def parse(name: str, text: str) -> str:
        _check_choice(name, text, allowed)
        return text

    return parse


def _count(least: int) -> Callable[[str, str], int]:
    def parse(name: str, text: str) -> int:
        value = int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else None
        if value is None or value < least:
            raise InvalidArgumentError(f"{name}: got {text!r}, must be an integer from {least}")
        return value

    return parse


def _path(name: str, text: str) -> Path:
    if not text:
        raise InvalidArgumentError(f"{name}: got '', must be a folder")
    return Path(text)


def _bundle(name: str, text: str) -> Path:
    # Before a model's weights are read, not when kernels are loaded after them.
    path = _path(name, text).expanduser()
    if not (path / MANIFEST).is_file():
        raise InvalidArgumentError(
            f"{name}: got {text!r}, must be a folder of `firesteel build`, with its {MANIFEST}"
        )
    return path


def _nearest(name: str) -> str:
    # Without the prefix, which makes every name close to every other.
    close = difflib.get_close_matches(name.removeprefix(PREFIX).lower(), _PARSERS, n=1)
    if close:
        return f"; did you mean {variable(close[0])}?"
    return f"; there are {', '.join(sorted(map(variable, _PARSERS)))}"


_PARSERS: dict[str, Callable[[str, str], Any]] = {
    "on_miss": _choice(*get_args(OnMiss)),
    "launcher": _choice(*get_args(LaunchWith)),
    "compile_threads": _count(0),
    "cache": _choice(*get_args(Switch)),
    "cache_dir": _path,
    "bundle": _bundle,
    "max_tokens": _count(1),
    "vllm": _choice(*get_args(Claim)),
}

_ALLOWED = {
    "on_miss": ", ".join(get_args(OnMiss)),
    "launcher": ", ".join(get_args(LaunchWith)),
    "compile_threads": "an integer from 0",
    "cache": ", ".join(get_args(Switch)),
    "cache_dir": "a folder",
    "bundle": "a folder",
    "max_tokens": "an integer from 1",
    "vllm": ", ".join(get_args(Claim)),
}


def environment_markdown() -> str:
    """The text of docs/environment.md."""
    lines = [
        "# Environment",
        "",
        "Written by `python -m firesteel.settings > docs/environment.md` from `Settings`; a test",
        "keeps it fresh. Variables are read once, when a model is loaded or a plan made ready, and",
        "never in `run`. An unknown `FIRESTEEL_` name and a value that is not allowed are errors.",
        "",
        "| variable | default | allowed | meaning |",
        "|---|---|---|---|",
    ]
    meanings = _meanings()
    for field in fields(Settings):
        row = (
            f"`{variable(field.name)}`",
            f"`{cast(object, field.default)}`",
            _ALLOWED[field.name],
            meanings[field.name],
        )
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def _meanings() -> dict[str, str]:
    """What the docstring of `Settings` says of each field, on one line."""
    assert Settings.__doc__ is not None
    section = Settings.__doc__.partition("Fields\n")[2].partition("\n\n")[0]
    found: dict[str, list[str]] = {}
    name = ""
    for line in section.splitlines():
        words = line.split()
        if words[0] in _PARSERS and not line.startswith(" " * 12):
            name = words.pop(0)
            found[name] = []
        found[name] += words
    return {key: " ".join(words) for key, words in found.items()}


if __name__ == "__main__":
    import sys

    sys.stdout.write(environment_markdown())
