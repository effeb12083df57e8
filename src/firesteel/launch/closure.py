"""All the code and values that a Triton function is made of, as one digest.

Triton compiles a function from the text that it read when the function was decorated, and looks up
names as they are at the time of the compile. So does the digest: text as it was imported, values as
they are now. What comes with Python, Triton, torch and numpy is taken by name; the version of
Triton is hashed apart.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import io
import os
import sys
import sysconfig
import textwrap
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from types import (
    BuiltinFunctionType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch

from firesteel.errors import InvalidArgumentError

__all__ = ["closure_digest", "remember_sources"]

_ALLOWED = (
    "a number, text, dtype, constexpr, a collection of such, a function, a class or a module: "
    "the digest of compiled code cannot hold another value"
)
_IN_C = (BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType)
# Sources of plain functions, by function; one that `triton.jit` decorates keeps its own.
_sources: WeakKeyDictionary[FunctionType, str] = WeakKeyDictionary()


def closure_digest(function: Any, kernel: str) -> str:  # noqa: ANN401
    """SHA-256 of a function and of all that its code reaches.

    Args:
        function: made by `triton.jit`.
        kernel: its name, for errors.

    Raises
        InvalidArgumentError: a value that the code reads cannot be hashed, or has no source.
    """
    digest = hashlib.sha256()
    for text in _Walk(kernel).texts(function):
        digest.update(f"{len(text)}\0{text}".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def remember_sources(function: Any) -> None:  # noqa: ANN401
    """Read the sources of plain functions that are reached now, before files on disk may change."""
    for _ in _Walk(None).texts(function):
        pass


@dataclass(frozen=True, slots=True)
class _Parsed:
    """What the text of a function says by itself.

    Fields
        tokens      the text without comments and its place in the file
        references  names that it reads, each with the attributes that follow: ("tl", "load")
        parameters  of the function: they hide what has their name
        assigned    names that it sets somewhere, which hide others only in part of the code
    """

    tokens: str
    references: tuple[tuple[str, ...], ...]
    parameters: frozenset[str]
    assigned: frozenset[str]


class _Walk:
    """One pass over all that a function reaches. Each function and class has a number.

    Args:
        kernel: for errors; None leaves out what cannot be hashed.
    """

    def __init__(self, kernel: str | None) -> None:
        self._kernel = kernel
        self._numbers: dict[int, int] = {}
        # Holds them, so that no number of a dead object is given to another.
        self._found: list[Any] = []

    def texts(self, function: Any) -> Iterator[str]:  # noqa: ANN401
        """A text for each function and class, in the order of their numbers, and for each value."""
        self._number(function)
        done = 0
        while done < len(self._found):
            value = self._found[done]
            done += 1
            yield from self._of_class(value) if isinstance(value, type) else self._of(value)

    def _number(self, value: object) -> str:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._found)
            self._found.append(value)
        return f"#{self._numbers[id(value)]}"

    def _of(self, value: Any) -> Iterator[str]:  # noqa: ANN401
        python = _python_function(value)
        assert python is not None
        if _is_outside(python.__globals__.get("__name__")):
            # A wrapper around what was passed to it.
            yield f"outside {python.__qualname__}"
            for place, inner in enumerate(_cells(python).values()):
                if _is_node(inner):
                    yield self._text(inner, f"{python.__qualname__}.{place}")
            return
        try:
            parsed = _parsed(_source(value, python), value is not python)
        except (OSError, TypeError, SyntaxError) as error:
            if self._kernel is None:
                return
            raise InvalidArgumentError(
                f"{self._kernel}: {python.__qualname__} has no source of its own to be hashed, "
                f"must have: {error}"
            ) from error
        kind = "function" if value is python else type(value).__name__
        yield f"{kind} {python.__qualname__} {getattr(value, 'noinline', False)}"
        yield parsed.tokens
        # Read when the function was made, not when it is compiled.
        defaults = (python.__defaults__ or (), python.__kwdefaults__ or {})
        yield self._text(defaults, f"{python.__qualname__}'s defaults")
        scope = _Scope(python)
        for reference in parsed.references:
            if reference[0] in parsed.parameters or not scope.has(reference[0]):
                continue
            found, path = _resolved(scope.get(reference[0]), reference)
            name = ".".join(path)
            # A name that is set as well: code of Python's own, or what has no text, was not meant.
            if reference[0] in parsed.assigned and not self._may_be_meant(found):
                continue
            yield f"{name} = {self._text(found, name)}"

    def _may_be_meant(self, value: object) -> bool:
        if _is_node(value):
            return isinstance(getattr(value, "src", None), str)
        try:
            return bool(self._text(value, ""))
        except InvalidArgumentError:
            return False

    def _of_class(self, value: type) -> Iterator[str]:
        yield f"class {value.__qualname__} {sorted(inspect.get_annotations(value))}"
        for base in value.__bases__:
            yield self._text(base, f"{value.__qualname__}'s base")
        for name, member in sorted(vars(value).items()):
            for part in _parts(member):
                is_function = _python_function(part) is not None
                special = name.startswith("__") and name.endswith("__")
                # What Python itself sets, or a decorator generates from the annotations.
                if special and not (is_function and _has_source(part)):
                    continue
                if not isinstance(part, GetSetDescriptorType | MemberDescriptorType):
                    where = f"{value.__qualname__}.{name}"
                    yield f"{where} = {self._text(part, where)}"

    def _text(self, value: Any, where: str) -> str:  # noqa: ANN401
        """What stands for a value: the same in every process, and other for another value."""
        if (plain := _plain_text(value)) is not None:
            return plain
        if isinstance(value, Enum):
            return f"{type(value).__qualname__}.{value.name} {self._text(value.value, where)}"
        if isinstance(value, tuple | list):
            items = cast(Sequence[Any], value)
            inner = [self._text(item, f"{where}[{place}]") for place, item in enumerate(items)]
            return f"{type(items).__qualname__}({', '.join(inner)})"
        if isinstance(value, set | frozenset):
            members = cast(frozenset[Any], value)
            return f"set({', '.join(sorted(self._text(item, where) for item in members))})"
        if isinstance(value, dict):
            pairs = cast(Mapping[Any, Any], value).items()
            inner = [
                f"{self._text(k, where)}: {self._text(v, f'{where}[{k!r}]')}" for k, v in pairs
            ]
            return f"{type(cast(object, value)).__qualname__}({', '.join(inner)})"
        if _is_constexpr(value):
            return f"constexpr({self._text(value.value, where)})"
        return self._object_text(value, where)

    def _object_text(self, value: Any, where: str) -> str:  # noqa: ANN401
        if isinstance(value, ModuleType):
            return f"module {value.__name__}"
        if isinstance(value, MethodType):
            owner = self._text(value.__self__, f"{where}.__self__")
            return f"method {self._number(value.__func__)} of {owner}"
        if isinstance(value, type):
            # One made in C has no code to hash.
            if _is_outside(value.__module__) or not value.__flags__ & _IS_MADE_BY_PYTHON:
                return f"outside {value.__module__}.{value.__qualname__}"
            return self._number(value)
        if _python_function(value) is not None:
            return self._number(value)
        if isinstance(value, _IN_C):
            owner = getattr(value, "__self__", None)
            if owner is None or isinstance(owner, ModuleType | type):
                return f"in C {value.__qualname__}"
        if self._kernel is None:
            return ""
        raise InvalidArgumentError(
            f"{self._kernel}: its global {where} is of {type(value)}, must be {_ALLOWED}"
        )


_IS_MADE_BY_PYTHON = 1 << 9
"""In `type.__flags__`: a class whose statement was run, or that was made as if."""


class _Scope:
    """What the names of a function mean now."""

    def __init__(self, function: FunctionType) -> None:
        self._cells = _cells(function)
        self._globals = function.__globals__

    def has(self, name: str) -> bool:
        return name in self._cells or name in self._globals

    def get(self, name: str) -> Any:  # noqa: ANN401
        return self._cells[name] if name in self._cells else self._globals[name]


def _cells(function: FunctionType) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:
            # Not set yet: code that reads it would fail.
            continue
    return found


def _resolved(value: Any, reference: tuple[str, ...]) -> tuple[Any, tuple[str, ...]]:  # noqa: ANN401
    """Follow attributes of modules, classes and objects; of other values they are methods."""
    length = 1
    while length < len(reference):
        if _is_plain(value) or _python_function(value) is not None or _is_constexpr(value):
            break
        if isinstance(value, tuple | list | dict | set | frozenset | Enum):
            break
        if isinstance(value, ModuleType | type) and _is_outside(_module_of(value)):
            break
        if not hasattr(value, reference[length]):
            break
        value = getattr(value, reference[length])
        length += 1
    return value, reference[:length]


def _module_of(value: ModuleType | type) -> str:
    return value.__name__ if isinstance(value, ModuleType) else value.__module__


def _parts(member: Any) -> Iterator[Any]:  # noqa: ANN401
    """What the attribute of a class holds."""
    if isinstance(member, staticmethod | classmethod):
        yield cast(Any, member).__func__
    elif isinstance(member, property):
        yield from (part for part in (member.fget, member.fset) if part is not None)
    else:
        yield member


def _python_function(value: object) -> FunctionType | None:
    """What a `triton.jit`, `triton.constexpr_function` or plain function was written as."""
    if isinstance(value, FunctionType):
        return value
    inner = None if isinstance(value, type) else getattr(value, "fn", None)
    # What `functools.lru_cache` makes.
    inner = getattr(value, "__wrapped__", None) if inner is None else inner
    return inner if isinstance(inner, FunctionType) else None


def _is_node(value: object) -> bool:
    """Whether it is code, which has a number of its own."""
    return isinstance(value, type) or _python_function(value) is not None


def _source(value: object, python: FunctionType) -> str:
    """The text as Triton read it, or of a plain function as it was when first met."""
    kept = getattr(value, "src", None)
    if isinstance(kept, str):
        return kept
    found = _sources.get(python)
    if found is None:
        # Of the code, since `inspect` would look through a wrapper at what it wraps.
        found = _sources[python] = textwrap.dedent(inspect.getsource(python.__code__))
    return found


def _has_source(value: object) -> bool:
    python = _python_function(value)
    assert python is not None
    return not python.__code__.co_filename.startswith("<")


def _is_plain(value: object) -> bool:
    return _plain_text(value) is not None


def _plain_text(value: Any) -> str | None:  # noqa: ANN401
    if value is None or type(value) in (bool, int, float, complex, str, bytes, range):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, torch.dtype):
        return str(value)
    language = sys.modules.get("triton.language")
    if language is not None and isinstance(value, language.dtype):
        # Of a pointer its text leaves out the address space.
        rest = [(name, _plain_text(field)) for name, field in sorted(vars(value).items())]
        return f"{type(value).__name__} {value} {rest}"
    return None


def _is_constexpr(value: object) -> bool:
    language = sys.modules.get("triton.language")
    return language is not None and isinstance(value, language.constexpr)


def _is_outside(module: object) -> bool:
    """Whether a module comes with Python, Triton, torch or numpy."""
    root = module.partition(".")[0] if isinstance(module, str) else ""
    if root in ("builtins", "triton", "torch", "numpy"):
        return True
    if root not in sys.stdlib_module_names:
        return False
    # A caller's own module may have the name of one of Python's.
    spec = getattr(sys.modules.get(root), "__spec__", None)
    origin = getattr(spec, "origin", None)
    if origin in (None, "built-in", "frozen"):
        return True
    folder = os.path.realpath(sysconfig.get_path("stdlib"))
    return os.path.realpath(origin).startswith(folder + os.sep)


class _Names(ast.NodeVisitor):
    """Collects the names that a function reads when it is compiled or called."""

    def __init__(self, is_compiled: bool) -> None:
        self._is_compiled = is_compiled
        self.references: dict[tuple[str, ...], None] = {}
        self.assigned: set[str] = set()

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self.references[(node.id,)] = None
        else:
            self.assigned.add(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        path = [node.attr]
        inner = node.value
        while isinstance(inner, ast.Attribute):
            path.append(inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name):
            self.references[(inner.id, *reversed(path))] = None
        else:
            self.visit(inner)

    def visit_arg(self, node: ast.arg) -> None:
        # Its annotation is text to Triton, and the text is hashed.
        self.assigned.add(node.arg)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.assigned.add(node.name)
        for part in (*node.decorator_list, node.args, *node.body):
            self.visit(part)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.visit(node.target)
        if node.value is not None:
            self.visit(node.value)
        # Python does not look at one of a local name; Triton does.
        if self._is_compiled:
            self.visit(node.annotation)

    def visit_alias(self, node: ast.alias) -> None:
        self.assigned.add((node.asname or node.name).partition(".")[0])

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.name is not None:
            self.assigned.add(node.name)
        self.generic_visit(node)


@cache
def _parsed(source: str, is_compiled: bool) -> _Parsed:
    tree = ast.parse(source)
    names = _Names(is_compiled)
    parameters: frozenset[str] = frozenset()
    (top, *_) = tree.body
    if isinstance(top, ast.FunctionDef):
        # Decorators and defaults were read when it was made.
        arguments = top.args
        every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        others = (arguments.vararg, arguments.kwarg)
        parameters = frozenset(one.arg for one in (*every, *others) if one is not None)
        for statement in top.body:
            names.visit(statement)
    else:
        names.visit(tree)
    return _Parsed(_tokens(source), tuple(names.references), parameters, frozenset(names.assigned))


def _tokens(source: str) -> str:
    """The code without comments, blank lines and its place in the file; of any Python version."""
    # The last line of a file may lack its end.
    source = source.rstrip() + "\n"
    lines = source.splitlines(keepends=True)
    found: list[str] = []
    # Python 3.12 and later part an f-string into tokens; before, it is one.
    opens, closes = (getattr(tokenize, f"FSTRING_{end}", -1) for end in ("START", "END"))
    starts: list[tuple[int, int]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == opens:
            starts.append(token.start)
        elif token.type == closes:
            start = starts.pop()
            if not starts:
                found.append(_between(lines, start, token.end))
        elif not starts and token.type not in (tokenize.COMMENT, tokenize.NL):
            found.append(token.string)
    return "\0".join(found)


def _between(lines: Sequence[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    """The text between two places, each a row from 1 and a column."""
    rows = list(lines[start[0] - 1 : end[0]])
    # The end first: both may be in one row.
    rows[-1] = rows[-1][: end[1]]
    rows[0] = rows[0][start[1] :]
    return "".join(rows)
