"""Trellis tiles against a second reading in Python integers, one bit and one weight at a time."""

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firesteel.errors import CheckpointError, InvalidArgumentError, UnsupportedError
from firesteel.formats.trellis import (
    TrellisCode,
    codebook_values,
    decode_tiles,
    dequantize,
    hadamard128,
    sign_bits_to_scales,
    states_of,
)
from tests.strategies import CODEBOOKS, bits_of, random_bits, stored_tiles

# fp16 bits of some states, by codebook.
KNOWN = {
    0x0000: (0x3F60, 0x3A25, 0xC2E8),
    0x0001: (0x304E, 0xBB5B, 0x3921),
    0x0002: (0xBA13, 0x3B74, 0xB72D),
    0x1234: (0x3E0F, 0xC066, 0xB89E),
    0x8000: (0xB915, 0xB7F8, 0xBAF2),
    0xABCD: (0x35E7, 0xB98E, 0xBD42),
    0xFFFF: (0x3ACD, 0xB110, 0xB936),
}

# Root mean squares over all states.
SIZES = {"mcg": 1.24411, "3inst": 1.24371, "mul1": 1.00031}


def half(bits: int) -> float:
    return struct.unpack("<e", struct.pack("<H", bits))[0]


def rounded(number: float) -> float:
    """A Python float, rounded to fp16 once."""
    return struct.unpack("<e", struct.pack("<e", number))[0]


def value_of(state: int, codebook: str) -> float:
    """The number of one state. Python's floats hold every step before the last one exactly."""
    if codebook == "mul1":
        product = state * 0x83DCD12D % 2**32
        return rounded(
            half(0x6400 + sum(product.to_bytes(4, "little"))) * half(0x1EEE) + half(0xC931)
        )
    factor, term = {"mcg": (0xCBAC1FED, 0), "3inst": (89226354, 64248484)}[codebook]
    mixed = (state * factor + term) % 2**32 & 0x8FFF8FFF ^ 0x3B603B60
    return rounded(half(mixed % 2**16) + half(mixed >> 16))


def states_read(tile: list[int], bits: float) -> list[int]:
    """States of one tile of int16 words, in the order of the stream."""
    data = b"".join(struct.pack("<h", word) for word in tile)
    stream = "".join(f"{word:032b}" for (word,) in struct.iter_unpack("<I", data))
    low = int(bits)
    states, end = [], 0
    for t in range(256):
        end += low if bits == low or t % 2 == 0 else low + 1
        window = "".join(stream[i % len(stream)] for i in range(end - 16, end))
        states.append(int(window, 2))
    assert end == len(stream)
    return states


def tile_read(tile: list[int], code: TrellisCode) -> list[list[float]]:
    """The 16x16 numbers of one tile of int16 words."""
    numbers = [[0.0] * 16 for _ in range(16)]
    for t, state in enumerate(states_read(tile, code.bits)):
        lane, j = t // 8, t % 8
        row = (lane % 4) * 2 + (0, 1, 8, 9)[j % 4]
        numbers[row][lane // 4 + 8 * (j >= 4)] = value_of(state, code.codebook)
    return numbers


@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_every_state_has_the_number_of_its_codebook(codebook):
    values = codebook_values(codebook)
    assert values.dtype == torch.float16
    expected = [value_of(state, codebook) for state in range(65536)]
    assert values.tolist() == expected
    column = CODEBOOKS.index(codebook)
    for state, bits in KNOWN.items():
        assert int(bits_of(values)[state]) & 0xFFFF == bits[column]


@pytest.mark.parametrize(("codebook", "size"), list(SIZES.items()))
def test_the_size_of_a_codebook(codebook, size):
    got = codebook_values(codebook).double().square().mean().sqrt().item()
    assert got == pytest.approx(size, abs=5e-6)


@given(stored_tiles())
@settings(max_examples=30)
def test_tiles_read_bit_by_bit(case):
    code, trellis = case
    states = states_of(trellis, code)
    what = decode_tiles(trellis, code)
    assert states.dtype == torch.int32
    assert what.dtype == torch.float16
    for i, row in enumerate(trellis.tolist()):
        for j, tile in enumerate(row):
            assert states[i, j].tolist() == states_read(tile, code.bits)
            block = what[16 * i : 16 * i + 16, 16 * j : 16 * j + 16]
            assert block.tolist() == tile_read(tile, code)


@pytest.mark.parametrize("bits", [2, 3.5])
def test_many_tiles_are_each_read_alone(bits):
    """More tiles than are decoded at a time, in rows that do not divide evenly."""
    code = TrellisCode(bits, "mcg")
    generator = torch.Generator().manual_seed(0)
    trellis = random_bits((37, 30, code.tile_words), torch.int16, generator)
    what = decode_tiles(trellis, code)
    for i, j in ((0, 0), (16, 29), (17, 0), (36, 29)):
        alone = decode_tiles(trellis[i : i + 1, j : j + 1], code)
        assert torch.equal(what[16 * i : 16 * i + 16, 16 * j : 16 * j + 16], alone)
    strided = torch.stack((trellis, trellis), dim=3)[..., 0]
    assert torch.equal(decode_tiles(strided, code), what)


def test_no_tiles():
    code = TrellisCode(3, "mcg")
    empty = torch.empty(0, 4, 48, dtype=torch.int16)
    assert decode_tiles(empty, code).shape == (0, 64)
    assert states_of(empty, code).shape == (0, 4, 256)


@given(stored_tiles(max_rows=1, max_columns=1), st.integers(0, 2**32 - 1))
@settings(max_examples=10)
def test_dequantize_is_its_formula(case, seed):
    code, tile = case
    generator = torch.Generator().manual_seed(seed)
    trellis = tile.expand(8, 16, -1).clone()
    trellis[1::2] = trellis[1::2].flip(-1)
    suh = torch.randn(128, generator=generator).half()
    svh = torch.randn(256, generator=generator).half()
    what = decode_tiles(trellis, code).double()
    h = hadamard128(torch.eye(128).double())
    wide = torch.block_diag(h, h)
    scales = suh.double().unsqueeze(1) * svh.double()
    expected = scales * (h @ what @ wide)
    bound = 2 * 130 * 2.0**-23 * scales.abs() * (h.abs() @ what.abs() @ wide.abs())
    got = dequantize(trellis, code, suh, svh)
    assert got.dtype == torch.float32
    assert bool(((got.double() - expected).abs() <= bound).all())


@given(st.lists(st.integers(-(2**15), 2**15 - 1), min_size=1, max_size=8))
def test_a_set_sign_bit_is_minus_one(words):
    scales = sign_bits_to_scales(torch.tensor(words, dtype=torch.int16))
    assert scales.dtype == torch.float16
    assert scales.tolist() == [-1.0 if word >> i & 1 else 1.0 for word in words for i in range(16)]


@pytest.mark.parametrize("bits", [0, 0.5, 2.25, 8.5, -3])
def test_rates_that_do_not_exist(bits):
    with pytest.raises(UnsupportedError, match=r"bits: got .*, must be 1 to 8 in steps of 0\.5"):
        TrellisCode(bits, "mcg")


def test_codebooks_that_do_not_exist():
    with pytest.raises(UnsupportedError, match=r"codebook: got 'lut', must be one of \['mcg', "):
        TrellisCode(3, "lut")


@pytest.mark.parametrize(
    ("shape", "dtype", "got"),
    [
        ((8, 8, 64), torch.int16, r"int16 \[8, 8, 64\]"),
        ((8, 8, 48), torch.int32, r"int32 \[8, 8, 48\]"),
        ((8, 48), torch.int16, r"int16 \[8, 48\]"),
        ((), torch.int16, r"int16 \[\]"),
    ],
)
def test_tiles_of_another_rate_dtype_or_shape(shape, dtype, got):
    trellis = torch.zeros(shape, dtype=dtype)
    code = TrellisCode(3, "mcg")
    message = rf"trellis: got {got}, expected int16 \[k / 16, n / 16, 48\] at 3 bits"
    with pytest.raises(CheckpointError, match=message):
        decode_tiles(trellis, code)
    if shape != (8, 48):
        with pytest.raises(CheckpointError, match=rf"got {got}, expected int16 \[\.\.\., 48\]"):
            states_of(trellis, code)


def test_scales_and_sizes_that_do_not_fit():
    code = TrellisCode(1, "mul1")
    trellis = torch.zeros(8, 16, 16, dtype=torch.int16)
    suh, svh = torch.ones(128).half(), torch.ones(256).half()
    with pytest.raises(
        CheckpointError, match=r"suh: got float16 \[256\], expected float16 \[128\]"
    ):
        dequantize(trellis, code, svh, svh)
    with pytest.raises(
        CheckpointError, match=r"svh: got float32 \[256\], expected float16 \[256\]"
    ):
        dequantize(trellis, code, suh, svh.float())
    with pytest.raises(
        CheckpointError, match=r"trellis\.shape\[0\]: got 7, must be a multiple of 8"
    ):
        dequantize(trellis[:7], code, suh[:112], svh)
    with pytest.raises(
        InvalidArgumentError, match=r"x\.shape\[-1\]: got 100, must be a multiple of"
    ):
        hadamard128(torch.zeros(3, 100))
    with pytest.raises(
        CheckpointError, match=r"signs: got float16 \[2\], expected int16 \[n / 16\]"
    ):
        sign_bits_to_scales(torch.zeros(2).half())
