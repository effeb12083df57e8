"""The gated activations between FC1 and FC2, as the model families define them.

name        gate, up -> out                                                        families
silu        silu(gate) * up                                                        all but gpt-oss
swigluoai   g = min(gate, limit), u = clamp(up, -limit, limit)                     gpt-oss
            g * sigmoid(alpha * g) * (u + beta)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from firesteel.errors import UnsupportedError

__all__ = ["ACTIVATIONS", "Activation"]


def _silu(activation: Activation, gate: Tensor, up: Tensor) -> Tensor:
    del activation
    return functional.silu(gate).mul_(up)


def _swigluoai(activation: Activation, gate: Tensor, up: Tensor) -> Tensor:
    gate = gate.clamp(max=activation.limit)
    up = up.clamp(min=-activation.limit, max=activation.limit)
    # Out of place: a product in place would spoil the sigmoid for autograd.
    return torch.sigmoid(gate * activation.alpha) * gate * (up + activation.beta)


ACTIVATIONS: dict[str, Callable[[Activation, Tensor, Tensor], Tensor]] = {
    "silu": _silu,
    "swigluoai": _swigluoai,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """An activation and its constants; `silu` has none.

    Raises
        UnsupportedError: the name is not in `ACTIVATIONS`.
    """

    name: str = "silu"
    limit: float = 7.0
    alpha: float = 1.702
    beta: float = 1.0

    def __post_init__(self) -> None:
        if self.name not in ACTIVATIONS:
            raise UnsupportedError(
                f"activation: got {self.name!r}, supported are {', '.join(sorted(ACTIVATIONS))}"
            )

    def __call__(self, gate_up: Tensor) -> Tensor:
        """`[R, N]` from `[R, 2N]` (gate, then up), in its dtype; the argument is left as it is."""
        gate, up = gate_up.chunk(2, dim=-1)
        return ACTIVATIONS[self.name](self, gate, up)
