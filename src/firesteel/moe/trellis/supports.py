"""From how a checkpoint stores a layer's EXL3 matrices to the spec that plans it, or why not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from firesteel.errors import UnsupportedError
from firesteel.formats.trellis_matrix import TrellisScheme
from firesteel.launch.key import DTYPES
from firesteel.moe.activation import Activation
from firesteel.moe.trellis.spec import StoredTrellis, TrellisMoeSpec

__all__ = ["stored_of", "trellis_moe_spec_of", "united"]


def stored_of(schemes: Sequence[TrellisScheme], *, has_bias: bool) -> StoredTrellis:
    """How a stack is stored whose matrices have these schemes.

    Raises
        UnsupportedError: no kernel reads it.
    """
    codebooks = dict.fromkeys(scheme.code.codebook for scheme in schemes)
    if len(codebooks) > 1:
        raise UnsupportedError(
            f"codebooks: got {', '.join(codebooks)} in one stack, kernels read one"
        )
    halves = {scheme.code.bits for scheme in schemes if scheme.code.bits % 1}
    if halves:
        raise UnsupportedError(f"bits: got {min(halves)}, kernels read whole numbers of bits")
    rates = tuple(sorted({int(scheme.code.bits) for scheme in schemes}))
    return StoredTrellis(rates=rates, codebook=next(iter(codebooks)), has_bias=has_bias)


def trellis_moe_spec_of(
    w13: Sequence[TrellisScheme],
    w2: Sequence[TrellisScheme],
    *,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    top_k: int,
    activation: Activation,
    dtype: torch.dtype,
    has_bias: bool,
) -> TrellisMoeSpec:
    """The layer whose gate and up are stored as `w13` says, and whose down as `w2`.

    Args:
        w13, w2: of every matrix: gates and ups `[intermediate, hidden]`, downs
            `[hidden, intermediate]`.
        dtype: of activations and biases.

    Raises
        UnsupportedError: no kernel reads it.
        InvalidArgumentError: a size is not positive, or `top_k` is larger than the experts.
    """
    names = {DTYPES[name]: name for name in ("bf16", "fp16")}
    if dtype not in names:
        raise UnsupportedError(f"dtype: got {dtype}, must be bfloat16 or float16")
    return TrellisMoeSpec(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_experts=num_experts,
        top_k=top_k,
        dtype=names[dtype],
        w13=stored_of(w13, has_bias=has_bias),
        w2=stored_of(w2, has_bias=has_bias),
        activation=activation,
    )


def united(specs: Sequence[TrellisMoeSpec]) -> dict[TrellisMoeSpec, TrellisMoeSpec]:
    """Of each spec the one that serves all which differ from it in their rates alone.

    Layers of one model often mix rates, each in its own way: they share one plan.
    """
    found: dict[TrellisMoeSpec, TrellisMoeSpec] = {}
    groups: dict[TrellisMoeSpec, list[TrellisMoeSpec]] = {}
    for spec in specs:
        bare = replace(spec, w13=_with(spec.w13, (1,)), w2=_with(spec.w2, (1,)))
        groups.setdefault(bare, []).append(spec)
    for group in groups.values():
        w13 = tuple(sorted({rate for spec in group for rate in spec.w13.rates}))
        w2 = tuple(sorted({rate for spec in group for rate in spec.w2.rates}))
        for spec in group:
            found[spec] = replace(spec, w13=_with(spec.w13, w13), w2=_with(spec.w2, w2))
    return found


def _with(stored: StoredTrellis, rates: tuple[int, ...]) -> StoredTrellis:
    return replace(stored, rates=rates)
