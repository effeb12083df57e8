"""MXFP4 as gpt-oss stores it (`quant_method: "mxfp4"`), one expert at a time.

    blocks uint8 [n, k/32, 16]  two E2M1 codes a byte, even column low; one block a scale
    scales uint8 [n, k/32]      E8M0: the scale is 2**(byte - 127)

The file holds all experts in one tensor, `..._blocks [E, n, k/32, 16]`; the loader hands over the
slice of one. Rows of `gate_up_proj` alternate gate and up, which is the model's business.

Source: transformers 5.24, integrations/mxfp4.py; OCP Microscaling Formats v1.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from firesteel.formats.base import (
    Format,
    QuantizedMatrix,
    Scheme,
    TensorHeader,
    group_count,
)
from firesteel.formats.bits import pack_nibbles, unpack_nibbles
from firesteel.formats.stored import (
    check_headers,
    check_matrix,
    check_scales,
    check_tensors,
    header_of,
)

__all__ = ["Mxfp4GptOss"]

_GROUP_SIZE = 32
_BLOCK_BYTES = _GROUP_SIZE // 2


class Mxfp4GptOss(Format[QuantizedMatrix]):
    """MXFP4 experts of gpt-oss."""

    name = "mxfp4-gpt-oss"
    title = "MXFP4 (gpt-oss)"

    def claims(self, config: Mapping[str, Any]) -> bool:
        return config.get("quant_method") == "mxfp4"

    def marker(self) -> str:
        return "blocks"

    def optional(self) -> frozenset[str]:
        return frozenset()

    def scheme(
        self, config: Mapping[str, Any], layer: str, stored: Mapping[str, TensorHeader]
    ) -> Scheme:
        n, groups, _ = header_of(layer, stored, "blocks", dims=3).shape
        k = groups * _GROUP_SIZE
        group_count(k, _GROUP_SIZE)
        scheme = Scheme(
            format=self.name, element="e2m1", n=n, k=k, group_size=_GROUP_SIZE, scale="e8m0"
        )
        check_headers(layer, stored=stored, expected=self.tensors(scheme))
        return scheme

    def tensors(self, scheme: Scheme) -> dict[str, TensorHeader]:
        n, groups = scheme.n, scheme.num_groups
        return {
            "blocks": TensorHeader((n, groups, _BLOCK_BYTES), torch.uint8),
            "scales": TensorHeader((n, groups), torch.uint8),
        }

    def unpack(self, scheme: Scheme, stored: Mapping[str, Tensor]) -> QuantizedMatrix:
        check_tensors(stored, self.tensors(scheme))
        check_scales("scales", stored["scales"], scheme.scale)
        return QuantizedMatrix(
            codes=unpack_nibbles(stored["blocks"].flatten(-2)), scales=stored["scales"].clone()
        )

    def pack(self, scheme: Scheme, matrix: QuantizedMatrix) -> dict[str, Tensor]:
        check_matrix(scheme, matrix)
        blocks = pack_nibbles(matrix.codes).unflatten(-1, (scheme.num_groups, _BLOCK_BYTES))
        return {"blocks": blocks, "scales": matrix.scales.clone()}

    def config(self, scheme: Scheme, ignore: Sequence[str] = ()) -> dict[str, Any]:
        return {"quant_method": "mxfp4", "modules_to_not_convert": list(ignore)}
