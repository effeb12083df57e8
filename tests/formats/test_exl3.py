"""EXL3 in files: what is stored, what is read, and what is refused."""

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firesteel.errors import CheckpointError, FiresteelError, InvalidArgumentError
from firesteel.formats.exl3 import Exl3
from firesteel.formats.packed import packed_bytes
from firesteel.formats.trellis import TrellisCode, decode_tiles, hadamard128
from firesteel.formats.trellis_matrix import trellis_scheme
from firesteel.formats.trellis_weights import TrellisWeights, words_of_tiles
from tests.strategies import TRELLIS_CODES, headers_of, random_trellis, stored_trellises

FORM = Exl3()
CONFIG = {"quant_method": "exl3"}


def stored_of(scheme: Any, seed: int = 0) -> dict[str, torch.Tensor]:
    return FORM.pack(scheme, random_trellis(scheme, torch.Generator().manual_seed(seed)))


@given(stored_trellises())
@settings(max_examples=30)
def test_what_is_stored_is_read_bit_for_bit(case):
    scheme, stored = case
    n, k = scheme.n, scheme.k
    found = FORM.scheme(CONFIG, "layer", headers_of(stored))
    assert found.fitted(n, k) == scheme
    assert found.fitted(n + 128, k) is None
    again = FORM.pack(scheme, FORM.unpack(scheme, stored))
    assert set(again) == set(stored)
    assert all(torch.equal(again[name], stored[name]) for name in stored)
    assert packed_bytes(scheme) == 2 * sum(
        (stored["trellis"].numel(), *(-(-size // 128) * 128 for size in (n, k)))
    )


@given(code=TRELLIS_CODES, n=st.integers(1, 200), k=st.integers(1, 200), seed=st.integers(0, 99))
@settings(max_examples=15)
def test_a_stack_multiplies_by_the_dequantised_matrix(code, n, k, seed):
    generator = torch.Generator().manual_seed(seed)
    other = TrellisCode(2.0, "mcg")
    schemes = [trellis_scheme(n, k, each) for each in (code, other, other, code)]
    stack = TrellisWeights(schemes, num_matrices=2, num_parts=2)
    for buffer in stack.buffers():
        buffer.fill_(-1)
    matrices = [random_trellis(scheme, generator) for scheme in schemes]
    for place, matrix in enumerate(matrices):
        stack.write(place // 2, place % 2, matrix)
    x = torch.randn(3, k, generator=generator, dtype=torch.float64)
    for index in range(2):
        wanted = [
            x @ matrices[place].dequantize(schemes[place], torch.float64).T
            for place in (2 * index, 2 * index + 1)
        ]
        wanted = torch.cat(wanted, dim=1)
        torch.testing.assert_close(stack.linear(index, x), wanted, rtol=1e-4, atol=1e-4)
        for part in range(2):
            read, own = stack.read(index, part), matrices[2 * index + part]
            assert torch.equal(read.trellis, own.trellis)
            assert torch.equal(read.suh.view(torch.int16), own.suh.view(torch.int16))
            assert torch.equal(read.svh.view(torch.int16), own.svh.view(torch.int16))
    assert stack.num_bytes == sum(map(packed_bytes, schemes))


def test_a_weight_is_the_rotated_number_of_its_tile():
    """W = diag(suh) H What H diag(svh), in float64 and by definition."""
    scheme = trellis_scheme(128, 256, TrellisCode(3.0, "mcg"))
    matrix = random_trellis(scheme, torch.Generator().manual_seed(1))
    h = hadamard128(torch.eye(128, dtype=torch.float64))
    left = torch.block_diag(h, h)
    numbers = decode_tiles(matrix.trellis, scheme.code).double()
    whole = matrix.suh.double()[:, None] * (left @ numbers @ h) * matrix.svh.double()
    got = matrix.dequantize(scheme, torch.float64)
    torch.testing.assert_close(got, whole.T, rtol=1e-5, atol=1e-5)


SCHEME = trellis_scheme(128, 256, TrellisCode(3.0, "mcg"))


def without(name: str) -> Any:
    return lambda stored: {key: value for key, value in stored.items() if key != name}


def but(**changes: torch.Tensor) -> Any:
    return lambda stored: {**stored, **changes}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("suh"), r"layer\.suh: missing, expected float16 \[256\]"),
        (without("trellis"), r"layer\.trellis: missing"),
        (but(suh=torch.ones(256)), r"layer\.suh: got float32 \[256\], expected float16 \[256\]"),
        (but(svh=torch.ones(256).half()), r"layer\.svh: got float16 \[256\]"),
        (but(su=torch.zeros(16).short()), r"layer\.(sv: missing|suh: unexpected)"),
        (but(mul1=torch.tensor(0, dtype=torch.int32)), "layer: has mcg and mul1"),
        (but(mcg2=torch.tensor(0, dtype=torch.int32)), r"layer\.mcg2: unexpected"),
        (
            but(trellis=torch.zeros(16, 8, 50, dtype=torch.int16)),
            r"layer\.trellis: got shape \[16, 8, 50\].* bits: got 3\.125, must be 1 to 8",
        ),
        (
            but(trellis=torch.zeros(15, 8, 48, dtype=torch.int16)),
            r"layer\.trellis: got shape \[15, 8, 48\], the first two must be multiples of 8",
        ),
        (but(trellis=torch.zeros(16, 8, 48)), r"layer\.trellis: got float32"),
        (but(trellis=torch.zeros(16, 8).short()), r"layer\.trellis: .*expected 3 dimensions"),
    ],
)
def test_headers_that_are_not_of_the_format_are_refused(change, words):
    with pytest.raises(FiresteelError, match=words):
        FORM.scheme(CONFIG, "layer", headers_of(change(stored_of(SCHEME))))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("suffix", ["suh", "svh"])
def test_a_scale_that_is_no_number_is_refused(suffix, value):
    stored = stored_of(SCHEME)
    stored[suffix][7] = value
    with pytest.raises(CheckpointError, match=rf"{suffix}\[7\]: got {value}, must be finite"):
        FORM.unpack(SCHEME, stored)


def test_the_marker_of_another_codebook_is_refused():
    stored = stored_of(SCHEME)
    stored["mcg"] = torch.tensor(5, dtype=torch.int32)
    with pytest.raises(CheckpointError, match=re.escape("mcg: got 0x5, must be 0xcbac1fed")):
        FORM.unpack(SCHEME, stored)


def test_scales_are_not_stored_as_signs():
    scheme = trellis_scheme(128, 128, TrellisCode(2.0, "mcg"), "signs")
    matrix = random_trellis(trellis_scheme(128, 128, scheme.code), torch.Generator())
    with pytest.raises(InvalidArgumentError, match="must be 1 or -1"):
        FORM.pack(scheme, matrix)


def test_a_word_is_where_the_page_says():
    code = TrellisCode(3.0, "mcg")
    trellis = torch.zeros(16, 8, 48, dtype=torch.int16)
    # Word 5 of the tile at i = 9, j = 2 (docs/formats.md).
    trellis.view(torch.int32)[9, 2, 5] = 1
    assert words_of_tiles(trellis, code).flatten().nonzero().tolist() == [[2629]]
