"""A driver without a GPU: what was launched can be read back, and what shall fail can be set.

For tests, and for timing the host's side of a launch on a machine without a GPU. All objects of
a process share one library, and so one record.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_int, c_int32, c_int64, c_uint, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from firesteel.errors import DriverError, InvalidArgumentError, UnsupportedError
from firesteel.launch.driver import Driver

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["StubDriver", "StubLaunch"]

_RING = 4096
_MAX_PARAMS = 66
_MAX_ATTRIBUTES = 4

_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "stub_num_names": (c_int, ()),
    "stub_name": (c_char_p, (c_int,)),
    "stub_calls": (c_uint64, (c_int,)),
    "stub_fail": (None, (c_int, c_int, c_int64)),
    "stub_set_capturing": (c_int, (c_uint64, c_int)),
    "stub_set_num_params": (c_int, (c_uint64, c_uint)),
    "stub_num_launches": (c_uint64, ()),
    "stub_read_launches": (c_int, (c_void_p,)),
    "stub_reset": (None, ()),
}


class _Record(ctypes.Structure):
    """`Record` of _stub_driver.c."""

    _fields_ = (
        ("function", c_uint64),
        ("stream", c_uint64),
        ("context", c_uint64),
        ("params", c_uint64 * _MAX_PARAMS),
        ("grid", c_uint32 * 3),
        ("block", c_uint32 * 3),
        ("shared_bytes", c_uint32),
        ("num_attributes", c_uint32),
        ("attribute_ids", c_int32 * _MAX_ATTRIBUTES),
        ("attribute_values", c_int32 * _MAX_ATTRIBUTES),
        ("num_params", c_uint32),
    )


@dataclass(frozen=True, slots=True)
class StubLaunch:
    """One launch as the driver got it."""

    function: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    stream: int
    # The context that was current.
    context: int
    # (id, value) of each launch attribute.
    attributes: tuple[tuple[int, int], ...]
    # 8 bytes each, as many as `expect_params` said.
    params: tuple[int, ...]


class StubDriver(Driver):
    """A driver with 8 devices of compute capability 9.0 that does nothing, and remembers it."""

    def __init__(self, library: ctypes.CDLL, path: str) -> None:
        super().__init__(library, path)
        self._stub: dict[str, Any] = {}
        for name, (result, arguments) in _SIGNATURES.items():
            try:
                function = getattr(library, name)
            except AttributeError as error:
                raise DriverError(f"driver: got {path!r}, must be the stub driver") from error
            function.restype, function.argtypes = result, arguments
            self._stub[name] = function
        count: int = self._stub["stub_num_names"]()
        names: list[bytes] = [self._stub["stub_name"](index) for index in range(count)]
        self._ids = {name.decode(): index for index, name in enumerate(names)}

    @classmethod
    def open(cls, path: str | None = None) -> Self:
        """The stub that was built with the package, or another build of it at `path`.

        Raises
            UnsupportedError: it was not built.
        """
        if path is None:
            try:
                path = import_module("firesteel.launch._stub_driver").__file__
            except ImportError as error:
                raise UnsupportedError(
                    f"stub driver: not built ({error}); needs Linux and a C compiler when "
                    "firesteel is installed"
                ) from error
        return super().open(path)

    def launches(self) -> list[StubLaunch]:
        """The last 4096 launches since `reset`, oldest first."""
        records = (_Record * _RING)()
        count: int = self._stub["stub_read_launches"](ctypes.addressof(records))
        return [_launch(records[index]) for index in range(count)]

    def num_launches(self) -> int:
        """All launches since `reset`."""
        return self._stub["stub_num_launches"]()

    def calls(self) -> dict[str, int]:
        """How often each driver function was called since `reset`; no entry means never."""
        counts = {name: self._stub["stub_calls"](index) for name, index in self._ids.items()}
        return {name: count for name, count in counts.items() if count}

    def reset(self) -> None:
        """Forgets calls, launches, failures, captures, and this thread's contexts.

        Handles and what `expect_params` said stay.
        """
        self._stub["stub_reset"]()

    def set_capturing(self, stream: int, is_capturing: bool) -> None:
        """Whether cuStreamIsCapturing says so of the stream."""
        if self._stub["stub_set_capturing"](stream, is_capturing):
            raise InvalidArgumentError(f"stream: got {stream}, at most 64 streams can capture")

    def expect_params(self, function: int, num_params: int) -> None:
        """How many parameters to read at each launch of the function, which no driver can know."""
        if self._stub["stub_set_num_params"](function, num_params):
            raise InvalidArgumentError(
                f"function, num_params: got {function} and {num_params}, must be a handle from "
                f"`load` and 0..{_MAX_PARAMS}"
            )

    def fail(self, name: str, result: int, times: int = 1) -> None:
        """Makes the next `times` calls of a driver function (-1: all) return `result`."""
        if name not in self._ids:
            raise InvalidArgumentError(f"name: got {name!r}, must be one of {sorted(self._ids)}")
        self._stub["stub_fail"](self._ids[name], result, times)


def _launch(record: Any) -> StubLaunch:  # noqa: ANN401
    """A record of C in Python's types."""
    count = record.num_attributes
    x, y, z = record.grid
    block_x, block_y, block_z = record.block
    return StubLaunch(
        function=record.function,
        grid=(x, y, z),
        block=(block_x, block_y, block_z),
        shared_bytes=record.shared_bytes,
        stream=record.stream,
        context=record.context,
        attributes=tuple(
            zip(record.attribute_ids[:count], record.attribute_values[:count], strict=True)
        ),
        params=tuple(record.params[: record.num_params]),
    )
