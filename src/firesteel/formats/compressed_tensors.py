"""Integers as compressed-tensors stores them (`pack-quantized`), 3, 4 and 8 bits.

    weight_packed      int32 [n, w]      codes of each row, w words
    weight_scale       float [n, g]      g = 1 where a row has one scale
    weight_shape       int64 [2]         n and k
    weight_zero_point  int32 [w', g]     zero points of each column, w' words; only if asymmetric
    weight_g_idx       int32 [k]         group of each column; only with actorder "group"

A code is the signed integer plus `2**(bits - 1)`; zero points likewise. Releases from 0.18 on pack
one bit stream, earlier ones 32 // bits codes a word; that differs for 3 bits only, and shows in the
number of words.

Source: compressed-tensors 0.17 and 0.20, compressors/pack_quantized/; checked against its files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from firesteel.errors import CheckpointError, UnsupportedError
from firesteel.formats.base import (
    SCALE_DTYPES,
    Format,
    QuantizedMatrix,
    Scheme,
    TensorHeader,
    group_count,
)
from firesteel.formats.bits import (
    WORD_BITS,
    pack_slots,
    pack_stream,
    slot_words,
    stream_words,
    unpack_slots,
    unpack_stream,
)
from firesteel.formats.config_groups import (
    ConfigGroup,
    config_for_group,
    group_of_layer,
    is_compressed,
)
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
)

__all__ = ["CompressedTensors"]

STORED_AS = ("pack-quantized",)
_STREAM = "stream"
_SLOTS = "ten-a-word"
_STREAM_SINCE = (0, 18)

_WORDS: dict[str, Callable[[int, int], int]] = {_STREAM: stream_words, _SLOTS: slot_words}
_PACK: dict[str, Callable[[Tensor, int], Tensor]] = {_STREAM: pack_stream, _SLOTS: pack_slots}
_UNPACK: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    _STREAM: unpack_stream,
    _SLOTS: unpack_slots,
}


class CompressedTensors(Format[QuantizedMatrix]):
    """`pack-quantized` of compressed-tensors (llmcompressor), group and channel strategies."""

    name = "compressed-tensors"
    title = "compressed-tensors pack-quantized"

    def claims(self, config: Mapping[str, Any]) -> bool:
        return is_compressed(config, STORED_AS)

    def marker(self) -> str:
        return "weight_packed"

    def recognizes(self, suffixes: frozenset[str]) -> bool:
        return {"weight_packed", "weight_shape"} <= suffixes

    def optional(self) -> frozenset[str]:
        return frozenset({"input_scale", "input_zero_point", "output_scale", "input_global_scale"})

    def scheme(
        self, config: Mapping[str, Any], layer: str, stored: Mapping[str, TensorHeader]
    ) -> Scheme:
        group = group_of_layer(config, layer, STORED_AS)
        _check_supported(group)
        bits = config_value(group.weights, "num_bits", int, where=f".{group.name}.weights")
        element = int_element("compressed-tensors", bits)
        packed = header_of(layer, stored, "weight_packed")
        scales = header_of(layer, stored, "weight_scale")
        n, words = packed.shape
        version = _version_layout(config)
        if _is_channel(group):
            layout = _channel_layout(words, bits, version)
            k = words * WORD_BITS // bits if layout == _STREAM else _slots_k(words, bits)
            group_size = k
        else:
            group_size = config_value(
                group.weights, "group_size", int, where=f".{group.name}.weights"
            )
            k = scales.shape[1] * group_size
            layout = _grouped_layout(layer, words, k=k, bits=bits, version=version)
        group_size = check_group_size("compressed-tensors", group_size, k)
        group_count(k, group_size)
        scheme = Scheme(
            format=self.name,
            element=element,
            n=n,
            k=k,
            group_size=group_size,
            scale=scale_type_of(layer, "weight_scale", scales, ("bf16", "fp16", "fp32")),
            has_zero_points=not optional_value(
                group.weights, "symmetric", True, where=f".{group.name}.weights"
            ),
            has_group_index=group.weights.get("actorder") == "group" or "weight_g_idx" in stored,
            layout=layout,
        )
        check_headers(layer, stored=stored, expected=self.tensors(scheme), optional=self.optional())
        return scheme

    def tensors(self, scheme: Scheme) -> dict[str, TensorHeader]:
        n, k, groups, bits = scheme.n, scheme.k, scheme.num_groups, scheme.bits
        count = _WORDS[scheme.layout]
        headers = {
            "weight_packed": TensorHeader((n, count(k, bits)), torch.int32),
            "weight_scale": TensorHeader((n, groups), SCALE_DTYPES[scheme.scale]),
            "weight_shape": TensorHeader((2,), torch.int64),
        }
        if scheme.has_zero_points:
            headers["weight_zero_point"] = TensorHeader((count(n, bits), groups), torch.int32)
        if scheme.has_group_index:
            headers["weight_g_idx"] = TensorHeader((k,), torch.int32)
        return headers

    def unpack(self, scheme: Scheme, stored: Mapping[str, Tensor]) -> QuantizedMatrix:
        check_tensors(stored, self.tensors(scheme))
        shape = stored["weight_shape"].tolist()
        if shape != [scheme.n, scheme.k]:
            raise CheckpointError(
                f"weight_shape: got {shape}, must be {[scheme.n, scheme.k]} as the shapes of "
                f"weight_packed and weight_scale say"
            )
        check_scales("weight_scale", stored["weight_scale"], scheme.scale)
        unpack = _UNPACK[scheme.layout]
        zeros = index = None
        if scheme.has_zero_points:
            words = stored["weight_zero_point"].t()
            zeros = transposed(unpack(words, scheme.bits, scheme.n))
        if scheme.has_group_index:
            index = stored["weight_g_idx"].clone()
            check_group_index("weight_g_idx", index, scheme.group_size)
        return QuantizedMatrix(
            codes=unpack(stored["weight_packed"], scheme.bits, scheme.k),
            scales=stored["weight_scale"].clone(),
            zero_points=zeros,
            group_index=index,
        )

    def pack(self, scheme: Scheme, matrix: QuantizedMatrix) -> dict[str, Tensor]:
        check_matrix(scheme, matrix)
        pack = _PACK[scheme.layout]
        tensors = {
            "weight_packed": pack(matrix.codes, scheme.bits),
            "weight_scale": matrix.scales.clone(),
            "weight_shape": torch.tensor([scheme.n, scheme.k], dtype=torch.int64),
        }
        if matrix.zero_points is not None:
            words = pack(matrix.zero_points.t(), scheme.bits)
            tensors["weight_zero_point"] = transposed(words)
        if matrix.group_index is not None:
            tensors["weight_g_idx"] = matrix.group_index.clone()
        return tensors

    def config(self, scheme: Scheme, ignore: Sequence[str] = ()) -> dict[str, Any]:
        is_channel = scheme.group_size not in GROUP_SIZES
        weights = {
            "num_bits": scheme.bits,
            "type": "int",
            "strategy": "channel" if is_channel else "group",
            "group_size": None if is_channel else scheme.group_size,
            "symmetric": not scheme.has_zero_points,
            "actorder": "group" if scheme.has_group_index else None,
        }
        config = config_for_group(STORED_AS[0], weights, ignore)
        config["version"] = "0.17.0" if scheme.layout == _SLOTS else "0.18.0"
        return config


def _check_supported(group: ConfigGroup) -> None:
    """Refuse options of the format that firesteel does not read.

    Raises
        UnsupportedError: floating-point codes, or another strategy.
    """
    weights = group.weights
    if weights.get("type", "int") != "int":
        raise UnsupportedError(
            f"pack-quantized weights.type: got {weights.get('type')!r}, supported is 'int'"
        )
    if weights.get("strategy") not in ("group", "channel", None):
        raise UnsupportedError(
            f"pack-quantized weights.strategy: got {weights.get('strategy')!r}, "
            "supported are ['channel', 'group']"
        )


def _is_channel(group: ConfigGroup) -> bool:
    """One scale a row: the strategy says so, or without one a group size of -1."""
    strategy = group.weights.get("strategy")
    return strategy == "channel" or (strategy is None and group.weights.get("group_size") == -1)


def _version_layout(config: Mapping[str, Any]) -> str | None:
    """The layout that the release named in the config writes; None where none is named."""
    parts = optional_value(config, "version", "").split(".")[:2]
    if len(parts) < 2 or not all(part.isdecimal() for part in parts):
        return None
    return _STREAM if tuple(int(part) for part in parts) >= _STREAM_SINCE else _SLOTS


def _grouped_layout(layer: str, words: int, *, k: int, bits: int, version: str | None) -> str:
    """The layout by which `k` codes take `words` words; where both do, that of the release.

    Words that fit neither give the stream, whose shapes are then compared and refused.

    Raises
        CheckpointError: both fit and the config names no release.
    """
    fitting = [layout for layout in (_STREAM, _SLOTS) if _WORDS[layout](k, bits) == words]
    if WORD_BITS % bits == 0 or not fitting:
        return _STREAM
    if len(fitting) == 1:
        return fitting[0]
    if version is None:
        raise CheckpointError(
            f"quantization_config.version: missing, needed to tell how {layer}.weight_packed "
            f"packs {k} codes of {bits} bits into {words} words"
        )
    return version


def _channel_layout(words: int, bits: int, version: str | None) -> str:
    """The layout of rows with one scale, where only the number of words is known.

    A row of whole units of 32 codes takes a multiple of `bits` words as a stream. `unpack` compares
    the k that follows with `weight_shape`.
    """
    if WORD_BITS % bits == 0 or version == _STREAM:
        return _STREAM
    return _SLOTS if version == _SLOTS or words % bits else _STREAM


def _slots_k(words: int, bits: int) -> int:
    """The multiple of 32 that fills `words` words of slots."""
    return words * (WORD_BITS // bits) // WORD_BITS * WORD_BITS
