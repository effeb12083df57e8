"""GPTQ checkpoints, v1 and v2: `qweight`, `qzeros`, `scales` and, mostly, `g_idx`.

    qweight int32 [k*b/32, n]  codes, one stream down each column (`bits.pack_stream`)
    qzeros  int32 [g, n*b/32]  zero points, one stream along each row
    scales  float [g, n]       fp16, or bf16 or fp32 as the model was
    g_idx   int32 [k]          group of each column of W

v2 stores zero points as they are. v1 stores them less one, and gptqmodel, which writes most v1
files, subtracts for 4 and 8 bits from whole words: a zero point of 0 borrows from the next one in
its word. Reading adds to whole words too, which undoes that exactly. For 3 bits it works on single
zero points, where 0 is stored as 7.

Source: GPTQModel 7.6, gptqmodel/utils/model.py and model_dequant.py; checked against its files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from firesteel.errors import CheckpointError, UnsupportedError
from firesteel.formats.base import (
    ELEMENTS,
    SCALE_DTYPES,
    Format,
    QuantizedMatrix,
    Scheme,
    TensorHeader,
    group_count,
)
from firesteel.formats.bits import WORD_BITS, pack_stream, unpack_stream
from firesteel.formats.stored import (
    GROUP_SIZES,
    check_group_index,
    check_group_size,
    check_headers,
    check_matrix,
    check_scales,
    check_tensors,
    config_value,
    header_of,
    int_element,
    optional_value,
    scale_type_of,
    transposed,
    trivial_group_index,
)

__all__ = ["Gptq", "GptqOptions", "gptq_scheme"]

_VERSIONS: dict[str, Literal["v1", "v2"]] = {"gptq": "v1", "gptq_v2": "v2"}
_WITHOUT_INDEX = "-without-g_idx"
# One in every zero point of a word; 3-bit zero points straddle words and are shifted one by one.
_ONES = {4: 0x11111111, 8: 0x01010101}


@dataclass(frozen=True, slots=True)
class GptqOptions:
    """What a config says of one layer stored as GPTQ does.

    Fields
        bits            width of a code
        group_size      columns that share a scale, or -1 for one scale a row
        is_symmetric    every zero point is `2**(bits - 1)`
        has_act_order   `g_idx` is more than runs of columns
        version         how zero points are stored
    """

    bits: int
    group_size: int
    is_symmetric: bool
    has_act_order: bool
    version: Literal["v1", "v2"]


class Gptq(Format[QuantizedMatrix]):
    """GPTQ as AutoGPTQ and gptqmodel write it, 3, 4 and 8 bits."""

    name = "gptq"
    title = "GPTQ"

    def claims(self, config: Mapping[str, Any]) -> bool:
        return config.get("quant_method") == "gptq"

    def marker(self) -> str:
        return "qweight"

    def optional(self) -> frozenset[str]:
        return frozenset()

    def scheme(
        self, config: Mapping[str, Any], layer: str, stored: Mapping[str, TensorHeader]
    ) -> Scheme:
        return gptq_scheme(layer, stored, _options(config, layer))

    def tensors(self, scheme: Scheme) -> dict[str, TensorHeader]:
        n, k, groups, bits = scheme.n, scheme.k, scheme.num_groups, scheme.bits
        headers = {
            "qweight": TensorHeader((k * bits // WORD_BITS, n), torch.int32),
            "qzeros": TensorHeader((groups, n * bits // WORD_BITS), torch.int32),
            "scales": TensorHeader((groups, n), SCALE_DTYPES[scheme.scale]),
        }
        if not scheme.layout.endswith(_WITHOUT_INDEX):
            headers["g_idx"] = TensorHeader((k,), torch.int32)
        return headers

    def unpack(self, scheme: Scheme, stored: Mapping[str, Tensor]) -> QuantizedMatrix:
        check_tensors(stored, self.tensors(scheme))
        bits = scheme.bits
        check_scales("scales", stored["scales"], scheme.scale)
        codes = unpack_stream(stored["qweight"].t(), bits, scheme.k)
        zeros = _unpack_zeros(stored["qzeros"], bits, scheme.n, scheme.layout)
        middle = ELEMENTS[scheme.element].zero_point
        if not scheme.has_zero_points and bool((zeros != middle).any()):
            wrong = int(zeros[zeros != middle][0])
            raise CheckpointError(
                f"qzeros: got a zero point of {wrong}, must be {middle} where the config says "
                f"that the layer is symmetric"
            )
        index = stored.get("g_idx")
        if scheme.has_group_index:
            check_group_index("g_idx", stored["g_idx"], scheme.group_size)
        elif index is not None and not torch.equal(
            index, trivial_group_index(scheme.k, scheme.group_size, index.device)
        ):
            raise CheckpointError(
                "g_idx: got an order of columns, must be runs of "
                f"{scheme.group_size} columns where the config says desc_act: false"
            )
        return QuantizedMatrix(
            codes=codes,
            scales=transposed(stored["scales"]),
            zero_points=transposed(zeros) if scheme.has_zero_points else None,
            group_index=stored["g_idx"].clone() if scheme.has_group_index else None,
        )

    def pack(self, scheme: Scheme, matrix: QuantizedMatrix) -> dict[str, Tensor]:
        check_matrix(scheme, matrix)
        zeros = matrix.zero_points
        if zeros is None:
            zeros = torch.full_like(
                matrix.scales, ELEMENTS[scheme.element].zero_point, dtype=torch.uint8
            )
        tensors = {
            "qweight": transposed(pack_stream(matrix.codes, scheme.bits)),
            "qzeros": _pack_zeros(zeros.t(), scheme.bits, scheme.layout),
            "scales": transposed(matrix.scales),
        }
        if not scheme.layout.endswith(_WITHOUT_INDEX):
            device = matrix.codes.device
            tensors["g_idx"] = (
                trivial_group_index(scheme.k, scheme.group_size, device)
                if matrix.group_index is None
                else matrix.group_index.clone()
            )
        return tensors

    def config(self, scheme: Scheme, ignore: Sequence[str] = ()) -> dict[str, Any]:
        version = scheme.layout.removesuffix(_WITHOUT_INDEX)
        config: dict[str, Any] = {
            "quant_method": "gptq",
            "bits": scheme.bits,
            "group_size": scheme.group_size if scheme.group_size in GROUP_SIZES else -1,
            "sym": not scheme.has_zero_points,
            "desc_act": scheme.has_group_index,
            "checkpoint_format": {"v1": "gptq", "v2": "gptq_v2"}[version],
            "pack_dtype": "int32",
            "lm_head": False,
        }
        if ignore:
            config["dynamic"] = {f"-:^{re.escape(name)}$": {} for name in ignore}
        return config


def gptq_scheme(
    layer: str,
    stored: Mapping[str, TensorHeader],
    options: GptqOptions,
) -> Scheme:
    """The scheme of a layer stored as GPTQ does, checked against its headers.

    Raises
        CheckpointError, UnsupportedError: as `Format.scheme`.
    """
    bits = options.bits
    element = int_element("GPTQ", bits)
    qweight = header_of(layer, stored, "qweight")
    qzeros = header_of(layer, stored, "qzeros")
    scales = header_of(layer, stored, "scales")
    rows, n = qweight.shape
    if qzeros.shape[1] * WORD_BITS != n * bits:
        raise CheckpointError(
            f"{layer}.qzeros: got shape {list(qzeros.shape)} for {n} columns of qweight, which is "
            f"{qzeros.shape[1] * WORD_BITS / n:g} bits, config says {bits}"
        )
    if rows * WORD_BITS % bits:
        raise CheckpointError(
            f"{layer}.qweight: got {rows} rows, must hold whole codes of {bits} bits"
        )
    k = rows * WORD_BITS // bits
    has_index = "g_idx" in stored
    if options.has_act_order and not has_index:
        raise CheckpointError(f"{layer}.g_idx: missing, the config says desc_act: true")
    group_size = check_group_size("GPTQ", options.group_size, k)
    group_count(k, group_size)
    scheme = Scheme(
        format=Gptq.name,
        element=element,
        n=n,
        k=k,
        group_size=group_size,
        scale=scale_type_of(layer, "scales", scales, ("fp16", "bf16", "fp32")),
        has_zero_points=not options.is_symmetric,
        has_group_index=options.has_act_order,
        layout=options.version + ("" if has_index else _WITHOUT_INDEX),
    )
    check_headers(layer, stored=stored, expected=Gptq().tensors(scheme))
    return scheme


def _options(config: Mapping[str, Any], layer: str) -> GptqOptions:
    """Options of `layer`: the config, and what its `dynamic` rules override."""
    stored_as = optional_value(config, "format", "gptq")
    stored_as = optional_value(config, "checkpoint_format", stored_as)
    if stored_as not in _VERSIONS or config.get("is_marlin_format"):
        got = stored_as if stored_as not in _VERSIONS else "marlin"
        raise UnsupportedError(
            f"GPTQ checkpoint_format: got {got!r}, supported are {sorted(_VERSIONS)}"
        )
    pack_dtype = optional_value(config, "pack_dtype", "int32")
    if pack_dtype != "int32":
        raise UnsupportedError(f"GPTQ pack_dtype: got {pack_dtype!r}, supported is 'int32'")
    settings = {**config, **_overrides(config, layer)}
    return GptqOptions(
        bits=config_value(settings, "bits", int),
        group_size=config_value(settings, "group_size", int),
        # A config that does not say must be read with its zero points.
        is_symmetric=optional_value(settings, "sym", False),
        has_act_order=optional_value(settings, "desc_act", False),
        version=_VERSIONS[stored_as],
    )


def _overrides(config: Mapping[str, Any], layer: str) -> Mapping[str, Any]:
    """The first of gptqmodel's `dynamic` rules whose expression matches from the name's start.

    Raises
        CheckpointError: a rule is malformed, or says that this stored layer is not quantised.
    """
    rules: dict[str, Any] = optional_value(config, "dynamic", {})
    for rule, expression in _expressions(tuple(rules)):
        if expression.match(layer) is None:
            continue
        if rule.startswith("-:"):
            raise CheckpointError(f"{layer}.qweight: stored, but dynamic rule {rule!r} excludes it")
        return optional_value(rules, rule, {}, where=".dynamic")
    return {}


@lru_cache(maxsize=8)
def _expressions(rules: tuple[str, ...]) -> list[tuple[str, re.Pattern[str]]]:
    """Each rule with its expression. There may be more than the cache of `re` holds.

    Raises
        CheckpointError: one is no expression.
    """
    compiled: list[tuple[str, re.Pattern[str]]] = []
    for rule in rules:
        try:
            compiled.append((rule, re.compile(rule[2:] if rule[:2] in ("+:", "-:") else rule)))
        except re.error as error:
            raise CheckpointError(f"quantization_config.dynamic: got {rule!r}: {error}") from error
    return compiled


def _unpack_zeros(words: Tensor, bits: int, n: int, layout: str) -> Tensor:
    """Words int32 `[g, n*b/32]` to zero points uint8 `[g, n]`."""
    is_less_one = layout.startswith("v1")
    if is_less_one and bits in _ONES:
        words = words + _ONES[bits]
    zeros = unpack_stream(words, bits, n)
    if is_less_one and bits not in _ONES:
        zeros = (zeros + 1) & ((1 << bits) - 1)
    return zeros


def _pack_zeros(zeros: Tensor, bits: int, layout: str) -> Tensor:
    """Zero points uint8 `[g, n]` to words int32 `[g, n*b/32]`."""
    is_less_one = layout.startswith("v1")
    if is_less_one and bits not in _ONES:
        zeros = (zeros + ((1 << bits) - 1)) & ((1 << bits) - 1)
    words = pack_stream(zeros, bits)
    if is_less_one and bits in _ONES:
        words = words - _ONES[bits]
    return words
