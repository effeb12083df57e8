"""Packing of small codes into words: the bit layouts that several formats share.

Codes are uint8, one code an element, and are packed along the last axis. Words are int32 with the
bits of unsigned 32-bit integers. Three layouts, shown for the codes 1, 2, 3, ... of three bits:

    stream  code i begins at bit 3*i of one long bit string, least significant bit of word 0 first;
            a code may straddle two words: word 0 = 1 | 2 << 3 | 3 << 6 | ... | (11 & 3) << 30
    slots   32 // 3 = 10 codes a word, none straddles, the top two bits stay zero
    nibbles two codes of four bits a byte, the even one in the low half

Where the width divides 32, stream and slots are the same. Spare bits (after the last code, and on
top of a word of slots) are written as zeros and must be zeros when read: so packing what was
unpacked gives the same bytes.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from torch.nn.functional import pad

from firesteel.errors import CheckpointError

__all__ = [
    "WORD_BITS",
    "pack_nibbles",
    "pack_slots",
    "pack_stream",
    "slot_words",
    "stream_words",
    "unpack_nibbles",
    "unpack_slots",
    "unpack_stream",
]

WORD_BITS = 32
# Eight codes of b bits fill exactly b bytes, and one 64-bit integer holds them.
_UNIT = 8
_LITTLE_ENDIAN = sys.byteorder == "little"


def stream_words(count: int, bits: int) -> int:
    """Words of a stream of `count` codes."""
    return -(-count * bits // WORD_BITS)


def slot_words(count: int, bits: int) -> int:
    """Words that hold `count` codes in slots."""
    return -(-count // (WORD_BITS // bits))


def pack_stream(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 `[..., count]`, each below `2**bits`, to words int32 `[..., stream_words]`.

    `bits` is 1 to 8.
    """
    count = codes.shape[-1]
    units = -(-count // _UNIT)
    stream = _unit_bytes(pad(codes, (0, units * _UNIT - count)), bits)
    num_words = stream_words(count, bits)
    # The last unit may reach past the last word, with zeros; or end before it.
    stream = pad(stream, (0, num_words * 4 - stream.shape[-1]))
    return _join(stream.unflatten(-1, (num_words, 4)), torch.int32)


def unpack_stream(words: Tensor, bits: int, count: int) -> Tensor:
    """Words int32 `[..., stream_words(count, bits)]` to codes uint8 `[..., count]`.

    Raises
        CheckpointError: a bit after the last code is set.
    """
    units = -(-count // _UNIT)
    stream = _split(words).flatten(-2)
    stream = pad(stream, (0, max(0, units * bits - stream.shape[-1])))
    _require_zero(stream[..., units * bits :], bits, count)
    flat = _unit_codes(stream[..., : units * bits], bits)
    return _trimmed(flat, bits, count)


def pack_slots(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 `[..., count]`, each below `2**bits`, to words int32 `[..., slot_words]`."""
    slots = WORD_BITS // bits
    words = slot_words(codes.shape[-1], bits)
    grouped = pad(codes, (0, words * slots - codes.shape[-1])).unflatten(-1, (words, slots))
    packed = torch.zeros(grouped.shape[:-1], dtype=torch.int32, device=codes.device)
    for slot in range(slots):
        packed |= grouped[..., slot].int() << (slot * bits)
    return packed


def unpack_slots(words: Tensor, bits: int, count: int) -> Tensor:
    """Words int32 `[..., slot_words(count, bits)]` to codes uint8 `[..., count]`.

    Raises
        CheckpointError: a spare bit is set.
    """
    slots = WORD_BITS // bits
    codes = torch.empty((*words.shape, slots), dtype=torch.uint8, device=words.device)
    for slot in range(slots):
        codes[..., slot] = (words >> (slot * bits)) & ((1 << bits) - 1)
    if slots * bits < WORD_BITS:
        _require_zero(words >> (slots * bits), bits, count)
    flat = codes.flatten(-2)
    return _trimmed(flat, bits, count)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Codes uint8 `[..., count]` below 16, `count` even, to bytes uint8 `[..., count / 2]`."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Bytes uint8 `[..., m]` to codes uint8 `[..., 2 * m]`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def _unit_bytes(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 `[..., 8 * units]` to the bytes of their stream, `[..., bits * units]`."""
    if bits == 8:
        return codes
    if bits == 4:
        return pack_nibbles(codes)
    grouped = codes.unflatten(-1, (-1, _UNIT))
    integers = torch.zeros(grouped.shape[:-1], dtype=torch.int64, device=codes.device)
    for position in range(_UNIT):
        integers |= grouped[..., position].long() << (position * bits)
    return _split(integers)[..., :bits].flatten(-2)


def _unit_codes(stream: Tensor, bits: int) -> Tensor:
    """The inverse of `_unit_bytes`, in memory of its own."""
    if bits == 8:
        return stream.clone()
    if bits == 4:
        return unpack_nibbles(stream)
    integers = _join(pad(stream.unflatten(-1, (-1, bits)), (0, 8 - bits)), torch.int64)
    codes = torch.empty((*integers.shape, _UNIT), dtype=torch.uint8, device=stream.device)
    for position in range(_UNIT):
        codes[..., position] = (integers >> (position * bits)) & ((1 << bits) - 1)
    return codes.flatten(-2)


def _split(integers: Tensor) -> Tensor:
    """Integers `[...]` as their bytes: uint8 `[..., itemsize]`, least significant first."""
    split = integers.unsqueeze(-1).contiguous().view(torch.uint8)
    return split if _LITTLE_ENDIAN else split.flip(-1)


def _join(split: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes uint8 `[..., itemsize]`, least significant first, as integers `[...]` of `dtype`."""
    ordered = split if _LITTLE_ENDIAN else split.flip(-1)
    return ordered.contiguous().view(dtype).squeeze(-1)


def _trimmed(codes: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` codes of each row, the rest being zero."""
    if codes.shape[-1] == count:
        return codes
    _require_zero(codes[..., count:], bits, count)
    # Not `contiguous`, which leaves a single row with the strides of the longer one.
    return codes[..., :count].clone(memory_format=torch.contiguous_format)


def _require_zero(spare: Tensor, bits: int, count: int) -> None:
    """Spare bits must be zero, or packing the codes again would not give the same words."""
    if spare.numel() and bool(spare.any()):
        raise CheckpointError(
            f"packed codes: got a set bit outside the {count} codes of {bits} bits, must be zero"
        )
