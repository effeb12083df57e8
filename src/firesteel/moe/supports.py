"""From how a checkpoint stores a layer's matrices to the `MoeSpec` that plans it, or why not."""

from __future__ import annotations

import torch
from torch import Tensor

from firesteel.errors import UnsupportedError
from firesteel.formats.base import Scheme
from firesteel.launch.key import DTYPES
from firesteel.moe.activation import Activation
from firesteel.moe.spec import LAYER_DTYPES, MoeSpec, StoredWeights, check_weights

__all__ = ["RECIPES", "check_scale_range", "dtype_name", "moe_spec_of"]

RECIPES = (
    "int3 and int4 with -g32, -g64 or -g128, each also with -asym, mxfp4, nvfp4, nf3, and exl3 of "
    "whole bits"
)
"""The recipes that kernels exist for, in words for error messages."""

MAX_E8M0 = {"bf16": 160, "fp16": 128}
"""The largest MXFP4 scale byte whose weights are numbers in a kernel, by the layer's dtype."""

_INTEGERS = ("bf16", "fp16", "fp32")
_SCALES = {"int3": _INTEGERS, "int4": _INTEGERS, "e2m1": ("e8m0", "e4m3"), "nf3": ("e5m3",)}


def moe_spec_of(
    w13: Scheme,
    w2: Scheme,
    *,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    top_k: int,
    activation: Activation,
    dtype: torch.dtype,
    has_bias: bool,
    num_global_experts: int | None = None,
) -> MoeSpec:
    """The layer whose gate and up are all stored as `w13` says, and whose down as `w2`.

    Args:
        w13, w2: of one matrix each: gate or up `[intermediate, hidden]`, down
            `[hidden, intermediate]`.
        dtype: of activations and biases.
        num_global_experts: length of the expert map, where calls give ids of all ranks' experts.

    Raises
        UnsupportedError: no kernel reads it; the message has every reason.
        InvalidArgumentError: a size is not positive, or `top_k` is larger than the experts.
    """
    reasons: list[str] = []
    name = ""
    try:
        name = dtype_name(dtype)
    except UnsupportedError as error:
        reasons.append(str(error))
    if hidden_size % 8:
        reasons.append(f"hidden_size: got {hidden_size}, must be a multiple of 8")
    up, down = (intermediate_size, hidden_size), (hidden_size, intermediate_size)
    reasons += _reasons("gate and up", w13, up)
    reasons += _reasons("down", w2, down)
    if reasons:
        raise UnsupportedError(f"no kernel for these experts: {'; '.join(reasons)}")
    return MoeSpec(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_experts=num_experts,
        top_k=top_k,
        dtype=name,
        w13=_stored(w13, has_bias),
        w2=_stored(w2, has_bias),
        activation=activation,
        num_global_experts=num_global_experts,
    )


def dtype_name(dtype: torch.dtype) -> str:
    """The name that specs have for the type of a layer's activations.

    Raises
        UnsupportedError: kernels take no activations of this type.
    """
    names = {DTYPES[name]: name for name in LAYER_DTYPES}
    if dtype not in names:
        raise UnsupportedError(f"dtype: got {dtype}, must be bfloat16 or float16")
    return names[dtype]


def check_scale_range(spec: MoeSpec, *, w13: Tensor, w2: Tensor) -> None:
    """The scales of a layer, as kernels are given them, are not too large for its dtype.

    Only those of MXFP4 can be: 2**33 is the largest in bf16, 2 in fp16. Waits for the device.

    Raises
        UnsupportedError: they are; a kernel's weights would be infinite.
    """
    limit = MAX_E8M0[spec.dtype]
    for name, stored, scales in (("gate and up", spec.w13, w13), ("down", spec.w2, w2)):
        if stored.element == "mxfp4" and int(scales.max()) > limit:
            raise UnsupportedError(
                f"{name}: has a scale of 2**{int(scales.max()) - 127}, must be at most "
                f"2**{limit - 127} in {spec.dtype}"
            )


def _stored(scheme: Scheme, has_bias: bool) -> StoredWeights:
    fp4 = {"e8m0": "mxfp4", "e4m3": "nvfp4"}
    return StoredWeights(
        element=fp4[scheme.scale] if scheme.element == "e2m1" else scheme.element,
        group_size=scheme.group_size,
        scale=scheme.scale,
        has_zero_points=scheme.has_zero_points,
        has_bias=has_bias,
        global_scale=scheme.global_scale,
    )


def _reasons(name: str, scheme: Scheme, shape: tuple[int, int]) -> list[str]:
    """Why no kernel reads matrices of this scheme; nothing where one does."""
    found: list[str] = []
    if (scheme.n, scheme.k) != shape:
        found.append(
            f"{name}: matrices are {[scheme.n, scheme.k]}, the layer's sizes give {list(shape)}"
        )
    if scheme.element not in _SCALES:
        found.append(f"{name}: element is {scheme.element}, must be one of {', '.join(_SCALES)}")
    elif scheme.scale not in _SCALES[scheme.element]:
        allowed = ", ".join(_SCALES[scheme.element])
        found.append(
            f"{name}: scales are {scheme.scale}, must be one of {allowed} of {scheme.element}"
        )
    else:
        try:
            check_weights(name, _stored(scheme, has_bias=False), scheme.k)
        except UnsupportedError as error:
            found.append(str(error))
    if scheme.has_group_index:
        found.append(f"{name}: columns name their group (act-order), must lie in order")
    return found
