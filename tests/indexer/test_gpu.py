"""Plan, prewarm, bind, run on a GPU: scores within their bound, selections exact, bits repeated."""

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from firesteel.indexer.pages import read_keys
from firesteel.indexer.reference import (
    quantize_reference,
    range_scores_reference,
    score_bound_reference,
    top_k_reference,
)
from firesteel.indexer.spec import DecodeSpec, PageWriterSpec, PrefillSpec
from firesteel.launch import plan, prewarm
from firesteel.launch.spec import Spec
from tests.indexer.kernels import Decode, decode_case, e4m3, key_scales, weights

pytestmark = pytest.mark.gpu

# A Hopper keeps about 13 bits of each sum of e4m3 products.
DOT_ROUNDING = 2.0**-10


def run(
    spec: Spec, num_tokens: int, given: Mapping[str, Tensor], **flags: str
) -> dict[str, Tensor]:
    """What a call writes, by name; the second of two calls, which must not differ."""
    ready = prewarm(plan(spec, num_tokens), device="cuda")
    operands = spec.operands(tuple(flags.items()))
    made = {name: tensor.cuda() for name, tensor in given.items()}
    outputs = {}
    for operand in operands:
        if operand.name not in made:
            shape = operand.shape_for(num_tokens)
            dtype = torch.float32 if operand.dtype == "fp32" else torch.int32
            outputs[operand.name] = torch.full(shape, 77, dtype=dtype, device="cuda")
    tensors = {**made, **outputs}
    fixed = {each.name: tensors[each.name] for each in operands if not each.is_per_call}
    passed = [tensors[each.name] for each in operands if each.is_per_call]
    bound = ready.bind(fixed, ready.arena(), **flags)
    before = None
    for _ in range(2):
        bound.run(*passed)
        now = {name: tensor.cpu() for name, tensor in outputs.items()}
        assert before is None or all(torch.equal(now[name], before[name]) for name in now)
        before = now
        for tensor in outputs.values():
            tensor.fill_(77)
    assert not ready.audit.misses
    return {**now, "cache": made["cache"].cpu()} if "cache" in made else now


def decode(case: Decode, spec: DecodeSpec) -> dict[str, Tensor]:
    given = {name: getattr(case, name) for name in ("q", "w", "cache", "page_table", "seq_lens")}
    return run(spec, len(case.seq_lens), given)


def spec_of(case: Decode, top_k: int) -> DecodeSpec:
    sizes = {"num_heads": case.heads, "rows": case.rows, "width": case.width}
    return DecodeSpec(
        **sizes, top_k=top_k, page_stride=case.page_stride, has_slots=True, has_scores=True
    )


def check_row(found: Mapping[str, Tensor], row: int, scores: Tensor, bound: Tensor | float) -> None:
    """Selected scores are within the bound of float64, and no key left out is surely better."""
    indices = found["indices"].flatten(0, -2)[row]
    selected = found["selected_scores"].flatten(0, -2)[row]
    there = indices[indices >= 0].long()
    allowed = scores > -math.inf
    assert len(there) == min(len(indices), int(allowed.sum()))
    assert (indices[len(there) :] == -1).all()
    assert (there.diff() > 0).all()
    bound = torch.as_tensor(bound).expand(scores.shape)
    error = (selected[: len(there)].double() - scores[there]).abs()
    assert (error <= bound[there]).all()
    if len(there):
        left = allowed.clone()
        left[there] = False
        least = float(selected[: len(there)].min())
        assert (scores[left] - bound[left] <= least).all()


@pytest.mark.parametrize("rows", [1, 2, 3, 6, 8])
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
def test_decode_with_exact_inputs_is_the_oracle_s(rows: int, heads: int) -> None:
    """Small integers: no sum rounds, and ties are many."""
    lens = [0, 1, -3, 511, 512, 513, 3000, 2**31 - 1]
    kind = {"width": 48, "is_exact": True, "missing": 0.1}
    case = decode_case(lens, rows=rows, heads=heads, **kind)
    found = decode(case, spec_of(case, 512))
    values, scales = case.pages
    for row, length in enumerate(case.lengths()):
        b, j = divmod(row, rows)
        pages = case.page_table[b].long()
        keys = values[pages.clamp(0, len(values) - 1)].reshape(-1, 128)
        factors = torch.where(pages[:, None] < 0, math.nan, scales[pages.clamp(0, len(values) - 1)])
        q, w = case.q[b, j][None], case.w[b, j][None]
        (scores,) = range_scores_reference(q, w, keys, factors.flatten(), [(0, length)])
        wanted = top_k_reference(scores.tolist(), 512)
        assert found["indices"][b, j].tolist() == wanted
        slots = [int(pages[t // 64]) * 64 + t % 64 if t >= 0 else -1 for t in wanted]
        assert found["slots"][b, j].tolist() == slots


@pytest.mark.parametrize("width", [32, 300, 2100])
def test_decode_of_one_two_and_three_levels(width: int) -> None:
    case = decode_case([width * 64, width * 64 - 77], rows=6, heads=32, width=width)
    found = decode(case, spec_of(case, 2048))
    values, scales = case.pages
    for b in range(2):
        pages = case.page_table[b].long().clamp(0, len(values) - 1)
        keys, factors = values[pages].reshape(-1, 128), scales[pages].flatten()
        for j in range(6):
            length = case.lengths()[b * 6 + j]
            q, w = case.q[b, j], case.w[b, j]
            (wanted,) = range_scores_reference(q[None], w[None], keys, factors, [(0, length)])
            bound = score_bound_reference(q, w, keys, factors, dot_rounding=DOT_ROUNDING)
            check_row(found, b * 6 + j, wanted, bound[:length])


def test_both_routes_and_any_batch_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    lens = [20000, 5, 16384, 19999]
    case = decode_case(lens, rows=3, heads=32, width=320, missing=0.05)
    spec = spec_of(case, 1024)
    tiled = decode(case, spec)
    names = ("q", "w", "page_table", "seq_lens")
    for b in range(len(lens)):
        one = replace(case, **{name: getattr(case, name)[b : b + 1] for name in names})
        found = decode(one, spec)
        assert all(torch.equal(found[name][0], tiled[name][b]) for name in found if name != "cache")
    monkeypatch.setattr("firesteel.indexer.plan._max_tiled", lambda _: 0)
    streamed = decode(case, spec)
    assert all(torch.equal(streamed[name], tiled[name]) for name in tiled)


@pytest.mark.parametrize("num_rows", [3, 70, 3000])
def test_prefill_with_exact_inputs_is_the_oracle_s(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    kind = {"generator": generator, "is_exact": True}
    num_keys, heads = 20_000, 32
    start = torch.randint(-5, num_keys, (num_rows,), generator=generator).int()
    end = start + torch.randint(-3, num_keys, (num_rows,), generator=generator).int()
    given = {
        "keys": e4m3(num_keys, 128, **kind),
        "key_scales": key_scales(num_keys, **kind),
        "q": e4m3(num_rows, heads, 128, **kind),
        "w": weights(num_rows, heads, **kind),
        "k_start": start,
        "k_end": end,
    }
    spec = PrefillSpec(num_heads=heads, top_k=512, num_keys=num_keys, has_scores=True)
    found = run(spec, num_rows, given)
    for row in {0, 1, num_rows // 2, num_rows - 1}:
        (scores,) = range_scores_reference(
            *(given[name][row : row + 1] for name in ("q", "w")),
            given["keys"],
            given["key_scales"],
            [(int(start[row]), int(end[row]))],
        )
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
