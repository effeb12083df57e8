"""What an operation must say of itself to be planned: tensors, workspace, and `select`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

from firesteel.errors import InvalidArgumentError
from firesteel.launch.kernel import Launch
from firesteel.launch.key import DTYPES

__all__ = [
    "ANY_SIZE",
    "MAX_GRID",
    "NUM_TOKENS",
    "Flags",
    "Operand",
    "Region",
    "Spec",
    "all_flags",
    "check_grids",
]

NUM_TOKENS = "M"
"""In an operand's shape: the token count of the call."""

ANY_SIZE = "any"
"""The whole shape of an operand that is given once: as many elements as there are."""

MAX_GRID = (2**31 - 1, 65535, 65535)
"""Most programs along x, y and z."""

Flags = tuple[tuple[str, str], ...]
"""What callers vary besides the token count, as sorted (name, value) pairs."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that the caller owns.

    Fields
        name        as launches name it
        dtype       key of `DTYPES`
        shape       with `NUM_TOKENS` in front where each call passes another tensor; one without
                    it is given once, to `bind`, and may be `ANY_SIZE` alone
        has_stride  rows may lie further apart than they are long (a `Stride` argument says how far)
        is_aligned  whether it must start at a multiple of 16 bytes
        is_written  whether a launch writes it; no other operand of the call may overlap its memory,
                    which nothing checks
        row_unit    elements of which the distance of rows is a multiple, and in which a `Stride`
                    counts it: a kernel that multiplies it back knows how rows are aligned
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    has_stride: bool = False
    is_aligned: bool = True
    is_written: bool = False
    row_unit: int = 1

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InvalidArgumentError(
                f"operand {self.name}: dtype {self.dtype!r}, must be one of {', '.join(DTYPES)}"
            )
        if self.is_any_size:
            if self.has_stride or self.row_unit != 1:
                raise InvalidArgumentError(
                    f"operand {self.name}: of any size, must have no rows: got has_stride "
                    f"{self.has_stride}, row_unit {self.row_unit}"
                )
            return
        if NUM_TOKENS in self.shape[1:] or not all(
            size == NUM_TOKENS or (isinstance(size, int) and size >= 0) for size in self.shape
        ):
            raise InvalidArgumentError(
                f"operand {self.name}: shape {self.shape}, must be sizes, {NUM_TOKENS!r} only "
                f"first, or {ANY_SIZE!r} alone"
            )
        row = math.prod(int(size) for size in self.shape[1:])
        if self.row_unit < 1 or row % self.row_unit:
            raise InvalidArgumentError(
                f"operand {self.name}: row_unit {self.row_unit}, must divide the {row} of a row"
            )

    @property
    def is_per_call(self) -> bool:
        """Whether each call passes another tensor."""
        return bool(self.shape) and self.shape[0] == NUM_TOKENS

    @property
    def is_any_size(self) -> bool:
        """Whether it may have any number of elements: a list that another operand points into."""
        return self.shape == (ANY_SIZE,)

    def shape_for(self, num_tokens: int) -> tuple[int, ...]:
        """The shape in a call with so many tokens."""
        return tuple(num_tokens if size == NUM_TOKENS else int(size) for size in self.shape)


@dataclass(frozen=True, slots=True)
class Region:
    """A part of the workspace, which the launches of one call use among themselves."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InvalidArgumentError(
                f"region {self.name}: dtype {self.dtype!r}, must be one of {', '.join(DTYPES)}"
            )
        if not all(type(size) is int and size >= 0 for size in self.shape):
            raise InvalidArgumentError(
                f"region {self.name}: shape {self.shape}, must be sizes, integers from 0"
            )

    @property
    def num_bytes(self) -> int:
        """Its bytes, without padding."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class Spec(Protocol):
    """An operation that can be planned: a frozen value whose methods are pure and total.

    None of them asks a device, the environment or a clock, so that a plan made on one machine is
    the plan of every other.
    """

    @property
    def title(self) -> str:
        """One line that says which operation of which sizes this is."""
        ...

    def flags(self) -> Mapping[str, tuple[str, ...]]:
        """What callers may vary, and every value that it may have; {} for nothing."""
        ...

    def operands(self, flags: Flags) -> tuple[Operand, ...]:
        """The caller's tensors; those of each call in the order in which `run` takes them."""
        ...

    def workspace(self, num_tokens: int) -> tuple[Region, ...]:
        """The regions that a call needs; the same names at every count, never shrinking."""
        ...

    def select(self, num_tokens: int, flags: Flags) -> tuple[Launch, ...]:
        """The launches of a call, in order. The only chooser: the plan enumerates it."""
        ...

    def as_dict(self) -> dict[str, Any]:
        """All that `select` depends on, for JSON."""
        ...


def all_flags(allowed: Mapping[str, tuple[str, ...]]) -> Iterator[Flags]:
    """Every combination of the values."""
    names = sorted(allowed)
    for values in product(*(allowed[name] for name in names)):
        yield tuple(zip(names, values, strict=True))


def check_grids(spec: Spec, max_tokens: int, flags: Flags) -> None:
    """Refuse a largest call that needs more programs than a grid has.

    Raises
        InvalidArgumentError: it does; the message says how many tokens do not.
    """
    launch = _too_large(spec, max_tokens, flags)
    # What does not fit without tokens depends on none.
    if launch is None or _too_large(spec, 0, flags) is not None:
        return
    fits, fails = 0, max_tokens
    while fails - fits > 1:
        middle = (fits + fails) // 2
        found = _too_large(spec, middle, flags)
        if found is None:
            fits = middle
        else:
            fails, launch = middle, found
    raise InvalidArgumentError(
        f"max_tokens: got {max_tokens}, must be at most {fits}: one more takes a grid of "
        f"{launch.grid} of {launch.key.name}, the largest is {MAX_GRID}"
    )


def _too_large(spec: Spec, num_tokens: int, flags: Flags) -> Launch | None:
    """The first launch of a call whose grid is too large."""
    for launch in spec.select(num_tokens, flags):
        pairs = zip(launch.grid, MAX_GRID, strict=False)
        if any(type(size) is int and size > most for size, most in pairs):
            return launch
    return None
