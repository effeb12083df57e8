"""What the plugin refuses of an engine's options and layers, before any weight is read.

Nothing here imports vLLM: its configs and layers come as they are, and are asked for what they say.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from firesteel.errors import UnsupportedError

__all__ = ["check_load_format"]

# The engine reads the checkpoint's own safetensors with these, or nothing.
_LOAD_FORMATS = (
    "auto",
    "hf",
    "safetensors",
    "fastsafetensors",
    "instanttensor",
    "runai_streamer",
    "dummy",
)
# With "auto" the engine takes these before others.
_CONSOLIDATED = "consolidated*.safetensors"


def check_load_format(load_config: Any, path: Path) -> None:
    """Refuse to load with an engine that reads other files than firesteel.

    Args:
        load_config: the engine's.
        path: the folder of the checkpoint.

    Raises
        UnsupportedError: a load format of other files, or "auto" with Mistral's own beside.
    """
    load_format = str(load_config.load_format)
    if load_format not in _LOAD_FORMATS:
        raise UnsupportedError(
            f"load_format: got {load_format!r}, must be one of {', '.join(_LOAD_FORMATS)}"
        )
    if load_format == "auto" and (others := sorted(file.name for file in path.glob(_CONSOLIDATED))):
        raise UnsupportedError(
            f"load_format: got 'auto', with which the engine reads {others[0]} in {path}, must be "
            "'safetensors'"
        )
