"""NVFP4 as NVIDIA's modelopt stores it (`quant_method: "modelopt"`, `quant_algo: "NVFP4"`).

    weight          uint8 [n, k/2]         two E2M1 codes a byte, even column low
    weight_scale    float8_e4m3 [n, k/16]
    weight_scale_2  fp32 []                a multiplier: W = value * (weight_scale * weight_scale_2)

`input_scale` belongs to quantised activations; it is kept and not read. The config is the
`quantization_config` of config.json, or that of hf_quant_config.json, where the same keys sit under
"quantization".

Source: modelopt 0.47, torch/export/; checked against its files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from firesteel.errors import CheckpointError, UnsupportedError
from firesteel.formats.base import Scheme, TensorHeader
from firesteel.formats.fp4 import Fp4Format, Fp4Layout
from firesteel.formats.stored import check_headers, config_value, optional_value

__all__ = ["Nvfp4Modelopt"]

_ALGORITHMS = ("NVFP4", "W4A16_NVFP4")
_MIXED = "MIXED_PRECISION"
_LAYOUT = Fp4Layout(
    format="nvfp4-modelopt",
    codes="weight",
    scales="weight_scale",
    group_size=16,
    scale="e4m3",
    global_scale="weight_scale_2",
    global_scale_type="multiplier",
)


class Nvfp4Modelopt(Fp4Format):
    """NVFP4 weights of modelopt, with or without quantised activations."""

    layout = _LAYOUT
    name = _LAYOUT.format
    title = "NVFP4 (modelopt)"

    def claims(self, config: Mapping[str, Any]) -> bool:
        settings = _settings(config)
        if settings is None:
            return False
        return any(entry.get("quant_algo") in _ALGORITHMS for entry in _entries(settings))

    def marker(self) -> str:
        return "weight_scale_2"

    def optional(self) -> frozenset[str]:
        return frozenset({"input_scale"})

    def scheme(
        self, config: Mapping[str, Any], layer: str, stored: Mapping[str, TensorHeader]
    ) -> Scheme:
        entry = _entry_of_layer(_settings(config) or {}, layer)
        if entry.get("quant_algo") not in _ALGORITHMS:
            raise UnsupportedError(
                f"{layer} quant_algo: got {entry.get('quant_algo')!r}, "
                f"supported are {list(_ALGORITHMS)}"
            )
        scheme = _LAYOUT.scheme(layer, stored, _group_size(entry))
        check_headers(layer, stored=stored, expected=self.tensors(scheme), optional=self.optional())
        return scheme

    def config(self, scheme: Scheme, ignore: Sequence[str] = ()) -> dict[str, Any]:
        return {
            "quant_method": "modelopt",
            "quant_algo": "W4A16_NVFP4",
            "config_groups": {
                "group_0": {
                    "weights": {
                        "dynamic": False,
                        "num_bits": 4,
                        "type": "float",
                        "group_size": scheme.group_size,
                    },
                    "targets": ["Linear"],
                }
            },
            "ignore": list(ignore),
        }


def _settings(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The part of the config that modelopt's keys are in; None where it is not modelopt's."""
    nested: dict[str, Any] = optional_value(config, "quantization", {})
    if "quant_algo" in nested:
        return nested
    method = str(config.get("quant_method", ""))
    return config if method in ("modelopt", "modelopt_fp4", "modelopt_mixed") else None


def _entries(settings: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """What may apply to a layer: the one choice of the config, or those of its layers."""
    if settings.get("quant_algo") != _MIXED:
        yield settings
        return
    # A config may list every expert of every layer, so look no further than the caller needs.
    for layer in _layers(settings):
        yield _layer_entry(settings, layer)


def _entry_of_layer(settings: Mapping[str, Any], layer: str) -> Mapping[str, Any]:
    """What applies to `layer`.

    Raises
        CheckpointError: the config lists its quantised layers, and not this stored one.
    """
    if settings.get("quant_algo") != _MIXED:
        return settings
    if layer not in _layers(settings):
        raise CheckpointError(
            f"{layer}.weight_scale_2: stored, but quantization_config.quantized_layers has no "
            "such layer"
        )
    return _layer_entry(settings, layer)


def _layers(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The layers that a mixed config lists."""
    return optional_value(settings, "quantized_layers", {})


def _layer_entry(settings: Mapping[str, Any], layer: str) -> dict[str, Any]:
    return config_value(_layers(settings), layer, dict, where=".quantized_layers")


def _group_size(entry: Mapping[str, Any]) -> int | None:
    """The group size that a config states, at the top or in its config group; else None."""
    if "group_size" in entry:
        return config_value(entry, "group_size", int)
    groups: dict[str, Any] = optional_value(entry, "config_groups", {})
    for name in groups:
        where = f".config_groups.{name}"
        weights = config_value(
            config_value(groups, name, dict, where=".config_groups"), "weights", dict, where=where
        )
        return config_value(weights, "group_size", int, where=f"{where}.weights")
    return None
