"""`Launcher` in Python, for where the C extension was not built: the same codes, but slower.

runner.py documents `run`. Here one lock guards the parameters that lie ready in memory, where the C
object keeps them on its stack; Runners that share an arena share that lock.
"""

from __future__ import annotations

import ctypes
import threading
from array import array
from ctypes import POINTER, PYFUNCTYPE, c_int, c_int32, c_int64, c_uint, c_uint64, c_void_p
from typing import final
from weakref import WeakValueDictionary

from firesteel.launch.layout import (
    CALL,
    LAUNCH_FIELDS,
    MAX_ADDRESS,
    MAX_UINT64,
    ROW,
    Layout,
    Program,
)

__all__ = [
    "DRIVER_BASE",
    "FOREIGN_STREAM",
    "FORKED",
    "MISS",
    "PLACES",
    "PLACE_GET_CONTEXT",
    "PLACE_IS_CAPTURING",
    "PLACE_POP_CONTEXT",
    "PLACE_PUSH_CONTEXT",
    "Launcher",
    "note_fork",
]

# The codes of `run`; _native.c has the same ones.
MISS = -1
FOREIGN_STREAM = -2
FORKED = -3
DRIVER_BASE = 1000
PLACES = 64
PLACE_GET_CONTEXT, PLACE_PUSH_CONTEXT, PLACE_POP_CONTEXT, PLACE_IS_CAPTURING = range(16, 20)

_FREE_ARENA = -1
_MIN_INT64 = -(2**63)
_COOPERATIVE, _PROGRAMMATIC = 2, 6
_ATTRIBUTES_OF_FLAGS = ((), (_PROGRAMMATIC,), (_COOPERATIVE,), (_COOPERATIVE, _PROGRAMMATIC))

# These hold the interpreter's lock through the call, as the C object does.
_CONTEXT_OUT = PYFUNCTYPE(c_int, c_void_p)
_CONTEXT_IN = PYFUNCTYPE(c_int, c_void_p)
_IS_CAPTURING = PYFUNCTYPE(c_int, c_void_p, c_void_p)
_LAUNCH_KERNEL_EX = PYFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_void_p)
_INT32S, _INT64S = POINTER(c_int32), POINTER(c_int64)

_fork_generation = 0
# By address of an arena's cell. Each Launcher keeps the cell, so no other gets its address.
_locks: WeakValueDictionary[int, threading.Lock] = WeakValueDictionary()
_locks_lock = threading.Lock()


def note_fork() -> None:
    """Makes every Launcher that exists return FORKED."""
    global _fork_generation, _locks, _locks_lock
    _fork_generation += 1
    # A thread that held one when the parent was forked exists in the parent only.
    _locks = WeakValueDictionary()
    _locks_lock = threading.Lock()


def _lock_of(owner: int) -> threading.Lock:
    """The lock of the arena whose cell is at `owner`; 0: one for this Launcher alone."""
    if not owner:
        return threading.Lock()
    with _locks_lock:
        # The dictionary holds no lock that nobody else does.
        lock = _locks.get(owner)
        if lock is None:
            lock = _locks[owner] = threading.Lock()
        return lock


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", c_int), ("padding", c_int), ("number", c_int), ("rest", c_int * 15))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid_x", c_uint),
        ("grid_y", c_uint),
        ("grid_z", c_uint),
        ("block_x", c_uint),
        ("block_y", c_uint),
        ("block_z", c_uint),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("num_attributes", c_uint),
    )


# By a launch's flags. The driver reads them and nobody writes.
_ATTRIBUTES = tuple(
    (_Attribute * len(ids))(*((id, 0, 1) for id in ids)) for ids in _ATTRIBUTES_OF_FLAGS
)


class _PreparedLaunch:
    """A launch whose configuration lies in C's memory, but for what a call brings."""

    __slots__ = (
        "config",
        "config_address",
        "function",
        "num_row_values",
        "params_address",
        "row_places",
    )

    def __init__(self, fields: array[int], params: array[int], pointers: array[int]) -> None:
        self.function, threads, shared_bytes, flags, first, num_params, self.num_row_values = fields
        attributes = _ATTRIBUTES[flags]
        self.config = _Config(
            block_x=threads,
            block_y=1,
            block_z=1,
            shared_bytes=shared_bytes,
            attributes=ctypes.addressof(attributes),
            num_attributes=len(attributes),
        )
        self.config_address = ctypes.addressof(self.config)
        self.params_address = pointers.buffer_info()[0] + 8 * first
        # (which pointer, how many bytes into the launch's row integers it points)
        self.row_places = tuple(
            (place, 8 * params[2 * place + 1])
            for place in range(first, first + num_params)
            if params[2 * place] == ROW
        )


@final
class Launcher:
    """Makes the launches of a Program; see firesteel.launch.runner.

    Args:
        program: where its tables and functions are.
        layout: what the program's other addresses point at.
        keep: what must live as long as the Launcher.
    """

    def __init__(self, program: Program, layout: Layout, keep: object) -> None:
        self._keep = keep
        self._fork_generation = _fork_generation
        self._lock = _lock_of(program.owner_ptr)
        self._launch_kernel = _LAUNCH_KERNEL_EX(program.launch_kernel)
        self._is_capturing = _IS_CAPTURING(program.is_capturing)
        self._get_context = _CONTEXT_OUT(program.get_context)
        self._push_context = _CONTEXT_IN(program.push_context)
        self._pop_context = _CONTEXT_OUT(program.pop_context)
        self._context = program.context
        self._current = c_void_p()
        self._current_address = ctypes.addressof(self._current)
        self._owner = c_int64.from_address(program.owner_ptr) if program.owner_ptr else None
        self._max_tokens = program.max_tokens
        self._index = ctypes.cast(program.index_ptr, _INT32S)
        self._rows = ctypes.cast(program.rows_ptr, _INT64S)
        self._rows_address = program.rows_ptr
        self._num_values = program.num_values
        self._values = (c_uint64 * program.num_values)()
        self._counters = layout.counters
        self._layout = layout
        self._pointers = _pointers(layout.params, ctypes.addressof(self._values))
        launches = [
            _PreparedLaunch(layout.launches[at : at + LAUNCH_FIELDS], layout.params, self._pointers)
            for at in range(0, len(layout.launches), LAUNCH_FIELDS)
        ]
        spans = zip(layout.sequences[::2], layout.sequences[1::2], strict=True)
        # (number of its first launch, its launches)
        self._sequences = [(first, launches[first : first + size]) for first, size in spans]

    def run(self, num_tokens: int, stream: int, /, *values: int) -> int:
        """Makes the launches planned for num_tokens: how many, or a negative code."""
        if len(values) != self._num_values:
            raise TypeError(f"run: got {len(values)} values, must be {self._num_values}")
        _check_int(num_tokens, "num_tokens")
        _check_int(stream, "stream", 0, MAX_ADDRESS)
        for place, value in enumerate(values):
            if type(value) is not int or not _MIN_INT64 <= value <= MAX_UINT64:
                _check_int(value, f"values[{place}]", _MIN_INT64, MAX_UINT64)

        if self._fork_generation != _fork_generation:
            return FORKED
        start = self._find_row(num_tokens)
        if start < 0:
            return MISS
        with self._lock:
            return self._run_in_context(start, stream, values)

    def resolve(self, num_tokens: int, /) -> int:
        """The sequence planned for num_tokens, or -1."""
        _check_int(num_tokens, "num_tokens")
        start = self._find_row(num_tokens)
        return -1 if start < 0 else self._rows[start]

    def _find_row(self, num_tokens: int) -> int:
        return self._index[num_tokens] if 0 <= num_tokens <= self._max_tokens else -1

    def _run_in_context(self, start: int, stream: int, values: tuple[int, ...]) -> int:
        owned = self._owner is None or self._owner.value == stream
        if result := self._get_context(self._current_address):
            return _driver_failure(result, PLACE_GET_CONTEXT)
        pushes = self._current.value != self._context
        if pushes and (result := self._push_context(self._context)):
            return _driver_failure(result, PLACE_PUSH_CONTEXT)
        popped = 0
        # In our context, because the default streams are those of the current one.
        try:
            made = 0 if owned else self._claim_arena(stream)
            if not made:
                made = self._launch_all(start, stream, values)
        finally:
            # Also after Ctrl-C, or the thread would go on in a context that is not its own.
            if pushes:
                popped = self._pop_context(self._current_address)
        return _driver_failure(popped, PLACE_POP_CONTEXT) if popped and made >= 0 else made

    def _claim_arena(self, stream: int) -> int:
        """0, or a code. A stream that captures may pass, and leaves the owner as it is."""
        assert self._owner is not None
        status = c_int()
        if result := self._is_capturing(stream, ctypes.addressof(status)):
            return _driver_failure(result, PLACE_IS_CAPTURING)
        if status.value:
            return 0
        if self._owner.value == _FREE_ARENA:
            self._owner.value = stream
        return 0 if self._owner.value == stream else FOREIGN_STREAM

    def _launch_all(self, start: int, stream: int, values: tuple[int, ...]) -> int:
        self._values[:] = values
        rows = self._rows
        made = 0
        place = start + 1
        first, launches = self._sequences[rows[start]]
        for number, launch in enumerate(launches):
            x, y, z = rows[place : place + 3]
            place += 3
            if x and y and z:
                config = launch.config
                config.grid_x = x
                config.grid_y = y
                config.grid_z = z
                config.stream = stream
                row_address = self._rows_address + 8 * place
                for pointer, offset in launch.row_places:
                    self._pointers[pointer] = row_address + offset
                result = self._launch_kernel(
                    launch.config_address, launch.function, launch.params_address, None
                )
                if result:
                    return _driver_failure(result, number)
                self._counters[first + number] += 1
                made += 1
            place += launch.num_row_values
        return made


def _pointers(params: array[int], values_address: int) -> array[int]:
    """Where each parameter lies; one of a row is left to each call."""
    constants = params.buffer_info()[0] + 8
    pairs = zip(params[::2], params[1::2], strict=True)
    return array(
        "Q",
        [
            values_address + 8 * value if source == CALL else constants + 16 * place
            for place, (source, value) in enumerate(pairs)
        ],
    )


def _driver_failure(result: int, place: int) -> int:
    return -(DRIVER_BASE + PLACES * result + place)


def _check_int(value: object, name: str, low: int | None = None, high: int = 0) -> None:
    """As layout.py's, with the built-in errors that the C object raises."""
    if not isinstance(value, int):
        raise TypeError(f"{name}: got {value!r}, must be an int")
    if low is not None and not low <= value <= high:
        raise ValueError(f"{name}: got {value!r}, must be in {low}..{high}")
