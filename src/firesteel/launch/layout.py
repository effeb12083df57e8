"""What a launcher reads, checked here once and laid out as integers of 8 bytes.

Both kinds of launcher read the same memory, and so neither has to check anything. `Program` has
the addresses, in the order of `Program` in _native.c. It points at the plan's own tables (runner.py
describes them) and at the arrays of a `Layout`. With sequences of 2 and 1 launches of 2 parameters:

    sequences  [0, 2,  2, 1]                       first launch, number of launches
    launches   [f, 128, 0, 1,  0, 2, 1,  ...]      function, threads, shared bytes, flags,
                                                   first parameter, number of them, row integers
    params     [0, 0x7f00, 2, 0,  ...]             source, value
    counters   [0, 0, 0]                           launches made
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from firesteel.errors import InvalidArgumentError
from firesteel.launch.spec import MAX_GRID

__all__ = [
    "CALL",
    "CONSTANT",
    "LAUNCH_FIELDS",
    "MAX_ADDRESS",
    "MAX_INT32",
    "MAX_UINT64",
    "MAX_VALUES",
    "ROW",
    "Launch",
    "Layout",
    "Program",
    "check_address",
    "check_int",
    "check_tables",
    "check_tuple",
    "lay_out",
]

# (function, threads, shared_bytes, flags, ((source, value), ...)); runner.py says what they mean.
Launch = tuple[int, int, int, int, tuple[tuple[int, int], ...]]

CONSTANT, CALL, ROW = range(3)
LAUNCH_FIELDS = 7
MAX_INT32 = 2**31 - 1
MAX_ADDRESS = 2**63 - 1
MAX_UINT64 = 2**64 - 1

MAX_VALUES = 128
_MAX_LAUNCHES = 1024
_MAX_PARAMS = 64
_MAX_THREADS = 1024
_MAX_FLAGS = 3


class Program(NamedTuple):
    """Addresses and sizes, each an integer of 8 bytes."""

    launch_kernel: int
    is_capturing: int
    get_context: int
    push_context: int
    pop_context: int
    context: int
    max_tokens: int
    index_ptr: int
    rows_ptr: int
    owner_ptr: int
    num_values: int
    sequences_ptr: int
    launches_ptr: int
    params_ptr: int
    counters_ptr: int


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The sequences of a Runner in memory that is never resized; the module says how."""

    sequences: array[int]
    launches: array[int]
    params: array[int]
    counters: array[int]

    def addresses(self) -> tuple[int, int, int, int]:
        """The last four of `Program`."""
        return (
            self.sequences.buffer_info()[0],
            self.launches.buffer_info()[0],
            self.params.buffer_info()[0],
            self.counters.buffer_info()[0],
        )


def lay_out(sequences: tuple[tuple[Launch, ...], ...], num_values: int) -> Layout:
    """Check the sequences of a Runner, and copy them.

    Raises
        TypeError, InvalidArgumentError: names the launch, the field, and what is allowed.
    """
    check_tuple(sequences, "sequences", 0, MAX_INT32)
    spans: list[int] = []
    fields: list[int] = []
    params = array("Q")
    num_launches = 0
    for number, launches in enumerate(sequences):
        check_tuple(launches, f"sequences[{number}]", 0, _MAX_LAUNCHES)
        spans += (num_launches, len(launches))
        num_launches += len(launches)
        for place, launch in enumerate(launches):
            # Names are made where they are needed: there are hundreds of integers in a layer.
            try:
                fields += _lay_out_launch(launch, num_values, params)
            except TypeError as error:
                raise TypeError(f"sequences[{number}][{place}]{error}") from None
            except InvalidArgumentError as error:
                raise InvalidArgumentError(f"sequences[{number}][{place}]{error}") from None
    counters = array("q", bytes(8 * num_launches))
    return Layout(array("Q", spans), array("Q", fields), params, counters)


def _lay_out_launch(launch: Launch, num_values: int, params: array[int]) -> tuple[int, ...]:
    """The fields of a launch. Its parameters are added to `params`. Messages lack the launch."""
    check_tuple(launch, "", 5, 5)
    function, threads, shared_bytes, flags, pairs = launch
    check_address(function, ".function")
    check_int(threads, ".threads", 1, _MAX_THREADS)
    check_int(shared_bytes, ".shared_bytes", 0, MAX_INT32)
    check_int(flags, ".flags", 0, _MAX_FLAGS)
    check_tuple(pairs, ".params", 0, _MAX_PARAMS)
    num_row_values = _check_params(pairs, num_values)
    first = len(params) // 2
    params.extend(chain.from_iterable(pairs))
    return (function, threads, shared_bytes, flags, first, len(pairs), num_row_values)


def _check_params(pairs: tuple[tuple[int, int], ...], num_values: int) -> int:
    """How many row integers the parameters ask for."""
    highest = {CONSTANT: MAX_UINT64, CALL: num_values - 1, ROW: _MAX_PARAMS - 1}
    num_row_values = 0
    for place, pair in enumerate(pairs):
        if type(pair) is not tuple or len(pair) != 2:
            check_tuple(pair, f".params[{place}]", 2, 2)
        source, value = pair
        if type(source) is not int or source not in highest:
            check_int(source, f".params[{place}].source", 0, ROW)
        if type(value) is not int or not 0 <= value <= highest[source]:
            name = f".params[{place}].value"
            if source == CALL and num_values == 0:
                raise InvalidArgumentError(f"{name}: got {value!r}, but num_values is 0")
            check_int(value, name, 0, highest[source])
        if source == ROW and value >= num_row_values:
            num_row_values = value + 1
    return num_row_values


def check_tables(index: array[int], rows: array[int], row_counts: Sequence[Sequence[int]]) -> None:
    """Refuse tables that a launcher could not read.

    Args:
        index, rows: int32 and int64; runner.py describes them.
        row_counts: of each launch of each sequence, how many row integers it has.

    Raises
        InvalidArgumentError: a row starts or ends outside `rows`, names no sequence, or has a
            grid that no driver takes.
    """
    for name, table, code in (("index", index, "i"), ("rows", rows, "q")):
        if table.typecode != code:
            raise InvalidArgumentError(
                f"{name}: got an array of {table.typecode!r}, must be of {code!r}"
            )
    starts, integers = np.asarray(index), np.asarray(rows)
    _check_entries("index", np.arange(len(starts)), starts, -1, len(integers) - 1)
    starts = np.unique(starts[starts >= 0])
    numbers = integers[starts]
    _check_entries("rows", starts, numbers, 0, len(row_counts) - 1)
    for number, counts in enumerate(row_counts):
        own = starts[numbers == number]
        size = 1 + sum(3 + count for count in counts)
        if own.size and own[-1] + size > len(integers):
            raise InvalidArgumentError(
                f"rows: the row at {own[-1]} has {size} integers, must end at {len(integers)}"
            )
        at = 1
        for count in counts:
            for axis, high in enumerate(MAX_GRID):
                places = own + (at + axis)
                _check_entries("rows", places, integers[places], 0, high)
            at += 3 + count


def _check_entries(table: str, places: np.ndarray, values: np.ndarray, low: int, high: int) -> None:
    wrong = (values < low) | (values > high)
    if wrong.any():
        first = int(wrong.argmax())
        raise InvalidArgumentError(
            f"{table}[{places[first]}]: got {values[first]}, must be in {low}..{high}"
        )


def check_int(value: object, name: str, low: int, high: int) -> None:
    """Refuse what is no integer of the range.

    Raises
        TypeError: no int. An object's __index__ could run anything, a GPU tensor's would
            synchronise.
        InvalidArgumentError: an int outside.
    """
    if not isinstance(value, int):
        raise TypeError(f"{name}: got {value!r}, must be an int")
    if not low <= value <= high:
        raise InvalidArgumentError(f"{name}: got {value!r}, must be in {low}..{high}")


def check_address(value: int, name: str, *, low: int = 1, alignment: int = 1) -> None:
    """Refuse what is no address, by type, size or alignment.

    Raises
        TypeError, InvalidArgumentError: it is none.
    """
    check_int(value, name, low, MAX_ADDRESS)
    if value % alignment:
        raise InvalidArgumentError(f"{name}: got {value!r}, must be a multiple of {alignment}")


def check_tuple(value: object, name: str, low: int, high: int) -> None:
    """Refuse what is no tuple of `low` to `high` items.

    Raises
        TypeError, InvalidArgumentError: it is none.
    """
    if not isinstance(value, tuple):
        raise TypeError(f"{name}: got {value!r}, must be a tuple")
    if not low <= len(value) <= high:
        raise InvalidArgumentError(f"{name}: got {len(value)} items, must be {low}..{high}")
