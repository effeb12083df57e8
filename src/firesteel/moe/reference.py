"""Float64 oracle of the MoE layer; plain loops, no code shared with any backend."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from firesteel.moe.activation import Activation

__all__ = ["moe_reference"]


def moe_reference(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    activation: Activation | None = None,
    bias13: Tensor | None = None,
    bias2: Tensor | None = None,
) -> Tensor:
    """out[m] = sum over slots j of topk_weights[m, j] * FC2_e(act(FC1_e(x[m]))), e = topk_ids[m, j]

    x [M, K], w13 [E, 2N, K] (gate rows, then up rows), w2 [E, K, N], topk_ids and topk_weights
    [M, top_k], bias13 [E, 2N], bias2 [E, K]; any dtype. An id outside [0, E) adds nothing.
    Returns float64 [M, K].
    """
    activation = activation or Activation()
    out = torch.zeros(x.shape[0], w2.shape[1], dtype=torch.float64)
    n = w2.shape[2]
    for m in range(x.shape[0]):
        for j in range(topk_ids.shape[1]):
            expert = int(topk_ids[m, j])
            if not 0 <= expert < w13.shape[0]:
                continue
            hidden = w13[expert].double() @ x[m].double()
            if bias13 is not None:
                hidden = hidden + bias13[expert].double()
            acted = torch.tensor(
                [_activate(activation, float(hidden[i]), float(hidden[n + i])) for i in range(n)],
                dtype=torch.float64,
            )
            y = w2[expert].double() @ acted
            if bias2 is not None:
                y = y + bias2[expert].double()
            out[m] += float(topk_weights[m, j]) * y
    return out


def _activate(activation: Activation, gate: float, up: float) -> float:
    if activation.name == "silu":
        return gate * _sigmoid(gate) * up
    if activation.name == "swigluoai":
        gate = min(gate, activation.limit)
        up = max(-activation.limit, min(up, activation.limit))
        return gate * _sigmoid(activation.alpha * gate) * (up + activation.beta)
    raise AssertionError(activation.name)


def _sigmoid(value: float) -> float:
    if value >= 0:
        return 1.0 / (1.0 + math.exp(-value))
    return math.exp(value) / (1.0 + math.exp(value))
