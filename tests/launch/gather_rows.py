"""A spec that uses all that a spec can: strides, both alignments, workspace, two launches, PDL."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import triton
import triton.language as tl

from firesteel.launch import NUM_TOKENS, Flags, Kernel, Launch, Operand, Region, Stride

WIDTH = 8


@triton.jit(
    do_not_specialize=["M", "stride_x"], do_not_specialize_on_alignment=["x_ptr", "ids_ptr"]
)
def gather_kernel(
    x_ptr,
    ids_ptr,
    acc_ptr,
    M: tl.int64,
    stride_x: tl.int64,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """acc[m, k] = x[ids[m], k]"""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m, k = at // WIDTH, at % WIDTH
    row = tl.load(ids_ptr + m, mask=m < M).to(tl.int64)
    tl.store(acc_ptr + at, tl.load(x_ptr + row * stride_x + k, mask=m < M), mask=m < M)


@triton.jit(do_not_specialize=["M", "stride_out"])
def combine_kernel(acc_ptr, w_ptr, out_ptr, M: tl.int64, stride_out: tl.int64, WIDTH: tl.constexpr):
    """out[m, k] = acc[m, k] * w[k]"""
    m, k = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    tl.store(out_ptr + m * stride_out + k, tl.load(acc_ptr + m * WIDTH + k) * tl.load(w_ptr + k))


GATHER, COMBINE = Kernel(gather_kernel), Kernel(combine_kernel)


@dataclass(frozen=True)
class GatherRows:
    """out[m] = x[ids[m]] * w; ids of two types. Keys change at 8 and at 32 tokens."""

    width: int = WIDTH

    @property
    def title(self) -> str:
        return f"gather rows of {self.width}"

    def flags(self) -> dict[str, tuple[str, ...]]:
        return {"ids": ("i32", "i64")}

    def operands(self, flags: Flags) -> tuple[Operand, ...]:
        rows = (NUM_TOKENS, self.width)
        return (
            Operand("w", "fp32", (self.width,)),
            Operand(
                "x", "fp32", (NUM_TOKENS, 2, self.width // 2), has_stride=True, is_aligned=False
            ),
            Operand("ids", dict(flags)["ids"], (NUM_TOKENS,), is_aligned=False),
            Operand("out", "fp32", rows, has_stride=True, is_written=True),
        )

    def workspace(self, num_tokens: int) -> tuple[Region, ...]:
        return (Region("acc", "fp32", (num_tokens, self.width)),)

    def select(self, num_tokens: int, flags: Flags) -> tuple[Launch, ...]:
        block = 64 if num_tokens < 8 else 128 if num_tokens < 32 else 256
        gather = GATHER.key(
            {
                "x_ptr": "*fp32",
                "ids_ptr": f"*{dict(flags)['ids']}",
                "acc_ptr": "*fp32",
                "M": "i64",
                "stride_x": "i64",
            },
            {"WIDTH": self.width, "BLOCK": block},
        )
        combine = COMBINE.key(
            {
                "acc_ptr": "*fp32",
                "w_ptr": "*fp32",
                "out_ptr": "*fp32",
                "M": "i64",
                "stride_out": "i64",
            },
            {"WIDTH": self.width},
            num_warps=1,
            pdl=True,
        )
        read = {"x_ptr": "x", "ids_ptr": "ids", "acc_ptr": "acc"}
        written = {"acc_ptr": "acc", "w_ptr": "w", "out_ptr": "out"}
        return (
            GATHER.launch(
                gather,
                (-(-num_tokens * self.width // block), 1, 1),
                {**read, "M": num_tokens, "stride_x": Stride("x")},
            ),
            COMBINE.launch(
                combine,
                (num_tokens, 1, 1),
                {**written, "M": num_tokens, "stride_out": Stride("out")},
            ),
        )

    def as_dict(self) -> dict[str, int]:
        return asdict(self)
