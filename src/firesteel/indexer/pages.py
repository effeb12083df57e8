"""The pages of an index cache: 64 keys each, as e4m3 with their scales, or as 16-bit numbers.

    e4m3        bytes 0..8191      values  [64, 128] e4m3, token by token
                bytes 8192..8447   scales  [64] fp32
    bf16, fp16  bytes 0..16383     values  [64, 128], token by token; no scales

Pages lie `page_stride` bytes apart, a page's own bytes or more, a multiple of 16: other layers'
pages may lie between. Slot s is token s % 64 of page s // 64. Reading and writing here is exact;
rounding is the writer kernel's (`firesteel.indexer.write`), and of its oracle.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from firesteel.errors import InvalidArgumentError, UnsupportedError

__all__ = [
    "CACHE_DTYPES",
    "HEAD_SIZE",
    "PAGE_BYTES",
    "PAGE_TOKENS",
    "VALUE_BYTES",
    "check_cache_dtype",
    "check_page_stride",
    "page_bytes",
    "page_values",
    "page_views",
    "read_keys",
    "write_keys",
]

PAGE_TOKENS = 64
HEAD_SIZE = 128
VALUE_BYTES = PAGE_TOKENS * HEAD_SIZE
PAGE_BYTES = VALUE_BYTES + 4 * PAGE_TOKENS
CACHE_DTYPES: dict[str, torch.dtype] = {
    "e4m3": torch.float8_e4m3fn,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""What keys of a cache may be, to torch's."""

_ALIGNMENT = 16
_MAX_STRIDE = 2**31


def check_cache_dtype(cache_dtype: str) -> None:
    """Refuse a type of keys that no kernel takes.

    Raises
        UnsupportedError: none of `CACHE_DTYPES`.
    """
    if cache_dtype not in tuple(CACHE_DTYPES):
        raise UnsupportedError(
            f"cache_dtype: got {cache_dtype!r}, must be one of {', '.join(CACHE_DTYPES)}"
        )


def page_bytes(cache_dtype: str) -> int:
    """Bytes of a page of so many keys, and of their scales where they have some."""
    return PAGE_BYTES if cache_dtype == "e4m3" else 2 * VALUE_BYTES


def check_page_stride(page_stride: int, cache_dtype: str = "e4m3") -> None:
    """Refuse a distance of pages that no kernel takes.

    Raises
        InvalidArgumentError: no integer, less than a page, or no multiple of 16.
    """
    least = page_bytes(cache_dtype)
    given: Any = page_stride
    is_integer = isinstance(given, int) and not isinstance(given, bool)
    if not is_integer or not least <= given < _MAX_STRIDE or given % _ALIGNMENT:
        raise InvalidArgumentError(
            f"page_stride: got {given!r}, must be a multiple of {_ALIGNMENT} from {least}"
        )


def page_values(cache: Tensor, page_stride: int, cache_dtype: str) -> Tensor:
    """The values `[pages, 64, 128]` of a cache, uint8 `[bytes]`.

    The last page may end where its own bytes do.
    """
    check_page_stride(page_stride, cache_dtype)
    dtype = CACHE_DTYPES[cache_dtype]
    pages = max(0, (cache.numel() - page_bytes(cache_dtype)) // page_stride + 1)
    numbers = cache[: cache.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    return numbers.as_strided(
        (pages, PAGE_TOKENS, HEAD_SIZE), (page_stride // dtype.itemsize, HEAD_SIZE, 1)
    )


def page_views(cache: Tensor, page_stride: int) -> tuple[Tensor, Tensor]:
    """The values `[pages, 64, 128]` e4m3 and scales `[pages, 64]` fp32 of a cache of e4m3."""
    values = page_values(cache, page_stride, "e4m3")
    numbers = cache[: cache.numel() // 4 * 4].view(torch.float32)
    start = numbers.storage_offset() + VALUE_BYTES // 4
    return values, numbers.as_strided((len(values), PAGE_TOKENS), (page_stride // 4, 1), start)


def write_keys(
    cache: Tensor, values: Tensor, scales: Tensor | None, slots: Tensor, page_stride: int
) -> None:
    """Put values `[T, 128]` and scales `[T]` at slots `[T]`; a negative slot has none.

    The values have the cache's type; scales are None but of e4m3.
    """
    names = {dtype: name for name, dtype in CACHE_DTYPES.items()}
    pages = page_values(cache, page_stride, names[values.dtype])
    page_scales = None if scales is None else page_views(cache, page_stride)[1]
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            page, offset = divmod(slot, PAGE_TOKENS)
            pages[page, offset] = values[token]
            if page_scales is not None and scales is not None:
                page_scales[page, offset] = scales[token]


def read_keys(
    cache: Tensor, slots: Tensor, page_stride: int, cache_dtype: str = "e4m3"
) -> tuple[Tensor, Tensor | None]:
    """The values `[T, 128]` and scales `[T]` at slots `[T]`, none of them negative.

    Scales are None but of e4m3.
    """
    pages = page_values(cache, page_stride, cache_dtype)
    page, offset = slots.long() // PAGE_TOKENS, slots.long() % PAGE_TOKENS
    values = pages.view(torch.uint8)[page, offset].view(CACHE_DTYPES[cache_dtype])
    if cache_dtype != "e4m3":
        return values, None
    return values, page_views(cache, page_stride)[1][page, offset]
