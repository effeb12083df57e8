"""What a checkpoint format must say about one quantised matrix, and the numbers all formats share.

A format turns the tensors that a tool stored for one linear layer into a `QuantizedMatrix` (codes,
scales, zero points: integers and stored scales, nothing rounded) and back, both exactly. All that
differs between two files of one format is in a `Scheme`, which the format derives from the
checkpoint's config and checks against the stored shapes.

Axes: `n` is out_features, `k` is in_features, `g = k / group_size` is the number of scale groups.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from firesteel.errors import CheckpointError, UnsupportedError

__all__ = [
    "E2M1",
    "ELEMENTS",
    "NF3",
    "SCALE_DTYPES",
    "Divisor",
    "Element",
    "Format",
    "GlobalScale",
    "Matrix",
    "Multiplier",
    "QuantizedMatrix",
    "Scheme",
    "TensorHeader",
    "group_count",
    "scales_to_float",
]

ScaleType = Literal["bf16", "fp16", "fp32", "e4m3", "e8m0", "e5m3"]

SCALE_DTYPES: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "e4m3": torch.float8_e4m3fn,
    # Stored as the biased exponent; the value is 2**(byte - 127).
    "e8m0": torch.uint8,
    # Bits 7 to 14 of the fp16 of a sixteenth: five of exponent, three of mantissa, no sign.
    "e5m3": torch.uint8,
}


@dataclass(frozen=True, slots=True)
class Element:
    """How one code becomes a number.

    Without `values`, a code is an integer: number = code - zero point, where the zero point of a
    symmetric matrix is `2**(bits - 1)`. With `values`, number = values[code].

    With a `weight_dtype`, number * scale is rounded to it, and only then to the type asked for.
    """

    name: str
    bits: int
    values: tuple[float, ...] | None = None
    weight_dtype: torch.dtype | None = None

    @property
    def zero_point(self) -> int:
        """The code of zero in a symmetric matrix of integers."""
        return 1 << (self.bits - 1)


# OCP Microscaling Formats v1.0: sign, two exponent bits, one mantissa bit.
_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = Element("e2m1", 4, _E2M1_MAGNITUDES + tuple(-value for value in _E2M1_MAGNITUDES))

# Eight bf16 numbers: 0x3e03, 0x3eb6, 0x3f1b and 0x3f80, and the same negative.
_NF3_MAGNITUDES = (0.1279296875, 0.35546875, 0.60546875, 1.0)
NF3 = Element(
    name="nf3",
    bits=3,
    values=tuple(-value for value in reversed(_NF3_MAGNITUDES)) + _NF3_MAGNITUDES,
    weight_dtype=torch.bfloat16,
)

ELEMENTS: dict[str, Element] = {
    element.name: element
    for element in (Element("int3", 3), Element("int4", 4), Element("int8", 8), E2M1, NF3)
}


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """Shape and dtype of a stored tensor, known without reading its bytes."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor in the file."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Multiplier:
    """A matrix-wide fp32 scale that group scales are multiplied by."""

    value: Tensor

    def apply(self, scales: Tensor) -> Tensor:
        """fp32 group scales with the matrix-wide scale in them."""
        return scales * self.value


@dataclass(frozen=True, slots=True, eq=False)
class Divisor:
    """A matrix-wide fp32 scale that group scales are divided by."""

    value: Tensor

    def apply(self, scales: Tensor) -> Tensor:
        """fp32 group scales with the matrix-wide scale in them."""
        return scales / self.value


GlobalScale = Multiplier | Divisor


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """All that says how one matrix is stored. Derived by a format, checked against the file.

    Fields
        format           name of the format in the registry
        element          key of `ELEMENTS`
        n, k             out_features and in_features
        group_size       columns that share a scale; `k` where a row has one scale
        scale            type of the group scales
        has_zero_points  stored zero points; else symmetric
        global_scale     matrix-wide scale: none, or the type that `QuantizedMatrix` must hold
        has_group_index  columns name their group (`desc_act`); else column i is in group
                         i // group_size
        layout           the format's own variant, for instance "v1" and "v2" of GPTQ; "" where
                         it has one
    """

    format: str
    element: str
    n: int
    k: int
    group_size: int
    scale: ScaleType
    has_zero_points: bool = False
    global_scale: Literal["none", "multiplier", "divisor"] = "none"
    has_group_index: bool = False
    layout: str = ""

    def __post_init__(self) -> None:
        if self.element not in ELEMENTS:
            raise UnsupportedError(f"element: got {self.element!r}, known are {sorted(ELEMENTS)}")
        group_count(self.k, self.group_size)

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return ELEMENTS[self.element].bits

    @property
    def bits_a_weight(self) -> float:
        """Bits that a weight takes, without scales."""
        return self.bits

    @property
    def num_groups(self) -> int:
        """Scale groups in a row."""
        return self.k // self.group_size

    @property
    def stack_key(self) -> object:
        """Matrices for which this is equal can be in one stack."""
        return self

    def fitted(self, n: int, k: int) -> Scheme | None:
        """The scheme of a matrix `[n, k]` in a file that says this one; None if it cannot be.

        Formats that pad matrices do not say how far.
        """
        return self if (n, k) == (self.n, self.k) else None


class Matrix(Protocol):
    """The numbers of one matrix as its format stores them."""

    def dequantize(self, scheme: Scheme, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix `[n, k]` in `dtype`: computed in fp32 and rounded to `dtype` once."""
        ...


M = TypeVar("M", bound=Matrix)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantizedMatrix:
    """One matrix as exact numbers: W[n, k] = (codes - zero point or values[codes]) * scale.

    name          shape       dtype
    codes         [n, k]      uint8; each below 2**bits
    scales        [n, g]      `SCALE_DTYPES[scheme.scale]`, bits as stored
    zero_points   [n, g]      uint8, or None where the matrix is symmetric or has codebook values
    group_index   [k]         int32, or None where column i is in group i // group_size
    global_scale  scalar fp32 inside `Multiplier` or `Divisor`, or None
    """

    codes: Tensor
    scales: Tensor
    zero_points: Tensor | None = None
    group_index: Tensor | None = None
    global_scale: GlobalScale | None = None

    def dequantize(self, scheme: Scheme, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix `[n, k]` in `dtype`: computed in fp32 and rounded to `dtype` once.

        Of an element with a `weight_dtype` it is rounded to that first.
        """
        element = ELEMENTS[scheme.element]
        scales = scales_to_float(self.scales, scheme.scale)
        if self.global_scale is not None:
            scales = self.global_scale.apply(scales)
        if self.group_index is None:
            index = torch.arange(scheme.k, device=scales.device) // scheme.group_size
        else:
            index = self.group_index.long()
        if element.values is not None:
            table = torch.tensor(element.values, dtype=torch.float32, device=scales.device)
            numbers = table[self.codes.long()]
        elif self.zero_points is not None:
            numbers = self.codes.float() - self.zero_points.float()[:, index]
        else:
            numbers = self.codes.float() - element.zero_point
        return (numbers * scales[:, index]).to(element.weight_dtype or dtype).to(dtype)


class Format(abc.ABC, Generic[M]):
    """One checkpoint format. Stateless; the registry holds one instance of each.

    `stored` maps a suffix, which follows the layer's name and a dot ("qweight", "weight_scale"), to
    the header or the tensor in the file. `gpt-oss` stores all experts in one tensor: the loader
    hands its format the slice of one expert.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    """How `inspect` names the format."""
    has_rows: ClassVar[bool] = True
    """Whether rows of W can be cut out of its tensors; else gate and up never share one."""

    @abc.abstractmethod
    def claims(self, config: Mapping[str, Any]) -> bool:
        """Whether `config` (a checkpoint's quantization_config) may hold layers of this format."""

    @abc.abstractmethod
    def marker(self) -> str:
        """The suffix that every quantised layer of this format has, for instance "qweight"."""

    def recognizes(self, suffixes: frozenset[str]) -> bool:
        """Whether a layer that stores `suffixes` is of this format.

        Formats of one config may share a marker (compressed-tensors); those say more here.
        """
        return self.marker() in suffixes

    @abc.abstractmethod
    def optional(self) -> frozenset[str]:
        """Suffixes that tools add and that W4A16 does not use (`input_scale`); kept, never read."""

    @abc.abstractmethod
    def scheme(
        self, config: Mapping[str, Any], layer: str, stored: Mapping[str, TensorHeader]
    ) -> Scheme:
        """How `layer` is stored, from the config and the headers of its tensors.

        Raises
            CheckpointError: a tensor is missing or its shape or dtype disagrees with the config.
            UnsupportedError: bits, group size or another option that this format has and firesteel
                does not read; the message lists what it does read.
        """

    @abc.abstractmethod
    def tensors(self, scheme: Scheme) -> dict[str, TensorHeader]:
        """Every tensor that a layer of this scheme must have: suffix to header."""

    @abc.abstractmethod
    def unpack(self, scheme: Scheme, stored: Mapping[str, Tensor]) -> M:
        """Stored tensors to numbers, exactly.

        Raises
            CheckpointError: the bytes cannot be of this scheme (a code out of range, an index that
                names no group, a scale of NaN).
        """

    @abc.abstractmethod
    def pack(self, scheme: Scheme, matrix: M) -> dict[str, Tensor]:
        """Numbers to stored tensors, exactly: `unpack` of the result gives the same bits."""

    @abc.abstractmethod
    def config(self, scheme: Scheme, ignore: Sequence[str] = ()) -> dict[str, Any]:
        """A quantization_config for a checkpoint whose quantised layers all have this scheme."""


def group_count(k: int, group_size: int) -> int:
    """Groups in a row of `k` columns.

    Raises
        CheckpointError: the group size is not positive or does not divide `k`.
    """
    if group_size <= 0 or k % group_size:
        raise CheckpointError(f"group_size: got {group_size}, must be positive and divide k = {k}")
    return k // group_size


def scales_to_float(scales: Tensor, scale: ScaleType) -> Tensor:
    """Group scales of type `scale` as fp32, exactly; bytes of no number give NaN or infinity."""
    if scale == "e8m0":
        return scales.view(torch.float8_e8m0fnu).float()
    if scale == "e5m3":
        # fp32 has every fp16, and 16 is a power of two.
        return (scales.short() << 7).view(torch.float16).float() * 16
    return scales.float()
