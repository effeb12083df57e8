"""Float64 oracles of the EXL3 kernels: plain sums, no code shared with the kernels.

They round nothing. A row that a kernel must not write is NaN here. Where a layer has no ids, ids
are zeros. Columns of 128 are a block; the last one of K or N may be in part past it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from firesteel.formats.trellis import Codebook, TrellisCode, decode_tiles, states_of, tile_order
from firesteel.moe.activation import Activation
from firesteel.moe.reference import activate_row, experts_of_routes

__all__ = [
    "act_reference",
    "finish_reference",
    "in_operand_order",
    "numbers_reference",
    "product_reference",
    "rotate_reference",
]

# A state s gives s * factor + term, of which both halves are fp16 numbers when some of their bits
# are set.
_SUMS_OF_TWO = {"mcg": (0xCBAC1FED, 0), "3inst": (89226354, 64248484)}


def numbers_reference(tiles: Tensor, codebook: Codebook) -> Tensor:
    """What, float64 `[K, N]`, of stored tiles int16 `[K / 16, N / 16, 16 * bits]`.

    A number that is the sum of two is not rounded to fp16, as it is when it is stored in fp16.
    """
    rows, columns, words = tiles.shape
    code = TrellisCode(words // 16, codebook)
    if codebook == "mul1":
        return decode_tiles(tiles, code).double()
    factor, term = _SUMS_OF_TWO[codebook]
    states = states_of(tiles, code).long()[..., tile_order()]
    mixed = ((states * factor + term) & 0x8FFF8FFF) ^ 0x3B603B60
    low, high = (
        half.to(torch.uint16).view(torch.float16).double()
        for half in (mixed & 0xFFFF, (mixed >> 16) & 0xFFFF)
    )
    numbers = (low + high).view(rows, columns, 16, 16)
    return numbers.transpose(1, 2).reshape(rows * 16, columns * 16)


def in_operand_order(rows: Tensor) -> Tensor:
    """Columns put where the products look for them.

    64 columns are those of 4 tiles. Column 16 * t + 8 * h + 2 * q + e of them, t the tile, goes to
    16 * q + 8 * h + 2 * t + e.
    """
    out = torch.empty_like(rows)
    out[..., _places(rows.shape[-1])] = rows
    return out


def rotate_reference(
    x: Tensor, suh: Tensor, topk_ids: Tensor, *, expert_map: Tensor | None = None
) -> Tensor:
    """rotated[r, p] = H (x[r // top_k] * suh[e, p]), e = topk_ids[r]

    x [M, K], suh [E, P, KP], topk_ids [M, top_k]; KP is K rounded up to 128s. Returns float64
    `[R, P, KP]` in operand order.
    """
    experts = experts_of_routes(topk_ids, suh.shape[0], expert_map)
    num_parts, width = suh.shape[1:]
    out = torch.full((len(experts), num_parts, width), math.nan, dtype=torch.float64)
    for route, expert in enumerate(experts):
        if expert is not None:
            row = _padded(x[route // topk_ids.shape[1]].double(), width)
            out[route] = in_operand_order(_rotated(row * suh[expert].double()))
    return out


def product_reference(
    x: Tensor,
    matrices: Sequence[Sequence[Tensor]],
    codebook: Codebook,
    topk_ids: Tensor,
    *,
    expert_map: Tensor | None = None,
) -> Tensor:
    """y[r, p] = What[e, p]^T x[r, p], e = topk_ids[r]

    x [R, P, K] in operand order; matrices E times P stored tiles int16 `[K / 16, N / 16,
    16 * bits]`, each of a rate of its own. Returns float64 `[R, P, N]`.
    """
    experts = experts_of_routes(topk_ids, len(matrices), expert_map)
    num_columns = 16 * matrices[0][0].shape[1]
    out = torch.full((*x.shape[:2], num_columns), math.nan, dtype=torch.float64)
    natural = x.double()[..., _places(x.shape[-1])]
    for expert in {expert for expert in experts if expert is not None}:
        routes = [route for route, owner in enumerate(experts) if owner == expert]
        for part, tiles in enumerate(matrices[expert]):
            numbers = numbers_reference(tiles, codebook)
            out[routes, part] = torch.einsum("rk,kn->rn", natural[routes, part], numbers)
    return out


def act_reference(
    products: Tensor,
    svh: Tensor,
    suh: Tensor,
    topk_ids: Tensor,
    *,
    n: int,
    activation: Activation | None = None,
    expert_map: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """hidden[r] = H (suh[e] * act(H products[r] * svh[e] + bias[e])), e = topk_ids[r]

    products [R, P, NP] (gate, then up; P is 1 where there is no up), or the sum of what spans of K
    add to them; svh [E, P, NP]; suh [E, 1, NP], that of down; bias [E, P * n]. NP is n rounded up
    to 128s; past n act is 0. Returns float64 `[R, NP]` in operand order.
    """
    activation = activation or Activation()
    experts = experts_of_routes(topk_ids, svh.shape[0], expert_map)
    num_parts, width = svh.shape[1:]
    out = torch.full((len(experts), width), math.nan, dtype=torch.float64)
    for route, expert in enumerate(experts):
        if expert is None:
            continue
        gate_up = (_rotated(products[route].double()) * svh[expert].double())[:, :n]
        if bias is not None:
            gate_up = gate_up + bias[expert].double().view(num_parts, n)
        acted = activate_row(activation, gate_up.flatten(), n) * suh[expert, 0, :n].double()
        out[route] = in_operand_order(_rotated(_padded(acted, width)))
    return out


def finish_reference(
    products: Tensor,
    svh: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor | None = None,
    *,
    n: int,
    expert_map: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """out[m] = sum over slots j that have an expert of w[r] * (H products[r] * svh[e] + bias[e])

    r = m * top_k + j and e = topk_ids[r]. products [R, NP], or the sum of what spans add to them;
    svh [E, 1, NP]; bias [E, n]; topk_weights [M, top_k], or None for ones. NP is n rounded up to
    128s. Returns float64 `[M, n]`.
    """
    num_tokens, top_k = topk_ids.shape
    out = torch.zeros(num_tokens, n, dtype=torch.float64)
    for route, expert in enumerate(experts_of_routes(topk_ids, svh.shape[0], expert_map)):
        if expert is None:
            continue
        term = (_rotated(products[route].double()) * svh[expert, 0].double())[:n]
        if bias is not None:
            term = term + bias[expert].double()
        weight = 1.0 if topk_weights is None else float(topk_weights.flatten()[route])
        out[route // top_k] += weight * term
    return out


@lru_cache(maxsize=16)
def _places(width: int) -> list[int]:
    """Where each column goes in operand order."""
    found: list[int] = []
    for column in range(width):
        tile, within = column % 64 // 16, column % 16
        half, quarter, odd = within // 8, within % 8 // 2, within % 2
        found.append(column // 64 * 64 + 16 * quarter + 8 * half + 2 * tile + odd)
    return found


def _padded(row: Tensor, width: int) -> Tensor:
    return torch.cat([row, row.new_zeros(width - len(row))])


def _rotated(rows: Tensor) -> Tensor:
    """Blocks of 128 columns times the Hadamard matrix."""
    blocks = rows.unflatten(-1, (-1, 128))
    return torch.einsum("...i,ij->...j", blocks, _hadamard()).flatten(-2)


@lru_cache(maxsize=1)
def _hadamard() -> Tensor:
    signs = [[(-1) ** bin(i & j).count("1") for j in range(128)] for i in range(128)]
    return torch.tensor(signs, dtype=torch.float64) / math.sqrt(128)
