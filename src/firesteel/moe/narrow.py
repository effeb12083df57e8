# pyright: basic
# pyright: reportAssignmentType=false, reportRedeclaration=false, reportArgumentType=false
# pyright: reportReturnType=false, reportOperatorIssue=false
# ruff: noqa: ANN001, ANN201, ANN202
"""Codes of 3 bits to numbers: NF3, and integers, by tables of eight 16-bit numbers.

A block of 128 columns is three runs of 8 words of 16 bits a row (`formats.packed.pack_codes`): four
codes a word, each below a spare bit. Run p has plane p, columns 32p .. 32p + 31; what the spare
bits of the three say is plane 3. Four codes in nibbles are what one PRMT looks up: of four numbers
it gives the high bytes, another the low bytes, and two more put them together in pairs. So a weight
is one PRMT, and of every eight two operations more (seven in plane 3), all at half of an SM's rate.
"""

import struct
from typing import NamedTuple

import triton
import triton.language as tl

__all__ = ["e5m3_scales", "looked_up", "narrow_numbers", "narrow_words", "side_by_side"]

_MAGNITUDES = (0.1279296875, 0.35546875, 0.60546875, 1.0)
_NF3 = (*(-value for value in reversed(_MAGNITUDES)), *_MAGNITUDES)


def _bits(value: float, *, is_bf16: bool) -> int:
    """A number that has few bits as a bf16 or fp16."""
    data = struct.pack(">f", value)[:2] if is_bf16 else struct.pack(">e", value)
    return int.from_bytes(data, "big")


class Table(NamedTuple):
    """PTX of one table.

    Fields
        first    to $0 and $1, the high and the low bytes of the numbers of codes 0 to 3
        look_up  of two words at once: $4 has eight codes, $0 to $3 get two numbers each; $5 and $6
                 are the first bytes above, and $7 and $8 the second
    """

    first: str
    look_up: str


def _table(values: tuple[float, ...], *, is_bf16: bool) -> Table:
    bits = [_bits(value, is_bf16=is_bf16) for value in values]
    high, low = ([each >> shift & 255 for each in bits] for shift in (8, 0))
    # PRMT takes one table from an instruction, the other from a register. The compiler would fill
    # that one anew each time, if it knew what is in it, or that all lanes have the same. No lane is
    # above lane 31, so its bit is 0 here.
    first = (
        "{ .reg .b32 t; mov.u32 t, %lanemask_lt; shr.u32 t, t, 31; "
        f"add.u32 $0, t, {_word(high[:4])}; add.u32 $1, t, {_word(low[:4])}; }}"
    )
    looked_up = "".join(
        f"prmt.b32 h{i}, $5, {_word(high[4:])}, {word}; "
        f"prmt.b32 l{i}, $7, {_word(low[4:])}, {word}; "
        for i, word in enumerate(("$4", "n"))
    )
    paired = "".join(
        f"prmt.b32 ${2 * i + j}, l{i}, h{i}, {order}; "
        for i in (0, 1)
        for j, order in enumerate(("0x5140", "0x7362"))
    )
    look_up = f"{{ .reg .b32 n, h0, l0, h1, l1; shr.u32 n, $4, 16; {looked_up}{paired}}}"
    return Table(first, look_up)


def _word(data: list[int]) -> str:
    """Four bytes as a number, the first one lowest."""
    return f"0x{int.from_bytes(bytes(data), 'little'):08x}"


_CODES = tuple(map(float, range(8)))
_CENTRED = tuple(code - 4 for code in _CODES)
# As `numbers_of_codes` has them.
_NF3_BF16 = _table(tuple(2.0**56 * value for value in _NF3), is_bf16=True)
_NF3_FP16 = _table(tuple(16 * value for value in _NF3), is_bf16=False)
_CODES_BF16 = _table(_CODES, is_bf16=True)
_CODES_FP16 = _table(_CODES, is_bf16=False)
_CENTRED_BF16 = _table(_CENTRED, is_bf16=True)
_CENTRED_FP16 = _table(_CENTRED, is_bf16=False)
NF3_BF16_FIRST = tl.constexpr(_NF3_BF16.first)
NF3_BF16 = tl.constexpr(_NF3_BF16.look_up)
NF3_FP16_FIRST = tl.constexpr(_NF3_FP16.first)
NF3_FP16 = tl.constexpr(_NF3_FP16.look_up)
CODES_BF16_FIRST = tl.constexpr(_CODES_BF16.first)
CODES_BF16 = tl.constexpr(_CODES_BF16.look_up)
CODES_FP16_FIRST = tl.constexpr(_CODES_FP16.first)
CODES_FP16 = tl.constexpr(_CODES_FP16.look_up)
CENTRED_BF16_FIRST = tl.constexpr(_CENTRED_BF16.first)
CENTRED_BF16 = tl.constexpr(_CENTRED_BF16.look_up)
CENTRED_FP16_FIRST = tl.constexpr(_CENTRED_FP16.first)
CENTRED_FP16 = tl.constexpr(_CENTRED_FP16.look_up)


@triton.jit
def narrow_words(first, second, third, PLANE: tl.constexpr, PAIRS: tl.constexpr):
    """Words `[rows, 8]` of a plane, spare bits 0, from the three runs of a block.

    PAIRS takes two words at once, by PTX, which Triton's interpreter does not run.
    """
    if PLANE == 3:
        if PAIRS:
            words = tl.inline_asm_elementwise(
                "{ .reg .b32 a, b, c; shr.u32 a, $1, 3; and.b32 a, a, 0x11111111; "
                "shr.u32 b, $2, 2; lop3.b32 a, b, 0x22222222, a, 0xea; "
                "shr.u32 c, $3, 1; lop3.b32 $0, c, 0x44444444, a, 0xea; }",
                "=r,r,r,r",
                [first, second, third],
                dtype=tl.int16,
                is_pure=True,
                pack=2,
            )
        else:
            words = ((first >> 3) & 0x1111) | ((second >> 2) & 0x2222) | ((third >> 1) & 0x4444)
    else:
        run = first if PLANE == 0 else second if PLANE == 1 else third
        if PAIRS:
            words = tl.inline_asm_elementwise(
                "{ and.b32 $0, $1, 0x77777777; }",
                "=r,r",
                [run],
                dtype=tl.int16,
                is_pure=True,
                pack=2,
            )
        else:
            words = run & 0x7777
    return words


@triton.jit
def looked_up(words, dtype: tl.constexpr, ELEMENT: tl.constexpr, HAS_ZEROS: tl.constexpr):
    """Numbers of words `[rows, 8]` as four tensors of that shape; number q of 4, column c of 8 is
    that of column 8q + c of the plane.

    Of nf3 2**56 times the value, of fp16 16 times; of int3 the code, less 4 where no zero points
    are stored. All exact.
    """
    if dtype == tl.bfloat16:
        if ELEMENT == "nf3":
            first: tl.constexpr = NF3_BF16_FIRST
            asm: tl.constexpr = NF3_BF16
        elif HAS_ZEROS:
            first: tl.constexpr = CODES_BF16_FIRST
            asm: tl.constexpr = CODES_BF16
        else:
            first: tl.constexpr = CENTRED_BF16_FIRST
            asm: tl.constexpr = CENTRED_BF16
        high, low = tl.inline_asm_elementwise(
            first, "=r,=r", [], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
        found = tl.inline_asm_elementwise(
            asm,
            "=r,=r,=r,=r,r,r,r,r,r",
            [words, high, low],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        if ELEMENT == "nf3":
            first: tl.constexpr = NF3_FP16_FIRST
            asm: tl.constexpr = NF3_FP16
        elif HAS_ZEROS:
            first: tl.constexpr = CODES_FP16_FIRST
            asm: tl.constexpr = CODES_FP16
        else:
            first: tl.constexpr = CENTRED_FP16_FIRST
            asm: tl.constexpr = CENTRED_FP16
        high, low = tl.inline_asm_elementwise(
            first, "=r,=r", [], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
        found = tl.inline_asm_elementwise(
            asm,
            "=r,=r,=r,=r,r,r,r,r,r",
            [words, high, low],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return found


@triton.jit
def side_by_side(a, b, c, d):
    """Four tensors `[rows, 8]` as one `[rows, 32]`, one after the other."""
    # [rows, 8, low bit of which, high bit]
    joined = tl.join(tl.join(a, b), tl.join(c, d))
    return tl.reshape(tl.permute(joined, (0, 3, 2, 1)), (a.shape[0], 32))


@triton.jit
def numbers_of_codes(codes, dtype: tl.constexpr, ELEMENT: tl.constexpr, HAS_ZEROS: tl.constexpr):
    """What `looked_up` has in its tables, without tables."""
    if ELEMENT == "nf3":
        place = tl.where(codes < 4, 3 - codes, codes - 4)
        size = tl.where(place == 0, 0.1279296875, tl.where(place == 1, 0.35546875, 0.60546875))
        size = tl.where(place == 3, 1.0, size) * (16.0 if dtype == tl.float16 else 2.0**56)
        numbers = tl.where(codes < 4, -size, size)
    elif HAS_ZEROS:
        numbers = codes.to(tl.float32)
    else:
        numbers = codes.to(tl.float32) - 4.0
    return numbers.to(dtype)


@triton.jit
def narrow_numbers(
    first, second, third, dtype: tl.constexpr, PLANE: tl.constexpr, ELEMENT: tl.constexpr,
    HAS_ZEROS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Numbers `[rows, 32]` of a plane, as `looked_up` has them, from the runs of a block."""
    words = narrow_words(first, second, third, PLANE, PAIRS)
    if PAIRS and dtype != tl.float32:
        a, b, c, d = looked_up(words, dtype, ELEMENT, HAS_ZEROS)
        numbers = side_by_side(a, b, c, d)
    else:
        # Code i of word 2t + u is of column 16u + 8 * (i / 2) + 2t + i % 2.
        low, high = tl.join(words & 7, (words >> 4) & 7), tl.join((words >> 8) & 7, words >> 12)
        split = tl.reshape(tl.join(low, high), (words.shape[0], 4, 2, 2, 2))
        codes = tl.reshape(tl.permute(split, (0, 2, 4, 1, 3)), (words.shape[0], 32))
        numbers = numbers_of_codes(codes, dtype, ELEMENT, HAS_ZEROS)
    return numbers


@triton.jit
def e5m3_scales(bits, x_dtype: tl.constexpr, dtype: tl.constexpr):
    """Scales of nf3 from their bytes in dtype, exactly, times what makes a number of `looked_up`
    times them 2**-60 of a weight where x is bf16 or fp32, and where it is fp16 a weight.

    So a byte is moved to where dtype has exponent and mantissa, and that is all.
    """
    if x_dtype == tl.float16:
        scales = (bits.to(tl.int16) << 7).to(tl.float16, bitcast=True).to(dtype)
    elif dtype == tl.bfloat16:
        scales = (bits.to(tl.int16) << 4).to(tl.bfloat16, bitcast=True)
    else:
        scales = (bits.to(tl.int32) << 20).to(tl.float32, bitcast=True)
    return scales
