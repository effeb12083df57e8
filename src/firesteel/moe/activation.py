"""The activations between FC1 and FC2, as the model families define them.

name        gate, up -> out                                                    limit
silu        silu(g) * u                                                        none
swigluoai   g * sigmoid(alpha * g) * (u + beta)                                7.0 (gpt-oss)
situ        4 * tanh(g / 4) * sigmoid(g) * 25 * tanh(u / 25)                   takes none
relu2       relu(x)**2; FC1 has no up rows                                     takes none

With a limit, g = min(gate, limit) and u = clamp(up, -limit, limit); without, g = gate and u = up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn import functional

from firesteel.errors import UnsupportedError

__all__ = ["ACTIVATIONS", "Activation"]

_LIMITS: dict[str, float | None] = {"silu": None, "swigluoai": 7.0}


def _silu(activation: Activation, gate_up: Tensor) -> Tensor:
    gate, up = _clamped(activation, gate_up)
    return functional.silu(gate).mul_(up)


def _swigluoai(activation: Activation, gate_up: Tensor) -> Tensor:
    gate, up = _clamped(activation, gate_up)
    # Out of place: a product in place would spoil the sigmoid for autograd.
    return torch.sigmoid(gate * activation.alpha) * gate * (up + activation.beta)


def _situ(activation: Activation, gate_up: Tensor) -> Tensor:
    gate, up = _clamped(activation, gate_up)
    return 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * (25 * torch.tanh(up / 25))


def _relu2(activation: Activation, gate_up: Tensor) -> Tensor:
    del activation
    return torch.relu(gate_up).square()


ACTIVATIONS: dict[str, Callable[[Activation, Tensor], Tensor]] = {
    "silu": _silu,
    "swigluoai": _swigluoai,
    "relu2": _relu2,
    "situ": _situ,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """An activation and its constants.

    Fields
        name         key of `ACTIVATIONS`
        limit        of silu and swigluoai; None for the activation's own (see the module's text)
        alpha, beta  of swigluoai; the others do not read them

    Raises
        UnsupportedError: the name is not in `ACTIVATIONS`, or takes no limit and one is given.
    """

    name: str = "silu"
    limit: float | None = None
    alpha: float = 1.702
    beta: float = 1.0

    def __post_init__(self) -> None:
        if self.name not in ACTIVATIONS:
            raise UnsupportedError(
                f"activation: got {self.name!r}, supported are {', '.join(sorted(ACTIVATIONS))}"
            )
        if self.limit is not None and self.name not in _LIMITS:
            raise UnsupportedError(f"limit: got {self.limit}, must be None for {self.name!r}")

    @property
    def title(self) -> str:
        """Its name, and those of its constants that are not the usual ones."""
        usual = Activation(name=self.name)
        return self.name + "".join(
            f" {field.name}={value}"
            for field in fields(self)
            if (value := getattr(self, field.name)) != getattr(usual, field.name)
        )

    @property
    def is_gated(self) -> bool:
        """Whether FC1 has up rows after its gate rows."""
        return self.name != "relu2"

    @property
    def clamp_limit(self) -> float | None:
        """The limit in force: the given one, or the activation's own; None for no clamp."""
        return _LIMITS.get(self.name) if self.limit is None else self.limit

    def __call__(self, gate_up: Tensor) -> Tensor:
        """`[R, N]` in the argument's dtype; the argument is left as it is.

        gate_up is `[R, 2N]` (gate, then up), or `[R, N]` where there is no up.
        """
        return ACTIVATIONS[self.name](self, gate_up)


def _clamped(activation: Activation, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = gate_up.chunk(2, dim=-1)
    limit = activation.clamp_limit
    if limit is None:
        return gate, up
    return gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
