"""Swapped indexers on a GPU: what kernels select is the host's own, but for near ties."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from firesteel.errors import InvalidArgumentError
from firesteel.integrations.transformers import restore_indexers, swap_indexers
from tests.integrations.transformers.index_scores import (
    e4m3_bound,
    parts_of,
    score_bound,
    scores_of,
)
from tests.integrations.transformers.indexer_models import (
    FAMILIES,
    INDEXERS,
    forward,
    generated,
    indexers,
    little,
    prompt,
    recorded,
)

pytestmark = pytest.mark.gpu

TOP_K = 512
LENGTH = 600
PADDING = 7
SIZES = {"max_keys": 1024, "max_requests": 4, "max_rows": 1000}
# Of the sum of the magnitudes: a Hopper keeps about 13 bits of each sum of e4m3 products; sums of
# 16-bit ones are fp32, 128 and 8 additions of them.
DOT_ROUNDING = {"e4m3": 2.0**-10, "host": 2.0**-16}

every_family = pytest.mark.parametrize("family", FAMILIES)
all_keys = pytest.mark.parametrize("keys", ["e4m3", "host"])


def on_gpu(family: str, **changes: Any) -> Any:
    """A little model that kernels exist for, on the GPU."""
    sizes = {"index_head_dim": 128, "index_topk": TOP_K, "dtype": torch.bfloat16}
    return little(family, **{**sizes, **changes}).cuda()


def padded(length: int) -> Tensor:
    """The mask of two requests, the first of which begins with padding."""
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, :PADDING] = 0
    return mask.cuda()


def check_selections(
    calls: list[tuple[Any, dict[str, Any], Tensor]],
    keys: str,
    steps: list[int],
    hidden: Tensor | None = None,
) -> None:
    """Each row has the best keys that it sees, within the bound of its scores.

    Args:
        calls: of all layers of each forward, in order.
        keys: how they were kept.
        steps: new tokens of each forward.
        hidden: bool `[S, T]`, beside keys that are later; by default the padding of `padded`.
    """
    num_layers = len(calls) // len(steps)
    for layer in range(num_layers):
        of_layer = calls[layer::num_layers]
        assert [given["hidden_states"].shape[1] for _, given, _ in of_layer] == steps
        parts = [parts_of(module, given) for module, given, _ in of_layer]
        q, k, w = (torch.cat(each, dim=1) for each in zip(*parts, strict=True))
        scores = scores_of(q, k, w)
        if hidden is None:
            scores[0, :, :PADDING] = -torch.inf
        else:
            scores = scores.masked_fill(hidden.to(scores.device), -torch.inf)
        magnitudes = scores_of(q.abs(), k.abs(), w.abs()).nan_to_num(neginf=0.0)
        bound = magnitudes * DOT_ROUNDING[keys] + 1e-6
        if keys == "e4m3":
            bound += score_bound(q, k, w)
        start = 0
        for (_, _, indices), size in zip(of_layer, steps, strict=True):
            rows = slice(start, start + size)
            start += size
            check_rows(indices, scores[:, rows], bound[:, rows])


def check_rows(indices: Tensor, scores: Tensor, bound: Tensor) -> None:
    num_keys = int(indices.max()) + 1
    scores, bound = scores.clone(), bound
    is_seen = scores > -torch.inf
    taken = torch.zeros_like(is_seen).scatter(-1, indices.long(), True) & is_seen
    wanted = is_seen.sum(dim=-1).clamp(max=TOP_K)
    assert num_keys <= scores.shape[-1]
    assert torch.equal(taken.sum(dim=-1), wanted)
    # The least that was taken, at best, and the most that was left, at worst.
    least = (scores + bound).masked_fill(~taken, torch.inf).amin(dim=-1)
    most = (scores - bound).masked_fill(taken | ~is_seen, -torch.inf).amax(dim=-1)
    assert (most <= least).all()


@every_family
@all_keys
def test_prefill_and_decode_select_the_best_keys(family: str, keys: Any) -> None:
    model = on_gpu(family)
    report = swap_indexers(model, keys=keys, **SIZES)
    assert report.num_layers == INDEXERS[family]
    ids, steps = prompt(2, LENGTH + 16).cuda(), [LENGTH, 1, 1, 4, 8, 2]
    cache, start = None, 0
    with recorded(model) as calls:
        for size in steps:
            end = start + size
            given = ids[:, start:end]
            _, cache = forward(model, given, cache, attention_mask=padded(end))
            start = end
    check_selections(calls, keys, steps)
    for layer in cache.layers[: INDEXERS[family]]:
        assert layer.index_pages.seq_lens.tolist() == [start, start]
        assert layer.index_pages.is_valid(start).logical_not().sum().item() == PADDING
    assert all(not ready.audit.misses for ready in report.ready)


@every_family
@all_keys
def test_pages_hold_the_model_s_keys(family: str, keys: Any) -> None:
    model = on_gpu(family)
    swap_indexers(model, keys=keys, **SIZES)
    ids = prompt(2, 100).cuda()
    with recorded(model) as calls:
        _, cache = forward(model, ids)
    for (module, given, _), layer in zip(calls, cache.layers, strict=False):
        _, k, _ = parts_of(module, given)
        values, scales = layer.index_pages.keys(100)
        if keys == "host":
            assert torch.equal(values.float(), k)
        else:
            found = values.double() * scales.double()[..., None]
            assert ((found - k.double()).abs() <= e4m3_bound(k)).all()


@every_family
@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 2}, {"cache_implementation": "static", "disable_compile": True}],
    ids=["dynamic", "beams", "static"],
)
def test_host_keys_give_the_host_s_tokens(family: str, options: dict[str, Any]) -> None:
    model = on_gpu(family)
    ids = prompt(2, LENGTH).cuda()
    wanted = generated(model, ids, padding=PADDING, **options)
    swap_indexers(model, keys="host", **SIZES)
    assert generated(model, ids, padding=PADDING, **options) == wanted
    restore_indexers(model)
    assert generated(model, ids, padding=PADDING, **options) == wanted


@every_family
@all_keys
def test_without_a_cache_and_with_another_mask(family: str, keys: Any) -> None:
    model = on_gpu(family)
    swap_indexers(model, keys=keys, **SIZES)
    ids = prompt(2, LENGTH).cuda()
    with torch.no_grad(), recorded(model) as calls:
        model(ids, attention_mask=padded(LENGTH), use_cache=False)
    check_selections(calls, keys, [LENGTH])
    # Of a window it is PyTorch that selects, from pages and without them. Tokens may differ: sums
    # of other layouts have other orders of additions.
    without = copy.deepcopy(model)
    hidden = (
        torch.ones(LENGTH, LENGTH).triu(1).bool() | torch.ones(LENGTH, LENGTH).tril(-550).bool()
    )
    mask = torch.zeros(2, 1, LENGTH, LENGTH).masked_fill(hidden, torch.finfo(torch.bfloat16).min)
    caches: list[Any] = []
    for each in (model, without):
        with recorded(each) as calls:
            _, cache = forward(each, ids, attention_mask=mask.to("cuda", torch.bfloat16))
        check_selections(calls, keys, [LENGTH], hidden)
        caches.append(cache)
    # Of the first layer, which is given the same, keys have the same bits.
    pages, stored = caches[0].layers[0].index_pages, caches[1].layers[0].indexer_keys
    values, scales = pages.keys(LENGTH)
    assert pages.length == LENGTH
    found = [values.view(torch.uint8)]
    if scales is not None:
        found.append(scales.contiguous()[..., None].view(torch.uint8))
    assert torch.equal(torch.cat(found, dim=-1), stored.view(torch.uint8))


@contextmanager
def no_sync(model: Any, but: int | None) -> Iterator[None]:
    """While open, an indexer that waits for the GPU fails, but for one."""

    def before(*_: Any) -> None:
        torch.cuda.set_sync_debug_mode("error")

    def after(*_: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")

    hooks = []
    for number, module in enumerate(indexers(model)):
        if number != but:
            hooks.append(module.register_forward_pre_hook(before))
            hooks.append(module.register_forward_hook(after))
    try:
        yield
    finally:
        after()
        for hook in hooks:
            hook.remove()


@every_family
@all_keys
@pytest.mark.parametrize("check_masks", [True, False])
def test_only_the_first_layer_waits_for_the_gpu_and_only_to_look_at_the_mask(
    family: str, keys: Any, check_masks: bool
) -> None:
    model = on_gpu(family)
    report = swap_indexers(model, keys=keys, check_masks=check_masks, **SIZES)
    ids = prompt(2, LENGTH).cuda()
    _, cache = forward(model, ids, attention_mask=padded(LENGTH))
    forward(model, ids[:, :1], cache, attention_mask=padded(LENGTH + 1))
    pages = [layer.index_pages for layer in cache.layers[: INDEXERS[family]]]
    bound = [dict(each.bounds) for each in pages]
    loaded = [ready.audit.prewarmed.loaded for ready in report.ready]
    with no_sync(model, but=0 if check_masks else None):
        for step in range(3):
            mask = padded(LENGTH + 2 + step)
            forward(model, ids[:, :1], cache, attention_mask=mask)
    assert [dict(each.bounds) for each in pages] == bound
    assert [ready.audit.prewarmed.loaded for ready in report.ready] == loaded
    assert all(not ready.audit.misses for ready in report.ready)


def test_limits_and_moves_on_a_gpu(caplog: pytest.LogCaptureFixture) -> None:
    model = on_gpu("deepseek_v32")
    swap_indexers(model, **SIZES)
    with pytest.raises(InvalidArgumentError, match="1025 keys a request, max_keys of swap_index"):
        forward(model, prompt(1, 1025).cuda())
    moved = model.float()
    assert caplog.text.count("swap_indexers puts them on kernels again") == 1
    report = swap_indexers(moved, **SIZES)
    assert report.num_layers == 3
    forward(moved, prompt(1, 20).cuda())
