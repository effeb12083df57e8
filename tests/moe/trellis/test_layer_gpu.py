"""Whole EXL3 layers and linears on a GPU, against float64, with everything around them poisoned."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from firesteel.device import device_target
from firesteel.launch import Arena, Ready, plan, prewarm
from firesteel.launch.key import DTYPES
from firesteel.moe.activation import Activation
from firesteel.moe.layer import MoeLayer
from firesteel.moe.trellis.linear import TrellisLinearSpec
from firesteel.moe.trellis.plan import select
from firesteel.moe.trellis.spec import StoredTrellis, TrellisMoeSpec
from firesteel.settings import Settings
from tests.moe.trellis.layers import (
    TrellisLayer,
    max_error,
    random_trellis_layer,
    random_trellis_linear,
)

pytestmark = pytest.mark.gpu

SMALL = TrellisMoeSpec(hidden_size=768, intermediate_size=256, num_experts=16, top_k=2)
GUARD = 3
ARENA_GUARD = 4096


def _stored(**changes: object) -> dict[str, StoredTrellis]:
    stored = StoredTrellis(**changes)  # type: ignore[arg-type]
    return {"w13": stored, "w2": stored}


CASES = {
    "bf16": SMALL,
    "fp16": replace(SMALL, dtype="fp16"),
    "mixed": replace(SMALL, **_stored(rates=(2, 3, 4))),
    "mul1-biased": replace(
        SMALL,
        dtype="fp16",
        activation=Activation(name="swigluoai"),
        **_stored(rates=(4,), codebook="mul1", has_bias=True),
    ),
    "3inst-ragged": replace(
        SMALL, hidden_size=576, intermediate_size=192, **_stored(rates=(5,), codebook="3inst")
    ),
    "all-rates": replace(SMALL, hidden_size=512, **_stored(rates=tuple(range(1, 9)))),
    "expert-map": replace(SMALL, num_global_experts=32, top_k=4, **_stored(has_bias=True)),
    "relu2-mul1": replace(
        SMALL, activation=Activation(name="relu2"), **_stored(rates=(2, 6), codebook="mul1")
    ),
    "batch-invariant": replace(SMALL, batch_invariant=True),
    "no-wgmma": replace(SMALL, wgmma=False),
    "no-dependent-launch": replace(SMALL, pdl=False),
    "more-than-1024-experts": replace(
        SMALL, hidden_size=128, intermediate_size=32, num_experts=1100, top_k=8
    ),
}
# Direct, and sorted into tiles of 8, 16, 64 and 128 rows.
SIZES = (0, 1, 3, 8, 40, 60, 200, 700)
# Few of the layer whose oracle is large; and so many that other launches count routes. Of all rates
# none that the kernel of large tiles takes: it has four loops for each, and compiles for minutes.
MANY = {
    "more-than-1024-experts": (1, 20, 600),
    "expert-map": (1, 3, 40, 200, 700, 1100),
    "all-rates": (1, 3, 40),
}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """One new cache: keys that cases share are compiled once, and none comes from before."""
    return Settings(cache_dir=tmp_path_factory.mktemp("kernels"))


def _here(spec: TrellisMoeSpec) -> TrellisMoeSpec:
    """The layer with what this GPU may use, or less where the case says so."""
    most = spec.for_target(device_target(torch.device("cuda", 0)))
    return replace(spec, pdl=spec.pdl and most.pdl, wgmma=spec.wgmma and most.wgmma)


def _guarded_arena(ready: Ready) -> tuple[Arena, Tensor]:
    """An arena of just what the plan asks for, and the memory around it; NaN, and -1 as an id."""
    size = ready.plan.workspace.num_bytes
    memory = torch.full((size + 2 * ARENA_GUARD,), 0xFF, dtype=torch.uint8, device="cuda")
    return Arena(memory[ARENA_GUARD : ARENA_GUARD + size]), memory


def _is_kept(memory: Tensor) -> bool:
    """Whether nothing was written around an arena."""
    ends = torch.cat([memory[:ARENA_GUARD], memory[-ARENA_GUARD:]])
    return bool((ends == 0xFF).all())


def _ready_layer(
    layer: TrellisLayer, settings: Settings, max_tokens: int
) -> tuple[MoeLayer, Tensor]:
    ready = prewarm(plan(_here(layer.spec), max_tokens), settings=settings)
    arena, memory = _guarded_arena(ready)
    return MoeLayer(ready, layer.tensors("cuda"), arena), memory


def _rows(num_tokens: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows of NaN further apart than they are long, and all memory around them."""
    whole = torch.full((num_tokens + 2 * GUARD, size + 64), torch.nan, dtype=dtype, device="cuda")
    return whole[GUARD : GUARD + num_tokens, :size], whole


def _inputs(
    spec: TrellisMoeSpec, num_tokens: int, ids: torch.dtype, seed: int
) -> tuple[Tensor, ...]:
    """x, ids (some of none, and out of range), weights, out, and the memory around out."""
    generator = torch.Generator().manual_seed(seed)
    dtype, experts = DTYPES[spec.dtype], spec.num_global_experts or spec.num_experts
    x, _ = _rows(num_tokens, spec.hidden_size, dtype)
    x.copy_(torch.randn(x.shape, generator=generator))
    chosen = torch.rand(num_tokens, experts, generator=generator).topk(spec.top_k).indices
    odd = torch.rand(chosen.shape, generator=generator)
    chosen = torch.where(odd < 0.1, -1, torch.where(odd > 0.95, experts, chosen))
    weights = torch.rand(chosen.shape, generator=generator)
    return (x, chosen.to(ids).cuda(), weights.cuda(), *_rows(num_tokens, spec.hidden_size, dtype))


def _check(got: Tensor, expected: Tensor) -> None:
    """By norm, and by direction; a row's error may be four times its own, or a half of the worst
    row's where its terms cancel."""
    difference, bound = got.double().cpu() - expected, max_error(got.dtype)
    assert difference.norm() <= bound * expected.norm()
    if not expected.any():
        return
    cosine = (got.double().cpu() * expected).sum() / (got.double().cpu().norm() * expected.norm())
    assert cosine >= 0.999
    norms = expected.norm(dim=1)
    assert (difference.norm(dim=1) <= 4 * bound * norms + bound * norms.max() / 2).all()


@pytest.mark.parametrize("name", CASES)
def test_a_layer_is_the_oracle_s(name: str, settings: Settings) -> None:
    layer = random_trellis_layer(CASES[name])
    sizes = MANY.get(name, SIZES)
    made, memory = _ready_layer(layer, settings, max(sizes))
    for seed, num_tokens in enumerate(sizes):
        for ids in (torch.int32, torch.int64):
            x, topk_ids, weights, out, around = _inputs(layer.spec, num_tokens, ids, seed)
            made.run(x, topk_ids, weights, out)
            _check(out, layer.reference(x, topk_ids, weights))
            first = out.clone()
            for _ in range(2):
                out.fill_(torch.nan)
                # Also of what calls leave behind in the arena nothing may be read.
                memory[ARENA_GUARD:-ARENA_GUARD].fill_(0xFF)
                assert around.isnan().all()
                made.run(x, topk_ids, weights, out)
                assert torch.equal(first, out)
            out.fill_(torch.nan)
            assert around.isnan().all()
    assert _is_kept(memory)


def test_the_sizes_take_every_kernel_and_tile() -> None:
    spec = _here(SMALL)
    constants = [
        dict(launch.key.constexprs)
        for num_tokens in SIZES
        for launch in select(spec, num_tokens, (("ids", "i32"),))
    ]
    found = {each["BLOCK_M"] for each in constants if "BLOCK_M" in each}
    assert found == ({8, 16, 64, 128} if spec.wgmma else {8, 16})
    assert len({each["SPLIT_K"] for each in constants if "SPLIT_K" in each}) > 1


@pytest.mark.parametrize("name", ["bf16", "mixed", "mul1-biased"])
def test_a_batch_invariant_row_is_that_of_its_own_call(name: str, settings: Settings) -> None:
    spec = replace(CASES[name], batch_invariant=True)
    made, _ = _ready_layer(random_trellis_layer(spec), settings, 200)
    x, ids, weights, out, _ = _inputs(spec, 200, torch.int32, 2)
    made.run(x, ids, weights, out)
    for row in (0, 1, 63, 64, 199):
        one = slice(row, row + 1)
        alone, _ = _rows(1, spec.hidden_size, out.dtype)
        made.run(x[one], ids[one], weights[one], alone)
        assert torch.equal(alone, out[one])
    for num_tokens in (2, 33, 150):
        part, _ = _rows(num_tokens, spec.hidden_size, out.dtype)
        made.run(x[:num_tokens], ids[:num_tokens], weights[:num_tokens], part)
        assert torch.equal(part, out[:num_tokens])


@pytest.mark.parametrize("num_tokens", [8, 60, 200, 700])
def test_rows_do_not_depend_on_other_rows_within_a_range(
    num_tokens: int, settings: Settings
) -> None:
    made, _ = _ready_layer(random_trellis_layer(SMALL), settings, num_tokens)
    x, ids, weights, out, _ = _inputs(SMALL, num_tokens, torch.int32, 1)
    made.run(x, ids, weights, out)
    order = torch.randperm(num_tokens, device="cuda")
    moved, _ = _rows(num_tokens, SMALL.hidden_size, out.dtype)
    made.run(x[order].contiguous(), ids[order], weights[order], moved)
    assert torch.equal(moved, out[order])


@pytest.mark.parametrize("num_tokens", [1, 8, 60, 200, 700])
def test_the_first_call_may_be_captured(num_tokens: int, settings: Settings) -> None:
    layer = random_trellis_layer(CASES["mixed"])
    made, memory = _ready_layer(layer, settings, num_tokens)
    x, ids, weights, out, _ = _inputs(layer.spec, num_tokens, torch.int64, 3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.run(x, ids, weights, out)
    assert out.isnan().all()
    for seed in (4, 5):
        # Other numbers, other experts, in the same memory.
        other = _inputs(layer.spec, num_tokens, torch.int64, seed)
        for held, new in zip((x, ids, weights), other[:3], strict=True):
            held.copy_(new)
        out.fill_(torch.nan)
        graph.replay()
        _check(out, layer.reference(x, ids, weights))
        replayed = out.clone()
        out.fill_(torch.nan)
        made.run(x, ids, weights, out)
        assert torch.equal(replayed, out)
    assert _is_kept(memory)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("sizes", [(576, 192), (2048, 1024)])
@pytest.mark.parametrize("codebook", ["mcg", "3inst", "mul1"])
def test_a_linear_is_the_oracle_s(
    codebook: str, sizes: tuple[int, int], dtype: str, settings: Settings
) -> None:
    has_bias = sizes[0] == 576
    stored = StoredTrellis(rates=(4,), codebook=codebook, has_bias=has_bias)
    spec = TrellisLinearSpec(
        in_features=sizes[0], out_features=sizes[1], dtype=dtype, stored=stored
    )
    spec = spec.for_target(device_target(torch.device("cuda", 0)))
    tensors, dense, bias = random_trellis_linear(spec)
    ready = prewarm(plan(spec, 300), settings=settings)
    arena, memory = _guarded_arena(ready)
    bound = ready.bind({name: tensor.cuda() for name, tensor in tensors.items()}, arena)
    generator = torch.Generator().manual_seed(6)
    for num_tokens in (0, 1, 9, 17, 64, 300):
        x, _ = _rows(num_tokens, spec.in_features, DTYPES[dtype])
        x.copy_(torch.randn(x.shape, generator=generator))
        out, around = _rows(num_tokens, spec.out_features, x.dtype)
        bound.run(x, out)
        expected = x.double().cpu() @ dense.T
        _check(out, expected if bias is None else expected + bias.double())
        first = out.clone()
        out.fill_(torch.nan)
        assert around.isnan().all()
        bound.run(x, out)
        assert torch.equal(first, out)
    assert _is_kept(memory)


def test_weights_past_two_to_the_31_bytes(settings: Settings) -> None:
    """The last of matrices of more than 2**31 words, which an int32 offset cannot reach."""
    spec = TrellisLinearSpec(
        in_features=256, out_features=256, stored=StoredTrellis(rates=(3,), codebook="mcg")
    )
    spec = spec.for_target(device_target(torch.device("cuda", 0)))
    tensors, _, _ = random_trellis_linear(spec)
    near = {name: tensor.cuda() for name, tensor in tensors.items()}
    unit = 512
    far = (1 << 31) // unit + 3
    words = torch.empty(far * unit + near["w.words"].numel(), dtype=torch.int32, device="cuda")
    words[far * unit :] = near["w.words"]
    matrices = near["w.matrices"].clone()
    matrices[..., 0] = far
    ready = prewarm(plan(spec, 300), settings=settings)
    bounds = [
        ready.bind(each, ready.arena())
        for each in (near, {**near, "w.words": words, "w.matrices": matrices})
    ]
    for num_tokens in (1, 300):
        x = torch.randn(num_tokens, 256, device="cuda").bfloat16()
        outs = [torch.full_like(x, torch.nan) for _ in bounds]
        for bound, out in zip(bounds, outs, strict=True):
            bound.run(x, out)
        assert outs[0].abs().max() > 0
        assert torch.equal(outs[0], outs[1])
