"""`LaunchKey`: all that can change a kernel's compiled code or its launch, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

import torch

from firesteel.errors import InvalidArgumentError

__all__ = ["ALIGNED", "DTYPES", "Constexpr", "LaunchKey", "nearest_key"]

Constexpr = int | bool | float | str | None

DTYPES: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "i8": torch.int8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "u8": torch.uint8,
    "fp8e4nv": torch.float8_e4m3fn,
}
"""Triton's name of an element to torch's."""

ALIGNED = "@16"
"""Ends the type of a pointer that the compiler may take to be a multiple of 16 bytes."""

_REQUIRED = {"kernel", "arguments", "constexprs"}
_CLASSES = {
    "kernel": str,
    "num_warps": int,
    "num_stages": int,
    "pdl": bool,
    "cooperative": bool,
    "max_registers": int,
}
_WORDS = {str: "text", int: "an integer", bool: "true or false"}


@dataclass(frozen=True, slots=True)
class LaunchKey:
    """One compiled kernel and how it is launched. No pointer, no run-time size.

    Fields
        kernel       module and name of the Triton function
        arguments    name and type of each run-time parameter, in order: "*bf16@16" (a pointer that
                     16 divides), "*i64" (a pointer of any alignment), "i64", "i32", "fp32"
        constexprs   name and value of each compile-time parameter; a tensor that is absent is None
        num_warps    warps a program
        num_stages   stages of the software pipeline
        pdl          programmatic dependent launch: may start before the kernel before it has ended
        cooperative  all programs are resident at once
        max_registers  of a thread, so that more programs find room; 0 for as many as the code asks
    """

    kernel: str
    arguments: tuple[tuple[str, str], ...]
    constexprs: tuple[tuple[str, Constexpr], ...]
    num_warps: int = 4
    num_stages: int = 3
    pdl: bool = False
    cooperative: bool = False
    max_registers: int = 0

    def __eq__(self, other: object) -> bool:
        # True == 1 == 1.0, but they compile to different code. Equal keys still hash alike.
        if self is other:
            return True
        if not isinstance(other, LaunchKey):
            return NotImplemented
        return _values(self) == _values(other) and repr(self.constexprs) == repr(other.constexprs)

    @property
    def name(self) -> str:
        """The function's own name, without its module."""
        return self.kernel.rpartition(".")[2]

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `from_dict` reads it back."""
        return {
            "kernel": self.kernel,
            "arguments": dict(self.arguments),
            "constexprs": dict(self.constexprs),
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "pdl": self.pdl,
            "cooperative": self.cooperative,
            "max_registers": self.max_registers,
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> LaunchKey:
        """The inverse of `as_dict`.

        Raises
            InvalidArgumentError: a field is missing, unknown or of a wrong class.
        """
        names = {field.name for field in fields(cls)}
        if not isinstance(cast(object, value), Mapping) or not set(value) >= _REQUIRED:
            raise InvalidArgumentError(
                f"key: got {value!r}, must have kernel, arguments and constexprs"
            )
        if unknown := set(value) - names:
            raise InvalidArgumentError(f"key: unknown fields {sorted(unknown)}, of {sorted(names)}")
        for name in ("arguments", "constexprs"):
            if not isinstance(value[name], Mapping):
                raise InvalidArgumentError(f"key.{name}: got {value[name]!r}, must be an object")
        rest = {name: value[name] for name in names & set(value)}
        for name in rest.keys() - {"arguments", "constexprs"}:
            kind = _CLASSES[name]
            if type(rest[name]) is not kind:
                raise InvalidArgumentError(
                    f"key.{name}: got {rest[name]!r}, must be {_WORDS[kind]}"
                )
        for name, kind in value["arguments"].items():
            if not isinstance(kind, str):
                raise InvalidArgumentError(f"key.arguments.{name}: got {kind!r}, must be text")
        for name, constant in value["constexprs"].items():
            # A NaN differs from itself, so no table could hold its key.
            if not isinstance(constant, int | float | str | None) or constant != constant:
                raise InvalidArgumentError(
                    f"key.constexprs.{name}: got {constant!r}, must be a number, text or None"
                )
        rest["arguments"] = tuple((str(n), t) for n, t in value["arguments"].items())
        rest["constexprs"] = tuple((str(n), v) for n, v in value["constexprs"].items())
        return cls(**rest)

    def differences(self, other: LaunchKey) -> tuple[str, ...]:
        """The fields in which `other` differs, each as "BLOCK_M: 16, nearest has 64"."""
        found: list[str] = []
        for name in _CLASSES:
            found += _difference(name, getattr(self, name), getattr(other, name))
        for ours, theirs in (
            (dict(self.arguments), dict(other.arguments)),
            (dict(self.constexprs), dict(other.constexprs)),
        ):
            for name in dict.fromkeys((*ours, *theirs)):
                found += _difference(name, ours.get(name, _ABSENT), theirs.get(name, _ABSENT))
        return tuple(found)

    def __str__(self) -> str:
        """`gate_up_kernel(x: *bf16@16, ..., BLOCK_M=16, num_warps=4, num_stages=3)`.

        What is absent (None) is left out.
        """
        words = [f"{name}: {kind}" for name, kind in self.arguments]
        words += [f"{name}={value}" for name, value in self.constexprs if value is not None]
        words += [f"num_warps={self.num_warps}", f"num_stages={self.num_stages}"]
        words += [name for name in ("pdl", "cooperative") if getattr(self, name)]
        if self.max_registers:
            words.append(f"max_registers={self.max_registers}")
        return f"{self.name}({', '.join(words)})"


def _values(key: LaunchKey) -> tuple[object, ...]:
    return tuple(getattr(key, field.name) for field in fields(key))


class _Absent:
    def __repr__(self) -> str:
        return "absent"


_ABSENT = _Absent()


def _difference(name: str, ours: object, theirs: object) -> list[str]:
    # True == 1, but they compile to different code.
    same = ours == theirs and type(ours) is type(theirs)
    return [] if same else [f"{name}: {ours!r}, nearest has {theirs!r}"]


def nearest_key(key: LaunchKey, keys: Iterable[LaunchKey]) -> LaunchKey | None:
    """The key with the fewest fields that differ, of the same kernel where there is one."""
    return min(
        keys,
        key=lambda other: (other.kernel != key.kernel, len(key.differences(other))),
        default=None,
    )
