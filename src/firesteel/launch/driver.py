"""The CUDA driver through ctypes: contexts, modules and functions, none of it while serving.

`Driver.addresses` hands the C addresses of the launching functions on to a Runner (runner.py).
The driver's own ABI is all that is used, so that nothing has to be compiled or installed for it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from ctypes import POINTER, c_char_p, c_int, c_uint, c_void_p
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from firesteel.errors import DriverError, InvalidArgumentError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["RUNNER_FUNCTIONS", "Driver", "LoadedFunction"]

# In the order that a Runner takes them.
RUNNER_FUNCTIONS = (
    "cuLaunchKernelEx",
    "cuStreamIsCapturing",
    "cuCtxGetCurrent",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
)
_LIBRARY = "libcuda.so.1"

# CUdevice_attribute and CUfunction_attribute.
_CAPABILITY_MAJOR, _CAPABILITY_MINOR, _MAX_SHARED_BYTES = 75, 76, 97
_LOCAL_BYTES, _NUM_REGISTERS, _MAX_DYNAMIC_SHARED_BYTES = 3, 4, 8
# More dynamic shared memory than this has to be asked for.
_DEFAULT_SHARED_BYTES = 48 * 1024

# Every one returns a CUresult.
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxGetCurrent": (POINTER(c_void_p),),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuCtxSynchronize": (),
    "cuModuleLoadData": (POINTER(c_void_p), c_char_p),
    "cuModuleGetFunction": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuModuleUnload": (c_void_p,),
    "cuFuncSetAttribute": (c_void_p, c_int, c_int),
    "cuFuncGetAttribute": (POINTER(c_int), c_int, c_void_p),
    "cuStreamIsCapturing": (c_void_p, POINTER(c_int)),
    "cuLaunchKernel": (c_void_p, *(c_uint,) * 7, c_void_p, c_void_p, c_void_p),
    "cuLaunchKernelEx": (c_void_p, c_void_p, c_void_p, c_void_p),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
}
# Drivers before CUDA 12.4 lack it. Theirs load a function at its first launch, unless
# CUDA_MODULE_LOADING=EAGER.
_OPTIONAL_ARGUMENTS: dict[str, tuple[Any, ...]] = {"cuFuncLoad": (c_void_p,)}


@dataclass(frozen=True, slots=True)
class LoadedFunction:
    """A kernel in a context's memory: driver handles, and what a thread of it takes."""

    handle: int
    module: int
    num_registers: int
    local_bytes: int


class Driver:
    """A loaded driver library. Every CUresult but 0 is a DriverError.

    Args:
        library: the driver, or a stand-in with the same functions.
        path: what `library` was opened from, for messages.

    Raises
        DriverError: the library lacks a function.
    """

    def __init__(self, library: ctypes.CDLL, path: str) -> None:
        self.path = path
        self._functions: dict[str, Any] = {}
        for name, arguments in {**_ARGUMENTS, **_OPTIONAL_ARGUMENTS}.items():
            try:
                function = getattr(library, name)
            except AttributeError as error:
                if name in _OPTIONAL_ARGUMENTS:
                    continue
                raise DriverError(
                    f"driver: got {path!r}, which has no {name}; needs a driver of CUDA 12 or later"
                ) from error
            function.argtypes, function.restype = arguments, c_int
            self._functions[name] = function
        names = (*RUNNER_FUNCTIONS, "cuLaunchKernel")
        self._addresses = {
            name: ctypes.cast(self._functions[name], c_void_p).value or 0 for name in names
        }
        self._lock = threading.Lock()
        self._is_initialized = False
        self._contexts: dict[int, int] = {}

    @classmethod
    def open(cls, path: str | None = None) -> Self:
        """The installed driver, or the library at `path`. No GPU is touched yet.

        Raises
            DriverError: it cannot be loaded, or lacks a function.
        """
        path = _LIBRARY if path is None else path
        try:
            library = ctypes.CDLL(path)
        except OSError as error:
            raise DriverError(f"driver: got {path!r}, which cannot be loaded: {error}") from error
        return cls(library, path)

    @property
    def addresses(self) -> Mapping[str, int]:
        """The C address of each function that launches or that a launch asks."""
        return MappingProxyType(self._addresses)

    @property
    def runner_addresses(self) -> tuple[int, ...]:
        """`driver_addresses` of a Runner."""
        return tuple(self._addresses[name] for name in RUNNER_FUNCTIONS)

    def context(self, device: int) -> int:
        """The device's primary context, which PyTorch uses too; held until the process ends.

        Raises
            DriverError: no driver is running, or there is no such device.
        """
        with self._lock:
            if device not in self._contexts:
                context = c_void_p()
                ordinal = self._device(device)
                self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
                self._contexts[device] = context.value or 0
            return self._contexts[device]

    def compute_capability(self, device: int) -> tuple[int, int]:
        """(major, minor): (9, 0) for an H200."""
        with self._lock:
            ordinal = self._device(device)
        return (
            self._read_int("cuDeviceGetAttribute", _CAPABILITY_MAJOR, ordinal),
            self._read_int("cuDeviceGetAttribute", _CAPABILITY_MINOR, ordinal),
        )

    def max_shared_bytes(self, device: int) -> int:
        """The most shared memory that a program may ask for: 227 KiB on an H200."""
        with self._lock:
            ordinal = self._device(device)
        return self._read_int("cuDeviceGetAttribute", _MAX_SHARED_BYTES, ordinal)

    def load(self, context: int, image: bytes, name: str, *, shared_bytes: int) -> LoadedFunction:
        """Loads function `name` of a cubin, whole, so that no launch of it loads anything.

        Args:
            shared_bytes: the dynamic shared memory that its launches will ask for.

        Raises
            DriverError: the image is not for this device, lacks the function, or does not fit.
        """
        if not image:
            raise InvalidArgumentError(f"image: got 0 bytes, must be a cubin with {name!r}")
        if shared_bytes < 0:
            raise InvalidArgumentError(f"shared_bytes: got {shared_bytes}, must be 0 or more")
        with self.current(context):
            module = c_void_p()
            self._call("cuModuleLoadData", ctypes.byref(module), image)
            try:
                return self._load_function(module, name, shared_bytes)
            except BaseException:
                # Not through _call: what went wrong first is what the caller must see.
                self._functions["cuModuleUnload"](module)
                raise

    def is_capturing(self, stream: int) -> bool:
        """Whether work on the stream goes to a graph, also to one that capture made invalid."""
        return self._read_int("cuStreamIsCapturing", stream, is_last=True) != 0

    def synchronize(self, context: int) -> None:
        """Waits until the device has done all work of the context."""
        with self.current(context):
            self._call("cuCtxSynchronize")

    def _call(self, name: str, *arguments: object) -> None:
        result: int = self._functions[name](*arguments)
        if result:
            raise self.error(name, result)

    def error(self, name: str, result: int, what: str = "") -> DriverError:
        """The error of a driver function that returned `result`; `what` says what it was for."""
        return DriverError(
            f"{name}: got CUresult {result} ({self._error_text('cuGetErrorName', result)}: "
            f"{self._error_text('cuGetErrorString', result)}), must be 0"
            + (f"; {what}" if what else "")
        )

    def _error_text(self, function: str, result: int) -> str:
        text = c_char_p()
        failed: int = self._functions[function](result, ctypes.byref(text))
        if failed or text.value is None:
            return "a number that the driver does not know"
        return text.value.decode("utf-8", errors="replace")

    def _read_int(self, name: str, *arguments: int, is_last: bool = False) -> int:
        """The int that a function writes to its first argument, or to its last."""
        value = c_int()
        reference = ctypes.byref(value)
        self._call(name, *((*arguments, reference) if is_last else (reference, *arguments)))
        return value.value

    def _device(self, device: int) -> int:
        """The CUdevice of an ordinal, after the one cuInit. The lock is held."""
        if not self._is_initialized:
            self._call("cuInit", 0)
            self._is_initialized = True
        return self._read_int("cuDeviceGet", device)

    def _load_function(self, module: c_void_p, name: str, shared_bytes: int) -> LoadedFunction:
        function = c_void_p()
        self._call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        if "cuFuncLoad" in self._functions:
            self._call("cuFuncLoad", function)
        if shared_bytes > _DEFAULT_SHARED_BYTES:
            self._call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED_BYTES, shared_bytes)
        handle = function.value or 0
        return LoadedFunction(
            handle=handle,
            module=module.value or 0,
            num_registers=self._read_int("cuFuncGetAttribute", _NUM_REGISTERS, handle),
            local_bytes=self._read_int("cuFuncGetAttribute", _LOCAL_BYTES, handle),
        )

    @contextmanager
    def current(self, context: int) -> Generator[None]:
        """Makes the context current, and the one before it again at the end."""
        self._call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(c_void_p()))
