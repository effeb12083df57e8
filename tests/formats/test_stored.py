"""The checks that every format makes on what it packs."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firesteel.errors import CheckpointError, InvalidArgumentError
from firesteel.formats.base import TensorHeader
from firesteel.formats.registry import format_named
from firesteel.formats.stored import check_headers, check_matrix
from tests.strategies import matrices, schemes


@st.composite
def cases(draw: st.DrawFn):
    scheme = draw(schemes())
    return scheme, draw(matrices(scheme))


@given(cases())
def test_a_field_of_another_shape_or_dtype_is_named(case):
    scheme, matrix = case
    check_matrix(scheme, matrix)
    for field in ("codes", "scales", "zero_points", "group_index"):
        tensor = getattr(matrix, field)
        wrong = torch.zeros(1) if tensor is None else tensor[..., :-1]
        with pytest.raises(InvalidArgumentError, match=rf"matrix\.{field}: got"):
            check_matrix(scheme, replace(matrix, **{field: wrong}))
        with pytest.raises(InvalidArgumentError, match=rf"matrix\.{field}: got"):
            format_named(scheme.format).pack(scheme, replace(matrix, **{field: wrong}))


@given(cases().filter(lambda case: case[0].bits < 8))
def test_a_code_out_of_range_is_refused(case):
    scheme, matrix = case
    codes = matrix.codes.clone()
    codes[0, -1] = 1 << scheme.bits
    with pytest.raises(InvalidArgumentError, match=rf"codes: got .*below {1 << scheme.bits}"):
        check_matrix(scheme, replace(matrix, codes=codes))


def test_messages_name_layer_suffix_got_and_expected():
    expected = {"qweight": TensorHeader((2, 3), torch.int32)}
    with pytest.raises(CheckpointError) as caught:
        check_headers(
            "m.gate", stored={"qweight": TensorHeader((3, 2), torch.int32)}, expected=expected
        )
    assert str(caught.value) == "m.gate.qweight: got int32 [3, 2], expected int32 [2, 3]"
