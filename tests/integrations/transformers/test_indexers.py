"""Swapped indexers on PyTorch operators: the host's own selection, or what e4m3 makes of it."""

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm

from firesteel.errors import InvalidArgumentError, UnsupportedError
from firesteel.integrations.transformers import (
    PackedLinear,
    load_model,
    restore_indexers,
    swap_indexers,
)
from firesteel.integrations.transformers.index_modules import SwappedIndexer
from tests.checkpoints import STORAGES, write
from tests.integrations.transformers.index_scores import (
    e4m3_bound,
    parts_of,
    score_bound,
    scores_of,
)
from tests.integrations.transformers.indexer_models import (
    FAMILIES,
    INDEXERS,
    TOP_K,
    forward,
    generated,
    indexers,
    little,
    prompt,
    recorded,
    separated,
)

TAKES_BOOL = "torch.bool" in inspect.getsource(inspect.unwrap(glm.GlmMoeDsaIndexer.forward))

every_family = pytest.mark.parametrize("family", FAMILIES)


def full_rows(indices: Tensor) -> list[list[set[int]]]:
    """The selections of rows that have more keys than are selected."""
    return [[set(row) for row in request[TOP_K:]] for request in indices.tolist()]


@pytest.mark.host
@every_family
@pytest.mark.parametrize(
    ("dtype", "padding", "options"),
    [
        (torch.bfloat16, 5, {}),
        (torch.float32, 3, {"num_beams": 3}),
        (torch.bfloat16, 4, {"cache_implementation": "static"}),
        (torch.float32, 0, {"prompt_lookup_num_tokens": 3}),
        (torch.float32, 0, {"use_cache": False, "max_new_tokens": 3}),
    ],
    ids=["bf16-padded", "beams-padded", "static-padded", "drafts", "no-cache"],
)
def test_host_keys_give_the_host_s_tokens(family, dtype, padding, options):
    model = little(family, dtype=dtype)
    ids = prompt(1 if "prompt_lookup_num_tokens" in options else 2)
    wanted = generated(model, ids, padding=padding, **options)
    report = swap_indexers(model, keys="host")
    assert generated(model, ids, padding=padding, **options) == wanted
    assert len(report.layers) == INDEXERS[family]
    # Tokens that never change would hide a wrong cache.
    assert len(wanted[0]) < 8 or len({token for tokens in wanted for token in tokens}) > 4


@pytest.mark.skipif(not TAKES_BOOL, reason="this host adds bool masks as numbers")
@every_family
@pytest.mark.parametrize("padding", [0, 5])
def test_host_keys_with_sdpa_s_bool_masks(family, padding):
    model = little(family, attention="sdpa")
    wanted = generated(model, prompt(), padding=padding)
    swap_indexers(model, keys="host")
    assert generated(model, prompt(), padding=padding) == wanted


@pytest.mark.host
def test_a_bool_mask_that_the_host_cannot_read_is_refused_by_name(monkeypatch):
    model = little("glm_moe_dsa", attention="sdpa")
    swap_indexers(model, keys="host")
    kind = type(indexers(model)[0])
    assert kind.takes_bool == TAKES_BOOL
    monkeypatch.setattr(kind, "takes_bool", False)
    with pytest.raises(UnsupportedError, match=r"attention_mask: got torch\.bool"):
        generated(model, prompt(), padding=5)


@pytest.mark.host
@every_family
def test_host_keys_select_what_the_host_selects(family):
    model = little(family, dtype=torch.bfloat16)
    ids = prompt(3, 40)
    with torch.no_grad(), recorded(model) as calls:
        model(ids, use_cache=False)
    scores = [scores_of(*parts_of(module, given)) for module, given, _ in calls]
    swap_indexers(model, keys="host")
    assert len(calls) == INDEXERS[family]
    for (module, given, indices), exact in zip(calls, scores, strict=True):
        found = module(**given)
        assert found.dtype == torch.int32
        mine, theirs = [each[:, TOP_K:].long().sort().values for each in (found, indices)]
        # Ties, of scores that are 0, the host breaks in any way, and we for the lower position.
        best = [exact[:, TOP_K:].gather(-1, each).sort().values for each in (mine, theirs)]
        assert torch.equal(*best)
        assert (mine == theirs).float().mean() > 0.99
        assert (mine.sum(dim=-1) <= theirs.sum(dim=-1)).all()
        # All that a row sees where that is less, and then a key that it does not see.
        for row in range(TOP_K - 1):
            assert (found[:, row] == torch.arange(TOP_K).clamp(max=row + 1)).all()


@pytest.mark.host
@every_family
def test_e4m3_keys_give_the_same_tokens_where_scores_are_far_apart(family):
    model = separated(family)
    ids = prompt(2, 6)
    wanted = generated(model, ids)
    assert all(len(set(tokens)) > 4 for tokens in wanted)
    whole = torch.cat([ids, torch.tensor(wanted)], dim=1)
    with torch.no_grad(), recorded(model) as calls:
        model(whole, use_cache=False)
    parts = [parts_of(module, given) for module, given, _ in calls]
    swap_indexers(model)
    for (module, given, indices), (q, k, w) in zip(calls, parts, strict=True):
        best = scores_of(q, k, w)[:, TOP_K:].sort(dim=-1, descending=True).values
        gap = best[..., TOP_K - 1] - best[..., TOP_K]
        rounded = [each + e4m3_bound(each) * sign for each, sign in ((q, 1), (k, -1))]
        off = (scores_of(*rounded, w) - scores_of(q, k, w))[:, TOP_K:].nan_to_num()
        # Twice what one score is off by, with every number rounded as far as can be.
        assert (gap > 2 * off.abs().amax(dim=-1)).all()
        assert full_rows(module(**given)) == full_rows(indices)
    assert generated(model, ids) == wanted


@every_family
def test_where_e4m3_keys_select_others_the_host_s_scores_are_a_near_tie(family):
    model = little(family)
    ids = prompt(2, 60)
    with torch.no_grad(), recorded(model) as calls:
        model(ids, use_cache=False)
    parts = [parts_of(module, given) for module, given, _ in calls]
    swap_indexers(model)
    swapped = kept = 0
    for (module, given, indices), (q, k, w) in zip(calls, parts, strict=True):
        scores, bound = scores_of(q, k, w), score_bound(q, k, w)
        found = full_rows(module(**given))
        for b, request in enumerate(full_rows(indices)):
            for row, theirs in enumerate(request):
                lost, won = theirs - found[b][row], found[b][row] - theirs
                assert len(lost) == len(won)
                swapped += len(lost)
                kept += TOP_K - len(lost)
                own, off = scores[b, row + TOP_K], bound[b, row + TOP_K]
                for one in lost:
                    for other in won:
                        assert own[one] >= own[other] - 1e-6
                        assert own[one] - own[other] <= off[one] + off[other]
    # Rounding does change some, and few.
    assert 0 < swapped < kept / 20


@pytest.mark.host
@every_family
@pytest.mark.parametrize("kind", ["window", "bias", "right-padded"])
def test_masks_of_any_kind_are_the_host_s(family, kind):
    model = little(family)
    ids = prompt(2, 20)
    hidden = torch.ones(20, 20).triu(1).bool().expand(2, 1, 20, 20).clone()
    mask = torch.zeros(2, 1, 20, 20)
    if kind == "window":
        hidden |= torch.ones(20, 20).tril(-9).bool()
    elif kind == "right-padded":
        hidden[1, ..., 15:] = True
    else:
        mask = torch.randn(mask.shape, generator=torch.Generator().manual_seed(2))
    mask = mask.masked_fill(hidden, torch.finfo(mask.dtype).min)
    with torch.no_grad(), recorded(model) as calls:
        model(ids, attention_mask=mask, use_cache=False)
    swap_indexers(model, keys="host")
    for module, given, indices in calls:
        found = module(**given)
        seen = ~hidden[:, 0]
        for mine, theirs in ((found, indices), (indices, found)):
            # What a row must not see may be anything.
            wanted = torch.zeros_like(seen).scatter(-1, theirs.long(), True) & seen
            assert torch.equal(torch.zeros_like(seen).scatter(-1, mine.long(), True) & seen, wanted)


@pytest.mark.host
@every_family
def test_a_cache_is_cropped_selected_and_repeated_as_the_host_s(family):
    tokens: list[Any] = []
    for keys in (None, "host", "e4m3"):
        model = separated(family)
        if keys is not None:
            swap_indexers(model, keys=keys)
        ids = prompt(3, 8)
        _, cache = forward(model, ids)
        cache.crop(-3)
        cache.batch_select_indices(torch.tensor([2, 0]))
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([0, 2, 2, 3]))
        tokens.append(forward(model, prompt(4, 5, seed=9), cache)[0])
    assert torch.equal(tokens[0], tokens[1])
    assert torch.equal(tokens[0], tokens[2])


@every_family
def test_names_files_and_copies_stay_and_restoring_gives_the_host_back(family, tmp_path):
    model = little(family)
    names, kinds = list(model.state_dict()), [type(each) for each in indexers(model)]
    ids = prompt()
    wanted = generated(model, ids)
    swap_indexers(model)
    swap_indexers(model, keys="host")
    assert list(model.state_dict()) == names
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    model.save_pretrained(tmp_path)
    assert restore_indexers(model) == INDEXERS[family]
    assert [type(each) for each in indexers(model)] == kinds
    assert not any(hasattr(each, "firesteel") for each in indexers(model))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    for each in (model, copied, pickled, loaded):
        assert generated(each, ids) == wanted
    assert restore_indexers(model) == 0
    assert all(type(each) not in kinds for each in indexers(copied))


@every_family
def test_indexers_whose_projections_are_packed_are_swapped_too(family, tmp_path):
    written = write(tmp_path / "in", family, STORAGES["ct-w4-g32"], linears=True)
    model = load_model(written.path, dtype=torch.float32)
    kept = [type(each.wq_b) for each in indexers(model)]
    assert kept == [PackedLinear] * len(kept)
    wanted = generated(model, prompt())
    swap_indexers(model, keys="host")
    assert generated(model, prompt()) == wanted
    assert [type(each.wq_b) for each in indexers(model)] == kept


@pytest.mark.host
def test_the_report_says_which_layers_go_which_way_and_why():
    model = little("glm_moe_dsa")
    report = swap_indexers(model)
    assert report.as_dict() == {
        "keys": "e4m3",
        "layers": 0,
        "refused": {"index_head_dim: got 64, kernels have 128": 2},
        "shared": 1,
        "plans": [],
    }
    paths = [f"model.layers.{number}.self_attn.indexer" for number in (0, 1)]
    assert list(report.layers) == paths
    assert pickle.loads(pickle.dumps(report)) == report
    wanted = {
        "index_n_heads: got 4, kernels have 8 to 64": {"index_n_heads": 4},
        "index_topk: got 4, kernels have 512, 1024, 2048": {},
        "device: cpu, kernels need a CUDA device": {"index_topk": 512},
    }
    for reason, changes in wanted.items():
        other = little("deepseek_v32", **{"index_head_dim": 128, **changes})
        assert swap_indexers(other).refused == {reason: 3}
    other = little("deepseek_v32", index_head_dim=128, index_topk=512)
    (reason,) = swap_indexers(other, keys="host").refused
    assert reason.startswith("dtype: got torch.float32, kernels that keep keys as the host does")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keys": "bf16"}, "keys: got 'bf16', must be one of e4m3, host"),
        ({"max_keys": 0}, "max_keys: got 0, must be an integer from 1"),
        ({"max_requests": True}, "max_requests: got True, must be an integer from 1"),
        ({"max_rows": 1.5}, "max_rows: got 1.5, must be an integer from 1"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        swap_indexers(little("glm_moe_dsa"), **options)


def test_a_model_without_indexers_and_a_replaced_forward_are_refused():
    with pytest.raises(UnsupportedError, match="Linear has no indexer, must be of GlmMoeDsa, Dee"):
        swap_indexers(torch.nn.Linear(2, 2))
    model = little("glm_moe_dsa")
    indexers(model)[1].__class__ = type("MyIndexer", (glm.GlmMoeDsaIndexer,), {})
    with pytest.raises(UnsupportedError, match=r"layers.1.self_attn.indexer: is a MyIndexer, a su"):
        swap_indexers(model)
    model = little("glm_moe_dsa")
    indexers(model)[1].forward = print
    with pytest.raises(UnsupportedError, match=r"layers.1.self_attn.indexer.forward: was replaced"):
        swap_indexers(model)


def test_the_hooks_that_move_inputs_between_devices_stay():
    model = little("glm_moe_dsa")
    wanted = generated(model, prompt())
    for module in indexers(model):
        add_hook_to_module(module, AlignDevicesHook("cpu", io_same_device=True))
    hooked = [module.forward for module in indexers(model)]
    swap_indexers(model, keys="host")
    assert generated(model, prompt()) == wanted
    assert [module.forward for module in indexers(model)] == hooked
    for module in indexers(model):
        assert module._old_forward.__func__ is SwappedIndexer.forward
    restore_indexers(model)
    assert generated(model, prompt()) == wanted
    for module in indexers(model):
        assert module._old_forward.__func__ is glm.GlmMoeDsaIndexer.forward


@pytest.mark.host
def test_a_cache_of_other_keys_is_refused_by_name():
    model = little("glm_moe_dsa")
    _, cache = forward(model, prompt())
    swap_indexers(model)
    with pytest.raises(InvalidArgumentError, match="start with a new cache after swap_indexers"):
        forward(model, prompt(2, 1), cache)
    with pytest.raises(ValueError, match="no indexer key cache"):
        forward(model, prompt(), DynamicCache())
