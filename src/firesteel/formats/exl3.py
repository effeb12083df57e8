"""EXL3 as exllamav3 stores it: tiles of a trellis in a rotated frame (`trellis` has the numbers).

    trellis   int16 [k/16, n/16, 16*b]  b bits a weight, which may differ from layer to layer
    suh, svh  fp16 [k], fp16 [n]        scales; in older files su, sv: int16 [k/16], [n/16], signs
    mcg       int32 []                  the multiplier of that codebook; or mul1, or neither (3INST)

n and k are padded to multiples of 128. Layers that stay as they are have no trellis; the config
lists what was stored how, and the tensors say it too, so only its `quant_method` is read.

Source: exllamav3 0.0.4x, modules/quant/exl3.py, for names and types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from firesteel.errors import CheckpointError, UnsupportedError
from firesteel.formats.base import Format, Scheme, TensorHeader
from firesteel.formats.stored import check_headers, check_scales, check_tensors, header_of
from firesteel.formats.trellis import (
    BLOCK,
    MULTIPLIERS,
    TILE,
    Codebook,
    TrellisCode,
    scales_to_sign_bits,
    sign_bits_to_scales,
)
from firesteel.formats.trellis_matrix import TrellisMatrix, TrellisScheme, padded, trellis_scheme

__all__ = ["Exl3"]

_SIGNS = "signs"
# By layout: suffixes of the scales of inputs and of outputs.
_SCALES = {"": ("suh", "svh"), _SIGNS: ("su", "sv")}
_MARKERS: tuple[Codebook, ...] = ("mcg", "mul1")
_SUFFIXES = ("trellis", "suh", "svh", "su", "sv", *_MARKERS)


class Exl3(Format[TrellisMatrix]):
    """EXL3 of every rate and codebook."""

    name = "exl3"
    title = "EXL3"
    has_rows = False

    def claims(self, config: Mapping[str, Any]) -> bool:
        return config.get("quant_method") == self.name

    def marker(self) -> str:
        return "trellis"

    def recognizes(self, suffixes: frozenset[str]) -> bool:
        # Any of them tells it, so that a missing one is named.
        return not suffixes.isdisjoint(_SUFFIXES)

    def optional(self) -> frozenset[str]:
        return frozenset()

    def scheme(
        self, config: Mapping[str, Any], layer: str, stored: Mapping[str, TensorHeader]
    ) -> Scheme:
        tiles_k, tiles_n, words = header_of(layer, stored, "trellis", dims=3).shape
        k, n = TILE * tiles_k, TILE * tiles_n
        if k % BLOCK or n % BLOCK:
            raise CheckpointError(
                f"{layer}.trellis: got shape {[tiles_k, tiles_n, words]}, the first two must be "
                f"multiples of {BLOCK // TILE}"
            )
        try:
            code = TrellisCode(words / 16, _codebook(layer, stored))
        except UnsupportedError as error:
            raise UnsupportedError(
                f"{layer}.trellis: got shape {[tiles_k, tiles_n, words]}, "
                f"which has 16 * {words / 16:g} words a tile; {error}"
            ) from error
        layout = _SIGNS if "su" in stored or "sv" in stored else ""
        scheme = trellis_scheme(n, k, code, layout)
        check_headers(layer, stored=stored, expected=self.tensors(scheme), optional=self.optional())
        return scheme

    def tensors(self, scheme: Scheme) -> dict[str, TensorHeader]:
        assert isinstance(scheme, TrellisScheme)
        headers = {"trellis": TensorHeader(scheme.tiles, torch.int16)}
        for suffix, size in zip(_SCALES[scheme.layout], (scheme.k, scheme.n), strict=True):
            size = padded(size)
            is_sign = scheme.layout == _SIGNS
            headers[suffix] = (
                TensorHeader((size // 16,), torch.int16)
                if is_sign
                else TensorHeader((size,), torch.float16)
            )
        if scheme.code.codebook in _MARKERS:
            headers[scheme.code.codebook] = TensorHeader((), torch.int32)
        return headers

    def unpack(self, scheme: Scheme, stored: Mapping[str, Tensor]) -> TrellisMatrix:
        assert isinstance(scheme, TrellisScheme)
        check_tensors(stored, self.tensors(scheme))
        codebook = scheme.code.codebook
        if codebook in _MARKERS:
            value = int(stored[codebook]) & 0xFFFFFFFF
            if value != MULTIPLIERS[codebook]:
                raise CheckpointError(
                    f"{codebook}: got {value:#x}, must be {MULTIPLIERS[codebook]:#x}, "
                    "the multiplier of that codebook"
                )
        scales: list[Tensor] = []
        for suffix in _SCALES[scheme.layout]:
            if scheme.layout == _SIGNS:
                scales.append(sign_bits_to_scales(stored[suffix]))
            else:
                check_scales(suffix, stored[suffix], scheme.scale)
                scales.append(stored[suffix].clone())
        return TrellisMatrix(trellis=stored["trellis"].clone(), suh=scales[0], svh=scales[1])

    def pack(self, scheme: Scheme, matrix: TrellisMatrix) -> dict[str, Tensor]:
        assert isinstance(scheme, TrellisScheme)
        tensors = {"trellis": matrix.trellis.clone()}
        scales = zip(_SCALES[scheme.layout], (matrix.suh, matrix.svh), strict=True)
        for suffix, each in scales:
            is_sign = scheme.layout == _SIGNS
            tensors[suffix] = scales_to_sign_bits(each) if is_sign else each.clone()
        codebook = scheme.code.codebook
        if codebook in _MARKERS:
            value = torch.tensor(MULTIPLIERS[codebook], dtype=torch.int64)
            tensors[codebook] = value.to(torch.int32)
        check_tensors(tensors, self.tensors(scheme))
        return tensors

    def config(self, scheme: Scheme, ignore: Sequence[str] = ()) -> dict[str, Any]:
        del ignore  # A layer without a trellis is plain; the config has no place for it.
        assert isinstance(scheme, TrellisScheme)
        return {
            "quant_method": self.name,
            "bits": scheme.code.bits,
            "codebook": scheme.code.codebook,
        }


def _codebook(layer: str, stored: Mapping[str, TensorHeader]) -> Codebook:
    """What the markers say.

    Raises
        CheckpointError: both are there.
    """
    found: list[Codebook] = [marker for marker in _MARKERS if marker in stored]
    if len(found) > 1:
        raise CheckpointError(f"{layer}: has {' and '.join(found)}, must have at most one of them")
    return found[0] if found else "3inst"
