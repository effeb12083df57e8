"""Bit packing against one big integer, for every width."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firesteel.errors import CheckpointError
from firesteel.formats.bits import (
    pack_nibbles,
    pack_slots,
    pack_stream,
    slot_words,
    stream_words,
    unpack_nibbles,
    unpack_slots,
    unpack_stream,
)


@st.composite
def rows_of_codes(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    """A width and some rows of codes of one length."""
    bits = draw(st.integers(1, 8))
    count = draw(st.integers(1, 80))
    row = st.lists(st.integers(0, 2**bits - 1), min_size=count, max_size=count)
    return bits, draw(st.lists(row, min_size=1, max_size=3))


def as_signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


@given(rows_of_codes())
def test_a_stream_is_one_big_integer(case):
    bits, rows = case
    count = len(rows[0])
    packed = pack_stream(torch.tensor(rows, dtype=torch.uint8), bits)
    words = -(-count * bits // 32)
    assert stream_words(count, bits) == words
    for row, line in zip(rows, packed.tolist(), strict=True):
        whole = sum(code << (bits * i) for i, code in enumerate(row))
        assert line == [as_signed(whole >> (32 * i) & (2**32 - 1)) for i in range(words)]
    assert unpack_stream(packed, bits, count).tolist() == rows


@given(rows_of_codes())
def test_slots_do_not_straddle_words(case):
    bits, rows = case
    count, each = len(rows[0]), 32 // bits
    packed = pack_slots(torch.tensor(rows, dtype=torch.uint8), bits)
    assert slot_words(count, bits) == -(-count // each)
    for row, line in zip(rows, packed.tolist(), strict=True):
        chunks = [row[i : i + each] for i in range(0, count, each)]
        words = [sum(code << (bits * i) for i, code in enumerate(chunk)) for chunk in chunks]
        assert line == [as_signed(word) for word in words]
    assert unpack_slots(packed, bits, count).tolist() == rows


@given(rows_of_codes())
def test_columns_pack_as_rows_do(case):
    bits, rows = case
    codes = torch.tensor(rows, dtype=torch.uint8)
    strided = codes.t().contiguous().t()
    assert torch.equal(pack_stream(strided, bits), pack_stream(codes, bits))
    words = pack_stream(codes, bits).t().contiguous()
    assert unpack_stream(words.t(), bits, codes.shape[1]).tolist() == rows


@given(st.lists(st.integers(0, 255), min_size=1, max_size=40))
def test_nibbles_hold_the_even_code_low(data):
    packed = torch.tensor([data], dtype=torch.uint8)
    codes = unpack_nibbles(packed)
    assert codes.tolist() == [[half for byte in data for half in (byte % 16, byte // 16)]]
    assert torch.equal(pack_nibbles(codes), packed)


@pytest.mark.parametrize("bits", range(1, 9))
def test_a_set_spare_bit_is_refused(bits):
    count = 5
    used = count * bits
    words = pack_stream(torch.zeros(1, count, dtype=torch.uint8), bits)
    for spare in range(used, words.shape[1] * 32):
        dirty = words.clone()
        dirty[0, spare // 32] |= as_signed(1 << (spare % 32))
        with pytest.raises(CheckpointError, match=f"outside the {count} codes of {bits} bits"):
            unpack_stream(dirty, bits, count)


def test_a_set_top_bit_of_ten_a_word_is_refused():
    words = pack_slots(torch.full((1, 10), 7, dtype=torch.uint8), 3)
    assert words.tolist() == [[2**30 - 1]]
    for top in (30, 31):
        dirty = words | as_signed(1 << top)
        with pytest.raises(CheckpointError, match="got a set bit"):
            unpack_slots(dirty, 3, 10)


def test_eight_bit_codes_do_not_share_memory_with_the_words():
    words = torch.zeros(1, 4, dtype=torch.int32)
    codes = unpack_stream(words, 8, 16)
    words.fill_(-1)
    assert int(codes.max()) == 0
