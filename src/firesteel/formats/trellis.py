"""EXL3: weights as walks through a trellis of 65536 states, in a rotated frame.

A matrix is `[in, out]`, which is `[k, n]`, and cut into tiles of 16x16. A tile is one cyclic stream
of `256 * bits` bits, to which every weight in turn adds a symbol of `bits` bits. The state of a
weight is the last 16 bits of the stream when its symbol has come, and a codebook makes a number of
a state. So weights next to one another share bits, and the first ones take theirs from the end.

    stream of 3 bits   110 001 101 ... 111 010 110 101 001
    state of weight 0                    1 010 110 101 001 110
    state of weight 1                        0 110 101 001 110 001

Bits of a half-integer rate alternate: at 2.5 weight 0 adds 2 bits, weight 1 adds 3, and so on.
Weights stand in the order of a tensor core's fragments: weight t is that of lane `t // 8`, slot
`j = t % 8`, in row `lane % 4 * 2 + (0, 1, 8, 9)[j % 4]` and column `lane // 4 + 8 * (j // 4)`.

The numbers of all tiles, What, are weights in a rotated frame: W = diag(suh) H What H diag(svh),
where H are Hadamard matrices of 128 down the diagonal.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import torch
from torch import Tensor

from firesteel.errors import CheckpointError, InvalidArgumentError, UnsupportedError
from firesteel.formats.hadamard import BLOCK, hadamard128
from firesteel.formats.stored import dtype_name

__all__ = [
    "BLOCK",
    "MULTIPLIERS",
    "NUM_STATES",
    "TILE",
    "TILE_WEIGHTS",
    "Codebook",
    "TrellisCode",
    "codebook_values",
    "decode_tiles",
    "dequantize",
    "hadamard128",
    "scales_to_sign_bits",
    "sign_bits_to_scales",
    "states_of",
    "tile_order",
]

Codebook = Literal["mcg", "3inst", "mul1"]

TILE = 16
"""Rows and columns of a tile."""
TILE_WEIGHTS = TILE * TILE
STATE_BITS = 16
NUM_STATES = 1 << STATE_BITS

MULTIPLIERS = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}
"""What a codebook multiplies a state by; files name these two codebooks by it."""

_RATES = tuple(half / 2 for half in range(2, 17))
# Tiles that are decoded at a time, so that what lies between stays in the cache.
_CHUNK_TILES = 512


@dataclass(frozen=True, slots=True)
class TrellisCode:
    """How the weights of a tile are stored.

    Fields
        bits      bits a weight: 1 to 8 in steps of one half
        codebook  what makes a number of a state: "mcg", "3inst" or "mul1"

    Raises
        UnsupportedError: another rate or codebook.
    """

    bits: float
    codebook: Codebook

    def __post_init__(self) -> None:
        if self.bits not in _RATES:
            raise UnsupportedError(f"bits: got {self.bits}, must be 1 to 8 in steps of 0.5")
        if self.codebook not in get_args(Codebook):
            raise UnsupportedError(
                f"codebook: got {self.codebook!r}, must be one of {list(get_args(Codebook))}"
            )

    @property
    def tile_words(self) -> int:
        """int16 words of a stored tile."""
        return int(self.bits * TILE_WEIGHTS) // 16

    @property
    def symbol_bits(self) -> tuple[int, int]:
        """Bits that a weight at an even place of the stream adds, and one at an odd place."""
        low = int(self.bits)
        return low, int(2 * self.bits) - low

    def ends(self) -> Tensor:
        """int64 `[256]`: where in the stream, in bits, the symbol of each weight ends."""
        even, odd = self.symbol_bits
        place = torch.arange(TILE_WEIGHTS)
        return place // 2 * (even + odd) + torch.where(place % 2 == 0, even, even + odd)


@lru_cache(maxsize=16)
def codebook_values(codebook: Codebook, device: torch.device | None = None) -> Tensor:
    """fp16 `[65536]`: the number of each state. Shared by all callers: not to be written to."""
    state = torch.arange(NUM_STATES)
    if codebook == "mul1":
        product = (state * MULTIPLIERS["mul1"]).unsqueeze(1)
        total = ((product >> torch.arange(0, 32, 8)) & 0xFF).sum(1)
        # The product and the sum have 22 bits at most: fp32 holds them, and only `half` rounds.
        scale, offset = _half_of(torch.tensor([0x1EEE, 0xC931])).float()
        return (_half_of(0x6400 + total).float() * scale + offset).half().to(device)
    product = state * 89226354 + 64248484
    if codebook == "mcg":
        product = state * MULTIPLIERS["mcg"]
    mixed = (product & 0x8FFF8FFF) ^ 0x3B603B60
    return (_half_of(mixed & 0xFFFF) + _half_of((mixed >> 16) & 0xFFFF)).to(device)


@lru_cache(maxsize=8)
def tile_order(device: torch.device | None = None) -> Tensor:
    """int64 `[256]`: the place in the stream of the weight at `row * 16 + column` of a tile."""
    row = torch.arange(TILE).unsqueeze(1)
    column = torch.arange(TILE)
    lane = column % 8 * 4 + row % 8 // 2
    slot = column // 8 * 4 + row // 8 * 2 + row % 2
    return (lane * 8 + slot).flatten().to(device)


def states_of(trellis: Tensor, code: TrellisCode) -> Tensor:
    """Stored tiles int16 `[..., 16 * bits]` to the states of their weights, int32 `[..., 256]`.

    Raises
        CheckpointError: not int16, or tiles of another rate.
    """
    _check_trellis(trellis, code)
    return _states(trellis, *_windows(code, trellis.device))


def decode_tiles(trellis: Tensor, code: TrellisCode) -> Tensor:
    """Stored tiles int16 `[k / 16, n / 16, 16 * bits]` to What, fp16 `[k, n]`.

    Raises
        CheckpointError: not int16 of three dimensions, or tiles of another rate.
    """
    _check_trellis(trellis, code, dims=3)
    rows, columns = trellis.shape[:2]
    values = codebook_values(code.codebook, trellis.device)
    order = tile_order(trellis.device)
    word, shift = (table[order] for table in _windows(code, trellis.device))
    what = torch.empty((rows, TILE, columns, TILE), dtype=torch.float16, device=trellis.device)
    step = max(1, _CHUNK_TILES // max(1, columns))
    for first in range(0, rows, step):
        states = _states(trellis[first : first + step], word, shift)
        numbers = values.index_select(0, states.view(-1)).view(*states.shape[:2], TILE, TILE)
        what[first : first + step] = numbers.transpose(1, 2)
    return what.view(rows * TILE, columns * TILE)


def dequantize(trellis: Tensor, code: TrellisCode, suh: Tensor, svh: Tensor) -> Tensor:
    """W = diag(suh) H What H diag(svh), fp32 `[k, n]`.

    name     shape                     dtype
    trellis  [k/16, n/16, 16 * bits]   int16
    suh      [k]                       fp16; scales of inputs
    svh      [n]                       fp16; scales of outputs

    Raises
        CheckpointError: a tensor of another shape or dtype, or k or n that 128 does not divide.
    """
    _check_trellis(trellis, code, dims=3)
    for axis, (name, scales) in enumerate((("suh", suh), ("svh", svh))):
        size = trellis.shape[axis] * TILE
        if size % BLOCK:
            raise CheckpointError(
                f"trellis.shape[{axis}]: got {trellis.shape[axis]}, "
                f"must be a multiple of {BLOCK // TILE}"
            )
        if scales.shape != (size,) or scales.dtype != torch.float16:
            raise CheckpointError(
                f"{name}: got {dtype_name(scales.dtype)} {list(scales.shape)}, "
                f"expected float16 [{size}]"
            )
    rotated = hadamard128(hadamard128(decode_tiles(trellis, code), dim=0), dim=1)
    return rotated.mul_(suh.float().unsqueeze(1)).mul_(svh.float())


def sign_bits_to_scales(signs: Tensor) -> Tensor:
    """Sign bits int16 `[n / 16]` of older files (`su`, `sv`) to scales fp16 `[n]`.

    The lowest bit comes first; a bit that is set is -1, else 1.

    Raises
        CheckpointError: not int16 of one dimension.
    """
    if signs.dtype != torch.int16 or signs.ndim != 1:
        raise CheckpointError(
            f"signs: got {dtype_name(signs.dtype)} {list(signs.shape)}, expected int16 [n / 16]"
        )
    bits = (signs.unsqueeze(1) >> torch.arange(16, device=signs.device)) & 1
    return (1 - 2 * bits).flatten().half()


def scales_to_sign_bits(scales: Tensor) -> Tensor:
    """The inverse of `sign_bits_to_scales`.

    Raises
        InvalidArgumentError: a scale that is neither 1 nor -1.
    """
    if bool((scales.abs() != 1).any()):
        wrong = float(scales[scales.abs() != 1][0])
        raise InvalidArgumentError(f"scales: got {wrong:g}, must be 1 or -1 to be stored as signs")
    bits = (scales < 0).unflatten(0, (-1, 16)).int()
    return (bits << torch.arange(16, dtype=torch.int32)).sum(-1).to(torch.int16)


def _check_trellis(trellis: Tensor, code: TrellisCode, dims: int | None = None) -> None:
    shape = tuple(trellis.shape)
    is_tiles = shape[-1:] == (code.tile_words,) and dims in (None, len(shape))
    if trellis.dtype != torch.int16 or not is_tiles:
        lead = "..." if dims is None else "k / 16, n / 16"
        raise CheckpointError(
            f"trellis: got {dtype_name(trellis.dtype)} {list(shape)}, "
            f"expected int16 [{lead}, {code.tile_words}] at {code.bits} bits"
        )


def _states(trellis: Tensor, word: Tensor, shift: Tensor) -> Tensor:
    """The 16 bits of the stream that each (word, shift) of `_windows` picks: int32 `[..., 256]`."""
    # A stream is 32-bit words, high half first; the low half is stored first.
    halves = trellis.unflatten(-1, (-1, 2)).flip(-1).flatten(-2).int()
    pairs = (halves << 16) | (halves.roll(-1, -1) & 0xFFFF)
    return pairs.index_select(-1, word).bitwise_right_shift_(shift).bitwise_and_(0xFFFF)


@lru_cache(maxsize=64)
def _windows(code: TrellisCode, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of each weight the 16-bit word in which its state begins, and the bits to drop of that pair.

    int64 and int32 `[256]`: state = (word, next word) >> shift, its low 16 bits.
    """
    start = (code.ends() - STATE_BITS) % (code.tile_words * 16)
    return (start // 16).to(device), (16 - start % 16).int().to(device)


def _half_of(bits: Tensor) -> Tensor:
    """The fp16 numbers that have these bits, given as integers below 65536."""
    return bits.to(torch.uint16).view(torch.float16)
