"""Instructions whose results the manual of PTX gives, or arithmetic on exact numbers."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.moe.ptx import execute

WORDS = st.integers(0, 2**32 - 1)


def one(asm: str, *given: int) -> int:
    return int(execute(asm, [np.array([value], dtype=np.uint32) for value in given])[0][0])


@given(a=WORDS, b=WORDS, c=WORDS, table=st.integers(1, 255))
def test_lop3_looks_up_three_bits(a: int, b: int, c: int, table: int) -> None:
    indices = [(a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1 for i in range(32)]
    wanted = sum((table >> index & 1) << i for i, index in enumerate(indices))
    assert one(f"lop3.b32 $0, $1, $2, $3, {table:#x};", a, b, c) == wanted


@given(a=WORDS, b=WORDS, c=WORDS)
def test_integers_wrap_around(a: int, b: int, c: int) -> None:
    assert one("mad.lo.u32 $0, $1, $2, $3;", a, b, c) == (a * b + c) % 2**32
    assert one("{ .reg .b32 t; mul.lo.u32 t, $1, $2; mov.b32 $0, t; }", a, b) == a * b % 2**32
    pairs = zip(a.to_bytes(4, "little"), b.to_bytes(4, "little"), strict=True)
    assert (
        one("dp4a.u32.u32 $0, $1, $2, $3;", a, b, c) == (sum(x * y for x, y in pairs) + c) % 2**32
    )


@pytest.mark.parametrize(
    ("asm", "wanted"),
    [
        ("prmt.b32 $0, $1, $2, 0x5410;", 0x43218765),
        ("prmt.b32 $0, $1, $2, 0x5432;", 0x43210FED),
        ("prmt.b32 $0, $1, $2, 0x7632;", 0x8CBA0FED),
        ("prmt.b32 $0, $1, $2, 0x0f8b;", 0x65FF0000),
        ("shl.b32 $0, $1, 12;", 0xD8765000),
        ("shl.b32 $0, $1, 32;", 0),
        ("shr.u32 $0, $1, 12;", 0xFED8),
        ("and.b32 $0, $1, 0xf0f0;", 0x8060),
    ],
)
def test_bits_move(asm: str, wanted: int) -> None:
    assert one(asm, 0x0FED8765, 0x8CBA4321) == wanted


def test_halves_stand_side_by_side() -> None:
    halves = [np.array([value], dtype=np.uint16) for value in (0x1234, 0xABCD)]
    assert execute("mov.b32 $0, {$1, $2};", halves)[0][0] == 0xABCD1234


def bits(value: np.float16) -> int:
    return int(value.view(np.uint16))


def nearest(exact: Fraction) -> np.float16:
    """The fp16 number nearest to a number, of two the one whose last place is 0."""
    near = np.float16(float(exact))
    some = [near, np.nextafter(near, np.float16(-np.inf)), np.nextafter(near, np.float16(np.inf))]
    return min(
        (each for each in some if np.isfinite(each)),
        key=lambda each: (abs(Fraction(float(each)) - exact), bits(each) & 1),
    )


# Numbers with room below the largest for a product and a sum.
HALVES = st.integers(0, 2**16 - 1).map(lambda word: np.uint16(word).view(np.float16)).filter(
    lambda half: bool(np.isfinite(half)) and abs(float(half)) < 100
)  # fmt: skip


@given(a=HALVES, b=HALVES, c=HALVES)
def test_fp16_rounds_once(a: np.float16, b: np.float16, c: np.float16) -> None:
    both = [bits(each) << 16 | 0x3C00 for each in (a, b, c)]
    x, y, z = (Fraction(float(each)) for each in (a, b, c))
    for asm, exact, ones in (
        ("fma.rn.f16x2 $0, $1, $2, $3;", x * y + z, 0x4000),
        ("add.rn.f16x2 $0, $1, $2;", x + y, 0x4000),
        ("mul.rn.f16x2 $0, $1, $2;", x * y, 0x3C00),
    ):
        made = one(asm, *both)
        assert made & 0xFFFF == ones
        # 0 has two signs.
        assert np.uint16(made >> 16).view(np.float16) == nearest(exact)


def test_a_fused_sum_is_not_rounded_before() -> None:
    # 48 * 683 is halfway between two numbers, the lower of which has a last place of 0.
    operands = [bits(np.float16(each)) for each in (48.0, 683.0, 2.0**-24)]
    asm = "fma.rn.f16x2 $0, $1, $2, $3;"
    assert one(asm, *operands) == bits(np.float16(32800.0))
    assert one(asm, *operands[:2], 0) == bits(np.float16(32768.0))
