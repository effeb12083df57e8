"""`select` of a MoE layer: what it launches at each count, and that its tables fit any routing."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firesteel.errors import InvalidArgumentError, NotPlannedError
from firesteel.launch import Launch, LaunchKey, Stride, plan
from firesteel.launch.stub import StubDriver
from firesteel.moe.activation import Activation
from firesteel.moe.layer import MoeLayer
from firesteel.moe.plan import num_blocks, select, tile_of, workspace
from firesteel.moe.products import split_k
from firesteel.moe.spec import GEOMETRIES, MoeSpec, StoredWeights, geometry
from firesteel.moe.tuning import Down, GateUp, LayerTiles, Shape, Tile, TileTable
from firesteel.moe.tuning_file import default_table
from tests.launch.rig import call_of, ready_on_stub, tensors_of
from tests.moe.tiles import FIXED, down_cuts, gate_up_cuts, keys_of, tile_at

IDS = (("ids", "i32"),)
SHIPPED = geometry("glm-5.2", tensor_parallel=4)
GLM = replace(SHIPPED, table=FIXED)
INT4 = {"element": "int4", "group_size": 32, "scale": "bf16", "global_scale": "none"}
TILES = GLM.tiles.sorted
LARGE = Tile(64, GateUp(64, 4, 3), False, Down(64, 2, 4, 3))
# Hopper's own take every count in tiles of 32 rows, fewer than any other has; direct ones too.
ODD = TileTable(
    *("odd", "A GPU", "9.0", "2026-11-29", "2.11.0", "3.6.0"),
    rows=LayerTiles(
        ((math.inf, LARGE),),
        LARGE,
        2,
        LARGE,
        ((0.0, math.inf, replace(LARGE, rows=32, is_wgmma=True)),),
    ).rows(Shape(256, 128, "int4-g128")),
)


@st.composite
def specs(draw: st.DrawFn) -> MoeSpec:
    experts = draw(st.sampled_from((1, 2, 7, 8, 60, 128, 1100)))
    element = draw(st.sampled_from(("int4", "int3", "mxfp4", "nvfp4", "nf3")))
    stored = StoredWeights.nf3() if element == "nf3" else StoredWeights(group_size=32)
    if "fp4" in element:
        stored = StoredWeights.fp4(element)
    elif element == "int3":
        stored = replace(stored, element=element)
    return MoeSpec(
        # Short and long enough to split; whole blocks and tiles of rows, and not.
        hidden_size=draw(st.sampled_from((128, 352, 2048, 2880))),
        intermediate_size=draw(st.sampled_from((32, 160, 512))),
        num_experts=experts,
        top_k=draw(st.integers(1, min(experts, 10))),
        w13=replace(stored, has_bias=draw(st.booleans())),
        w2=stored,
        activation=draw(st.sampled_from((Activation(), Activation(name="relu2")))),
        weight_on_input=draw(st.booleans()),
        batch_invariant=draw(st.booleans()),
        pdl=draw(st.booleans()),
        wgmma=draw(st.booleans()),
        table=draw(st.sampled_from((default_table(), FIXED, ODD))),
    )


def launches_of(spec: MoeSpec, num_tokens: int) -> dict[str, Launch]:
    """Each launch of a call by its kernel; products by the name that all kernels of them share."""
    found = {_role(launch.key): launch for launch in select(spec, num_tokens, IDS)}
    assert len(found) == len(select(spec, num_tokens, IDS))
    return found


def _role(key: LaunchKey) -> str:
    return key.name.replace("_stream", "").replace("_wgmma", "")


def tables_of(launches: dict[str, Launch]) -> Launch | None:
    """What lays out the tiles of sorted routes; None where they are not sorted."""
    return launches.get("place_kernel") or launches.get("scatter_kernel")


def argument(launch: Launch, name: str) -> object:
    """What a launch passes for a parameter."""
    names = [parameter for parameter, _ in launch.key.arguments]
    return launch.arguments[names.index(name)]


@pytest.mark.parametrize(
    ("tokens", "rows", "blocks"),
    [
        # What the seed's allocator has: capacity, and the power-of-two buckets below it.
        (3072, 64, 636),
        (128, 64, 268),
        (512, 64, 316),
        (1024, 64, 380),
        (2048, 64, 508),
        (64, 8, 288),
        (64, 64, 260),
    ],
)
def test_blocks_are_those_of_the_reference_geometry(tokens: int, rows: int, blocks: int) -> None:
    assert num_blocks(tokens * 8, 256, rows) == blocks


@given(
    counts=st.lists(st.integers(0, 70), min_size=1, max_size=40),
    rows=st.sampled_from((8, 16, 32, 64)),
)
def test_any_routing_fits_in_the_blocks(counts: list[int], rows: int) -> None:
    needed = sum(math.ceil(count / rows) for count in counts)
    assert needed <= num_blocks(sum(counts), len(counts), rows)


@pytest.mark.parametrize("num_tokens", [-1, -(1 << 40)])
def test_a_negative_count_is_refused(num_tokens: int) -> None:
    with pytest.raises(InvalidArgumentError, match="num_tokens"):
        select(GLM, num_tokens, IDS)


def test_select_is_total() -> None:
    assert select(GLM, 0, IDS) == ()
    for num_tokens in (1, 8192, 8193, 1 << 20):
        launches = select(GLM, num_tokens, IDS)
        assert 3 <= len(launches) <= 5
        assert all(min(launch.grid) > 0 for launch in launches)


@given(spec=specs(), num_tokens=st.integers(1, 3000))
def test_grids_cover_every_route_row_and_column(spec: MoeSpec, num_tokens: int) -> None:
    launches = launches_of(spec, num_tokens)
    routes = num_tokens * spec.top_k
    gate_up, down = launches["gate_up_kernel"], launches["down_kernel"]
    for launch, columns in ((gate_up, spec.intermediate_size), (down, spec.hidden_size)):
        constants = dict(launch.key.constexprs)
        # A program of FC2 does several blocks; none would have nothing to do.
        each = constants["BLOCK_N"] * constants.get("SPAN", 1)
        assert launch.grid[0] == math.ceil(columns / each)
        tiles = num_blocks(routes, spec.num_experts, constants["BLOCK_M"])
        assert launch.grid[1] == (tiles if tables_of(launches) else routes)
        assert launch.grid[1] <= 65535
    combine = launches["combine_kernel"]
    assert combine.grid[0] == num_tokens
    assert combine.grid[1] * dict(combine.key.constexprs)["BLOCK_K"] >= spec.hidden_size
    place = tables_of(launches)
    products = [dict(each.key.constexprs) for each in (gate_up, down)]
    if place is None:
        # Kernels that know no ids take sorted routes only.
        assert all("topk_ids_ptr" in dict(each.key.arguments) for each in (gate_up, down))
        return
    assert dict(place.key.constexprs)["E_BLOCK"] >= spec.num_experts
    # The tiles that are laid out are those that both products work through.
    rows = argument(place, "tile_rows")
    assert rows == tile_of(spec, routes).rows
    assert [each["BLOCK_M"] for each in products] == [rows, rows]
    # A program counts so many routes itself, or another launch has counted them by chunks.
    assert ("count_kernel" in launches) == ("scatter_kernel" in launches) == (routes > 4096)
    if "count_kernel" in launches:
        count = launches["count_kernel"]
        chunk = dict(count.key.constexprs)["BLOCK_R"]
        assert count.grid == place.grid == (math.ceil(routes / chunk), 1, 1)
        assert dict(place.key.constexprs)["BLOCK_R"] == chunk


@given(spec=specs(), num_tokens=st.integers(1, 3000))
def test_split_sums_are_added_up(spec: MoeSpec, num_tokens: int) -> None:
    """Spans of FC1 write `partials`, and `activate` reads as many of the same routes."""
    launches = launches_of(spec, num_tokens)
    routes = num_tokens * spec.top_k
    gate_up = launches["gate_up_kernel"]
    spans = dict(gate_up.key.constexprs).get("SPLIT_K", 1)
    assert gate_up.grid[2] == spans
    assert ("activate_kernel" in launches) == (spans > 1)
    written = {"partials_ptr", "hidden_ptr"} & set(dict(gate_up.key.arguments))
    assert written == {"partials_ptr" if spans > 1 else "hidden_ptr"}
    if spans == 1:
        return
    assert tables_of(launches) is None
    activate = launches["activate_kernel"]
    constants = dict(activate.key.constexprs)
    assert constants["SPLIT_K"] == spans
    # No span is without a block, so that none is only for zeros.
    assert spans * 128 <= spec.hidden_size
    assert activate.grid[0] == argument(activate, "R") == argument(gate_up, "R") == routes
    assert activate.grid[1] == math.ceil(spec.intermediate_size / constants["BLOCK_N"])
    # Bias and router weight come after the whole sum, and once.
    pointers = set(dict(activate.key.arguments))
    assert ("bias_ptr" in pointers) == spec.w13.has_bias
    assert ("topk_weights_ptr" in pointers) == spec.weight_on_input
    assert not {"bias_ptr", "topk_weights_ptr"} & set(dict(gate_up.key.arguments))


@given(spec=specs(), num_tokens=st.integers(0, 2000))
def test_regions_hold_what_the_launches_write(spec: MoeSpec, num_tokens: int) -> None:
    sizes = {region.name: math.prod(region.shape) for region in workspace(spec, num_tokens)}
    routes = num_tokens * spec.top_k
    assert sizes["route_ids"] >= routes
    assert sizes["hidden"] >= routes * spec.intermediate_size
    assert sizes["y"] >= routes * spec.hidden_size
    assert sizes["num_blocks"] == 1
    assert sizes["expert_offsets"] == spec.num_experts + 1
    tiles = num_blocks(routes, spec.num_experts, tile_of(spec, routes).rows)
    launches = launches_of(spec, num_tokens)
    if "count_kernel" in launches:
        assert sizes["counts"] >= launches["count_kernel"].grid[0] * spec.num_experts
    if tables_of(launches):
        assert min(sizes["block_row"], sizes["block_expert"]) >= tiles
    if "activate_kernel" in launches:
        spans = launches["gate_up_kernel"].grid[2]
        assert sizes["partials"] >= spans * routes * spec.num_parts * spec.intermediate_size


@given(spec=specs(), counts=st.lists(st.integers(0, 3000), min_size=2, max_size=2))
def test_regions_never_shrink(spec: MoeSpec, counts: list[int]) -> None:
    fewer, more = (workspace(spec, count) for count in sorted(counts))
    for small, large in zip(fewer, more, strict=True):
        assert small.name == large.name
        assert math.prod(small.shape) <= math.prod(large.shape)


def test_a_tile_serves_the_routes_an_expert_has_up_to_its_bound() -> None:
    bounds = [bound for bound, _ in TILES]
    assert bounds == sorted(set(bounds))
    assert bounds[-1] == math.inf
    # Many routes an expert fill more rows than few.
    assert TILES[0][1].rows < TILES[-1][1].rows
    plain = replace(GLM, wgmma=False)
    for bound, tile in TILES[:-1]:
        at = math.ceil(bound * GLM.num_experts)
        assert tile_of(plain, at - 1) is tile
        assert tile_of(plain, at) is not tile
    assert tile_of(plain, 1 << 30) is TILES[-1][1]
    assert tile_of(replace(GLM, batch_invariant=True), 1) is GLM.tiles.batch_invariant


def test_tiles_of_hoppers_own_kernels_come_before_the_others() -> None:
    ranges = GLM.tiles.wgmma
    assert ranges
    for first, below, tile in ranges:
        counts = [math.ceil(first * GLM.num_experts), 1 << 30]
        if below != math.inf:
            counts[1] = math.ceil(below * GLM.num_experts) - 1
        assert all(tile_of(GLM, count) is tile for count in counts)
        for count in counts:
            assert tile_of(replace(GLM, wgmma=False), count) is GLM.tiles.of_sorted(count / 256)
            invariant = replace(GLM, batch_invariant=True)
            assert tile_of(invariant, count) is GLM.tiles.batch_invariant


def products_of(spec: MoeSpec) -> list[LaunchKey]:
    """Keys of FC1 and FC2 of calls of up to 4000 tokens."""
    keys = keys_of(spec, 4000, ["i32"])
    return [key for key in keys if _role(key) in ("gate_up_kernel", "down_kernel")]


@pytest.mark.parametrize("spec", [GLM, SHIPPED], ids=["fixed", "shipped"])
def test_keys_change_only_where_a_range_starts(spec: MoeSpec) -> None:
    assert plan(spec, 4000).keys == tuple(keys_of(spec, 4000))


def test_a_plan_without_wgmma_is_that_of_the_other_rows() -> None:
    """A table that has only those gives the same launches, and none is of Hopper's kernels."""
    (shape,) = GLM.table.shapes
    rows = replace(GLM.tiles, wgmma=()).rows(shape)
    others = replace(GLM, table=replace(GLM.table, rows=rows))
    plain = replace(GLM, wgmma=False)
    for num_tokens in (1, 4, 5, 40, 64, 700, 2048, 8192):
        assert select(plain, num_tokens, IDS) == select(others, num_tokens, IDS)
    assert {key.name for key in products_of(plain)} == {"gate_up_kernel", "down_kernel"}
    names = {"gate_up_stream_kernel", "gate_up_wgmma_kernel", "down_stream_kernel"}
    assert names < {key.name for key in products_of(GLM)}


@pytest.mark.parametrize(
    "changes",
    [
        {"wgmma": False},
        {"dtype": "fp16"},
        {"w13": StoredWeights(scale="fp16")},
        {"w2": StoredWeights(scale="fp32")},
        {"intermediate_size": 516, "w2": StoredWeights(group_size=516)},
        {"w2": StoredWeights.fp4("mxfp4")},
        {"w13": StoredWeights.fp4("nvfp4")},
        {"w2": StoredWeights.nf3()},
    ],
)
def test_weights_that_hoppers_own_kernels_do_not_read_take_the_other_rows(changes: dict) -> None:
    spec = replace(GLM, **changes)
    names = {key.name for key in products_of(spec)}
    assert names == {"gate_up_kernel", "down_kernel"}
    # With scales of the layer's own type they are read in either type.
    fp16 = StoredWeights(scale="fp16")
    names = {key.name for key in products_of(replace(GLM, dtype="fp16", w13=fp16, w2=fp16))}
    assert {"gate_up_stream_kernel", "down_wgmma_kernel"} < names


@pytest.mark.parametrize("first", [0.0, 16.0])
def test_a_tile_with_more_warps_than_rows_is_for_gated_layers_alone(first: float) -> None:
    """64 columns are 128 rows of FC1, for 8 warps, but 64 where there are no up rows."""
    tile = Tile(8 if first == 0 else 64, GateUp(64, 8, 3), False, Down(128, 1, 8, 3), is_wgmma=True)
    rows = replace(GLM.tiles, wgmma=((first, math.inf, tile),)).rows(Shape(6144, 512, "int4-g128"))
    spec = replace(GLM, table=replace(GLM.table, rows=rows))
    kind = "stream" if tile.rows == 8 else "wgmma"
    assert f"gate_up_{kind}_kernel" in {key.name for key in products_of(spec)}
    plain = replace(spec, activation=Activation(name="relu2"))
    assert {key.name for key in products_of(plain)} == {"gate_up_kernel", "down_kernel"}


@pytest.mark.parametrize("element", ["mxfp4", "nvfp4"])
def test_fp4_takes_only_rows_that_were_measured_for_it(element: str) -> None:
    fp4 = StoredWeights.fp4(element)
    spec = replace(GLM, w13=fp4, w2=fp4)
    assert {shape.recipe for shape in spec.table.shapes} == {"int4-g128"}
    assert GLM.tiles.wgmma
    assert spec.tiles == replace(GLM.tiles, wgmma=())
    assert {key.name for key in products_of(spec)} == {"gate_up_kernel", "down_kernel"}
    shape = Shape(6144, 512, element)
    measured = replace(GLM.table, rows=(*GLM.table.rows, *GLM.tiles.rows(shape)))
    names = {key.name for key in products_of(replace(spec, table=measured))}
    assert {"gate_up_stream_kernel", "down_wgmma_kernel"} < names
    # Of the table that ships too it is the rows of its own recipe that it takes.
    shipped = replace(SHIPPED, w13=fp4, w2=fp4)
    assert shipped.tiles == shipped.table.tiles(shape)
    kinds = ["stream" if tile.rows <= 16 else "wgmma" for *_, tile in shipped.tiles.wgmma]
    assert kinds
    names = {key.name for key in products_of(shipped)}
    assert {f"{name}_{kind}_kernel" for kind in kinds for name in ("gate_up", "down")} < names


@pytest.mark.parametrize("stored", [StoredWeights.nf3(), StoredWeights(element="int3")])
def test_3_bits_take_the_rows_of_int4(stored: StoredWeights) -> None:
    spec = replace(SHIPPED, w13=stored, w2=stored)
    assert spec.tiles == SHIPPED.tiles
    assert [key.name for key in products_of(spec)] == [key.name for key in products_of(SHIPPED)]


def test_rows_of_x_and_out_are_counted_in_16_bytes() -> None:
    found = {
        value.tensor
        for launch in select(GLM, 1, IDS)
        for value in launch.arguments
        if isinstance(value, Stride)
    }
    assert found == {"x", "out"}
    units = {operand.name: operand.row_unit for operand in GLM.operands(IDS)}
    assert {name for name, unit in units.items() if unit != 1} == found
    assert all(units[name] * 2 == 16 for name in found)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_each_named_geometry_plans(name: str) -> None:
    group_size = 64 if name == "gpt-oss-120b" else 128
    spec = geometry(name, group_size=group_size)
    made = plan(spec, 300)
    assert len(made.keys) == num_keys(spec, 300)
    assert all(table.resolve(0) == () for table in made.tables.values())


@pytest.mark.parametrize("element", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_each_named_geometry_plans_as_fp4(name: str, element: str) -> None:
    spec = geometry(name, element=element)
    made = plan(spec, 300, flags={"ids": ["i32"]})
    products = [key for key in made.keys if _role(key) in ("gate_up_kernel", "down_kernel")]
    assert {dict(key.constexprs)["ELEMENT"] for key in products} == {element}
    pointers = {name for key in products for name, _ in key.arguments}
    assert ("global_scale_ptr" in pointers) == (element == "nvfp4")
    assert {dict(key.arguments)["scales_ptr"] for key in products} == {"*u8@16"}
    # With rows of int4 alone, the same tiles as int4 on the same kernels.
    same = {"w13": replace(spec.w13, **INT4), "w2": replace(spec.w2, **INT4)}
    fixed = replace(spec, table=FIXED)
    int4 = replace(fixed, **same, wgmma=False)
    assert grids(fixed) == grids(int4)
    # With its own, those that int4 takes from a table that has the same ones for it.
    own = spec.table.nearest(spec.hidden_size, spec.intermediate_size, element)
    assert own.recipe == element
    rows = spec.table.tiles(own).rows(own._replace(recipe="int4-g128"))
    int4 = replace(spec, **same, table=replace(spec.table, rows=rows))
    assert grids(spec) == grids(int4)


def grids(spec: MoeSpec) -> list[list[tuple[int, int, int]]]:
    """Of direct calls, and of few, some and many sorted routes an expert."""
    return [
        [launch.grid for launch in select(spec, num_tokens, IDS)]
        for num_tokens in (1, 40, 300, 1000, 8000)
    ]


def num_keys(spec: MoeSpec, max_tokens: int, num_ids: int = 2) -> int:
    """By how calls cut the layer; what reads no ids is compiled once for all types of them."""
    counts = range(1, max_tokens + 1)
    products = [*gate_up_cuts(spec, counts), *down_cuts(spec, counts)]
    direct = sum(not is_sorted for is_sorted, *_ in products)
    activates = direct > 0 and split_k(spec) > 1
    # Up to 4096 routes `place` sorts them, then `count` and `scatter`; `combine` ends each call.
    routes = [count * spec.top_k for count in counts if tile_at(spec, count)[0]]
    sorts = any(n <= 4096 for n in routes) + 2 * any(n > 4096 for n in routes)
    return len(products) - direct + num_ids * (direct + activates + sorts + 1)


def test_the_reference_plan_has_few_keys() -> None:
    made = plan(GLM, 8192)
    assert len(made.keys) == num_keys(GLM, 8192) == 22
    int32 = {step.key for steps in made.tables[IDS].sequences for step in steps}
    assert len(int32) == num_keys(GLM, 8192, num_ids=1) == 15


def test_the_page_says_how_many_keys_there_are() -> None:
    page = " ".join((Path(__file__).parents[2] / "docs" / "launch.md").read_text().split())
    counts = range(1, 8193)
    ways = [
        sum(is_sorted for is_sorted, *_ in cuts(SHIPPED, counts))
        for cuts in (gate_up_cuts, down_cuts)
    ]
    total = num_keys(SHIPPED, 8192)
    assert f"(int4 group 128) has {total} keys for 0..8192 tokens" in page
    assert f"no ids: {sum(ways)} keys" in page
    assert f"scatter, combine: {total - sum(ways)}." in page


def test_a_batch_invariant_plan_multiplies_in_one_way() -> None:
    spec = replace(GLM, batch_invariant=True)
    made = plan(spec, 8192, flags={"ids": ["i32"]})
    assert len(made.keys) == num_keys(spec, 8192, num_ids=1) == 6
    for name in ("gate_up_kernel", "down_kernel", "combine_kernel"):
        assert sum(_role(key) == name for key in made.keys) == 1
    assert not any(key.name == "activate_kernel" for key in made.keys)
    assert {dict(key.constexprs).get("SPLIT_K", 1) for key in made.keys} == {1}


def test_ids_that_no_code_reads_make_no_key() -> None:
    made = plan(GLM, 3072)
    packed = [
        k
        for k in made.keys
        if _role(k) == "gate_up_kernel" and "route_ids_ptr" in dict(k.arguments)
    ]
    # Of both types of ids: what sorted routes feed is compiled once.
    cuts = gate_up_cuts(GLM, range(5, 3073))
    assert len(packed) == len(cuts) > 1
    assert all("topk_ids_ptr" not in dict(key.arguments) for key in packed)


def test_a_layer_binds_the_types_of_ids_that_its_plan_holds() -> None:
    spec = MoeSpec(hidden_size=256, intermediate_size=128, num_experts=8, top_k=2)
    made = plan(spec, 8, flags={"ids": ["i32"]})
    driver = StubDriver.open()
    ready = ready_on_stub(made, driver)
    layer = MoeLayer(ready, tensors_of(spec, IDS), ready.arena())
    assert set(layer.bounds) == {torch.int32}
    x, ids, weights, out = call_of(spec, IDS, 4)
    layer.run(x, ids, weights, out)
    with pytest.raises(NotPlannedError, match="'ids': 'i64'"):
        layer.run(x, ids.long(), weights, out)
    with pytest.raises(InvalidArgumentError, match=r"topk_ids: got torch.int16"):
        layer.run(x, ids.short(), weights, out)
