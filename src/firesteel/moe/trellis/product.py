# pyright: basic
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# ruff: noqa: ANN001, ANN201, ANN202, RUF005
"""The product of rotated rows with trellises, by `mma.sync`: FC1, FC2 and linears of few rows.

A program multiplies row blocks of 128 of a matrix by 8 or 16 rows of x, the weights on the left.
Words and x come by `cp.async`, blocks of 128 columns STAGES - 1 ahead.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_wait

from firesteel.moe.epilogue import store_rows
from firesteel.moe.pipeline import buffers
from firesteel.moe.stream import sum_layout
from firesteel.moe.tile import find_tile
from firesteel.moe.trellis.numbers import (
    both_halves,
    halves_of,
    numbers_of,
    windows_of,
    words_before,
)
from firesteel.moe.trellis.rotate import log2

__all__ = ["find_rows", "trellis_stream_kernel"]


@gluon.constexpr_function
def half_layout(BLOCK_M, WARPS):
    """Of 64 columns of x `[BLOCK_M, 64]`: a thread has two numbers of each step of a tile."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 8], [0, 16], [0, 32], [8, 0]][: log2(BLOCK_M) + 1],
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[0, 0]] * log2(WARPS),
        block_bases=[],
        shape=[BLOCK_M, 64],
    )


@gluon.jit
def find_rows(
    topk_ids_ptr, expert_map_ptr, route_ids_ptr, expert_offsets_ptr, block_expert_ptr,
    block_row_ptr, num_blocks_ptr, R, E: gl.constexpr, NUM_GLOBAL: gl.constexpr,
    BLOCK_M: gl.constexpr,
):  # fmt: skip
    """As `find_tile`; without ids and tables tile t is rows t * BLOCK_M on of matrix 0."""
    tile = gl.program_id(1)
    if topk_ids_ptr is None and route_ids_ptr is None:
        expert = (tile * 0).to(gl.int64)
        first = tile * BLOCK_M
        num_rows = gl.minimum(R - first, BLOCK_M).to(gl.int32)
    else:
        expert, first, num_rows = find_tile(
            topk_ids_ptr, expert_map_ptr, route_ids_ptr, expert_offsets_ptr, block_expert_ptr,
            block_row_ptr, num_blocks_ptr, tile, R, E, NUM_GLOBAL, BLOCK_M,
        )  # fmt: skip
    return expert, first, num_rows


@gluon.jit
def copy_block(
    shared, source, turn, last, BITS: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Start the copies of a turn's block to its buffers, as one group; none from `last` on."""
    xs, words = shared
    x_ptrs, is_x, words_ptrs = source
    slot = turn % STAGES
    is_turn = turn < last
    async_copy.async_copy_global_to_shared(
        xs[0].index(slot), x_ptrs + (turn % BLOCKS) * 128, mask=is_x & is_turn
    )
    for word in gl.static_range(BITS):
        async_copy.async_copy_global_to_shared(
            words[word].index(slot), words_ptrs + (turn * BITS + word) * 512, mask=is_turn
        )
    async_copy.commit_group()


@gluon.jit
def quarters_of(x, BLOCK_M: gl.constexpr):
    """64 columns of x, as `[BLOCK_M, 4, 2, 2]` for each q of their tiles: columns t, e, h."""
    parts = gl.permute(gl.reshape(x, [BLOCK_M, 2, 2, 2, 4, 2]), (0, 4, 5, 3, 1, 2))
    even, odd = gl.split(parts)
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return (first, second, third, fourth)


@gluon.jit
def twice_of(x, LAYOUT: gl.constexpr):
    """The right operand `[16, BLOCK_M]` of `halves_of`, each number of x `[BLOCK_M, 4, 2]` twice.

    A multiplication by 1 puts a number into both halves: it is not on the pipe of shifts.
    """
    both = gl.inline_asm_elementwise(
        "{ .reg .b32 t, o; mov.b32 t, {$1, $1}; mov.b32 o, 0x3c003c00; mul.rn.f16x2 $0, t, o; }",
        "=r,h", [x], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    low, high = both_halves(both)
    # Columns 8 * e + 2 * t + half.
    twice = gl.reshape(gl.permute(gl.join(low, high), (2, 1, 3, 0)), [16, x.shape[0]])
    return gl.convert_layout(twice, LAYOUT, assert_trivial=True)


@gluon.jit
def once_of(x, LAYOUT: gl.constexpr):
    """The right operand `[16, BLOCK_M]` of `numbers_of`: x `[BLOCK_M, 4, 2, 2]` as it is."""
    # Columns 8 * h + 2 * t + e.
    once = gl.reshape(gl.permute(x, (3, 1, 2, 0)), [16, x.shape[0]])
    return gl.convert_layout(once, LAYOUT, assert_trivial=True)


@gluon.jit
def add_block(
    acc, shared, slot, BITS: gl.constexpr, CODEBOOK: gl.constexpr, BLOCK_M: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """acc + the product of a block of 128 columns."""
    xs, words = shared
    sum_l: gl.constexpr = acc.type.layout
    numbers_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sum_l, k_width=2)
    x_l: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=sum_l, k_width=2)
    row_l: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [WARPS, 1], [1, 0])
    for half in gl.static_range(2):
        own = ()
        for plane in gl.static_range(BITS):
            own = own + (words[plane].index(slot).slice(64 * half, 64).load(row_l),)
        windows = windows_of((words_before(own[BITS - 1], row_l),) + own)
        x = xs[0].index(slot).slice(64 * half, 64, dim=1).load(half_layout(BLOCK_M, WARPS))
        quarters = quarters_of(x, BLOCK_M)
        for q in gl.static_range(4):
            if CODEBOOK == "mul1":
                numbers = numbers_of(windows, numbers_l, BITS, q, CODEBOOK)
                acc = mma_v2(numbers, once_of(quarters[q], x_l), acc)
            else:
                steps = gl.split(quarters[q])
                for h in gl.static_range(2):
                    halves = halves_of(windows, numbers_l, BITS, 2 * q + h, CODEBOOK)
                    acc = mma_v2(halves, twice_of(steps[h], x_l), acc)
    return acc


@gluon.jit
def multiply(
    source, y_ptr, partials_ptr, route_ids_ptr, first, num_rows, column, begin, R,
    BITS: gl.constexpr, BLOCKS: gl.constexpr, TURNS: gl.constexpr, WIDTH: gl.constexpr,
    CODEBOOK: gl.constexpr, BLOCK_M: gl.constexpr, SPAN: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Row blocks of a matrix of BITS bits: copies, products and stores."""
    x_s: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    words_s: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 1, [1, 0])
    shared = (
        buffers(gl.float16, 1, [STAGES, BLOCK_M, 128], x_s),
        buffers(gl.int32, BITS, [STAGES, 128, 4], words_s),
    )
    last = begin + SPAN * TURNS
    for ahead in gl.static_range(STAGES - 1):
        copy_block(shared, source, begin + ahead, last, BITS, BLOCKS, STAGES)
    for row_block in range(0, SPAN):
        acc = gl.zeros([128, BLOCK_M], gl.float32, layout=sum_layout(WARPS))
        start = begin + row_block * TURNS
        for turn in range(start, start + TURNS):
            async_copy.wait_group(STAGES - 2)
            copy_block(shared, source, turn + STAGES - 1, last, BITS, BLOCKS, STAGES)
            acc = add_block(acc, shared, turn % STAGES, BITS, CODEBOOK, BLOCK_M, WARPS)
        here = column + row_block * 128
        if partials_ptr is not None:
            n = gl.arange(0, 128, layout=gl.SliceLayout(1, acc.type.layout))
            m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, acc.type.layout))
            rows = (first + m).to(gl.int64)
            if route_ids_ptr is not None:
                rows = gl.load(route_ids_ptr + rows, mask=m < num_rows, other=0).to(gl.int64)
            rows += gl.program_id(2) * R
            places = rows[None, :] * WIDTH + here + n[:, None]
            gl.store(partials_ptr + places, acc, mask=(m < num_rows)[None, :])
        else:
            store_rows(
                acc.to(gl.float16), y_ptr, route_ids_ptr, first, num_rows, here, 0, WIDTH, WARPS
            )


@gluon.jit(
    do_not_specialize=["R"], do_not_specialize_on_alignment=["topk_ids_ptr", "expert_map_ptr"]
)
def trellis_stream_kernel(
    x_ptr,
    words_ptr,
    matrices_ptr,
    topk_ids_ptr,
    expert_map_ptr,
    route_ids_ptr,
    expert_offsets_ptr,
    block_expert_ptr,
    block_row_ptr,
    num_blocks_ptr,
    y_ptr,
    partials_ptr,
    R: gl.int64,
    K: gl.constexpr,
    N: gl.constexpr,
    E: gl.constexpr,
    NUM_GLOBAL: gl.constexpr,
    PARTS: gl.constexpr,
    RATES: gl.constexpr,
    CODEBOOK: gl.constexpr,
    BLOCK_M: gl.constexpr,
    SPAN: gl.constexpr,
    SPLIT_K: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """y[r, p] = What[e, p]^T x[r, p], r = route_ids[place]

    name        shape                dtype        layout            traffic
    x           [R, P, K]            fp16         `as_operand`      read N / (128 * SPAN) times
    words       [words]              int32        `TrellisWeights`  a tile's expert, once
    matrices    [E, P, 2]            int32        contiguous        where a matrix begins, in units
                                                                    of 2048 bytes; its bits
    topk_ids    [R]                  int32/int64  contiguous        read in direct mode
    expert_map  [NUM_GLOBAL]         int32        contiguous        likewise; or None
    route_ids..num_blocks            int32        as place_kernel writes them; None: direct mode, or
                                                  without ids rows in order of one matrix
    y           [R, P, N]            fp16         contiguous        written once; needs no init
    partials    [SPLIT_K, R, P * N]  fp32         contiguous        in y's place; or None

    P is PARTS; K and N are multiples of 128. Bit b of RATES says that matrices may have b bits. A
    program does SPAN row blocks of 128 one after the other, which are of one part. With partials it
    sums one of SPLIT_K spans of K; SPAN or SPLIT_K is 1.

    Grid      (P * N / (128 * SPAN), tiles, SPLIT_K), with R tiles in direct mode and one for
              BLOCK_M rows without ids; tiles past the last return.
    Key       dtypes, which pointers are None, constexprs; WARPS is num_warps.
    Numerics  fp32 sums of products with the two fp16 numbers that a weight is the sum of, so that
              its own rounding to fp16 is left out; of mul1 with the weight in fp16. One rounding of
              y to fp16. A row's bits do not depend on other rows.
    Bytes     tiles * P * N * K * bits / 8 + 2 * R * P * N + 2 * R * P * K * N / (128 * SPAN)
    Range     offsets of rows and matrices are int64; within a matrix int32.
    Oracle    product_reference
    """
    if PDL:
        gdc_wait()
    BLOCKS: gl.constexpr = K // 128
    HEIGHT: gl.constexpr = N // 128
    gl.static_assert(STAGES >= 2)
    gl.static_assert(HEIGHT % SPAN == 0)
    gl.static_assert(BLOCKS % SPLIT_K == 0)
    # Words of a span are not in one piece over row blocks.
    gl.static_assert(SPAN == 1 or SPLIT_K == 1)
    gl.static_assert(N * K // 4 < 2**31)
    expert, first, num_rows = find_rows(
        topk_ids_ptr, expert_map_ptr, route_ids_ptr, expert_offsets_ptr, block_expert_ptr,
        block_row_ptr, num_blocks_ptr, R, E, NUM_GLOBAL, BLOCK_M,
    )  # fmt: skip
    if num_rows <= 0:
        return
    row_block = gl.program_id(0) * SPAN
    part = row_block // HEIGHT
    matrix = expert * PARTS + part
    words_ptr += gl.load(matrices_ptr + 2 * matrix).to(gl.int64) * 512
    bits = gl.load(matrices_ptr + 2 * matrix + 1)
    x_l: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, x_l))
    is_row = m < num_rows
    rows = (first + m).to(gl.int64)
    if route_ids_ptr is not None:
        rows = gl.load(route_ids_ptr + rows, mask=is_row, other=0).to(gl.int64)
    k = gl.arange(0, 128, layout=gl.SliceLayout(0, x_l))
    x_ptrs = x_ptr + ((rows * PARTS + part) * K)[:, None] + k[None, :]
    words_l: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    group = gl.arange(0, 128, layout=gl.SliceLayout(1, words_l))
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, words_l))
    offsets = group[:, None] * 4 + word[None, :]
    column = row_block * 128
    begin = gl.program_id(2) * (BLOCKS // SPLIT_K)
    for rate in gl.static_range(1, 9):
        # Apart: the first is known when the kernel is compiled.
        if RATES >> rate & 1:  # noqa: SIM102
            if bits == rate:
                words_ptrs = words_ptr + (row_block % HEIGHT) * (BLOCKS * rate * 512) + offsets
                multiply(
                    (x_ptrs, is_row[:, None], words_ptrs), y_ptr, partials_ptr, route_ids_ptr,
                    first, num_rows, column, begin, R,
                    rate, BLOCKS, BLOCKS // SPLIT_K, PARTS * N, CODEBOOK, BLOCK_M, SPAN, STAGES,
                    WARPS,
                )  # fmt: skip
