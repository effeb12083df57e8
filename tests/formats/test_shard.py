"""Parts of matrices of every format have the numbers of the whole, and the largest groups."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from firesteel.errors import InvalidArgumentError
from firesteel.formats.base import QuantizedMatrix, Scheme
from firesteel.formats.packed import PackedWeights
from firesteel.formats.registry import format_named
from firesteel.formats.shard import (
    columns_of_groups,
    columns_scheme,
    cut_unit,
    rows_scheme,
    split,
    take_columns,
    take_rows,
)
from firesteel.formats.trellis import TrellisCode
from firesteel.formats.trellis_matrix import TrellisScheme, trellis_scheme
from firesteel.formats.trellis_weights import TrellisWeights
from tests.strategies import matrices, random_trellis, schemes, stored_trellises


def _run(draw: st.DrawFn, size: int, unit: int = 1) -> range:
    """A run of whole units, or up to the end."""
    units = -(-size // unit)
    start = draw(st.integers(0, units - 1))
    return range(start * unit, min(size, unit * draw(st.integers(start + 1, units))))


@st.composite
def parts(draw: st.DrawFn) -> tuple[Scheme, QuantizedMatrix, range, range]:
    scheme = draw(schemes())
    matrix = draw(matrices(scheme, scales="ordinary"))
    return scheme, matrix, _run(draw, scheme.n), _run(draw, scheme.k)


def assert_equal(got: Tensor, wanted: Tensor) -> None:
    assert got.shape == wanted.shape
    assert torch.equal(got, wanted)


@given(parts())
def test_runs_have_the_numbers_of_the_whole(case):
    scheme, matrix, rows, columns = case
    whole = matrix.dequantize(scheme)
    some, some_matrix = take_rows(scheme, matrix, rows)
    assert some == rows_scheme(scheme, len(rows))
    assert_equal(some_matrix.dequantize(some), whole[rows.start : rows.stop])
    part, part_matrix = take_columns(some, some_matrix, columns)
    wanted = whole[rows.start : rows.stop, columns.start : columns.stop]
    assert_equal(part_matrix.dequantize(part), wanted)
    if not scheme.has_group_index:
        assert part == columns_scheme(some, columns)
    # It is held in memory, and multiplied, like any other.
    packed = PackedWeights(part, 1)
    packed.write(0, 0, part_matrix)
    assert_equal(packed.read(0, 0).dequantize(part), wanted)
    x = torch.eye(part.k, dtype=torch.float32)
    assert_equal(packed.linear(0, x).T, wanted)


@given(parts(), st.randoms(use_true_random=False))
def test_rows_and_columns_of_any_numbers(case, random):
    scheme, matrix, rows, columns = case
    chosen = [list(rows), list(columns)]
    for numbers in chosen:
        random.shuffle(numbers)
    rows, columns = (torch.tensor(numbers) for numbers in chosen)
    whole = matrix.dequantize(scheme)
    part, part_matrix = take_columns(*take_rows(scheme, matrix, rows), columns)
    assert_equal(part_matrix.dequantize(part), whole[rows][:, columns])
    packed = PackedWeights(part, 1)
    packed.write(0, 0, part_matrix)
    assert_equal(packed.read(0, 0).dequantize(part), whole[rows][:, columns])


@given(parts())
def test_groups_are_the_largest_that_there_can_be(case):
    scheme, matrix, _, columns = case
    part, part_matrix = take_columns(scheme, matrix, columns)
    index = matrix.group_index
    if index is None:
        index = torch.arange(scheme.k) // scheme.group_size
    _, counts = index[columns.start : columns.stop].unique(return_counts=True)
    size = math.gcd(*counts.tolist())
    if size != part.k:
        held = [*(2**power for power in range(8)), *range(256, 2048, 128)]
        size = max(each for each in held if size % each == 0)
    assert part.group_size == size
    assert part_matrix.scales.shape == (scheme.n, len(columns) // part.group_size)


@given(st.data())
def test_columns_of_groups_keep_their_size_and_make_up_the_whole(data):
    scheme = data.draw(schemes(["gptq", "compressed-tensors"], max_groups=5))
    matrix = data.draw(matrices(scheme, scales="ordinary"))
    count = data.draw(st.integers(1, scheme.num_groups))
    runs = split(scheme.num_groups, count)
    taken = [columns_of_groups(scheme, matrix, groups) for groups in runs]
    assert torch.cat(taken).sort().values.tolist() == list(range(scheme.k))
    for columns, groups in zip(taken, runs, strict=True):
        part, part_matrix = take_columns(scheme, matrix, columns)
        assert part.group_size == scheme.group_size
        assert part.k == len(groups) * scheme.group_size
        assert_equal(part_matrix.dequantize(part), matrix.dequantize(scheme)[:, columns])


@given(stored_trellises(), st.data())
def test_blocks_of_exl3_have_the_numbers_of_the_whole(case, data):
    scheme, stored = case
    matrix = format_named("exl3").unpack(scheme, stored)
    rows, columns = _run(data.draw, scheme.n, 128), _run(data.draw, scheme.k, 128)
    part, part_matrix = take_columns(*take_rows(scheme, matrix, rows), columns)
    assert isinstance(part, TrellisScheme)
    assert part == columns_scheme(rows_scheme(scheme, len(rows)), columns)
    whole = matrix.dequantize(scheme)[rows.start : rows.stop, columns.start : columns.stop]
    assert_equal(part_matrix.dequantize(part), whole)
    packed = TrellisWeights([part], 1)
    packed.write(0, 0, part_matrix)
    assert_equal(packed.read(0, 0).dequantize(part), whole)


def test_a_cut_of_exl3_elsewhere_is_refused():
    scheme = trellis_scheme(300, 256, TrellisCode(3.0, "mcg"))
    matrix = random_trellis(scheme, torch.Generator().manual_seed(0))
    with pytest.raises(InvalidArgumentError, match=r"rows: got 64 to 299 of a matrix of EXL3"):
        take_rows(scheme, matrix, range(64, 300))
    with pytest.raises(InvalidArgumentError, match=r"columns: got 0 to 191 .* multiple of 128"):
        take_columns(scheme, matrix, range(192))
    with pytest.raises(InvalidArgumentError, match=r"rows: got no run of them"):
        take_rows(scheme, matrix, torch.arange(128))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (range(0), "rows: got none"),
        (range(3, 9), "rows: got 3 to 8, must be of 0 to 7"),
        (torch.tensor([2, -1]), "rows: got -1 to 2, must be of 0 to 7"),
    ],
)
def test_rows_that_are_not_there_are_refused(rows, message):
    scheme = Scheme(format="gptq", element="int4", n=8, k=32, group_size=32, scale="fp16")
    matrix = QuantizedMatrix(
        codes=torch.zeros(8, 32, dtype=torch.uint8), scales=torch.ones(8, 1, dtype=torch.float16)
    )
    with pytest.raises(InvalidArgumentError, match=message):
        take_rows(scheme, matrix, rows)


@given(st.integers(0, 3000), st.integers(1, 12), st.sampled_from([1, 7, 32, 128]))
def test_split_makes_up_the_whole_in_whole_units(size, count, unit):
    runs = split(size, count, unit)
    assert len(runs) == count
    assert [at for run in runs for at in run] == list(range(size))
    lengths = [len(run) for run in runs if run]
    assert all(run.start % unit == 0 for run in runs if run)
    units = [-(-length // unit) for length in map(len, runs)]
    assert max(units) - min(units) <= 1
    assert units == sorted(units, reverse=True)
    assert all(length % unit == 0 for length in lengths[:-1])


def test_split_by_hand():
    assert split(1856, 3, 64) == (range(640), range(640, 1280), range(1280, 1856))
    # A group of 128 is cut in the middle: what is left are groups of 64.
    scheme = Scheme(format="awq", element="int4", n=8, k=640, group_size=128, scale="fp16")
    first, second = split(640, 2, cut_unit([scheme]))
    assert (first, second) == (range(320), range(320, 640))
    assert columns_scheme(scheme, first).group_size == 64
    assert columns_scheme(scheme, second).group_size == 64
    assert cut_unit([scheme, trellis_scheme(8, 640, TrellisCode(2.0, "mcg"))]) == 128
    with pytest.raises(InvalidArgumentError, match="count: got 0, must be at least 1"):
        split(8, 0)
