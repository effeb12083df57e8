"""The page writer against its oracle: the same bits."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from firesteel.indexer.pages import CACHE_DTYPES, PAGE_BYTES, read_keys
from firesteel.indexer.reference import quantize_reference, round_reference
from firesteel.indexer.write import write_pages_kernel
from tests.indexer.kernels import run_write
from tests.moe.kernels import run_on_nothing
from tests.moe.sparse import at, sparse_memory

pytestmark = pytest.mark.interpret


def keys_of(kind: str, count: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    keys = torch.randn(count, 128, generator=generator)
    if kind == "zeros":
        keys[::2] = 0
    elif kind == "steps":
        # Each value that e4m3 has, those halfway between, and those beside them.
        steps = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        steps = steps[~steps.isnan()]
        middle = (steps[1:] + steps[:-1]) / 2
        every = torch.cat([steps, middle, middle * (1 + 2.0**-10), middle * (1 - 2.0**-10)])
        signs = torch.randint(0, 2, keys.shape, generator=generator) * 2 - 1
        keys = every[torch.randint(0, len(every), keys.shape, generator=generator)] * signs
        keys[:, 0] = 448
    elif kind == "wide":
        keys *= 2.0 ** torch.randint(-40, 13, keys.shape, generator=generator)
    elif kind == "holes":
        keys[torch.rand(keys.shape, generator=generator) < 0.01] = math.nan
    return keys.to(dtype)


@given(
    kind=st.sampled_from(("plain", "zeros", "steps", "wide", "holes")),
    count=st.integers(0, 19),
    dtype=st.sampled_from((torch.float16, torch.float32)),
    slot_dtype=st.sampled_from((torch.int32, torch.int64)),
    power_of_two=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=40)
def test_pages_are_the_oracle_s(
    kind: str,
    count: int,
    dtype: torch.dtype,
    slot_dtype: torch.dtype,
    power_of_two: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    page_stride = PAGE_BYTES + 16
    cache = torch.full((2 * page_stride + PAGE_BYTES,), 255, dtype=torch.uint8)
    keys = keys_of(kind, count, dtype, generator)
    slots = torch.randperm(192, generator=generator)[:count].to(slot_dtype)
    slots[torch.rand(count, generator=generator) < 0.2] = -1
    run_write(keys, slots, cache, page_stride, power_of_two=power_of_two)
    there = slots >= 0
    wanted, wanted_scales = quantize_reference(keys[there], power_of_two=power_of_two)
    values, scales = read_keys(cache, slots[there], page_stride)
    assert torch.equal(values.float().isnan(), wanted.float().isnan())
    is_number = ~wanted.float().isnan()
    bits = values.view(torch.uint8), wanted.view(torch.uint8)
    assert torch.equal(bits[0][is_number], bits[1][is_number])
    assert torch.equal(scales, wanted_scales)
    untouched = torch.ones_like(cache, dtype=torch.bool)
    for slot in slots[there].tolist():
        page, offset = divmod(slot, 64)
        start = page * page_stride
        untouched[start + offset * 128 : start + offset * 128 + 128] = False
        untouched[start + 8192 + offset * 4 : start + 8192 + offset * 4 + 4] = False
    assert (cache[untouched] == 255).all()


def wide_keys(count: int, generator: torch.Generator) -> Tensor:
    """fp32 of any bits, of 16 bits and what lies halfway between two, and beside it."""
    bits = torch.randint(-(2**31), 2**31, (count, 128), generator=generator)
    bits = torch.where(torch.rand(bits.shape, generator=generator) < 0.5, bits, bits >> 12 << 12)
    keys = bits.int().view(torch.float32)
    # Numbers around fp16's subnormals and its largest, where its roundings differ.
    near = torch.randn(count, 128, generator=generator) * 2.0 ** torch.randint(
        -28, 18, (count, 128), generator=generator
    )
    halves = near.half().float() * (1 + 2.0**-11)
    kind = torch.randint(0, 4, (count, 128), generator=generator)
    return torch.where(kind < 2, keys, torch.where(kind == 2, near, halves))


@pytest.mark.parametrize("cache_dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_16_bit_pages_are_keys_to_nearest_even(cache_dtype: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(6)
    keys = wide_keys(61, generator).to(dtype)
    slots = torch.randperm(128, generator=generator)[:61].int()
    slots[::7] = -1
    page_stride = 16384 + 32
    cache = torch.full((page_stride + 16384,), 255, dtype=torch.uint8)
    run_write(keys, slots, cache, page_stride, cache_dtype=cache_dtype)
    there = slots >= 0
    wanted = round_reference(keys[there], CACHE_DTYPES[cache_dtype])
    found, _ = read_keys(cache, slots[there], page_stride, cache_dtype)
    assert torch.equal(found.isnan(), wanted.isnan())
    is_number = ~wanted.isnan()
    assert torch.equal(found.view(torch.int16)[is_number], wanted.view(torch.int16)[is_number])
    untouched = torch.ones_like(cache, dtype=torch.bool)
    for slot in slots[there].tolist():
        start = slot // 64 * page_stride + slot % 64 * 256
        untouched[start : start + 256] = False
    assert (cache[untouched] == 255).all()


def test_a_page_past_2_31_bytes() -> None:
    page_stride, page = 1_077_120, 2100
    assert page * page_stride > 2**31
    memory = sparse_memory((page + 1) * page_stride)
    keys = torch.randn(1, 128, generator=torch.Generator().manual_seed(4))
    slot = torch.tensor([page * 64 + 63], dtype=torch.int32)
    first = at(memory, 0, 16, torch.uint8)
    run_write(keys, slot, first, page_stride)
    wanted, scales = quantize_reference(keys)
    start = page * page_stride
    assert torch.equal(at(memory, start + 63 * 128, 128, torch.uint8), wanted.view(torch.uint8)[0])
    assert torch.equal(at(memory, start + 8192 + 63 * 4, 1, torch.float32), scales)
    assert not first.any()


def test_empty_work_ends() -> None:
    constants = {"POWER_OF_TWO": True, "BLOCK_M": 4}
    run_on_nothing(
        write_pages_kernel, num_pointers=4, num_integers=3, dtypes={}, absent=set(), **constants
    )
