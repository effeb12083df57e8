"""From how a checkpoint stores a layer's EXL3 matrices to the spec that plans it, or why not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TypeVar

import torch

from firesteel.errors import InvalidArgumentError, UnsupportedError
from firesteel.formats.trellis_matrix import TrellisScheme
from firesteel.moe.activation import Activation
from firesteel.moe.supports import dtype_name
from firesteel.moe.trellis.linear import TrellisLinearSpec
from firesteel.moe.trellis.spec import StoredTrellis, TrellisMoeSpec

__all__ = ["stored_of", "trellis_linear_spec_of", "trellis_moe_spec_of", "united"]

Spec = TypeVar("Spec", TrellisMoeSpec, TrellisLinearSpec)


def stored_of(schemes: Sequence[TrellisScheme], *, has_bias: bool) -> StoredTrellis:
    """How a stack is stored whose matrices have these schemes.

    Raises
        InvalidArgumentError: `schemes` has none.
        UnsupportedError: no kernel reads it.
    """
    if not schemes:
        raise InvalidArgumentError("schemes: got none, must be those of a stack's matrices")
    codebooks = sorted({scheme.code.codebook for scheme in schemes})
    if len(codebooks) > 1:
        raise UnsupportedError(
            f"codebooks: got {', '.join(codebooks)} in one stack, kernels read one"
        )
    halves = {scheme.code.bits for scheme in schemes if scheme.code.bits % 1}
    if halves:
        raise UnsupportedError(f"bits: got {min(halves)}, kernels read whole numbers of bits")
    rates = tuple(sorted({int(scheme.code.bits) for scheme in schemes}))
    return StoredTrellis(rates=rates, codebook=codebooks[0], has_bias=has_bias)


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
    num_global_experts: int | None = None,
) -> TrellisMoeSpec:
    """The layer whose gate and up are stored as `w13` says, and whose down as `w2`.

    Args:
        w13, w2: of every matrix: gates and ups `[intermediate, hidden]`, downs
            `[hidden, intermediate]`.
        dtype: of activations and biases.
        num_global_experts: length of the expert map, where calls give ids of all ranks' experts.

    Raises
        UnsupportedError: no kernel reads it.
        InvalidArgumentError: a size is not positive, or `top_k` is larger than the experts.
    """
    return TrellisMoeSpec(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_experts=num_experts,
        top_k=top_k,
        dtype=dtype_name(dtype),
        w13=stored_of(w13, has_bias=has_bias),
        w2=stored_of(w2, has_bias=has_bias),
        activation=activation,
        num_global_experts=num_global_experts,
    )


def trellis_linear_spec_of(scheme: TrellisScheme, *, dtype: torch.dtype) -> TrellisLinearSpec:
    """The linear of one matrix; its bias is added by the caller.

    Raises
        UnsupportedError: no kernel reads it.
    """
    return TrellisLinearSpec(
        in_features=scheme.k,
        out_features=scheme.n,
        dtype=dtype_name(dtype),
        stored=stored_of((scheme,), has_bias=False),
    )


def united(specs: Sequence[Spec]) -> dict[Spec, Spec]:
    """Of each spec the one that serves all which differ from it in their rates alone.

    Layers of one model often mix rates, each in its own way: they share one plan.
    """
    groups: dict[Spec, list[Spec]] = {}
    for spec in specs:
        alike = _with_rates(spec, {name: {1} for name in _stacks(spec)})
        groups.setdefault(alike, []).append(spec)
    found: dict[Spec, Spec] = {}
    for alike, group in groups.items():
        rates = {
            name: {rate for spec in group for rate in getattr(spec, name).rates}
            for name in _stacks(alike)
        }
        found |= dict.fromkeys(group, _with_rates(alike, rates))
    return found


def _stacks(spec: TrellisMoeSpec | TrellisLinearSpec) -> list[str]:
    """The fields that say how matrices are stored."""
    names = [field.name for field in fields(spec)]
    return [name for name in names if isinstance(getattr(spec, name), StoredTrellis)]


def _with_rates(spec: Spec, rates: Mapping[str, set[int]]) -> Spec:
    changes = {
        name: replace(getattr(spec, name), rates=tuple(sorted(found)))
        for name, found in rates.items()
    }
    return replace(spec, **changes)
