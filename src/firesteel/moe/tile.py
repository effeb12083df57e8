# pyright: basic
# pyright: reportAssignmentType=false, reportRedeclaration=false, reportArgumentType=false
# ruff: noqa: ANN001, ANN201
"""What the two weight kernels share: whose rows a program has, numbers of codes, the activation.

A weight kernel computes out^T = W x^T a tile at a time: BLOCK_N rows of W on the left, BLOCK_M
routes on the right, so that the numbers of a weight go from registers into the product. A block
of 128 columns of W is 32 words of 16 bits a row; plane p of them (bits 4p..) is columns
32p .. 32p + 31, so one shift and one mask give a whole left operand (`formats.packed.pack_codes`).
Codes of 3 bits are 24 words a row: `firesteel.moe.narrow` has them.
"""

import triton
import triton.language as tl

from firesteel.moe.narrow import e5m3_scales, narrow_numbers


@triton.jit
def local_expert(topk_ids_ptr, expert_map_ptr, routes, is_route, E, NUM_GLOBAL: tl.constexpr):
    """The expert held here of each route, as int64; -1 where it has none or is not `is_route`."""
    ids = tl.load(topk_ids_ptr + routes, mask=is_route, other=-1).to(tl.int64)
    if expert_map_ptr is not None:
        is_global = (ids >= 0) & (ids < NUM_GLOBAL)
        ids = tl.load(expert_map_ptr + ids, mask=is_global, other=-1).to(tl.int64)
    return tl.where((ids >= 0) & (ids < E), ids, -1)


@triton.jit
def find_tile(
    topk_ids_ptr,
    expert_map_ptr,
    route_ids_ptr,
    expert_offsets_ptr,
    block_expert_ptr,
    block_row_ptr,
    num_blocks_ptr,
    tile,
    R,
    E: tl.constexpr,
    NUM_GLOBAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """expert (int64), first place, number of rows (0: nothing to do) of a program's tile.

    Packed: the tile table has them. Direct (`route_ids_ptr` is None): tile r is route r alone.
    """
    if route_ids_ptr is not None:
        is_tile = tile < tl.load(num_blocks_ptr)
        expert = tl.load(block_expert_ptr + tile, mask=is_tile, other=0).to(tl.int64)
        first = tl.load(block_row_ptr + tile, mask=is_tile, other=0)
        end = tl.load(expert_offsets_ptr + expert + 1, mask=is_tile, other=0)
        num_rows = tl.minimum(end - first, BLOCK_M)
    else:
        expert = local_expert(topk_ids_ptr, expert_map_ptr, tile, tile < R, E, NUM_GLOBAL)
        first = tile
        num_rows = (expert >= 0).to(tl.int32)
    return expert, first, num_rows


@triton.jit
def bf16_pairs(words, PLANE: tl.constexpr):
    """128 + codes of a plane in bf16, two words at a time: one shift, one LOP3."""
    if PLANE == 0:
        asm: tl.constexpr = "{ lop3.b32 $0, $1, 0x000f000f, 0x43004300, 0xea; }"
    elif PLANE == 1:
        asm: tl.constexpr = (
            "{ .reg .b32 t; shr.u32 t, $1, 4; lop3.b32 $0, t, 0x000f000f, 0x43004300, 0xea; }"
        )
    elif PLANE == 2:
        asm: tl.constexpr = (
            "{ .reg .b32 t; shr.u32 t, $1, 8; lop3.b32 $0, t, 0x000f000f, 0x43004300, 0xea; }"
        )
    else:
        asm: tl.constexpr = (
            "{ .reg .b32 t; shr.u32 t, $1, 12; lop3.b32 $0, t, 0x000f000f, 0x43004300, 0xea; }"
        )
    return tl.inline_asm_elementwise(asm, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def fp16_pairs(words, PLANE: tl.constexpr):
    """1024 + codes of a plane in fp16, two words at a time: one shift, one LOP3."""
    if PLANE == 0:
        asm: tl.constexpr = "{ lop3.b32 $0, $1, 0x000f000f, 0x64006400, 0xea; }"
    elif PLANE == 1:
        asm: tl.constexpr = (
            "{ .reg .b32 t; shr.u32 t, $1, 4; lop3.b32 $0, t, 0x000f000f, 0x64006400, 0xea; }"
        )
    elif PLANE == 2:
        asm: tl.constexpr = (
            "{ .reg .b32 t; shr.u32 t, $1, 8; lop3.b32 $0, t, 0x000f000f, 0x64006400, 0xea; }"
        )
    else:
        asm: tl.constexpr = (
            "{ .reg .b32 t; shr.u32 t, $1, 12; lop3.b32 $0, t, 0x000f000f, 0x64006400, 0xea; }"
        )
    return tl.inline_asm_elementwise(asm, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def magic_of_plane(words, dtype: tl.constexpr, PLANE: tl.constexpr, PAIRS: tl.constexpr):
    """A power of two plus the codes of one plane of int16 words, exactly; `zero_of` has the power.

    Its last place is 1, so that its bits with those of a code are their sum. PAIRS takes two words
    at once, by PTX, which Triton's interpreter does not run.
    """
    if PAIRS and dtype == tl.bfloat16:
        numbers = bf16_pairs(words, PLANE)
    elif PAIRS and dtype == tl.float16:
        numbers = fp16_pairs(words, PLANE)
    else:
        codes = (words >> (4 * PLANE)) & 15
        if dtype == tl.bfloat16:
            numbers = (codes | 0x4300).to(tl.bfloat16, bitcast=True)
        elif dtype == tl.float16:
            numbers = (codes | 0x6400).to(tl.float16, bitcast=True)
        else:
            numbers = codes.to(tl.float32)
    return numbers


@triton.jit
def zero_of(zero_points, dtype: tl.constexpr):
    """What to subtract from `magic_of_plane` for code - zero point; exact for 0 to 128."""
    if dtype == tl.bfloat16:
        zero = zero_points + 128.0
    elif dtype == tl.float16:
        zero = zero_points + 1024.0
    else:
        zero = zero_points
    return zero.to(dtype)


@triton.jit
def load_columns(x_rows, is_row, start, PLANE: tl.constexpr, K: tl.constexpr):
    """Columns of one plane as the right operand `[32, BLOCK_M]`; 0 from K on and in no row."""
    k = start + 32 * PLANE + tl.arange(0, 32)
    mask = is_row[:, None]
    if K % 128 != 0:
        mask = mask & (k < K)[None, :]
    return tl.trans(tl.load(x_rows[:, None] + k[None, :], mask=mask, other=0.0))


@triton.jit
def word_offsets(row, NUM_BLOCKS: tl.constexpr, ELEMENT: tl.constexpr):
    """Offsets of the words `[rows, 32]` of rows of a matrix in block 0, in words.

    A tile of 64 rows and 128 columns is 2048 words in one piece, of 3 bits three of 512, of which
    these are the first, `[rows, 8]`; tiles of a row of tiles follow each other along the columns.
    """
    IS_NARROW: tl.constexpr = ELEMENT == "nf3" or ELEMENT == "int3"
    WIDTH: tl.constexpr = 8 if IS_NARROW else 32
    TILE: tl.constexpr = 1536 if IS_NARROW else 2048
    tile = (row // 64) * (NUM_BLOCKS * TILE) + (row % 64) * WIDTH
    return tile[:, None] + tl.arange(0, WIDTH)[None, :]


@triton.jit
def load_where(ptrs, mask):
    """What stands at `ptrs`, 0 where `mask` says no; it may be None: everywhere."""
    return tl.load(ptrs) if mask is None else tl.load(ptrs, mask=mask, other=0)


@triton.jit
def add_grouped_block(
    acc,
    codes_ptrs,
    scales_ptrs,
    zeros_ptrs,
    is_out,
    is_tile,
    block,
    x0,
    x1,
    x2,
    x3,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    ELEMENT: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """acc + the product of one 128-column block of W with x, `[BLOCK_N, BLOCK_M]` fp32.

    codes_ptrs `[BLOCK_N, 32]` at block 0, of 3 bits `[BLOCK_N, 8]`; scales_ptrs and zeros_ptrs
    `[BLOCK_N]` at group 0, with ROWS from a group to the next. is_out is None where every row is
    one, is_tile where every row has words. Planes that share a scale are summed before they are
    scaled.
    """
    IS_NARROW: tl.constexpr = ELEMENT == "nf3" or ELEMENT == "int3"
    TILE: tl.constexpr = 1536 if IS_NARROW else 2048
    HAS_ZEROS: tl.constexpr = zeros_ptrs is not None
    IS_WIDE: tl.constexpr = GROUP_SIZE == K or GROUP_SIZE % 128 == 0
    PLANES: tl.constexpr = 4 if IS_WIDE else GROUP_SIZE // 32
    words = load_where(codes_ptrs + block * TILE, is_tile)
    second, third = words, words
    if IS_NARROW:
        second = load_where(codes_ptrs + (block * TILE + 512), is_tile)
        third = load_where(codes_ptrs + (block * TILE + 1024), is_tile)
    zero = zero_of(tl.full((1, 1), 8.0, tl.float32), x0.dtype)
    for span in tl.static_range(4 // PLANES):
        column = block * 128 + span * 32 * PLANES
        group = 0 if GROUP_SIZE == K else column // GROUP_SIZE
        mask = is_out
        if K % 128 != 0:
            mask = (column < K) if is_out is None else is_out & (column < K)
        scale = load_where(scales_ptrs + group * ROWS, mask)
        if ELEMENT == "nf3":
            scale = e5m3_scales(scale, x0.dtype, tl.float32)
        scale = scale.to(tl.float32)
        if HAS_ZEROS:
            zero = load_where(zeros_ptrs + group * ROWS, mask).to(tl.float32)[:, None]
            zero = zero.to(x0.dtype) if IS_NARROW else zero_of(zero, x0.dtype)
        part = tl.zeros(acc.shape, dtype=tl.float32)
        for plane in tl.static_range(4):
            if plane // PLANES == span:
                x = x0 if plane == 0 else x1 if plane == 1 else x2 if plane == 2 else x3
                if IS_NARROW:
                    numbers = narrow_numbers(
                        words, second, third, x0.dtype, plane, ELEMENT, HAS_ZEROS, PAIRS
                    )
                    if HAS_ZEROS:
                        numbers -= zero
                else:
                    numbers = magic_of_plane(words, x0.dtype, plane, PAIRS) - zero
                part = tl.dot(numbers, x, part, input_precision="ieee")
        acc += part * scale[:, None]
    return acc


@triton.jit
def e2m1_bf16_pairs(words, PLANE: tl.constexpr):
    """E2M1 numbers of a plane times 2**-126 in bf16, two words at a time."""
    if PLANE == 0:
        asm: tl.constexpr = "{ and.b32 $0, $1, 0x81c081c0; }"
    elif PLANE == 1:
        asm: tl.constexpr = "{ .reg .b32 t; shl.b32 t, $1, 3; and.b32 $0, t, 0x81c081c0; }"
    elif PLANE == 2:
        asm: tl.constexpr = (
            "{ .reg .b32 t, u; shl.b32 t, $1, 6; and.b32 t, t, 0x01c001c0; shl.b32 u, $1, 1; "
            "lop3.b32 $0, u, 0x80008000, t, 0xea; }"
        )
    else:
        asm: tl.constexpr = (
            "{ .reg .b32 t, u; shr.u32 t, $1, 3; and.b32 t, t, 0x01c001c0; shl.b32 u, $1, 2; "
            "lop3.b32 $0, u, 0x80008000, t, 0xea; }"
        )
    return tl.inline_asm_elementwise(asm, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def e2m1_fp16_pairs(words, PLANE: tl.constexpr):
    """E2M1 numbers of a plane times 2**-14 in fp16, two words at a time."""
    if PLANE == 0:
        asm: tl.constexpr = (
            "{ .reg .b32 t; shl.b32 t, $1, 3; and.b32 t, t, 0x0e000e00; "
            "lop3.b32 $0, $1, 0x80008000, t, 0xea; }"
        )
    elif PLANE == 1:
        asm: tl.constexpr = (
            "{ .reg .b32 t, u; shl.b32 t, $1, 6; and.b32 t, t, 0x0e000e00; shl.b32 u, $1, 3; "
            "lop3.b32 $0, u, 0x80008000, t, 0xea; }"
        )
    elif PLANE == 2:
        asm: tl.constexpr = (
            "{ .reg .b32 t, u; shl.b32 t, $1, 9; and.b32 t, t, 0x0e000e00; shl.b32 u, $1, 1; "
            "lop3.b32 $0, u, 0x80008000, t, 0xea; }"
        )
    else:
        asm: tl.constexpr = (
            "{ .reg .b32 t, u; and.b32 t, $1, 0x0e000e00; shl.b32 u, $1, 2; "
            "lop3.b32 $0, u, 0x80008000, t, 0xea; }"
        )
    return tl.inline_asm_elementwise(asm, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def e2m1_of_plane(words, dtype: tl.constexpr, PLANE: tl.constexpr, PAIRS: tl.constexpr):
    """E2M1 numbers of one plane of int16 words, exactly, times a power of two.

    Sign, exponent and mantissa are put where dtype has its own: 2**-126 times the number in bf16
    and fp32, 2**-14 times in fp16, where 0.5 is a subnormal number. `fp4_scales` makes up for it.
    """
    if PAIRS and dtype == tl.bfloat16:
        numbers = e2m1_bf16_pairs(words, PLANE)
    elif PAIRS and dtype == tl.float16:
        numbers = e2m1_fp16_pairs(words, PLANE)
    else:
        # The layout of `formats.packed.pack_codes`.
        SIGN: tl.constexpr = 15 if PLANE == 0 else 12 if PLANE == 1 else 14 if PLANE == 2 else 13
        LOWEST: tl.constexpr = 6 if PLANE == 0 else 3 if PLANE == 1 else 0 if PLANE == 2 else 9
        sign, low = (words >> SIGN) & 1, (words >> LOWEST) & 7
        if dtype == tl.bfloat16:
            numbers = ((sign << 15) | (low << 6)).to(tl.bfloat16, bitcast=True)
        elif dtype == tl.float16:
            numbers = ((sign << 15) | (low << 9)).to(tl.float16, bitcast=True)
        else:
            bits = (sign.to(tl.int32) << 31) | (low.to(tl.int32) << 22)
            numbers = bits.to(tl.float32, bitcast=True)
    return numbers


@triton.jit
def fp4_scales(bits, dtype: tl.constexpr, ELEMENT: tl.constexpr):
    """Scales from their bytes, times what makes `e2m1_of_plane` times them 2**-s of a weight.

    s is what `unit_of_sums` multiplies back. With it a weight is exact in bf16 for MXFP4 scales of
    2**-100 to 2**33 and every NVFP4 scale, and in fp16 for 2**-23 to 2 and every NVFP4 scale. A
    smaller scale gives weights that are off by at most 2**-102, or 2**-25 in fp16; a larger one
    infinite weights, which `moe.supports` refuses.
    """
    if ELEMENT == "mxfp4":
        # A byte is the exponent of an fp32, but that 0, which is 2**-127, gives 0.
        wide = (bits.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        scales = (wide * (2.0**14 if dtype == tl.float16 else 2.0**94)).to(dtype)
    elif dtype == tl.bfloat16:
        # Moved so, with the sign on top, an E4M3 number is a bf16 2**-120 times itself.
        wide = (bits.to(tl.int8, bitcast=True).to(tl.int16) << 4) & -0x7810
        # 2**214 is no bf16.
        half: tl.constexpr = 2.0**107
        scales = wide.to(dtype, bitcast=True) * half * half
    else:
        wide = (bits.to(tl.int8, bitcast=True).to(tl.int32) << 20) & -0x78100000
        small = wide.to(tl.float32, bitcast=True)
        half = 2.0**63 if dtype == tl.float16 else 2.0**107
        scales = (small * half * half).to(dtype)
    return scales


@triton.jit
def unit_of_sums(
    global_scale_ptr, matrix, dtype: tl.constexpr, ELEMENT: tl.constexpr, DIVIDES: tl.constexpr
):
    """What a sum of products with FP4 or nf3 weights lacks: 2**s, and the scale of the matrix.

    s is what `fp4_scales` and `e5m3_scales` leave. Both are one factor, which is infinite for a
    matrix-wide scale of 2**96 and more.
    """
    if ELEMENT == "nf3":
        UNIT: tl.constexpr = 1.0 if dtype == tl.float16 else 2.0**60
    elif dtype != tl.float16:
        UNIT: tl.constexpr = 2.0**32
    else:
        UNIT: tl.constexpr = 1.0 if ELEMENT == "mxfp4" else 256.0
    unit = tl.cast(UNIT, tl.float32)
    if global_scale_ptr is not None:
        scale = tl.load(global_scale_ptr + matrix)
        unit = tl.div_rn(unit, scale) if DIVIDES else unit * scale
    return unit


@triton.jit
def add_fp4_block(
    acc, codes_ptrs, scales_ptrs, is_out, is_tile, block, x0, x1, x2, x3,
    K: tl.constexpr, ROWS: tl.constexpr, GROUP_SIZE: tl.constexpr, ELEMENT: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """As `add_grouped_block`, but that the product lacks what `unit_of_sums` has.

    Every weight is scaled by itself, exactly, so that all products add up in one sum.
    """
    words = load_where(codes_ptrs + block * 2048, is_tile)
    # Scales of the whole block in one load, then apart by plane: [rows, groups of a plane].
    EACH: tl.constexpr = 32 // GROUP_SIZE
    ROWS_HERE: tl.constexpr = words.shape[0]
    group = block * (4 * EACH) + tl.arange(0, 4 * EACH)
    mask = None if is_out is None else is_out[:, None]
    if K % 128 != 0:
        is_in = (group * GROUP_SIZE < K)[None, :]
        mask = is_in if is_out is None else is_out[:, None] & is_in
    bits = load_where(scales_ptrs[:, None] + (group * ROWS)[None, :], mask)
    scales = tl.reshape(fp4_scales(bits, x0.dtype, ELEMENT), (ROWS_HERE, 2, 2, EACH))
    even, odd = tl.split(tl.permute(scales, (0, 3, 1, 2)))
    scales0, scales2 = tl.split(even)
    scales1, scales3 = tl.split(odd)
    for plane in tl.static_range(4):
        x = x0 if plane == 0 else x1 if plane == 1 else x2 if plane == 2 else x3
        scale = scales0 if plane == 0 else scales1
        if plane >= 2:
            scale = scales2 if plane == 2 else scales3
        spread = tl.broadcast_to(scale[:, :, None], (ROWS_HERE, EACH, GROUP_SIZE))
        numbers = e2m1_of_plane(words, x0.dtype, plane, PAIRS)
        numbers *= tl.reshape(spread, (ROWS_HERE, 32))
        acc = tl.dot(numbers, x, acc, input_precision="ieee")
    return acc


@triton.jit
def add_block(
    acc, codes_ptrs, scales_ptrs, zeros_ptrs, is_out, is_tile, block, x0, x1, x2, x3,
    K: tl.constexpr, ROWS: tl.constexpr, GROUP_SIZE: tl.constexpr, ELEMENT: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """acc + the product of one block, by the function of the element."""
    if ELEMENT == "mxfp4" or ELEMENT == "nvfp4":
        acc = add_fp4_block(
            acc, codes_ptrs, scales_ptrs, is_out, is_tile, block, x0, x1, x2, x3,
            K, ROWS, GROUP_SIZE, ELEMENT, PAIRS,
        )  # fmt: skip
    else:
        acc = add_grouped_block(
            acc, codes_ptrs, scales_ptrs, zeros_ptrs, is_out, is_tile, block, x0, x1, x2, x3,
            K, ROWS, GROUP_SIZE, ELEMENT, PAIRS,
        )  # fmt: skip
    return acc


@triton.jit
def sigmoid(value):
    """1 / (1 + exp(-value)) of fp32; 0 and 1 far out, never NaN from a number."""
    return 1.0 / (1.0 + tl.exp(-value))


@triton.jit
def tanh(value):
    """tanh of fp32, within a few units of the last place also near 0, where 1 - exp cancels."""
    square = value * value
    small = value * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 - square * (17.0 / 315))))
    decay = tl.exp(-2.0 * tl.abs(value))
    large = (1.0 - decay) / (1.0 + decay)
    large = tl.where(value < 0, -large, large)
    return tl.where(square < 0.04, small, large)


@triton.jit
def activate(
    gate,
    up,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
):
    """The activation of fp32 tiles, by its name in `firesteel.moe.activation`; NaN stays NaN.

    LIMIT is `Activation.clamp_limit`. Without up rows `up` is not read.
    """
    tl.static_assert(
        ACTIVATION == "silu"
        or ACTIVATION == "swigluoai"
        or ACTIVATION == "situ"
        or ACTIVATION == "relu2"
    )
    if LIMIT is not None:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    if ACTIVATION == "silu":
        acted = gate * sigmoid(gate) * up
    elif ACTIVATION == "swigluoai":
        acted = gate * sigmoid(ALPHA * gate) * (up + BETA)
    elif ACTIVATION == "situ":
        acted = 4.0 * tanh(gate / 4.0) * sigmoid(gate) * (25.0 * tanh(up / 25.0))
    else:
        positive = tl.where(gate < 0.0, 0.0, gate)
        acted = positive * positive
    return acted
