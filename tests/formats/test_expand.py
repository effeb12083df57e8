"""Packed weights as numbers and in products: the same bits as the plain definition."""

import itertools

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from firesteel.formats.base import QuantizedMatrix, Scheme
from firesteel.formats.expand import arrange
from firesteel.formats.packed import PackedWeights
from firesteel.formats.quantize import parse_recipe, quantize_matrix
from firesteel.formats.tiled_int4 import TiledInt4Weights, can_tile
from tests.formats.test_packed import assert_same
from tests.strategies import bits_of, matrices, schemes

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EPS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}


def in_natural_order(expanded: Tensor, packed: PackedWeights) -> Tensor:
    """Columns of `_expand` sorted back by what `arrange` does to column numbers."""
    scheme = packed.scheme
    order = torch.arange(scheme.k)
    if packed.column_order is not None:
        order = packed.column_order[0, 0].long()
    # Padded columns are zero after `arrange`; counting from 1 tells them apart.
    columns = arrange((order + 1).unsqueeze(0), scheme)[0]
    natural = expanded.new_empty(expanded.shape[0], scheme.k)
    natural[:, columns[columns > 0] - 1] = expanded[:, columns > 0]
    return natural


@given(data=st.data(), dtype=st.sampled_from(DTYPES))
@settings(max_examples=200)
def test_numbers_are_rounded_once(data: st.DataObject, dtype: torch.dtype) -> None:
    # Of one tile and less, of whole tiles, and of some with a ragged one.
    scheme = data.draw(schemes(max_n=160))
    matrix = data.draw(matrices(scheme))
    packed = PackedWeights(scheme, num_matrices=1)
    packed.write(0, 0, matrix)
    got = in_natural_order(packed._expand(0, dtype), packed)
    assert torch.equal(bits_of(got), bits_of(matrix.dequantize(scheme, dtype)))


@given(data=st.data(), dtype=st.sampled_from(DTYPES), rows=st.sampled_from((0, 1, 5, 40)))
@settings(max_examples=60)
def test_linear_stays_within_its_rounding_bound(
    data: st.DataObject, dtype: torch.dtype, rows: int
) -> None:
    scheme = data.draw(schemes())
    matrix = data.draw(matrices(scheme, scales="ordinary"))
    weight = matrix.dequantize(scheme)
    assume(bool(weight.abs().max() < 1e3))
    packed = PackedWeights(scheme, num_matrices=2, num_parts=1)
    packed.write(1, 0, matrix)
    x = torch.randn(rows, scheme.k, generator=torch.Generator().manual_seed(rows)).to(dtype)
    assert_close(packed.linear(1, x), x, weight)


def assert_close(y: Tensor, x: Tensor, weight: Tensor) -> None:
    """Weights rounded once, sums in fp32 (or in blocks of it), the result rounded once."""
    expected = x.double() @ weight.double().T
    magnitude = x.double().abs() @ weight.double().abs().T
    eps = EPS[y.dtype]
    bound = eps * magnitude + eps * expected.abs() + 2.0**-23 * x.shape[1] * magnitude + 1e-7
    assert y.dtype == x.dtype
    assert y.shape == expected.shape
    assert ((y.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize(
    ("recipe", "n"),
    [
        *itertools.product(
            ("int4-g128-asym", "int3-g32", "int8-g128", "mxfp4", "nvfp4"), (64, 65, 128, 200)
        ),
        ("nf3", 64),
        ("nf3", 128),
    ],
)
def test_two_parts_of_whole_and_of_ragged_tiles(n: int, recipe: str) -> None:
    generator = torch.Generator().manual_seed(n)
    parts = [
        quantize_matrix(torch.randn(n, 384, generator=generator), parse_recipe(recipe))
        for _ in range(2)
    ]
    scheme = parts[0][0]
    packed = PackedWeights(scheme, num_matrices=2, num_parts=2)
    for part, (_, matrix) in enumerate(parts):
        packed.write(1, part, matrix)
    wanted = torch.cat([matrix.dequantize(scheme) for _, matrix in parts])
    x = torch.randn(3, 384, generator=generator)
    assert_close(packed.linear(1, x), x, wanted)
    got = in_natural_order(packed._expand(1, torch.float32), packed)
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("n", [16, 64])
def test_parts_with_column_orders_of_their_own(n: int) -> None:
    scheme = Scheme(
        format="gptq", element="int4", n=n, k=64, group_size=32, scale="fp16", has_group_index=True
    )
    generator = torch.Generator().manual_seed(0)
    packed = PackedWeights(scheme, num_matrices=2, num_parts=2)
    weights = []
    for part in range(2):
        order = torch.randperm(64, generator=generator)
        matrix = QuantizedMatrix(
            codes=torch.randint(0, 16, (n, 64), dtype=torch.uint8, generator=generator),
            scales=torch.rand(n, 2, generator=generator).half(),
            group_index=(torch.arange(64) // 32).int()[order],
        )
        packed.write(1, part, matrix)
        weights.append(matrix.dequantize(scheme))
    x = torch.randn(3, 64, generator=generator)
    assert_close(packed.linear(1, x), x, torch.cat(weights))


@st.composite
def tiled_cases(draw: st.DrawFn) -> tuple[Scheme, QuantizedMatrix]:
    """Symmetric int4 of a shape that tiles take."""
    group_size = draw(st.sampled_from((32, 64, 128, 256)))
    scheme = Scheme(
        format="compressed-tensors",
        element="int4",
        n=64 * draw(st.integers(1, 3)),
        k=group_size * draw(st.integers(1, 3)),
        group_size=group_size,
        scale=draw(st.sampled_from(("bf16", "fp16", "fp32"))),
    )
    return scheme, draw(matrices(scheme, scales="ordinary"))


def tiled(scheme: Scheme, matrix: QuantizedMatrix) -> TiledInt4Weights:
    packed = PackedWeights(scheme, num_matrices=2)
    packed.write(0, 0, matrix)
    packed.write(1, 0, matrix)
    if not can_tile(packed):
        pytest.skip("this CPU's int4 tiles have another layout")
    return TiledInt4Weights(packed)


@given(case=tiled_cases())
@settings(max_examples=40)
def test_tiles_come_back_bit_for_bit(case: tuple[Scheme, QuantizedMatrix]) -> None:
    assert_same(tiled(*case).read(1, 0), case[1])


@given(case=tiled_cases(), dtype=st.sampled_from(DTYPES), rows=st.sampled_from((0, 1, 7, 32, 33)))
@settings(max_examples=60)
def test_tiled_linear_stays_within_its_rounding_bound(
    case: tuple[Scheme, QuantizedMatrix], dtype: torch.dtype, rows: int
) -> None:
    scheme, matrix = case
    x = torch.randn(rows, scheme.k, generator=torch.Generator().manual_seed(rows)).to(dtype)
    assert_close(tiled(scheme, matrix).linear(1, x), x, matrix.dequantize(scheme))


@given(case=tiled_cases(), dtype=st.sampled_from(DTYPES))
@settings(max_examples=40)
def test_expanded_tiles_are_rounded_once(
    case: tuple[Scheme, QuantizedMatrix], dtype: torch.dtype
) -> None:
    scheme, matrix = case
    # One 1 a row picks a column of W unchanged; 33 rows and more take the expanded path.
    x = torch.eye(max(scheme.k, 33), scheme.k, dtype=dtype)
    y = tiled(scheme, matrix).linear(0, x)[: scheme.k]
    assert torch.equal(y.T, matrix.dequantize(scheme, dtype))


@pytest.mark.parametrize(
    "recipe", ["int4-g32-asym", "int4-g16", "int8-g32", "int3-g32", "mxfp4", "nvfp4", "int4-g512"]
)
def test_only_symmetric_int4_of_known_groups_is_tiled(recipe: str) -> None:
    scheme, matrix = quantize_matrix(torch.randn(64, 1024), parse_recipe(recipe))
    packed = PackedWeights(scheme, num_matrices=1)
    packed.write(0, 0, matrix)
    assert not can_tile(packed)
