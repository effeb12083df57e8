"""The kernels of a model's indexers on one device: planned and prewarmed once, bound to caches."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from firesteel.device import is_capturing, stream_getter
from firesteel.errors import InvalidArgumentError, UnsupportedError
from firesteel.indexer.pages import HEAD_SIZE, PAGE_TOKENS
from firesteel.indexer.spec import (
    MAX_HEADS,
    MAX_ROWS,
    TOP_KS,
    DecodeSpec,
    PageWriterSpec,
    PrefillSpec,
)
from firesteel.integrations.transformers.index_pages import IndexPages, ScratchPages
from firesteel.launch import Arena, Bound, Ready
from firesteel.launch.key import DTYPES
from firesteel.launch.spec import Spec
from firesteel.modules.kernels import Arenas

__all__ = ["IndexKernels", "IndexSpecs", "KeyRows", "index_specs"]

MIN_HEADS = 8
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSpecs:
    """What a model's indexers need planned.

    Fields
        writer, decode, prefill  the operations; decode of 1, 2, .. rows, more of which are prefill
        max_keys                 most keys of a request; pages are whole ones
        max_requests, max_rows   largest counts of decode, and of writer and prefill
        cache_dtype              of the keys in pages
    """

    writer: PageWriterSpec
    decode: tuple[DecodeSpec, ...]
    prefill: PrefillSpec
    max_keys: int
    max_requests: int
    max_rows: int
    cache_dtype: torch.dtype

    def for_target(self, target: str) -> IndexSpecs:
        """The same with what kernels for a target ("sm_90") may use.

        Raises
            UnsupportedError: no kernels for it.
        """
        if self.cache_dtype not in _SIXTEEN_BITS and int(target.removeprefix("sm_")) < 89:
            raise UnsupportedError(f"device: {target}, kernels for e4m3 keys need sm_89 or later")
        return replace(
            self,
            writer=self.writer.for_target(target),
            decode=_supported(self.decode, target),
            prefill=self.prefill.for_target(target),
        )


def _supported(specs: tuple[DecodeSpec, ...], target: str) -> tuple[DecodeSpec, ...]:
    """Those of the fewest rows, up to one that a target has no kernels for."""
    found = [specs[0].for_target(target)]
    for spec in specs[1:]:
        try:
            found.append(spec.for_target(target))
        except UnsupportedError:
            break
    return tuple(found)


def index_specs(
    *,
    num_heads: int,
    head_dim: int,
    top_k: int,
    dtype: torch.dtype,
    keys: str,
    max_keys: int,
    max_requests: int,
    max_rows: int,
) -> IndexSpecs:
    """The operations of indexers of this geometry.

    Args:
        dtype: of the model.
        keys: "e4m3" or "host", the model's own type.
        max_keys, max_requests, max_rows: as `swap_indexers` has them.

    Raises
        UnsupportedError: no kernels for the heads, their size, top_k or the model's type.
    """
    if head_dim != HEAD_SIZE:
        raise UnsupportedError(f"index_head_dim: got {head_dim}, kernels have {HEAD_SIZE}")
    if not MIN_HEADS <= num_heads <= MAX_HEADS:
        raise UnsupportedError(
            f"index_n_heads: got {num_heads}, kernels have {MIN_HEADS} to {MAX_HEADS}"
        )
    if top_k not in TOP_KS:
        allowed = ", ".join(map(str, TOP_KS))
        raise UnsupportedError(f"index_topk: got {top_k}, kernels have {allowed}")
    is_host = keys == "host"
    if dtype not in (_SIXTEEN_BITS if is_host else _NAMES):
        raise UnsupportedError(
            f"dtype: got {dtype}, kernels that keep keys as the host does have bfloat16 and float16"
        )
    cache_dtype = _NAMES[dtype] if is_host else "e4m3"
    sizes: dict[str, Any] = {
        "num_heads": num_heads,
        "top_k": top_k,
        "width": -(-max_keys // PAGE_TOKENS),
        "cache_dtype": cache_dtype,
    }
    return IndexSpecs(
        writer=PageWriterSpec(dtype=_NAMES[dtype], cache_dtype=cache_dtype),
        decode=tuple(DecodeSpec(rows=rows, **sizes) for rows in range(1, MAX_ROWS + 1)),
        prefill=PrefillSpec(num_requests=max_requests, **sizes),
        max_keys=max_keys,
        max_requests=max_requests,
        max_rows=max_rows,
        cache_dtype=dtype if is_host else torch.float8_e4m3fn,
    )


@dataclass(frozen=True, slots=True)
class KeyRows:
    """Where the new tokens of a call stand: the same for all layers of a forward.

    Fields
        positions    int64 `[B, S]` in their requests
        slots        int64 `[B * S]` in pages
        row_request  int32 `[B * S]`
        key_ends     int32 `[B * S]`: keys that a row may see
    """

    positions: Tensor
    slots: Tensor
    row_request: Tensor
    key_ends: Tensor

    @classmethod
    def of(cls, pages: IndexPages, num_rows: int) -> KeyRows:
        """Those of the last so many tokens."""
        positions = pages.positions(num_rows)
        requests = torch.arange(pages.batch, device=positions.device)[:, None]
        slots = positions + requests * pages.capacity
        ends = (positions + 1).int()
        return cls(
            positions=positions,
            slots=slots.flatten(),
            row_request=requests.expand_as(positions).int().flatten(),
            key_ends=ends.flatten(),
        )


class IndexKernels:
    """The indexers' operations on one device, with an arena for each stream that calls them.

    Args:
        specs: for the device's target.
        device: where.
        prepare: makes a spec ready for so many tokens.
    """

    def __init__(
        self, specs: IndexSpecs, device: torch.device, prepare: Callable[[Spec, int], Ready]
    ) -> None:
        self.specs = specs
        self.device = device
        self.max_keys = specs.max_keys
        self.cache_dtype = specs.cache_dtype
        self.key_dtype = DTYPES[specs.writer.dtype]
        self.has_scales = specs.cache_dtype not in _SIXTEEN_BITS
        self.page_bytes = specs.prefill.page_stride
        self.width = specs.decode[0].width
        self.ready: dict[str, Ready] = {"write": prepare(specs.writer, specs.max_rows)}
        self.ready["prefill"] = prepare(specs.prefill, specs.max_rows)
        for spec in specs.decode:
            self.ready[f"decode {spec.rows}"] = prepare(spec, specs.max_requests)
        num_bytes = max(ready.plan.workspace.num_bytes for ready in self.ready.values())
        self._arenas = Arenas(num_bytes, device)
        self._stream_of = stream_getter(device)
        self._tables: dict[int, Tensor] = {}
        self._scratch: dict[int, tuple[IndexPages, threading.Lock]] = {}
        self._lock = threading.Lock()
        self._table(self.width)
        self._scratch_of(self._stream())

    def check_batch(self, batch: int) -> None:
        """Refuse more requests than were planned.

        Raises
            InvalidArgumentError: the message names the limit.
        """
        if batch > self.specs.max_requests:
            raise InvalidArgumentError(
                f"batch: got {batch} requests, max_requests of swap_indexers is "
                f"{self.specs.max_requests}"
            )

    def check_room(self, pages: IndexPages, num_rows: int) -> None:
        """Refuse new tokens that pages have no room for.

        Raises
            InvalidArgumentError: the message names the limit.
        """
        self.check_batch(pages.batch)
        length = (pages.length or 0) + num_rows
        if length > self.max_keys:
            raise InvalidArgumentError(
                f"cache: {length} keys a request, max_keys of swap_indexers is {self.max_keys}"
            )
        if length > pages.capacity:
            raise InvalidArgumentError(
                f"cache: {length} keys a request, a static one has pages for {pages.capacity}"
            )

    def scratch(self, batch: int) -> ScratchPages:
        """Empty pages for a call without a cache; the next call without one writes them again."""
        self.check_batch(batch)
        return ScratchPages(*self._scratch_of(self._stream()), batch)

    def write(self, pages: IndexPages, keys: Tensor, rows: KeyRows) -> None:
        """Put new keys `[B, S, 128]` into pages, rounded to the model's type first."""
        bound = self._bound(pages, "write")
        # Under autocast the host's norm gives fp32 of a 16-bit model, which its products round.
        flat = keys.reshape(-1, HEAD_SIZE).to(self.key_dtype)
        for start in range(0, len(flat), self.specs.max_rows):
            part = slice(start, start + self.specs.max_rows)
            bound.run(flat[part], rows.slots[part])

    def select(self, pages: IndexPages, q: Tensor, w: Tensor, rows: KeyRows) -> Tensor:
        """Positions int32 `[B, S, top_k]`, -1 at the end, of q `[B, S, H, 128]` and w `[B, S, H]`.

        q is rounded to the pages' dtype; w is fp32 and holds all that is not the keys'.
        """
        q = q.to(self.cache_dtype)
        batch, num_rows = q.shape[:2]
        top_k = self.specs.prefill.top_k
        shape = (batch, num_rows, top_k)
        indices = torch.empty(shape, dtype=torch.int32, device=self.device)
        if num_rows <= len(self.specs.decode):
            bound = self._bound(pages, f"decode {num_rows}")
            table = self._table(pages.num_pages)[:batch]
            bound.run(q, w, table, pages.seq_lens, indices)
            return indices
        bound = self._bound(pages, "prefill")
        flat_q, flat_w = q.flatten(0, 1), w.flatten(0, 1)
        flat = indices.flatten(0, 1)
        for start in range(0, len(flat), self.specs.max_rows):
            part = slice(start, start + self.specs.max_rows)
            ranges = (rows.row_request[part], rows.key_ends[part])
            bound.run(flat_q[part], flat_w[part], *ranges, flat[part])
        return indices

    def _stream(self) -> int:
        return self._stream_of(self.device.index or 0)

    def _bound(self, pages: IndexPages, name: str) -> Bound:
        stream = self._stream()
        found = pages.bounds.get((name, stream))
        if found is None:
            tensors = {"cache": pages.memory}
            if name == "prefill":
                tensors["page_table"] = self._table(pages.num_pages)
            flags = {"slots": "i64"} if name == "write" else {}
            found = self.ready[name].bind(tensors, self._arena(stream), **flags)
            pages.bounds[name, stream] = found
        return found

    def _arena(self, stream: int) -> Arena:
        # Memory taken during capture would be the graph's; the order of replays is its owner's.
        return self._arenas.first if is_capturing(self.device) else self._arenas.of(stream)

    def _table(self, num_pages: int) -> Tensor:
        """int32 `[max_requests, width]`: request b's pages follow those of request b - 1."""
        with self._lock:
            found = self._tables.get(num_pages)
            if found is None:
                requests = torch.arange(self.specs.max_requests, device=self.device)[:, None]
                pages = torch.arange(self.width, device=self.device)
                table = torch.where(pages < num_pages, requests * num_pages + pages, -1)
                found = self._tables[num_pages] = table.int()
            return found

    def _scratch_of(self, stream: int) -> tuple[IndexPages, threading.Lock]:
        with self._lock:
            found = self._scratch.get(stream)
            if found is None:
                pages = IndexPages(self, self.specs.max_requests, self.width, is_static=False)
                found = self._scratch[stream] = (pages, threading.Lock())
            return found

    def __deepcopy__(self, memo: dict[int, Any]) -> IndexKernels:
        """A copied cache stays with the kernels that its pages are made for."""
        del memo
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "cache: its index keys are in pages of kernels of this process, cannot be pickled; "
            "restore_indexers, then a new cache, gives one that can be"
        )
