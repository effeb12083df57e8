"""The packed form: planes as documented, exact both ways, nothing else touched."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from firesteel.errors import CheckpointError
from firesteel.formats.base import QuantizedMatrix, Scheme
from firesteel.formats.packed import PackedWeights, pack_codes, packed_bytes, unpack_codes
from tests.strategies import bits_of, matrices, schemes


def poisoned(scheme: Scheme, num_matrices: int, num_parts: int = 1) -> PackedWeights:
    """A stack whose buffers are all 0xFF."""
    packed = PackedWeights(scheme, num_matrices, num_parts)
    for buffer in packed.buffers():
        buffer.view(torch.uint8).fill_(0xFF)
    return packed


def assert_same(got: QuantizedMatrix, expected: QuantizedMatrix) -> None:
    for name in ("codes", "scales", "zero_points", "group_index"):
        left, right = getattr(got, name), getattr(expected, name)
        assert (left is None) == (right is None), name
        if left is not None:
            assert torch.equal(bits_of(left), bits_of(right)), name
    assert type(got.global_scale) is type(expected.global_scale)
    if got.global_scale is not None and expected.global_scale is not None:
        left, right = got.global_scale.value.reshape(1), expected.global_scale.value.reshape(1)
        assert torch.equal(bits_of(left), bits_of(right))


@given(bits=st.sampled_from((3, 4, 8)), k=st.integers(1, 300), seed=st.integers(0, 2**32 - 1))
def test_codes_come_back_and_spare_columns_are_zero(bits: int, k: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (2, 3, k), dtype=torch.uint8, generator=generator)
    packed = pack_codes(codes, bits)
    assert packed.shape == (2, 3, -(-k // 128), 16 * bits)
    assert torch.equal(unpack_codes(packed, bits, k), codes)
    padded = unpack_codes(packed, bits, packed.shape[-2] * 128)
    assert (padded[..., k:] == 0).all()


def code_at(block: Tensor, bits: int, column: int) -> int:
    """One code by the layout's own words, with Python integers."""
    data = [int(byte) for byte in block]
    if bits == 8:
        return data[column]
    width = 32 if bits == 4 else 16
    plane, j = divmod(column, width)
    word = data[2 * j] | data[2 * j + 1] << 8
    if bits == 4:
        return word >> (4 * plane) & 15
    return (word >> (2 * plane) & 3) | (data[32 + j] >> plane & 1) << 2


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_a_block_is_laid_out_as_documented(bits: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (128,), dtype=torch.uint8, generator=generator)
    block = pack_codes(codes, bits)[0]
    assert [code_at(block, bits, column) for column in range(128)] == codes.tolist()


@given(data=st.data(), parts=st.integers(1, 2))
@settings(max_examples=150)
def test_a_matrix_comes_back_bit_for_bit_and_no_other_is_touched(
    data: st.DataObject, parts: int
) -> None:
    scheme = data.draw(schemes())
    matrix = data.draw(matrices(scheme))
    packed = poisoned(scheme, num_matrices=3, num_parts=parts)
    packed.write(1, parts - 1, matrix)
    assert_same(packed.read(1, parts - 1), matrix)
    own = slice((parts - 1) * scheme.n, parts * scheme.n)
    for name, buffer in packed.named_buffers():
        rest = buffer.clone()
        written = rest[1, parts - 1 if name in ("global_scale", "column_order") else own]
        written.view(torch.uint8).fill_(0xFF) if written.ndim else written.fill_(-1)
        assert (rest.view(torch.uint8) == 0xFF).all(), name


@given(scheme=schemes())
def test_packed_bytes_says_what_the_buffers_take(scheme: Scheme) -> None:
    packed = PackedWeights(scheme, num_matrices=2, num_parts=2)
    assert packed.num_bytes == 4 * packed_bytes(scheme)


@given(data=st.data())
@settings(max_examples=30)
def test_a_change_of_dtype_leaves_stored_scales_alone(data: st.DataObject) -> None:
    scheme = data.draw(schemes())
    matrix = data.draw(matrices(scheme))
    packed = PackedWeights(scheme, num_matrices=1)
    packed.write(0, 0, matrix)
    assert_same(packed.half().to(torch.bfloat16).float().read(0, 0), matrix)


def test_act_order_needs_whole_groups() -> None:
    scheme = Scheme(
        format="gptq", element="int4", n=8, k=64, group_size=32, scale="fp16", has_group_index=True
    )
    index = torch.zeros(64, dtype=torch.int32)
    index[:20] = 1
    matrix = QuantizedMatrix(
        codes=torch.zeros(8, 64, dtype=torch.uint8),
        scales=torch.ones(8, 2, dtype=torch.float16),
        group_index=index,
    )
    with pytest.raises(CheckpointError, match=r"g_idx: groups have \[20, 44\] columns"):
        PackedWeights(scheme, 1).write(0, 0, matrix)
