"""Swapped indexers on kernels: limits, and what copies, threads and layers share or do not."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from firesteel.errors import InvalidArgumentError
from firesteel.integrations.transformers import restore_indexers
from firesteel.integrations.transformers.index_kernels import IndexKernels
from tests.integrations.transformers.indexer_models import (
    both,
    forward,
    generated,
    indexers,
    kernels_of,
    prompt,
    small_top_k,
    swap_emulated,
)

__all__ = ["small_top_k"]

pytestmark = pytest.mark.usefixtures("small_top_k")


def test_limits_are_named():
    _, model = both("glm_moe_dsa")
    with pytest.raises(InvalidArgumentError, match="257 keys a request, max_keys of swap_indexers"):
        forward(model, prompt(1, 257))
    _, cache = forward(model, prompt(1, 250))
    with pytest.raises(InvalidArgumentError, match=r"cache: 257 keys a request, .* is 256"):
        forward(model, prompt(1, 7), cache)
    with pytest.raises(
        InvalidArgumentError, match=r"batch: got 5 requests, max_requests of .* is 4"
    ):
        forward(model, prompt(5, 3))
    with pytest.raises(InvalidArgumentError, match="got 5 requests"), torch.no_grad():
        model(prompt(5, 3), use_cache=False)
    _, cache = forward(model, prompt(3, 5))
    cache.batch_repeat_interleave(2)
    with pytest.raises(InvalidArgumentError, match="got 6 requests"):
        forward(model, prompt(6, 1), cache)
    cache = StaticCache(model.config, max_cache_len=300)
    with pytest.raises(InvalidArgumentError, match=r"a static one of 300 keys, max_keys .* is 256"):
        forward(model, prompt(1, 5), cache)
    with pytest.raises(InvalidArgumentError, match="its layer is a DynamicLayer, must be one of"):
        forward(model, prompt(), DynamicCache())
    _, cache = forward(model, prompt(2, 5))
    with pytest.raises(InvalidArgumentError, match="got 4 columns, must have one for each of 6"):
        forward(model, prompt(2, 1), cache, attention_mask=torch.zeros(2, 1, 1, 4))
    assert cache.layers[0].index_pages.length == 5
    # Exactly, though pages have 64 keys.
    swap_emulated(model, max_keys=100)
    with pytest.raises(InvalidArgumentError, match=r"101 keys a request, .* is 100"):
        forward(model, prompt(1, 101))
    with pytest.raises(InvalidArgumentError, match=r"a static one of 101 keys, .* is 100"):
        forward(model, prompt(1, 5), StaticCache(model.config, max_cache_len=101))
    _, cache = forward(model, prompt(2, 100))
    with pytest.raises(InvalidArgumentError, match="cache: holds 2 requests, the call has 1"):
        indexers(model)[0]._pages(kernels_of(model), cache, 1)


def test_a_cache_belongs_to_the_kernels_that_filled_it():
    by_torch, model = both("deepseek_v32")
    _, cache = forward(by_torch, prompt())
    with pytest.raises(InvalidArgumentError, match="index keys from before swap_indexers"):
        forward(model, prompt(2, 1), cache)
    _, cache = forward(model, prompt())
    with pytest.raises(TypeError, match=r"cache: .* cannot be pickled; restore_indexers"):
        pickle.dumps(cache)
    swap_emulated(model)
    for _ in range(2):
        with pytest.raises(
            InvalidArgumentError, match=r"in pages of kernels .* must be a new cache"
        ):
            forward(model, prompt(2, 1), cache)
        restore_indexers(model)


def test_a_model_that_is_copied_or_moved_leaves_the_kernels_and_says_so_once(caplog):
    by_torch, model = both("glm_moe_dsa")
    wanted = generated(by_torch, prompt(2, 30))
    once = "swap_indexers puts them on kernels again"
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [each.firesteel.kernels for each in indexers(copied)] == [None, None]
        assert generated(copied, prompt(2, 30)) == wanted
    assert caplog.text.count(once) == caplog.text.count("copied or pickled") == 2
    # What has none to lose says nothing.
    copy.deepcopy(copied)
    copied.double()
    model.to("cpu").float()
    assert caplog.text.count(once) == 2
    assert kernels_of(model) is not None
    assert generated(model.double().float(), prompt(2, 30)) == wanted
    assert caplog.text.count(once) == 3
    assert caplog.text.count("moved or converted") == 1
    assert [each.firesteel.kernels for each in indexers(model)] == [None, None]


def test_threads_on_one_stream_share_scratch_pages_in_turn(monkeypatch):
    _, model = both("glm_moe_dsa")
    write = IndexKernels.write

    def slow(*args: Any) -> None:
        write(*args)
        # The other thread's time to write over it.
        time.sleep(0.02)

    monkeypatch.setattr(IndexKernels, "write", slow)
    prompts = [prompt(batch, 40, seed=batch) for batch in (1, 3)]
    found: list[Tensor] = [torch.empty(0)] * 2

    def call(number: int) -> None:
        with torch.no_grad():
            found[number] = model(prompts[number], use_cache=False).logits

    wanted = []
    for number in (0, 1):
        call(number)
        wanted.append(found[number])
    threads = [threading.Thread(target=call, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
    # All requests' pages are bound, once, though the first call had one request.
    scratch = kernels_of(model).scratch(1)
    for bound in scratch.bounds.values():
        assert bound.tensors["cache"].shape == (4 * 4 * scratch.kernels.page_bytes,)
    assert kernels_of(model).ready["write"].binds == 1


def test_all_layers_share_plans_tables_and_workspace():
    _, model = both("deepseek_v32")
    kernels = kernels_of(model)
    assert list(kernels.ready) == ["write", "prefill", *(f"decode {n}" for n in range(1, 9))]
    _, cache = forward(model, prompt(2, 20))
    forward(model, prompt(2, 1), cache)
    bound = {name: ready.binds for name, ready in kernels.ready.items() if ready.binds}
    assert bound == {"write": 3, "prefill": 3, "decode 1": 3}
    pages = [layer.index_pages for layer in cache.layers]
    where = [each.data.data_ptr() for each in pages]
    for step in range(3):
        forward(model, prompt(2, 1, seed=step), cache)
    # Nothing is bound or moved while decoding.
    assert {name: ready.binds for name, ready in kernels.ready.items() if ready.binds} == bound
    assert [each.data.data_ptr() for each in pages] == where
    assert [each.seq_lens.tolist() for each in pages] == [[24, 24]] * 3
