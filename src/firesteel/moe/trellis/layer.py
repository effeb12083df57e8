"""`TrellisLinear`: one EXL3 linear's weights bound to the kernels of a plan; a layer's tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from firesteel.formats.trellis_weights import TrellisWeights
from firesteel.launch import Arena, Ready
from firesteel.launch.op import run_op
from firesteel.moe.trellis.linear import TrellisLinearSpec

__all__ = ["TrellisLinear", "linear_tensors", "trellis_tensors"]


def trellis_tensors(
    w13: TrellisWeights,
    w2: TrellisWeights,
    *,
    bias13: Tensor | None = None,
    bias2: Tensor | None = None,
    expert_map: Tensor | None = None,
) -> dict[str, Tensor]:
    """As `firesteel.moe.layer.operand_tensors`; only the tables of matrices are made here."""
    own = {} if expert_map is None else {"expert_map": expert_map}
    return {**_stack_tensors("w13", w13, bias13), **_stack_tensors("w2", w2, bias2), **own}


def linear_tensors(weights: TrellisWeights, *, bias: Tensor | None = None) -> dict[str, Tensor]:
    """As `trellis_tensors`, of a linear; bias `[1, out_features]`."""
    return _stack_tensors("w", weights, bias)


def _stack_tensors(name: str, stack: TrellisWeights, bias: Tensor | None) -> dict[str, Tensor]:
    found = {
        f"{name}.words": stack.words,
        f"{name}.matrices": stack.matrices,
        f"{name}.suh": stack.suh.view(torch.float16),
        f"{name}.svh": stack.svh.view(torch.float16),
    }
    if bias is not None:
        found[f"{name}.bias"] = bias
    return found


class TrellisLinear:
    """A linear that runs on the kernels of `ready`.

    Args:
        ready: a prewarmed plan of the linear's `TrellisLinearSpec`.
        tensors: as `linear_tensors` gives them, with a bias where the spec has one.
        arena: workspace, shared with what runs before and after on the same stream.

    Raises
        InvalidArgumentError, ArenaError: as `Ready.bind`.
    """

    def __init__(self, ready: Ready, tensors: dict[str, Tensor], arena: Arena) -> None:
        spec = ready.plan.spec
        assert isinstance(spec, TrellisLinearSpec)
        self.max_tokens = ready.plan.max_tokens
        self._out_features = spec.out_features
        self._bound = ready.bind(tensors, arena)

    def __call__(self, x: Tensor) -> Tensor:
        """`[M, out_features]` from x `[M, in_features]`, in a new tensor, in slices if need be.

        Raises
            InvalidArgumentError, NotPlannedError, ArenaError: as `Bound.run`.
        """
        out = x.new_empty(x.shape[0], self._out_features)
        compiling: Any = torch.compiler.is_compiling()
        for start in range(0, x.shape[0], self.max_tokens):
            rows = slice(start, start + self.max_tokens)
            if compiling:
                run_op(self._bound.handle, [x[rows]], [out[rows]])
            else:
                self._bound.run(x[rows], out[rows])
        return out
