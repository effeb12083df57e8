"""Tables of tiles as values: every layer and count has one tile, and the nearest shape's."""

import dataclasses
import math
import pickle
from dataclasses import replace
from fractions import Fraction
from typing import Annotated, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firesteel.errors import InvalidArgumentError, UnsupportedError
from firesteel.launch import plan
from firesteel.moe.plan import tile_of
from firesteel.moe.spec import GEOMETRIES, MoeSpec, geometry
from firesteel.moe.tuning import (
    Down,
    GateUp,
    LayerTiles,
    Row,
    Shape,
    Tile,
    TileTable,
    check_rows,
    layer_tiles,
    recipe_name,
)
from firesteel.moe.tuning_file import default_table, shipped_tables

SMALL = MoeSpec(hidden_size=256, intermediate_size=128, num_experts=8, top_k=2)
TILE = Tile(8, GateUp(64, 4, 3), False, Down(64, 1, 4, 3))
LARGE = replace(TILE, rows=64)
ONE = LayerTiles(((math.inf, TILE),), TILE, 4, TILE)
TWO = LayerTiles(((5.0, TILE), (math.inf, LARGE)), TILE, 1, LARGE)
HOPPER = replace(LARGE, is_wgmma=True)
# Ranges of Hopper's own kernels may leave holes.
HOLES = replace(
    TWO, wgmma=((2.0, 4.0, replace(HOPPER, rows=16)), (4.0, 9.0, HOPPER), (20.5, math.inf, HOPPER))
)


def table(*shapes: Shape, tiles: LayerTiles = ONE, name: str = "made") -> TileTable:
    """A table that has these tiles for each shape."""
    rows = tuple(row for shape in shapes for row in tiles.rows(shape))
    return TileTable(name, "A GPU", "9.0", "2026-11-29", "2.11.0", "3.6.0", rows)


@pytest.mark.parametrize("tiles", [ONE, TWO, HOLES])
def test_rows_and_tiles_are_inverse(tiles: LayerTiles) -> None:
    shape = Shape(256, 128, "int4-g128")
    made = table(Shape(64, 64, "int4-g32"), shape, tiles=tiles)
    assert made.tiles(shape) == tiles
    # Rows may stand in any order.
    assert replace(made, rows=made.rows[::-1]).tiles(shape) == tiles


@pytest.mark.parametrize("shipped", shipped_tables())
@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_every_count_of_every_geometry_has_one_tile(
    shipped: str, name: str, batch_invariant: bool
) -> None:
    found = shipped_tables()[shipped]
    for tensor_parallel in (1, 2):
        for has_zero_points in (False, True):
            spec = replace(
                geometry(
                    name,
                    tensor_parallel=tensor_parallel,
                    group_size=32,
                    has_zero_points=has_zero_points,
                ),
                table=found,
                batch_invariant=batch_invariant,
            )
            specs = {wgmma: replace(spec, wgmma=wgmma) for wgmma in (True, False)}
            recipe = recipe_name("int4", 32, has_zero_points)
            shape = found.nearest(spec.hidden_size, spec.intermediate_size, recipe)
            ranges, own = (
                [r for r in found.rows if r.shape == shape and r.mode == mode]
                for mode in ("sorted", "wgmma")
            )
            for num_tokens in (*range(1, 600), *range(600, 70000, 777), 1 << 24):
                routes = num_tokens * spec.top_k
                each = routes / spec.num_experts
                (row,) = (r for r in ranges if r.first <= each < r.below)
                # None or one: that of Hopper's own kernels comes first.
                hoppers = [r.tile for r in own if r.first <= each < r.below]
                assert len(hoppers) <= 1
                for wgmma in (True, False):
                    expected = hoppers[0] if hoppers and wgmma else row.tile
                    if batch_invariant:
                        expected = spec.tiles.batch_invariant
                    assert tile_of(specs[wgmma], routes) == expected


@pytest.mark.parametrize("shipped", shipped_tables().values(), ids=shipped_tables())
def test_shipped_tables_serve_every_recipe(shipped: TileTable) -> None:
    assert {"int4-g128"} <= {shape.recipe for shape in shipped.shapes}


@given(
    sizes=st.lists(
        st.tuples(st.integers(1, 1 << 15), st.integers(1, 1 << 15)), min_size=1, unique=True
    ),
    layer=st.tuples(st.integers(1, 1 << 15), st.integers(1, 1 << 15)),
)
def test_the_nearest_shape_is_nearest_in_logarithms(
    sizes: list[tuple[int, int]], layer: tuple[int, int]
) -> None:
    made = table(*(Shape(k, n, "int4-g128") for k, n in sizes))
    found = made.nearest(*layer, "int4-g32")

    def ratio(k: int, n: int) -> Fraction:
        pairs = ((k, layer[0]), (n, layer[1]))
        up, down = (Fraction(a, b) for a, b in pairs)
        return max(up, 1 / up) * max(down, 1 / down)

    least = min(ratio(k, n) for k, n in sizes)
    equal = [(k, n) for k, n in sizes if ratio(k, n) == least]
    assert found == (*min(equal), "int4-g128")
    assert made.nearest(*sizes[0], "int4-g128")[:2] == sizes[0]


def test_rows_of_the_recipe_come_before_nearer_ones_of_the_default() -> None:
    near, far = Shape(256, 128, "int4-g128"), Shape(8192, 4096, "int4-g32-asym")
    made = table(near, far)
    assert made.nearest(256, 128, "int4-g32-asym") == far
    assert made.nearest(8192, 4096, "int4-g128") == near
    assert made.nearest(8192, 4096, "int4-g32") == near


def test_a_table_of_other_recipes_is_refused() -> None:
    made = table(Shape(256, 128, "int4-g32"))
    with pytest.raises(UnsupportedError, match="table made: has rows of int4-g32, must have some"):
        plan(replace(SMALL, table=made), 4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({2: {"below": 4.0}}, r"rows\[3\].routes_per_expert: got \[5.0, inf\].* start at 4.0"),
        ({3: {"first": 4.0}}, r"rows\[3\].routes_per_expert: .* must start at 5.0"),
        ({2: {"first": 1.0}}, r"rows\[2\].routes_per_expert: .* must start at 0.0"),
        ({2: {"below": 0.0}}, r"rows\[2\].routes_per_expert: .* and end later"),
        ({3: {"below": 9.0}}, r"end at 9.0, the last one must end at null"),
        ({0: {"mode": "batch_invariant"}}, r"rows\[\].mode: got 0 rows direct of K=256"),
        ({4: {"mode": "direct"}}, r"rows\[0, 4\].mode: got 2 rows direct"),
    ],
)
def test_holes_and_overlaps_are_named(changes: dict[int, dict], words: str) -> None:
    # A shape before, so that numbers are those of the whole table.
    other = Row(Shape(1, 1, "int4-g32"), "direct", TILE)
    rows = [*TWO.rows(Shape(256, 128, "int4-g128"))]
    rows.insert(1, other)
    for number, change in changes.items():
        rows[number] = replace(rows[number], **change)
    rows += [replace(other, mode="batch_invariant"), replace(other, mode="sorted")]
    with pytest.raises(InvalidArgumentError, match=words):
        TileTable("made", "A GPU", "9.0", "2026-11-29", "2.11.0", "3.6.0", tuple(rows))


@pytest.mark.parametrize(
    ("routes_per_expert", "rows"),
    [(0.0, None), (1.99, None), (2, 16), (3.99, 16), (4, 64), (9, None), (20, None), (20.5, 64)],
)
def test_hoppers_own_tiles_are_found_by_range(routes_per_expert: float, rows: int | None) -> None:
    found = HOLES.of_wgmma(routes_per_expert)
    assert (found and found.rows) == rows
    assert HOLES.of_wgmma(1e9) is HOPPER
    assert TWO.of_wgmma(routes_per_expert) is None
    # Sorted ones serve every count all the same.
    assert HOLES.of_sorted(routes_per_expert) is TWO.of_sorted(routes_per_expert)


def hopper_rows(*ranges: tuple[float, float], **changes: bool) -> tuple[Row, ...]:
    """The rows of TWO, with rows of mode wgmma from the fourth on."""
    wgmma = tuple((first, below, replace(HOPPER, **changes)) for first, below in ranges)
    return replace(TWO, wgmma=wgmma).rows(Shape(256, 128, "int4-g128"))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            hopper_rows((2.0, 9.0), (8.0, 12.0)),
            r"rows\[4\].routes_per_expert: got \[8.0, 12.0\] of K=256 N=128 int4-g128, must start "
            "from 9.0, where the range before it ends, and end later",
        ),
        (
            hopper_rows((12.0, math.inf), (2.0, 12.5)),
            r"rows\[3\].routes_per_expert: got \[12.0, inf\] .* must start from 12.5",
        ),
        (hopper_rows((3.0, 3.0)), r"rows\[3\].routes_per_expert: got \[3.0, 3.0\] .* end later"),
        (hopper_rows((-1.0, 3.0)), r"rows\[3\].routes_per_expert: .* must start from 0.0"),
        (
            hopper_rows((2.0, 9.0), is_wgmma=False),
            r"rows\[3\].tile.is_wgmma: got False of K=256 N=128 int4-g128 wgmma, must be True of "
            "mode wgmma and of no other",
        ),
        *(
            (
                tuple(
                    replace(row, tile=HOPPER) if row.mode == mode else row for row in hopper_rows()
                ),
                rf"rows\[{number}\].tile.is_wgmma: got True of K=256 N=128 int4-g128 {mode}",
            )
            for number, mode in ((0, "direct"), (1, "sorted"), (3, "batch_invariant"))
        ),
    ],
)
def test_ranges_of_hoppers_own_that_overlap_and_tiles_of_another_mode_are_named(
    rows: tuple[Row, ...], words: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        TileTable("made", "A GPU", "9.0", "2026-11-29", "2.11.0", "3.6.0", rows)


def test_a_table_is_a_value() -> None:
    shape = Shape(256, 128, "int4-g128")
    made = table(shape)
    assert made == table(shape) == pickle.loads(pickle.dumps(made))
    assert hash(made) == hash(table(shape))
    assert made != table(shape, name="another")
    assert made != table(shape, tiles=TWO)
    assert layer_tiles(made, 256, 128, "int4-g128") is layer_tiles(
        table(shape), 256, 128, "int4-g128"
    )


@pytest.mark.parametrize(
    ("element", "group_size", "has_zero_points", "recipe"),
    [
        ("int4", 128, False, "int4-g128"),
        ("int4", 32, True, "int4-g32-asym"),
        ("mxfp4", 32, False, "mxfp4"),
        ("nvfp4", 16, False, "nvfp4"),
        ("nf3", 32, False, "nf3"),
        ("int3", 64, True, "int3-g64-asym"),
    ],
)
def test_recipes_have_names(
    element: str, group_size: int, has_zero_points: bool, recipe: str
) -> None:
    assert recipe_name(element, group_size, has_zero_points) == recipe


def test_another_table_is_another_plan_of_the_same_operands() -> None:
    spec = replace(SMALL, table=table(Shape(256, 128, "int4-g128"), tiles=TWO))
    usual, tuned = plan(SMALL, 300), plan(spec, 300)
    assert usual.digest != tuned.digest
    assert usual.tables.keys() == tuned.tables.keys()
    for flags, found in usual.tables.items():
        assert found.operands == tuned.tables[flags].operands
    # A table of another name that says the same launches the same.
    renamed = replace(default_table(), name="renamed")
    assert plan(replace(SMALL, table=renamed), 300).digest == usual.digest
    assert tuned.as_dict()["spec"]["table"] == {"name": "made", "digest": spec.table.digest}
    assert "tiles of made" in spec.title
    assert "tiles" not in SMALL.title


def leaves(kind: type, where: str = "tile") -> dict[str, object]:
    """The type of each number of a tile, with what it lists as allowed."""
    found: dict[str, object] = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        is_nested = dataclasses.is_dataclass(hint) or hasattr(hint, "_fields")
        found |= leaves(hint, f"{where}.{name}") if is_nested else {f"{where}.{name}": hint}
    return found


def test_every_number_of_a_tile_says_what_is_allowed() -> None:
    for name, hint in leaves(Tile).items():
        if hint is not bool:
            assert get_origin(hint) is Annotated, name
            assert all(type(value) is int for value in get_args(hint)[1]), name


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"is_joint": True}, "is_joint: got True, must be False"),
        ({"gate_up": GateUp(128, 8, 2)}, "gate_up.stages: got 2, must be at least 3"),
        ({"rows": 8, "gate_up": GateUp(64, 4, 1)}, "gate_up.stages: got 1, must be at least 2"),
        ({"gate_up": GateUp(128, 2, 4)}, "gate_up.warps: got 2, must be a multiple of 4"),
        ({"down": Down(64, 1, 8, 3)}, "down.warps: got 8, .* 16 rows of weights each"),
    ],
)
def test_tiles_that_hoppers_kernels_cannot_take_are_refused(changes: dict, words: str) -> None:
    rows = replace(TWO, wgmma=((2.0, 9.0, replace(HOPPER, **changes)),))
    with pytest.raises(InvalidArgumentError, match=rf"rows\[3\].tile.{words}"):
        check_rows(rows.rows(Shape(256, 128, "int4-g128")))
