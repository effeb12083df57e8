"""`MoeLayer`: one layer's packed weights bound to the kernels of a plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from firesteel.errors import InvalidArgumentError
from firesteel.formats.base import SCALE_DTYPES
from firesteel.formats.packed import PackedWeights
from firesteel.launch import Arena, Bound, Ready
from firesteel.launch.op import run_op
from firesteel.moe.spec import ID_DTYPES

__all__ = ["MoeLayer", "operand_tensors"]

_IDS = dict(zip((torch.int32, torch.int64), ID_DTYPES, strict=True))


def operand_tensors(
    w13: PackedWeights,
    w2: PackedWeights,
    *,
    bias13: Tensor | None = None,
    bias2: Tensor | None = None,
    expert_map: Tensor | None = None,
) -> dict[str, Tensor]:
    """The tensors of a layer that `Ready.bind` wants, by name: views, nothing is copied.

    Args:
        w13, w2: stacks `[E, 2N, K]` and `[E, K, N]`, as `firesteel.formats.packed` holds them.
        bias13, bias2: `[E, 2N]` and `[E, K]` in the layer's dtype.
        expert_map: `[num_global_experts]` int32.
    """
    found: dict[str, Tensor] = {}
    for name, stack, bias in (("w13", w13, bias13), ("w2", w2, bias2)):
        found[f"{name}.codes"] = stack.codes.view(torch.int16)
        # One-byte scales go as bytes, which is what they are held as.
        is_byte = stack.scales.dtype == torch.uint8
        scales = stack.scales if is_byte else stack.scales.view(SCALE_DTYPES[stack.scheme.scale])
        found[f"{name}.scales"] = scales
        if stack.global_scale is not None:
            found[f"{name}.global_scale"] = stack.global_scale.view(torch.float32)
        if stack.zero_points is not None:
            found[f"{name}.zero_points"] = stack.zero_points
        if bias is not None:
            found[f"{name}.bias"] = bias
    if expert_map is not None:
        found["expert_map"] = expert_map
    return found


class MoeLayer:
    """A layer that runs on the kernels of `ready`, for each type of ids that the plan holds.

    Args:
        ready: a prewarmed plan of the layer's `MoeSpec`.
        tensors: as `operand_tensors` gives them.
        arena: workspace, shared with the layers that run before and after on the same stream.

    Raises
        InvalidArgumentError, ArenaError: as `Ready.bind`.
    """

    def __init__(self, ready: Ready, tensors: dict[str, Tensor], arena: Arena) -> None:
        self.max_tokens = ready.plan.max_tokens
        self._ready = ready
        self._tensors = tensors
        self._arena = arena
        self.bounds: dict[torch.dtype, Bound] = {}
        for dtype, name in _IDS.items():
            if (("ids", name),) in ready.plan.tables:
                self._bind(dtype)

    def run(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, out: Tensor) -> None:
        """out = the layer's output for x, up to `max_tokens` tokens; safe under graph capture.

        name          shape       dtype
        x, out        [M, K]      the spec's; rows may lie further apart than they are long
        topk_ids      [M, top_k]  int32 or int64; an id outside [0, E) adds nothing
        topk_weights  [M, top_k]  fp32

        Raises
            InvalidArgumentError, NotPlannedError, ArenaError: as `Bound.run`.
        """
        bound = self.bounds.get(topk_ids.dtype) or self._bind(topk_ids.dtype)
        bound.run(x, topk_ids, topk_weights, out)

    def _bind(self, dtype: torch.dtype) -> Bound:
        """Bind for a type of ids; one that the plan left out is a miss."""
        if dtype not in _IDS:
            raise InvalidArgumentError(f"topk_ids: got {dtype}, must be int32 or int64")
        bound = self._ready.bind(self._tensors, self._arena, ids=_IDS[dtype])
        self.bounds[dtype] = bound
        return bound

    def __call__(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """The layer's output in a new tensor, for any number of tokens, in slices if need be.

        Under torch.compile it is one operator a slice.
        """
        out = torch.empty_like(x)
        compiling: Any = torch.compiler.is_compiling()
        for start in range(0, x.shape[0], self.max_tokens):
            rows = slice(start, start + self.max_tokens)
            inputs = (x[rows], topk_ids[rows], topk_weights[rows])
            if compiling:
                bound = self.bounds.get(topk_ids.dtype) or self._bind(topk_ids.dtype)
                run_op(bound.handle, inputs, [out[rows]])
            else:
                self.run(*inputs, out[rows])
        return out
