"""The host's indexer modules with another `forward`; sub-modules and their names stay the host's.

Importing this imports the host's models.
"""

from __future__ import annotations

import inspect
import logging
import math
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as deepseek
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm

from firesteel.device import is_capturing
from firesteel.errors import FiresteelError, InvalidArgumentError, UnsupportedError
from firesteel.indexer.torch_backend import round_to_e4m3, top_k_keys
from firesteel.integrations.transformers.index_kernels import IndexKernels, KeyRows
from firesteel.integrations.transformers.index_masks import IndexMask
from firesteel.integrations.transformers.index_pages import IndexPages, adopt

__all__ = ["SWAPPED", "Forward", "IndexerState", "SwappedIndexer"]

log = logging.getLogger(__name__)

_SCALE_BYTES = 4

Rope = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Forward:
    """What all indexers of a forward share.

    Fields
        rows          where the new tokens stand
        is_standard   rows see the keys up to their own, less those that are padding
        padding       bool `[B, S, 1]` of new tokens; None where there is none
        first_hidden  as `IndexMask.first_hidden`
    """

    rows: KeyRows
    is_standard: bool
    padding: Tensor | None
    first_hidden: Tensor


class _Last(threading.local):
    """The last forward that this thread was in."""

    key: tuple[object, ...] | None = None
    layer: int = -1
    forward: Forward | None = None


@dataclass(slots=True)
class SharedState:
    """What all indexers of a swapped model share.

    Fields
        on_kernels  how many run on kernels
        is_warned   whether it was said that some of them no longer do
        last        the last forward, of each thread
    """

    on_kernels: int = 0
    is_warned: bool = False
    last: _Last = field(default_factory=_Last)

    def __reduce__(self) -> tuple[Any, ...]:
        """Of a copy's indexers none is on kernels; said here, where a copy comes by once."""
        if self.on_kernels:
            log.warning(
                "a model was copied or pickled: the copy's indexers run on the PyTorch path; "
                "swap_indexers puts them on kernels again"
            )
        return (SharedState, ())

    def leave(self) -> None:
        """Count an indexer that leaves the kernels, and say so of the first."""
        self.on_kernels -= 1
        if not self.is_warned:
            self.is_warned = True
            log.warning(
                "indexers were moved or converted: they run on the PyTorch path from here; "
                "swap_indexers puts them on kernels again"
            )


@dataclass(slots=True)
class IndexerState:
    """How an indexer of a model runs.

    Fields
        keys         "e4m3" or "host"
        check_masks  whether a mask is looked at before kernels are used
        kernels      None where it runs on PyTorch operators
        shared       the same of all indexers of the model
    """

    keys: str
    check_masks: bool
    kernels: IndexKernels | None
    shared: SharedState

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles go without kernels, which belong to this process and device."""
        return (IndexerState, (self.keys, self.check_masks, None, self.shared))


class SwappedIndexer(nn.Module):
    """An indexer of the host's that selects by `firesteel.indexer`: on kernels, or by PyTorch."""

    rope: ClassVar[Rope]
    """The family's rotation of queries and keys."""
    takes_bool: ClassVar[bool]
    """Whether the host reads a bool mask as one."""
    firesteel: IndexerState
    wq_b: nn.Module
    wk: nn.Module
    k_norm: nn.Module
    weights_proj: Any
    layer_idx: int
    n_heads: int
    head_dim: int
    qk_rope_head_dim: int
    index_topk: int
    softmax_scale: float

    @torch.no_grad()
    def forward(
        self,
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: Any = None,
        *,
        past_key_values: Any = None,
    ) -> Tensor:
        """int32 `[B, S, min(index_topk, T)]`: the keys of each row, ascending.

        A row that has fewer ends in a key that is hidden from it, as the host's own rows do, whose
        attention leaves it out; where none is hidden, as with a NaN among the keys, in its first.

        Args:
            hidden_states: `[B, S, K]`.
            q_resid: `[B, S, q_lora_rank]`.
            position_embeddings: cos and sin.
            attention_mask: `[B, S, T]`, bool or floating; None is causal by `position_ids`.
            position_ids: `[B, S]`.
            cache: the host's, or None.
            past_key_values: what older versions name the cache.

        Raises
            InvalidArgumentError: a cache of another indexer, more keys or requests than planned, or
                a mask that shows a key which was hidden when it was new.
            UnsupportedError: a bool mask, where the host is too old for one, or a mask under CUDA
                graph capture that would have to be checked.
        """
        if attention_mask is not None and attention_mask.dtype == torch.bool:
            self._check_takes_bool()
        cache = past_key_values if cache is None else cache
        q, k = self._queries_and_keys(hidden_states, q_resid, position_embeddings)
        projection = self.weights_proj
        w = projection(hidden_states.to(projection.weight.dtype)).float() * self.n_heads**-0.5
        by_kernels: Any = self._by_kernels
        call = self._by_torch if self.firesteel.kernels is None else by_kernels
        return call(q, k, w, attention_mask, position_ids, cache)

    def _check_takes_bool(self) -> None:
        if not self.takes_bool:
            raise UnsupportedError(
                "attention_mask: got torch.bool, which this version of transformers adds to scores "
                "as if it were a number, must be floating: set attn_implementation='eager'"
            )

    def _queries_and_keys(
        self, hidden_states: Tensor, q_resid: Tensor, position_embeddings: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """q `[B, S, H, D]` and keys `[B, S, D]`, rotated, of the model's type."""
        batch, rows, _ = hidden_states.shape
        cos, sin = position_embeddings
        sizes = [self.qk_rope_head_dim, self.head_dim - self.qk_rope_head_dim]
        q = self.wq_b(q_resid).view(batch, rows, self.n_heads, self.head_dim)
        k = self.k_norm(self.wk(hidden_states)).unsqueeze(2)
        q_turned, q_rest = q.split(sizes, dim=-1)
        k_turned, k_rest = k.split(sizes, dim=-1)
        q_turned, k_turned = type(self).rope(q_turned, k_turned, cos, sin, unsqueeze_dim=2)
        q = torch.cat([q_turned, q_rest], dim=-1)
        return q, torch.cat([k_turned, k_rest], dim=-1).squeeze(2)

    def _by_torch(
        self,
        q: Tensor,
        k: Tensor,
        w: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: Any,
    ) -> Tensor:
        stored = k if self.firesteel.keys == "host" else _packed(k)
        if cache is not None:
            _check_stored(cache.layers[self.layer_idx], stored)
            stored = cache.update_indexer(stored, self.layer_idx)
        keys, scales = (stored, None) if self.firesteel.keys == "host" else _unpacked(stored)
        mask = IndexMask(attention_mask, position_ids, q.shape[0], q.shape[1], keys.shape[1])
        found = self._selected(q, w, keys, scales, mask)
        return _filled(found, mask.first_hidden())

    def _selected(
        self, q: Tensor, w: Tensor, keys: Tensor, scales: Tensor | None, mask: IndexMask
    ) -> Tensor:
        """Positions `[B, S, min(top_k, T)]` by PyTorch, -1 at the end."""
        if scales is None:
            # The host's own operations in its own order, so that scores have its bits.
            options: dict[str, Any] = {"dot_scale": self.softmax_scale}
        else:
            q, w = self._rounded(q, w)
            options = {"key_scales": scales}
        with nullcontext() if scales is None else _without_autocast(q.device.type):
            return top_k_keys(q, w, keys, mask.apply, top_k=self.index_topk, **options)

    def _rounded(self, q: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """q in e4m3, and w with its scales and the softmax's."""
        values, scales = round_to_e4m3(q)
        return values, w * (scales * self.softmax_scale)

    # A compiler cannot trace launches; between two graphs they run as ever.
    @torch.compiler.disable
    def _by_kernels(
        self,
        q: Tensor,
        k: Tensor,
        w: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: Any,
    ) -> Tensor:
        kernels = cast(IndexKernels, self.firesteel.kernels)
        batch, num_rows = k.shape[:2]
        pages = self._pages(kernels, cache, batch)
        kernels.check_room(pages, num_rows)
        num_keys = self._num_keys(pages, num_rows, attention_mask, cache)
        mask = IndexMask(attention_mask, position_ids, batch, num_rows, num_keys)
        pages.grow(num_rows)
        try:
            forward = self._forward_of(pages, mask, cache)
        except FiresteelError:
            pages.crop(num_rows)
            raise
        if forward.padding is not None:
            k = k.masked_fill(forward.padding, math.nan)
            if self.firesteel.check_masks:
                pages.hide(forward.rows.positions, forward.padding.squeeze(-1))
        with pages.turn:
            kernels.write(pages, k, forward.rows)
            if not forward.is_standard:
                found = self._selected(q, w, *pages.keys(num_keys), mask)
                return _filled(found, forward.first_hidden)
            if kernels.has_scales:
                q, w = self._rounded(q, w)
            else:
                w = w * self.softmax_scale
            width = min(self.index_topk, num_keys)
            found = kernels.select(pages, q, w, forward.rows)[..., :width]
        return _filled(found, forward.first_hidden)

    def _pages(self, kernels: IndexKernels, cache: Any, batch: int) -> IndexPages:
        if cache is None:
            return kernels.scratch(batch)
        pages = adopt(cache.layers, self.layer_idx, kernels, batch)
        if pages.batch != batch:
            raise InvalidArgumentError(
                f"cache: holds {pages.batch} requests, the call has {batch}, must be as many"
            )
        return pages

    def _num_keys(
        self, pages: IndexPages, num_rows: int, attention_mask: Tensor | None, cache: Any
    ) -> int:
        """T: as many keys as the mask has columns.

        Raises
            InvalidArgumentError: the mask has not a column for each key.
        """
        if pages.length is None:
            wanted = int(cache.layers[self.layer_idx].max_cache_len)
        else:
            wanted = pages.length + num_rows
        if attention_mask is not None and attention_mask.shape[-1] != wanted:
            raise InvalidArgumentError(
                f"attention_mask: got {attention_mask.shape[-1]} columns, must have one for each "
                f"of {wanted} keys"
            )
        return wanted

    def _forward_of(self, pages: IndexPages, mask: IndexMask, cache: Any) -> Forward:
        """What this forward's mask comes to: found by its first layer, and kept for the others.

        Layers come in order, so a layer that is not after the last one begins another forward,
        even one of the same mask.
        """
        last = self.firesteel.shared.last
        # Hooks that move what a module is given make masks of their own for each layer.
        mask_key = None if "_hf_hook" in self.__dict__ else mask.key()
        key = (mask_key, id(cache), mask.num_rows, pages.length, pages.data.device)
        if last.forward is None or key != last.key or self.layer_idx <= last.layer:
            last.key, last.forward = None, _look_at(pages, mask, self.firesteel.check_masks)
            last.key = key
        last.layer = self.layer_idx
        return last.forward

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        before = self._kinds()
        found = super()._apply(fn, recurse)
        if self.firesteel.kernels is not None and self._kinds() != before:
            self.firesteel.kernels = None
            self.firesteel.shared.leave()
        return found

    def _kinds(self) -> list[tuple[torch.device, torch.dtype]]:
        return [(each.device, each.dtype) for each in self.parameters()]


def _look_at(pages: IndexPages, mask: IndexMask, check: bool) -> Forward:
    """Check a forward's mask: the one wait for the device, and none where it is trusted.

    Raises
        InvalidArgumentError: it shows keys that are lost.
        UnsupportedError: it would have to be waited for under CUDA graph capture.
    """
    rows = KeyRows.of(pages, mask.num_rows)
    is_seen = mask.seen(rows.positions)
    is_standard, has_padding = True, True
    if check:
        if is_capturing(pages.data.device):
            raise UnsupportedError(
                "attention_mask: cannot be looked at under CUDA graph capture; swap_indexers with "
                "check_masks=False promises that masks are causal with padding"
            )
        is_kept = pages.is_valid(mask.num_keys).scatter(1, rows.positions, True)
        is_valid = is_kept.scatter(1, rows.positions, is_seen)
        flags = [mask.differs(rows.positions, is_valid), ~is_seen.all()]
        if pages.hidden is not None:
            flags.append(mask.shows(~is_kept))
        differs, has_padding, *shows_lost = torch.stack(flags).tolist()
        if any(shows_lost):
            raise InvalidArgumentError(
                "attention_mask: shows a key that was hidden from its own row when it was new, and "
                "so was not kept; must hide it for as long as the cache lives (a model whose "
                "indexers run on PyTorch operators keeps such keys)"
            )
        is_standard = not differs
    padding = ~is_seen.unsqueeze(-1) if has_padding and is_standard else None
    return Forward(rows, is_standard, padding, mask.first_hidden())


def _without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Products are fp32 in it, as on kernels; autocast's are 16-bit, as the host's own then are."""
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def _filled(found: Tensor, first_hidden: Tensor) -> Tensor:
    """Selections `[B, S, k]` with a key in place of -1: a hidden one, or the row's first again."""
    filler = torch.where(first_hidden < 0, found[..., :1].clamp(min=0), first_hidden)
    return torch.where(found < 0, filler, found)


def _packed(keys: Tensor) -> Tensor:
    """uint8 `[B, S, D + 4]` of keys `[B, S, D]`: e4m3 values, then the scale."""
    values, scales = round_to_e4m3(keys)
    parts = (values.view(torch.uint8), scales.unsqueeze(-1).view(torch.uint8))
    return torch.cat(parts, dim=-1)


def _unpacked(stored: Tensor) -> tuple[Tensor, Tensor]:
    """Values `[B, T, D]` and scales `[B, T]`."""
    values, scales = stored.split([stored.shape[-1] - _SCALE_BYTES, _SCALE_BYTES], dim=-1)
    return values.view(torch.float8_e4m3fn), scales.contiguous().view(torch.float32).squeeze(-1)


def _check_stored(layer: Any, new: Tensor) -> None:
    """Refuse a cache that holds keys of another kind.

    Raises
        InvalidArgumentError: it does.
    """
    old = getattr(layer, "indexer_keys", None)
    if old is not None and old.numel():
        found, wanted = (old.dtype, old.shape[-1]), (new.dtype, new.shape[-1])
        if found != wanted:
            raise InvalidArgumentError(
                f"cache: its index keys are {found[0]} of {found[1]} columns, must be {wanted[0]} "
                f"of {wanted[1]}; start with a new cache after swap_indexers"
            )


def _takes_bool(indexer: type[nn.Module]) -> bool:
    """Whether the code of the host's forward asks for the type of its mask."""
    return "bool" in inspect.unwrap(indexer.forward).__code__.co_names


class SwappedGlmMoeDsaIndexer(SwappedIndexer, glm.GlmMoeDsaIndexer):
    """Of GLM-MoE-DSA: rotates neighbouring columns."""

    rope = staticmethod(glm.apply_rotary_pos_emb_interleave)
    takes_bool = _takes_bool(glm.GlmMoeDsaIndexer)


class SwappedDeepseekV32Indexer(SwappedIndexer, deepseek.DeepseekV32Indexer):
    """Of DeepSeek-V3.2: rotates one half with the other."""

    rope = staticmethod(deepseek.apply_rotary_pos_emb)
    takes_bool = _takes_bool(deepseek.DeepseekV32Indexer)


SWAPPED: dict[type[nn.Module], type[SwappedIndexer]] = {
    glm.GlmMoeDsaIndexer: SwappedGlmMoeDsaIndexer,
    deepseek.DeepseekV32Indexer: SwappedDeepseekV32Indexer,
}
"""Of each indexer of the host's the class that takes its place."""
