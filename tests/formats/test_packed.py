"""The packed form: planes as documented, exact both ways, nothing else touched."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from firesteel.errors import CheckpointError
from firesteel.formats.base import ELEMENTS, QuantizedMatrix, Scheme
from firesteel.formats.packed import (
    TILE_ROWS,
    PackedWeights,
    pack_codes,
    packed_bytes,
    tile_rows,
    unpack_codes,
    untile_rows,
)
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


@given(
    element=st.sampled_from(sorted(ELEMENTS)), k=st.integers(1, 300), seed=st.integers(0, 2**32 - 1)
)
def test_codes_come_back_and_spare_columns_are_zero(element: str, k: int, seed: int) -> None:
    bits = ELEMENTS[element].bits
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (2, 3, k), dtype=torch.uint8, generator=generator)
    packed = pack_codes(codes, element)
    assert packed.shape == (2, 3, -(-k // 128), 16 * bits)
    assert torch.equal(unpack_codes(packed, element, k), codes)
    padded = unpack_codes(packed, element, packed.shape[-2] * 128)
    assert (padded[..., k:] == 0).all()


def code_at(block: Tensor, element: str, column: int) -> int:
    """One code by the layout's own words, with Python integers."""
    data = [int(byte) for byte in block]
    if element == "int8":
        return data[column]
    plane, j = divmod(column, 32)
    if element in ("int3", "nf3"):
        place, shift = j % 8 // 2 * 4 + j // 8, 4 * (j % 2)
        if plane < 3:
            return data[16 * plane + place] >> shift & 7
        return sum((data[16 * p + place] >> (shift + 3) & 1) << p for p in range(3))
    word = data[2 * j] | data[2 * j + 1] << 8
    if element == "e2m1":
        sign, lowest = (15, 12, 14, 13)[plane], (6, 3, 0, 9)[plane]
        return (word >> sign & 1) << 3 | word >> lowest & 7
    return word >> (4 * plane) & 15


@pytest.mark.parametrize("element", ELEMENTS)
def test_a_block_is_laid_out_as_documented(element: str) -> None:
    bits = ELEMENTS[element].bits
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (128,), dtype=torch.uint8, generator=generator)
    block = pack_codes(codes, element)[0]
    assert [code_at(block, element, column) for column in range(128)] == codes.tolist()


def test_the_documented_example_of_3_bits_holds() -> None:
    codes = torch.zeros(128, dtype=torch.uint8)
    codes[[2, 3, 98, 99]] = torch.tensor([5, 1, 6, 3], dtype=torch.uint8)
    runs = pack_codes(codes, "nf3").view(3, 16)
    assert runs.nonzero().tolist() == [[0, 4], [1, 4], [2, 4]]
    assert runs[:, 4].tolist() == [0x95, 0x88, 0x08]


@given(
    n=st.sampled_from((1, 63, 64, 65, 128, 130)),
    num_blocks=st.integers(1, 3),
    lead=st.sampled_from(((), (2,), (3, 2))),
    size=st.sampled_from((48, 64, 128)),
)
def test_tiled_rows_come_back_and_spare_rows_are_zero(
    n: int, num_blocks: int, lead: tuple[int, ...], size: int
) -> None:
    generator = torch.Generator().manual_seed(n)
    shape = (*lead, n, num_blocks, size)
    blocks = torch.randint(1, 256, shape, dtype=torch.uint8, generator=generator)
    tiles = tile_rows(blocks)
    num_tiles = -(-n // TILE_ROWS)
    tile = (3, TILE_ROWS, 16) if size == 48 else (TILE_ROWS, size)
    assert tiles.shape == (*lead, num_tiles, num_blocks, *tile)
    assert torch.equal(untile_rows(tiles, n).reshape(blocks.shape), blocks)
    for row in range(n):
        held = tiles.select(len(lead), row // 64).select(-2, row % 64)
        assert torch.equal(held.reshape(*lead, num_blocks, size), blocks[..., row, :, :])
    spare = untile_rows(tiles, num_tiles * TILE_ROWS).narrow(
        len(lead), n, num_tiles * TILE_ROWS - n
    )
    assert (spare == 0).all()


@given(
    element=st.sampled_from(("int3", "int4", "int8", "e2m1", "nf3")),
    n=st.sampled_from((1, 63, 64, 65)),
    k=st.sampled_from((1, 127, 128, 129)),
    parts=st.integers(1, 2),
    num_matrices=st.sampled_from((1, 3)),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=80)
def test_any_size_comes_back_from_the_documented_addresses(
    element: str, n: int, k: int, parts: int, num_matrices: int, seed: int
) -> None:
    scheme = Scheme(
        format="compressed-tensors",
        element=element,
        n=n,
        k=k,
        group_size=1 if element == "int8" else k,
        scale="fp16",
        has_zero_points=element not in ("e2m1", "nf3"),
    )
    generator = torch.Generator().manual_seed(seed)
    bits, groups = scheme.bits, (n, scheme.num_groups)
    packed = poisoned(scheme, num_matrices, parts)
    written: dict[tuple[int, int], QuantizedMatrix] = {}
    for index in range(num_matrices):
        for part in range(parts):
            zero_points = torch.randint(
                0, 1 << bits, groups, dtype=torch.uint8, generator=generator
            )
            matrix = QuantizedMatrix(
                codes=torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, generator=generator),
                scales=torch.rand(groups, generator=generator).half(),
                zero_points=zero_points if scheme.has_zero_points else None,
            )
            packed.write(index, part, matrix)
            written[index, part] = matrix
    data = packed.codes.flatten()
    num_tiles, num_blocks = -(-n // 64), -(-k // 128)
    for (index, part), matrix in written.items():
        assert_same(packed.read(index, part), matrix)
        assert torch.equal(packed.codes_of(index)[packed.rows_of(part)], matrix.codes)
        for row, column in ((0, 0), (n - 1, k - 1), (n - 1, 0), (n // 2, k // 2)):
            tile = (index * parts + part) * num_tiles + row // 64
            block = (tile * num_blocks + column // 128) * 64 + row % 64
            stored = data[block * 16 * bits : (block + 1) * 16 * bits]
            if bits == 3:
                starts = [block // 64 * 3072 + 1024 * i + block % 64 * 16 for i in range(3)]
                stored = torch.cat([data[start : start + 16] for start in starts])
            assert code_at(stored, element, column % 128) == matrix.codes[row, column]
            group = column // scheme.group_size
            bits_stored = packed.scales[index, group, part * n + row].view(torch.float16)
            assert bits_stored == matrix.scales[row, group]


def test_the_documented_example_of_an_address_holds() -> None:
    scheme = Scheme(
        format="compressed-tensors", element="int4", n=130, k=300, group_size=300, scale="bf16"
    )
    packed = PackedWeights(scheme, num_matrices=1, num_parts=2)
    matrix = QuantizedMatrix(
        codes=torch.zeros(130, 300, dtype=torch.uint8),
        scales=torch.ones(130, 1, dtype=torch.bfloat16),
    )
    packed.write(0, 0, matrix)
    matrix.codes[70, 290] = 13
    packed.write(0, 1, matrix)
    data = packed.codes.flatten()
    assert data.nonzero().tolist() == [[57728 + 4]]
    assert data[57728 + 4] == 13 << 4


@given(data=st.data(), parts=st.integers(1, 2), max_n=st.sampled_from((48, 200)))
@settings(max_examples=150)
def test_a_matrix_comes_back_bit_for_bit_and_no_other_is_touched(
    data: st.DataObject, parts: int, max_n: int
) -> None:
    scheme = data.draw(schemes(max_n=max_n))
    matrix = data.draw(matrices(scheme))
    packed = poisoned(scheme, num_matrices=3, num_parts=parts)
    packed.write(1, parts - 1, matrix)
    assert_same(packed.read(1, parts - 1), matrix)
    own = packed.rows_of(parts - 1)
    for name, buffer in packed.named_buffers():
        rest = buffer.clone()
        by_group = name in ("scales", "zero_points")
        written = rest[1, :, own] if by_group else rest[1, parts - 1]
        written.fill_(0xFF if written.dtype == torch.uint8 else -1)
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
