"""Every format, both ways, against the oracle: numbers to bytes and bytes to numbers."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from firesteel.formats.base import ELEMENTS, QuantizedMatrix, Scheme, scales_to_float
from firesteel.formats.registry import detect, format_named
from tests.formats import oracle
from tests.strategies import bits_of, headers_of, matrices, schemes, stored_layers

LAYER = "model.layers.0.mlp.experts.3.gate_proj"


@st.composite
def layers(draw: st.DrawFn) -> tuple[Scheme, QuantizedMatrix]:
    """A scheme and numbers of it."""
    scheme = draw(schemes())
    return scheme, draw(matrices(scheme))


@st.composite
def files(draw: st.DrawFn) -> tuple[Scheme, dict[str, torch.Tensor]]:
    """A scheme and a layer's tensors."""
    scheme = draw(schemes())
    return scheme, draw(stored_layers(scheme))


def assert_same_bits(got: torch.Tensor | None, wanted: torch.Tensor | None) -> None:
    assert (got is None) == (wanted is None)
    if got is not None and wanted is not None:
        assert got.dtype == wanted.dtype
        assert got.shape == wanted.shape
        assert torch.equal(bits_of(got), bits_of(wanted))


@given(layers())
def test_numbers_survive_packing(case):
    scheme, matrix = case
    entry = format_named(scheme.format)
    again = entry.unpack(scheme, entry.pack(scheme, matrix))
    for field in ("codes", "scales", "zero_points", "group_index"):
        assert_same_bits(getattr(again, field), getattr(matrix, field))
    assert type(again.global_scale) is type(matrix.global_scale)
    if matrix.global_scale is not None:
        assert_same_bits(again.global_scale.value, matrix.global_scale.value)


@given(files())
def test_bytes_survive_unpacking(case):
    scheme, stored = case
    entry = format_named(scheme.format)
    again = entry.pack(scheme, entry.unpack(scheme, stored))
    assert again.keys() == stored.keys()
    for suffix, tensor in stored.items():
        assert_same_bits(again[suffix], tensor)
        assert again[suffix].stride() == torch.empty(tensor.shape).stride()


@given(files())
def test_unpacking_agrees_with_the_oracle(case):
    scheme, stored = case
    matrix = format_named(scheme.format).unpack(scheme, stored)
    numbers = oracle.read(scheme, stored)
    assert matrix.codes.tolist() == numbers.codes
    assert scales_to_float(matrix.scales, scheme.scale).double().tolist() == numbers.scales
    element = ELEMENTS[scheme.element]
    if scheme.has_zero_points:
        assert matrix.zero_points.tolist() == numbers.zeros
    elif element.values is None:
        assert all(zero == element.zero_point for row in numbers.zeros for zero in row)
    if scheme.has_group_index:
        assert matrix.group_index.tolist() == numbers.groups
    if matrix.global_scale is not None:
        assert matrix.global_scale.value.item() == numbers.global_scale


@given(files())
def test_dequantizing_agrees_with_the_oracle(case):
    scheme, stored = case
    got = format_named(scheme.format).unpack(scheme, stored).dequantize(scheme)
    wanted = torch.tensor(oracle.dequantized(scheme, oracle.read(scheme, stored)))
    # Infinite scales times zero are NaN on both sides.
    assert torch.equal(got.nan_to_num(nan=7.0), wanted.nan_to_num(nan=7.0))


@given(layers())
def test_the_config_and_the_headers_give_the_scheme_back(case):
    scheme, matrix = case
    entry = format_named(scheme.format)
    stored = entry.pack(scheme, matrix)
    config = entry.config(scheme, ignore=["lm_head"])
    assert entry.claims(config)
    assert detect(config, stored.keys()) is entry
    assert entry.marker() in stored
    assert headers_of(stored) == entry.tensors(scheme)
    assert entry.scheme(config, LAYER, headers_of(stored)) == scheme


@given(files())
def test_numbers_have_plain_strides_and_memory_of_their_own(case):
    scheme, stored = case
    matrix = format_named(scheme.format).unpack(scheme, stored)
    inputs = {tensor.untyped_storage().data_ptr() for tensor in stored.values()}
    for field in ("codes", "scales", "zero_points", "group_index"):
        tensor = getattr(matrix, field)
        if tensor is not None:
            assert tensor.stride() == torch.empty(tensor.shape).stride()
            assert tensor.untyped_storage().data_ptr() not in inputs


@given(files())
def test_unpacking_writes_every_code_and_no_input(case):
    scheme, stored = case
    entry = format_named(scheme.format)
    before = {suffix: bits_of(tensor).clone() for suffix, tensor in stored.items()}
    first = entry.unpack(scheme, stored)
    first_codes = first.codes.clone()
    # Memory that was freed comes back dirty: a code left unwritten would change.
    poison = [torch.full_like(first.codes, 0xFF) for _ in range(4)]
    del poison
    assert torch.equal(entry.unpack(scheme, stored).codes, first_codes)
    for suffix, tensor in stored.items():
        assert torch.equal(bits_of(tensor), before[suffix])
