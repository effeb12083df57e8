"""The quick check of each call and the thorough one that explains refuse the same tensors."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from firesteel.errors import InvalidArgumentError
from firesteel.launch import NUM_TOKENS, Operand
from firesteel.launch.check import check_operand, quick_caller
from firesteel.launch.key import DTYPES

CPU = torch.device("cpu")
REFUSED = "refused"

operands = st.builds(
    Operand,
    st.just("x"),
    st.sampled_from(["fp32", "bf16", "i64", "u8"]),
    st.lists(st.sampled_from([1, 2, 3, 0]), max_size=2).map(lambda tail: (NUM_TOKENS, *tail)),
    has_stride=st.booleans(),
    is_aligned=st.booleans(),
    is_written=st.booleans(),
)


@st.composite
def operands_in_units(draw: st.DrawFn) -> Operand:
    """An operand whose rows are counted in some divisor of their length."""
    operand = draw(operands)
    row = math.prod(operand.shape_for(1))
    return replace(
        operand, row_unit=draw(st.sampled_from([1, 2, 3, 6]).filter(lambda u: row % u == 0))
    )


def strided(
    shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, offset: int
) -> Tensor:
    """A tensor of these strides, `offset` elements after a multiple of 64 bytes."""
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    raw = torch.zeros(max(last, 0) + 1 + 64 + offset, dtype=dtype)
    start = -raw.data_ptr() % 64 // dtype.itemsize + offset
    return raw[start:].as_strided(tuple(shape), tuple(strides))


@st.composite
def tensors(draw: st.DrawFn, operand: Operand) -> object:
    """A right tensor, or one that is wrong in any of many ways at once."""
    num_tokens = draw(st.sampled_from([0, 1, 2, 5]), label="M")
    shape = list(operand.shape_for(num_tokens))
    strides = list(torch.empty(shape, device="meta").stride())
    dtype, offset = DTYPES[operand.dtype], 0
    for change in draw(st.lists(st.sampled_from(CHANGES), max_size=2), label="changes"):
        if change == "dtype":
            dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.int64, torch.uint8]))
        elif change == "one size":
            shape[draw(st.integers(0, len(shape) - 1))] = draw(st.sampled_from([0, 1, 2, 3, 4]))
        elif change == "one stride":
            strides[draw(st.integers(0, len(shape) - 1))] = draw(
                st.sampled_from([0, 1, 2, 3, 6, 9])
            )
        elif change == "rows apart":
            strides[0] += draw(st.sampled_from([1, 2, 16, 2**20]))
        elif change == "rows expanded":
            strides[0] = 0
        elif change == "transposed" and len(shape) > 1:
            a, b = draw(st.permutations(range(len(shape))))[:2]
            shape[a], shape[b] = shape[b], shape[a]
            strides[a], strides[b] = strides[b], strides[a]
        elif change == "strides swapped":
            strides.reverse()
        elif change == "more dimensions":
            shape.append(1)
            strides.append(draw(st.sampled_from([1, 7])))
        elif change == "fewer dimensions":
            shape.pop()
            strides.pop()
            if not shape:
                return torch.zeros((), dtype=dtype)
        elif change == "offset":
            offset = draw(st.sampled_from([1, 2, 16]))
        elif change == "device":
            return torch.zeros(shape, dtype=dtype, device="meta")
        elif change == "layout":
            return torch.zeros(shape, dtype=dtype).to_sparse()
        elif change == "no tensor":
            return draw(st.sampled_from([None, 3, "x", [1.0], torch.zeros(shape).numpy()]))
    return strided(shape, strides, dtype, offset)


CHANGES = [
    "dtype", "one size", "one stride", "rows apart", "rows expanded", "transposed",
    "strides swapped", "more dimensions", "fewer dimensions", "offset", "device", "layout",
    "no tensor",
]  # fmt: skip


def quick(operands: Sequence[Operand], given: Sequence[Any]) -> Any:
    """What the quick check hands to a launcher, or REFUSED."""
    call = quick_caller(operands, -1, lambda *values: values)  # type: ignore[arg-type,return-value]
    try:
        found = call(7, *given)
    except (AttributeError, IndexError, RuntimeError, TypeError):
        return REFUSED
    return REFUSED if found is None else found


def thorough(operands: Sequence[Operand], given: Sequence[object]) -> str | None:
    """The refusal of the thorough check, or None."""
    first = given[0]
    num_tokens = first.shape[0] if isinstance(first, Tensor) and first.dim() else None
    try:
        for operand, tensor in zip(operands, given, strict=True):
            check_operand(operand, tensor, num_tokens, CPU)
    except InvalidArgumentError as error:
        return str(error)
    return None


@given(data=st.data())
@hypothesis_settings(max_examples=600)
def test_both_checks_refuse_the_same_tensors(data: st.DataObject) -> None:
    operand = data.draw(operands_in_units(), label="operand")
    tensor: Any = data.draw(tensors(operand), label="tensor")
    found, refusal = quick([operand], [tensor]), thorough([operand], [tensor])
    assert (found == REFUSED) == (refusal is not None), (found, refusal)
    if refusal is not None:
        assert refusal.startswith("x: ")
        return
    num_tokens, stream, address, *strides = found
    assert (num_tokens, stream, address) == (tensor.shape[0], 7, tensor.data_ptr())
    assert len(strides) == operand.has_stride
    # Where there is one row at most, no stride is read.
    if strides and num_tokens > 1 and tensor.numel():
        assert [stride * operand.row_unit for stride in strides] == [tensor.stride(0)]


@given(data=st.data())
@hypothesis_settings(max_examples=150)
def test_both_checks_agree_on_several_tensors_and_their_counts(data: st.DataObject) -> None:
    listed = data.draw(st.lists(operands_in_units(), min_size=2, max_size=3), label="operands")
    given_tensors = [data.draw(tensors(operand), label="tensor") for operand in listed]
    assert (quick(listed, given_tensors) == REFUSED) == (
        thorough(listed, given_tensors) is not None
    )


ROWS = Operand("x", "fp32", (NUM_TOKENS, 2, 4), has_stride=True)
F32 = torch.float32


@pytest.mark.parametrize(
    ("tensor", "stride"),
    [
        (strided((0, 2, 4), (8, 4, 1), F32, 0), 8),
        (strided((0, 2, 4), (99, 98, 97), F32, 0), 8),
        (strided((1, 2, 4), (3, 4, 1), F32, 0), 8),
        (strided((1, 2, 4), (2**40, 4, 1), F32, 0), 8),
        (strided((5, 2, 4), (8, 4, 1), F32, 0), 8),
        (strided((5, 2, 4), (1000, 4, 1), F32, 0), 1000),
        (strided((5, 2, 4), (0, 4, 1), F32, 0), 0),
        (strided((5, 2, 4), (1, 4, 1), F32, 0), 1),
    ],
)
def test_rows_that_may_be_read(tensor: Tensor, stride: int) -> None:
    assert thorough([ROWS], [tensor]) is None
    assert quick([ROWS], [tensor]) == (tensor.shape[0], 7, tensor.data_ptr(), stride)


def test_strides_past_32_bits_are_passed_whole() -> None:
    far = torch.empty_strided((2, 2, 4), (2**31 + 8, 4, 1), dtype=F32, device="meta")
    call = quick_caller([ROWS], -1, lambda *values: values)  # type: ignore[arg-type,return-value]

    class Far:
        """As `far`, but of memory; none is so large."""

        is_cpu, dtype, shape, requires_grad = True, far.dtype, far.shape, False
        is_contiguous, stride = staticmethod(far.is_contiguous), staticmethod(far.stride)
        get_device, data_ptr = staticmethod(lambda: -1), staticmethod(lambda: 4096)

    found: Any = call(0, Far())
    assert found == (2, 0, 4096, 2**31 + 8)


@pytest.mark.parametrize(
    "tensor",
    [
        strided((5, 2, 4), (8, 4, 2), F32, 0),
        strided((5, 2, 4), (16, 8, 1), F32, 0),
        strided((1, 2, 4), (8, 4, 2), F32, 0),
        strided((5, 2, 4), (8, 0, 1), F32, 0),
        strided((5, 2, 4), (1, 20, 5), F32, 0),
    ],
)
def test_rows_that_lie_in_pieces_are_refused(tensor: Tensor) -> None:
    assert quick([ROWS], [tensor]) == REFUSED
    refusal = thorough([ROWS], [tensor])
    assert refusal is not None
    assert refusal.endswith("must be contiguous, but for the distance of rows (a multiple of 1)")


IN_UNITS = replace(ROWS, row_unit=4)


@pytest.mark.parametrize(
    ("shape_and_stride", "units"),
    [((5, 8), 2), ((5, 12), 3), ((5, 4), 1), ((5, 0), 0), ((1, 12), 2), ((0, 12), 2)],
)
def test_the_distance_of_rows_is_counted_in_units(
    shape_and_stride: tuple[int, int], units: int
) -> None:
    """Contiguous ones, wider, overlapping, repeated; of one row or none the length counts."""
    num_tokens, stride = shape_and_stride
    tensor = strided((num_tokens, 2, 4), (stride, 4, 1), F32, 0)
    assert thorough([IN_UNITS], [tensor]) is None
    assert quick([IN_UNITS], [tensor]) == (num_tokens, 7, tensor.data_ptr(), units)


@pytest.mark.parametrize("stride", [1, 2, 3, 5, 9, 10, 11, 13])
def test_a_distance_between_units_is_refused(stride: int) -> None:
    tensor = strided((5, 2, 4), (stride, 4, 1), F32, 0)
    assert quick([IN_UNITS], [tensor]) == REFUSED
    refusal = thorough([IN_UNITS], [tensor])
    assert refusal == (
        f"x: got strides ({stride}, 4, 1), must be contiguous, but for the distance of rows "
        "(a multiple of 4)"
    )
    assert quick([ROWS], [tensor]) != REFUSED


@pytest.mark.parametrize("stride", [0, 1, 7])
def test_rows_that_are_written_must_not_overlap(stride: int) -> None:
    written = Operand("out", "fp32", (NUM_TOKENS, 2, 4), has_stride=True, is_written=True)
    tensor = strided((5, 2, 4), (stride, 4, 1), F32, 0)
    assert quick([written], [tensor]) == REFUSED
    assert thorough([written], [tensor]) is not None
    assert thorough([written], [strided((5, 2, 4), (9, 4, 1), F32, 0)]) is None


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (None, "x: got NoneType, must be a tensor"),
        ([1.0], "x: got list, must be a tensor"),
        (torch.zeros(3, 2, 4, dtype=torch.float16), r"x: got torch\.float16, must be torch\.float"),
        (torch.zeros(3, 8), r"x: got shape \[3, 8\], must be \[M, 2, 4\] with M = 3"),
        (torch.zeros(()), r"x: got shape \[\], must be \[M, 2, 4\]"),
        (torch.zeros(3, 2, 4, device="meta"), "x: is on meta, must be on cpu"),
        (torch.zeros(3, 2, 4).to_sparse(), r"x: got torch\.sparse_coo, must be torch\.strided"),
        (
            strided((3, 2, 4), (8, 4, 1), F32, 1),
            "x: starts at 0x.*, must be at a multiple of 16 by",
        ),
    ],
)
def test_a_refusal_names_the_operand_the_value_and_what_is_allowed(
    tensor: object, message: str
) -> None:
    num_tokens = tensor.shape[0] if isinstance(tensor, Tensor) and tensor.dim() else None
    with pytest.raises(InvalidArgumentError, match=message):
        check_operand(ROWS, tensor, num_tokens, CPU)


def emptied(shape: tuple[int, ...]) -> Tensor:
    """A tensor whose memory was freed behind it."""
    made = torch.zeros(shape)
    made.untyped_storage().resize_(0)
    return made


def without_memory() -> dict[str, Tensor]:
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.zeros(3, 2, 4))
    return {
        "freed": emptied((3, 2, 4)),
        "fake": fake,
        "zeros that are not stored": torch._efficientzerotensor((3, 2, 4)),
    }


# Torch warns of it; the address that it gives is what is refused.
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("name", ["freed", "fake", "zeros that are not stored"])
def test_rows_without_memory_are_refused(name: str) -> None:
    tensor = without_memory()[name]
    assert quick([ROWS], [tensor]) == REFUSED
    refusal = thorough([ROWS], [tensor])
    assert refusal == "x: has no memory (address 0) for its 24 elements, must have"


@pytest.mark.parametrize("shape", [(0, 2, 4), (3, 0)])
def test_no_elements_need_no_memory(shape: tuple[int, ...]) -> None:
    operand = Operand("x", "fp32", (NUM_TOKENS, *shape[1:]))
    tensor = torch.zeros(shape)
    assert tensor.data_ptr() == 0
    assert quick([operand], [tensor]) == (shape[0], 7, 0)
    assert thorough([operand], [tensor]) is None


def test_a_view_of_freed_memory_is_refused_where_it_is_given_once() -> None:
    operand = Operand("w", "fp32", (2, 4))
    tensor = torch.zeros(8, 4)[4:6]
    tensor.untyped_storage().resize_(0)
    with pytest.raises(InvalidArgumentError, match="w: has no memory"):
        check_operand(operand, tensor, 0, CPU)


@pytest.mark.parametrize("place", [0, 2])
def test_a_tensor_that_wants_a_gradient_is_refused_while_gradients_are_on(place: int) -> None:
    listed = [ROWS, Operand("ids", "i64", (NUM_TOKENS,)), replace(ROWS, name="out")]
    given = [torch.zeros(3, 2, 4), torch.zeros(3, dtype=torch.int64), torch.zeros(3, 2, 4)]
    given[place].requires_grad_()
    assert quick(listed, given) == REFUSED
    refusal = thorough(listed, given)
    assert refusal is not None
    assert refusal.startswith(f"{listed[place].name}: requires a gradient, must not")
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            assert quick(listed, given) != REFUSED
            assert thorough(listed, given) is None


@pytest.mark.parametrize("given", [[], [torch.zeros(1, 2, 4)] * 2])
def test_another_number_of_tensors_is_no_call(given: list[Tensor]) -> None:
    call: Callable[..., Any] = quick_caller([ROWS], -1, lambda *values: 0)
    with pytest.raises(TypeError):
        call(0, *given)
