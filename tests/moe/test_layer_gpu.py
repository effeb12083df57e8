"""The whole layer on a GPU, against the float64 oracle, with everything around it poisoned."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from firesteel.device import device_target
from firesteel.launch import Arena, plan, prewarm
from firesteel.moe.activation import Activation
from firesteel.moe.layer import MoeLayer
from firesteel.moe.plan import has_wgmma, tile_of
from firesteel.moe.spec import MoeSpec, StoredWeights
from firesteel.settings import Settings
from tests.moe.layers import Layer, random_layer

pytestmark = pytest.mark.gpu

SMALL = MoeSpec(hidden_size=256, intermediate_size=128, num_experts=8, top_k=2)
GUARD = 3


def _stored(group_size: int, **changes: object) -> dict[str, object]:
    stored = StoredWeights(group_size=group_size, **changes)  # type: ignore[arg-type]
    return {"w13": stored, "w2": stored}


def _fp4(element: str, **changes: object) -> dict[str, object]:
    stored = StoredWeights.fp4(element, **changes)  # type: ignore[arg-type]
    return {"w13": stored, "w2": stored}


# Long enough that the direct way splits its sums.
LONG = replace(SMALL, hidden_size=2048)
NF3 = dict.fromkeys(("w13", "w2"), StoredWeights.nf3())
NF3_BIASED = StoredWeights.nf3(has_bias=True)
CASES = {
    "g128": SMALL,
    "g64": replace(SMALL, **_stored(64)),
    "g32": replace(SMALL, **_stored(32)),
    "g32-asym": replace(SMALL, **_stored(32, has_zero_points=True)),
    "g64-asym-fp16-scales": replace(SMALL, **_stored(64, has_zero_points=True, scale="fp16")),
    "g128-asym-fp32-scales": replace(SMALL, **_stored(128, has_zero_points=True, scale="fp32")),
    "g256": replace(SMALL, intermediate_size=256, **_stored(256)),
    # With scales of another type Hopper's own kernels do not read it.
    "fp16": replace(SMALL, dtype="fp16", **_stored(128, scale="fp16")),
    "fp16-bf16-scales": replace(SMALL, dtype="fp16"),
    "no-wgmma": replace(SMALL, wgmma=False),
    "no-dependent-launch": replace(SMALL, pdl=False),
    "batch-invariant": replace(SMALL, batch_invariant=True),
    "ragged": replace(SMALL, hidden_size=352, intermediate_size=160, **_stored(32)),
    "biased-swiglu": replace(
        SMALL, activation=Activation(name="swigluoai"), **_stored(64, has_bias=True)
    ),
    "silu-limit": replace(SMALL, activation=Activation(limit=0.5)),
    "relu2": replace(SMALL, activation=Activation(name="relu2")),
    "situ": replace(SMALL, activation=Activation(name="situ")),
    "expert-map": replace(SMALL, num_global_experts=32, top_k=4),
    "weight-on-input": replace(SMALL, weight_on_input=True),
    "one-expert": replace(SMALL, num_experts=1, top_k=1),
    "mxfp4": replace(SMALL, **_fp4("mxfp4")),
    "mxfp4-fp16": replace(LONG, dtype="fp16", **_fp4("mxfp4")),
    "mxfp4-ragged": replace(SMALL, hidden_size=352, intermediate_size=160, **_fp4("mxfp4")),
    "mxfp4-biased-swiglu": replace(
        LONG, activation=Activation(name="swigluoai"), **_fp4("mxfp4", has_bias=True)
    ),
    "mxfp4-batch-invariant": replace(LONG, batch_invariant=True, **_fp4("mxfp4")),
    "nvfp4": replace(LONG, **_fp4("nvfp4")),
    "nvfp4-multiplier": replace(SMALL, **_fp4("nvfp4", global_scale="multiplier")),
    "nvfp4-fp16": replace(LONG, dtype="fp16", **_fp4("nvfp4")),
    "nvfp4-ragged": replace(SMALL, hidden_size=368, intermediate_size=144, **_fp4("nvfp4")),
    "nvfp4-biased-map": replace(
        LONG, num_global_experts=32, weight_on_input=True, **_fp4("nvfp4", has_bias=True)
    ),
    "nvfp4-relu2": replace(SMALL, activation=Activation(name="relu2"), **_fp4("nvfp4")),
    "nf3": replace(LONG, **NF3),
    "nf3-fp16": replace(LONG, dtype="fp16", **NF3),
    "nf3-ragged": replace(SMALL, hidden_size=352, intermediate_size=160, **NF3),
    "nf3-biased-swiglu": replace(
        LONG, activation=Activation(name="swigluoai"), **dict.fromkeys(NF3, NF3_BIASED)
    ),
    "nf3-relu2": replace(SMALL, activation=Activation(name="relu2"), **NF3),
    "nf3-batch-invariant": replace(LONG, batch_invariant=True, **NF3),
    "int3-g128": replace(SMALL, **_stored(128, element="int3")),
    "int3-g32-asym": replace(
        SMALL,
        hidden_size=352,
        intermediate_size=160,
        **_stored(32, element="int3", has_zero_points=True),
    ),
    "int3-g64-fp16": replace(SMALL, dtype="fp16", **_stored(64, element="int3", scale="fp16")),
    "int4-and-nf3": replace(SMALL, w2=StoredWeights.nf3()),
    "int4-and-mxfp4": replace(SMALL, w2=StoredWeights.fp4("mxfp4")),
    "more-than-1024-experts": replace(
        SMALL, hidden_size=128, intermediate_size=32, num_experts=1100, top_k=8, **_stored(32)
    ),
    "top-10": replace(SMALL, num_experts=16, top_k=10),
}
SIZES = (0, 1, 2, 3, 17, 40, 200)
# The cases whose code for the largest tiles, or for more than 4096 routes, is not that of another.
MANY = {
    **dict.fromkeys(("g128", "g32-asym", "ragged", "biased-swiglu", "relu2", "fp16"), 700),
    **dict.fromkeys(("weight-on-input", "more-than-1024-experts", "top-10"), 700),
    **dict.fromkeys(("mxfp4-ragged", "mxfp4-fp16", "nvfp4", "nvfp4-ragged"), 700),
    **dict.fromkeys(("nf3-ragged", "nf3-fp16", "nf3-relu2", "int3-g32-asym"), 700),
    "expert-map": 1100,
}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """One new cache: keys that cases share are compiled once, and none comes from before."""
    return Settings(cache_dir=tmp_path_factory.mktemp("kernels"))


def _here(spec: MoeSpec) -> MoeSpec:
    """The layer with what this GPU may use, or less where the case says so."""
    most = spec.for_target(device_target(torch.device("cuda", 0)))
    return replace(spec, pdl=spec.pdl and most.pdl, wgmma=spec.wgmma and most.wgmma)


def _ready_layer(layer: Layer, settings: Settings, max_tokens: int = max(SIZES)) -> MoeLayer:
    ready = prewarm(plan(_here(layer.spec), max_tokens), settings=settings)
    arena = Arena.allocate(ready.plan.workspace.num_bytes + 4096, torch.device("cuda", 0))
    # NaN in every element of 16 or 32 bits; -1 as an id.
    arena.storage.fill_(0xFF)
    made = MoeLayer(ready, layer.tensors("cuda"), arena)
    made.arena = arena  # type: ignore[attr-defined]
    return made


def _inputs(spec: MoeSpec, num_tokens: int, ids: torch.dtype, seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.bfloat16 if spec.dtype == "bf16" else torch.float16
    experts = spec.num_global_experts or spec.num_experts
    # Rows further apart than they are long, between guards.
    x = torch.full((num_tokens + 2 * GUARD, spec.hidden_size + 64), torch.nan, dtype=dtype)
    values = torch.randn(num_tokens, spec.hidden_size, generator=generator).to(dtype)
    x[GUARD : GUARD + num_tokens, : spec.hidden_size] = values
    chosen = torch.rand(num_tokens, experts, generator=generator).topk(spec.top_k).indices
    odd = torch.rand(chosen.shape, generator=generator)
    chosen = torch.where(odd < 0.1, -1, torch.where(odd > 0.95, experts, chosen))
    weights = torch.rand(chosen.shape, generator=generator)
    out = torch.full_like(x, torch.nan)
    return x.cuda(), chosen.to(ids).cuda(), weights.cuda(), out.cuda()


def _window(tensor: Tensor, spec: MoeSpec, num_tokens: int) -> Tensor:
    return tensor[GUARD : GUARD + num_tokens, : spec.hidden_size]


def _check(layer: Layer, got: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> None:
    """Up to five roundings to 16 bits: the weights of FC1 and of FC2, their outputs, and the sum.

    Each is at most half an eps of a term and of random sign, so that norms grow by less than
    2 eps, and a row's by 4 eps of its own and a quarter of the largest row's where terms cancel.
    """
    expected = layer.reference(x, ids, weights)
    # The oracle has weights of nf3 rounded to bf16, as the format says.
    eps = torch.finfo(torch.bfloat16 if layer.spec.w13.element == "nf3" else x.dtype).eps
    difference = (got.double().cpu() - expected).norm()
    assert difference <= 2 * eps * expected.norm() + 1e-6
    if len(expected):
        rows = (got.double().cpu() - expected).norm(dim=1)
        assert (rows <= 4 * eps * expected.norm(dim=1) + eps * expected.norm(dim=1).max() / 4).all()


@pytest.mark.parametrize("name", CASES)
def test_layer_is_the_oracles(name: str, settings: Settings) -> None:
    _check_sizes(random_layer(CASES[name]), SIZES, settings)


@pytest.mark.parametrize("name", MANY)
def test_layer_of_many_tokens_is_the_oracles(name: str, settings: Settings) -> None:
    spec, num_tokens = CASES[name], MANY[name]
    routes = num_tokens * spec.top_k
    assert _has_largest_tile(_here(spec), routes) or routes > 4096
    _check_sizes(random_layer(spec), (num_tokens,), settings)


def _has_largest_tile(spec: MoeSpec, routes: int) -> bool:
    """Whether the table has no other tile for more routes: one of 64 rows, or of int4 on Hopper's
    own kernels of 128."""
    tile = tile_of(spec, routes)
    is_wide = has_wgmma(spec) and spec.w13.element == "int4"
    return tile == tile_of(spec, 1 << 40) and tile.rows >= (128 if is_wide else 64)


def _check_sizes(layer: Layer, sizes: tuple[int, ...], settings: Settings) -> None:
    """Calls of such sizes are the oracle's, twice with the same bits, and write nowhere else."""
    made = _ready_layer(layer, settings, max(sizes))
    for seed, num_tokens in enumerate(sizes):
        for ids in (torch.int32, torch.int64):
            x, topk_ids, weights, out = _inputs(layer.spec, num_tokens, ids, seed)
            inside = _window(x, layer.spec, num_tokens), _window(out, layer.spec, num_tokens)
            made.run(inside[0], topk_ids, weights, inside[1])
            _check(layer, inside[1], inside[0], topk_ids, weights)
            first = inside[1].clone()
            inside[1].fill_(torch.nan)
            assert out.isnan().all()
            made.run(inside[0], topk_ids, weights, inside[1])
            assert torch.equal(first, inside[1])
    end = made.arena.storage[-4096:]  # type: ignore[attr-defined]
    assert (end == 0xFF).all()


def test_rows_do_not_depend_on_other_rows_within_a_range(settings: Settings) -> None:
    layer = random_layer(SMALL)
    made = _ready_layer(layer, settings)
    x, ids, weights, out = _inputs(SMALL, 200, torch.int32, 1)
    x, out = _window(x, SMALL, 200), _window(out, SMALL, 200)
    made.run(x, ids, weights, out)
    order = torch.randperm(200, device="cuda")
    moved = torch.full((200, SMALL.hidden_size), torch.nan, dtype=out.dtype, device="cuda")
    made.run(x[order].contiguous(), ids[order], weights[order], moved)
    assert torch.equal(moved, out[order])


def test_a_batch_invariant_plan_gives_a_row_the_same_bits_at_every_count(
    settings: Settings,
) -> None:
    spec = replace(SMALL, batch_invariant=True)
    made = _ready_layer(random_layer(spec), settings)
    x, ids, weights, out = _inputs(spec, 200, torch.int32, 2)
    x, out = _window(x, spec, 200), _window(out, spec, 200)
    made.run(x, ids, weights, out)
    for num_tokens in (1, 2, 5, 33, 100, 199):
        part = torch.full((num_tokens, spec.hidden_size), torch.nan, dtype=out.dtype, device="cuda")
        made.run(x[:num_tokens], ids[:num_tokens], weights[:num_tokens], part)
        assert torch.equal(part, out[:num_tokens])


def test_unaligned_ids_and_weights_are_taken(settings: Settings) -> None:
    spec = replace(SMALL, num_experts=8, top_k=3)
    layer = random_layer(spec)
    made = _ready_layer(layer, settings)
    x, ids, weights, out = _inputs(spec, 41, torch.int64, 3)
    x, out = _window(x, spec, 41), _window(out, spec, 41)
    assert ids[1:].data_ptr() % 16
    assert weights[1:].data_ptr() % 16
    target = torch.full((40, spec.hidden_size), torch.nan, dtype=x.dtype, device="cuda")
    made.run(x[1:], ids[1:], weights[1:], target)
    _check(layer, target, x[1:], ids[1:], weights[1:])


def test_rows_past_two_to_the_31_elements(settings: Settings) -> None:
    """By stride: 3 rows of x and out, 2**30 elements apart (2 GiB each of bf16)."""
    layer = random_layer(SMALL)
    made = _ready_layer(layer, settings)
    far = 1 << 30
    storage = torch.empty(2 * far + 256, dtype=torch.bfloat16, device="cuda")
    x = storage.as_strided((3, 256), (far, 1))
    out = torch.empty_like(storage).as_strided((3, 256), (far, 1))
    x.copy_(torch.randn(3, 256))
    out.fill_(torch.nan)
    _, ids, weights, _ = _inputs(SMALL, 3, torch.int32, 4)
    made.run(x, ids, weights, out)
    _check(layer, out, x, ids, weights)


def test_weights_past_two_to_the_31_bytes(settings: Settings) -> None:
    """The last expert of a stack of more than 2**31 words, which an int32 offset cannot reach."""
    spec = MoeSpec(hidden_size=4096, intermediate_size=2048, num_experts=600, top_k=2)
    ready = prewarm(plan(_here(spec), 8), settings=settings)
    tensors = {
        operand.name: torch.zeros(
            operand.shape_for(0),
            dtype=torch.int16 if operand.dtype == "i16" else torch.bfloat16,
            device="cuda",
        )
        for operand in spec.operands((("ids", "i32"),))
        if not operand.is_per_call
    }
    generator = torch.Generator("cuda").manual_seed(0)
    for name in ("w13", "w2"):
        # The first and the last expert are alike, so that each is the other's oracle.
        for part in ("codes", "scales"):
            tensor = tensors[f"{name}.{part}"]
            if part == "codes":
                tensor[0].random_(-(1 << 15), 1 << 15, generator=generator)
            else:
                tensor[0] = torch.rand(tensor[0].shape, generator=generator, device="cuda") * 0.01
            tensor[-1] = tensor[0]
    assert tensors["w13.codes"].numel() > 1 << 31
    made = MoeLayer(ready, tensors, ready.arena())
    for num_tokens in (1, 8):
        x = torch.randn(num_tokens, 4096, device="cuda").bfloat16()
        weights = torch.rand(num_tokens, 2, device="cuda")
        outs = []
        for expert in (0, 599):
            ids = torch.full((num_tokens, 2), -1, dtype=torch.int32, device="cuda")
            ids[:, 0] = expert
            out = torch.full_like(x, torch.nan)
            made.run(x, ids, weights, out)
            outs.append(out)
        assert outs[0].abs().max() > 0
        assert torch.equal(outs[0], outs[1])
