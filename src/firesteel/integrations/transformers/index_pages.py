"""Index keys in pages that belong to a layer of the host's cache, and do what the layer does.

`adopt` puts in place of a layer of the host's that has no index keys yet one that keeps them in
pages: of a subclass of the layer's class, with the same attributes. Main keys and values stay the
host's.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicIndexedLayer, StaticIndexedLayer

from firesteel.errors import InvalidArgumentError
from firesteel.indexer.pages import HEAD_SIZE, PAGE_TOKENS, VALUE_BYTES

if TYPE_CHECKING:
    from firesteel.integrations.transformers.index_kernels import IndexKernels
    from firesteel.launch import Bound

__all__ = ["IndexPages", "PagedDynamicLayer", "PagedStaticLayer", "ScratchPages", "adopt"]


class IndexPages:
    """The index keys of a layer: the same number of pages for each request.

    Fields
        kernels   that read and write them; they own the page table
        data      uint8 `[B, pages, page_bytes]`
        seq_lens  int32 `[B]`: keys that each request has
        length    the same on the host; None where only the device knows (static caches)
        hidden    bool `[B, capacity]`: keys that were hidden from their own rows, and so written as
                  NaN; None where none was
        bounds    operations bound to `memory`, by kind and stream
    """

    def __init__(
        self, kernels: IndexKernels, batch: int, num_pages: int, *, is_static: bool
    ) -> None:
        self.kernels = kernels
        shape = (batch, num_pages, kernels.page_bytes)
        # What inference mode makes, nothing outside of it may write.
        with torch.inference_mode(False):
            self.data = torch.empty(shape, dtype=torch.uint8, device=kernels.device)
            self.seq_lens = torch.zeros(batch, dtype=torch.int32, device=kernels.device)
        self.length: int | None = None if is_static else 0
        self.hidden: Tensor | None = None
        self.bounds: dict[tuple[str, int], Bound] = {}

    @property
    def memory(self) -> Tensor:
        """uint8 `[bytes]`: what operations are bound to."""
        return self.data.view(-1)

    @property
    def turn(self) -> AbstractContextManager[object]:
        """Held from where keys are written to where they were selected from."""
        return nullcontext()

    @property
    def batch(self) -> int:
        """Requests."""
        return self.data.shape[0]

    @property
    def num_pages(self) -> int:
        """Pages of each request."""
        return self.data.shape[1]

    @property
    def capacity(self) -> int:
        """Most keys of a request."""
        return self.num_pages * PAGE_TOKENS

    def positions(self, num_rows: int) -> Tensor:
        """int64 `[B, S]`: where the last so many tokens of each request stand."""
        ends = self.seq_lens.long()[:, None]
        return ends - num_rows + torch.arange(num_rows, device=self.data.device)

    def grow(self, num_tokens: int) -> None:
        """Count new tokens of each request, whose keys are written next."""
        self.seq_lens += num_tokens
        if self.length is not None:
            self.length += num_tokens

    def crop(self, num_tokens: int) -> None:
        """Forget the last so many tokens of each request."""
        self.seq_lens -= num_tokens
        if self.length is not None:
            self.length -= num_tokens
        if self.hidden is not None:
            self.hidden &= (
                torch.arange(self.capacity, device=self.data.device) < (self.seq_lens[:, None])
            )

    def reset(self, length: int) -> None:
        """Forget all; where the host keeps its length, as 5.16 does, keys are zeros."""
        if length:
            self.data.zero_()
        self.hidden = None
        self.seq_lens.fill_(length)
        if self.length is not None:
            self.length = length

    def reorder(self, requests: Tensor) -> None:
        """Request b becomes a copy of `requests[b]`; of as many, the pages stay where they are."""
        if len(requests) != self.batch:
            self.select(requests)
            return
        live = self.num_pages if self.length is None else -(-self.length // PAGE_TOKENS)
        part = self.data[:, :live]
        for each in (part,) if self.hidden is None else (part, self.hidden):
            each.copy_(each.index_select(0, requests.to(each.device)))

    def repeat(self, repeats: int) -> None:
        """Take each request so many times; what was bound is bound anew."""
        requests = torch.arange(self.batch, device=self.data.device)
        self.select(requests.repeat_interleave(repeats))

    def select(self, requests: Tensor) -> None:
        """Take these requests; what was bound is bound anew."""
        with torch.inference_mode(False):
            self.data, self.seq_lens = self.data[requests], self.seq_lens[requests]
            if self.hidden is not None:
                self.hidden = self.hidden[requests]
        self.bounds.clear()

    def hide(self, positions: Tensor, is_hidden: Tensor) -> None:
        """Note which of the keys at int64 `[B, S]` are written as NaN, bool `[B, S]`."""
        if self.hidden is None:
            shape = (self.batch, self.capacity)
            with torch.inference_mode(False):
                self.hidden = torch.zeros(shape, dtype=torch.bool, device=self.data.device)
        self.hidden.scatter_(1, positions, is_hidden)

    def keys(self, num_keys: int) -> tuple[Tensor, Tensor | None]:
        """The first keys `[B, T, 128]`, and the scales `[B, T]` of those of e4m3; a copy."""
        live = self.data[:, : -(-num_keys // PAGE_TOKENS)]
        values, scales = self._values(live), None
        if self.kernels.has_scales:
            scales = live[:, :, VALUE_BYTES:].contiguous().view(torch.float32)
            scales = scales.reshape(self.batch, -1)[:, :num_keys]
        return values.reshape(self.batch, -1, HEAD_SIZE)[:, :num_keys], scales

    def is_valid(self, num_keys: int) -> Tensor:
        """bool `[B, T]`: whether a key was not hidden from its own row."""
        if self.hidden is None:
            shape = (self.batch, num_keys)
            return torch.ones(shape, dtype=torch.bool, device=self.data.device)
        return ~self.hidden[:, :num_keys]

    def _values(self, live: Tensor) -> Tensor:
        """`[B, pages, 64, 128]` of pages."""
        dtype = self.kernels.cache_dtype
        values = live[:, :, : PAGE_TOKENS * HEAD_SIZE * dtype.itemsize].view(dtype)
        return values.unflatten(-1, (PAGE_TOKENS, HEAD_SIZE))

    def __getstate__(self) -> dict[str, Any]:
        """Copies bind for themselves."""
        return {**self.__dict__, "bounds": {}}


class ScratchPages(IndexPages):
    """The first requests of pages that all calls without a cache on one stream share.

    Fields
        whole  the pages of as many requests as were planned
        lock   held by the call whose keys are in them
    """

    def __init__(self, whole: IndexPages, lock: threading.Lock, batch: int) -> None:
        self.kernels = whole.kernels
        self.data, self.bounds = whole.data[:batch], whole.bounds
        self.seq_lens = torch.zeros_like(whole.seq_lens[:batch])
        self.length, self.hidden = 0, None
        self.whole, self.lock = whole, lock

    @property
    def memory(self) -> Tensor:
        """All of the pages, so that what is bound serves every number of requests."""
        return self.whole.memory

    @property
    def turn(self) -> AbstractContextManager[object]:
        """The lock: a call of another thread's must not write in between."""
        return self.lock

    def hide(self, positions: Tensor, is_hidden: Tensor) -> None:
        """Nothing: no later call has these keys."""
        del positions, is_hidden


class _PagedLayer:
    """What a layer of the host's cache does to its index keys, done to pages."""

    index_pages: IndexPages

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Refused: only the kernels that the pages were made for write them.

        Raises
            InvalidArgumentError: always.
        """
        raise InvalidArgumentError(
            "cache: its index keys are in pages of kernels that this model's indexers do not (or "
            "no longer) run on, must be a new cache"
        )

    def reset(self) -> None:
        """As the host's."""
        super().reset()  # pyright: ignore
        length: Any = self.get_seq_length()  # pyright: ignore
        self.index_pages.reset(0 if self.index_pages.length is None else int(length))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """As the host's."""
        super().reorder_cache(beam_idx)  # pyright: ignore
        self.index_pages.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """As the host's."""
        super().batch_repeat_interleave(repeats)  # pyright: ignore
        self.index_pages.repeat(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """As the host's."""
        super().batch_select_indices(indices)  # pyright: ignore
        self.index_pages.select(indices)


class PagedDynamicLayer(_PagedLayer, DynamicIndexedLayer):
    """A dynamic layer whose index keys are in pages."""

    def crop(self, tokens_to_remove: int) -> None:
        """As the host's, whose oldest version takes a positive number to be what is left."""
        before: Any = self.get_seq_length()
        super().crop(tokens_to_remove)
        self.index_pages.crop(int(before) - int(self.get_seq_length()))


class PagedStaticLayer(_PagedLayer, StaticIndexedLayer):
    """A static layer whose index keys are in pages."""

    def crop(self, tokens_to_remove: int) -> None:
        """As the host's, where it can."""
        super().crop(tokens_to_remove)  # pyright: ignore
        self.index_pages.crop(abs(tokens_to_remove))


_PAGED = {DynamicIndexedLayer: PagedDynamicLayer, StaticIndexedLayer: PagedStaticLayer}


def adopt(layers: list[Any], layer_idx: int, kernels: IndexKernels, batch: int) -> IndexPages:
    """The pages of one of a cache's layers for these kernels; made at its first call.

    Raises
        InvalidArgumentError: the layer has index keys of something else, is of a kind without
            any, or is longer than was planned.
    """
    layer = layers[layer_idx]
    if isinstance(layer, _PagedLayer):
        pages = layer.index_pages
        if pages.kernels is not kernels:
            layer.update_indexer(pages.seq_lens)
        if pages.length == 0 and pages.batch != batch:
            # After a reset any number of requests may begin.
            kernels.check_batch(batch)
            layer.index_pages = IndexPages(kernels, batch, pages.num_pages, is_static=False)
        return layer.index_pages
    kind = _PAGED.get(type(layer))
    if kind is None:
        raise InvalidArgumentError(
            f"cache: its layer is a {type(layer).__name__}, must be one of "
            f"{', '.join(known.__name__ for known in _PAGED)} for indexers on kernels"
        )
    if layer.is_indexer_initialized and layer.indexer_keys.numel():
        raise InvalidArgumentError(
            "cache: holds index keys from before swap_indexers, must be a new cache"
        )
    is_static = kind is PagedStaticLayer
    num_pages = kernels.width
    if is_static:
        num_pages = -(-layer.max_cache_len // PAGE_TOKENS)
        if layer.max_cache_len > kernels.max_keys:
            raise InvalidArgumentError(
                f"cache: a static one of {layer.max_cache_len} keys, max_keys of swap_indexers is "
                f"{kernels.max_keys}"
            )
    kernels.check_batch(batch)
    made: Any = kind.__new__(kind)
    # The same dictionary: whoever holds the old layer sees what becomes of it.
    made.__dict__ = layer.__dict__
    made.index_pages = IndexPages(kernels, batch, num_pages, is_static=is_static)
    layers[layer_idx] = made
    return layer.index_pages
