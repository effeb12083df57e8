import math
from typing import Any

import pytest

from firesteel.errors import InvalidArgumentError
from firesteel.launch import ANY_SIZE, NUM_TOKENS, Operand, Region
from firesteel.launch.spec import all_flags


def test_an_operand_of_each_call_has_the_token_count_first() -> None:
    operand = Operand("x", "bf16", (NUM_TOKENS, 3, 5))
    assert operand.is_per_call
    assert operand.shape_for(0) == (0, 3, 5)
    assert operand.shape_for(7) == (7, 3, 5)


@pytest.mark.parametrize("shape", [(), (4,), (0, 2)])
def test_an_operand_without_it_is_given_once(shape: tuple[int, ...]) -> None:
    operand = Operand("scale", "fp32", shape)
    assert not operand.is_per_call
    assert operand.shape_for(9) == shape


@pytest.mark.parametrize(
    "shape",
    [
        *((4, NUM_TOKENS), (-1,), ("N", 4), (2.0,), (NUM_TOKENS, -3)),
        *((ANY_SIZE, 4), (4, ANY_SIZE), (NUM_TOKENS, ANY_SIZE), (ANY_SIZE, ANY_SIZE)),
    ],
)
def test_an_operand_of_another_shape_is_refused(shape: tuple[int | str, ...]) -> None:
    message = r"operand x: shape .*, must be sizes, 'M' only first, or 'any' alone"
    with pytest.raises(InvalidArgumentError, match=message):
        Operand("x", "bf16", shape)


def test_an_operand_of_any_size_is_given_once() -> None:
    operand = Operand("words", "i32", (ANY_SIZE,))
    assert operand.is_any_size
    assert not operand.is_per_call
    assert not Operand("words", "i32", (4,)).is_any_size
    with pytest.raises(InvalidArgumentError, match="operand words: dtype 'int32', must be one of"):
        Operand("words", "int32", (ANY_SIZE,))


@pytest.mark.parametrize("changes", [{"has_stride": True}, {"row_unit": 8}, {"row_unit": 0}])
def test_an_operand_of_any_size_has_no_rows(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match="operand words: of any size, must have no rows"):
        Operand("words", "i32", (ANY_SIZE,), **changes)


def test_an_operand_of_an_unknown_type_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="operand x: dtype 'float32', must be one of bf"):
        Operand("x", "float32", (1,))


@pytest.mark.parametrize("row_unit", [1, 2, 3, 5, 6, 10, 15, 30])
def test_a_unit_divides_a_row(row_unit: int) -> None:
    assert Operand("x", "bf16", (NUM_TOKENS, 3, 10), row_unit=row_unit).row_unit == row_unit


@pytest.mark.parametrize("row_unit", [0, -1, 4, 7, 60])
def test_a_unit_that_does_not_divide_a_row_is_refused(row_unit: int) -> None:
    message = f"operand x: row_unit {row_unit}, must divide the 30 of a row"
    with pytest.raises(InvalidArgumentError, match=message):
        Operand("x", "bf16", (NUM_TOKENS, 3, 10), row_unit=row_unit)


def test_the_unit_of_rows_is_one_unless_said() -> None:
    assert Operand("x", "bf16", (NUM_TOKENS, 7)).row_unit == 1


def test_a_region_of_an_unknown_type_or_negative_size_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="region acc: dtype 'int4', must be one of bf16"):
        Region("acc", "int4", (1,))
    with pytest.raises(InvalidArgumentError, match=r"region acc: shape \(4, -1\), must be sizes"):
        Region("acc", "fp32", (4, -1))


@pytest.mark.parametrize(
    ("dtype", "shape", "num_bytes"),
    [("fp32", (3, 5), 60), ("i64", (), 8), ("u8", (0, 9), 0), ("fp8e4nv", (7,), 7)],
)
def test_a_region_knows_its_bytes(dtype: str, shape: tuple[int, ...], num_bytes: int) -> None:
    assert Region("acc", dtype, shape).num_bytes == num_bytes


def test_every_combination_of_flags_comes_once_and_sorted_by_name() -> None:
    allowed = {"ids": ("i32", "i64"), "dtype": ("fp16", "fp32", "bf16")}
    found = list(all_flags(allowed))
    assert len(found) == len(set(found)) == math.prod(len(values) for values in allowed.values())
    assert found[0] == (("dtype", "fp16"), ("ids", "i32"))
    assert all([name for name, _ in flags] == ["dtype", "ids"] for flags in found)


def test_no_flags_are_one_combination() -> None:
    assert list(all_flags({})) == [()]
