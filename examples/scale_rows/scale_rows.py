"""A ten-line Triton kernel, planned, prewarmed, bound and run with firesteel.

    python examples/scale_rows/scale_rows.py

prints the plan on any machine that has Triton, and runs it where there is a GPU.
"""

# ruff: noqa: ANN001, ANN201
from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import triton
import triton.language as tl

from firesteel.launch import NUM_TOKENS, Flags, Kernel, Launch, Operand, Region, plan, prewarm


# Integers are annotated and named here, or Triton compiles anew for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["M"])
def scale_kernel(x_ptr, scale_ptr, out_ptr, M: tl.int64, K: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < M * K
    x = tl.load(x_ptr + at, mask=mask)
    scale = tl.load(scale_ptr + at % K, mask=mask)
    tl.store(out_ptr + at, x * scale, mask=mask)


SCALE = Kernel(scale_kernel)


@dataclass(frozen=True)
class ScaleRows:
    """out[m, k] = x[m, k] * scale[k]; its methods are pure, so that `plan` can ask them all."""

    k: int

    @property
    def title(self) -> str:
        return f"scale rows of {self.k}"

    def flags(self) -> dict[str, tuple[str, ...]]:
        return {"dtype": ("fp16", "fp32")}  # what callers vary; all of it is planned

    def operands(self, flags: Flags) -> tuple[Operand, ...]:
        dtype = dict(flags)["dtype"]
        return (
            Operand("scale", dtype, (self.k,)),  # given once, to bind
            Operand("x", dtype, (NUM_TOKENS, self.k)),  # given to each run
            Operand("out", dtype, (NUM_TOKENS, self.k), is_written=True),
        )

    def workspace(self, num_tokens: int) -> tuple[Region, ...]:
        return ()

    def select(self, num_tokens: int, flags: Flags) -> tuple[Launch, ...]:
        pointer = f"*{dict(flags)['dtype']}"
        types = {"x_ptr": pointer, "scale_ptr": pointer, "out_ptr": pointer, "M": "i64"}
        block = 128 if num_tokens < 64 else 1024
        key = SCALE.key(types, {"K": self.k, "BLOCK": block}, num_warps=4)
        grid = (-(-num_tokens * self.k // block), 1, 1)
        arguments = {"x_ptr": "x", "scale_ptr": "scale", "out_ptr": "out", "M": num_tokens}
        return (SCALE.launch(key, grid, arguments),)

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def main() -> None:
    made = plan(ScaleRows(k=96), max_tokens=1000)  # pure: no GPU is asked
    print(made)
    if not torch.cuda.is_available():
        print("no GPU here: planned, not run")
        return
    ready = prewarm(made, show_progress=True)  # compiles and loads exactly those keys
    scale = torch.arange(96, dtype=torch.float32, device="cuda")
    bound = ready.bind({"scale": scale}, ready.arena(), dtype="fp32")  # every check is here
    for num_tokens in (0, 1, 63, 64, 1000):
        x = torch.ones(num_tokens, 96, device="cuda")
        out = torch.full_like(x, torch.nan)
        bound.run(x, out)  # looks up, patches, launches
        assert torch.equal(out, x * scale)
    for entry in ready.audit.as_dict()["launches_by_key"]:
        print(f"{entry['launches']} launches of {entry['key']}")


if __name__ == "__main__":
    main()
