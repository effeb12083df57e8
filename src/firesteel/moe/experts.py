"""The weights of a layer's experts as a backend sees them, packed or dense."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.nn import functional

__all__ = ["DenseWeights", "ExpertWeights", "MoeWeights"]


class ExpertWeights(Protocol):
    """A stack `[E, n, k]` of matrices of which a backend multiplies one at a time."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """`[E, n, k]`."""
        ...

    def linear(self, index: int, x: Tensor) -> Tensor:
        """`x @ W.T` with matrix `index`: `[M, n]` from `[M, k]`, in x's dtype."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class DenseWeights:
    """16-bit or wider weights as they are: `weight` is `[E, n, k]`."""

    weight: Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        """`[E, n, k]`."""
        e, n, k = self.weight.shape
        return (e, n, k)

    def linear(self, index: int, x: Tensor) -> Tensor:
        """`x @ W.T` with matrix `index`."""
        return functional.linear(x, self.weight[index].to(x.dtype))


@dataclass(frozen=True, slots=True, eq=False)
class MoeWeights:
    """All that a layer's experts own.

    Fields
        w13, w2       `[E, 2N, K]` and `[E, K, N]`
        activation    FC1's `[R, 2N]` to FC2's `[R, N]`; an `Activation` where gate rows come first
        bias13, bias2 `[E, 2N]` and `[E, K]`, or None
        expert_map    `[num_global_experts]` int32: the place here of each id that calls give, -1 of
                      one that is not here; None where ids are places
    """

    w13: ExpertWeights
    w2: ExpertWeights
    activation: Callable[[Tensor], Tensor]
    bias13: Tensor | None = None
    bias2: Tensor | None = None
    expert_map: Tensor | None = None
