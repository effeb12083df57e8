"""The MoE layer in plain PyTorch, for any device: correct first, each hit expert expanded once.

Routes are sorted by expert. The matrices of a hit expert are expanded into 16-bit weights one after
the other, multiplied, and dropped: never the whole layer.
Rounding follows transformers' own experts: FC1, the activation and FC2 round to x's type; router
weights and the sum over slots are fp32, in slot order. Nothing depends on the order of threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firesteel.errors import InvalidArgumentError
from firesteel.moe.experts import MoeWeights

__all__ = ["run_experts"]


def run_experts(weights: MoeWeights, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    """out[m] = sum over slots j of topk_weights[m, j] * FC2_e(act(FC1_e(x[m]))), e = topk_ids[m, j]

    name          shape       dtype
    x             [M, K]      bf16, fp16 or fp32; M may be 0
    topk_ids      [M, top_k]  int32 or int64; an id outside [0, E), or one of no expert in the map,
                              adds nothing
    topk_weights  [M, top_k]  any float

    Returns `[M, K]` in x's dtype. On a GPU it reads the routing back to the host (a sync).

    Raises
        InvalidArgumentError: a shape or dtype is not as above.
    """
    _check(weights, x, topk_ids, topk_weights)
    num_experts = weights.w13.shape[0]
    num_tokens, top_k = topk_ids.shape
    ids = topk_ids.reshape(-1)
    if weights.expert_map is not None:
        ids = _places(ids, weights.expert_map)
    is_route = (ids >= 0) & (ids < num_experts)
    # Routes of no expert sort last.
    ids = torch.where(is_route, ids, num_experts)
    route_ids = torch.sort(ids, stable=True).indices
    counts = torch.bincount(ids, minlength=num_experts + 1)[:num_experts].tolist()
    # [R, K]; rows of no expert stay zero.
    y = x.new_zeros(num_tokens * top_k, x.shape[1])
    start = 0
    for expert, count in enumerate(counts):
        if count:
            rows = route_ids[start : start + count]
            y[rows] = _expert(weights, expert, x[rows // top_k])
            start += count
    gates = torch.where(is_route, topk_weights.reshape(-1).float(), 0.0)
    routed = y.float().mul_(gates.unsqueeze(-1))
    return routed.view(num_tokens, top_k, x.shape[1]).sum(dim=1).to(x.dtype)


def _places(ids: Tensor, expert_map: Tensor) -> Tensor:
    """The place of each expert here, -1 of ids that the map has not."""
    is_known = (ids >= 0) & (ids < expert_map.numel())
    return torch.where(is_known, expert_map[torch.where(is_known, ids, 0)], -1)


def _expert(weights: MoeWeights, expert: int, x: Tensor) -> Tensor:
    gate_up = weights.w13.linear(expert, x)
    if weights.bias13 is not None:
        gate_up += weights.bias13[expert]
    y = weights.w2.linear(expert, weights.activation(gate_up))
    if weights.bias2 is not None:
        y += weights.bias2[expert]
    return y


def _check(weights: MoeWeights, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> None:
    k = weights.w13.shape[2]
    if x.dim() != 2 or x.shape[1] != k or not x.is_floating_point():
        raise InvalidArgumentError(
            f"x: got {x.dtype} {list(x.shape)}, must be floating point [M, {k}]"
        )
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise InvalidArgumentError(f"topk_ids: got {topk_ids.dtype}, must be int32 or int64")
    if topk_ids.dim() != 2 or topk_ids.shape[0] != x.shape[0]:
        raise InvalidArgumentError(
            f"topk_ids: got shape {list(topk_ids.shape)}, must be [{x.shape[0]}, top_k]"
        )
    if topk_weights.shape != topk_ids.shape or not topk_weights.is_floating_point():
        raise InvalidArgumentError(
            f"topk_weights: got {topk_weights.dtype} {list(topk_weights.shape)}, "
            f"must be floating point {list(topk_ids.shape)}"
        )
