"""`select` of the indexer: total and pure, of few keys and bounded memory."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firesteel.errors import InvalidArgumentError, UnsupportedError
from firesteel.indexer.launches import HOPPER
from firesteel.indexer.pages import CACHE_DTYPES
from firesteel.indexer.plan import MAX_WORKSPACE, SPAN, decode_slice, levels
from firesteel.indexer.spec import TOP_KS, DecodeSpec, PageWriterSpec, PrefillSpec
from firesteel.launch import plan
from firesteel.launch.kernel import Launch
from firesteel.launch.spec import Spec
from firesteel.launch.stub import StubDriver
from tests.launch.rig import call_of, ready_on_stub, tensors_of

NEEDS_GLUON = pytest.mark.skipif(
    not HOPPER, reason="needs Triton 3.6 or later, which has this Gluon"
)
MILLION = 1 << 20
TURNKEY = DecodeSpec(num_heads=32, top_k=2048, rows=6, width=128)
LONG = replace(TURNKEY, width=MILLION // 64)
HALF = DecodeSpec(num_heads=32, top_k=2048, width=128, cache_dtype="bf16")
PREFILL = PrefillSpec(num_heads=32, top_k=2048, num_keys=131072)
PAGED = PrefillSpec(num_heads=64, top_k=512, width=2048, num_requests=4, has_slots=True)


def names(spec: Spec, num_tokens: int) -> list[str]:
    return [launch.key.name.removesuffix("_kernel") for launch in spec.select(num_tokens, ())]


@st.composite
def decodes(draw: st.DrawFn) -> DecodeSpec:
    return DecodeSpec(
        num_heads=draw(st.integers(8, 64)),
        top_k=draw(st.sampled_from(TOP_KS)),
        rows=draw(st.integers(1, 8)),
        width=draw(st.sampled_from((1, 3, 128, 2048, MILLION // 64, 4 * MILLION // 64))),
        cache_dtype=draw(st.sampled_from(tuple(CACHE_DTYPES))),
        page_stride=draw(st.sampled_from((0, 1_077_120))),
        has_slots=draw(st.booleans()),
        has_scores=draw(st.booleans()),
        is_filtered=draw(st.sampled_from((None, True, False))),
        pdl=draw(st.booleans()),
        wgmma=bool(HOPPER) and draw(st.booleans()),
    )


@given(spec=decodes(), num_tokens=st.sampled_from((0, 1, 2, 7, 63, 264, 5000)))
def test_decode_is_total_and_pure(spec: DecodeSpec, num_tokens: int) -> None:
    launches = spec.select(num_tokens, ())
    assert launches == replace(spec).select(num_tokens, ())
    step = decode_slice(spec)
    assert len(launches) <= 5 * -(-num_tokens // step)
    assert all(all(launch.grid) for launch in launches)
    assert bool(launches) == (num_tokens > 0)
    assert sum(region.num_bytes for region in spec.workspace(num_tokens)) <= MAX_WORKSPACE


@given(spec=decodes())
def test_workspace_never_shrinks(spec: DecodeSpec) -> None:
    before = [0] * len(spec.workspace(0))
    for num_tokens in (0, 1, 2, 3, 5, 8, 9, 40, 41, 42, 300, 5000):
        sizes = [region.num_bytes for region in spec.workspace(num_tokens)]
        assert all(now >= then for now, then in zip(sizes, before, strict=True))
        before = sizes


@given(spec=decodes(), num_requests=st.sampled_from((1, 2, 3, 5, 8, 48, 133)))
def test_a_filter_s_regions_hold_what_it_writes(spec: DecodeSpec, num_requests: int) -> None:
    launches = spec.select(num_requests, ())
    if launches[-1].key.name != "filter_kernel":
        return
    sizes = {region.name: region.num_bytes for region in spec.workspace(num_requests)}
    done = 0
    for scores, last in batched(launches, 2):
        constants = dict(last.key.constexprs)
        num_rows, parts, _ = last.grid
        requests, programs, _ = scores.grid
        assert num_rows == requests * spec.rows
        given = {name: last.arguments[at] for at, (name, _) in enumerate(last.key.arguments)}
        assert given["programs"] == programs
        assert given["first_row"] == done
        done += num_rows
        assert 64 * programs <= constants["GROUPS"] * constants["SHARES"]
        assert constants["GROUPS"] >= spec.top_k
        assert parts <= constants["MAX_PARTS"]
        assert sizes["scores"] >= 4 * num_rows * spec.capacity
        assert sizes["maxima"] >= 4 * num_rows * programs * 64
        assert sizes["candidates"] >= 8 * num_rows * parts * constants["FINAL"]
        assert sizes["counts"] >= 4 * num_rows * parts
        assert sizes["arrived"] >= 4 * num_rows
    assert done == num_requests * spec.rows


def batched(launches: Sequence[Launch], size: int) -> Iterator[Sequence[Launch]]:
    for at in range(0, len(launches), size):
        yield launches[at : at + size]


@pytest.mark.parametrize(
    ("num_heads", "wgmma"),
    [
        *(pytest.param(heads, True, marks=NEEDS_GLUON) for heads in (8, 32, 64)),
        (32, False),
    ],
)
@pytest.mark.parametrize("num_keys", [1, 8192, 131071, MILLION, 4 * MILLION])
def test_slices_of_prefill_fit_the_workspace(num_keys: int, num_heads: int, wgmma: bool) -> None:
    spec = PrefillSpec(num_heads=num_heads, top_k=2048, num_keys=num_keys, wgmma=wgmma)
    before = 0
    for num_rows in (0, 1, 17, 3072, 10_000):
        sizes = {each.name: each.num_bytes for each in spec.workspace(num_rows)}
        assert before <= sum(sizes.values()) <= MAX_WORKSPACE
        before = sum(sizes.values())
        done = 0
        for scores, last in batched(spec.select(num_rows, ()), 2):
            given = {name: last.arguments[at] for at, (name, _) in enumerate(last.key.arguments)}
            constants = dict(last.key.constexprs)
            rows = last.grid[0]
            assert given["first_row"] == done
            tile = dict(scores.key.constexprs)
            written = scores.grid[1] * (2 * tile["ROW_BLOCK"] if wgmma else tile["ROWS"])
            assert written >= rows
            stride = 64 * int(given["stride_scores"])
            # Scores of pairs of pages, and of groups the largest.
            assert stride >= num_keys
            assert stride % 128 == 0
            assert sizes["scores"] >= 4 * written * stride
            spans = {n: scores.arguments[at] for at, (n, _) in enumerate(scores.key.arguments)}
            group = spans["group"]
            assert given["group"] == group
            assert spans["span"] % group == group % 128 == 0
            assert -(-num_keys // group) * 64 <= tile["GROUPS"] == constants["GROUPS"]
            assert sizes["maxima"] >= 4 * written * tile["GROUPS"]
            assert sizes["candidates"] >= 8 * rows * constants["SIZE"]
            done += rows
        assert done == num_rows


def test_routes() -> None:
    turnkey, long = replace(TURNKEY, wgmma=False), replace(LONG, wgmma=False)
    assert names(turnkey, 8) == ["decode_scores", "select"]
    assert names(replace(turnkey, width=257), 8) == ["decode_scores", "filter"]
    assert names(long, 8) == ["decode_scores", "filter"]
    assert names(replace(turnkey, is_filtered=True), 8) == ["decode_scores", "filter"]
    whole = replace(long, is_filtered=False)
    assert names(replace(whole, width=2048), 8) == ["decode_scores", "select", "select"]
    assert names(whole, 8) == ["decode_scores", "select", "select", "select"]
    # More than fit the workspace go in slices.
    assert (decode_slice(long), decode_slice(whole)) == (9, 8)
    assert names(long, 10) == ["decode_scores", "filter"] * 2
    prefill = replace(PREFILL, wgmma=False)
    assert names(prefill, 264) == ["range_scores", "range_select"]
    assert names(prefill, 3072) == ["range_scores", "range_select"] * 12


@NEEDS_GLUON
def test_hopper_s_own_kernels_have_two_products() -> None:
    """Of e4m3 keys, and of at most 128 columns each."""
    assert names(TURNKEY, 8) == ["decode_scores_wgmma", "select"]
    assert names(PREFILL, 264) == ["range_scores_wgmma", "range_select"]
    for rows, heads, is_own in (
        *((1, 64, False), (2, 64, True), (3, 32, True), (4, 64, True), (5, 64, False)),
        *((7, 32, True), (8, 32, True), (8, 16, True)),
    ):
        spec = replace(TURNKEY, rows=rows, num_heads=heads)
        assert (names(spec, 2)[0] == "decode_scores_wgmma") == is_own, (rows, heads)
        half = replace(spec, cache_dtype="bf16", page_stride=0)
        assert names(half, 2)[0] == "decode_scores"


def test_scores_have_one_tile_whatever_the_route_and_the_count() -> None:
    """Another would add heads up in another order, and so give other bits."""
    for spec in (TURNKEY, LONG, replace(LONG, num_heads=64, rows=1), PREFILL):
        made = [spec]
        if isinstance(spec, DecodeSpec):
            made = [replace(spec, is_filtered=each) for each in (True, False)]
        keys = {each.select(count, ())[0].key for each in made for count in (1, 9, 300)}
        names = ("H", "ROW_BLOCK", "REST_BLOCK", "HEAD_BLOCK", "SPLIT")
        constants = [(key.num_warps, dict(key.constexprs)) for key in keys]
        assert len({(w, *(each.get(name) for name in names)) for w, each in constants}) == 1


def test_levels_end_in_one_span() -> None:
    assert levels(64, 2048) == [1]
    assert levels(SPAN, 2048) == [1]
    assert levels(131072, 2048) == [8, 1]
    assert levels(MILLION, 2048) == [64, 8, 1]
    assert levels(MILLION, 512) == [64, 2, 1]


@pytest.mark.parametrize("spec", [TURNKEY, LONG, PREFILL, PAGED, PageWriterSpec()])
def test_plans_are_values_of_few_keys(spec: Spec) -> None:
    made = plan(spec, 300)
    assert len(made.keys) <= 6
    assert made.digest == plan(spec, 300).digest


@pytest.mark.parametrize(
    "spec",
    [
        *(replace(LONG, has_slots=True), PREFILL, PAGED, PageWriterSpec()),
        *(
            HALF,
            replace(PREFILL, cache_dtype="fp16", page_stride=0),
            PageWriterSpec(cache_dtype="bf16"),
        ),
    ],
)
def test_a_plan_binds_and_runs(spec: Spec) -> None:
    driver = StubDriver.open()
    driver.reset()
    made = plan(spec, 20)
    ready = ready_on_stub(made, driver)
    for flags in made.tables:
        tensors = tensors_of(spec, flags)
        bound = ready.bind(tensors, ready.arena(), **dict(flags))
        for num_tokens in (0, 1, 9, 20):
            driver.reset()
            bound.run(*call_of(spec, flags, num_tokens))
            assert len(driver.launches()) == len(spec.select(num_tokens, flags))
    assert not ready.audit.misses


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"num_heads": 7}, InvalidArgumentError, "num_heads: got 7"),
        ({"num_heads": 65}, InvalidArgumentError, "num_heads: got 65"),
        ({"top_k": 100}, UnsupportedError, "top_k: got 100, must be one of 512, 1024, 2048"),
        ({"rows": 9}, InvalidArgumentError, "rows: got 9, must be an integer from 1 to 8"),
        ({"width": 0}, InvalidArgumentError, "width: got 0"),
        ({"page_stride": 8449}, InvalidArgumentError, "page_stride: got 8449"),
        ({"cache_dtype": "fp32"}, UnsupportedError, "cache_dtype: got 'fp32', must be one of e4m3"),
        ({"cache_dtype": "fp16"}, InvalidArgumentError, r"page_stride: got 8448, .* from 16384"),
    ],
)
def test_a_field_that_no_kernel_takes_is_refused(
    changed: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        replace(TURNKEY, **changed)


def test_keys_are_contiguous_or_in_pages() -> None:
    for given_keys in ({}, {"num_keys": 64, "width": 1}):
        with pytest.raises(InvalidArgumentError, match="num_keys, width"):
            PrefillSpec(num_heads=32, top_k=512, **given_keys)
    with pytest.raises(UnsupportedError, match="has_slots"):
        replace(PREFILL, has_slots=True)
    with pytest.raises(UnsupportedError, match="dtype: got 'fp64'"):
        PageWriterSpec(dtype="fp64")


def test_pages_of_16_bits_have_no_scales() -> None:
    spec = PrefillSpec(num_heads=32, top_k=512, num_keys=64, cache_dtype="fp16")
    assert [each.name for each in spec.operands(())][:2] == ["keys", "q"]
    assert {each.dtype for each in spec.operands(())[:2]} == {"fp16"}
    assert (TURNKEY.page_stride, HALF.page_stride) == (8448, 16384)
    for made in (HALF, spec):
        (launch,) = (each for each in made.select(1, ()) if "select" not in each.key.name)
        assert dict(launch.key.constexprs)["scales_ptr"] is None
    with pytest.raises(UnsupportedError, match="power_of_two: got True, must be False of bf16"):
        PageWriterSpec(cache_dtype="bf16", power_of_two=True)


def test_queries_that_no_shared_memory_holds_are_refused() -> None:
    wide = DecodeSpec(num_heads=33, top_k=512, width=1, rows=5, cache_dtype="bf16")
    assert wide.for_target("sm_90") == wide
    with pytest.raises(UnsupportedError, match="rows: got 5 of 33 heads in bf16, must be at most"):
        wide.for_target("sm_120")
    for fits in ({"rows": 4}, {"num_heads": 32}, {"cache_dtype": "e4m3", "page_stride": 0}):
        assert replace(wide, **fits).for_target("sm_120").rows


def test_a_negative_count_is_refused() -> None:
    for spec in (TURNKEY, PREFILL):
        with pytest.raises(InvalidArgumentError, match="num_tokens: got -1"):
            spec.select(-1, ())
