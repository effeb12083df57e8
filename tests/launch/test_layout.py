from array import array

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firesteel.errors import InvalidArgumentError
from firesteel.launch import Ready, plan
from firesteel.launch.layout import check_tables, lay_out
from firesteel.moe.spec import MoeSpec, StoredWeights
from firesteel.settings import Settings
from tests.launch.stage import CALL, CONSTANT, ROW, UINT64

# Two launches, of which the first has one row integer, and three tokens planned.
ROWS = [0, 12, 1, 1, 3, 4, 2, 1]
INDEX = [-1, -1, -1, 0]
COUNTS = [[1, 0]]


def test_the_layout_is_as_its_module_says():
    first = (4096, 128, 0, 1, ((CONSTANT, 0x7F00), (ROW, 0)))
    second = (8192, 64, 512, 2, ((CALL, 0), (CONSTANT, UINT64 - 1)))
    layout = lay_out(((first, second), (), (first,)), 1)
    assert layout.sequences.tolist() == [0, 2, 2, 0, 2, 1]
    fields = [4096, 128, 0, 1, 0, 2, 1, 8192, 64, 512, 2, 2, 2, 0, 4096, 128, 0, 1, 4, 2, 1]
    assert layout.launches.tolist() == fields
    pairs = [0, 0x7F00, 2, 0, 1, 0, 0, UINT64 - 1, 0, 0x7F00, 2, 0]
    assert layout.params.tolist() == pairs
    assert layout.counters.tolist() == [0, 0, 0]
    for address, values in zip(
        layout.addresses(),
        (layout.sequences, layout.launches, layout.params, layout.counters),
        strict=True,
    ):
        assert address == values.buffer_info()[0]
        assert values.itemsize == 8


@given(places=st.lists(st.integers(0, 63), max_size=64))
def test_a_launch_has_the_row_integers_that_it_asks_for(places):
    launch = (16, 32, 0, 0, tuple((ROW, place) for place in places))
    assert lay_out(((launch,),), 0).launches[6] == max(places, default=-1) + 1


def test_truth_values_are_integers():
    layout = lay_out((((16, True, False, True, ((True, False), (False, True))),),), 1)
    assert layout.launches.tolist() == [16, 1, 0, 1, 0, 2, 0]
    assert layout.params.tolist() == [1, 0, 0, 1]


def tables(index=INDEX, rows=ROWS):
    return array("i", index), array("q", rows)


def test_tables_of_a_plan_pass():
    check_tables(*tables(), COUNTS)
    check_tables(*tables(index=[0, 0, -1, 0]), COUNTS)
    check_tables(*tables(index=[], rows=[]), [])
    check_tables(*tables(index=[-1, -1], rows=[]), [])
    check_tables(*tables(index=[1, 0], rows=[1, 0, 2**31 - 1, 65535, 65535]), [[0], []])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index": [-1, -2]}, r"index\[1\]: got -2, must be in -1\.\.7"),
        ({"index": [0, 8]}, r"index\[1\]: got 8, must be in -1\.\.7"),
        ({"index": [0], "rows": []}, r"index\[0\]: got 0, must be in -1\.\.-1"),
        ({"rows": [1, *ROWS[1:]]}, r"rows\[0\]: got 1, must be in 0\.\.0"),
        ({"rows": [-1, *ROWS[1:]]}, r"rows\[0\]: got -1, must be in 0\.\.0"),
        ({"rows": ROWS[:-1]}, r"rows: the row at 0 has 8 integers, must end at 7"),
    ],
)
def test_tables_that_no_plan_can_have(changes, message):
    with pytest.raises(InvalidArgumentError, match=rf"^({message})"):
        check_tables(*tables(**changes), COUNTS)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(("axis", "high"), [(0, 2**31 - 1), (1, 65535), (2, 65535)])
def test_grids_that_no_driver_takes(number, axis, high):
    place = (1, 5)[number] + axis
    for value in (-1, high + 1, -(2**63), 2**63 - 1):
        rows = [*ROWS[:place], value, *ROWS[place + 1 :]]
        with pytest.raises(InvalidArgumentError) as raised:
            check_tables(*tables(rows=rows), COUNTS)
        assert str(raised.value) == f"rows[{place}]: got {value}, must be in 0..{high}"
    check_tables(*tables(rows=[*ROWS[:place], high, *ROWS[place + 1 :]]), COUNTS)


def test_what_is_no_grid_may_be_any_integer():
    for value in (-(2**63), 2**63 - 1):
        check_tables(*tables(rows=[*ROWS[:4], value, *ROWS[5:]]), COUNTS)


def test_tables_of_another_type():
    index, rows = tables()
    with pytest.raises(InvalidArgumentError, match="index: got an array of 'q', must be of 'i'"):
        check_tables(array("q", INDEX), rows, COUNTS)
    with pytest.raises(InvalidArgumentError, match="rows: got an array of 'Q', must be of 'q'"):
        check_tables(index, array("Q", ROWS), COUNTS)


def test_a_plan_is_checked_before_anything_can_be_bound(stage):
    spec = MoeSpec(
        hidden_size=256,
        intermediate_size=128,
        num_experts=8,
        top_k=2,
        w13=StoredWeights(),
        w2=StoredWeights(),
    )
    made = plan(spec, 4)
    settings = Settings(cache="off")
    Ready(made, torch.device("cpu"), stage.driver, settings)
    table = next(iter(made.tables.values()))
    place = table.index[3] + 2
    table.rows[place] = 65536
    with pytest.raises(InvalidArgumentError, match=rf"rows\[{place}\]: got 65536, must be in 0"):
        Ready(made, torch.device("cpu"), stage.driver, settings)
