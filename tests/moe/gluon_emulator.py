"""Runs Gluon kernels on a CPU, on torch tensors: their numbers and the order of their copies.

The Python of a kernel runs as it is, with Gluon's functions replaced, and PTX as its text says.
Layouts are ignored. What `cp.async` brings lands as late as its `wait_group` allows, or with
`lands_early` at once; `wgmma` reads shared memory as late as its wait allows. So a block that is
read before it is there, or a buffer that is written while it is read, gives wrong numbers in one of
the two.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from triton.experimental.gluon import language as gl

from tests.moe import ptx

TORCH = {
    gl.bfloat16: torch.bfloat16,
    gl.float16: torch.float16,
    gl.float32: torch.float32,
    gl.float8e4nv: torch.float8_e4m3fn,
    gl.int1: torch.bool,
    gl.int8: torch.int8,
    gl.uint8: torch.uint8,
    gl.int16: torch.int16,
    gl.int32: torch.int32,
    gl.int64: torch.int64,
}
GLUON = {value: key for key, value in TORCH.items()}


def raw(value: Any) -> Any:
    return value.v if isinstance(value, Block) else value


class Block:
    """A tensor of a kernel, or a scalar."""

    def __init__(self, v: torch.Tensor, layout: object = None) -> None:
        self.v = v
        self.type = types.SimpleNamespace(layout=layout)

    dtype = property(lambda self: GLUON[self.v.dtype])
    shape = property(lambda self: list(self.v.shape))

    def to(self, dtype: Any, bitcast: bool = False) -> Block:
        wanted = TORCH[dtype]
        v = self.v.contiguous().view(wanted) if bitcast else self.v.to(wanted)
        return Block(v, self.type.layout)

    def __getitem__(self, key: Any) -> Block:
        return Block(self.v[key])

    def __bool__(self) -> bool:
        return bool(self.v)

    def __index__(self) -> int:
        return int(self.v)


@cache
def integer(value: int, dtype: torch.dtype) -> torch.Tensor:
    """One as a tensor, which nothing changes."""
    return torch.tensor(value, dtype=dtype)


def both(a: Any, b: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one type, as Triton promotes: a number takes the tensor's."""
    a, b = raw(a), raw(b)
    if not isinstance(a, torch.Tensor):
        b, a = both(b, a)
        return a, b
    if not isinstance(b, torch.Tensor):
        if isinstance(b, float):
            a = a if a.is_floating_point() else a.float()
            return a, torch.tensor(b, dtype=a.dtype)
        return a, integer(b, a.dtype)
    wanted = torch.promote_types(a.dtype, b.dtype)
    return a.to(wanted), b.to(wanted)


def operator(function: Callable[..., torch.Tensor], swap: bool = False) -> Callable[..., Any]:
    def apply(self: Block, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        a, b = both(other, self) if swap else both(self, other)
        layout = self.type.layout or getattr(getattr(other, "type", None), "layout", None)
        return Block(function(a, b), layout)

    return apply


def trunc(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.div(a, b, rounding_mode="trunc")


OPERATORS = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "truediv": torch.div,
    "floordiv": trunc, "mod": torch.fmod, "and": torch.bitwise_and, "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "lshift": torch.bitwise_left_shift, "rshift": torch.bitwise_right_shift,
}  # fmt: skip
for name, function in OPERATORS.items():
    setattr(Block, f"__{name}__", operator(function))
    setattr(Block, f"__r{name}__", operator(function, swap=True))
for name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Block, f"__{name}__", operator(getattr(torch, name)))
Block.__neg__ = lambda self: Block(-self.v, self.type.layout)  # type: ignore[attr-defined]


def bits(v: torch.Tensor) -> torch.Tensor:
    """The same, of a type that torch picks elements of: numbers of a byte as bytes."""
    return v.view(torch.uint8) if v.dtype == torch.float8_e4m3fn else v


class Pointer:
    """Addresses in the memory of one argument, in elements."""

    def __init__(self, memory: torch.Tensor, at: torch.Tensor) -> None:
        self.memory, self.at = memory, at
        self.dtype = types.SimpleNamespace(element_ty=GLUON[memory.dtype])

    def __add__(self, other: Any) -> Pointer:
        other = raw(other)
        return Pointer(self.memory, self.at + torch.as_tensor(other).long())

    __radd__ = __add__

    def __sub__(self, other: Any) -> Pointer:
        return self + -raw(other)

    def masked(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
        mask = integer(True, torch.bool) if mask is None else torch.as_tensor(raw(mask))
        at, mask = torch.broadcast_tensors(self.at, mask)
        used = at[mask]
        assert not used.numel() or 0 <= used.min() <= used.max() < len(self.memory), "outside"
        return torch.where(mask, at, 0), mask

    def read(self, mask: Any, other: Any) -> torch.Tensor:
        at, mask = self.masked(mask)
        values = torch.full(at.shape, other, dtype=self.memory.dtype)
        bits(values)[mask] = bits(self.memory)[at[mask]]
        return values


class Shared:
    """A buffer in shared memory, or a part of it; it holds NaN until it is written."""

    def __init__(self, v: torch.Tensor) -> None:
        self.v = v

    dtype = property(lambda self: GLUON[self.v.dtype])
    shape = property(lambda self: list(self.v.shape))

    def index(self, i: Any) -> Shared:
        return Shared(self.v[int(i)])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.v.narrow(dim, start, length))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.v.permute(order))

    def load(self, layout: object) -> Block:
        return Block(self.v.clone(), layout)

    def store(self, value: Block) -> None:
        self.v.copy_(value.v)


def registers_of(value: Block, kind: str, pack: int) -> list[np.ndarray]:
    """What an operand of inline assembly finds in registers, so many elements each."""
    word = {"r": torch.int32, "h": torch.int16}[kind]
    found = value.v.contiguous().view(word).numpy().view({"r": "u4", "h": "u2"}[kind])
    # Numbers that fill a register have one for each element.
    count = value.v.itemsize * pack // {"r": 4, "h": 2}[kind]
    assert count in (1, 2)
    return [found] * count


class Machine:
    """What one program of a kernel sees as `gl`, `tl` and the modules beside them."""

    def __init__(self, program: tuple[int, ...], grid: tuple[int, ...], lands_early: bool) -> None:
        self.program, self.grid, self.lands_early = program, grid, lands_early
        self.open: list[Callable[[], None]] = []
        self.groups: list[list[Callable[[], None]]] = []
        self.products: list[Callable[[], None]] = []

    # Of `async_copy`.
    def async_copy_global_to_shared(self, to: Shared, pointer: Pointer, mask: Any = None) -> None:
        values = pointer.read(mask, 0)
        assert list(values.shape) == list(to.v.shape)
        self.open.append(lambda: to.v.copy_(values))  # type: ignore[arg-type, return-value]
        if self.lands_early:
            self.open.pop()()

    def commit_group(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def wait_group(self, count: int) -> None:
        while len(self.groups) > count:
            for copy in self.groups.pop(0):
                copy()

    # Of `wgmma` and `mma.sync`.
    def warpgroup_mma(
        self, a: Any, b: Shared, acc: Block, use_acc: Any = True, is_async: bool = False
    ) -> Block:
        assert is_async

        def product() -> None:
            before = acc if use_acc else Block(torch.zeros_like(acc.v))
            acc.v = self.mma_v2(a, Block(b.v), before).v

        self.products.append(product)
        return acc

    def warpgroup_mma_wait(self, count: int, deps: list[Any]) -> Any:
        while len(self.products) > count:
            self.products.pop(0)()
        return deps[0] if len(deps) == 1 else tuple(deps)

    def mma_v2(self, a: Block, b: Block, acc: Block) -> Block:
        # Rounded once: so a row's bits do not depend on its place, as they do not on a GPU.
        total = torch.addmm(acc.v.double(), a.v.double(), b.v.double())
        return Block(total.float(), acc.type.layout)

    # Of the language.
    def program_id(self, axis: int) -> Block:
        return Block(torch.tensor(self.program[axis], dtype=torch.int32))

    def num_programs(self, axis: int) -> Block:
        return Block(torch.tensor(self.grid[axis], dtype=torch.int32))

    def arange(self, start: int, end: int, layout: object = None) -> Block:
        return Block(torch.arange(start, end, dtype=torch.int32), layout)

    def full(self, shape: list[int], value: float, dtype: Any, layout: object = None) -> Block:
        return Block(torch.full(tuple(shape), value, dtype=TORCH[dtype]), layout)

    def zeros(self, shape: list[int], dtype: Any, layout: object = None) -> Block:
        return self.full(shape, 0, dtype, layout)

    def cast(self, value: float, dtype: Any) -> Block:
        return Block(torch.tensor(value, dtype=TORCH[dtype]))

    def load(self, pointer: Pointer, mask: Any = None, other: Any = 0) -> Block:
        return Block(pointer.read(mask, other))

    def store(self, pointer: Pointer, value: Block, mask: Any = None) -> None:
        at, mask = pointer.masked(mask)
        pointer.memory[at[mask]] = value.v.expand(at.shape)[mask].to(pointer.memory.dtype)

    def where(self, condition: Any, a: Any, b: Any) -> Block:
        if not isinstance(a, Block) and not isinstance(b, Block):
            # Of two numbers, as of two scalars of the language.
            a = self.cast(a, gl.float32 if isinstance(a, float) else gl.int32)
        a, b = both(a, b)
        return Block(torch.where(torch.as_tensor(raw(condition)), a, b))

    def minimum(self, a: Any, b: Any) -> Any:
        if not isinstance(a, Block) and not isinstance(b, Block):
            return min(a, b)
        return Block(torch.minimum(*both(a, b)))

    def maximum(self, a: Any, b: Any) -> Any:
        return Block(torch.maximum(*both(a, b)))

    def max(self, value: Block, axis: int) -> Block:
        return Block(value.v.amax(axis))

    def min(self, value: Block, axis: int) -> Block:
        return Block(value.v.amin(axis))

    def sum(self, value: Block, axis: int) -> Block:
        return Block(value.v.sum(axis))

    def exp(self, value: Block) -> Block:
        return Block(value.v.exp())

    def abs(self, value: Block) -> Block:
        return Block(value.v.abs())

    def div_rn(self, a: Block, b: Block) -> Block:
        return a / b  # type: ignore[operator, return-value]

    def permute(self, value: Block, order: tuple[int, ...]) -> Block:
        return Block(value.v.permute(order))

    def reshape(self, value: Block, shape: list[int]) -> Block:
        return Block(value.v.reshape(shape), value.type.layout)

    def split(self, value: Block) -> tuple[Block, Block]:
        a, b = value.v.unbind(-1)
        return Block(a), Block(b)

    def join(self, a: Block, b: Block) -> Block:
        return Block(torch.stack(torch.broadcast_tensors(*both(a, b)), dim=-1))

    def gather(self, value: Block, index: Block, axis: int) -> Block:
        return Block(value.v.gather(axis, index.v.long()), index.type.layout)

    def convert_layout(self, value: Block, layout: object, assert_trivial: bool = False) -> Block:
        return Block(value.v, layout)

    def allocate_shared_memory(self, dtype: Any, shape: list[int], layout: object) -> Shared:
        kind = TORCH[dtype]
        return Shared(torch.full(shape, math.nan if kind.is_floating_point else 77, dtype=kind))

    def inline_asm_elementwise(
        self, asm: Any, constraints: str, args: list[Block], *, dtype: Any, is_pure: bool, pack: int
    ) -> Any:
        """As Triton's. Several elements of 32 bits are those of a number that all have."""
        dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
        kinds = constraints.split(",")
        assert kinds[: len(dtypes)] == ["=r"] * len(dtypes)
        given: list[np.ndarray] = []
        for arg in args:
            given += registers_of(arg, kinds[len(dtypes) + len(given)], pack)
        assert len(given) == len(kinds) - len(dtypes)
        made = ptx.execute(getattr(asm, "value", asm), given, outputs=len(dtypes))
        layout = args[0].type.layout if args else None
        found = tuple(
            Block(torch.from_numpy(register.view("i4")).view(TORCH[kind]), layout)
            for register, kind in zip(made, dtypes, strict=True)
        )
        return found if isinstance(dtype, tuple) else found[0]

    def static_range(self, *ends: int) -> range:
        return range(*ends)

    def static_assert(self, condition: bool) -> None:
        assert condition

    def nothing(self, *_: object) -> None:
        """Of fences and waits for other kernels."""

    gdc_wait = gdc_launch_dependents = fence_async_shared = nothing

    def __getattr__(self, name: str) -> Any:
        # Types and layouts are the real ones.
        return getattr(gl, name)


def emulated(function: Any, machine: Machine, known: dict[int, Any]) -> Any:
    """A function of a kernel, with what it calls replaced."""
    if id(function) in known:
        return known[id(function)]
    python = function.fn
    names: dict[str, Any] = {}
    found = types.FunctionType(python.__code__, names, python.__name__, python.__defaults__)
    known[id(function)] = found
    for name in python.__code__.co_names:
        if name not in python.__globals__:
            continue
        value = python.__globals__[name]
        if isinstance(value, types.ModuleType):
            names[name] = machine
        elif hasattr(value, "fn") and hasattr(value, "params"):
            names[name] = emulated(value, machine, known)
        else:
            names[name] = (getattr(Machine, name, None) and getattr(machine, name)) or value
    names["__builtins__"] = __builtins__
    return found


def pointer_to(tensor: torch.Tensor) -> Pointer:
    """From a tensor's first element to the end of its storage."""
    size = tensor.untyped_storage().nbytes() // tensor.itemsize - tensor.storage_offset()
    return Pointer(tensor.as_strided((size,), (1,)), torch.tensor(0))


def run(
    kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], *, lands_early: bool
) -> None:
    """All programs of a launch, one after the other.

    Args:
        kernel: a `gluon.jit` function.
        arguments: every parameter by name: tensors, integers, constants; None where absent.
    """
    given = {
        name: pointer_to(value) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }
    for z in range(grid[2]):
        for y in range(grid[1]):
            for x in range(grid[0]):
                machine = Machine((x, y, z), grid, lands_early)
                emulated(kernel, machine, {})(**given)
                assert not machine.products
