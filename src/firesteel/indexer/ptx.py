# pyright: basic
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false, reportAssignmentType=false
# ruff: noqa: ANN001, ANN201
"""What the indexer's kernels say in PTX. Triton's interpreter runs none: there PTX is False."""

import triton
import triton.language as tl

__all__ = ["pinned", "scatter", "uniform"]


@triton.jit
def uniform(value, PTX: tl.constexpr):
    """An int32 scalar, of which the assembler then knows that all threads of a warp have the same.

    A loop up to what was loaded, or found by a sum, it would else take for one that threads leave
    at different times, and keep nothing of it in registers of the warp.
    """
    if PTX:
        value = tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;",
            "=r,r",
            [value],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return value


@triton.jit
def pinned(values, PTX: tl.constexpr):
    """fp32 values, which are computed before what else is ordered follows, and not where needed."""
    if PTX:
        values = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [values], dtype=tl.float32, is_pure=False, pack=1
        )
    return values


@triton.jit
def scatter(base_ptr, place, values, mask, PTX: tl.constexpr):
    """Store values of 32 bits to int32 places, of any order, after base_ptr; a mask of None is all.

    `tl.store` would first give each thread one place of each row of threads, through shared memory.
    Of a value that several threads have, each stores it.
    """
    if PTX:
        if mask is None:
            tl.inline_asm_elementwise(
                "{ .reg .b64 a; mad.wide.s32 a, $2, 4, $1; st.global.b32 [a], $3; mov.b32 $0, 0; }",
                "=r,l,r,r",
                [base_ptr.to(tl.int64), place, values.to(tl.int32, bitcast=True)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
        else:
            tl.inline_asm_elementwise(
                "{ .reg .pred p; .reg .b64 a; setp.ne.b32 p, $4, 0; "
                "mad.wide.s32 a, $2, 4, $1; @p st.global.b32 [a], $3; mov.b32 $0, 0; }",
                "=r,l,r,r,r",
                [
                    base_ptr.to(tl.int64),
                    place,
                    values.to(tl.int32, bitcast=True),
                    mask.to(tl.int32),
                ],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
    else:
        tl.store(base_ptr + place, values, mask=mask)
