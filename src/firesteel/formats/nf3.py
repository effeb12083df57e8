"""NF3: a codebook of eight values, 3 bits a weight, in the interchange layout `nf3_2p1`.

    codes  int32 [n*k/32, 3]  units of 32 codes: words lo0, lo1 and hi
    scales uint8 [n, k/32]    E5M3: bits 7 to 14 of the fp16 of a sixteenth of the scale

W[i, j] = bf16(value * scale), one rounding; `base.NF3` has the values of the eight codes.

No public tool writes such files: `nf3_2p1` is a layout to exchange weights in. A unit is what one
thread of a warp holds of 64 rows by 16 columns in a product on tensor cores. With T, the config's
`tile_width`, the code of row i and column j is

    w = i // 64 * 32 + i % 8 * 4 + j % 8 // 2
    in unit  w // (T/2) * (k/16) * (T/2) + j // 16 * (T/2) + w % (T/2)
    q = i % 64 // 16,  v = i % 16 // 8 * 4 + j % 16 // 8 * 2 + j % 2
    bits 0 and 1  from bit 16 * (q % 2) + 2 * v of lo0 (q = 0, 1) or lo1 (q = 2, 3)
    bit 2         bit 8 * q + v of hi

So k is a multiple of 32, n one of 64, and T one of 64 that divides n. Example: row 9, column 3 is
in unit 5, with q = 0 and v = 5: bits 10 and 11 of lo0 and bit 5 of hi.

A scale byte 8 * e + m is (8 + m) * 2**(e - 14), 0 is 0. Scales are below 32, and not below 2**-10
unless they are 0: bytes but 0 and 8 to 127 are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from firesteel.errors import CheckpointError, InvalidArgumentError, UnsupportedError
from firesteel.formats.base import (
    Format,
    QuantizedMatrix,
    Scheme,
    TensorHeader,
    group_count,
    scales_to_float,
)
from firesteel.formats.bits import pack_stream, unpack_stream
from firesteel.formats.stored import (
    check_headers,
    check_matrix,
    check_tensors,
    config_value,
    header_of,
    optional_value,
)

__all__ = [
    "BLOCK_ROWS",
    "LARGEST_BYTE",
    "SCALE_LIMIT",
    "SMALLEST_SCALE",
    "Nf3",
    "encode_scales",
    "nf3_scheme",
]

BLOCK_ROWS = 64
"""Rows that units have codes of, and the narrowest tile."""
SCALE_LIMIT = 32.0
"""Scales are below it; the largest is 30."""
LARGEST_BYTE = 127
SMALLEST_SCALE = 2.0**-10
"""The smallest but 0."""

_LAYOUT = "nf3_2p1"
_GROUP_SIZE = 32
# 4 x 2 rows, 16 and 8 apart, by 2 x 2 columns, 8 and 1 apart.
_UNIT_CODES = 32
_SMALLEST_BYTE = 8
_TILE = "tile-"


class Nf3(Format[QuantizedMatrix]):
    """NF3 in the layout `nf3_2p1`, one expert at a time."""

    name = "nf3"
    title = "NF3 (nf3_2p1)"
    has_rows = False

    def claims(self, config: Mapping[str, Any]) -> bool:
        return config.get("quant_method") == "nf3"

    def marker(self) -> str:
        return "codes"

    def recognizes(self, suffixes: frozenset[str]) -> bool:
        # Either tells it, so that a missing one is named.
        return not suffixes.isdisjoint(("codes", "scales"))

    def optional(self) -> frozenset[str]:
        return frozenset()

    def scheme(
        self, config: Mapping[str, Any], layer: str, stored: Mapping[str, TensorHeader]
    ) -> Scheme:
        layout = optional_value(config, "format", _LAYOUT)
        if layout != _LAYOUT:
            raise UnsupportedError(f"NF3 format: got {layout!r}, supported is {_LAYOUT!r}")
        group_size = optional_value(config, "group_size", _GROUP_SIZE)
        if group_size != _GROUP_SIZE:
            raise UnsupportedError(f"NF3 group_size: got {group_size}, supported is {_GROUP_SIZE}")
        tile_width = config_value(config, "tile_width", int)
        header_of(layer, stored, "codes")
        n, groups = header_of(layer, stored, "scales").shape
        try:
            scheme = nf3_scheme(n, _GROUP_SIZE * groups, tile_width)
        except CheckpointError as error:
            raise CheckpointError(f"{layer}: {error}") from error
        check_headers(layer, stored=stored, expected=self.tensors(scheme))
        return scheme

    def tensors(self, scheme: Scheme) -> dict[str, TensorHeader]:
        units = scheme.n * scheme.k // _UNIT_CODES
        return {
            "codes": TensorHeader((units, 3), torch.int32),
            "scales": TensorHeader((scheme.n, scheme.num_groups), torch.uint8),
        }

    def unpack(self, scheme: Scheme, stored: Mapping[str, Tensor]) -> QuantizedMatrix:
        check_tensors(stored, self.tensors(scheme))
        wrong = _wrong_scale(stored["scales"])
        if wrong:
            raise CheckpointError(f"scales{wrong}")
        return QuantizedMatrix(
            codes=_matrix_of(_unit_codes(stored["codes"]), scheme),
            scales=stored["scales"].clone(),
        )

    def pack(self, scheme: Scheme, matrix: QuantizedMatrix) -> dict[str, Tensor]:
        check_matrix(scheme, matrix)
        wrong = _wrong_scale(matrix.scales)
        if wrong:
            raise InvalidArgumentError(f"matrix.scales{wrong}")
        codes = _units_of(matrix.codes, scheme)
        words = [pack_stream(codes & 3, 2), pack_stream(codes >> 2, 1)]
        return {"codes": torch.cat(words, dim=-1), "scales": matrix.scales.clone()}

    def config(self, scheme: Scheme, ignore: Sequence[str] = ()) -> dict[str, Any]:
        return {
            "quant_method": "nf3",
            "format": _LAYOUT,
            "group_size": _GROUP_SIZE,
            "tile_width": _tile_width(scheme),
            "ignore": list(ignore),
        }


def nf3_scheme(n: int, k: int, tile_width: int = BLOCK_ROWS) -> Scheme:
    """The scheme of a matrix `[n, k]`.

    Raises
        CheckpointError: the layout has no place for such a matrix in tiles of that width.
    """
    group_count(k, _GROUP_SIZE)
    if n <= 0 or n % BLOCK_ROWS:
        raise CheckpointError(
            f"n: got {n}, must be a multiple of {BLOCK_ROWS} (the rows of a unit's block)"
        )
    if tile_width <= 0 or tile_width % BLOCK_ROWS or n % tile_width:
        raise CheckpointError(
            f"tile_width: got {tile_width}, must be a multiple of {BLOCK_ROWS} that divides n = {n}"
        )
    return Scheme(
        format=Nf3.name,
        element="nf3",
        n=n,
        k=k,
        group_size=_GROUP_SIZE,
        scale="e5m3",
        layout=f"{_TILE}{tile_width}",
    )


def encode_scales(scales: Tensor) -> Tensor:
    """Scale bytes of fp32 `scales`, 0 to 32: cut to three bits of mantissa, 3.14 to 3, 31.9 to 30.

    A sixteenth is rounded to fp16 first, so 2.9999 is 3; but nothing reaches 32. What is above 0 is
    at least 2**-10.

    Raises
        InvalidArgumentError: a scale is below 0, 32 or more, or NaN.
    """
    is_right = (scales >= 0) & (scales < SCALE_LIMIT)
    if not bool(is_right.all()):
        value = scales[~is_right][0].item()
        raise InvalidArgumentError(
            f"scale: got {value:.6g}, must be at least 0 and below {SCALE_LIMIT:g}"
        )
    raised = torch.where(scales == 0, 0.0, scales.clamp(min=SMALLEST_SCALE))
    bits = (raised / 16).half().view(torch.int16) >> 7
    return bits.clamp(max=LARGEST_BYTE).to(torch.uint8)


def _wrong_scale(scales: Tensor) -> str:
    """Index and value of the first byte that is no scale of the format; "" where all are."""
    is_wrong = (scales > LARGEST_BYTE) | ((scales > 0) & (scales < _SMALLEST_BYTE))
    if not bool(is_wrong.any()):
        return ""
    index = is_wrong.nonzero()[0].tolist()
    byte = scales[tuple(index)]
    value = scales_to_float(byte, "e5m3").item()
    return (
        f"{index}: got byte {int(byte)} ({value:.6g}), must be 0 or "
        f"{_SMALLEST_BYTE} to {LARGEST_BYTE} (2**-10 to 30)"
    )


def _tile_width(scheme: Scheme) -> int:
    return int(scheme.layout.removeprefix(_TILE))


def _units_of(codes: Tensor, scheme: Scheme) -> Tensor:
    """Codes `[n, k]` as the units that hold them: uint8 `[n*k/32, 32]`, q and v rising."""
    blocks = _tile_width(scheme) // BLOCK_ROWS
    # Rows are tile, block, q, v's high bit, thread; columns are step, v's middle bit, thread, v's
    # low bit.
    rows, columns = (-1, blocks, 4, 2, 8), (scheme.k // 16, 2, 4, 2)
    split = codes.unflatten(1, columns).unflatten(0, rows)
    return split.permute(0, 5, 1, 4, 7, 2, 3, 6, 8).reshape(-1, _UNIT_CODES)


def _matrix_of(units: Tensor, scheme: Scheme) -> Tensor:
    """The inverse of `_units_of`, contiguous."""
    blocks = _tile_width(scheme) // BLOCK_ROWS
    split = units.view(-1, scheme.k // 16, blocks, 8, 4, 4, 2, 2, 2)
    codes = split.permute(0, 2, 5, 6, 3, 1, 7, 4, 8)
    return codes.reshape(scheme.n, scheme.k)


def _unit_codes(words: Tensor) -> Tensor:
    """Words int32 `[units, 3]` to codes uint8 `[units, 32]`."""
    low = unpack_stream(words[:, :2], 2, _UNIT_CODES)
    return low | (unpack_stream(words[:, 2:], 1, _UNIT_CODES) << 2)
