"""What the four-bit floating-point formats share: E2M1 codes, two a byte, one scale a group.

The code of an even column is in the low nibble of its byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from firesteel.errors import CheckpointError, UnsupportedError
from firesteel.formats.base import (
    SCALE_DTYPES,
    Divisor,
    Format,
    GlobalScale,
    Multiplier,
    QuantizedMatrix,
    ScaleType,
    Scheme,
    TensorHeader,
    group_count,
    scales_to_float,
)
from firesteel.formats.bits import pack_nibbles, unpack_nibbles
from firesteel.formats.stored import check_matrix, check_scales, check_tensors, header_of

__all__ = ["Fp4Format", "Fp4Layout"]


@dataclass(frozen=True, slots=True)
class Fp4Layout:
    """Names and types of the tensors of one FP4 format; codes uint8 `[n, k/2]`, scales `[n, g]`.

    Fields
        format              name of the format in the registry
        codes, scales       suffixes
        group_size          the format's only one
        scale               type of the group scales
        global_scale        suffix of the matrix-wide fp32 scale, if any
        global_scale_shape  its shape in the file
        global_scale_type   what it does to a group scale
    """

    format: str
    codes: str
    scales: str
    group_size: int
    scale: ScaleType
    global_scale: str | None = None
    global_scale_shape: tuple[int, ...] = ()
    global_scale_type: Literal["none", "multiplier", "divisor"] = "none"

    def scheme(
        self, layer: str, stored: Mapping[str, TensorHeader], group_size: int | None = None
    ) -> Scheme:
        """The scheme by the shape of the codes; a config's `group_size` must be the format's.

        Raises
            CheckpointError: the codes are missing, or no whole number of groups.
            UnsupportedError: another group size.
        """
        if group_size is not None and group_size != self.group_size:
            raise UnsupportedError(
                f"{self.format} group_size: got {group_size!r}, supported is {self.group_size}"
            )
        n, row_bytes = header_of(layer, stored, self.codes).shape
        group_count(2 * row_bytes, self.group_size)
        return Scheme(
            format=self.format,
            element="e2m1",
            n=n,
            k=2 * row_bytes,
            group_size=self.group_size,
            scale=self.scale,
            global_scale=self.global_scale_type,
        )

    def tensors(self, scheme: Scheme) -> dict[str, TensorHeader]:
        """Suffix to header, for `Format.tensors`."""
        headers = {
            self.codes: TensorHeader((scheme.n, scheme.k // 2), torch.uint8),
            self.scales: TensorHeader((scheme.n, scheme.num_groups), SCALE_DTYPES[self.scale]),
        }
        if self.global_scale is not None:
            headers[self.global_scale] = TensorHeader(self.global_scale_shape, torch.float32)
        return headers

    def unpack(self, scheme: Scheme, stored: Mapping[str, Tensor]) -> QuantizedMatrix:
        """For `Format.unpack`.

        Raises
            CheckpointError: a tensor is not as `tensors` says, or a scale is not a number.
        """
        check_tensors(stored, self.tensors(scheme))
        check_scales(self.scales, stored[self.scales], self.scale)
        global_scale = self._read_global_scale(stored)
        if global_scale is not None:
            scales = scales_to_float(stored[self.scales], self.scale)
            largest = 6 * global_scale.apply(scales)
            if not bool(largest.isfinite().all()):
                raise CheckpointError(
                    f"{self.global_scale}: got {global_scale.value.item()}, "
                    f"with which {self.scales} gives weights that are not finite"
                )
        return QuantizedMatrix(
            codes=unpack_nibbles(stored[self.codes]),
            scales=stored[self.scales].clone(),
            global_scale=global_scale,
        )

    def pack(self, scheme: Scheme, matrix: QuantizedMatrix) -> dict[str, Tensor]:
        """For `Format.pack`."""
        check_matrix(scheme, matrix)
        tensors = {self.codes: pack_nibbles(matrix.codes), self.scales: matrix.scales.clone()}
        if self.global_scale is not None and matrix.global_scale is not None:
            value = matrix.global_scale.value.clone().reshape(self.global_scale_shape)
            tensors[self.global_scale] = value
        return tensors

    def _read_global_scale(self, stored: Mapping[str, Tensor]) -> GlobalScale | None:
        if self.global_scale is None:
            return None
        value = stored[self.global_scale].clone().reshape(())
        is_divisor = self.global_scale_type == "divisor"
        if not bool(value.isfinite()) or (is_divisor and value.item() == 0):
            raise CheckpointError(
                f"{self.global_scale}: got {value.item()}, must be finite"
                + (" and not zero (it divides)" if is_divisor else "")
            )
        return Divisor(value) if is_divisor else Multiplier(value)


class Fp4Format(Format[QuantizedMatrix]):
    """A format that is a layout and a config; subclasses read and write the config."""

    layout: ClassVar[Fp4Layout]

    def tensors(self, scheme: Scheme) -> dict[str, TensorHeader]:
        return self.layout.tensors(scheme)

    def unpack(self, scheme: Scheme, stored: Mapping[str, Tensor]) -> QuantizedMatrix:
        return self.layout.unpack(scheme, stored)

    def pack(self, scheme: Scheme, matrix: QuantizedMatrix) -> dict[str, Tensor]:
        return self.layout.pack(scheme, matrix)
