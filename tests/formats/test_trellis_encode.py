"""The search of a trellis: how near it comes, what it must find, and that it is always the same."""

import pytest
import torch
from hypothesis import given, settings

from firesteel.errors import InvalidArgumentError
from firesteel.formats.trellis import (
    TrellisCode,
    codebook_values,
    decode_tiles,
    dequantize,
    states_of,
)
from firesteel.formats.trellis_encode import encode_tiles, quantize_trellis
from tests.strategies import CODEBOOKS, TRELLIS_RATES, stored_tiles


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def error_of(numbers: torch.Tensor, wanted: torch.Tensor) -> float:
    """Mean squared error by variance."""
    return ((numbers.float() - wanted).square().sum() / wanted.square().sum()).item()


@pytest.fixture
def two_threads():
    """PyTorch's own number of threads, whatever the machine's."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@given(stored_tiles(max_rows=1))
@settings(max_examples=12)
def test_numbers_of_a_trellis_are_found_again(case):
    code, trellis = case
    what = decode_tiles(trellis, code)
    found = encode_tiles(what, code)
    assert found.shape == trellis.shape
    assert torch.equal(decode_tiles(found, code), what)


def test_each_half_bit_brings_the_error_down():
    """At b bits the error of normal noise is 4**-b at least, and not much more."""
    wanted = noise(16, 32)
    errors = []
    for i, bits in enumerate(TRELLIS_RATES):
        code = TrellisCode(bits, CODEBOOKS[i % 3])
        # What suits few bits does not suit many, which must not run out of large numbers.
        size = codebook_values(code.codebook).float().square().mean().sqrt() * (1.1 - 0.05 * bits)
        errors.append(
            error_of(decode_tiles(encode_tiles(wanted * size, code), code) / size, wanted)
        )
    assert errors == sorted(errors, reverse=True)
    for bits, error in zip(TRELLIS_RATES, errors, strict=True):
        assert 0.95 < error * 4**bits < 1.6


@pytest.mark.parametrize("bits", [2.5, 3])
def test_no_symbol_can_be_changed_for_the_better(bits):
    """Viterbi's way is the cheapest; so it is among those that differ in one symbol.

    Not so in the last symbols, which would also change the group in which the ring begins.
    """
    code = TrellisCode(bits, "mcg")
    wanted = noise(16, 16) * 1.2
    trellis = encode_tiles(wanted, code)
    least = (decode_tiles(trellis, code).float() - wanted).square().sum()
    words = trellis.flatten().int()
    flips = []
    ends = [0, *code.ends().tolist()]
    for place in range(256 - 16 // int(bits) - 1):
        start, end = ends[place], ends[place + 1]
        for change in range(1, 1 << (end - start)):
            flipped = words.clone()
            for bit in range(start, end):
                if change >> (end - 1 - bit) & 1:
                    # A 32-bit word is read from its top, and its low half is stored first.
                    flipped[bit // 16 ^ 1] ^= 1 << (15 - bit % 16)
            flips.append(flipped.to(torch.uint16).view(torch.int16))
    what = decode_tiles(torch.stack(flips).unsqueeze(1), code).float()
    errors = (what.view(-1, 16, 16) - wanted).square().sum((1, 2))
    assert len(flips) > 1000
    assert bool((errors >= least * (1 - 1e-6)).all())


def test_a_tile_does_not_depend_on_others_or_on_threads(two_threads):
    code = TrellisCode(4, "mul1")
    wanted = noise(48, 48)
    trellis = encode_tiles(wanted, code)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    assert torch.equal(encode_tiles(wanted, code), trellis)
    for i, j in ((0, 0), (1, 2), (2, 2)):
        alone = wanted[16 * i : 16 * i + 16, 16 * j : 16 * j + 16].requires_grad_()
        assert torch.equal(encode_tiles(alone, code)[0, 0], trellis[i, j])


def test_three_bits_of_normal_noise():
    """The least error that any code of 3 bits can have is 0.0156."""
    code = TrellisCode(3, "mcg")
    weight = noise(128, 128) * 0.02
    trellis, suh, svh = quantize_trellis(weight, code)
    assert error_of(dequantize(trellis, code, suh, svh).t(), weight) <= 0.0175
    states = states_of(trellis, code)
    assert torch.equal(states[..., 0] >> 3, states[..., -1] & 0x1FFF)


def test_rows_columns_and_sizes_of_all_kinds():
    """One output is zero, one input is loud and one silent; the rest is padded."""
    code = TrellisCode(6, "3inst")
    weight = (noise(100, 120) * 0.01).bfloat16()
    weight[7] = 0
    weight[:, 3] *= 200
    weight[:, 5] = 0
    trellis, suh, svh = quantize_trellis(weight, code)
    assert (trellis.shape, suh.shape, svh.shape) == ((8, 8, 96), (128,), (128,))
    assert (trellis.dtype, suh.dtype, svh.dtype) == (torch.int16, torch.float16, torch.float16)
    assert bool((suh != 0).all())
    back = dequantize(trellis, code, suh, svh).t()
    assert not bool(back[7].any())
    assert not bool(back[100:].any())
    limit = 1.6 * 4.0**-6
    is_loud = torch.arange(120) == 3
    for inputs in (is_loud, ~is_loud):
        assert error_of(back[:100, :120][:, inputs], weight[:, inputs].float()) < limit
    # Both scales take the square root of a power of four, which fp16 holds exactly.
    smaller = quantize_trellis(weight * 2.0**-8, code)
    assert torch.equal(smaller[0], trellis)
    has_numbers = weight.any(0)
    assert torch.equal(smaller[1][:120][has_numbers] * 16, suh[:120][has_numbers])
    assert torch.equal(smaller[2] * 16, svh)


def test_a_matrix_of_zeros_stays_one():
    code = TrellisCode(8, "mcg")
    trellis, suh, svh = quantize_trellis(torch.zeros(3, 5), code)
    assert not bool(dequantize(trellis, code, suh, svh).any())


@pytest.mark.parametrize("quantize", [encode_tiles, quantize_trellis])
def test_what_is_no_matrix_of_numbers_is_refused(quantize):
    name = "what" if quantize is encode_tiles else "weight"
    code = TrellisCode(3, "mcg")
    for wrong in (torch.zeros(16), torch.zeros(16, 16).int(), torch.zeros(0, 16)):
        with pytest.raises(InvalidArgumentError, match=rf"{name}: got .*, must be floating point"):
            quantize(wrong, code)
    for number in (torch.nan, -torch.inf, 1e300):
        matrix = torch.zeros(16, 16, dtype=torch.float64)
        matrix[3, 4] = number
        with pytest.raises(InvalidArgumentError, match=rf"{name}\[3, 4\]: got .*, must be finite"):
            quantize(matrix, code)


def test_parts_of_tiles_are_refused():
    with pytest.raises(InvalidArgumentError, match=r"what\.shape\[1\]: got 24, must be a multiple"):
        encode_tiles(torch.zeros(16, 24), TrellisCode(3, "mcg"))
