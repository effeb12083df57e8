"""The indexer on PyTorch operators: rounding, selection, and chunks that leave no trace."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from firesteel.indexer.reference import quantize_reference, top_k_reference
from firesteel.indexer.torch_backend import round_to_e4m3, select_largest, top_k_keys

SCORES = st.sampled_from(
    [0.0, -0.0, 1.0, 1 + 2.0**-23, -1.0, math.inf, -math.inf, math.nan, -3.4028234663852886e38]
)


@given(st.lists(st.lists(SCORES, min_size=9, max_size=9), max_size=4), st.integers(0, 9))
def test_selection_is_the_oracle_s(rows, top_k):
    found = select_largest(torch.tensor(rows).reshape(-1, 9), top_k)
    assert found.tolist() == [top_k_reference(row, top_k) for row in rows]


def test_e4m3_rounding_is_the_page_writer_s():
    generator = torch.Generator().manual_seed(3)
    keys = torch.randn(64, 128, generator=generator) * 10.0 ** torch.arange(-32, 32)[:, None]
    keys[3], keys[4, 5], keys[6, 7], keys[8] = 0.0, math.nan, math.inf, math.nan
    values, scales = round_to_e4m3(keys.view(4, 16, 128))
    wanted, wanted_scales = quantize_reference(keys)
    assert torch.equal(values.view(torch.uint8).view(64, 128), wanted.view(torch.uint8))
    assert torch.equal(scales.flatten(), wanted_scales)


class Largest(TorchDispatchMode):
    """Notes the largest result of any operation."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.numel = max(self.numel, out.numel())
        return out


def _causal(num_rows, num_keys):
    def mask(scores, rows, keys):
        own = torch.arange(num_rows)[rows] + num_keys - num_rows
        return scores.masked_fill(torch.arange(num_keys)[keys] > own[:, None], -math.inf)

    return mask


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("batch", "rows", "num_keys"), [(2, 37, 41), (1, 3, 5000), (3, 1, 1)])
def test_chunks_of_rows_and_keys_change_nothing(batch, rows, num_keys, scaled):
    generator = torch.Generator().manual_seed(rows)
    heads = 4
    # Small integers: many ties, and no rounding whatever the order of sums.
    q = torch.randint(-2, 3, (batch, rows, heads, 16), generator=generator).bfloat16()
    keys = torch.randint(-2, 3, (batch, num_keys, 16), generator=generator).bfloat16()
    w = torch.randint(-2, 4, (batch, rows, heads), generator=generator) / 2
    scales = 2.0 ** torch.randint(-2, 3, (batch, num_keys), generator=generator)
    scales = torch.where(scales == 4, math.nan, scales) if scaled else None
    mask, options = _causal(rows, num_keys), {"key_scales": scales, "dot_scale": 0.5}
    whole = top_k_keys(q, w, keys, mask, top_k=9, **options)
    least = heads * batch * 1024
    with Largest() as seen:
        parts = top_k_keys(q, w, keys, mask, top_k=9, max_scores=least, **options)
    assert torch.equal(whole, parts)
    assert seen.numel <= max(least, q.numel(), keys.numel())
    dots = torch.einsum("bshd,btd->bsht", q.double(), keys.double()).mul(0.5).relu()
    scores = torch.einsum("bsh,bsht->bst", w.double(), dots)
    scores = scores if scales is None else scores * scales[:, None].double()
    scores = mask(scores, slice(None), slice(None)).flatten(0, 1)
    wanted = [top_k_reference(row, min(9, num_keys)) for row in scores.tolist()]
    assert whole.flatten(0, 1).tolist() == wanted
