"""Triton's compiler, called so that nothing of the process's own use of Triton is touched.

`triton.compile` writes what it makes into a cache folder that the whole process shares and reads
its knobs as it goes. Here a copy of that function runs with other globals: files go to memory, and
knobs that would make other code than the sources say are off. So threads may compile at once, other
threads may compile kernels of their own the while, and a fork at any time leaves nothing to undo.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

from firesteel.errors import InvalidArgumentError, UnsupportedError

__all__ = ["Compiled", "compile_apart", "environment"]

# By group and name. Overriding takes code from files; locations ask for files that are not made.
_OFF: dict[str, dict[str, object]] = {
    "compilation": {
        "always_compile": True,
        "override": False,
        "store_binary_only": False,
        "use_ir_loc": None,
    }
}
_REPLACED = ("get_cache_manager", "CompiledKernel", "knobs")


@dataclass(frozen=True, slots=True)
class Compiled:
    """What Triton made of one source.

    Fields
        metadata  Triton's own, of any type that JSON has
        ptx       the assembler's input
        cubin     its output
    """

    metadata: dict[str, Any]
    ptx: str
    cubin: bytes


def compile_apart(source: Any, target: Any, options: dict[str, object]) -> Compiled:  # noqa: ANN401
    """What `triton.compile` makes, without its cache.

    Raises
        UnsupportedError: this Triton has another compiler than is known here.
        InvalidArgumentError: no temporary file can be written, which the assembler needs.
    """
    import triton
    from triton import knobs

    original: Any = triton.compile
    if not isinstance(original, FunctionType) or any(
        name not in original.__code__.co_names for name in _REPLACED
    ):
        raise UnsupportedError(
            f"triton: {triton.__version__} has a compiler of another form, must be 3.4 to 3.7"
        )
    files = _Files()
    replaced = {
        "get_cache_manager": lambda key: files,
        "CompiledKernel": lambda *args: None,
        "knobs": _Knobs(knobs, _OFF),
    }
    copied = FunctionType(
        original.__code__,
        {**original.__globals__, **replaced},
        original.__name__,
        original.__defaults__,
        original.__closure__,
    )
    copied.__kwdefaults__ = original.__kwdefaults__
    try:
        copied(source, target=target, options=options)
    except OSError as error:
        raise InvalidArgumentError(
            f"TMPDIR: got {_temporary_folder()}, must be a folder with room, which Triton's "
            f"assembler writes to: {error}"
        ) from error
    return Compiled(json.loads(files.ending(".json")), files.ending(".ptx"), files.ending(".cubin"))


def environment(target: int) -> dict[str, str]:
    """What of the process's environment changes the code that Triton makes, where it is set.

    Args:
        target: 90 for sm_90.
    """
    from triton import knobs as triton_knobs
    from triton._C import libtriton

    knobs: Any = triton_knobs
    library: Any = libtriton
    found = {name: str(value) for name, value in library.get_cache_invalidating_env_vars().items()}
    for group, name in (
        # Set in Python these need not show in the environment.
        ("compilation", "disable_line_info"),
        ("compilation", "enable_asan"),
        ("language", "fp32_default"),
        ("nvidia", "disable_ptxas_opt"),
        # Triton leaves these out.
        ("nvidia", "libdevice_path"),
        ("nvidia", "mock_ptx_version"),
    ):
        if value := getattr(getattr(knobs, group), name, None):
            found[f"{group}.{name}"] = str(value)
    has_blackwell = target >= 100 and "ptxas_blackwell" in vars(type(knobs.nvidia))
    assembler = "ptxas_blackwell" if has_blackwell else "ptxas"
    if (version := _foreign_version(knobs.nvidia, assembler)) is not None:
        found[assembler] = version
    return dict(sorted(found.items()))


def _foreign_version(nvidia: Any, name: str) -> str | None:  # noqa: ANN401
    """The version of an assembler that did not come with Triton."""
    import triton

    try:
        tool = getattr(nvidia, name)
    except RuntimeError:
        # None can be run; kernels that are compiled already do not need one.
        return None
    package = Path(triton.__file__).parent
    return None if Path(tool.path).is_relative_to(package) else str(tool.version)


def _temporary_folder() -> str:
    try:
        return tempfile.gettempdir()
    except OSError:
        return "no folder that can be written"


class _Files:
    """A cache of Triton's that holds nothing, and keeps what one compile puts into it."""

    def __init__(self) -> None:
        self._kept: dict[str, Any] = {}

    def get_file(self, filename: str) -> None:
        del filename

    def get_group(self, filename: str) -> None:
        del filename

    def put(self, data: Any, filename: str, binary: bool = True) -> str:  # noqa: ANN401
        del binary
        # The stages before are modules of the compiler's own.
        if isinstance(data, str | bytes):
            self._kept[filename] = data
        return filename

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        del group
        return filename

    def ending(self, suffix: str) -> Any:  # noqa: ANN401
        (found,) = (data for name, data in self._kept.items() if name.endswith(suffix))
        return found


class _Knobs:
    """Triton's knobs as they are, but for those that are given."""

    def __init__(self, knobs: Any, given: dict[str, Any]) -> None:  # noqa: ANN401
        self._knobs = knobs
        self._given = given

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        value = getattr(self._knobs, name)
        given = self._given.get(name)
        if not isinstance(given, dict):
            return value if name not in self._given else given
        return _Knobs(value, given)
