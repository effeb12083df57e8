"""NVFP4 as compressed-tensors stores it (`nvfp4-pack-quantized`).

    weight_packed        uint8 [n, k/2]         two E2M1 codes a byte, even column low
    weight_scale         float8_e4m3 [n, k/16]
    weight_global_scale  fp32 [1]               a divisor: W = value * (weight_scale / global)

`input_global_scale` belongs to quantised activations; it is kept and not read.

Source: compressed-tensors 0.20, compressors/nvfp4/; checked against files of llmcompressor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from firesteel.formats.base import Scheme, TensorHeader
from firesteel.formats.config_groups import config_for_group, group_of_layer, is_compressed
from firesteel.formats.fp4 import Fp4Format, Fp4Layout
from firesteel.formats.stored import check_headers

__all__ = ["Nvfp4"]

STORED_AS = ("nvfp4-pack-quantized",)
_LAYOUT = Fp4Layout(
    format="nvfp4",
    codes="weight_packed",
    scales="weight_scale",
    group_size=16,
    scale="e4m3",
    global_scale="weight_global_scale",
    global_scale_shape=(1,),
    global_scale_type="divisor",
)


class Nvfp4(Fp4Format):
    """NVFP4 weights of compressed-tensors, with or without quantised activations."""

    layout = _LAYOUT
    name = _LAYOUT.format
    title = "NVFP4 (compressed-tensors)"

    def claims(self, config: Mapping[str, Any]) -> bool:
        return is_compressed(config, STORED_AS)

    def marker(self) -> str:
        return _LAYOUT.codes

    def recognizes(self, suffixes: frozenset[str]) -> bool:
        return {"weight_packed", "weight_global_scale"} <= suffixes

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
            "strategy": "tensor_group",
            "group_size": scheme.group_size,
            "scale_dtype": "torch.float8_e4m3fn",
        }
        return config_for_group(STORED_AS[0], weights, ignore)
