"""Runs the PTX of inline assembly on a CPU, from its text, for many threads at once.

Registers are uint32, or uint16 where they have 16 bits. Integers wrap around; fp16 rounds once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache, reduce

import numpy as np
from numpy.typing import NDArray

__all__ = ["execute"]

Register = NDArray[np.unsignedinteger]

# A number, a name, or names that stand side by side in a register, the lowest first.
_OPERAND = re.compile(r"\{[^}]*\}|[^,{}\s]+")


def execute(asm: str, given: Sequence[Register], outputs: int = 1) -> list[Register]:
    """What is left in $0.., so many, of those after them as given."""
    registers = {f"${number}": value for number, value in enumerate(given, start=outputs)}
    registers["%lanemask_lt"] = np.array([7], dtype=np.uint32)
    with np.errstate(all="ignore"):
        for function, to, operands in _statements(asm, outputs):
            made = function(*(_value(operand, registers) for operand in operands))
            if to.startswith("{"):
                low, high = _names(to)
                registers[low] = made.astype(np.uint16)
                registers[high] = (made >> np.uint32(16)).astype(np.uint16)
            else:
                registers[to] = made
    return [registers[f"${number}"] for number in range(outputs)]


def _names(operand: str) -> list[str]:
    """`{low, high}`, or a name alone."""
    return [name.strip() for name in operand.strip("{}").split(",")]


@cache
def _statements(asm: str, outputs: int) -> list[tuple[Callable[..., Register], str, list[str]]]:
    """Of each instruction what it does, where to, and its operands."""
    found: list[tuple[Callable[..., Register], str, list[str]]] = []
    written = {f"${number}" for number in range(outputs)}
    lines = [line.strip() for line in re.sub(r"^\s*\{(.*)\}\s*$", r"\1", asm).split(";")]
    assert not lines.pop(), "the last one does not end"
    for line in lines:
        name, rest = line.split(maxsplit=1)
        if name == ".reg":
            written |= set(rest.removeprefix(".b32").removeprefix(".b16").replace(",", " ").split())
            continue
        to, *operands = _OPERAND.findall(rest)
        assert set(_names(to)) <= written, f"{to} is no register"
        found.append((_INSTRUCTIONS[name], to, operands))
    return found


def _value(operand: str, registers: dict[str, Register]) -> Register:
    if operand.startswith("{"):
        low, high = (registers[name] for name in _names(operand))
        assert low.dtype == high.dtype == np.uint16
        return _joined(low, high)
    return registers[operand] if operand in registers else _number(operand)


@cache
def _number(text: str) -> Register:
    # Not of no dimensions: such a product warns where it wraps around.
    return np.array([int(text, 0)], dtype=np.uint32)


def _joined(low: Register, high: Register) -> Register:
    return low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16)


def _mov(a: Register) -> Register:
    assert a.dtype == np.uint32
    return a


def _shl(a: Register, places: Register) -> Register:
    return np.where(places < 32, a << np.minimum(places, 31), np.uint32(0))


def _shr(a: Register, places: Register) -> Register:
    return np.where(places < 32, a >> np.minimum(places, 31), np.uint32(0))


def _lop3(a: Register, b: Register, c: Register, table: Register) -> Register:
    """Bit i of the table is what bits of a, b, c give that are those of i, a's the highest."""
    rows = [i for i in range(8) if int(table[0]) >> i & 1]
    terms = [(a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c) for i in rows]
    return reduce(np.bitwise_or, terms)


def _prmt(a: Register, b: Register, selector: Register) -> Register:
    """Bytes of b, a by the four digits of the selector; 8 more: its sign instead."""
    made = np.zeros(1, dtype=np.uint32)
    for place in range(4):
        digit = selector >> np.uint32(4 * place) & np.uint32(15)
        word = np.where(digit & np.uint32(4), b, a)
        byte = word >> digit % np.uint32(4) * np.uint32(8) & np.uint32(255)
        byte = np.where(digit & np.uint32(8), (byte >> np.uint32(7)) * np.uint32(255), byte)
        made = made | byte << np.uint32(8 * place)
    return made


def _dp4a(a: Register, b: Register, c: Register) -> Register:
    for place in (0, 8, 16, 24):
        shift, mask = np.uint32(place), np.uint32(255)
        c = c + (a >> shift & mask) * (b >> shift & mask)
    return c


def _f16x2(function: Callable[..., NDArray[np.float16]]) -> Callable[..., Register]:
    def apply(*operands: Register) -> Register:
        low = function(*(each.astype(np.uint16).view(np.float16) for each in operands))
        tops = [(each >> np.uint32(16)).astype(np.uint16) for each in operands]
        high = function(*(each.view(np.float16) for each in tops))
        return _joined(low.view(np.uint16), high.view(np.uint16))

    return apply


def _fma(
    a: NDArray[np.float16], b: NDArray[np.float16], c: NDArray[np.float16]
) -> NDArray[np.float16]:
    """a * b + c, rounded once."""
    # Float64 holds the product, and of sums all that could come near a tie of fp16: there the
    # smaller one is at least 2**-12 of the larger, and of 22 bits.
    return (a.astype(np.float64) * b + c).astype(np.float16)


_INSTRUCTIONS: dict[str, Callable[..., Register]] = {
    "mov.b32": _mov,
    "mov.u32": _mov,
    "add.u32": lambda a, b: a + b,
    "and.b32": lambda a, b: a & b,
    "shl.b32": _shl,
    "shr.u32": _shr,
    "mul.lo.u32": lambda a, b: a * b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "lop3.b32": _lop3,
    "prmt.b32": _prmt,
    "dp4a.u32.u32": _dp4a,
    # Sums and products of two fp16 round once also by way of fp32, as NumPy has them.
    "add.rn.f16x2": _f16x2(lambda a, b: a + b),
    "mul.rn.f16x2": _f16x2(lambda a, b: a * b),
    "fma.rn.f16x2": _f16x2(_fma),
}
