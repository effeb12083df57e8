"""Checks on stored tensors and config entries that every format makes, in one form of message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from firesteel.errors import CheckpointError, InvalidArgumentError, UnsupportedError
from firesteel.formats.base import (
    ELEMENTS,
    SCALE_DTYPES,
    Divisor,
    Multiplier,
    QuantizedMatrix,
    ScaleType,
    Scheme,
    TensorHeader,
    scales_to_float,
)

__all__ = [
    "GROUP_SIZES",
    "check_group_index",
    "check_group_size",
    "check_headers",
    "check_matrix",
    "check_scales",
    "check_tensors",
    "config_value",
    "dtype_name",
    "header_of",
    "int_element",
    "optional_value",
    "scale_type_of",
    "transposed",
    "trivial_group_index",
]

GROUP_SIZES = (16, 32, 64, 128, 256, 512, 1024)
"""Group sizes of the integer formats; one scale a row is the other choice."""

T = TypeVar("T")

# Of the linear layer itself, or of what an attention layer caches: not of the weight.
_NEIGHBOURS = frozenset({"bias", "k_scale", "v_scale", "q_scale", "prob_scale"})


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.int32` as "int32"."""
    return str(dtype).removeprefix("torch.")


def check_headers(
    layer: str,
    *,
    stored: Mapping[str, TensorHeader],
    expected: Mapping[str, TensorHeader],
    optional: frozenset[str] = frozenset(),
) -> None:
    """The stored tensors of `layer` are those expected, in shape and dtype.

    Raises
        CheckpointError: a tensor is missing, is not known to the scheme, or has another shape or
            dtype; the message names it as `layer.suffix`.
    """
    prefix = f"{layer}." if layer else ""
    for suffix, want in expected.items():
        if suffix not in stored:
            raise CheckpointError(f"{prefix}{suffix}: missing, expected {_describe(want)}")
        if stored[suffix] != want:
            raise CheckpointError(
                f"{prefix}{suffix}: got {_describe(stored[suffix])}, expected {_describe(want)}"
            )
    for suffix in stored:
        if suffix not in expected and suffix not in optional and suffix not in _NEIGHBOURS:
            raise CheckpointError(
                f"{prefix}{suffix}: unexpected {_describe(stored[suffix])}, "
                f"a layer of this scheme has {sorted(expected)}"
            )


def check_tensors(stored: Mapping[str, Tensor], expected: Mapping[str, TensorHeader]) -> None:
    """The tensors that a layer must have are there, in shape and dtype; others are left alone.

    Raises
        CheckpointError: one is missing or has another shape or dtype.
    """
    headers = {
        suffix: TensorHeader(tuple(tensor.shape), tensor.dtype)
        for suffix, tensor in stored.items()
        if suffix in expected
    }
    check_headers("", stored=headers, expected=expected)


def check_matrix(scheme: Scheme, matrix: QuantizedMatrix) -> None:
    """`matrix` has what `scheme` says: shapes, dtypes, and codes in range.

    Raises
        InvalidArgumentError: it does not; the message names the field.
    """
    n, k, groups = scheme.n, scheme.k, scheme.num_groups
    is_int = ELEMENTS[scheme.element].values is None
    wanted = {
        "codes": ((n, k), torch.uint8),
        "scales": ((n, groups), SCALE_DTYPES[scheme.scale]),
        "zero_points": ((n, groups), torch.uint8) if scheme.has_zero_points and is_int else None,
        "group_index": ((k,), torch.int32) if scheme.has_group_index else None,
    }
    for field, want in wanted.items():
        tensor: Tensor | None = getattr(matrix, field)
        got = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
        if got != want:
            raise InvalidArgumentError(f"matrix.{field}: got {got}, scheme wants {want}")
    for field in ("codes", "zero_points"):
        tensor = getattr(matrix, field)
        if tensor is not None and scheme.bits < 8 and int(tensor.max()) >> scheme.bits:
            raise InvalidArgumentError(
                f"matrix.{field}: got {int(tensor.max())}, must be below {1 << scheme.bits}"
            )
    kind = {type(None): "none", Multiplier: "multiplier", Divisor: "divisor"}
    if kind[type(matrix.global_scale)] != scheme.global_scale:
        raise InvalidArgumentError(
            f"matrix.global_scale: got {matrix.global_scale}, scheme wants {scheme.global_scale!r}"
        )


def header_of(
    layer: str, stored: Mapping[str, TensorHeader], suffix: str, *, dims: int = 2
) -> TensorHeader:
    """The header of one tensor that a scheme is derived from.

    Raises
        CheckpointError: it is missing, empty, or has another number of dimensions.
    """
    if suffix not in stored:
        raise CheckpointError(f"{layer}.{suffix}: missing, got only {sorted(stored)}")
    header = stored[suffix]
    if len(header.shape) != dims or 0 in header.shape:
        raise CheckpointError(
            f"{layer}.{suffix}: got {_describe(header)}, expected {dims} dimensions, none of them 0"
        )
    return header


def scale_type_of(
    layer: str, suffix: str, header: TensorHeader, allowed: Sequence[ScaleType]
) -> ScaleType:
    """The type of stored scales, by their dtype.

    Raises
        CheckpointError: not one of those allowed.
    """
    for scale in allowed:
        if SCALE_DTYPES[scale] == header.dtype:
            return scale
    names = [dtype_name(SCALE_DTYPES[scale]) for scale in allowed]
    raise CheckpointError(
        f"{layer}.{suffix}: got dtype {dtype_name(header.dtype)}, expected one of {names}"
    )


def config_value(config: Mapping[str, Any], key: str, kind: type[T], *, where: str = "") -> T:
    """`config[key]`, which must be there and be of `kind`.

    Raises
        CheckpointError: it is missing or of another class.
    """
    name = f"quantization_config{where}.{key}"
    if key not in config:
        raise CheckpointError(f"{name}: missing, must be {kind.__name__}")
    value = config[key]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise CheckpointError(f"{name}: got {value!r}, must be {kind.__name__}")
    return value


def optional_value(config: Mapping[str, Any], key: str, default: T, *, where: str = "") -> T:
    """`config[key]`, which must be of the class of `default`; that where it is missing or null.

    Raises
        CheckpointError: it is of another class.
    """
    if config.get(key) is None:
        return default
    return config_value(config, key, type(default), where=where)


def int_element(format_name: str, bits: int, allowed: Sequence[int] = (3, 4, 8)) -> str:
    """The element of integers of this width.

    Raises
        UnsupportedError: firesteel does not read that width of this format.
    """
    if bits not in allowed:
        raise UnsupportedError(f"{format_name} bits: got {bits}, supported are {list(allowed)}")
    return f"int{bits}"


def check_group_size(format_name: str, group_size: int, k: int) -> int:
    """The group size in columns: -1 (one scale a row) becomes `k`.

    Raises
        UnsupportedError: not one that firesteel reads.
    """
    if group_size == -1:
        return k
    if group_size not in GROUP_SIZES and group_size != k:
        raise UnsupportedError(
            f"{format_name} group_size: got {group_size}, supported are {list(GROUP_SIZES)} "
            f"and -1 (one scale a row)"
        )
    return group_size


def check_scales(suffix: str, scales: Tensor, scale: ScaleType) -> None:
    """Every scale is a finite number.

    Raises
        CheckpointError: a scale is NaN or infinite; the message gives its index and value.
    """
    numbers = scales_to_float(scales, scale)
    finite = torch.isfinite(numbers)
    if not bool(finite.all()):
        index = (~finite).nonzero()[0].tolist()
        value = numbers[tuple(index)].item()
        raise CheckpointError(f"{suffix}{index}: got {value}, must be finite")


def transposed(matrix: Tensor) -> Tensor:
    """The transpose of `[a, b]` in memory of its own, with the strides of a new `[b, a]`.

    `matrix.t().contiguous()` is the matrix itself, oddly strided, where `a` or `b` is 1.
    """
    return matrix.t().clone(memory_format=torch.contiguous_format)


def trivial_group_index(k: int, group_size: int, device: torch.device | None = None) -> Tensor:
    """The group of each column where groups are runs of columns: int32 `[k]`."""
    return (torch.arange(k, device=device) // group_size).int()


def check_group_index(suffix: str, index: Tensor, group_size: int) -> None:
    """`index`, int32 `[k]`, gives every group exactly `group_size` columns.

    Raises
        CheckpointError: a column names no group, or a group has another number of columns.
    """
    groups = index.numel() // group_size
    low, high = int(index.min()), int(index.max())
    if low < 0 or high >= groups:
        wrong = low if low < 0 else high
        raise CheckpointError(f"{suffix}: got group {wrong}, must be 0 to {groups - 1}")
    counts = torch.bincount(index.long(), minlength=groups)
    if not bool((counts == group_size).all()):
        group = int((counts != group_size).nonzero()[0])
        raise CheckpointError(
            f"{suffix}: got {int(counts[group])} columns in group {group}, must be {group_size}"
        )


def _describe(header: TensorHeader) -> str:
    return f"{dtype_name(header.dtype)} {list(header.shape)}"
