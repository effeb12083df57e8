"""The modules that replace transformers' experts and linears, and the experts function."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from firesteel.checkpoint.families import Geometry
from firesteel.errors import InvalidArgumentError
from firesteel.formats.base import Scheme
from firesteel.formats.packed import PackedWeights, WeightStack
from firesteel.formats.trellis_matrix import TrellisScheme
from firesteel.formats.trellis_weights import TrellisWeights
from firesteel.moe.activation import Activation
from firesteel.moe.experts import DenseWeights, MoeWeights
from firesteel.moe.torch_backend import run_experts

__all__ = ["IMPLEMENTATION", "PackedExperts", "PackedLinear", "experts_forward"]

log = logging.getLogger(__name__)

IMPLEMENTATION = "firesteel"
"""The name under which `experts_forward` is registered with transformers."""


class _Watched(nn.Module):
    """A module that notices when its tensors or modules are moved, converted or replaced."""

    def drop_kernels(self) -> None:
        """Called before that is done."""
        raise NotImplementedError

    def __setattr__(self, name: str, value: Any) -> None:
        for held in (self.__dict__.get("_buffers"), self.__dict__.get("_modules")):
            if held is not None and name in held and held[name] is not value:
                self.drop_kernels()
        super().__setattr__(name, value)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """As torch's."""
        if name in self._buffers and self._buffers[name] is not tensor:
            self.drop_kernels()
        super().register_buffer(name, tensor, persistent)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.drop_kernels()
        return super()._apply(fn, recurse)


class _Owned(_Watched):
    """A stack of a module that may have kernels, which it tells what it notices."""

    def watch(self, owner: _Watched) -> None:
        """Tell this module."""
        self.__dict__["_owner"] = weakref.ref(owner)

    def drop_kernels(self) -> None:
        known = self.__dict__.get("_owner")
        owner = None if known is None else known()
        if owner is not None:
            owner.drop_kernels()

    def __getstate__(self) -> dict[str, Any]:
        """Without the module, which watches its copies itself."""
        return {name: value for name, value in self.__dict__.items() if name != "_owner"}


class _OwnedWeights(_Owned, PackedWeights):
    pass


class _OwnedTrellis(_Owned, TrellisWeights):
    pass


def _expert_stack(schemes: Sequence[Scheme], num_parts: int) -> WeightStack:
    """A stack of an experts module; schemes of each part of each expert, an expert's together."""
    num_experts = len(schemes) // num_parts
    if isinstance(schemes[0], TrellisScheme):
        return _OwnedTrellis(cast(Sequence[TrellisScheme], schemes), num_experts, num_parts)
    return _OwnedWeights(schemes[0], num_experts, num_parts)


class _WithKernels(_Watched):
    """A module whose stacks kernels may read: they stay bound to the tensors that they were given.

    So it goes back to the PyTorch path when those are moved, converted or replaced; once its stacks
    are in place it calls `_watch`.

    Fields
        kernels  what runs it; None on the PyTorch path
        DROPPED  what is warned of where it goes back to that
    """

    DROPPED: ClassVar[str]
    kernels: Callable[..., Tensor] | None

    def __init__(self) -> None:
        super().__init__()
        self.kernels = None

    def _watch(self) -> None:
        for stack in self.children():
            if isinstance(stack, _Owned):
                stack.watch(self)

    def drop_kernels(self) -> None:
        if self.kernels is not None:
            self.kernels = None
            log.warning(self.DROPPED)

    def __getstate__(self) -> dict[str, Any]:
        """Without the kernels, which belong to this process and device."""
        return {**self.__dict__, "kernels": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._watch()


class PackedExperts(_WithKernels):
    """The experts of one layer, packed; called as transformers calls its own experts modules.

    Args:
        config: the model's config, which holds the experts implementation in use.
        geometry: E, K and N.
        schemes: of gate and up of each expert, an expert's together; and of down.
        activation: between the two products.
        bias_dtype: type of the biases; None where the family has none.
        expert_map: where the ids of calls are not places here, the place of each, -1 of one that is
            not here: int32 `[num_global_experts]`.
    """

    DROPPED = "experts were moved, converted or replaced: they run on the PyTorch path from here"
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    expert_map: Tensor | None

    def __init__(
        self,
        config: Any,
        geometry: Geometry,
        schemes: tuple[Sequence[Scheme], Sequence[Scheme]],
        activation: Activation,
        bias_dtype: torch.dtype | None = None,
        expert_map: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.num_experts = geometry.num_experts
        self.hidden_dim = geometry.hidden_size
        self.intermediate_dim = geometry.intermediate_size
        self.activation = activation
        self.gate_up: WeightStack = _expert_stack(schemes[0], num_parts=2)
        self.down: WeightStack = _expert_stack(schemes[1], num_parts=1)
        self._watch()
        for name, rows in (
            ("gate_up_bias", 2 * geometry.intermediate_size),
            ("down_bias", geometry.hidden_size),
        ):
            bias = None
            if bias_dtype is not None:
                bias = torch.empty(geometry.num_experts, rows, dtype=bias_dtype)
            self.register_buffer(name, bias)
        # Of the rank, not of the checkpoint.
        self.register_buffer("expert_map", expert_map, persistent=False)

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed weights, scales and biases."""
        return sum(buffer.nbytes for buffer in self.buffers())

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """`[M, K]` from hidden states `[M, K]`, expert ids and router weights `[M, top_k]`.

        Raises
            InvalidArgumentError: another experts implementation is set; it could not read these.
        """
        implementation = getattr(self.config, "_experts_implementation", IMPLEMENTATION)
        if implementation != IMPLEMENTATION:
            raise InvalidArgumentError(
                f"experts_implementation: got {implementation!r}, must be {IMPLEMENTATION!r} "
                "for experts that are packed"
            )
        return experts_forward(self, hidden_states, top_k_index, top_k_weights)

    def moe_weights(self) -> MoeWeights:
        """The layer as a backend reads it."""
        return MoeWeights(
            w13=self.gate_up,
            w2=self.down,
            activation=self.activation,
            bias13=self.gate_up_bias,
            bias2=self.down_bias,
            expert_map=self.expert_map,
        )


class PackedLinear(_WithKernels):
    """A quantised `nn.Linear`: the weight is packed, and expanded at each call or read by kernels.

    Kernels take calls in `dtype` that want no gradient (`attach_kernels`); the first one in another
    dtype is warned of.

    Args:
        scheme: how the weight was stored.
        bias: the module's own, which transformers loads; or None.
        dtype: of `weight`, the expanded matrix.
    """

    DROPPED = "a linear was moved, converted or replaced: it runs on the PyTorch path from here"

    def __init__(self, scheme: Scheme, bias: nn.Parameter | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features = scheme.k
        self.out_features = scheme.n
        self.dtype = dtype
        self._has_warned = False
        self.packed: WeightStack = (
            _OwnedTrellis([scheme], num_matrices=1)
            if isinstance(scheme, TrellisScheme)
            else PackedWeights(scheme, num_matrices=1)
        )
        self._watch()
        self.bias: nn.Parameter | None
        self.register_parameter("bias", bias)

    @property
    def weight(self) -> Tensor:
        """The matrix `[out_features, in_features]`, expanded anew at each access."""
        return self.packed.read(0, 0).dequantize(self.packed.scheme, self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """`x @ weight.T + bias`, `[..., out_features]` in x's dtype."""
        rows = x.reshape(-1, self.in_features)
        needs_grad = torch.is_grad_enabled() and x.requires_grad
        if self.kernels is None or needs_grad:
            y = self.packed.linear(0, rows)
        elif x.dtype != self.dtype:
            if not self._has_warned:
                self._has_warned = True
                log.warning(
                    "a linear's kernels take %s: its calls in %s run on the PyTorch path",
                    self.dtype,
                    x.dtype,
                )
            y = self.packed.linear(0, rows)
        else:
            y = self.kernels(rows.contiguous())
        if self.bias is not None:
            y += self.bias
        return y.view(*x.shape[:-1], self.out_features)


def experts_forward(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """transformers' experts interface: `PackedExperts`, or a host's own dense experts module.

    hidden_states [M, K]; top_k_index [M, top_k] int32 or int64, where an id outside [0, E) adds
    nothing; top_k_weights [M, top_k]. Returns [M, K]. Packed experts run on GPU kernels where they
    have them (`attach_kernels`), but for a call that wants a gradient.

    Raises
        InvalidArgumentError: a dense module whose experts have no gate, or a norm after them.
    """
    if not isinstance(module, PackedExperts):
        return run_experts(_dense_weights(module), hidden_states, top_k_index, top_k_weights)
    needs_grad = torch.is_grad_enabled() and (
        hidden_states.requires_grad or top_k_weights.requires_grad
    )
    if module.kernels is None or needs_grad:
        weights = module.moe_weights()
        return run_experts(weights, hidden_states, top_k_index, top_k_weights)
    # Routers give strided rows and weights of their own types; kernels take what the spec says.
    return module.kernels(
        hidden_states.contiguous(), top_k_index.contiguous(), top_k_weights.float().contiguous()
    )


def _dense_weights(module: Any) -> MoeWeights:
    if not getattr(module, "has_gate", True) or getattr(module, "has_post_expert_norm", False):
        raise InvalidArgumentError(
            f"experts_implementation: {IMPLEMENTATION!r} runs gated experts without a norm after "
            f"them, {type(module).__name__} is not of that kind"
        )
    w13, w2 = module.gate_up_proj, module.down_proj
    if module.is_transposed:
        w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
    return MoeWeights(
        w13=DenseWeights(w13),
        w2=DenseWeights(w2),
        activation=module._apply_gate,
        bias13=module.gate_up_proj_bias if module.has_bias else None,
        bias2=module.down_proj_bias if module.has_bias else None,
    )
