"""What swapped indexers launch, on the stub driver: planned, bound once, and nothing besides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from firesteel.errors import UnsupportedError
from firesteel.indexer.spec import PageWriterSpec
from firesteel.integrations.transformers.index_kernels import (
    IndexKernels,
    IndexSpecs,
    KeyRows,
    index_specs,
)
from firesteel.integrations.transformers.index_pages import IndexPages
from firesteel.integrations.transformers.indexers import IndexerOptions, swap_with
from firesteel.launch import Ready, plan
from firesteel.launch.spec import Spec
from firesteel.launch.stub import StubDriver
from firesteel.launch.watch import watch
from tests.integrations.transformers.indexer_models import CPU, forward, little, prompt
from tests.launch.rig import ready_on_stub

OPTIONS = IndexerOptions(max_keys=1000, max_requests=3, max_rows=40)


@pytest.fixture
def driver() -> Iterator[StubDriver]:
    try:
        made = StubDriver.open()
    except UnsupportedError as error:
        pytest.skip(str(error))
    made.reset()
    yield made
    made.reset()


def kernels_on(driver: StubDriver, specs: IndexSpecs, device: torch.device = CPU) -> IndexKernels:
    def prepare(spec: Spec, max_tokens: int) -> Ready:
        flags = {"slots": ("i64",)} if isinstance(spec, PageWriterSpec) else None
        return ready_on_stub(plan(spec, max_tokens, flags=flags), driver)

    return IndexKernels(specs, device, prepare)


def specs_of(**changes: Any) -> IndexSpecs:
    given = {"num_heads": 8, "head_dim": 128, "top_k": 512, "dtype": torch.float32, "keys": "e4m3"}
    sizes = {name: getattr(OPTIONS, name) for name in ("max_keys", "max_requests", "max_rows")}
    return index_specs(**{**given, **sizes, **changes})


def launched(driver: StubDriver) -> dict[str, int]:
    """Driver functions called since the last time asked, but for contexts."""
    found = {name: count for name, count in driver.calls().items() if not name.startswith("cuCtx")}
    driver.reset()
    return found


def test_specs_are_of_the_model_and_the_limits() -> None:
    specs = specs_of(num_heads=32, top_k=2048, dtype=torch.bfloat16, max_keys=4097)
    assert [spec.rows for spec in specs.decode] == list(range(1, 9))
    for spec in (*specs.decode, specs.prefill):
        assert (spec.num_heads, spec.top_k, spec.width, spec.page_stride) == (32, 2048, 65, 8448)
    assert (specs.writer.dtype, specs.writer.page_stride) == ("bf16", 8448)
    assert specs.prefill.num_requests == 3
    assert specs.cache_dtype == torch.float8_e4m3fn
    with pytest.raises(UnsupportedError, match="sm_80, kernels for e4m3 keys need sm_89"):
        specs.for_target("sm_80")
    assert not specs.for_target("sm_89").prefill.pdl
    assert specs.for_target("sm_90") == specs


def test_a_call_launches_what_its_spec_selects_at_the_addresses_of_the_cache(
    driver: StubDriver,
) -> None:
    kernels = kernels_on(driver, specs_of())
    pages = IndexPages(kernels, 2, kernels.width, is_static=False)
    for rows in (3, 30):
        pages.grow(rows)
        where = KeyRows.of(pages, rows)
        keys, q = torch.zeros(2, rows, 128), torch.zeros(2, rows, 8, 128).to(torch.float8_e4m3fn)
        w = torch.zeros(2, rows, 8)
        driver.reset()
        kernels.write(pages, keys, where)
        written = driver.launches()
        spec = kernels.ready["write"].plan.spec
        counts = [2 * rows] if rows == 3 else [40, 20]
        assert len(written) == len(counts)
        for number, launch in enumerate(written):
            start = 40 * number
            assert launch.params[:4] == (
                keys.data_ptr() + 4 * 128 * start,
                where.slots.data_ptr() + 8 * start,
                pages.data.data_ptr(),
                pages.data.data_ptr(),
            )
        wanted = [each for n in counts for each in spec.select(n, (("slots", "i64"),))]
        assert [launch.grid for launch in written] == [each.grid for each in wanted]
        driver.reset()
        found = kernels.select(pages, q, w, where)
        assert found.shape == (2, rows, 512)
        name, counts = ("decode 3", [2]) if rows == 3 else ("prefill", [40, 20])
        wanted = [each for n in counts for each in kernels.ready[name].plan.spec.select(n, ())]
        assert [launch.grid for launch in driver.launches()] == [each.grid for each in wanted]
        first = driver.launches()[0].params
        assert first[:4] == (q.data_ptr(), w.data_ptr(), *[pages.data.data_ptr()] * 2)
    assert where.slots.tolist() == [*range(3, 33), *range(1024 + 3, 1024 + 33)]
    assert where.key_ends.tolist() == [*range(4, 34)] * 2
    assert where.row_request.tolist() == [0] * 30 + [1] * 30


def test_a_steady_call_binds_and_compiles_nothing_and_makes_its_output_alone(
    driver: StubDriver,
) -> None:
    kernels = kernels_on(driver, specs_of())
    pages = IndexPages(kernels, 2, kernels.width, is_static=False)
    pages.grow(1)
    where = KeyRows.of(pages, 1)
    keys, q = torch.zeros(2, 1, 128), torch.zeros(2, 1, 8, 128).to(torch.float8_e4m3fn)
    w = torch.zeros(2, 1, 8)
    kernels.write(pages, keys, where)
    kernels.select(pages, q, w, where)
    bound = dict(pages.bounds)
    launched(driver)
    with watch(CPU) as seen:
        kernels.write(pages, keys, where)
        kernels.select(pages, q, w, where)
    assert pages.bounds == bound
    assert set(launched(driver)) == {"cuLaunchKernelEx"}
    assert (seen.compiles, seen.environment_reads, seen.host_syncs) == (0, 0, 0)
    makers = {"aten.empty.memory_format", "aten.view.default", "aten.slice.Tensor"}
    assert set(seen.torch_operations) <= makers
    assert seen.torch_operations["aten.empty.memory_format"] == 1


@pytest.mark.host
def test_a_decoded_token_launches_each_layer_s_operations_and_no_more(
    driver: StubDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    select = IndexKernels.select

    def zeroed(*args: Any) -> Tensor:
        # The stub writes nothing, and the host must not index by what memory held.
        return select(*args).zero_()

    monkeypatch.setattr(IndexKernels, "select", zeroed)
    model = little("deepseek_v32", index_head_dim=128, index_topk=512)
    report = swap_with(model, OPTIONS, lambda specs, device: kernels_on(driver, specs, device))
    assert report.num_layers == 3
    assert [plans["max_tokens"] for plans in report.as_dict()["plans"]] == [40, 40] + [3] * 8
    _, cache = forward(model, prompt(2, 12))
    forward(model, prompt(2, 1), cache)
    launched(driver)
    arenas = {bound.arena.address for layer in cache.layers for bound in bounds_of(layer)}
    bound = [list(bounds_of(layer)) for layer in cache.layers]
    for _ in range(4):
        forward(model, prompt(2, 1), cache)
    decode = report.ready[2].plan.spec
    assert launched(driver) == {"cuLaunchKernelEx": 4 * 3 * (1 + len(decode.select(2, ())))}
    assert [list(bounds_of(layer)) for layer in cache.layers] == bound
    assert len(arenas) == 1
    assert all(not ready.audit.misses for ready in report.ready)


def bounds_of(layer: Any) -> Any:
    return layer.index_pages.bounds.values()
