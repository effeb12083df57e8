"""Swapped indexers on kernels: pages, caches, masks and limits; an emulator computes on the CPU."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from firesteel.errors import InvalidArgumentError
from firesteel.integrations.transformers import swap_indexers
from firesteel.integrations.transformers.index_masks import IndexMask
from tests.integrations.transformers.index_scores import parts_of
from tests.integrations.transformers.indexer_models import (
    FAMILIES,
    INDEXERS,
    both,
    forward,
    generated,
    indexers,
    on_kernels,
    prompt,
    recorded,
    runs_of,
    small_top_k,
    swap_emulated,
)

__all__ = ["small_top_k"]

pytestmark = pytest.mark.usefixtures("small_top_k")
every_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.mark.host
@every_family
@pytest.mark.parametrize(
    ("padding", "options"),
    [
        (0, {}),
        (5, {"num_beams": 2}),
        (4, {"cache_implementation": "static"}),
        (2, {"use_cache": False, "max_new_tokens": 2}),
    ],
    ids=["plain", "beams-padded", "static-padded", "no-cache-padded"],
)
def test_kernels_give_the_tokens_of_the_pytorch_path(family, padding, options):
    by_torch, model = both(family, dtype=torch.bfloat16)
    # Over the edge of a page while decoding.
    ids = prompt(2, 61)
    options = {"max_new_tokens": 6, **options}
    wanted = generated(by_torch, ids, padding=padding, **options)
    assert generated(model, ids, padding=padding, **options) == wanted
    runs, num = runs_of(model), INDEXERS[family]
    requests = 2 * options.get("num_beams", 1)
    if options.get("use_cache", True):
        assert runs["decode 1"] == [requests] * 5 * num
        assert sum(runs["prefill"]) == requests * 61 * num
        assert sum(runs["write"]) == requests * (61 + 5) * num
    else:
        assert sum(runs["prefill"]) == 2 * (61 + 62) * num
        assert "decode 1" not in runs


@pytest.mark.host
def test_drafts_are_read_together_and_cropped():
    by_torch, model = both("glm_moe_dsa")
    # A prompt that repeats itself, so that there are drafts.
    ids = prompt(1, 10).repeat(1, 4)
    wanted = generated(by_torch, ids, new=10, prompt_lookup_num_tokens=4)
    assert generated(model, ids, new=10, prompt_lookup_num_tokens=4) == wanted
    # The prompt with its first four drafts, most of which are taken back.
    assert runs_of(model)["prefill"][0] == 44


@pytest.mark.parametrize("is_static", [False, True])
def test_parts_of_a_prompt_go_to_decode_or_prefill_by_their_size(is_static):
    models = both("deepseek_v32")
    ids, sizes = prompt(2, 80), (20, 1, 40, 8, 2, 9)
    tokens: list[list[Tensor]] = [[], []]
    for model, found in zip(models, tokens, strict=True):
        cache = StaticCache(model.config, max_cache_len=100) if is_static else None
        mask = torch.ones(2, 80, dtype=torch.long)
        mask[0, :3] = 0
        start = 0
        for size in sizes:
            end = start + size
            got, cache = forward(model, ids[:, start:end], cache, attention_mask=mask[:, :end])
            found.append(got)
            start = end
    theirs, mine = (torch.cat(found, dim=1) for found in tokens)
    assert torch.equal(mine[1], theirs[1])
    # What follows a padding token is nobody's.
    assert torch.equal(mine[0, 3:], theirs[0, 3:])
    num = INDEXERS["deepseek_v32"]
    assert runs_of(models[1]) == {
        "write": [40] * num + [2] * num + [64, 16] * num + [16] * num + [4] * num + [18] * num,
        "prefill": [40] * num + [64, 16] * num + [18] * num,
        "decode 1": [2] * num,
        "decode 8": [2] * num,
        "decode 2": [2] * num,
    }


@pytest.mark.host
def test_pages_follow_what_is_done_to_the_cache():
    tokens: list[list[Tensor]] = []
    for model in both("glm_moe_dsa"):
        found = []
        _, cache = forward(model, prompt(3, 70))
        cache.crop(-8)
        cache.batch_select_indices(torch.tensor([2, 0]))
        got, cache = forward(model, prompt(2, 4, seed=3), cache)
        found.append(got)
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([3, 0, 0, 2]))
        copied = copy.deepcopy(cache)
        got, cache = forward(model, prompt(4, 9, seed=4), cache)
        found.append(got)
        # A copy goes on from where it was made.
        again, copied = forward(model, prompt(4, 9, seed=4), copied)
        assert torch.equal(again, got)
        # Fewer requests, then more.
        for requests in ([3], [0, 0, 0]):
            cache.reorder_cache(torch.tensor(requests))
            got, cache = forward(model, prompt(len(requests), 3, seed=5), cache)
            found.append(got)
        tokens.append(found)
    for theirs, mine in zip(*tokens, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.host
def test_a_cache_can_be_reset():
    results = []
    for model in both("deepseek_v32"):
        cache = StaticCache(model.config, max_cache_len=60)
        forward(model, prompt(2, 40), cache)
        cache.reset()
        first, _ = forward(model, prompt(2, 30, seed=5), cache)
        second, _ = forward(model, prompt(2, 3, seed=6), cache)
        fresh = DynamicCache(config=model.config)
        fresh.reset()
        assert torch.equal(forward(model, prompt(2, 30, seed=5), fresh)[0], first)
        fresh.reset()
        # The oldest host keeps the length.
        if fresh.get_seq_length() == 0:
            assert torch.equal(forward(model, prompt(2, 30, seed=5)[:1], fresh)[0], first[:1])
        results.append(torch.cat([first, second], dim=1))
    assert torch.equal(*results)


def additive(hidden: Tensor) -> Tensor:
    return torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("kind", ["window", "bias", "hole"])
def test_other_masks_select_by_pytorch_from_the_same_pages(kind):
    tokens = []
    for model in both("deepseek_v32"):
        hidden = torch.ones(70, 70).triu(1).bool().expand(2, 1, 70, 70).clone()
        if kind == "window":
            hidden |= torch.ones(70, 70).tril(-30).bool()
        mask = additive(hidden)
        if kind == "bias":
            mask += torch.randn(mask.shape, generator=torch.Generator().manual_seed(2))
        elif kind == "hole":
            # A key that its own row sees, and later ones do not.
            mask[0, 0, 20:, 11] = torch.finfo(mask.dtype).min
        got, cache = forward(model, prompt(2, 70), attention_mask=mask)
        found = [got]
        is_on_kernels = indexers(model)[0].firesteel.kernels is not None
        if is_on_kernels:
            assert set(runs_of(model)) == {"write"}
        # Plain again: kernels, of the same cache.
        got, cache = forward(model, prompt(2, 2, seed=8), cache)
        found.append(got)
        if is_on_kernels:
            assert set(runs_of(model)) == {"write", "decode 2"}
        # A key that was seen is hidden now, by a mask as tokenizers give them.
        late = torch.ones(2, 73, dtype=torch.long)
        late[1, 5] = 0
        got, cache = forward(model, prompt(2, 1, seed=9), cache, attention_mask=late)
        found.append(got)
        if is_on_kernels:
            assert set(runs_of(model)) == {"write"}
        tokens.append(torch.cat(found, dim=1))
    assert torch.equal(*tokens)


def test_a_key_that_was_hidden_when_new_is_never_lost_silently():
    tokens: list[list[Tensor]] = []
    ids, new = prompt(2, 30), prompt(2, 1, seed=4)
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[0, :5] = mask[1, 27:] = 0
    for model in both("glm_moe_dsa"):
        found = []
        got, cache = forward(model, ids, attention_mask=mask)
        found.append(got[:, 5:27])
        if indexers(model)[0].firesteel.kernels is not None:
            copied = copy.deepcopy(cache)
            with pytest.raises(InvalidArgumentError, match="attention_mask: shows a key that was"):
                forward(model, new, copied)
            assert copied.layers[0].index_pages.length == 30
        # What is known of keys follows them; those that are taken back may be written again.
        cache.crop(-3)
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.batch_select_indices(torch.tensor([1, 0, 0]))
        late = torch.ones(3, 28, dtype=torch.long)
        late[0, :5] = 0
        got, cache = forward(model, new.repeat(2, 1)[:3], cache, attention_mask=late)
        found.append(got)
        tokens.append(found)
    assert set(runs_of(model)) == {"write", "prefill", "decode 1"}
    for theirs, mine in zip(*tokens, strict=True):
        assert torch.equal(mine, theirs)


def test_a_mask_is_looked_at_once_a_forward(monkeypatch):
    looked = []
    differs = IndexMask.differs

    def noted(mask: IndexMask, *args: Any) -> Tensor:
        looked.append(mask.num_rows)
        return differs(mask, *args)

    monkeypatch.setattr(IndexMask, "differs", noted)
    _, model = both("glm_moe_dsa")
    ids = prompt(2, 20)
    # The same tensor twice, changed in between: the second forward looks anew.
    mask = additive(torch.ones(20, 20).triu(1).bool().expand(2, 1, 20, 20).clone())
    forward(model, ids, attention_mask=mask)
    assert set(runs_of(model)) == {"write", "prefill"}
    mask[:, :, :, 0] = torch.finfo(mask.dtype).min
    mask[:, :, 0, 0] = 0
    forward(model, ids, attention_mask=mask)
    assert set(runs_of(model)) == {"write"}
    assert looked == [20, 20]
    # Without a cache nothing but the order of layers tells two forwards apart.
    with torch.no_grad():
        model(ids, attention_mask=mask, use_cache=False)
        mask.copy_(additive(torch.ones(20, 20).triu(1).bool()))
        model(ids, attention_mask=mask, use_cache=False)
    assert looked == [20] * 4
    assert set(runs_of(model)) == {"write", "prefill"}
    swap_emulated(model, check_masks=False)
    wanted = generated(on_torch("glm_moe_dsa"), ids, new=4, padding=3)
    assert generated(model, ids, new=4, padding=3) == wanted
    assert looked == [20] * 4


@every_family
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_host_keys_in_pages_give_the_host_s_tokens(family, dtype):
    model = on_kernels(family, dtype=dtype)
    ids = prompt(2, 61)
    wanted = generated(model, ids, new=6, padding=5)
    hidden = torch.ones(61, 61).triu(1).bool() | torch.ones(61, 61).tril(-30).bool()
    mask = additive(hidden.expand(2, 1, 61, 61)).to(dtype).clamp(min=torch.finfo(dtype).min)
    wanted_window, _ = forward(model, ids, attention_mask=mask)
    report = swap_emulated(model, keys="host")
    assert report.refused == {}
    assert generated(model, ids, new=6, padding=5) == wanted
    assert set(runs_of(model)) == {"write", "prefill", "decode 1"}
    assert torch.equal(forward(model, ids, attention_mask=mask)[0], wanted_window)
    assert set(runs_of(model)) == {"write"}
    # As under autocast, where the norm gives fp32.
    for module in indexers(model):
        module.k_norm.register_forward_hook(lambda _, __, keys: keys.float())
    with torch.no_grad(), recorded(model) as calls:
        _, cache = forward(model, ids)
    for (module, given, _), layer in zip(calls, cache.layers, strict=False):
        keys = parts_of(module, given)[1]
        assert torch.equal(layer.index_pages.keys(61)[0], keys.to(dtype))
        assert not torch.equal(keys.to(dtype), keys)


def on_torch(family: str) -> Any:
    model = on_kernels(family)
    swap_indexers(model)
    return model


def test_hooks_that_copy_masks_for_each_layer_cost_no_more_looks(monkeypatch):
    looked = []
    differs = IndexMask.differs

    def noted(mask: IndexMask, *args: Any) -> Tensor:
        looked.append(mask.num_rows)
        return differs(mask, *args)

    monkeypatch.setattr(IndexMask, "differs", noted)
    by_torch, model = both("deepseek_v32")

    def copied(module: Any, args: Any, kwargs: Any) -> Any:
        return tuple(each.clone() if isinstance(each, Tensor) else each for each in args), kwargs

    for module in indexers(model):
        module._hf_hook = "one of accelerate's"
        module.register_forward_pre_hook(copied, with_kwargs=True)
    ids = prompt(2, 30)
    wanted = generated(by_torch, ids, new=4, padding=2)
    assert generated(model, ids, new=4, padding=2) == wanted
    assert looked == [30, 1, 1, 1]


def test_a_cache_goes_on_where_inference_mode_began_it():
    by_torch, model = both("glm_moe_dsa")
    ids = prompt(2, 30)
    wanted, _ = forward(by_torch, torch.cat([ids, prompt(2, 1)], dim=1))
    with torch.inference_mode():
        got, cache = forward(model, ids)
        cache.batch_repeat_interleave(2)
    assert torch.equal(got, wanted[:, :-1])
    got, _ = forward(model, prompt(2, 1).repeat_interleave(2, dim=0), cache)
    assert torch.equal(got[:, -1], wanted[:, -1].repeat_interleave(2))


def test_an_indexer_on_kernels_is_called_between_graphs_of_a_compiler():
    _, model = both("glm_moe_dsa")
    with torch.no_grad(), recorded(model) as calls:
        model(prompt(2, 20), use_cache=False)
    module, given, wanted = calls[0]
    compiled = torch.compile(module, backend="eager")
    assert torch.equal(compiled(**given), wanted)
    assert len(runs_of(model)["prefill"]) == 3


def test_rows_with_fewer_keys_end_in_one_that_is_hidden_from_them():
    rows, mask = [], torch.ones(2, 40, dtype=torch.long)
    mask[0, :3] = 0
    for model in both("deepseek_v32"):
        with torch.no_grad(), recorded(model) as calls:
            model(prompt(2, 40), attention_mask=mask, use_cache=False)
        rows.append(torch.stack([indices for _, _, indices in calls]))
    assert torch.equal(*rows)
    for found in rows[1]:
        assert found[0, 9].tolist() == [*range(3, 10)] + [0] * 9
        assert found[1, 9].tolist() == [*range(10)] + [10] * 6
    # Of a NaN key among so few that none is hidden the place goes to one that is selected.
    for model in both("deepseek_v32"):
        for module in indexers(model):
            module.k_norm.register_forward_hook(lambda _, __, keys: with_nan(keys))
        with recorded(model) as calls:
            forward(model, prompt(1, 12))
        assert calls[0][2][0, -1].tolist() == [*range(1, 12), 1]
        assert calls[0][2][0, 0].tolist() == [1] * 12


def with_nan(keys: Tensor) -> Tensor:
    return torch.cat([keys[:, :1] * math.nan, keys[:, 1:]], dim=1)


@every_family
def test_without_a_mask_rows_see_what_their_position_ids_say(family):
    models = both(family)
    ids = prompt(2, 40)
    for model in models:
        with torch.no_grad(), recorded(model) as calls:
            model(ids, use_cache=False)
        for module, given, wanted in calls:
            given["attention_mask"] = None
            assert torch.equal(module(**given), wanted)
        # Fewer than there are: rows of the first request see one key less.
        given["position_ids"] = torch.stack([torch.arange(-1, 39), torch.arange(40)])
        found = module(**given)
        assert torch.equal(found[1], wanted[1])
        assert torch.equal(found[0, 20:].amax(dim=-1) <= torch.arange(19, 39), torch.ones(20) > 0)
    assert "prefill" in runs_of(models[1])
