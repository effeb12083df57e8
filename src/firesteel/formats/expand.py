"""Packed codes to 16-bit numbers, fast, in plain PyTorch.

Codes of 3 and 4 bits go through a table: an int16 word picks its four numbers at once, so they come
out interleaved. Where they stay among the columns of their scale that order is kept and the
activations are put into the same order, which is cheaper than sorting the weights. Number i of word
j of 4-bit codes is of column 32 * i + j of its block of 128; 3-bit codes stay in their 32 columns.
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
    "narrow_bytes",
    "narrow_codes",
    "scaled_numbers",
]

BLOCK_K = 128
# Of the planes of an int16 word of E2M1 codes: the bit of the sign, and the lowest of the others.
_E2M1_SIGNS = (15, 12, 14, 13)
_E2M1_LOWEST = (6, 3, 0, 9)
# Numbers of an int16 word of 3 or 4-bit codes.
_WORD = 4
# The type with which `index_select` copies the numbers of one word, by their bytes.
_ROW_DTYPE = {8: torch.int64, 16: torch.complex128}


def is_interleaved(scheme: Scheme) -> bool:
    """Whether `scaled_numbers` leaves columns interleaved, so that `arrange` must be used."""
    # 3-bit codes leave their plane of 32 columns in no case.
    in_planes = scheme.bits == 3 and scheme.group_size % 32 == 0
    return scheme.bits != 8 and (in_planes or _scales_a_block(scheme) == 1)


def arrange(x: Tensor, scheme: Scheme) -> Tensor:
    """Columns of `x [M, k]` in the order of `scaled_numbers`, padded with zeros: `[M, B * 128]`."""
    padding = -x.shape[1] % BLOCK_K
    if padding:
        x = functional.pad(x, (0, padding))
    if not is_interleaved(scheme):
        return x
    # 3 bits: plane, r, t and the low bit of a column, as `narrow_bytes` has them.
    shape = (-1, 4, 4, 4, 2) if scheme.bits == 3 else (-1, _WORD, 32)
    axes = (-3, -2) if scheme.bits == 3 else (-2, -1)
    return x.unflatten(1, shape).transpose(*axes).flatten(1)


def scaled_numbers(
    codes: Tensor, scheme: Scheme, scales: Tensor, zero_points: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """(code - zero point or value) * scale, rounded to `dtype` once.

    Of an element with a `weight_dtype` it is rounded to that first.

    name         shape                  dtype
    codes        [..., n, B, 16*bits]   uint8, as `pack_codes` lays them out; rows may be strided;
                                        3 bits also `[..., n, B, 3, 16]`
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


def narrow_bytes(codes: Tensor) -> Tensor:
    """3-bit codes `[..., 128]` uint8 to bytes `[..., 48]`; `pack_codes` has their layout."""
    # Plane, r, t, low bit of a column; bytes [..., 4, t, r] of two codes each.
    split = codes.unflatten(-1, (4, 4, 4, 2)).transpose(-3, -2)
    pairs = (split[..., 0] | (split[..., 1] << 4)).flatten(-2)
    bit = torch.arange(3, dtype=torch.uint8, device=codes.device)[:, None]
    return (pairs[..., :3, :] | (((pairs[..., 3:, :] >> bit) & 0x11) << 3)).flatten(-2)


def narrow_codes(packed: Tensor) -> Tensor:
    """The inverse of `narrow_bytes`: `[..., 128]` uint8 from `[..., 48]` or `[..., 3, 16]`."""
    runs = _runs(packed)
    first, second, third = ((runs[..., i, :] >> (3 - i)) & (0x11 << i) for i in range(3))
    pairs = torch.cat([runs & 0x77, (first | second | third).unsqueeze(-2)], dim=-2)
    codes = torch.stack([pairs & 7, pairs >> 4], dim=-1)
    return codes.unflatten(-2, (4, 4)).transpose(-3, -2).flatten(-4)


def _runs(packed: Tensor) -> Tensor:
    """A 3-bit block as its three planes of 16 bytes: `[..., 3, 16]`."""
    return packed if packed.shape[-1] == 16 else packed.unflatten(-1, (3, 16))


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
    table = _word_table(scheme.element, zero_point, dtype, codes.device)
    if element.bits == 3:
        words, rows = _narrow_words(codes), _runs(codes).shape[:-2]
        # [blocks and planes, t, r, two columns]
        numbers = _look_up(table, words, dtype).view(-1, 4, 4, 2)
        if not is_interleaved(scheme):
            numbers = numbers.transpose(1, 2)
        return numbers.reshape(*rows, BLOCK_K)
    # [blocks, columns of a plane, planes]
    numbers = _look_up(table, codes.view(torch.uint16), dtype).view(-1, 32, _WORD)
    if not is_interleaved(scheme):
        numbers = numbers.transpose(1, 2)
    return numbers.reshape(*codes.shape[:-1], BLOCK_K)


def _look_up(table: Tensor, words: Tensor, dtype: torch.dtype) -> Tensor:
    # One pass widens the words and puts those of strided rows in a row.
    index = words.to(torch.int32, memory_format=torch.contiguous_format).view(-1)
    row_dtype = _ROW_DTYPE.get(_WORD * dtype.itemsize)
    if row_dtype is None:
        return table[index]
    return table.view(row_dtype).view(-1).index_select(0, index).view(dtype)


@lru_cache(maxsize=32)
def _word_table(element: str, zero_point: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`[65536, 4]`: the numbers of each int16 word; of 3 bits of those whose spare bits are 0."""
    kind = ELEMENTS[element]
    if kind.values is not None and kind.bits == 4:
        words = torch.arange(1 << 16, device=device)
        codes = e2m1_codes(words.unsqueeze(1)).squeeze(2).long()
    else:
        words = torch.arange(1 << (15 if kind.bits == 3 else 16), device=device)
        mask = (1 << kind.bits) - 1
        codes = (words.unsqueeze(1) >> torch.arange(0, 16, 4, device=device)) & mask
    if kind.values is not None:
        return torch.tensor(kind.values, dtype=dtype, device=device)[codes]
    return (codes - zero_point).to(dtype)


def _narrow_words(codes: Tensor) -> Tensor:
    """3-bit blocks as words of four codes, spare bits 0: int32 `[..., 4, 8]`, planes in order."""
    runs = _runs(codes).view(torch.int16)
    words = torch.empty((*runs.shape[:-2], 4, 8), dtype=torch.int32, device=codes.device)
    wide = words[..., :3, :].copy_(runs)
    last = words[..., 3, :].copy_((wide[..., 0, :] >> 3) & 0x1111)
    last |= (wide[..., 1, :] >> 2) & 0x2222
    last |= (wide[..., 2, :] >> 1) & 0x4444
    wide &= 0x7777
    return words
