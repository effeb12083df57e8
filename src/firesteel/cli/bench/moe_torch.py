"""Baseline and oracle of `firesteel bench moe`: the same layer in torch, in bf16 and float64."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from firesteel.cli.bench.moe_inputs import Call
from firesteel.formats.base import E2M1, ELEMENTS, NF3, Element, scales_to_float
from firesteel.formats.expand import e2m1_codes, narrow_codes
from firesteel.formats.trellis import Codebook, TrellisCode, decode_tiles, hadamard128
from firesteel.formats.trellis_matrix import trellis_scheme
from firesteel.formats.trellis_weights import MATRIX_UNIT, tiles_of_words
from firesteel.launch.key import DTYPES
from firesteel.moe.spec import BITS, NAMED_FORMATS, MoeSpec
from firesteel.moe.trellis.spec import LayerSpec, TrellisMoeSpec

__all__ = [
    "MAX_ERROR",
    "TorchLayer",
    "dense_weights",
    "first_tokens_in_float64",
    "layer_in_float64",
    "relative_error",
]

MAX_ERROR = 0.02
"""`relative_error` that a right layer keeps below: several times what rounding to bf16 gives."""

_CHECKED_TOKENS = 4


def _expand(spec: LayerSpec, weights: dict[str, Tensor], name: str, expert: int) -> Tensor:
    """One expert's matrix `[P * n, k]` in float64, from the tensors that kernels read."""
    if isinstance(spec, TrellisMoeSpec):
        return _expand_trellis(spec, weights, name, expert)
    stored = getattr(spec, name)
    rows = _codes(stored.element, weights[f"{name}.codes"][expert])
    parts = spec.num_parts if name == "w13" else 1
    n = spec.intermediate_size if name == "w13" else spec.hidden_size
    k = spec.hidden_size if name == "w13" else spec.intermediate_size
    codes = rows[:, :n, :k].reshape(parts * n, k)
    if stored.element in NAMED_FORMATS:
        element = NF3 if stored.element == "nf3" else E2M1
        numbers = _values(element, codes) * _scales(spec, weights, name, expert)
        return (
            numbers if element.weight_dtype is None else numbers.to(element.weight_dtype).double()
        )
    numbers, zero = codes.double(), float(ELEMENTS[stored.element].zero_point)
    if stored.has_zero_points:
        zero = (
            weights[f"{name}.zero_points"][expert]
            .double()
            .T.repeat_interleave(stored.group_size, dim=1)
        )
    scales = weights[f"{name}.scales"][expert].double().T
    return (numbers - zero) * scales.repeat_interleave(stored.group_size, dim=1)


def _expand_trellis(
    spec: TrellisMoeSpec, weights: dict[str, Tensor], name: str, expert: int
) -> Tensor:
    stored = spec.w13 if name == "w13" else spec.w2
    n, k = spec.intermediate_size, spec.hidden_size
    n, k = (n, k) if name == "w13" else (k, n)
    parts: list[Tensor] = []
    for part, (start, bits) in enumerate(weights[f"{name}.matrices"][expert].tolist()):
        scheme = trellis_scheme(n, k, TrellisCode(float(bits), cast(Codebook, stored.codebook)))
        first = start * MATRIX_UNIT // 4
        words = weights[f"{name}.words"][first : first + torch.Size(scheme.tiles).numel() // 2]
        numbers = decode_tiles(tiles_of_words(words, scheme), scheme.code).double()
        suh, svh = (weights[f"{name}.{side}"][expert, part].double() for side in ("suh", "svh"))
        turned = hadamard128(hadamard128(numbers, dim=0), dim=1)
        parts.append((turned * suh.unsqueeze(1) * svh)[:k, :n].T)
    return torch.cat(parts)


def _codes(element: str, words: Tensor) -> Tensor:
    """Codes `[P, T * 64, B * 128]` of the words that kernels read."""
    if BITS[element] == 3:
        # [P, T, B, 3, 64, 16] bytes
        return narrow_codes(words.view(torch.uint8).movedim(-2, -4)).flatten(3).flatten(1, 2)
    # [P, T, B, 64, 32] words to [P, T, B, 64, 4, 32] codes.
    if element == "int4":
        planes = torch.stack([(words >> (4 * plane)) & 15 for plane in range(4)], dim=-2)
    else:
        planes = e2m1_codes(words)
    return planes.permute(0, 1, 3, 2, 4, 5).flatten(3).flatten(1, 2)


def _values(element: Element, codes: Tensor) -> Tensor:
    """The values of codes as float64."""
    assert element.values is not None
    return torch.tensor(element.values, dtype=torch.float64, device=codes.device)[codes.long()]


def _scales(spec: MoeSpec, weights: dict[str, Tensor], name: str, expert: int) -> Tensor:
    """The scale of each number of one expert's matrix `[P * n, k]`, of a format by name."""
    stored = getattr(spec, name)
    held = weights[f"{name}.scales"][expert].T
    if stored.element == "mxfp4":
        scales = torch.exp2(held.double() - 127)
    elif stored.element == "nf3":
        scales = scales_to_float(held, "e5m3")
    else:
        # Rounded to fp32, as the formats define it.
        scales = held.view(torch.float8_e4m3fn).float()
        whole = weights[f"{name}.global_scale"][expert]
        whole = whole.repeat_interleave(len(scales) // len(whole)).unsqueeze(1)
        scales = scales / whole if stored.global_scale == "divisor" else scales * whole
    return scales.double().repeat_interleave(stored.group_size, dim=1)


def layer_in_float64(
    spec: LayerSpec, weights: dict[str, Tensor], x: Tensor, topk_ids: Tensor, topk_weights: Tensor
) -> Tensor:
    """The layer of a few tokens in float64: `[M, K]`."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token in range(x.shape[0]):
        for slot, expert in enumerate(topk_ids[token].tolist()):
            hidden = _expand(spec, weights, "w13", expert) @ x[token].double()
            if spec.w13.has_bias:
                hidden = hidden + weights["w13.bias"][expert].double()
            y = _expand(spec, weights, "w2", expert) @ spec.activation(hidden[None])[0]
            if spec.w2.has_bias:
                y = y + weights["w2.bias"][expert].double()
            out[token] += topk_weights[token, slot].double() * y
    return out


def first_tokens_in_float64(spec: LayerSpec, weights: dict[str, Tensor], call: Call) -> Tensor:
    """What a call must give for its first few tokens."""
    x, ids, topk_weights, _ = call.rows(_CHECKED_TOKENS)
    return layer_in_float64(spec, weights, x, ids, topk_weights)


def relative_error(out: Tensor, expected: Tensor) -> float:
    """Norm of the difference over that of what is expected."""
    return float((out.double() - expected).norm() / expected.norm())


class TorchLayer:
    """The layer in bf16 with torch's grouped products, all on the device.

    Args:
        w13, w2: `[E, P*N, K]` and `[E, K, N]`.
    """

    def __init__(self, spec: LayerSpec, w13: Tensor, w2: Tensor, bias: dict[str, Tensor]) -> None:
        self._spec = spec
        self._w13 = w13.transpose(1, 2)
        self._w2 = w2.transpose(1, 2)
        self._bias = bias

    def __call__(self, call: Call) -> Tensor:
        """`[M, K]`: sort, FC1, activation, FC2, weighted sum."""
        spec, grouped = self._spec, torch.nn.functional.grouped_mm
        product: Any = grouped
        ids = call.topk_ids.reshape(-1)
        order = torch.argsort(ids, stable=True)
        experts = ids[order].long()
        counts = torch.zeros(spec.num_experts, dtype=torch.int32, device=ids.device)
        counts.scatter_add_(0, experts, torch.ones_like(experts, dtype=torch.int32))
        offsets = counts.cumsum(0, dtype=torch.int32)
        hidden = product(call.x[order // spec.top_k], self._w13, offs=offsets)
        if "w13.bias" in self._bias:
            hidden = hidden + self._bias["w13.bias"][experts]
        y = product(spec.activation(hidden), self._w2, offs=offsets)
        if "w2.bias" in self._bias:
            y = y + self._bias["w2.bias"][experts]
        weighted = y.float() * call.topk_weights.reshape(-1)[order].unsqueeze(1)
        back = torch.empty_like(weighted)
        back[order] = weighted
        return back.view(-1, spec.top_k, spec.hidden_size).sum(1).to(call.x.dtype)


def dense_weights(spec: LayerSpec, weights: dict[str, Tensor]) -> TorchLayer:
    """The weights in the layer's 16-bit dtype, rounded once, behind torch's products."""
    dtype = DTYPES[spec.dtype]
    stacks = {
        name: torch.stack(
            [_expand(spec, weights, name, expert).to(dtype) for expert in range(spec.num_experts)]
        )
        for name in ("w13", "w2")
    }
    bias = {name: tensor for name, tensor in weights.items() if name.endswith(".bias")}
    return TorchLayer(spec, stacks["w13"], stacks["w2"], bias)
