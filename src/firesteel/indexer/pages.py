"""The pages of an index cache: 64 keys each, first their e4m3 values, then their fp32 scales.

    bytes 0..8191      values  [64, 128] e4m3, token by token
    bytes 8192..8447   scales  [64] fp32

Pages lie `page_stride` bytes apart, 8448 or more, a multiple of 16: other layers' pages may lie
between. Slot s is token s % 64 of page s // 64. Reading and writing here is exact; rounding is the
writer kernel's (`firesteel.indexer.write`), and of its oracle.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firesteel.errors import InvalidArgumentError

__all__ = [
    "HEAD_SIZE",
    "PAGE_BYTES",
    "PAGE_TOKENS",
    "VALUE_BYTES",
    "check_page_stride",
    "page_views",
    "read_keys",
    "write_keys",
]

PAGE_TOKENS = 64
HEAD_SIZE = 128
VALUE_BYTES = PAGE_TOKENS * HEAD_SIZE
PAGE_BYTES = VALUE_BYTES + 4 * PAGE_TOKENS

_ALIGNMENT = 16
_MAX_STRIDE = 2**31


def check_page_stride(page_stride: int) -> None:
    """Refuse a distance of pages that no kernel takes.

    Raises
        InvalidArgumentError: less than a page, or no multiple of 16.
    """
    if not PAGE_BYTES <= page_stride < _MAX_STRIDE or page_stride % _ALIGNMENT:
        raise InvalidArgumentError(
            f"page_stride: got {page_stride}, must be a multiple of {_ALIGNMENT} from {PAGE_BYTES}"
        )


def page_views(cache: Tensor, page_stride: int) -> tuple[Tensor, Tensor]:
    """The values `[pages, 64, 128]` e4m3 and scales `[pages, 64]` fp32 of a cache, uint8 `[bytes]`.

    The last page may end where its scales do.
    """
    check_page_stride(page_stride)
    pages = max(0, (cache.numel() - PAGE_BYTES) // page_stride + 1)
    values = cache.view(torch.float8_e4m3fn).as_strided(
        (pages, PAGE_TOKENS, HEAD_SIZE), (page_stride, HEAD_SIZE, 1)
    )
    numbers = cache[: cache.numel() // 4 * 4].view(torch.float32)
    start = numbers.storage_offset() + VALUE_BYTES // 4
    return values, numbers.as_strided((pages, PAGE_TOKENS), (page_stride // 4, 1), start)


def write_keys(
    cache: Tensor, values: Tensor, scales: Tensor, slots: Tensor, page_stride: int
) -> None:
    """Put values `[T, 128]` e4m3 and scales `[T]` at slots `[T]`; a negative slot has none."""
    pages, page_scales = page_views(cache, page_stride)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            page, offset = divmod(slot, PAGE_TOKENS)
            pages[page, offset] = values[token]
            page_scales[page, offset] = scales[token]


def read_keys(cache: Tensor, slots: Tensor, page_stride: int) -> tuple[Tensor, Tensor]:
    """The values `[T, 128]` and scales `[T]` at slots `[T]`, none of them negative."""
    pages, page_scales = page_views(cache, page_stride)
    page, offset = slots.long() // PAGE_TOKENS, slots.long() % PAGE_TOKENS
    values = pages.view(torch.uint8)[page, offset].view(torch.float8_e4m3fn)
    return values, page_scales[page, offset]
