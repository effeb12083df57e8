# pyright: basic
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# ruff: noqa: ANN001, ANN201, ANN202
"""What the two Gluon kernels of e4m3 scores share, on Hopper.

The rows of a program make two products with each page. While one of them is multiplied, the scores
of the other are added up. Pages come two at a time by `cp.async`, through buffers of STAGES pairs.

Columns are ordered as in `firesteel.indexer.score`, all of one warp group.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from firesteel.indexer.ptx import pinned

__all__ = [
    "copy_keys",
    "copy_pages",
    "key_buffers",
    "no_product",
    "queries",
    "row_layout",
    "score_layout",
    "score_pair",
]


@gluon.constexpr_function
def product_layout(COLUMNS):
    """Of the products of 64 keys with so many columns."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 32]
    )


@gluon.constexpr_function
def score_layout(ROWS):
    """Of scores `[64, ROWS]`, four rows at most: where a product's columns meet in a thread."""
    lanes = [[0, 1] if ROWS > 1 else [0, 0], [0, 2] if ROWS > 2 else [0, 0]]
    return gl.DistributedLinearLayout(
        [[8, 0]], [*lanes, [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, ROWS]
    )


@gluon.constexpr_function
def row_layout(ROWS):
    """Of rows, as scores have them."""
    return gl.SliceLayout(0, score_layout(ROWS))


@gluon.constexpr_function
def copy_layout():
    """Of pointers to 64 keys, 16 bytes a thread."""
    return gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])


@gluon.constexpr_function
def tile_layout():
    """Of keys or queries in shared memory, as products read them."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)


@gluon.jit
def key_buffers(STAGES: gl.constexpr):
    """Of pairs of pages: their keys and their scales."""
    scales_s: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    keys = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, 64, 128], tile_layout())
    return keys, gl.allocate_shared_memory(gl.float32, [2 * STAGES, 64], scales_s)


@gluon.jit
def copy_keys(buffers, slot, keys_ptr, scales_ptr, count):
    """Start the copy of `count` keys, 64 at most, and of their scales.

    Those past count are masked, not skipped: a branch among products would make each wait.
    """
    keys, scales = buffers
    copy_l: gl.constexpr = copy_layout()
    scale_l: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    t = gl.arange(0, 64, layout=gl.SliceLayout(1, copy_l))
    d = gl.arange(0, 128, layout=gl.SliceLayout(0, copy_l))
    at = (t * 128)[:, None] + d[None, :]
    # Of every column.
    is_key = at < count * 128
    async_copy.async_copy_global_to_shared(keys.index(slot), keys_ptr + at, mask=is_key)
    t = gl.arange(0, 64, layout=scale_l)
    async_copy.async_copy_global_to_shared(scales.index(slot), scales_ptr + t, mask=t < count)


@gluon.jit
def copy_pages(buffers, pair, values_ptr, scales_ptr, page_stride, pages, STAGES: gl.constexpr):
    """Start the copy of a pair of pages, page_stride times 16 bytes apart, as one group.

    A negative one, which is missing, is not read.
    """
    for half in gl.static_range(2):
        start = gl.maximum(pages[half], 0).to(gl.int64) * page_stride
        copy_keys(
            buffers, pair % STAGES * 2 + half, values_ptr + start * 16,
            scales_ptr + start * 4 + 2048, gl.where(pages[half] >= 0, 64, 0),
        )  # fmt: skip
    async_copy.commit_group()


@gluon.jit
def queries(
    q_ptr, w_ptr, first, count, H: gl.constexpr, ROWS: gl.constexpr, HEAD_BLOCK: gl.constexpr
):  # fmt: skip
    """(q in shared memory, half of w) of `count` rows from `first` on, ROWS at most.

    Heads past H and rows past count have zeros.
    """
    COLUMNS: gl.constexpr = ROWS * HEAD_BLOCK
    copy_l: gl.constexpr = copy_layout()
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, copy_l))
    d = gl.arange(0, 128, layout=gl.SliceLayout(0, copy_l))
    row, head = column // 2 % ROWS, column // (2 * ROWS) * 2 + column % 2
    at = (first + row) * H + head
    is_some = (row < count) & (head < H)
    numbers = gl.load(q_ptr + at[:, None] * 128 + d[None, :], mask=is_some[:, None], other=0.0)
    q = gl.allocate_shared_memory(gl.float8e4nv, [COLUMNS, 128], tile_layout())
    q.store(numbers)
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, product_layout(COLUMNS)))
    row, head = column // 2 % ROWS, column // (2 * ROWS) * 2 + column % 2
    at = (first + row) * H + head
    w = gl.load(w_ptr + at, mask=(row < count) & (head < H), other=0.0)
    return q, w * 0.5


@gluon.jit
def no_product(q):
    """Registers for the products with q."""
    COLUMNS: gl.constexpr = q.shape[0]
    return gl.zeros([64, COLUMNS], gl.float32, layout=product_layout(COLUMNS))


@gluon.jit
def multiply(buffers, slot, q, before, never):
    """Start a page's product with q, in the registers of the one before, which were read.

    It would be added to that one if `never` were true: not knowing, the assembler takes no others.
    """
    keys = buffers[0].index(slot)
    return warpgroup_mma(keys, q.permute((1, 0)), before, use_acc=never, is_async=True)


@gluon.jit
def scores_of(
    dots, w, scales, ROWS: gl.constexpr, HEAD_BLOCK: gl.constexpr, PTX: gl.constexpr
):  # fmt: skip
    """`[64, ROWS]` of a product, as `firesteel.indexer.score.key_scores` has them.

    The product's registers are read when the next product takes them.
    """
    APART: gl.constexpr = 4 // ROWS
    PAIRS: gl.constexpr = HEAD_BLOCK // 2 // APART
    # Twice what is positive, of which w is half.
    sums = (dots + gl.abs(dots)) * w[None, :]
    sums = gl.reshape(sums, (64, PAIRS, APART, ROWS, 2))
    sums = gl.sum(gl.sum(gl.sum(sums, axis=1), axis=3), axis=1)
    sums = gl.convert_layout(sums, score_layout(ROWS), assert_trivial=True)
    scales = gl.convert_layout(scales, gl.SliceLayout(1, score_layout(ROWS)), assert_trivial=True)
    return pinned(sums * scales[:, None], PTX)


@gluon.jit
def score_pair(
    buffers, pair, q, w, dots, never, best, rows, context, store: gl.constexpr,
    ROWS: gl.constexpr, REST: gl.constexpr, HEAD_BLOCK: gl.constexpr, STAGES: gl.constexpr,
    PTX: gl.constexpr,
):  # fmt: skip
    """Score a pair of pages that are there: (best, dots) for the next pair.

    Tuples of two have a part of each product, of ROWS rows and of REST: q, half of w, dots, best,
    and rows. What a product gives goes to `store(scores, best, rows, context, half, ROWS, PTX)`,
    which returns what `best` is then.
    """
    slot = pair % STAGES * 2
    scale_l: gl.constexpr = gl.SliceLayout(1, score_layout(ROWS))
    a = multiply(buffers, slot, q[0], dots[0], never)
    b = multiply(buffers, slot, q[1], dots[1], never)
    scales = buffers[1].index(slot).load(scale_l)
    a = warpgroup_mma_wait(1, [a])
    found = scores_of(a, w[0], scales, ROWS, HEAD_BLOCK, PTX)
    a = multiply(buffers, slot + 1, q[0], a, never)
    best_a = store(found, best[0], rows[0], context, 0, ROWS, PTX)
    b = warpgroup_mma_wait(1, [b])
    found = scores_of(b, w[1], scales, REST, HEAD_BLOCK, PTX)
    b = multiply(buffers, slot + 1, q[1], b, never)
    best_b = store(found, best[1], rows[1], context, 0, REST, PTX)
    scales = buffers[1].index(slot + 1).load(scale_l)
    a = warpgroup_mma_wait(1, [a])
    found = scores_of(a, w[0], scales, ROWS, HEAD_BLOCK, PTX)
    best_a = store(found, best_a, rows[0], context, 1, ROWS, PTX)
    b = warpgroup_mma_wait(0, [b])
    found = scores_of(b, w[1], scales, REST, HEAD_BLOCK, PTX)
    best_b = store(found, best_b, rows[1], context, 1, REST, PTX)
    return (best_a, best_b), (a, b)
