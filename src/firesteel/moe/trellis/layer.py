"""`TrellisLinear`: one EXL3 linear's weights bound to the kernels of a plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from firesteel.formats.trellis_weights import TrellisWeights
from firesteel.launch import Arena, Ready
from firesteel.launch.op import run_op
from firesteel.moe.trellis.linear import TrellisLinearSpec

__all__ = ["TrellisLinear", "linear_tensors"]


def linear_tensors(weights: TrellisWeights) -> dict[str, Tensor]:
    """The tensors of a linear that `Ready.bind` wants, by name, but its bias; nothing is copied."""
    return {
        "w.words": weights.words,
        "w.matrices": weights.matrices,
        "w.suh": weights.suh.view(torch.float16),
        "w.svh": weights.svh.view(torch.float16),
    }


class TrellisLinear:
    """A linear that runs on the kernels of `ready`.

    Args:
        ready: a prewarmed plan of the linear's `TrellisLinearSpec`.
        tensors: as `linear_tensors` gives them, with `w.bias` where the spec has one.
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
