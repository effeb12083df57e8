"""`select` of a MoE layer: what it launches at each count, and that its tables fit any routing."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firesteel.errors import InvalidArgumentError, NotPlannedError, UnsupportedError
from firesteel.launch import Launch, LaunchKey, Stride, plan
from firesteel.launch.stub import StubDriver
from firesteel.moe.activation import Activation
from firesteel.moe.layer import MoeLayer
from firesteel.moe.plan import num_blocks, select, tile_of, workspace
from firesteel.moe.spec import GEOMETRIES, MoeSpec, StoredWeights, geometry
from firesteel.moe.tuning import Down, GateUp, LayerTiles, Shape, Tile, TileTable
from firesteel.moe.tuning_file import default_table
from tests.launch.rig import call_of, ready_on_stub, tensors_of

IDS = (("ids", "i32"),)
GLM = geometry("glm-5.2", tensor_parallel=4)
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
    element = draw(st.sampled_from(("int4", "mxfp4", "nvfp4")))
    int4 = StoredWeights(group_size=32)
    stored = int4 if element == "int4" else StoredWeights.fp4(element)
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
        table=draw(st.sampled_from((default_table(), ODD))),
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
        at = int(bound * GLM.num_experts)
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
    made = plan(spec, 4000, flags={"ids": ["i32"]})
    return [key for key in made.keys if _role(key) in ("gate_up_kernel", "down_kernel")]


def test_a_plan_without_wgmma_is_that_of_the_other_rows() -> None:
    """A table that has only those gives the same launches, and none is of Hopper's kernels."""
    (shape,) = (each for each in GLM.table.shapes if each == (6144, 512, "int4-g128"))
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


def test_fp4_takes_only_rows_that_were_measured_for_it() -> None:
    fp4 = StoredWeights.fp4("mxfp4")
    spec = replace(GLM, w13=fp4, w2=fp4)
    assert {key.name for key in products_of(spec)} == {"gate_up_kernel", "down_kernel"}
    rows = GLM.tiles.rows(Shape(6144, 512, "mxfp4"))
    measured = replace(GLM.table, rows=(*GLM.table.rows, *rows))
    names = {key.name for key in products_of(replace(spec, table=measured))}
    assert {"gate_up_stream_kernel", "down_wgmma_kernel"} < names


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
    made = plan(geometry(name, group_size=group_size), 300)
    assert len(made.keys) <= 22
    assert all(table.resolve(0) == () for table in made.tables.values())


@pytest.mark.parametrize("element", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_each_named_geometry_plans_as_fp4(name: str, element: str) -> None:
    spec = geometry(name, element=element)
    made = plan(spec, 300, flags={"ids": ["i32"]})
    products = [key for key in made.keys if key.name in ("gate_up_kernel", "down_kernel")]
    assert {dict(key.constexprs)["ELEMENT"] for key in products} == {element}
    pointers = {name for key in products for name, _ in key.arguments}
    assert ("global_scale_ptr" in pointers) == (element == "nvfp4")
    assert {dict(key.arguments)["scales_ptr"] for key in products} == {"*u8@16"}
    # The same tiles as int4 on the same kernels.
    same = {"w13": replace(spec.w13, **INT4), "w2": replace(spec.w2, **INT4), "wgmma": False}
    int4 = select(replace(spec, **same), 300, IDS)
    assert [launch.grid for launch in select(spec, 300, IDS)] == [each.grid for each in int4]


def test_the_reference_plan_has_few_keys() -> None:
    assert len(plan(GLM, 8192).keys) == 22
    assert len(plan(GLM, 8192, flags={"ids": ["i32"]}).keys) == 15
    assert len(plan(replace(GLM, batch_invariant=True), 8192, flags={"ids": ["i32"]}).keys) <= 6


def test_a_batch_invariant_plan_multiplies_in_one_way() -> None:
    made = plan(replace(GLM, batch_invariant=True), 8192, flags={"ids": ["i32"]})
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
    tiles = {tile_of(GLM, routes) for routes in range(33, 3072 * 8)}
    assert len(packed) == len(tiles)
    assert all("topk_ids_ptr" not in dict(key.arguments) for key in packed)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"hidden_size": 0}, InvalidArgumentError, "hidden_size: got 0"),
        ({"hidden_size": 129}, UnsupportedError, "hidden_size: got 129"),
        ({"num_experts": True}, InvalidArgumentError, "num_experts: got True"),
        ({"num_experts": 2049}, UnsupportedError, "num_experts: got 2049, must be at most 2048"),
        ({"top_k": 9}, InvalidArgumentError, "top_k: got 9"),
        ({"dtype": "fp32"}, UnsupportedError, "dtype: got 'fp32'"),
        ({"w13": StoredWeights(group_size=48)}, UnsupportedError, "w13.group_size: got 48"),
        ({"w13": StoredWeights(group_size=0)}, UnsupportedError, "w13.group_size: got 0"),
        ({"w2": StoredWeights(scale="e4m3")}, UnsupportedError, "w2.scale: got 'e4m3'"),
        ({"w2": StoredWeights(element="int8")}, UnsupportedError, "w2.element: got 'int8'"),
        ({"w2": StoredWeights(global_scale="divisor")}, UnsupportedError, "w2.global_scale: got"),
        (
            {"w13": replace(StoredWeights.fp4("nvfp4"), global_scale="none")},
            UnsupportedError,
            "w13.global_scale: got 'none', must be 'multiplier' or 'divisor' of nvfp4",
        ),
        (
            {"w13": replace(StoredWeights.fp4("mxfp4"), group_size=64)},
            UnsupportedError,
            "w13.group_size: got 64 for 256 columns, must be 32 of mxfp4",
        ),
        (
            {"w13": replace(StoredWeights.fp4("mxfp4"), scale="bf16")},
            UnsupportedError,
            "w13.scale: got 'bf16', must be e8m0 of mxfp4",
        ),
        (
            {"w2": replace(StoredWeights.fp4("nvfp4"), has_zero_points=True)},
            UnsupportedError,
            "w2.has_zero_points: got True",
        ),
        (
            {"intermediate_size": 48, "w2": StoredWeights.fp4("mxfp4")},
            UnsupportedError,
            "w2.group_size: got 32 for 48 columns",
        ),
        # 1856 columns are 14.5 groups of 128.
        ({"intermediate_size": 1856}, UnsupportedError, r"w2.group_size: got 128 .* \[32, 64\]"),
    ],
)
def test_a_bad_spec_names_its_field(
    changes: dict[str, object], error: type[Exception], words: str
) -> None:
    small = {"hidden_size": 256, "intermediate_size": 128, "num_experts": 8, "top_k": 2}
    with pytest.raises(error, match=words):
        MoeSpec(**{**small, **changes})  # type: ignore[arg-type]


def test_a_group_that_straddles_two_ranks_is_refused() -> None:
    spec = MoeSpec(
        hidden_size=256,
        intermediate_size=640,
        num_experts=8,
        top_k=2,
        w2=StoredWeights(group_size=128),
    )
    with pytest.raises(InvalidArgumentError, match="320 columns must be whole scale groups of 128"):
        spec.shard(2)
    assert spec.shard(5).intermediate_size == 128
    with pytest.raises(InvalidArgumentError, match="must divide intermediate_size 640"):
        spec.shard(3)


def test_an_activation_that_is_not_gated_has_one_part() -> None:
    spec = MoeSpec(
        hidden_size=256,
        intermediate_size=128,
        num_experts=8,
        top_k=2,
        activation=Activation(name="relu2"),
    )
    shapes = {operand.name: operand.shape for operand in spec.operands(IDS)}
    assert shapes["w13.codes"] == (8, 1, 2, 2, 64, 32)
    assert shapes["w13.scales"] == (8, 2, 128)
    gated = replace(spec, activation=Activation())
    shapes = {operand.name: operand.shape for operand in gated.operands(IDS)}
    assert shapes["w13.codes"] == (8, 2, 2, 2, 64, 32)
    assert shapes["w13.scales"] == (8, 2, 256)
    assert shapes["w2.codes"] == (8, 1, 4, 1, 64, 32)
    assert shapes["w2.scales"] == (8, 1, 256)


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
