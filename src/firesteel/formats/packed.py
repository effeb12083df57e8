"""The one form in which firesteel holds quantised weights in memory, for every element.

A row of codes is cut into blocks of 128 columns (the last one padded with zero codes); a block of
`bits`-bit codes is `16 * bits` bytes. Inside a block codes are laid out in planes of consecutive
columns, so that a few operations on a word give codes of one plane (`pack_codes` has the layout).
Rows are cut into tiles of 64 (the last one of each part padded with rows of zero codes), and the
same block of the 64 rows of a tile is one run of bytes (`tile_rows`): a kernel reads 64 x 128 codes
at a time, and memory is fastest in long reads. Scales are group-major for the same reason: those of
one group and 64 rows are one run. Kernels read the same bytes as the CPU path.

Everything else is kept bit for bit as the checkpoint has it, in integer buffers, so that
`module.to(dtype)` cannot round a scale:

name          shape                        dtype  holds
codes         [E, P, T, B, 64, 16 * bits]  uint8  T = ceil(n / 64), B = ceil(k / 128); of 3 bits
                                                  [E, P, T, B, 3, 64, 16]
scales        [E, g, P * n]                uint8, int16 or int32: bits of the stored scale
zero_points   [E, g, P * n]                uint8  only where stored
global_scale  [E, P]                       int32  bits of an fp32, only where stored
column_order  [E, P, k]                    int32  column of the file at each packed place, only for
                                                  act-order

E is the number of matrices in the stack (experts; 1 for a dense linear) and P the number of parts
stacked along n (2 for gate and up, else 1).

Block b of row r of part p of matrix e starts at byte

    ((((e * P + p) * T + r // 64) * B + b) * 64 + r % 64) * 16 * bits

of `codes`, and of 3 bits its third i at 1024 * i + (r % 64) * 16 in the run of its tile; its scale
of group j is `scales[e, j, p * n + r]`. Example: 4 bits, n = 130 and k = 300,
so T = 3 and B = 3; P = 2. Block 2 of row 70 of part 1 of matrix 0 is row 6 of tile 1 and starts at
byte ((((0 * 2 + 1) * 3 + 1) * 3 + 2) * 64 + 6) * 64 = 57728. Column 290 is column 34 of that block:
plane 1 of word 2, which is the high nibble of byte 57728 + 4.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from firesteel.errors import CheckpointError
from firesteel.formats.base import (
    ELEMENTS,
    SCALE_DTYPES,
    Divisor,
    GlobalScale,
    Matrix,
    Multiplier,
    QuantizedMatrix,
    Scheme,
    scales_to_float,
)
from firesteel.formats.expand import (
    BLOCK_K,
    arrange,
    e2m1_codes,
    e2m1_words,
    narrow_bytes,
    narrow_codes,
    scaled_numbers,
)
from firesteel.formats.trellis_matrix import TrellisScheme, padded

__all__ = [
    "TILE_ROWS",
    "PackedWeights",
    "WeightStack",
    "pack_codes",
    "packed_bytes",
    "tile_rows",
    "unpack_codes",
    "untile_rows",
]

TILE_ROWS = 64
# The integer type that holds the bits of a scale, by its bytes.
BITS_DTYPE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_PLANES = {8: 1, 4: 4}


def packed_bytes(scheme: Scheme) -> int:
    """Bytes that one matrix of this scheme takes in memory, scales and padding included."""
    if isinstance(scheme, TrellisScheme):
        return 2 * (torch.Size(scheme.tiles).numel() + padded(scheme.n) + padded(scheme.k))
    num_tiles, num_blocks = -(-scheme.n // TILE_ROWS), -(-scheme.k // BLOCK_K)
    codes = num_tiles * num_blocks * TILE_ROWS * 16 * scheme.bits
    group = SCALE_DTYPES[scheme.scale].itemsize + scheme.has_zero_points
    matrix = 4 * (scheme.global_scale != "none") + 4 * scheme.k * scheme.has_group_index
    return codes + scheme.n * scheme.num_groups * group + matrix


def pack_codes(codes: Tensor, element: str) -> Tensor:
    """Codes `[..., k]` uint8 to plane blocks `[..., ceil(k / 128), 16 * bits]` uint8.

    In a block, with column c of 0..127:
        int8  byte c is code c.
        int4  int16 word j of 32, plane p of 4: bits 4p.. hold column 32p + j.
        e2m1  the same words and planes, but of column 32p + j the sign is bit (15, 12, 14, 13)[p]
              of word j, and the other three bits start at bit (6, 3, 0, 9)[p]. A kernel needs them
              where a bf16 has its own; so of half the planes one shift, or none, is enough.
        int3  planes of 32 columns; byte 4t + r of plane p of the first three has column
              32p + 8r + 2t in bits 0 to 2 and the next one in bits 4 to 6. Of a column of the last
              plane bit p is the one above the code of the same place in plane p.
        nf3   as int3. Four codes of a plane in 16 bits, each below a bit that can be masked, are
              what one byte permutation of a GPU looks up at once.
    Words are little-endian.
    """
    bits, k = ELEMENTS[element].bits, codes.shape[-1]
    num_blocks = -(-k // BLOCK_K)
    if num_blocks * BLOCK_K != k:
        codes = functional.pad(codes, (0, num_blocks * BLOCK_K - k))
    if bits == 3:
        return narrow_bytes(codes.unflatten(-1, (num_blocks, BLOCK_K)))
    planes = codes.reshape(*codes.shape[:-1], num_blocks, _PLANES[bits], -1)
    if bits == 8:
        return planes.squeeze(-2).contiguous()
    if element == "e2m1":
        return e2m1_words(planes).view(torch.uint8)
    # [..., B, 4, 32]: the low byte of a word has planes 0 and 1, the high byte 2 and 3.
    pairs = planes[..., 0::2, :] | (planes[..., 1::2, :] << 4)
    return pairs.transpose(-1, -2).flatten(-2)


def unpack_codes(packed: Tensor, element: str, k: int) -> Tensor:
    """The inverse of `pack_codes`: `[..., k]` uint8. Of 3 bits a block may be `[3, 16]` too."""
    bits = ELEMENTS[element].bits
    if bits == 3:
        return narrow_codes(packed).flatten(-2)[..., :k]
    if bits == 8:
        return packed.flatten(-2)[..., :k]
    if element == "e2m1":
        planes = e2m1_codes(packed.view(torch.int16))
    else:
        pairs = packed.unflatten(-1, (32, 2)).transpose(-1, -2)
        planes = torch.stack([pairs & 15, pairs >> 4], dim=-2)
    # [..., B, planes, columns of a plane] in column order, then one row.
    return planes.flatten(-4 if element == "int4" else -3)[..., :k]


def tile_rows(blocks: Tensor) -> Tensor:
    """Rows of blocks `[..., n, B, bytes]` to tiles `[..., ceil(n / 64), B, 64, bytes]`.

    Rows past n are zeros. Blocks of 3 bits become `[..., ceil(n / 64), B, 3, 64, 16]`: 16 bytes of
    every row, then the next 16. A view where n is a multiple of 64.
    """
    missing = -blocks.shape[-3] % TILE_ROWS
    if missing:
        blocks = functional.pad(blocks, (0, 0, 0, 0, 0, missing))
    num_tiles = blocks.shape[-3] // TILE_ROWS
    tiles = blocks.unflatten(-3, (num_tiles, TILE_ROWS)).transpose(-3, -2)
    return tiles.unflatten(-1, (3, 16)).transpose(-3, -2) if _is_narrow(blocks) else tiles


def untile_rows(tiles: Tensor, n: int) -> Tensor:
    """The inverse of `tile_rows`: `[..., n, B, bytes]`, of 3 bits `[..., n, B, 3, 16]`."""
    rows = _rows_of_tiles(tiles)
    axis = -5 if _is_narrow(tiles) else -4
    return rows.flatten(axis, axis + 1).narrow(axis + 1, 0, n)


def _rows_of_tiles(tiles: Tensor) -> Tensor:
    """A view of tiles with the rows before the blocks: `[..., T, 64, B, bytes]` or with `3, 16`."""
    return tiles.movedim(-2, -4) if _is_narrow(tiles) else tiles.transpose(-3, -2)


def _is_narrow(blocks: Tensor) -> bool:
    """Whether blocks or tiles of them are of 3 bits, which no other ends in as many bytes as."""
    return blocks.shape[-1] in (16, 48)


class WeightStack(nn.Module):
    """A stack of quantised matrices of one scheme, in whatever form.

    Args:
        scheme: how each matrix was stored; `n` and `k` are of one part.
        num_matrices: E.
        num_parts: P; part p owns rows `p*n .. (p+1)*n` of a matrix.
    """

    def __init__(self, scheme: Scheme, num_matrices: int, num_parts: int = 1) -> None:
        super().__init__()
        self.scheme = scheme
        self.num_matrices = num_matrices
        self.num_parts = num_parts

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self.buffers())

    @property
    def shape(self) -> tuple[int, int, int]:
        """`[E, P*n, k]`, the shape of the stack expanded."""
        return (self.num_matrices, self.num_parts * self.scheme.n, self.scheme.k)

    def scheme_of(self, index: int, part: int) -> Scheme:
        """How one matrix was stored."""
        del index, part
        return self.scheme

    def write(self, index: int, part: int, matrix: Matrix) -> None:
        """Put one matrix into its place. The rest of the stack is not touched."""
        raise NotImplementedError

    def read(self, index: int, part: int) -> Matrix:
        """The numbers of one matrix, exactly as `write` was given them."""
        raise NotImplementedError

    def linear(self, index: int, x: Tensor) -> Tensor:
        """`x @ W.T` with matrix `index`: `[M, P*n]` from `[M, k]`, in x's dtype."""
        raise NotImplementedError

    def rows_of(self, part: int) -> slice:
        """The rows of a matrix that are `part`."""
        return slice(part * self.scheme.n, (part + 1) * self.scheme.n)

    def extra_repr(self) -> str:
        """One line for `print(model)`."""
        scheme = self.scheme
        return f"{scheme.format} {scheme.element} g{scheme.group_size}, {list(self.shape)}"


class PackedWeights(WeightStack):
    """A stack in the packed form; buffers as in the module's text, arguments as its base has."""

    codes: Tensor
    scales: Tensor
    zero_points: Tensor | None
    global_scale: Tensor | None
    column_order: Tensor | None

    def __init__(self, scheme: Scheme, num_matrices: int, num_parts: int = 1) -> None:
        super().__init__(scheme, num_matrices, num_parts)
        num_tiles, num_blocks = -(-scheme.n // TILE_ROWS), -(-scheme.k // BLOCK_K)
        tile = (3, TILE_ROWS, 16) if scheme.bits == 3 else (TILE_ROWS, 16 * scheme.bits)
        tiles = (num_matrices, num_parts, num_tiles, num_blocks, *tile)
        groups = (num_matrices, scheme.num_groups, num_parts * scheme.n)
        scale_bits = BITS_DTYPE[SCALE_DTYPES[scheme.scale].itemsize]
        self._buffer("codes", tiles, torch.uint8)
        self._buffer("scales", groups, scale_bits)
        self._buffer("zero_points", groups if scheme.has_zero_points else None, torch.uint8)
        has_global = scheme.global_scale != "none"
        self._buffer("global_scale", (num_matrices, num_parts) if has_global else None, torch.int32)
        order = (num_matrices, num_parts, scheme.k) if scheme.has_group_index else None
        self._buffer("column_order", order, torch.int32)

    def _buffer(self, name: str, shape: Sequence[int] | None, dtype: torch.dtype) -> None:
        self.register_buffer(name, None if shape is None else torch.empty(shape, dtype=dtype))

    @torch.no_grad()
    def write(self, index: int, part: int, matrix: Matrix) -> None:
        """Pack one matrix into its place. The rest of the stack is not touched.

        Raises
            CheckpointError: a group of an act-order matrix does not have `group_size` columns.
        """
        assert isinstance(matrix, QuantizedMatrix)
        scheme, rows = self.scheme, self.rows_of(part)
        codes = matrix.codes
        if scheme.has_group_index:
            assert matrix.group_index is not None
            assert self.column_order is not None
            order = self._order(matrix.group_index)
            codes = codes[:, order]
            self.column_order[index, part] = order.to(self.column_order)
        blocks = pack_codes(codes, scheme.element).to(self.codes.device)
        tiles, num_whole = self.codes[index, part], scheme.n // TILE_ROWS
        # Apart, so that padding the last tile copies no other.
        tiles[:num_whole] = tile_rows(blocks[: num_whole * TILE_ROWS])
        tiles[num_whole:] = tile_rows(blocks[num_whole * TILE_ROWS :])
        scales = matrix.scales.view(self.scales.dtype).to(self.scales.device)
        self.scales[index, :, rows] = scales.T
        if self.zero_points is not None:
            assert matrix.zero_points is not None
            self.zero_points[index, :, rows] = matrix.zero_points.to(self.zero_points.device).T
        if self.global_scale is not None:
            assert matrix.global_scale is not None
            bits = matrix.global_scale.value.reshape(()).view(torch.int32)
            self.global_scale[index, part] = bits.to(self.global_scale.device)

    def _order(self, group_index: Tensor) -> Tensor:
        """Columns sorted by group, stable, so that packed column i is in group i // group_size."""
        counts = torch.bincount(group_index, minlength=self.scheme.num_groups)
        if counts.numel() != self.scheme.num_groups or (counts != self.scheme.group_size).any():
            raise CheckpointError(
                f"g_idx: groups have {sorted(set(counts.tolist()))} columns, "
                f"each must have group_size = {self.scheme.group_size}"
            )
        return torch.sort(group_index, stable=True).indices

    def codes_of(self, index: int) -> Tensor:
        """Codes of matrix `index`, `[P*n, k]` uint8, columns in packed order."""
        return self._unpack(self.codes[index]).flatten(0, 1)

    def _unpack(self, tiles: Tensor) -> Tensor:
        """Codes `[..., n, k]` of tiles: rows are put in order as codes widen, not by a copy."""
        codes = unpack_codes(_rows_of_tiles(tiles), self.scheme.element, self.scheme.k)
        return codes.flatten(-3, -2)[..., : self.scheme.n, :]

    @torch.no_grad()
    def read(self, index: int, part: int) -> QuantizedMatrix:
        """The numbers of one matrix, exactly as `write` was given them."""
        scheme, rows = self.scheme, self.rows_of(part)
        codes = self._unpack(self.codes[index, part])
        scales = self.scales[index, :, rows].T.contiguous()
        zero_points = group_index = None
        if self.zero_points is not None:
            zero_points = self.zero_points[index, :, rows].T.contiguous()
        if self.column_order is not None:
            order = self.column_order[index, part].long()
            codes = torch.empty_like(codes).index_copy_(1, order, codes)
            groups = torch.arange(scheme.k, device=order.device) // scheme.group_size
            group_index = torch.empty_like(groups).index_copy_(0, order, groups).int()
        return QuantizedMatrix(
            codes=codes.contiguous(),
            scales=scales.view(SCALE_DTYPES[scheme.scale]),
            zero_points=zero_points,
            group_index=group_index,
            global_scale=None
            if self.global_scale is None
            else self._global(self.global_scale[index, part].view(torch.float32)),
        )

    def linear(self, index: int, x: Tensor) -> Tensor:
        """`x @ W.T` with matrix `index` expanded to x's type: `[M, P*n]` from `[M, k]`.

        The expanded matrix lives for this call only. Each of its numbers is rounded once.
        """
        matrix = self._expand(index, x.dtype)
        if self.column_order is None:
            return functional.linear(arrange(x, self.scheme), matrix)
        parts = zip(self.column_order[index].long(), matrix.chunk(self.num_parts), strict=True)
        products = [
            functional.linear(arrange(x[:, order], self.scheme), part) for order, part in parts
        ]
        return torch.cat(products, dim=-1)

    def _expand(self, index: int, dtype: torch.dtype) -> Tensor:
        """Matrix `index` as `[P*n, B * 128]`, columns in the order that `arrange` gives x."""
        scheme = self.scheme
        product_dtype = ELEMENTS[scheme.element].weight_dtype or dtype
        # [P*n, g], strided: a copy would cost more than it saves.
        scales = self.scales[index].T.view(SCALE_DTYPES[scheme.scale])
        if scheme.scale in ("e8m0", "e5m3"):
            # A power of two (or bf16's smallest subnormal), or four bits: exact.
            scales = scales_to_float(scales, scheme.scale)
            scales = scales.to(product_dtype) if product_dtype == torch.bfloat16 else scales
        elif scheme.scale == "e4m3":
            scales = scales_to_float(scales, scheme.scale)
        if self.global_scale is not None:
            # [P] -> [P*n, 1]
            value = self.global_scale[index].view(torch.float32).repeat_interleave(scheme.n)
            scales = self._global(value.unsqueeze(-1)).apply(scales.float())
        # Rows of whole tiles are put back in order by the first pass over the codes, not by one of
        # its own: [P, T, 64, B, 16*bits], else [P, n, B, 16*bits].
        tiles = self.codes[index]
        is_ragged = scheme.n % TILE_ROWS != 0
        codes = untile_rows(tiles, scheme.n) if is_ragged else _rows_of_tiles(tiles)
        rows = codes.shape[: -3 if scheme.bits == 3 else -2]
        zero_points = None
        if self.zero_points is not None:
            zero_points = self.zero_points[index].T.unflatten(0, rows)
        numbers = scaled_numbers(codes, scheme, scales.unflatten(0, rows), zero_points, dtype)
        return numbers.view(self.shape[1], -1)

    def _global(self, value: Tensor) -> GlobalScale:
        return Divisor(value) if self.scheme.global_scale == "divisor" else Multiplier(value)
