"""Float64 oracles of the MoE kernels and of the layer; plain loops, no code shared with a backend.

A row that a kernel must not write is NaN here: the row of a route whose expert is not held.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from firesteel.moe.activation import Activation

__all__ = [
    "Placement",
    "activate_reference",
    "activate_row",
    "combine_reference",
    "count_reference",
    "down_reference",
    "experts_of_routes",
    "gate_up_reference",
    "moe_reference",
    "place_reference",
]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where routes and tiles are.

    Fields
        route_ids       routes that have an expert, sorted by it, stable
        expert_offsets  `[E + 1]`; expert e owns `route_ids[expert_offsets[e]:expert_offsets[e+1]]`
        block_expert    expert of each tile
        block_row       place of the first row of each tile in `route_ids`
    """

    route_ids: list[int]
    expert_offsets: list[int]
    block_expert: list[int]
    block_row: list[int]


def count_reference(
    topk_ids: Tensor, num_experts: int, *, expert_map: Tensor | None = None
) -> list[int]:
    """counts[e] = number of routes of expert e."""
    experts = experts_of_routes(topk_ids, num_experts, expert_map)
    return [experts.count(expert) for expert in range(num_experts)]


def place_reference(
    topk_ids: Tensor, num_experts: int, *, block_m: int, expert_map: Tensor | None = None
) -> Placement:
    """Routes sorted by expert, and tiles of at most `block_m` of them.

    Tiles of experts whose last one has more units of 32 routes come first.

    ids [1, 0, -1, 1, 1] of 2 experts, block_m 2: route_ids [1, 0, 3, 4], expert_offsets [0, 1, 4],
    block_expert [0, 1, 1], block_row [0, 1, 3].
    """
    experts = experts_of_routes(topk_ids, num_experts, expert_map)
    placement = Placement([], [0], [], [])
    tiles: list[tuple[int, int, int]] = []
    for expert in range(num_experts):
        routes = [route for route, owner in enumerate(experts) if owner == expert]
        starts = range(0, len(routes), block_m)
        units = -(-(len(routes) - starts[-1]) // 32) if routes else 0
        tiles += [(-units, expert, len(placement.route_ids) + start) for start in starts]
        placement.route_ids.extend(routes)
        placement.expert_offsets.append(len(placement.route_ids))
    for _, expert, row in sorted(tiles):
        placement.block_expert.append(expert)
        placement.block_row.append(row)
    return placement


def gate_up_reference(
    x: Tensor,
    w13: Tensor,
    topk_ids: Tensor,
    *,
    activation: Activation | None = None,
    expert_map: Tensor | None = None,
    topk_weights: Tensor | None = None,
    bias13: Tensor | None = None,
) -> Tensor:
    """hidden[r] = act(w13[e] @ x[r // top_k] * topk_weights[r] + bias13[e]), e = topk_ids[r]

    x [M, K], w13 [E, 2N, K] (gate rows, then up rows; `[E, N, K]` where there is no up), bias13
    [E, 2N], topk_ids [M, top_k]; topk_weights [M, top_k] where the router weight is on the input.
    Returns float64 `[R, N]`.
    """
    activation = activation or Activation()
    n = w13.shape[1] // (2 if activation.is_gated else 1)
    experts = experts_of_routes(topk_ids, w13.shape[0], expert_map)
    out = torch.full((len(experts), n), math.nan, dtype=torch.float64)
    for route, expert in enumerate(experts):
        if expert is None:
            continue
        hidden = w13[expert].double() @ x[route // topk_ids.shape[1]].double()
        if topk_weights is not None:
            hidden = hidden * float(topk_weights.flatten()[route])
        if bias13 is not None:
            hidden = hidden + bias13[expert].double()
        out[route] = activate_row(activation, hidden, n)
    return out


def activate_reference(
    partials: Tensor,
    topk_ids: Tensor,
    num_experts: int,
    *,
    activation: Activation | None = None,
    expert_map: Tensor | None = None,
    topk_weights: Tensor | None = None,
    bias13: Tensor | None = None,
) -> Tensor:
    """hidden[r] = act(sum over s of partials[s, r] * topk_weights[r] + bias13[e]), e = topk_ids[r]

    partials [S, R, 2N] (gate columns, then up columns; `[S, R, N]` where there is no up): what each
    span of K adds to FC1's product. The rest as `gate_up_reference`. Returns float64 `[R, N]`.
    """
    activation = activation or Activation()
    n = partials.shape[2] // (2 if activation.is_gated else 1)
    experts = experts_of_routes(topk_ids, num_experts, expert_map)
    out = torch.full((len(experts), n), math.nan, dtype=torch.float64)
    for route, expert in enumerate(experts):
        if expert is None:
            continue
        hidden = partials[:, route].double().sum(0)
        if topk_weights is not None:
            hidden = hidden * float(topk_weights.flatten()[route])
        if bias13 is not None:
            hidden = hidden + bias13[expert].double()
        out[route] = activate_row(activation, hidden, n)
    return out


def down_reference(
    hidden: Tensor,
    w2: Tensor,
    topk_ids: Tensor,
    *,
    expert_map: Tensor | None = None,
    bias2: Tensor | None = None,
) -> Tensor:
    """y[r] = w2[e] @ hidden[r] + bias2[e], e = topk_ids[r]

    hidden [R, N] by route, w2 [E, K, N], bias2 [E, K]. Returns float64 `[R, K]`.
    """
    experts = experts_of_routes(topk_ids, w2.shape[0], expert_map)
    out = torch.full((len(experts), w2.shape[1]), math.nan, dtype=torch.float64)
    for route, expert in enumerate(experts):
        if expert is None:
            continue
        out[route] = w2[expert].double() @ hidden[route].double()
        if bias2 is not None:
            out[route] += bias2[expert].double()
    return out


def combine_reference(
    y: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor | None,
    num_experts: int,
    *,
    expert_map: Tensor | None = None,
) -> Tensor:
    """out[m] = sum over slots j that have an expert of topk_weights[m, j] * y[m * top_k + j]

    y [R, K]; topk_weights [M, top_k], or None for ones. Returns float64 `[M, K]`.
    """
    num_tokens, top_k = topk_ids.shape
    experts = experts_of_routes(topk_ids, num_experts, expert_map)
    out = torch.zeros(num_tokens, y.shape[1], dtype=torch.float64)
    for route, expert in enumerate(experts):
        if expert is not None:
            weight = 1.0 if topk_weights is None else float(topk_weights.flatten()[route])
            out[route // top_k] += weight * y[route].double()
    return out


def moe_reference(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    activation: Activation | None = None,
    expert_map: Tensor | None = None,
    weight_on_input: bool = False,
    bias13: Tensor | None = None,
    bias2: Tensor | None = None,
) -> Tensor:
    """out[m] = sum over slots j of topk_weights[m, j] * FC2_e(act(FC1_e(x[m]))), e = topk_ids[m, j]

    x [M, K], w13 [E, 2N, K] (gate rows, then up rows; `[E, N, K]` where there is no up), w2
    [E, K, N], topk_ids and topk_weights [M, top_k], bias13 [E, 2N], bias2 [E, K]; any dtype.
    `expert_map` [num_global_experts] turns ids into experts held here. An id outside it, or one
    that is then outside [0, E), adds nothing. With `weight_on_input` topk_weights[m, j] multiplies
    FC1's product (not its bias) instead. Returns float64 `[M, K]`.
    """
    hidden = gate_up_reference(
        x,
        w13,
        topk_ids,
        activation=activation,
        expert_map=expert_map,
        topk_weights=topk_weights if weight_on_input else None,
        bias13=bias13,
    )
    y = down_reference(hidden, w2, topk_ids, expert_map=expert_map, bias2=bias2)
    gates = None if weight_on_input else topk_weights
    return combine_reference(y, topk_ids, gates, w2.shape[0], expert_map=expert_map)


def experts_of_routes(
    topk_ids: Tensor, num_experts: int, expert_map: Tensor | None = None
) -> list[int | None]:
    """The expert of each route, None where it has none."""
    local: list[int | None] | None = None if expert_map is None else expert_map.tolist()
    experts: list[int | None] = []
    for expert in topk_ids.flatten().tolist():
        if local is not None:
            expert = local[expert] if 0 <= expert < len(local) else None
        experts.append(expert if expert is not None and 0 <= expert < num_experts else None)
    return experts


def activate_row(activation: Activation, hidden: Tensor, n: int) -> Tensor:
    """The activation of a row of gates and then ups, number by number."""
    values: list[float] = hidden.tolist()
    # Without up rows the gate stands in for them; no such activation reads it.
    ups = values[n:] or values
    acted = [_activate(activation, *pair) for pair in zip(values[:n], ups, strict=True)]
    return torch.tensor(acted, dtype=torch.float64)


def _activate(activation: Activation, gate: float, up: float) -> float:
    limit = activation.clamp_limit
    if limit is not None:
        gate = min(gate, limit)
        up = max(-limit, min(up, limit))
    if activation.name == "silu":
        return gate * _sigmoid(gate) * up
    if activation.name == "swigluoai":
        return gate * _sigmoid(activation.alpha * gate) * (up + activation.beta)
    if activation.name == "situ":
        return 4 * math.tanh(gate / 4) * _sigmoid(gate) * 25 * math.tanh(up / 25)
    if activation.name == "relu2":
        return max(gate, 0.0) ** 2
    raise AssertionError(activation.name)


def _sigmoid(value: float) -> float:
    if value >= 0:
        return 1.0 / (1.0 + math.exp(-value))
    return math.exp(value) / (1.0 + math.exp(value))
