"""Symmetric int4 on a CPU, held in the tiles that PyTorch's own int4 product reads.

`aten::_weight_int4pack_mm_for_cpu` multiplies packed weights without expanding them, which for a
few rows beats a 16-bit product. Its layout depends on the CPU's instruction set: `can_tile`
compares it with the one written here, once, and where they differ `PackedWeights` stays as it is.

name    shape                 dtype  holds
tiles   [E, rows/64, k, 32]   uint8  byte i: rows i (low nibble) and i + 32 (high) of 64, one column
scales  [E, g, rows, 2]       bits of the scale's type, then of 0: the product takes an offset too
"""

from __future__ import annotations

from functools import cache, lru_cache

import torch
from torch import Tensor

from firesteel.formats.base import SCALE_DTYPES, QuantizedMatrix, Scheme
from firesteel.formats.packed import PackedWeights, WeightStack

__all__ = ["TiledInt4Weights", "can_tile"]

_GROUP_SIZES = (32, 64, 128, 256)
_TILE_ROWS = 64
# The packed product's time grows with every row, that of expanding does not: where to change over.
_MAX_PACKED_ROWS = 32


def can_tile(packed: PackedWeights) -> bool:
    """Whether the stack can be a `TiledInt4Weights` here."""
    scheme = packed.scheme
    return (
        packed.codes.device.type == "cpu"
        and scheme.element == "int4"
        and scheme.scale in ("bf16", "fp16", "fp32")
        and scheme.global_scale == "none"
        and not scheme.has_zero_points
        and not scheme.has_group_index
        and scheme.group_size in _GROUP_SIZES
        and packed.shape[1] % _TILE_ROWS == 0
        and _is_layout_ours()
    )


class TiledInt4Weights(WeightStack):
    """A stack of symmetric int4 matrices; takes the place of a `PackedWeights` on a CPU.

    Args:
        packed: a filled stack for which `can_tile` holds.
    """

    tiles: Tensor
    scales: Tensor

    def __init__(self, packed: PackedWeights) -> None:
        super().__init__(packed.scheme, packed.num_matrices, packed.num_parts)
        num_matrices, rows, k = packed.shape
        groups = self.scheme.num_groups
        tiles = torch.empty(num_matrices, rows // _TILE_ROWS, k, 32, dtype=torch.uint8)
        scales = torch.zeros(num_matrices, groups, rows, 2, dtype=packed.scales.dtype)
        for index in range(num_matrices):
            tiles[index] = _tile(packed.codes_of(index))
            scales[index, :, :, 0] = packed.scales[index]
        self.register_buffer("tiles", tiles)
        self.register_buffer("scales", scales)

    def read(self, index: int, part: int) -> QuantizedMatrix:
        """The numbers of one matrix, exactly as the checkpoint had them."""
        rows = self.rows_of(part)
        tiles = self.tiles[index].transpose(1, 2)
        codes = torch.stack([tiles & 15, tiles >> 4], dim=1).reshape(-1, self.scheme.k)
        scales = self.scales[index, :, rows, 0].T.contiguous()
        return QuantizedMatrix(
            codes=codes[rows].contiguous(), scales=scales.view(SCALE_DTYPES[self.scheme.scale])
        )

    def linear(self, index: int, x: Tensor) -> Tensor:
        """`x @ W.T` with matrix `index`: `[M, P*n]` from `[M, k]`, in x's dtype.

        A few rows are multiplied packed, with fp32 sums of unrounded weights; more, or rows of
        another type than the scales, by an expanded matrix whose numbers are rounded once.
        """
        scales = self.scales[index].view(SCALE_DTYPES[self.scheme.scale])
        tiles = self.tiles[index]
        # PyTorch's packed product has no gradient.
        is_differentiated = torch.is_grad_enabled() and x.requires_grad
        is_short = x.shape[0] <= _MAX_PACKED_ROWS and x.dtype == scales.dtype
        if is_short and not is_differentiated and tiles.device.type == "cpu":
            packed = tiles.view(-1, self.scheme.k // 2)
            return torch.ops.aten._weight_int4pack_mm_for_cpu(
                x.contiguous(), packed, self.scheme.group_size, scales
            )
        # Columns of the product are rows of W in the order of the tiles' numbers.
        y = x @ _expand(tiles, self.scheme, scales[..., 0], x.dtype)
        tiles_of_rows = y.unflatten(1, (-1, 16, 2, 2))
        return tiles_of_rows.permute(0, 1, 4, 2, 3).flatten(1)


def _tile(codes: Tensor) -> Tensor:
    """Codes `[rows, k]` to tiles `[rows/64, k, 32]`."""
    halves = codes.unflatten(0, (-1, 2, 32))
    return (halves[:, 0] | (halves[:, 1] << 4)).transpose(1, 2)


@cache
def _is_layout_ours() -> bool:
    """Whether this PyTorch, on this CPU, packs int4 as `_tile` does."""
    codes = torch.randint(0, 16, (128, 64), generator=torch.Generator().manual_seed(0))
    try:
        theirs = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 2)
    except (AttributeError, RuntimeError):
        return False
    return torch.equal(theirs.reshape(-1), _tile(codes.to(torch.uint8)).reshape(-1))


def _expand(tiles: Tensor, scheme: Scheme, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """W transposed, `[k, rows]` in `dtype`; in a tile of 64 rows, number 4i + 2b + h is of row
    32h + 2i + b.
    """
    if dtype.itemsize not in (2, 4):
        return _expand(tiles, scheme, scales, torch.float32).to(dtype)
    k = scheme.k
    words = tiles.transpose(0, 1).contiguous().view(torch.uint16).view(-1).int()
    table = _pair_table(dtype, tiles.device)
    numbers = (
        table.index_select(0, words).view(dtype).view(scheme.num_groups, -1, tiles.shape[0], 64)
    )
    order = scales.unflatten(-1, (-1, 2, 16, 2)).permute(0, 1, 3, 4, 2).flatten(2).unsqueeze(1)
    if scales.dtype == dtype:
        return numbers.mul_(order).view(k, -1)
    return numbers.float().mul_(order).to(dtype).view(k, -1)


@lru_cache(maxsize=8)
def _pair_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """`[65536]`: the four numbers of two bytes, low nibble first, as one wide word."""
    words = torch.arange(1 << 16, device=device).unsqueeze(1)
    codes = (words >> torch.arange(0, 16, 4, device=device)) & 15
    row = torch.complex128 if dtype.itemsize == 4 else torch.int64
    return (codes - 8).to(dtype).view(row).view(-1)
