"""MXFP4 as compressed-tensors stores it (`mxfp4-pack-quantized`).

    weight_packed uint8 [n, k/2]   two E2M1 codes a byte, even column low
    weight_scale  uint8 [n, k/32]  E8M0: the scale is 2**(byte - 127)

Source: compressed-tensors 0.20, compressors/mxfp4/; OCP Microscaling Formats v1.0; checked against
files of llmcompressor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from firesteel.formats.base import Scheme, TensorHeader
from firesteel.formats.config_groups import config_for_group, group_of_layer, is_compressed
from firesteel.formats.fp4 import Fp4Format, Fp4Layout
from firesteel.formats.stored import check_headers

__all__ = ["Mxfp4"]

STORED_AS = ("mxfp4-pack-quantized",)
_LAYOUT = Fp4Layout(
    format="mxfp4", codes="weight_packed", scales="weight_scale", group_size=32, scale="e8m0"
)


class Mxfp4(Fp4Format):
    """MXFP4 weights of compressed-tensors; activations stay 16-bit."""

    layout = _LAYOUT
    name = _LAYOUT.format
    title = "MXFP4 (compressed-tensors)"

    def claims(self, config: Mapping[str, Any]) -> bool:
        return is_compressed(config, STORED_AS)

    def marker(self) -> str:
        return _LAYOUT.codes

    def recognizes(self, suffixes: frozenset[str]) -> bool:
        others = {"weight_shape", "weight_global_scale"}
        return {"weight_packed", "weight_scale"} <= suffixes and not others & suffixes

    def optional(self) -> frozenset[str]:
        return frozenset({"input_global_scale", "input_scale"})

    def scheme(
        self, config: Mapping[str, Any], layer: str, stored: Mapping[str, TensorHeader]
    ) -> Scheme:
        group = group_of_layer(config, layer, STORED_AS)
        scheme = _LAYOUT.scheme(layer, stored, group.weights.get("group_size"))
        check_headers(layer, stored=stored, expected=self.tensors(scheme), optional=self.optional())
        return scheme

    def config(self, scheme: Scheme, ignore: Sequence[str] = ()) -> dict[str, Any]:
        weights = {
            "num_bits": 4,
            "type": "float",
            "strategy": "group",
            "group_size": scheme.group_size,
            "scale_dtype": "torch.uint8",
        }
        return config_for_group(STORED_AS[0], weights, ignore)
