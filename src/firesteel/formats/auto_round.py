"""auto-round's native checkpoints: the tensors of GPTQ or AWQ, with a config of its own.

`packing_format` ("backend" in releases before 0.5) says which, and how zero points are stored:

    contains      tensors as  zero points                    g_idx
    awq           AWQ gemm    as they are                    no
    gptqmodel     GPTQ        as they are (v2)               yes
    other gptq    GPTQ        less one (v1)                  no
    none of them  GPTQ        as they are (v2)               no

A symmetric model of release 0.5 or later is written as "auto_round:auto_gptq". `extra_config`
overrides bits, group size and symmetry by layer name, or by an expression that may match anywhere
in the name.

Source: auto-round 0.15, export/export_to_autoround/ and inference/utils.py; checked against its
files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

from torch import Tensor

from firesteel.errors import CheckpointError, UnsupportedError
from firesteel.formats.awq import Awq, awq_scheme
from firesteel.formats.base import Format, QuantizedMatrix, Scheme, TensorHeader
from firesteel.formats.gptq import Gptq, GptqOptions, gptq_scheme
from firesteel.formats.stored import GROUP_SIZES, config_value, optional_value

__all__ = ["AutoRound"]

_INNER: dict[str, Format[QuantizedMatrix]] = {"gptq": Gptq(), "awq": Awq()}
_PREFIX = "auto_round"
_PLAIN_NAME = re.compile(r"[\w.-]+")


class AutoRound(Format[QuantizedMatrix]):
    """auto-round native, over the tensors of GPTQ or AWQ; `Scheme.layout` says which."""

    name = "auto-round"
    title = "auto-round"

    def claims(self, config: Mapping[str, Any]) -> bool:
        return config.get("quant_method") in ("auto-round", "auto_round", "intel/auto-round")

    def marker(self) -> str:
        return "qweight"

    def optional(self) -> frozenset[str]:
        return frozenset()

    def scheme(
        self, config: Mapping[str, Any], layer: str, stored: Mapping[str, TensorHeader]
    ) -> Scheme:
        packing = _packing(config)
        settings = {**config, **_overrides(config, layer)}
        _check_supported(settings)
        bits = config_value(settings, "bits", int)
        group_size = config_value(settings, "group_size", int)
        is_symmetric = config_value(settings, "sym", bool)
        if "awq" in packing:
            inner = awq_scheme(
                layer, stored, bits=bits, group_size=group_size, is_symmetric=is_symmetric
            )
        else:
            options = GptqOptions(
                bits=bits,
                group_size=group_size,
                is_symmetric=is_symmetric,
                has_act_order=False,
                version=_zero_points(packing),
            )
            inner = gptq_scheme(layer, stored, options)
        return replace(inner, format=self.name, layout=f"{inner.format}:{inner.layout}")

    def tensors(self, scheme: Scheme) -> dict[str, TensorHeader]:
        inner, inner_scheme = _inner(scheme)
        return inner.tensors(inner_scheme)

    def unpack(self, scheme: Scheme, stored: Mapping[str, Tensor]) -> QuantizedMatrix:
        inner, inner_scheme = _inner(scheme)
        return inner.unpack(inner_scheme, stored)

    def pack(self, scheme: Scheme, matrix: QuantizedMatrix) -> dict[str, Tensor]:
        inner, inner_scheme = _inner(scheme)
        return inner.pack(inner_scheme, matrix)

    def config(self, scheme: Scheme, ignore: Sequence[str] = ()) -> dict[str, Any]:
        config: dict[str, Any] = {
            "quant_method": "auto-round",
            "packing_format": _PREFIX + _packing_suffix(scheme.layout),
            "bits": scheme.bits,
            "group_size": scheme.group_size if scheme.group_size in GROUP_SIZES else -1,
            "sym": not scheme.has_zero_points,
            "data_type": "int",
        }
        if ignore:
            config["extra_config"] = {name: {"bits": 16, "data_type": "float"} for name in ignore}
        return config


def _inner(scheme: Scheme) -> tuple[Format[QuantizedMatrix], Scheme]:
    """The format whose tensors these are, and the scheme as it knows it."""
    name, _, layout = scheme.layout.partition(":")
    return _INNER[name], replace(scheme, format=name, layout=layout)


def _packing(config: Mapping[str, Any]) -> str:
    """How the checkpoint is packed.

    Raises
        CheckpointError: the config does not say.
        UnsupportedError: not in tensors of GPTQ or AWQ.
    """
    packing = optional_value(config, "packing_format", optional_value(config, "backend", ""))
    if not packing:
        raise CheckpointError(
            "quantization_config.packing_format: missing, must be a string such as "
            "'auto_round:auto_gptq'"
        )
    if packing.split(":")[0] not in (_PREFIX, "auto-round") or any(
        part in packing for part in ("fp8", "fp4", "compressor", "mlx", "gguf", "nv_fp", "mx_fp")
    ):
        raise UnsupportedError(
            f"auto-round packing_format: got {packing!r}, supported are 'auto_round', "
            "'auto_round:auto_gptq', 'auto_round:gptqmodel', 'auto_round:auto_awq'"
        )
    return packing


def _zero_points(packing: str) -> Literal["v1", "v2"]:
    return "v1" if "gptq" in packing and "gptqmodel" not in packing else "v2"


def _packing_suffix(layout: str) -> str:
    """What follows "auto_round" in the packing format that gives this layout."""
    suffixes = {
        "awq:": ":auto_awq",
        "gptq:v1-without-g_idx": ":auto_gptq",
        "gptq:v1": ":auto_gptq",
        "gptq:v2-without-g_idx": "",
        "gptq:v2": ":gptqmodel",
    }
    return suffixes[layout]


def _check_supported(settings: Mapping[str, Any]) -> None:
    """Refuse what the tensors of GPTQ and AWQ cannot hold.

    Raises
        UnsupportedError: codes that are no integers, or quantised activations.
    """
    data_type = optional_value(settings, "data_type", "int")
    if not data_type.startswith("int"):
        raise UnsupportedError(f"auto-round data_type: got {data_type!r}, supported is 'int'")
    act_bits = optional_value(settings, "act_bits", 16)
    if act_bits < 16:
        raise UnsupportedError(f"auto-round act_bits: got {act_bits}, supported is 16")
    if settings.get("rotation_config"):
        raise UnsupportedError("auto-round rotation_config: got one, supported is none")


def _overrides(config: Mapping[str, Any], layer: str) -> Mapping[str, Any]:
    """What `extra_config` says of `layer`: its own entry, else the first expression that matches.

    Raises
        CheckpointError: it says that this stored layer is not quantised.
    """
    extra: dict[str, Any] = optional_value(config, "extra_config", {})
    # An empty entry says nothing, and hides no later one.
    if extra.get(layer):
        name = layer
    else:
        matching = (
            name
            for name, expression in _expressions(tuple(extra))
            if extra[name] and expression.search(layer)
        )
        name = next(matching, None)
    if name is None:
        return {}
    values = config_value(extra, name, dict, where=".extra_config")
    given = {key: value for key, value in values.items() if value is not None}
    if optional_value(given, "bits", 0, where=f".extra_config.{name}") >= 16:
        raise CheckpointError(f"{layer}.qweight: stored, but extra_config gives it 16 bits")
    return given


@lru_cache(maxsize=8)
def _expressions(names: tuple[str, ...]) -> list[tuple[str, re.Pattern[str]]]:
    """Those of the entries' names that are expressions, in order. There may be thousands.

    A plain name stands for that layer only ("mlp.gate" is not "mlp.gate_proj"); what is no valid
    expression matches nothing, as in auto-round.
    """
    compiled: list[tuple[str, re.Pattern[str]]] = []
    for name in names:
        if not _PLAIN_NAME.fullmatch(name):
            with suppress(re.error):
                compiled.append((name, re.compile(name)))
    return compiled
