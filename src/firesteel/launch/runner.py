"""`Runner`: makes the launches that a plan holds for a number of tokens, and decides nothing.

A Runner checks what it is made of, lays it out in memory (layout.py), and counts. What launches is
a launcher that reads this memory: one in C (_native.c), or one in Python (portable.py) for where C
was not built, with the same codes and the same errors. `run` is the launcher's own method, so that
a call passes through nothing else.

Its tables lie in memory that the plan owns, and must not change while the Runner lives.
`check_tables` checks them, once for all Runners that read them:

    index  int32[max_tokens + 1]  where in `rows` the row of a token count starts; -1: not planned
    rows   int64[]                rows one after another: the number of a sequence, then for each
                                  launch of that sequence its grid (x, y, z) and its row integers

With one sequence of two launches, of which the first reads one row integer, and 3 tokens planned:

    index  [-1, -1, -1, 0]
    rows   [0,  12, 1, 1, 3,  4, 2, 1]   sequence 0; grid (12, 1, 1) and integer 3; grid (4, 2, 1)

A launch with a zero in its grid is left out.
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable
from typing import ClassVar, Literal, Protocol, final

from firesteel.errors import InvalidArgumentError, UnsupportedError
from firesteel.launch import portable
from firesteel.launch.layout import (
    MAX_INT32,
    MAX_VALUES,
    Launch,
    Layout,
    Program,
    check_address,
    check_int,
    check_tables,
    check_tuple,
    lay_out,
)
from firesteel.launch.portable import (
    DRIVER_BASE,
    FOREIGN_STREAM,
    FORKED,
    MISS,
    PLACE_GET_CONTEXT,
    PLACE_IS_CAPTURING,
    PLACE_POP_CONTEXT,
    PLACE_PUSH_CONTEXT,
    PLACES,
)

try:
    # In this form a missing module is named; `from` would blame a circular import.
    import firesteel.launch._native as _native
except ImportError as error:
    _native = None
    _native_failure = str(error)
else:
    _native_failure = None

__all__ = [
    "FOREIGN_STREAM",
    "FORKED",
    "MISS",
    "PLACE_NAMES",
    "Launch",
    "Runner",
    "RunnerKind",
    "RunnerLike",
    "check_tables",
    "decode_driver_failure",
    "default_kind",
    "native_failure",
    "runner_class",
]

RunnerKind = Literal["native", "python"]

# The places of a driver failure that are no launch.
PLACE_NAMES = {
    PLACE_GET_CONTEXT: "cuCtxGetCurrent",
    PLACE_PUSH_CONTEXT: "cuCtxPushCurrent_v2",
    PLACE_POP_CONTEXT: "cuCtxPopCurrent_v2",
    PLACE_IS_CAPTURING: "cuStreamIsCapturing",
}


class _Launcher(Protocol):
    """What makes the launches."""

    def run(self, num_tokens: int, stream: int, /, *values: int) -> int: ...

    def resolve(self, num_tokens: int, /) -> int: ...


class RunnerLike(Protocol):
    """What a Runner does. Any number of threads may call it at once."""

    def run(self, num_tokens: int, stream: int, /, *values: int) -> int:
        """Makes the launches planned for num_tokens on the stream, in order.

        The launches of two calls do not mix where their Runners share an arena.

        Args:
            stream: a CUstream.
            values: the call's integers, int64 or uint64. An address is one.

        Returns
            How many launches were made, or a code and nothing was launched:
            MISS            not planned.
            FOREIGN_STREAM  another stream owns the arena, and this one is not capturing. A free
                            arena becomes the stream's, unless that is capturing.
            FORKED          this process was forked after the Runner was made.
            -1000 or less   the driver refused; `decode_driver_failure` has the reason. Launches
                            before the one that it names were made.

        Raises
            TypeError: not num_values values, or one that is no int.
            ValueError: an integer that 64 bits do not hold.
        """
        ...

    def resolve(self, num_tokens: int, /) -> int:
        """The sequence planned for num_tokens, or -1."""
        ...

    def counts(self, /) -> tuple[tuple[int, ...], ...]:
        """Launches made, by sequence and place in it."""
        ...

    def reset_counts(self, /) -> None:
        """Sets every count to 0."""
        ...


class Runner(ABC):
    """The launches of a plan, ready to be made; a `RunnerLike`.

    Args:
        driver_addresses: C addresses of the functions in `driver.RUNNER_FUNCTIONS`.
        context: the context of the functions and of the streams.
        max_tokens: the largest count that `index` holds.
        index, rows: addresses of the tables, which `check_tables` let pass.
        sequences: (launches, ...), each a tuple of at most 1024
            (function, threads, shared_bytes, flags, params). flags: 1 programmatic dependent
            launch, 2 cooperative, 3 both. params: at most 64 of (source, value) with source
            0: the constant `value`, 8 bytes; 1: call value number `value`; 2: row integer number
            `value` of the launch. A launch has as many row integers as the highest such number
            asks for.
        num_values: integers that each call passes, at most 128.
        owner: address of the cell of an arena, two int64: the stream that owns the arena, -1 while
            it is free, and a lock, 0 at first; 0: there is no arena. All Runners of an arena must
            be of one kind.
        keep: what must live as long as the Runner: the memory behind the addresses.

    Raises
        TypeError, InvalidArgumentError: an argument that is not allowed.
    """

    kind: ClassVar[RunnerKind]

    def __init__(
        self,
        *,
        driver_addresses: tuple[int, ...],
        context: int,
        max_tokens: int,
        index: int,
        rows: int,
        sequences: tuple[tuple[Launch, ...], ...],
        num_values: int,
        owner: int,
        keep: tuple[object, ...],
    ) -> None:
        check_tuple(driver_addresses, "driver_addresses", 5, 5)
        for place, address in enumerate(driver_addresses):
            check_address(address, f"driver_addresses[{place}]")
        check_address(context, "context")
        check_int(max_tokens, "max_tokens", 0, MAX_INT32 - 1)
        check_address(index, "index", alignment=4)
        check_address(rows, "rows", alignment=8)
        check_int(num_values, "num_values", 0, MAX_VALUES)
        check_address(owner, "owner", low=0, alignment=8)
        check_tuple(keep, "keep", 0, sys.maxsize)
        layout = lay_out(sequences, num_values)
        sizes = (context, max_tokens, index, rows, owner, num_values)
        program = Program._make((*driver_addresses, *sizes, *layout.addresses()))
        launcher = self._launcher(program, layout, keep)
        self.run: Callable[..., int] = launcher.run
        self.resolve: Callable[[int], int] = launcher.resolve
        self._layout = layout
        self.reset_counts()

    @staticmethod
    @abstractmethod
    def _launcher(program: Program, layout: Layout, keep: tuple[object, ...]) -> _Launcher:
        """What makes the launches. It keeps all three for as long as it needs them."""

    def counts(self) -> tuple[tuple[int, ...], ...]:
        """Launches made, by sequence and place in it."""
        # The launcher alone writes the counters, since it may do so at any time.
        pairs = zip(self._layout.counters, self._counted, strict=True)
        made = [count - counted for count, counted in pairs]
        spans = self._layout.sequences
        return tuple(
            tuple(made[spans[at] : spans[at] + spans[at + 1]]) for at in range(0, len(spans), 2)
        )

    def reset_counts(self) -> None:
        """Sets every count to 0."""
        self._counted = self._layout.counters[:]


@final
class _NativeRunner(Runner):
    """Launches from C."""

    kind = "native"

    @staticmethod
    def _launcher(program: Program, layout: Layout, keep: tuple[object, ...]) -> _Launcher:
        assert _native is not None
        header = array("Q", program)
        return _native.Launcher(header.buffer_info()[0], (layout, keep))


@final
class _PythonRunner(Runner):
    """Launches from Python."""

    kind = "python"

    @staticmethod
    def _launcher(program: Program, layout: Layout, keep: tuple[object, ...]) -> _Launcher:
        return portable.Launcher(program, layout, keep)


def native_failure() -> str | None:
    """Why the C extension cannot be imported; None where it can."""
    return _native_failure


def default_kind() -> RunnerKind:
    """The fastest kind that there is here."""
    return "python" if _native is None else "native"


def runner_class(kind: RunnerKind | None = None) -> type[Runner]:
    """The Runner of a kind; None: of `default_kind()`.

    Raises
        UnsupportedError: "native" where it was not built.
        InvalidArgumentError: no such kind.
    """
    kind = default_kind() if kind is None else kind
    if kind == "python":
        return _PythonRunner
    if kind != "native":
        raise InvalidArgumentError(f"kind: got {kind!r}, must be 'native' or 'python'")
    if _native is None:
        raise UnsupportedError(
            f"kind: got 'native', which was not built ({_native_failure}); needs Linux and a C "
            "compiler when firesteel is installed, or kind 'python'"
        )
    return _NativeRunner


def decode_driver_failure(code: int) -> tuple[int, int]:
    """(CUresult, place) of a code that `run` returned: -(1000 + 64 * CUresult + place).

    The place is that of the launch in its sequence, 0 to 15, or a key of `PLACE_NAMES`.
    """
    result, place = divmod(-code - DRIVER_BASE, PLACES)
    if result < 1:
        raise InvalidArgumentError(f"code: got {code}, must be {-DRIVER_BASE - PLACES} or less")
    return result, place


def _note_fork() -> None:
    """Runs in a forked child, where the parent's contexts and functions do not exist."""
    portable.note_fork()
    if _native is not None:
        _native.note_fork()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_note_fork)
