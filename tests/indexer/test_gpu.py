"""Plan, prewarm, bind, run on a GPU: scores within their bound, selections exact, bits repeated."""

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from firesteel.device import device_target
from firesteel.indexer.pages import CACHE_DTYPES, page_bytes, read_keys
from firesteel.indexer.reference import (
    quantize_reference,
    range_scores_reference,
    round_reference,
    score_bound_reference,
    top_k_reference,
)
from firesteel.indexer.spec import PageWriterSpec, PrefillSpec
from firesteel.launch import plan, prewarm
from tests.indexer.gpu import decode, fed, ready_of, run, spec_of
from tests.indexer.kernels import Decode, decode_case, key_scales, numbers, weights, with_holes
from tests.indexer.test_select import KINDS, scores_of

pytestmark = pytest.mark.gpu

# A Hopper keeps about 13 bits of each sum of e4m3 products; of 16-bit ones 24, cut off and not
# rounded, which is twice the distance in each of 128 additions.
DOT_ROUNDING = {"e4m3": 2.0**-10, "bf16": 2.0**-16, "fp16": 2.0**-16}


def keys_of(case: Decode, request: int) -> tuple[Tensor, Tensor | None]:
    """Keys `[C, 128]` and scales of a request; those of missing pages are NaN."""
    values, scales = case.pages
    pages = case.page_table[request].long()
    is_missing = (pages < 0).repeat_interleave(64)
    pages = pages.clamp(0, len(values) - 1)
    # As bytes: not every version of PyTorch indexes e4m3.
    keys = values.view(torch.uint8)[pages].view(values.dtype).reshape(-1, 128)
    if scales is None:
        return keys.float().masked_fill(is_missing[:, None], math.nan), None
    return keys, scales[pages].flatten().masked_fill(is_missing, math.nan)


def scores_of_row(case: Decode, row: int) -> Tensor:
    b, j = divmod(row, case.rows)
    keys, scales = keys_of(case, b)
    length = case.lengths()[row]
    q, w = case.q[b, j][None], case.w[b, j][None]
    (found,) = range_scores_reference(q, w, keys, scales, [(0, length)])
    return found


def check_row(found: Mapping[str, Tensor], row: int, scores: Tensor, bound: Tensor) -> None:
    """Selected scores are within the bound of float64, and no key left out is surely better."""
    indices = found["indices"].flatten(0, -2)[row]
    selected = found["selected_scores"].flatten(0, -2)[row]
    there = indices[indices >= 0].long()
    allowed = scores > -math.inf
    assert len(there) == min(len(indices), int(allowed.sum()))
    assert (indices[len(there) :] == -1).all()
    assert (there.diff() > 0).all()
    error = (selected[: len(there)].double() - scores[there]).abs()
    assert (error <= bound[there]).all()
    if len(there):
        left = allowed.clone()
        left[there] = False
        least = float(selected[: len(there)].min())
        assert (scores[left] - bound[left] <= least).all()


def sliced(case: Decode, top_k: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """As calls whose scores fit the workspace a request at a time."""
    spec = spec_of(case, top_k)
    with monkeypatch.context() as patch:
        patch.setattr("firesteel.indexer.plan.decode_slice", lambda _: 1)
        made = plan(spec.for_target(device_target(torch.device("cuda", 0))), len(case.seq_lens))
        assert len(made.spec.select(len(case.seq_lens), ())) >= 2 * len(case.seq_lens)
    return decode(case, spec, ready=prewarm(made, device="cuda"))


def check_exact(found: Mapping[str, Tensor], case: Decode, wanted: list[list[int]]) -> None:
    indices, slots = (found[name].flatten(0, -2) for name in ("indices", "slots"))
    for row, expected in enumerate(wanted):
        assert indices[row].tolist() == expected
        table = case.page_table[row // case.rows].tolist()
        expected = [table[t // 64] * 64 + t % 64 if t >= 0 else -1 for t in expected]
        assert slots[row].tolist() == expected


@pytest.mark.parametrize(
    ("rows", "heads", "cache_dtype"),
    [
        *((1, 64, "e4m3"), (3, 8, "e4m3"), (5, 33, "e4m3"), (6, 32, "e4m3"), (8, 64, "e4m3")),
        *((1, 64, "bf16"), (6, 32, "bf16"), (4, 64, "bf16"), (2, 16, "fp16"), (8, 9, "fp16")),
    ],
)
def test_decode_with_exact_inputs_is_the_oracle_s(rows: int, heads: int, cache_dtype: str) -> None:
    """Small integers: no sum rounds, and ties are many."""
    lens = [0, 1, -3, 511, 512, 513, 3000, 2**31 - 1]
    kind = {"width": 48, "is_exact": True, "missing": 0.1, "cache_dtype": cache_dtype}
    case = decode_case(lens, rows=rows, heads=heads, **kind)
    wanted = [
        top_k_reference(scores_of_row(case, row).tolist(), 512) for row in range(case.num_rows)
    ]
    for is_filtered in (False, True):
        check_exact(decode(case, spec_of(case, 512, is_filtered=is_filtered)), case, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_any_scores_are_selected_from_as_the_oracle_does(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Narrow, equal, mostly zero, any 32 bits: by both routes, whole and in slices."""
    generator = torch.Generator().manual_seed(len(kind))
    scores = torch.stack([scores_of(kind, 20032, generator) for _ in range(5)])
    case = fed(scores, [20032, 2048, 2050, 8191, 2**31 - 1], rows=2)
    wanted = [
        top_k_reference(scores[row // 2, :length].tolist(), 2048)
        for row, length in enumerate(case.lengths())
    ]
    for is_filtered in (True, False):
        check_exact(decode(case, spec_of(case, 2048, is_filtered=is_filtered)), case, wanted)
    check_exact(sliced(case, 2048, monkeypatch), case, wanted)


@pytest.mark.parametrize("kind", ["plain", "all equal", "mostly zero", "descending"])
@pytest.mark.parametrize(("num_keys", "rows"), [(131072, 1), (131072, 6), (1 << 20, 1)])
def test_long_contexts(kind: str, num_keys: int, rows: int) -> None:
    """With and without a filter; equal scores are more than it holds."""
    generator = torch.Generator().manual_seed(num_keys)
    scores = scores_of(kind, num_keys, generator)[None]
    case = fed(scores, [num_keys - 5], rows=rows, heads=64)
    wanted = []
    for length in case.lengths():
        order = scores[0, :length].sort(descending=True, stable=True).indices[:2048]
        wanted.append(order.sort().values.tolist())
    for is_filtered in (True, False):
        check_exact(decode(case, spec_of(case, 2048, is_filtered=is_filtered)), case, wanted)


@pytest.mark.parametrize(
    ("width", "cache_dtype"), [(32, "e4m3"), (300, "e4m3"), (300, "bf16"), (2100, "e4m3")]
)
def test_decode_lies_within_its_bound(width: int, cache_dtype: str) -> None:
    lens = [width * 64, width * 64 - 77]
    case = decode_case(lens, rows=6, heads=32, width=width, cache_dtype=cache_dtype)
    found = decode(case, spec_of(case, 2048))
    for b in range(2):
        keys, scales = keys_of(case, b)
        for row in range(b * 6, b * 6 + 6):
            wanted = scores_of_row(case, row)
            rounding = {"dot_rounding": DOT_ROUNDING[cache_dtype]}
            bound = score_bound_reference(
                case.q[b, row % 6], case.w[b, row % 6], keys, scales, **rounding
            )
            check_row(found, row, wanted, bound[: len(wanted)])


def test_all_routes_and_any_batch_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    lens = [20000, 5, 16384, 19999]
    case = decode_case(lens, rows=3, heads=32, width=320, missing=0.05)
    filtered = decode(case, spec_of(case, 1024))
    others = [decode(case, spec_of(case, 1024, is_filtered=False))]
    others.append(sliced(case, 1024, monkeypatch))
    for other in others:
        assert all(torch.equal(other[name], filtered[name]) for name in filtered)
    names = ("q", "w", "page_table", "seq_lens")
    for b in range(len(lens)):
        one = replace(case, **{name: getattr(case, name)[b : b + 1] for name in names})
        found = decode(one, spec_of(one, 1024))
        assert all(torch.equal(found[name][0], filtered[name][b]) for name in found)


def test_pages_past_2_31_bytes() -> None:
    """As serving lays them out: stride 1,077,120 and page ids of 2000 and more."""
    page_stride, pages = 1_077_120, [2047, 2100, 3]
    near = decode_case([190], rows=2, heads=32)
    near = replace(near, page_table=torch.tensor([[0, 1, 2]], dtype=torch.int32))
    size = page_bytes("e4m3")
    cache = torch.full((2100 * page_stride + size,), 0x7F, dtype=torch.uint8, device="cuda")
    for place, page in enumerate(pages):
        cache[page * page_stride :][:size] = near.cache[place * size : (place + 1) * size].cuda()
    far = replace(
        near,
        cache=cache,
        page_table=torch.tensor([pages], dtype=torch.int32),
        page_stride=page_stride,
    )
    for is_filtered in (False, True):
        wanted = decode(near, spec_of(near, 512, is_filtered=is_filtered))
        found = decode(far, spec_of(far, 512, is_filtered=is_filtered))
        for name in ("indices", "selected_scores"):
            assert torch.equal(found[name], wanted[name])


def test_two_plans_share_an_arena_and_a_graph_follows_lengths() -> None:
    """Neither needs what the other left, and a replay reads lengths and pages as they are then."""
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(2, 9024, generator=generator)
    case = fed(scores, [9024, 9000], rows=2)
    spec = spec_of(case, 512)
    prefill = PrefillSpec(num_heads=32, top_k=512, num_keys=5000)
    ready, other = ready_of(spec, 2), ready_of(prefill, 20)
    arena = max((ready.arena(), other.arena()), key=lambda each: each.num_bytes)
    names = ("q", "w", "page_table", "seq_lens")
    given = {name: getattr(case, name).cuda() for name in names}
    outputs = [torch.empty(2, 2, 512, dtype=torch.int32, device="cuda") for _ in range(2)]
    outputs.append(torch.empty(2, 2, 512, device="cuda"))
    bound = ready.bind({"cache": case.cache}, arena)
    kind = {"generator": generator, "is_exact": True}
    keys = {"keys": numbers(5000, 128, **kind), "key_scales": torch.ones(5000)}
    beside = other.bind({name: tensor.cuda() for name, tensor in keys.items()}, arena)
    rows = [numbers(20, 32, 128, **kind), weights(20, 32, **kind)]
    rows += [torch.zeros(20, dtype=torch.int32), torch.full((20,), 5000, dtype=torch.int32)]
    rows.append(torch.empty(20, 512, dtype=torch.int32))
    passed = [tensor.cuda() for tensor in rows]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bound.run(*given.values(), *outputs)
        beside.run(*passed)
        bound.run(*given.values(), *outputs)
    prefilled = None
    for lens in ([9024, 9000], [3, 8193], [0, 512], [-1, 9023]):
        given["seq_lens"].copy_(torch.tensor(lens, dtype=torch.int32))
        graph.replay()
        now = replace(case, seq_lens=torch.tensor(lens, dtype=torch.int32))
        for row, length in enumerate(now.lengths()):
            wanted = top_k_reference(scores[row // 2, :length].tolist(), 512)
            assert outputs[0].flatten(0, 1)[row].tolist() == wanted
        assert prefilled is None or torch.equal(prefilled, passed[-1])
        prefilled = passed[-1].clone()


@pytest.mark.parametrize(
    ("num_rows", "cache_dtype"), [(3, "e4m3"), (70, "bf16"), (70, "e4m3"), (3000, "e4m3")]
)
def test_prefill_with_exact_inputs_is_the_oracle_s(num_rows: int, cache_dtype: str) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    kind = {"generator": generator, "is_exact": True}
    types = {**kind, "cache_dtype": cache_dtype}
    num_keys, heads = 20_000, 32
    start = torch.randint(-5, num_keys, (num_rows,), generator=generator).int()
    end = start + torch.randint(-3, num_keys, (num_rows,), generator=generator).int()
    given = {
        "keys": numbers(num_keys, 128, **types),
        "q": numbers(num_rows, heads, 128, **types),
        "w": weights(num_rows, heads, **kind),
        "k_start": start,
        "k_end": end,
    }
    if cache_dtype == "e4m3":
        given["key_scales"] = key_scales(num_keys, **kind)
    else:
        given["keys"] = with_holes(given["keys"], generator)
    spec = PrefillSpec(
        num_heads=heads, top_k=512, num_keys=num_keys, cache_dtype=cache_dtype, has_scores=True
    )
    found = run(spec, num_rows, given)
    for row in {0, 1, num_rows // 2, num_rows - 1}:
        (scores,) = range_scores_reference(
            *(given[name][row : row + 1] for name in ("q", "w")),
            given["keys"],
            given.get("key_scales"),
            [(int(start[row]), int(end[row]))],
        )
        assert found["indices"][row].tolist() == top_k_reference(scores.tolist(), 512)


@pytest.mark.parametrize("cache_dtype", ["e4m3", "bf16"])
def test_prefill_of_pages(cache_dtype: str) -> None:
    """Rows of three requests, one of none, in the order in which a host packs them."""
    kind = {"width": 24, "missing": 0.1, "is_exact": True, "cache_dtype": cache_dtype}
    pages = decode_case([1536] * 3, rows=1, heads=32, **kind)
    generator = torch.Generator().manual_seed(12)
    requests = torch.tensor([0] * 7 + [1] * 9 + [-1] + [2] * 8, dtype=torch.int32)
    ends = torch.randint(0, 1540, requests.shape, generator=generator).int()
    given = {
        "cache": pages.cache,
        "page_table": pages.page_table,
        "q": numbers(25, 32, 128, generator=generator, is_exact=True, cache_dtype=cache_dtype),
        "w": weights(25, 32, generator=generator, is_exact=True),
        "row_request": requests,
        "k_end": ends,
    }
    spec = PrefillSpec(
        num_heads=32, top_k=512, width=24, num_requests=3, cache_dtype=cache_dtype, has_slots=True
    )
    found = run(spec, 25, given)
    for row, request in enumerate(requests.tolist()):
        keys, scales = keys_of(pages, max(request, 0))
        span = (0, int(ends[row]) if request >= 0 else 0)
        q, w = given["q"][row][None], given["w"][row][None]
        (scores,) = range_scores_reference(q, w, keys, scales, [span])
        assert found["indices"][row].tolist() == top_k_reference(scores.tolist(), 512)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_pages_are_the_oracle_s(dtype: str, power_of_two: bool) -> None:
    spec = PageWriterSpec(dtype=dtype, page_stride=8464, power_of_two=power_of_two)
    generator = torch.Generator().manual_seed(5)
    types = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    keys = torch.randn(200, 128, generator=generator).to(types[dtype])
    slots = torch.randperm(320, generator=generator)[:200]
    cache = torch.zeros(5 * 8464, dtype=torch.uint8)
    found = run(spec, 200, {"keys": keys, "slots": slots, "cache": cache}, slots="i64")
    values, scales = read_keys(found["cache"], slots, 8464)
    wanted, wanted_scales = quantize_reference(keys, power_of_two=power_of_two)
    assert torch.equal(values.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(scales, wanted_scales)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("cache_dtype", ["bf16", "fp16"])
def test_16_bit_pages_are_the_oracle_s(dtype: str, cache_dtype: str) -> None:
    spec = PageWriterSpec(dtype=dtype, cache_dtype=cache_dtype)
    generator = torch.Generator().manual_seed(6)
    types = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    keys = torch.randn(200, 128, generator=generator)
    keys *= 2.0 ** torch.randint(-26, 18, keys.shape, generator=generator)
    keys[7] = math.nan
    keys = keys.to(types[dtype])
    slots = torch.randperm(320, generator=generator)[:200].int()
    cache = torch.zeros(5 * page_bytes(cache_dtype), dtype=torch.uint8)
    found = run(spec, 200, {"keys": keys, "slots": slots, "cache": cache}, slots="i32")
    values, _ = read_keys(found["cache"], slots, page_bytes(cache_dtype), cache_dtype)
    wanted = round_reference(keys, CACHE_DTYPES[cache_dtype])
    assert torch.equal(values.isnan(), wanted.isnan())
    assert torch.equal(values.nan_to_num(0.5), wanted.nan_to_num(0.5))
