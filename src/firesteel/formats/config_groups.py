"""The `config_groups` of compressed-tensors: which group says how a layer is stored.

Shared by the formats that compressed-tensors writes; a config may hold several of them at once
(`"format": "mixed-precision"`, each group naming its own).

Source: compressed-tensors 0.20, quantization/quant_config.py and utils/match.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from firesteel.errors import CheckpointError, UnsupportedError
from firesteel.formats.stored import config_value, optional_value

__all__ = ["ConfigGroup", "config_for_group", "group_of_layer", "is_compressed", "read_groups"]

METHOD = "compressed-tensors"


@dataclass(frozen=True, slots=True)
class ConfigGroup:
    """One entry of `config_groups`.

    Fields
        name     its key, for messages
        format   its own format, or the checkpoint's
        targets  layer names, "re:" expressions, or class names ("Linear")
        weights  its `weights` entry

    `input_activations` is not read: weights of a file whose activations are quantised at run time
    are used with 16-bit activations.
    """

    name: str
    format: str
    targets: tuple[str, ...]
    weights: Mapping[str, Any]


def is_compressed(config: Mapping[str, Any], formats: Sequence[str]) -> bool:
    """Whether a compressed-tensors config has a group stored in one of `formats`."""
    if config.get("quant_method") != METHOD:
        return False
    return any(group.format in formats for group in read_groups(config))


def _check_plain(config: Mapping[str, Any]) -> None:
    """Refuse what makes a layer compute other than its codes and scales say."""
    sparsity = config.get("sparsity_config") or {}
    is_dense = isinstance(sparsity, dict) and sparsity.get("format", "dense") == "dense"
    for key, is_plain in (
        ("transform_config", not config.get("transform_config")),
        ("sparsity_config", is_dense),
    ):
        if not is_plain:
            raise UnsupportedError(
                f"quantization_config.{key}: got {config[key]!r}, supported is a config without"
            )


def read_groups(config: Mapping[str, Any]) -> list[ConfigGroup]:
    """The groups of a config that quantise weights, in its order.

    Raises
        CheckpointError: an entry is missing or of the wrong class.
    """
    _check_plain(config)
    groups: list[ConfigGroup] = []
    entries = config_value(config, "config_groups", dict)
    for name, entry in entries.items():
        where = f".config_groups.{name}"
        if not isinstance(entry, dict):
            raise CheckpointError(f"quantization_config{where}: got {entry!r}, must be dict")
        if entry.get("weights") is None:
            continue
        shared_format = optional_value(config, "format", "dense")
        targets = config_value(entry, "targets", list, where=where)
        if not all(isinstance(target, str) for target in targets):
            raise CheckpointError(
                f"quantization_config{where}.targets: got {targets!r}, must be strings"
            )
        groups.append(
            ConfigGroup(
                name=name,
                format=optional_value(entry, "format", shared_format, where=where),
                targets=tuple(targets),
                weights=config_value(entry, "weights", dict, where=where),
            )
        )
    return groups


def group_of_layer(config: Mapping[str, Any], layer: str, formats: Sequence[str]) -> ConfigGroup:
    """The group that says how `layer` is stored, among those of `formats`.

    A target that is the layer's name wins over an expression, and that over a class name. A file
    does not tell classes, so "Linear" matches any layer, and any other class name matches one that
    nothing else does.

    Raises
        CheckpointError: no group of these formats names the layer.
    """
    groups = [group for group in read_groups(config) if group.format in formats]
    for group in groups:
        # Before any expression: a config may name thousands of layers.
        if layer in group.targets:
            return group
    ranked = [
        (rank, group)
        for group in groups
        for target in group.targets
        if (rank := _match_rank(target, layer)) is not None
    ]
    if not ranked:
        raise CheckpointError(
            f"{layer}: stored as {' or '.join(formats)}, "
            f"but no such entry of quantization_config.config_groups names it"
        )
    return min(ranked, key=lambda item: item[0])[1]


def config_for_group(
    stored_as: str,
    weights: Mapping[str, Any],
    ignore: Sequence[str],
) -> dict[str, Any]:
    """A config whose one group stores the weights of every linear layer not ignored."""
    return {
        "quant_method": METHOD,
        "format": stored_as,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "format": stored_as,
                "targets": ["Linear"],
                "weights": {
                    "dynamic": False,
                    "symmetric": True,
                    "actorder": None,
                    **weights,
                },
                "input_activations": None,
                "output_activations": None,
            }
        },
        "ignore": list(ignore),
        "kv_cache_scheme": None,
    }


def _match_rank(target: str, layer: str) -> int | None:
    """How closely an expression or a class fits, 0 the closest; None where it does not."""
    if target.startswith("re:"):
        try:
            return 0 if re.match(target.removeprefix("re:"), layer) else None
        except re.error as error:
            raise CheckpointError(
                f"quantization_config.config_groups: got target {target!r}: {error}"
            ) from error
    if target == "Linear":
        return 1
    return 2 if "." not in target else None
