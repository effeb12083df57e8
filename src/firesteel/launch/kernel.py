"""A Triton function as a planner sees it: which parameters it has, and what it is made of."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from firesteel.errors import InvalidArgumentError
from firesteel.launch.closure import closure_digest, remember_sources
from firesteel.launch.key import ALIGNED, DTYPES, Constexpr, LaunchKey

if TYPE_CHECKING:
    from triton.runtime.jit import KernelParam

__all__ = ["Argument", "Kernel", "Launch", "Stride"]

_INTEGERS = ("i32", "i64")


@dataclass(frozen=True, slots=True)
class Stride:
    """The stride of dimension 0 of a tensor that each call passes, in its operand's `row_unit`."""

    tensor: str


Argument = str | int | float | Stride
"""What a run-time parameter is given: a tensor or region by name, a number, or a stride."""


# By type of the parameter: what it may be given, in classes and in words.
_ALLOWED: dict[str, tuple[tuple[type, ...], str]] = {
    "*": ((str,), "the name of a tensor"),
    # No stride: one past 2**31 would be cut off unseen.
    "i32": ((int,), "an integer"),
    "i64": ((int, Stride), "an integer or a stride"),
    "fp32": ((int, float), "a number"),
}


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch for one token count.

    Fields
        kernel     what is launched
        key        the compiled form of it
        grid       programs along x, y and z; a zero launches nothing
        arguments  one for each run-time parameter of the key, in order
    """

    kernel: Kernel
    key: LaunchKey
    grid: tuple[int, int, int]
    arguments: tuple[Argument, ...]


@dataclass(frozen=True, eq=False)
class Kernel:
    """A `triton.jit` function that can be planned.

    Args:
        function: the decorated function. Each run-time integer of it must be annotated (`tl.int64`
            or `tl.int32`) and named in `do_not_specialize`: either alone leaves Triton free to
            compile it anew for 1, for multiples of 16 and past 2**31. A pointer that callers may
            pass unaligned must be named in `do_not_specialize_on_alignment`.
        launches_empty: whether one program, with every integer 0 and every pointer at a zeroed
            1 MiB, ends normally. `prewarm` launches such a kernel once; another it only loads.
        target: "sm_90" where it is written for that alone, and a compiler may die of another; None
            otherwise.

    Raises
        InvalidArgumentError: the function has keyword-only parameters, or `debug=True`.
    """

    function: Any
    launches_empty: bool = True
    target: str | None = None
    _keys: dict[Any, LaunchKey] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not _is_compiled(self.function):
            # An interpreter's function may be wrapped as well; what needs a compiler refuses it.
            return
        signature = inspect.signature(self.function.fn)
        for parameter in signature.parameters.values():
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                raise InvalidArgumentError(
                    f"function: {self.name}.{parameter.name} is keyword-only, must be positional: "
                    "a compiled kernel has no keywords"
                )
        if getattr(self.function, "debug", False):
            raise InvalidArgumentError(
                f"function: {self.name} has debug=True, must be False: device_assert is not "
                "compiled here"
            )
        remember_sources(self.function)

    @cached_property
    def name(self) -> str:
        """Module and name of the function."""
        python = self.function.fn
        return f"{python.__module__}.{python.__qualname__}"

    @cached_property
    def parameters(self) -> tuple[Any, ...]:
        """Triton's own description of each parameter, in order.

        Raises
            InvalidArgumentError: not a `triton.jit` function, or one made for the interpreter.
        """
        if not _is_compiled(self.function):
            inside = getattr(self.function, "fn", None)
            if type(self.function).__name__ in ("Autotuner", "Heuristics") and inside is not None:
                must = "must be the triton.jit function inside it: pass its .fn"
            else:
                must = "must be decorated by triton.jit with TRITON_INTERPRET unset"
            raise InvalidArgumentError(f"function: got {self.function!r}, {must}")
        return tuple(self.function.params)

    def key(
        self,
        types: Mapping[str, str | None],
        constexprs: Mapping[str, Constexpr] | None = None,
        *,
        num_warps: int = 4,
        num_stages: int = 3,
        pdl: bool = False,
        cooperative: bool = False,
        max_registers: int = 0,
    ) -> LaunchKey:
        """The key of one compiled form.

        Args:
            types: of each run-time parameter: "*bf16" (an element of `DTYPES`) for a pointer, None
                for a tensor that is absent, "i64", "i32" or "fp32".
            constexprs: of each compile-time parameter that has no default.

        Raises
            InvalidArgumentError: a parameter is missing, unknown, of another type than annotated,
                or an integer that Triton would specialise.
        """
        values: Mapping[str, object] = {} if constexprs is None else constexprs
        options = (num_warps, num_stages, pdl, cooperative, max_registers)
        # As text, which tells True from 1 and 0.0 from -0.0.
        given = tuple((name, type(value), repr(value)) for name, value in values.items())
        asked = (tuple(types.items()), given, options)
        found = self._keys.get(asked)
        if found is None:
            found = self._key(types, values, options)
            self._keys[asked] = found
        return found

    def _key(
        self,
        types: Mapping[str, str | None],
        constexprs: Mapping[str, object],
        options: tuple[int, int, bool, bool, int],
    ) -> LaunchKey:
        constant = {parameter.name for parameter in self.parameters if parameter.is_constexpr}
        for what, given, known in (
            ("types", types, {p.name for p in self.parameters} - constant),
            ("constexprs", constexprs, constant),
        ):
            if unknown := set(given) - known:
                raise InvalidArgumentError(
                    f"{what}: {self.name} has no such {sorted(unknown)}, must be of {sorted(known)}"
                )
        _check_options(self.name, *options)
        arguments: list[tuple[str, str]] = []
        constants: list[tuple[str, Constexpr]] = []
        for parameter in self.parameters:
            name = parameter.name
            if parameter.is_constexpr:
                if name not in constexprs and not parameter.has_default:
                    raise InvalidArgumentError(f"constexprs: {self.name} needs {name}")
                constants.append((name, self._constant(name, constexprs, parameter.default)))
            elif name not in types:
                raise InvalidArgumentError(f"types: {self.name} needs {name}")
            elif (kind := types[name]) is None:
                constants.append((name, None))
            else:
                arguments.append((name, self._type(parameter, kind)))
        return LaunchKey(self.name, tuple(arguments), tuple(constants), *options)

    def _constant(self, name: str, given: Mapping[str, object], default: object) -> Constexpr:
        value = given.get(name, default)
        # A NaN differs from itself, so no table could hold its key.
        if (value is not None and not isinstance(value, int | float | str)) or value != value:
            raise InvalidArgumentError(
                f"constexprs: {self.name}.{name} is {value!r}, must be a number, text or None"
            )
        return value

    def _type(self, parameter: KernelParam, kind: str) -> str:
        where = f"types: {self.name}.{parameter.name}"
        if not isinstance(cast(object, kind), str):
            raise InvalidArgumentError(f"{where} is {kind!r}, must be text, as '*bf16' or 'i64'")
        if kind.startswith("*"):
            if kind[1:] not in DTYPES:
                raise InvalidArgumentError(
                    f"{where} is {kind!r}, must point to one of {', '.join(DTYPES)}"
                )
            if parameter.do_not_specialize:
                raise InvalidArgumentError(
                    f"{where} is a pointer in do_not_specialize, must not be: use "
                    "do_not_specialize_on_alignment"
                )
            return kind if parameter.do_not_specialize_on_alignment else kind + ALIGNED
        if kind not in (*_INTEGERS, "fp32"):
            raise InvalidArgumentError(f"{where} is {kind!r}, must be a pointer, i32, i64 or fp32")
        if parameter.annotation_type != kind or not parameter.do_not_specialize:
            raise InvalidArgumentError(
                f"{where} is {kind}, must be annotated so and named in do_not_specialize, or "
                "Triton compiles it anew for 1, for multiples of 16 and past 2**31"
            )
        return kind

    def launch(
        self, key: LaunchKey, grid: tuple[int, int, int], arguments: Mapping[str, Argument]
    ) -> Launch:
        """A launch of `key`, with what each of its run-time parameters is given.

        Raises
            InvalidArgumentError: an argument is missing, unknown, or no value for its type.
        """
        if key.kernel != self.name:
            raise InvalidArgumentError(f"key: got one of {key.kernel}, must be of {self.name}")
        if set(arguments) != {name for name, _ in key.arguments}:
            names = [name for name, _ in key.arguments]
            raise InvalidArgumentError(
                f"arguments: {self.name} was given {sorted(arguments)}, must be {sorted(names)}"
            )
        for name, kind in key.arguments:
            value = arguments[name]
            allowed, words = _ALLOWED["*" if kind.startswith("*") else kind]
            if not isinstance(value, allowed) or isinstance(value, bool):
                raise InvalidArgumentError(
                    f"arguments: {self.name}.{name} is {value!r}, must be {words}"
                )
        return Launch(self, key, grid, tuple(arguments[name] for name, _ in key.arguments))

    @property
    def source_digest(self) -> str:
        """SHA-256 of the source of this function and of all that it calls, wherever it stands.

        Comments and line numbers above a function do not matter; a global constant that the code
        reads does, with the value that it has now. Triton's own language is covered by its version,
        which the cache keys hold too.

        Raises
            InvalidArgumentError: the code reads a global that cannot be hashed.
        """
        return closure_digest(self.function, self.name)


def _is_compiled(function: object) -> bool:
    return getattr(function, "params", None) is not None


def _check_options(
    name: str, warps: object, stages: object, pdl: object, cooperative: object, registers: object
) -> None:
    if type(warps) is not int or warps not in (1, 2, 4, 8, 16, 32):
        raise InvalidArgumentError(f"num_warps: {name} has {warps!r}, must be a power of 2 to 32")
    if type(stages) is not int or stages < 0:
        raise InvalidArgumentError(f"num_stages: {name} has {stages!r}, must be an integer from 0")
    if not (isinstance(pdl, bool) and isinstance(cooperative, bool)):
        raise InvalidArgumentError(
            f"pdl, cooperative: {name} has {(pdl, cooperative)}, must be True or False each"
        )
    # A multiple of 8, as they are given out.
    if type(registers) is not int or registers not in (0, *range(32, 256, 8)):
        raise InvalidArgumentError(
            f"max_registers: {name} has {registers!r}, must be 0 or a multiple of 8 from 32 to 248"
        )
