"""One matrix of EXL3: its scheme, and its numbers as they are stored."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from firesteel.formats.base import Scheme
from firesteel.formats.trellis import BLOCK, TILE, TrellisCode, dequantize

__all__ = ["TrellisMatrix", "TrellisScheme", "padded", "trellis_scheme"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrellisScheme(Scheme):
    """How a matrix of EXL3 is stored. Each row and each column has one scale, and no group has.

    Fields
        code    bits a weight, and the codebook
        layout  "" where scales are stored, "signs" where only their signs are
    """

    code: TrellisCode

    def __post_init__(self) -> None:
        """Nothing: its element is no integer and no table of values."""

    @property
    def bits(self) -> int:
        """Bits of the longest symbol."""
        return self.code.symbol_bits[1]

    @property
    def bits_a_weight(self) -> float:
        """Bits that a weight takes, without scales."""
        return self.code.bits

    @property
    def tiles(self) -> tuple[int, int, int]:
        """Shape of the stored tiles: `[k / 16, n / 16, 16 * bits]`, padded."""
        return (padded(self.k) // TILE, padded(self.n) // TILE, self.code.tile_words)

    @property
    def stack_key(self) -> tuple[object, ...]:
        """Matrices of different codes share a stack."""
        return (self.format, self.n, self.k)

    def fitted(self, n: int, k: int) -> TrellisScheme | None:
        """The scheme of a matrix `[n, k]` that was padded to this one; None if it cannot be."""
        is_it = (padded(n), padded(k)) == (padded(self.n), padded(self.k))
        return trellis_scheme(n, k, self.code, layout=self.layout) if is_it else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrellisMatrix:
    """W = (diag(suh) H What H diag(svh))^T, What of the tiles; n and k are padded to 128 here.

    name     shape                    dtype
    trellis  [k/16, n/16, 16 * bits]  int16, bits as stored
    suh      [k]                      fp16; scales of columns of W, or their signs as 1 and -1
    svh      [n]                      fp16; the same of rows
    """

    trellis: Tensor
    suh: Tensor
    svh: Tensor

    def dequantize(self, scheme: Scheme, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix `[n, k]` in `dtype`: computed in fp32 and rounded to `dtype` once."""
        assert isinstance(scheme, TrellisScheme)
        whole = dequantize(self.trellis, scheme.code, self.suh, self.svh)
        return whole[: scheme.k, : scheme.n].T.to(dtype)


def trellis_scheme(n: int, k: int, code: TrellisCode, layout: str = "") -> TrellisScheme:
    """The scheme of a matrix `[n, k]`."""
    return TrellisScheme(
        format="exl3",
        element=f"trellis{code.bits:g}-{code.codebook}",
        n=n,
        k=k,
        group_size=k,
        scale="fp16",
        layout=layout,
        code=code,
    )


def padded(size: int) -> int:
    """Rows or columns as stored: the next multiple of 128."""
    return -(-size // BLOCK) * BLOCK
