"""Pages: exact both ways, wherever they lie."""

import pytest
import torch

from firesteel.errors import InvalidArgumentError
from firesteel.indexer.pages import (
    CACHE_DTYPES,
    PAGE_BYTES,
    page_values,
    page_views,
    read_keys,
    write_keys,
)

E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize("page_stride", [8448, 8464, 16896])
def test_what_is_written_is_read_and_nothing_else_changes(page_stride: int) -> None:
    generator = torch.Generator().manual_seed(1)
    cache = torch.randint(0, 256, (2 * page_stride + PAGE_BYTES,), generator=generator).to(
        torch.uint8
    )
    before = cache.clone()
    slots = torch.tensor([191, 0, -1, 64])
    values = torch.randn(4, 128, generator=generator).to(E4M3)
    scales = torch.rand(4, generator=generator)
    write_keys(cache, values, scales, slots, page_stride)
    there = slots >= 0
    found, found_scales = read_keys(cache, slots[there], page_stride)
    assert torch.equal(found.view(torch.uint8), values[there].view(torch.uint8))
    assert torch.equal(found_scales, scales[there])
    assert (cache != before).sum() <= 3 * (128 + 4)


@pytest.mark.parametrize("cache_dtype", ["bf16", "fp16"])
def test_pages_of_16_bits_are_values_alone(cache_dtype: str) -> None:
    generator = torch.Generator().manual_seed(2)
    # A last page that ends where its values do.
    cache = torch.zeros(16400 + 16384, dtype=torch.uint8)
    values = torch.randn(2, 128, generator=generator).to(CACHE_DTYPES[cache_dtype])
    slots = torch.tensor([3, 127])
    write_keys(cache, values, None, slots, 16400)
    found, scales = read_keys(cache, slots, 16400, cache_dtype)
    assert torch.equal(found.view(torch.int16), values.view(torch.int16))
    assert scales is None
    assert torch.equal(cache[3 * 256 : 4 * 256], values[0].view(torch.uint8))
    assert torch.equal(cache[16400 + 63 * 256 :], values[1].view(torch.uint8))
    assert not cache[4 * 256 : 16400 + 63 * 256].any()
    with pytest.raises(InvalidArgumentError, match=r"got 16368, must be .* from 16384"):
        page_values(cache, 16368, cache_dtype)


def test_the_layout_is_values_then_scales() -> None:
    cache = torch.zeros(2 * 8464, dtype=torch.uint8)
    values = torch.full((1, 128), 1.5).to(E4M3)
    write_keys(cache, values, torch.tensor([2.0]), torch.tensor([64 + 3]), 8464)
    start = 8464 + 3 * 128
    assert (cache[start : start + 128] == 0x3C).all()
    assert cache[8464 + 8192 + 12 : 8464 + 8192 + 16].tolist() == [0, 0, 0, 0x40]
    assert cache.count_nonzero() == 129
    assert page_views(cache, 8464)[0].shape == (2, 64, 128)


@pytest.mark.parametrize("page_stride", [0, 8432, 8450, 2**31])
def test_a_stride_that_no_kernel_takes_is_refused(page_stride: int) -> None:
    with pytest.raises(InvalidArgumentError, match="page_stride"):
        page_views(torch.zeros(16896, dtype=torch.uint8), page_stride)
