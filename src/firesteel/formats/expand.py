"""Packed codes to 16-bit numbers, fast, in plain PyTorch.

Codes of 3 and 4 bits go through a table: an int16 word of planes picks all its numbers at once, so
they come out column-interleaved (number i of word j is of column `C * i + j` in its block of 128,
where C is the width of a plane). Where one scale covers a whole block the interleaved order is
kept and the activations are put into the same order, which is cheaper than sorting the weights.
Of 3-bit integers the high bits add 4 from a table of their own. A codebook is no such sum: there
the low bits of four planes and their high bits make one index of 12 bits.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from firesteel.formats.base import ELEMENTS, Scheme

__all__ = [
    "BLOCK_K",
    "arrange",
    "e2m1_codes",
    "e2m1_words",
    "is_interleaved",
    "scaled_numbers",
]

BLOCK_K = 128
# Of the planes of an int16 word of E2M1 codes: the bit of the sign, and the lowest of the others.
_E2M1_SIGNS = (15, 12, 14, 13)
_E2M1_LOWEST = (6, 3, 0, 9)
# Columns of a plane, by bits.
_PLANE_WIDTH = {3: 16, 4: 32, 8: 128}
# The type with which `index_select` copies the numbers of one word, by their bytes.
_ROW_DTYPE = {8: torch.int64, 16: torch.complex128}


def is_interleaved(scheme: Scheme) -> bool:
    """Whether `scaled_numbers` leaves columns interleaved, so that `arrange` must be used."""
    return scheme.bits != 8 and _scales_a_block(scheme) == 1


def arrange(x: Tensor, scheme: Scheme) -> Tensor:
    """Columns of `x [M, k]` in the order of `scaled_numbers`, padded with zeros: `[M, B * 128]`."""
    padding = -x.shape[1] % BLOCK_K
    if padding:
        x = functional.pad(x, (0, padding))
    if not is_interleaved(scheme):
        return x
    width = _PLANE_WIDTH[scheme.bits]
    planes = x.unflatten(1, (x.shape[1] // BLOCK_K, BLOCK_K // width, width))
    return planes.transpose(-1, -2).flatten(1)


def scaled_numbers(
    codes: Tensor, scheme: Scheme, scales: Tensor, zero_points: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """(code - zero point or value) * scale, rounded to `dtype` once.

    Of an element with a `weight_dtype` it is rounded to that first.

    name         shape                  dtype
    codes        [..., n, B, 16*bits]   uint8, as `pack_codes` lays them out; rows may be strided
    scales       [..., n, g]            any float; the product is exact in fp32
    zero_points  [..., n, g]            uint8, or None for a symmetric matrix or codebook values
    returns      [..., n, B * 128]      `dtype`, contiguous; padded columns hold arbitrary finite
                                        numbers
    """
    own = ELEMENTS[scheme.element].weight_dtype
    if own is not None and own != dtype:
        return scaled_numbers(codes, scheme, scales, zero_points, own).to(dtype)
    numbers = _numbers(codes, scheme, zero_points is not None, dtype)
    if zero_points is not None:
        _by_group(numbers, scheme).sub_(_spread(zero_points, scheme).to(dtype))
    if scales.dtype == dtype:
        _by_group(numbers, scheme).mul_(_spread(scales, scheme))
        return numbers.flatten(-2)
    wide = numbers.float()
    _by_group(wide, scheme).mul_(_spread(scales, scheme))
    return wide.to(dtype).flatten(-2)


def e2m1_words(planes: Tensor) -> Tensor:
    """E2M1 codes `[..., 4, w]` uint8 to int16 words `[..., w]`."""
    shape = (*planes.shape[:-2], planes.shape[-1])
    words = torch.zeros(shape, dtype=torch.int16, device=planes.device)
    for plane, (sign, lowest) in enumerate(zip(_E2M1_SIGNS, _E2M1_LOWEST, strict=True)):
        codes = planes[..., plane, :].short()
        words |= ((codes >> 3) << sign) | ((codes & 7) << lowest)
    return words


def e2m1_codes(words: Tensor) -> Tensor:
    """The inverse of `e2m1_words`: `[..., 4, w]` uint8."""
    planes = [
        (((words >> sign) & 1) << 3) | ((words >> lowest) & 7)
        for sign, lowest in zip(_E2M1_SIGNS, _E2M1_LOWEST, strict=True)
    ]
    return torch.stack(planes, dim=-2).to(torch.uint8)


def _scales_a_block(scheme: Scheme) -> int:
    """Scales that cover one block of columns; a scale of several blocks counts as one."""
    if scheme.group_size in (scheme.k, BLOCK_K) or scheme.group_size % BLOCK_K == 0:
        return 1
    return BLOCK_K // scheme.group_size


def _by_group(numbers: Tensor, scheme: Scheme) -> Tensor:
    """`[..., B, 128]` as `[..., B, groups of a block, columns]`."""
    return numbers.unflatten(-1, (_scales_a_block(scheme), -1))


def _spread(scales: Tensor, scheme: Scheme) -> Tensor:
    """`[..., g]` as `[..., B, groups of a block, 1]`, zeros past the last group."""
    num_blocks = -(-scheme.k // BLOCK_K)
    if scheme.num_groups == 1:
        return scales.unsqueeze(-1).unsqueeze(-1)
    if scheme.group_size > BLOCK_K:
        scales = scales.repeat_interleave(scheme.group_size // BLOCK_K, dim=-1)
    missing = num_blocks * _scales_a_block(scheme) - scales.shape[-1]
    if missing:
        scales = functional.pad(scales, (0, missing))
    return scales.unflatten(-1, (num_blocks, -1)).unsqueeze(-1)


def _numbers(codes: Tensor, scheme: Scheme, is_asymmetric: bool, dtype: torch.dtype) -> Tensor:
    """Unscaled numbers `[..., B, 128]`: integers less the symmetric zero point, or values."""
    element = ELEMENTS[scheme.element]
    zero_point = 0 if is_asymmetric else element.zero_point
    if element.bits == 8:
        # With its high bit turned over a code less 128 is an int8.
        integers = (codes ^ zero_point).view(torch.int8) if zero_point else codes
        return integers.to(dtype, memory_format=torch.contiguous_format)
    width = _PLANE_WIDTH[element.bits]
    num_blocks = codes.shape[:-1].numel()
    num_planes = BLOCK_K // width
    if element.bits == 3 and element.values is not None:
        table = _codebook_table(scheme.element, dtype, codes.device)
        numbers = _look_up(table, _codebook_words(codes), num_planes // 2, dtype)
    else:
        words = codes[..., : 2 * width].view(torch.uint16)
        table = _word_table(scheme.element, zero_point, dtype, codes.device)
        numbers = _look_up(table, words, num_planes, dtype)
        if element.bits == 3:
            high = _high_table(dtype, codes.device)
            numbers += _look_up(high, codes[..., 2 * width :], num_planes, dtype)
    # [blocks, columns of a plane, planes]
    numbers = numbers.view(num_blocks, width, num_planes)
    if not is_interleaved(scheme):
        numbers = numbers.transpose(-1, -2)
    return numbers.reshape(*codes.shape[:-1], BLOCK_K)


def _look_up(table: Tensor, words: Tensor, num_planes: int, dtype: torch.dtype) -> Tensor:
    # One pass widens the words and puts those of strided rows in a row.
    index = words.to(torch.int32, memory_format=torch.contiguous_format).view(-1)
    row_dtype = _ROW_DTYPE.get(num_planes * dtype.itemsize)
    if row_dtype is None:
        return table[index]
    return table.view(row_dtype).view(-1).index_select(0, index).view(dtype)


@lru_cache(maxsize=32)
def _word_table(element: str, zero_point: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`[65536, planes]`: the numbers of each int16 word; of 3 bits, what the low two bits say."""
    kind = ELEMENTS[element]
    words = torch.arange(1 << 16, device=device)
    if kind.values is not None:
        codes = e2m1_codes(words.unsqueeze(1)).squeeze(2).long()
        return torch.tensor(kind.values, dtype=dtype, device=device)[codes]
    bits = 2 if kind.bits == 3 else kind.bits
    codes = (words.unsqueeze(1) >> torch.arange(0, 16, bits, device=device)) & ((1 << bits) - 1)
    return (codes - zero_point).to(dtype)


@lru_cache(maxsize=8)
def _high_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """`[256, 8]`: 4 for each bit that is set, the high bit of a 3-bit code."""
    bits = (torch.arange(256, device=device).unsqueeze(1) >> torch.arange(8, device=device)) & 1
    return (bits * 4).to(dtype)


def _codebook_words(codes: Tensor) -> Tensor:
    """Blocks `[..., 48]` of 3-bit codes to int32 `[..., 16, 2]`, each of four planes of a column.

    Bits 0 to 7 hold the low two bits of each code, bits 8 to 11 the high bits.
    """
    low, high = (
        part.to(torch.int32, memory_format=torch.contiguous_format)
        for part in codes.split((32, 16), dim=-1)
    )
    # Planes 0 to 3 take the low half of the byte of high bits, 4 to 7 the high half.
    shifts = torch.arange(8, 0, -4, dtype=torch.int32, device=codes.device)
    return ((high.unsqueeze(-1) << shifts) & 0xF00).bitwise_or_(low.unflatten(-1, (16, 2)))


@lru_cache(maxsize=8)
def _codebook_table(element: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`[4096, 4]`: the numbers of each of `_codebook_words`."""
    words = torch.arange(1 << 12, device=device).unsqueeze(1)
    planes = torch.arange(4, device=device)
    codes = ((words >> (2 * planes)) & 3) | (((words >> (8 + planes)) & 1) << 2)
    return torch.tensor(ELEMENTS[element].values, dtype=dtype, device=device)[codes]
