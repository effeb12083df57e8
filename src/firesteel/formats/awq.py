"""AWQ in the "gemm" version: four bits, packed along rows of the transposed matrix.

    qweight int32 [k, n/8]  eight codes of a column of W a word, in the order below
    qzeros  int32 [g, n/8]  zero points likewise, as they are
    scales  float [g, n]    fp16, or bf16 as gptqmodel may write

Of eight rows of W, row j sits in nibble (0, 4, 1, 5, 2, 6, 3, 7)[j] of the word.

Source: AutoAWQ's WQLinear_GEMM as auto-round 0.15 ships it; checked against its files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
from firesteel.formats.bits import pack_stream, unpack_stream
from firesteel.formats.stored import (
    GROUP_SIZES,
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
)

__all__ = ["Awq", "awq_scheme"]

_BITS = 4
_CODES_A_WORD = 8
_NIBBLE_OF_ROW = (0, 4, 1, 5, 2, 6, 3, 7)
_ROW_OF_NIBBLE = tuple(_NIBBLE_OF_ROW.index(nibble) for nibble in range(_CODES_A_WORD))


class Awq(Format[QuantizedMatrix]):
    """AWQ "gemm" as AutoAWQ, auto-round and gptqmodel write it."""

    name = "awq"
    title = "AWQ gemm"

    def claims(self, config: Mapping[str, Any]) -> bool:
        return config.get("quant_method") == "awq"

    def marker(self) -> str:
        return "qweight"

    def optional(self) -> frozenset[str]:
        return frozenset()

    def scheme(
        self, config: Mapping[str, Any], layer: str, stored: Mapping[str, TensorHeader]
    ) -> Scheme:
        version = optional_value(config, "checkpoint_format", "gemm")
        version = optional_value(config, "version", version)
        if version.lower() != "gemm":
            raise UnsupportedError(f"AWQ version: got {version!r}, supported is 'gemm'")
        settings = {
            "bits": config.get("w_bit"),
            "group_size": config.get("q_group_size"),
            **config,
        }
        return awq_scheme(
            layer,
            stored,
            bits=config_value(settings, "bits", int),
            group_size=config_value(settings, "group_size", int),
            is_symmetric=not optional_value(config, "zero_point", True),
        )

    def tensors(self, scheme: Scheme) -> dict[str, TensorHeader]:
        n, k, groups = scheme.n, scheme.k, scheme.num_groups
        return {
            "qweight": TensorHeader((k, n // _CODES_A_WORD), torch.int32),
            "qzeros": TensorHeader((groups, n // _CODES_A_WORD), torch.int32),
            "scales": TensorHeader((groups, n), SCALE_DTYPES[scheme.scale]),
        }

    def unpack(self, scheme: Scheme, stored: Mapping[str, Tensor]) -> QuantizedMatrix:
        check_tensors(stored, self.tensors(scheme))
        check_scales("scales", stored["scales"], scheme.scale)
        zeros = _unpack(stored["qzeros"], scheme.n)
        middle = ELEMENTS[scheme.element].zero_point
        if not scheme.has_zero_points and bool((zeros != middle).any()):
            wrong = int(zeros[zeros != middle][0])
            raise CheckpointError(
                f"qzeros: got a zero point of {wrong}, must be {middle} where the config says "
                f"that the layer is symmetric"
            )
        return QuantizedMatrix(
            codes=transposed(_unpack(stored["qweight"], scheme.n)),
            scales=transposed(stored["scales"]),
            zero_points=transposed(zeros) if scheme.has_zero_points else None,
        )

    def pack(self, scheme: Scheme, matrix: QuantizedMatrix) -> dict[str, Tensor]:
        check_matrix(scheme, matrix)
        zeros = matrix.zero_points
        if zeros is None:
            middle = ELEMENTS[scheme.element].zero_point
            zeros = torch.full_like(matrix.scales, middle, dtype=torch.uint8)
        return {
            "qweight": _pack(matrix.codes.t()),
            "qzeros": _pack(zeros.t()),
            "scales": transposed(matrix.scales),
        }

    def config(self, scheme: Scheme, ignore: Sequence[str] = ()) -> dict[str, Any]:
        return {
            "quant_method": "awq",
            "version": "gemm",
            "bits": _BITS,
            "group_size": scheme.group_size if scheme.group_size in GROUP_SIZES else -1,
            "zero_point": scheme.has_zero_points,
            "modules_to_not_convert": list(ignore) or None,
        }


def awq_scheme(
    layer: str,
    stored: Mapping[str, TensorHeader],
    *,
    bits: int,
    group_size: int,
    is_symmetric: bool,
) -> Scheme:
    """The scheme of a layer stored as AWQ does, checked against its headers.

    Raises
        CheckpointError, UnsupportedError: as `Format.scheme`.
    """
    element = int_element("AWQ", bits, (_BITS,))
    k, words = header_of(layer, stored, "qweight").shape
    scales = header_of(layer, stored, "scales")
    group_size = check_group_size("AWQ", group_size, k)
    group_count(k, group_size)
    scheme = Scheme(
        format=Awq.name,
        element=element,
        n=words * _CODES_A_WORD,
        k=k,
        group_size=group_size,
        scale=scale_type_of(layer, "scales", scales, ("fp16", "bf16", "fp32")),
        has_zero_points=not is_symmetric,
    )
    check_headers(layer, stored=stored, expected=Awq().tensors(scheme))
    return scheme


def _unpack(words: Tensor, n: int) -> Tensor:
    """Words int32 `[..., n/8]` to codes uint8 `[..., n]`, in the order of W's rows."""
    nibbles = unpack_stream(words, _BITS, n).unflatten(-1, (-1, _CODES_A_WORD))
    return nibbles[..., list(_NIBBLE_OF_ROW)].flatten(-2)


def _pack(codes: Tensor) -> Tensor:
    """Codes uint8 `[..., n]` to words int32 `[..., n/8]`."""
    rows = codes.unflatten(-1, (-1, _CODES_A_WORD))
    return pack_stream(rows[..., list(_ROW_OF_NIBBLE)].flatten(-2), _BITS)
