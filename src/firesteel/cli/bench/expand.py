"""The host's own bf16 twin of a model that firesteel packed, for comparisons."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from firesteel.errors import UnsupportedError
from firesteel.formats.packed import WeightStack

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["expand_model"]


@torch.no_grad()
def expand_model(packed: PreTrainedModel, implementation: str) -> PreTrainedModel:
    """transformers' own bf16 model with the numbers of a packed one, on the same device.

    What is not packed and bf16 already is shared: the twin takes the memory of its experts only.

    Args:
        packed: loaded by firesteel.
        implementation: transformers' name of how experts run, such as "grouped_mm".

    Raises
        UnsupportedError: the experts have biases, or nothing is packed.
    """
    from firesteel.integrations.transformers import PackedExperts, PackedLinear

    config: Any = copy.deepcopy(packed.config)
    vars(config).pop("quantization_config", None)
    config.dtype = torch.bfloat16
    config._experts_implementation = implementation
    with torch.device("meta"):
        # transformers' annotations do not say that each class of models takes a config.
        twin: nn.Module = type(packed)(config)  # pyright: ignore[reportCallIssue]
    num_expanded = 0
    own = dict(packed.named_modules())
    for path, module in twin.named_modules():
        source = own.get(path)
        if isinstance(source, PackedExperts):
            if source.gate_up_bias is not None:
                raise UnsupportedError("--model: experts with biases are not measured")
            module.gate_up_proj = _frozen(_expand(source.gate_up))
            module.down_proj = _frozen(_expand(source.down))
            num_expanded += 1
        elif isinstance(source, PackedLinear):
            module.weight = _frozen(source.weight)
            if source.bias is not None:
                module.bias = source.bias
            num_expanded += 1
        elif source is not None:
            _share(source, module, packed.dtype)
    if not num_expanded:
        raise UnsupportedError("--model: nothing of it is packed, there is nothing to compare")
    return twin.eval()  # pyright: ignore[reportReturnType]


def _share(source: nn.Module, module: nn.Module, dtype: torch.dtype) -> None:
    """Give a module the tensors of its packed model's; those of the model's `dtype` as bf16.

    Buffers are of a type of their own, as are parameters that the host keeps in fp32.
    """
    for name, buffer in source.named_buffers(recurse=False):
        setattr(module, name, buffer)
    for name, parameter in source.named_parameters(recurse=False):
        is_converted = parameter.dtype == dtype != torch.bfloat16
        setattr(module, name, _frozen(parameter) if is_converted else parameter)


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.to(torch.bfloat16), requires_grad=False)


def _expand(weights: WeightStack) -> Tensor:
    """`[E, P*n, k]` bf16 in the natural order of columns, one matrix at a time."""
    device = next(weights.buffers()).device
    dense = torch.empty(weights.shape, dtype=torch.bfloat16, device=device)
    n = weights.scheme.n
    for index in range(weights.num_matrices):
        for part in range(weights.num_parts):
            scheme = weights.scheme_of(index, part)
            matrix = weights.read(index, part).dequantize(scheme, torch.bfloat16)
            dense[index, part * n : (part + 1) * n] = matrix
    return dense
