# vLLM is not there where types are checked.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportAttributeAccessIssue=false
# pyright: reportUnknownParameterType=false
"""Quantised linears in vLLM: expanded into the engine's own parameter when they are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import QKVParallelLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
)

from firesteel.checkpoint.sources import QuantizedSource
from firesteel.integrations.vllm.model import Model

__all__ = ["FiresteelHead", "FiresteelLinear"]

_QKV = ("q", "k", "v")


class _Expanded:
    """Fills the parameter of an engine's unquantised method, whose loader cuts it for the rank."""

    def __init__(self, model: Model, sources: Sequence[QuantizedSource | None]) -> None:
        super().__init__()
        self.model = model
        self._sources = sources

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Expand, then as the engine does."""
        self._expand(layer)
        super().process_weights_after_loading(layer)  # pyright: ignore

    def _expand(self, layer: Any) -> None:
        """Read, round once to the parameter's type, and hand each matrix to the engine's loader.

        Raises
            CheckpointError: a matrix cannot be read, or has another shape than the module's.
        """
        weight = layer.weight
        self.model.read.append(layer)
        with self.model.checkpoint.reader() as reader, torch.no_grad():
            for place, source in enumerate(self._sources):
                if source is None:
                    continue
                source = source.fitted(list(_shape_of(layer, place)), "the engine's")
                matrix = source.read(reader).dequantize(source.scheme, weight.dtype)
                matrix = matrix.to(weight.device)
                if len(self._sources) == 1:
                    weight.weight_loader(weight, matrix)
                else:
                    shard = _QKV[place] if isinstance(layer, QKVParallelLinear) else place
                    weight.weight_loader(weight, matrix, shard)


def _shape_of(layer: Any, place: int) -> tuple[int, int]:
    """Rows and columns, over all ranks, of one matrix of a module."""
    if isinstance(layer, ParallelLMHead):
        return (layer.org_vocab_size, layer.embedding_dim)
    if isinstance(layer, QKVParallelLinear):
        rows = (
            layer.total_num_heads * layer.head_size,
            layer.total_num_kv_heads * layer.head_size,
            layer.total_num_kv_heads * layer.v_head_size,
        )
        return (rows[place], layer.input_size)
    sizes = getattr(layer, "output_sizes", None)
    return (layer.output_size if sizes is None else sizes[place], layer.input_size)


class FiresteelLinear(_Expanded, UnquantizedLinearMethod):
    """A linear of one or more matrices, of which some are quantised."""


class FiresteelHead(_Expanded, UnquantizedEmbeddingMethod):
    """A quantised `lm_head`."""
