"""What a result depends on: versions, machine, settings, launcher, commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import firesteel
from firesteel.checkpoint.families import FAMILIES
from firesteel.cli.console import print_json, stdout, table
from firesteel.device import default_device, device_name
from firesteel.formats.registry import FORMATS
from firesteel.launch.runner import default_kind, native_failure
from firesteel.settings import Settings, variable

__all__ = ["commit", "cpu_name", "describe_environment", "launcher", "run", "versions"]

_PACKAGES = ("torch", "transformers", "triton", "safetensors", "numpy")


def versions() -> dict[str, str | None]:
    """Versions by name; None for a package that is not installed. Imports none of them."""
    found: dict[str, str | None] = {
        "firesteel": firesteel.__version__,
        "python": platform.python_version(),
    }
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    # The metadata of some builds lacks the local part, which says CPU or CUDA.
    found["torch"] = str(torch.__version__)
    return found


def cpu_name() -> str:
    """The processor's name, as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """The commit of the checkout that firesteel runs from, `-dirty` if changed; else None."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(
            command,
            cwd=Path(firesteel.__file__).parent,
            check=True,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def launcher(settings: Settings) -> dict[str, str | None]:
    """The launcher that `prewarm` would take, and why the native one is missing where it is."""
    kind = default_kind() if settings.launcher == "auto" else settings.launcher
    return {"kind": kind, "native_failure": native_failure()}


def describe_environment() -> dict[str, Any]:
    """All that `firesteel env` prints, for JSON.

    Raises
        InvalidArgumentError: a `FIRESTEEL_*` variable is unknown, or of a value not allowed.
    """
    settings = Settings.from_env()
    return {
        "versions": versions(),
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": device_name(default_device()),
        "default_device": str(default_device()),
        "launcher": launcher(settings),
        "settings": {name: _plain(value) for name, value in asdict(settings).items()},
        "formats": [{"name": entry.name, "title": entry.title} for entry in FORMATS],
        "families": [
            {"model_type": family.model_type, "title": family.title} for family in FAMILIES.values()
        ],
    }


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


def _launcher_cell(found: dict[str, str | None]) -> str:
    kind, failure = found["kind"], found["native_failure"]
    if failure is None:
        return str(kind)
    if kind == "native":
        return f"native, as set, but it was not built: {failure}"
    return f"{kind}; the native one was not built: {failure}"


def run(*, as_json: bool) -> None:
    """Print the environment."""
    found = describe_environment()
    if as_json:
        print_json(found)
        return
    made = table("", "")
    made.show_header = False
    for name, version in found["versions"].items():
        made.add_row(name, version or "not installed")
    made.add_row("platform", found["platform"])
    made.add_row("cpu", f"{found['cpu']}, {found['threads']} threads")
    made.add_row("gpu", found["gpu"] or "none")
    made.add_row("launcher", _launcher_cell(found["launcher"]))
    settings = [f"{variable(name)}={value}" for name, value in found["settings"].items()]
    made.add_row("settings", "\n".join(settings))
    made.add_row("formats", "\n".join(entry["title"] for entry in found["formats"]))
    made.add_row("families", "\n".join(entry["title"] for entry in found["families"]))
    stdout().print(made)
