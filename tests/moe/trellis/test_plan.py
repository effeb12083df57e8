"""`select` of an EXL3 layer: what it launches at each count, and that memory holds all of it."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firesteel.errors import InvalidArgumentError, NotPlannedError
from firesteel.formats.trellis import TrellisCode
from firesteel.launch import Launch, Stride, plan
from firesteel.launch.spec import all_flags
from firesteel.launch.stub import StubDriver
from firesteel.moe.activation import Activation
from firesteel.moe.layer import MoeLayer
from firesteel.moe.plan import is_direct, num_blocks
from firesteel.moe.trellis.launches import TRELLIS_KERNELS
from firesteel.moe.trellis.plan import select, workspace
from firesteel.moe.trellis.spec import StoredTrellis, TrellisMoeSpec, trellis_geometry
from firesteel.moe.trellis.tiles import few_spans, hit_experts, tile_rows
from tests.launch.rig import call_of, ready_on_stub, tensors_of

IDS = (("ids", "i32"),)
GLM = trellis_geometry("glm-5.2", TrellisCode(3.0, "mcg"), tensor_parallel=4)
TINY = TrellisMoeSpec(hidden_size=256, intermediate_size=128, num_experts=8, top_k=2)
BIASED = StoredTrellis(rates=(2, 3, 4), codebook="mul1", has_bias=True)
# With counts that reach all their tiles.
SPECS = {
    "glm-5.2-tp4": (GLM, 1400),
    "glm-5.2-tp4-no-wgmma-no-pdl": (replace(GLM, wgmma=False, pdl=False), 600),
    "qwen3-30b": (trellis_geometry("qwen3-30b-a3b", TrellisCode(4.0, "3inst")), 700),
    "tiny": (TINY, 300),
    "ragged": (replace(TINY, hidden_size=760, intermediate_size=200, w13=BIASED, w2=BIASED), 300),
    "batch-invariant": (replace(TINY, batch_invariant=True, hidden_size=2048), 300),
    "expert-map": (replace(TINY, num_global_experts=64, top_k=6, hidden_size=1536), 300),
    "relu2": (replace(TINY, activation=Activation(name="relu2"), hidden_size=1536), 300),
    "one-expert": (replace(TINY, num_experts=1, top_k=1), 200),
    "many-experts": (replace(TINY, num_experts=2048, top_k=10), 600),
}


@st.composite
def specs(draw: st.DrawFn) -> TrellisMoeSpec:
    experts = draw(st.sampled_from((1, 2, 7, 60, 256)))
    num_global = draw(st.sampled_from((None, 256)))
    rates = st.sets(st.integers(1, 8), min_size=1, max_size=3).map(lambda s: tuple(sorted(s)))
    stored = st.builds(
        StoredTrellis,
        rates=rates,
        codebook=st.sampled_from(("mcg", "3inst", "mul1")),
        has_bias=st.booleans(),
    )
    return TrellisMoeSpec(
        # Short and long enough to split; whole rotations, and not.
        hidden_size=draw(st.sampled_from((128, 760, 2048, 6144))),
        intermediate_size=draw(st.sampled_from((64, 200, 512, 768))),
        num_experts=experts,
        top_k=draw(st.integers(1, min(num_global or experts, 10))),
        dtype=draw(st.sampled_from(("bf16", "fp16"))),
        w13=draw(stored),
        w2=draw(stored),
        activation=draw(st.sampled_from((Activation(), Activation(name="relu2")))),
        num_global_experts=num_global,
        batch_invariant=draw(st.booleans()),
        pdl=draw(st.booleans()),
        wgmma=draw(st.booleans()),
    )


class Call:
    """The launches of a call by what they do."""

    def __init__(self, spec: TrellisMoeSpec, num_tokens: int) -> None:
        self.all = select(spec, num_tokens, IDS)
        *self.placing, self.rotate, self.first, self.act, self.second, self.finish = self.all
        names = [launch.key.name for launch in self.all[len(self.placing) :]]
        assert [name.replace("wgmma", "stream") for name in names] == [
            *("rotate_kernel", "trellis_stream_kernel", "act_kernel"),
            *("trellis_stream_kernel", "finish_kernel"),
        ]


def constant(launch: Launch, name: str) -> int:
    """A constant of a launch; 1 where its code has none."""
    found = dict(launch.key.constexprs).get(name, 1)
    assert isinstance(found, int)
    return found


def argument(launch: Launch, name: str) -> object:
    """What a launch passes for a parameter; None where it has none."""
    names = [parameter for parameter, _ in launch.key.arguments]
    return launch.arguments[names.index(name)] if name in names else None


@pytest.mark.parametrize("name", SPECS)
def test_select_is_total_and_pure(name: str) -> None:
    spec, most = SPECS[name]
    for flags in all_flags(spec.flags()):
        tensors = {operand.name for operand in spec.operands(flags)}
        regions = {region.name for region in spec.workspace(0)}
        assert spec.select(0, flags) == ()
        for num_tokens in (*range(1, most + 1), 8192):
            launches = spec.select(num_tokens, flags)
            assert launches == select(replace(spec), num_tokens, flags)
            assert 5 <= len(launches) <= 7
            for launch in launches:
                assert min(launch.grid) > 0
                assert max(launch.grid[1:]) <= 65535
                for value in launch.arguments:
                    if isinstance(value, Stride):
                        assert value.tensor in ("x", "out")
                    elif isinstance(value, str):
                        assert value in tensors | regions


@pytest.mark.parametrize("num_tokens", [-1, -(1 << 40)])
def test_a_negative_count_is_refused(num_tokens: int) -> None:
    message = f"num_tokens: got {num_tokens}, must not be negative"
    with pytest.raises(InvalidArgumentError, match=message):
        select(TINY, num_tokens, IDS)


@given(spec=specs(), num_tokens=st.integers(1, 3000))
def test_grids_cover_every_route_row_and_column(spec: TrellisMoeSpec, num_tokens: int) -> None:
    call, routes = Call(spec, num_tokens), num_tokens * spec.top_k
    blocks = spec.padded_hidden // 128, spec.padded_intermediate // 128
    for launch, height, width in (
        (call.first, spec.num_parts * blocks[1], blocks[0]),
        (call.second, *blocks),
    ):
        # Every row block and span of K is some program's, and none has blocks of two parts.
        span, spans = constant(launch, "SPAN"), constant(launch, "SPLIT_K")
        assert launch.grid[0] * span == height
        assert constant(launch, "N") // 128 % span == 0
        assert launch.grid[2] == spans
        assert width % spans == 0
        assert 1 in (span, spans)
        assert constant(launch, "WARPS") == launch.key.num_warps
        tiles = routes
        if call.placing:
            tiles = num_blocks(routes, spec.num_experts, constant(launch, "BLOCK_M"))
        assert launch.grid[1] == tiles <= 65535
        assert argument(launch, "R") == routes
    assert bool(call.placing) != is_direct(spec, routes)
    if call.placing:
        rows = argument(call.placing[-1], "tile_rows")
        assert [constant(each, "BLOCK_M") for each in (call.first, call.second)] == [rows, rows]
    assert call.rotate.grid[0] == routes
    assert call.rotate.grid[1] * 1024 >= spec.padded_hidden
    assert call.act.grid[0] * constant(call.act, "WARPS") >= routes
    columns = 512 if spec.num_parts == 2 else 1024
    assert call.act.grid[1] * columns >= spec.padded_intermediate
    assert call.finish.grid[0] == argument(call.finish, "M") == num_tokens
    assert call.finish.grid[1] * 1024 >= spec.hidden_size


@pytest.mark.parametrize(
    ("changes", "rows"), [({"wgmma": False}, 16), ({"batch_invariant": True}, 8)]
)
def test_more_tokens_than_a_grid_has_tiles_are_refused_at_once(
    changes: dict[str, bool], rows: int
) -> None:
    spec = replace(GLM, **changes)
    # Tiles of which every expert's last one may hold a single route.
    most = (65535 * rows - spec.num_experts * (rows - 1)) // spec.top_k
    message = (
        rf"max_tokens: got 1000000, must be at most {most}: one more takes a grid of "
        r"\(\d+, 65536, 1\) of trellis_stream_kernel, the largest is \(2147483647, 65535, 65535\)"
    )
    with pytest.raises(InvalidArgumentError, match=message):
        plan(spec, 1_000_000)


@given(spec=specs(), num_tokens=st.integers(1, 1000))
def test_what_a_launch_writes_the_next_one_reads(spec: TrellisMoeSpec, num_tokens: int) -> None:
    call = Call(spec, num_tokens)
    spans = constant(call.first, "SPLIT_K")
    assert constant(call.act, "SPLIT_K") == spans
    assert constant(call.second, "SPLIT_K") == constant(call.finish, "SPLIT_K") == 1
    sums, products = ("partials", None) if spans > 1 else (None, "products")
    for launch, name in ((call.first, "y_ptr"), (call.act, "products_ptr")):
        assert (argument(launch, "partials_ptr"), argument(launch, name)) == (sums, products)
    assert argument(call.rotate, "rotated_ptr") == argument(call.first, "x_ptr") == "rows"
    assert argument(call.act, "hidden_ptr") == argument(call.second, "x_ptr") == "hidden"
    assert argument(call.second, "y_ptr") == argument(call.finish, "products_ptr") == "rows"
    assert argument(call.act, "suh_ptr") == "w2.suh"
    biases = [argument(each, "bias_ptr") for each in (call.act, call.finish)]
    assert biases == [
        *("w13.bias" if spec.w13.has_bias else None, "w2.bias" if spec.w2.has_bias else None)
    ]
    # Sorted routes have no ids; others have no tables.
    for launch in (call.first, call.second):
        ids, table = argument(launch, "topk_ids_ptr"), argument(launch, "route_ids_ptr")
        assert (ids, table) == ((None, "route_ids") if call.placing else ("topk_ids", None))


@given(spec=specs(), num_tokens=st.integers(0, 3000))
def test_regions_hold_what_the_launches_write(spec: TrellisMoeSpec, num_tokens: int) -> None:
    sizes = {region.name: math.prod(region.shape) for region in workspace(spec, num_tokens)}
    routes, n, parts = num_tokens * spec.top_k, spec.padded_intermediate, spec.num_parts
    assert sizes["rows"] == routes * parts * spec.padded_hidden
    assert sizes["products"] == parts * sizes["hidden"] == routes * parts * n
    assert sizes["route_ids"] == routes
    assert sizes["expert_offsets"] == spec.num_experts + 1
    assert sizes["num_blocks"] == 1
    if not num_tokens:
        return
    call = Call(spec, num_tokens)
    if call.placing:
        assert min(sizes["block_row"], sizes["block_expert"]) >= call.first.grid[1]
    if len(call.placing) > 1:
        assert sizes["counts"] >= call.placing[0].grid[0] * spec.num_experts
    spans = constant(call.first, "SPLIT_K")
    if spans > 1:
        assert sizes["partials"] >= spans * routes * parts * n


@given(spec=specs(), counts=st.lists(st.integers(0, 3000), min_size=2, max_size=2))
def test_regions_never_shrink(spec: TrellisMoeSpec, counts: list[int]) -> None:
    fewer, more = (workspace(spec, count) for count in sorted(counts))
    for small, large in zip(fewer, more, strict=True):
        assert (small.name, small.dtype) == (large.name, large.dtype)
        assert math.prod(small.shape) <= math.prod(large.shape)


@pytest.mark.parametrize("name", SPECS)
def test_sums_of_spans_fit_at_every_count(name: str) -> None:
    spec, most = SPECS[name]
    for num_tokens in range(1, most + 1):
        sizes = {region.name: region.shape for region in workspace(spec, num_tokens)}
        spans = constant(Call(spec, num_tokens).first, "SPLIT_K")
        assert spans == 1 or sizes["partials"][0] >= spans * num_tokens * spec.top_k


@pytest.mark.parametrize("spec", [GLM, SPECS["batch-invariant"][0]])
def test_a_batch_invariant_plan_multiplies_in_one_way(spec: TrellisMoeSpec) -> None:
    made = plan(replace(spec, batch_invariant=True), 8192, flags={"ids": ["i32"]})
    names = [key.name for key in made.keys]
    # FC1 and FC2 once, in the same tiles; nothing else twice; three that sort.
    assert sorted(names) == [
        *("act_kernel", "count_kernel", "finish_kernel", "place_kernel", "rotate_kernel"),
        *("scatter_kernel", "trellis_stream_kernel", "trellis_stream_kernel"),
    ]
    constants = [dict(key.constexprs) for key in made.keys]
    assert {each["BLOCK_M"] for each in constants if "BLOCK_M" in each} == {8}
    assert {each.get("SPLIT_K", 1) for each in constants} == {1}


@given(spec=specs(), num_tokens=st.integers(1, 2000))
@settings(max_examples=50)
def test_what_a_target_has_not_is_not_launched(spec: TrellisMoeSpec, num_tokens: int) -> None:
    launches = select(spec, num_tokens, IDS)
    is_wgmma = {launch.key.name == "trellis_wgmma_kernel" for launch in launches}
    assert spec.wgmma or is_wgmma == {False}
    assert {dict(launch.key.constexprs)["PDL"] for launch in launches} == {spec.pdl}
    assert {launch.key.pdl for launch in launches} == {spec.pdl}


def test_a_plan_reaches_every_kernel_and_has_few_keys() -> None:
    made = plan(GLM, 1400)
    names = {key.kernel for key in made.keys}
    assert names >= {kernel.name for kernel in TRELLIS_KERNELS}
    # A cut of FC1, FC2 and what follows for each range of counts, some of them for both types.
    assert len(made.keys) <= 48
    # Of both types of ids: what sorted routes feed is compiled once.
    packed = [key for key in made.keys if "route_ids_ptr" in dict(key.arguments)]
    products = [key for key in packed if key.name.startswith("trellis")]
    assert len(products) == len({key.constexprs for key in products}) > 8
    others = plan(GLM.for_target("sm_120"), 1400, flags={"ids": ["i32"]})
    assert not any("wgmma" in key.name for key in others.keys)


@pytest.mark.parametrize("wgmma", [True, False])
def test_tiles_grow_with_rows(wgmma: bool) -> None:
    rows = [tile_rows(count / 4, wgmma=wgmma) for count in range(1000)]
    assert rows == sorted(rows)
    assert set(rows) == ({8, 16, 32, 64, 128} if wgmma else {8, 16})


@given(programs=st.floats(1, 1e6), width=st.integers(1, 64))
def test_spans_are_whole_and_of_some_length(programs: float, width: int) -> None:
    spans = few_spans(programs, width)
    assert width % spans == 0
    assert spans == 1 or width // spans >= 3
    assert few_spans(2 * programs, width) <= spans <= 16


@pytest.mark.parametrize("num_experts", [1, 2, 256])
@pytest.mark.parametrize("routes", [0, 1, 2, 7, 1000])
def test_experts_hit_are_those_of_the_formula(num_experts: int, routes: int) -> None:
    wanted = num_experts * (1 - (1 - 1 / num_experts) ** routes)
    assert hit_experts(num_experts, routes) == pytest.approx(wanted, rel=1e-12)


def test_ready_layer_runs_what_was_planned_and_nothing_else() -> None:
    spec, most = replace(SPECS["ragged"][0], num_global_experts=16), 200
    made = plan(spec, most, flags={"ids": ["i32"]})
    driver = StubDriver.open()
    driver.reset()
    ready = ready_on_stub(made, driver)
    layer = MoeLayer(ready, tensors_of(spec, IDS), ready.arena())
    by_handle = {ready.function(key)[0].handle: key for key in made.keys}
    for num_tokens in (0, 1, 4, 17, 60, most):
        driver.reset()
        layer.run(*call_of(spec, IDS, num_tokens))
        found = [(by_handle[launch.function], launch.grid) for launch in driver.launches()]
        assert found == [(each.key, each.grid) for each in select(spec, num_tokens, IDS)]
    assert not ready.audit.misses
    x, ids, weights, out = call_of(spec, IDS, 4)
    with pytest.raises(NotPlannedError, match="'ids': 'i64'"):
        layer.run(x, ids.long(), weights, out)
    with pytest.raises(InvalidArgumentError, match=r"topk_ids: got torch.int16"):
        layer.run(x, ids.short(), weights, out)
    with pytest.raises(NotPlannedError, match=r"201 tokens, the plan holds 0..200 tokens"):
        layer.run(*call_of(spec, IDS, most + 1))


def test_a_matrix_has_code_for_the_rates_of_its_stack() -> None:
    spec = replace(TINY, w13=StoredTrellis(rates=(2, 3)), w2=StoredTrellis(codebook="mul1"))
    for num_tokens in (1, 5, 40, 60, 300):
        call = Call(spec, num_tokens)
        for launch, name, rates in ((call.first, "w13", 0b1100), (call.second, "w2", 0b1000)):
            assert constant(launch, "RATES") == rates
            codebook = dict(launch.key.constexprs)["CODEBOOK"]
            assert codebook == getattr(spec, name).codebook
            assert argument(launch, "words_ptr") == f"{name}.words"
            assert argument(launch, "matrices_ptr") == f"{name}.matrices"


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("w13.suh", (8, 2, 128), torch.float16),
        ("w13.matrices", (8, 1, 2), torch.int32),
        ("w2.svh", (8, 1, 256), torch.int16),
        ("w2.words", (2, 32), torch.int32),
    ],
)
def test_a_tensor_of_another_layer_is_refused(
    name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensors = tensors_of(TINY, IDS)
    ready = ready_on_stub(plan(TINY, 4), StubDriver.open())
    assert ready.bind(tensors, ready.arena(), ids="i32")
    wrong = {**tensors, name: torch.empty(shape, dtype=dtype)}
    with pytest.raises(InvalidArgumentError, match=f"^{name}: got (shape|torch.int16).*, must be "):
        ready.bind(wrong, ready.arena(), ids="i32")
