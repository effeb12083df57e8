"""Every checkpoint format that firesteel reads.

To add one, write a file with a `Format` and add a line to `FORMATS`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from firesteel.errors import CheckpointError, UnsupportedError
from firesteel.formats.auto_round import AutoRound
from firesteel.formats.awq import Awq
from firesteel.formats.base import Format
from firesteel.formats.compressed_tensors import CompressedTensors
from firesteel.formats.exl3 import Exl3
from firesteel.formats.gptq import Gptq
from firesteel.formats.mxfp4 import Mxfp4
from firesteel.formats.mxfp4_gpt_oss import Mxfp4GptOss
from firesteel.formats.nf3 import Nf3
from firesteel.formats.nvfp4 import Nvfp4
from firesteel.formats.nvfp4_modelopt import Nvfp4Modelopt

__all__ = ["FORMATS", "detect", "format_named", "formats_for"]

FORMATS: tuple[Format[Any], ...] = (
    CompressedTensors(),
    Gptq(),
    Awq(),
    AutoRound(),
    Mxfp4(),
    Mxfp4GptOss(),
    Nvfp4(),
    Nvfp4Modelopt(),
    Exl3(),
    Nf3(),
)

# Suffixes that only a quantised layer has, of any tool: none of these may pass for a plain weight.
_QUANTIZED = frozenset(
    {
        "SCB",
        "absmax",
        "blocks",
        "codes",
        "g_idx",
        "mcg",
        "mul1",
        "qweight",
        "qzeros",
        "scales",
        "su",
        "suh",
        "sv",
        "svh",
        "trellis",
        "weight.absmax",
        "weight_g_idx",
        "weight_global_scale",
        "weight_packed",
        "weight_scale",
        "weight_scale_2",
        "weight_scale_inv",
        "weight_shape",
        "weight_zero_point",
    }
)


def format_named(name: str) -> Format[Any]:
    """The format of that name.

    Raises
        UnsupportedError: there is none; the message lists those known.
    """
    for entry in FORMATS:
        if entry.name == name:
            return entry
    raise UnsupportedError(f"format: got {name!r}, known are {_names()}")


def formats_for(config: Mapping[str, Any]) -> list[Format[Any]]:
    """The formats that a checkpoint with this quantization_config may hold, at least one.

    Raises
        CheckpointError: the config names no method.
        UnsupportedError: firesteel reads none of what it names; the message lists what it reads.
    """
    found = [entry for entry in FORMATS if entry.claims(config)]
    if found:
        return found
    method = config.get("quant_method")
    if not method and "quantization" not in config:
        raise CheckpointError(
            f"quantization_config.quant_method: missing, got only {sorted(config)}"
        )
    raise UnsupportedError(f"quantization_config: got {_describe(config)}, known are {_names()}")


def detect(config: Mapping[str, Any], stored_suffixes: Collection[str]) -> Format[Any] | None:
    """The format of one layer, by the suffixes it stores; None where its weight is plain.

    Args:
        config: the checkpoint's quantization_config; empty where there is none.

    Raises
        CheckpointError: as `formats_for`; or there is no config, and the layer is quantised.
        UnsupportedError: the layer is quantised in a way that its config does not say or that
            firesteel does not read.
    """
    suffixes = frozenset(stored_suffixes)
    is_quantized = bool(suffixes & _QUANTIZED)
    if not config and not is_quantized:
        return None
    if not config:
        marked = [entry for entry in FORMATS if entry.marker() in suffixes]
        names = " or ".join(entry.name for entry in marked if entry.recognizes(suffixes))
        raise CheckpointError(
            f"layer: got tensors {sorted(suffixes)} of {names or 'a quantised layer'}, "
            "and no quantization_config, whose quant_method must say so"
        )
    formats = formats_for(config)
    for entry in formats:
        if entry.recognizes(suffixes):
            return entry
    if is_quantized:
        raise UnsupportedError(
            f"layer: got tensors {sorted(suffixes)}, which are none of what this config may hold: "
            f"{[entry.name for entry in formats]}"
        )
    return None


def _describe(config: Mapping[str, Any]) -> str:
    """What a config names, in short: the method, and the variant where it has one."""
    words = [f"quant_method {config.get('quant_method')!r}"]
    nested = config.get("quantization")
    for source in (config, nested if isinstance(nested, Mapping) else {}):
        words += [f"{key} {source[key]!r}" for key in ("format", "quant_algo") if source.get(key)]
    return ", ".join(words)


def _names() -> list[str]:
    return [entry.name for entry in FORMATS]
