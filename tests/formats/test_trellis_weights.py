"""Stacks of EXL3 matrices in memory: the order of words, where matrices begin, what is read."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firesteel.formats.trellis import TrellisCode
from firesteel.formats.trellis_matrix import trellis_scheme
from firesteel.formats.trellis_weights import (
    MATRIX_UNIT,
    TrellisWeights,
    tiles_of_words,
    words_of_tiles,
)
from tests.strategies import TRELLIS_RATES, random_bits, random_trellis

WHOLE = tuple(int(rate) for rate in TRELLIS_RATES if rate % 1 == 0)


@pytest.mark.parametrize("bits", TRELLIS_RATES)
@pytest.mark.parametrize(("n", "k"), [(128, 128), (200, 300), (256, 40)])
def test_words_and_tiles_are_each_other_s_inverse(n: int, k: int, bits: float) -> None:
    scheme = trellis_scheme(n, k, TrellisCode(bits, "mcg"))
    tiles = random_bits(scheme.tiles, torch.int16, torch.Generator().manual_seed(n))
    words = words_of_tiles(tiles, scheme.code)
    assert words.dtype == torch.int32
    assert words.numel() * 2 == tiles.numel()
    again = tiles_of_words(words.flatten(), scheme)
    assert torch.equal(again, tiles)
    assert again.data_ptr() != words.data_ptr()
    # Half bits stay as they are stored; of whole ones every word has a place of its own.
    is_moved = not torch.equal(words.flatten(), tiles.view(torch.int32).flatten())
    assert is_moved == (bits % 1 == 0)


@pytest.mark.parametrize("bits", WHOLE)
def test_a_word_stands_where_the_text_says(bits: int) -> None:
    """`[n/128, k/128, bits, half, tile along n, group, tile along k]`."""
    scheme = trellis_scheme(256, 384, TrellisCode(bits, "mul1"))
    count = torch.Size(scheme.tiles).numel() // 2
    # Every word is its own place among the words as stored.
    tiles = torch.arange(count, dtype=torch.int32).view(torch.int16).view(scheme.tiles)
    words = words_of_tiles(tiles, scheme.code).view(2, 3, bits, 2, 8, 8, 4)
    generator = torch.Generator().manual_seed(bits)
    for _ in range(30):
        place = [int(torch.randint(size, (), generator=generator)) for size in words.shape]
        row_block, block, word, half, tile_n, group, tile_k = place
        along_k, along_n = 8 * block + 4 * half + tile_k, 8 * row_block + tile_n
        stored = ((along_k * 16 + along_n) * 8 + group) * bits + word
        assert words[tuple(place)] == stored


rates = st.sampled_from(TRELLIS_RATES)


@given(
    bits=st.lists(rates, min_size=6, max_size=6),
    n=st.integers(1, 260),
    k=st.integers(1, 260),
    seed=st.integers(0, 999),
)
@settings(max_examples=15)
def test_what_is_written_is_read_and_nothing_else_is_touched(
    bits: list[float], n: int, k: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    schemes = [trellis_scheme(n, k, TrellisCode(rate, "mcg")) for rate in bits]
    stack = TrellisWeights(schemes, num_matrices=3, num_parts=2)
    for buffer in stack.buffers():
        buffer.fill_(-1)
    matrices = [random_trellis(scheme, generator) for scheme in schemes]
    order = torch.randperm(6, generator=generator).tolist()
    for done, place in enumerate(order, 1):
        stack.write(place // 2, place % 2, matrices[place])
        for other in order[:done]:
            read, own = stack.read(other // 2, other % 2), matrices[other]
            assert torch.equal(read.trellis, own.trellis)
            for side in ("suh", "svh"):
                held, given = getattr(read, side), getattr(own, side)
                assert torch.equal(held.view(torch.int16), given.view(torch.int16))
        for other in order[done:]:
            assert (stack.read(other // 2, other % 2).trellis == -1).all()


def test_the_table_says_where_matrices_begin_and_their_bits() -> None:
    bits = (3, 1, 8, 2)
    schemes = [trellis_scheme(200, 300, TrellisCode(float(rate), "3inst")) for rate in bits]
    stack = TrellisWeights(schemes, num_matrices=2, num_parts=2)
    # Two times three blocks of 128 x 128, each of 2048 bytes a bit.
    assert stack.matrices.tolist() == [[[0, 3], [18, 1]], [[24, 8], [72, 2]]]
    assert stack.matrices.dtype == torch.int32
    assert stack.words.numel() * 4 == (72 + 12) * MATRIX_UNIT
    matrices = [random_trellis(scheme, torch.Generator().manual_seed(7)) for scheme in schemes]
    for place, matrix in enumerate(matrices):
        stack.write(place // 2, place % 2, matrix)
        start, rate = stack.matrices[place // 2, place % 2].tolist()
        first = start * MATRIX_UNIT // 4
        words = stack.words[first : first + 6 * rate * MATRIX_UNIT // 4]
        assert torch.equal(tiles_of_words(words, schemes[place]), matrix.trellis)
