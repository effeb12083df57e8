"""The rotation of EXL3's frame: Hadamard matrices of 128 down a diagonal.

The matrix is (-1)**popcount(i & j) / sqrt(128), symmetric and its own inverse. To multiply by it is
seven rounds of sums and differences, each of the pairs whose numbers differ in one bit, and then
one product. In a fixed order: the same bits on every device, for any number of threads and whatever
else is rotated with it, and no setting of PyTorch's matrix products (TF32, bf16) matters.
"""

from __future__ import annotations

from typing import Protocol, cast

import torch
from torch import Tensor

from firesteel.errors import InvalidArgumentError

__all__ = ["BLOCK", "hadamard128"]

BLOCK = 128
"""Rows or columns that one matrix rotates."""
_ROUNDS = 7
# Numbers that a CPU rotates at a time, so that what lies between stays in the cache.
_CHUNK_NUMBERS = 1 << 17


def hadamard128(x: Tensor, dim: int = -1) -> Tensor:
    """`x` rotated along `dim` in blocks of 128: contiguous fp32, or float64 of float64.

    Raises
        InvalidArgumentError: 128 does not divide that dimension.
    """
    if x.shape[dim] % BLOCK:
        raise InvalidArgumentError(
            f"x.shape[{dim}]: got {x.shape[dim]}, must be a multiple of {BLOCK}"
        )
    return cast(Tensor, _Rotation.apply(x, dim % x.ndim))


class _Context(Protocol):
    axis: int


class _Rotation(torch.autograd.Function):
    """`hadamard128` with a gradient."""

    @staticmethod
    def forward(x: Tensor, axis: int) -> Tensor:
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
        blocks = x.shape[:axis].numel() * x.shape[axis] // BLOCK
        shape = (blocks, BLOCK, x.shape[axis + 1 :].numel())
        _rotate(x.reshape(shape).transpose(0, 1), out.view(shape).transpose(0, 1))
        return out

    @staticmethod
    def setup_context(ctx: _Context, inputs: tuple[Tensor, int], output: Tensor) -> None:
        del output
        ctx.axis = inputs[1]

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor, None]:
        # The matrix is its own transpose.
        return cast(Tensor, _Rotation.apply(grads[0], ctx.axis)), None


def _rotate(source: Tensor, target: Tensor) -> None:
    """Writes `source`, rotated along its first axis, to `target`; both are `[128, a, b]`."""
    _, a, b = source.shape
    columns = a * b
    if source.device.type == "cpu":
        columns = min(columns, _CHUNK_NUMBERS // BLOCK)
    step_b = max(1, min(b, columns))
    step_a = max(1, columns // step_b)
    scratch = target.new_empty(2, BLOCK * step_a * step_b)
    # 1 and -1, made where they are used: no copy that a CUDA graph could not hold.
    signs = torch.arange(1, -2, -2, dtype=target.dtype, device=target.device).unsqueeze(1)
    for i in range(0, a, step_a):
        for j in range(0, b, step_b):
            some = source[:, i : i + step_a, j : j + step_b]
            now, other = scratch[:, : some.numel()].unbind(0)
            now.view(some.shape).copy_(some)
            for turn in range(_ROUNDS):
                # Of each pair the rows that have this bit of their number clear, and set.
                pairs = now.view(-1, 2, 1, some[0].numel() << turn)
                low, high = pairs.unbind(1)
                # low + high and low - high.
                torch.addcmul(low, signs, high, out=other.view(low.shape[0], 2, -1))
                now, other = other, now
            target[:, i : i + step_a, j : j + step_b] = now.view(some.shape).mul_(BLOCK**-0.5)
