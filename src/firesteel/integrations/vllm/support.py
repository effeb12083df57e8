# vLLM is not there where types are checked.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportAttributeAccessIssue=false
"""Which engines the plugin is made for, and what it does in others: warn, and load no model.

Nothing here but `register_refusal` imports vLLM, and of it only what all versions have.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from typing import Any, NoReturn

from firesteel.errors import UnsupportedError

__all__ = ["METHOD", "SUPPORTED", "found_versions", "mismatch", "register_refusal", "supported"]

METHOD = "firesteel"

SUPPORTED = {"vllm": ((0, 32), (0, 34)), "transformers": ((5, 16), (5, 25))}
"""Package to its first supported version and the first one after; as in pyproject.toml."""


def supported() -> str:
    """The supported versions in words."""
    ranges = (
        f"{name} {low[0]}.{low[1]} to {high[0]}.{high[1] - 1}"
        for name, (low, high) in SUPPORTED.items()
    )
    return " with ".join(ranges)


def found_versions() -> dict[str, str]:
    """The version that each package says it has; the error of one that cannot be imported."""
    found: dict[str, str] = {}
    for name in SUPPORTED:
        try:
            found[name] = str(getattr(import_module(name), "__version__", "without a version"))
        except ImportError as error:
            found[name] = f"that cannot be imported ({error})"
    return found


def mismatch(found: Mapping[str, str]) -> str | None:
    """Why firesteel does not work with these versions; None where it does."""
    for name, (low, high) in SUPPORTED.items():
        match = re.match(r"(\d+)\.(\d+)", found[name])
        if match is None or not low <= (int(match[1]), int(match[2])) < high:
            return f"got {name} {found[name]}, supported is {supported()}"
    return None


def register_refusal(reason: str) -> None:
    """Make `--quantization firesteel` an error that says why; other models go on as they are."""
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    def refuse() -> NoReturn:
        raise UnsupportedError(f"quantization: got {METHOD!r}, which is off: {reason}")

    class Refusal(QuantizationConfig):
        """In the place of `FiresteelConfig`; what vLLM's abstract class wants it never gets to."""

        def __new__(cls) -> Refusal:
            refuse()

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> Refusal:
            refuse()

        @staticmethod
        def get_config_filenames() -> list[str]:
            return []

        @classmethod
        def override_quantization_method(
            cls, hf_quant_cfg: Any, user_quant: str | None, **others: Any
        ) -> None:
            if user_quant == METHOD:
                refuse()

    register_quantization_config(METHOD)(Refusal)
