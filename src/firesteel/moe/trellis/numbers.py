# pyright: basic
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# ruff: noqa: ANN001, ANN201, ANN202, RUF005
"""From the words of a trellis to the numbers of its weights, in registers.

A thread has the weights of four neighbouring lanes of a tile: 32, which take `bits` words. With the
word before them every state is 16 bits at a place that is known when the kernel is compiled. Those
that reach from one word into the next are whole in a window between the two.

Weight `8 * q + 4 * r + 2 * h + e` of the 32 is that of column `2 * q + 8 * h + e` of the tile (k of
W) and of its row g + 8 * r (n), g the four lanes' number. On Hopper shifts, logic and byte
permutations share a pipe of half rate; a multiplication of integers has another, which a shift to
the left may take.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["both_halves", "halves_of", "numbers_of", "windows_of", "words_before"]


@gluon.constexpr_function
def state_asm(SHIFT, CODEBOOK):
    """PTX for t = the state that stands in the 16 bits of $1 from bit SHIFT on."""
    if SHIFT == 0:
        return "and.b32 t, $1, 0xffff;"
    if SHIFT == 16:
        return "shr.u32 t, $1, 16;"
    if SHIFT == 8:
        return "prmt.b32 t, $1, 0, 0x4421;"
    if CODEBOOK == "mul1" and SHIFT % 2 == 0:
        # The multiplier has more to do here.
        return f"shr.u32 t, $1, {SHIFT}; and.b32 t, t, 0xffff;"
    return f"shl.b32 t, $1, {16 - SHIFT}; shr.u32 t, t, 16;"


@gluon.constexpr_function
def mixed_asm(SHIFT, CODEBOOK):
    """PTX for a state, mixed: the two fp16 numbers that are its number's, side by side.

    Of mul1 an fp16 number of which its number is a multiple, plus something.
    """
    if CODEBOOK == "mul1":
        mix = "mul.lo.u32 t, t, 0x83dcd12d; dp4a.u32.u32 $0, t, 0x01010101, 0x6400;"
    else:
        mix = "mul.lo.u32 t, t, 0xcbac1fed;"
        if CODEBOOK == "3inst":
            mix = "mad.lo.u32 t, t, 89226354, 64248484;"
        mix += " lop3.b32 $0, t, 0x8fff8fff, 0x3b603b60, 0x6a;"
    return f"{{ .reg .b32 t; {state_asm(SHIFT, CODEBOOK)} {mix} }}"


@gluon.constexpr_function
def pair_asm(CODEBOOK):
    """PTX for two numbers in fp16, rounded, of what `mixed_asm` makes of two states."""
    if CODEBOOK == "mul1":
        return (
            "{ .reg .b32 t, m, a; prmt.b32 t, $1, $2, 0x5410; mov.b32 m, 0x1eee1eee; "
            "mov.b32 a, 0xc931c931; fma.rn.f16x2 $0, t, m, a; }"
        )
    # A sum stands in both halves of 32 bits: an addition is not on the pipe of shifts.
    return (
        "{ .reg .b16 l, h; .reg .b32 s, t, a, b; mov.b32 {l, h}, $1; mov.b32 a, {l, l}; "
        "mov.b32 b, {h, h}; add.rn.f16x2 s, a, b; mov.b32 {l, h}, $2; mov.b32 a, {l, l}; "
        "mov.b32 b, {h, h}; add.rn.f16x2 t, a, b; prmt.b32 $0, s, t, 0x5410; }"
    )


@gluon.jit
def words_before(last, LAYOUT: gl.constexpr):
    """The word before each group's first one, of each group's last word `[8T, 4]`."""
    TILES: gl.constexpr = last.shape[0] // 8
    tiles = gl.reshape(last, [TILES, 8, 4])
    tiles_l: gl.constexpr = tiles.type.layout
    group = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, tiles_l)))
    index = gl.full([TILES, 8, 4], 0, gl.int32, layout=tiles_l)
    index += ((group + 7) % 8)[None, :, None]
    before = gl.reshape(gl.gather(tiles, index, 1), [8 * TILES, 4])
    return gl.convert_layout(before, LAYOUT)


@gluon.jit
def windows_of(words):
    """Words, and between each two the 32 bits that have 16 of each."""
    found = (words[0],)
    for i in gl.static_range(len(words) - 1):
        between = gl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x5432;", "=r,r,r", [words[i + 1], words[i]],
            dtype=gl.int32, is_pure=True, pack=1,
        )  # fmt: skip
        found = found + (between, words[i + 1])
    return found


@gluon.jit
def mixed_of(windows, BITS: gl.constexpr, WEIGHT: gl.constexpr, CODEBOOK: gl.constexpr):
    """What `mixed_asm` makes of the states of one of the 32 weights."""
    # Where the state begins, in bits from the beginning of the word before.
    START: gl.constexpr = 16 + (WEIGHT + 1) * BITS
    BIT: gl.constexpr = START % 32
    WINDOW: gl.constexpr = START // 32 * 2 + (BIT > 16)
    code: gl.constexpr = mixed_asm(16 - BIT if BIT <= 16 else 32 - BIT, CODEBOOK)
    return gl.inline_asm_elementwise(
        code, "=r,r", [windows[WINDOW]], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def both_halves(value):
    """The two fp16 numbers that stand in 32 bits. The compiler sees where they stay together."""
    low = value.to(gl.int16).to(gl.float16, bitcast=True)
    high = (value >> 16).to(gl.int16).to(gl.float16, bitcast=True)
    return low, high


@gluon.jit
def halves_of(
    windows, LAYOUT: gl.constexpr, BITS: gl.constexpr, STEP: gl.constexpr, CODEBOOK: gl.constexpr
):  # fmt: skip
    """The left operand `[16T, 16]` of 8 columns: of each weight the two numbers that it is of.

    STEP is 2 * q + h; column 8 * e + 2 * t + half is number `half` of column e of tile t.
    """
    WEIGHT: gl.constexpr = STEP // 2 * 8 + STEP % 2 * 2
    upper = gl.join(
        mixed_of(windows, BITS, WEIGHT, CODEBOOK), mixed_of(windows, BITS, WEIGHT + 1, CODEBOOK)
    )
    lower = gl.join(
        mixed_of(windows, BITS, WEIGHT + 4, CODEBOOK), mixed_of(windows, BITS, WEIGHT + 5, CODEBOOK)
    )
    both = gl.join(upper, lower)
    low, high = both_halves(both)
    ROWS: gl.constexpr = 2 * both.shape[0]
    parts = gl.reshape(gl.join(low, high), [ROWS // 16, 8, 4, 2, 2, 2])
    numbers = gl.reshape(gl.permute(parts, (0, 4, 1, 3, 2, 5)), [ROWS, 16])
    return gl.convert_layout(numbers, LAYOUT, assert_trivial=True)


@gluon.jit
def numbers_of(
    windows, LAYOUT: gl.constexpr, BITS: gl.constexpr, QUARTER: gl.constexpr,
    CODEBOOK: gl.constexpr,
):  # fmt: skip
    """The left operand `[16T, 16]` of 16 columns, each weight one number, rounded to fp16.

    QUARTER is q; column 8 * h + 2 * t + e is that of h and e of tile t.
    """
    WEIGHT: gl.constexpr = QUARTER * 8
    even = ()
    odd = ()
    for e in gl.static_range(2):
        upper = gl.join(
            mixed_of(windows, BITS, WEIGHT + e, CODEBOOK),
            mixed_of(windows, BITS, WEIGHT + 2 + e, CODEBOOK),
        )
        lower = gl.join(
            mixed_of(windows, BITS, WEIGHT + 4 + e, CODEBOOK),
            mixed_of(windows, BITS, WEIGHT + 6 + e, CODEBOOK),
        )
        if e == 0:
            even = gl.join(upper, lower)
        else:
            odd = gl.join(upper, lower)
    code: gl.constexpr = pair_asm(CODEBOOK)
    pairs = gl.inline_asm_elementwise(
        code, "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1
    )
    first, second = both_halves(pairs)
    ROWS: gl.constexpr = 2 * even.shape[0]
    # [tiles, g, t, h, r, e]
    parts = gl.reshape(gl.join(first, second), [ROWS // 16, 8, 4, 2, 2, 2])
    numbers = gl.reshape(gl.permute(parts, (0, 4, 1, 3, 2, 5)), [ROWS, 16])
    return gl.convert_layout(numbers, LAYOUT, assert_trivial=True)
