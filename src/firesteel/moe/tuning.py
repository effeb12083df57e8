"""Tiles by measurement: what a table of them holds, and which of its rows serve a layer.

A row says how the kernels cut a layer of one shape (K, N) and recipe for a range of routes an
expert. A layer takes the rows of the nearest shape, so that a table serves every layer:

    1. rows of the layer's recipe, that of `w13`; of DEFAULT_RECIPE where the table has none, but
       for an FP4 layer no rows of mode "wgmma" that were measured for int4
    2. of those, the shape whose sizes are least many times larger or smaller than the layer's:
       max(K, K') / min(K, K') * max(N, N') / min(N, N'), which is distance in logarithms
    3. of shapes equally far, the smallest

Tables change how fast a layer runs, and the rounding of its results: the last bits where sums are
split otherwise, and more, but for FP4, in tiles of over 16 routes of mode "wgmma", whose kernels
round each weight once to 16 bits before the product. `firesteel.moe.tuning_file` reads and writes
them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from typing import Annotated, Literal, NamedTuple

from firesteel.errors import InvalidArgumentError, UnsupportedError

__all__ = [
    "DEFAULT_RECIPE",
    "MODES",
    "RANGED",
    "Down",
    "GateUp",
    "LayerTiles",
    "Mode",
    "Row",
    "Shape",
    "Tile",
    "TileTable",
    "layer_tiles",
    "recipe_name",
]

DEFAULT_RECIPE = "int4-g128"
"""Whose rows serve a recipe that a table has none of."""

Mode = Literal["direct", "sorted", "wgmma", "batch_invariant"]
MODES: tuple[Mode, ...] = ("direct", "sorted", "wgmma", "batch_invariant")
RANGED: tuple[Mode, ...] = ("sorted", "wgmma")
"""Modes whose rows serve a range of routes an expert."""

INFINITY = float("inf")

Warps = Annotated[int, (1, 2, 4, 8, 16)]
Stages = Annotated[int, (1, 2, 3, 4, 5, 6, 7, 8)]
SplitK = Annotated[int, (1, 2, 4, 8, 16)]


class GateUp(NamedTuple):
    """FC1: columns of a program, its warps and stages."""

    columns: Annotated[int, (64, 128, 256)]
    warps: Warps
    stages: Stages


class Down(NamedTuple):
    """FC2: rows of w2 that a program does at a time, how many times, its warps and stages."""

    rows: Annotated[int, (64, 128, 256)]
    span: Annotated[int, (1, 2, 4, 8, 16)]
    warps: Warps
    stages: Stages


@dataclass(frozen=True, slots=True)
class Tile:
    """How FC1 and FC2 cut a layer. Tables name its fields; their types say what may stand there.

    A field that has a default may be left out of a table's rows.

    Fields
        rows      routes of a tile
        gate_up   how FC1 cuts N
        is_joint  whether FC1 multiplies gate and up rows as one operand
        down      how FC2 cuts K
        is_wgmma  whether both are the kernels that only Hopper runs, which have no `is_joint`
    """

    rows: Annotated[int, (8, 16, 32, 64, 128)]
    gate_up: GateUp
    is_joint: bool
    down: Down
    is_wgmma: bool = False


class Shape(NamedTuple):
    """The sizes and the recipe that rows were measured for; N is one rank's."""

    hidden_size: int
    intermediate_size: int
    recipe: str


@dataclass(frozen=True, slots=True)
class Row:
    """One tile, and which calls take it.

    Fields
        shape    of the layer that was measured
        mode     "direct": each route is a tile; "sorted": routes are sorted by expert; "wgmma":
                 either, on the kernels that only Hopper runs, before those two where it has a
                 range; or "batch_invariant": the one tile of every count
        tile     what the calls take
        first    of sorted routes: from so many an expert on average,
        below    up to but without so many
        split_k  of direct routes: spans of K that programs of FC1 share, since few routes make
                 few programs
    """

    shape: Shape
    mode: Mode
    tile: Tile
    first: float = 0.0
    below: float = INFINITY
    split_k: int = 1


@dataclass(frozen=True, slots=True)
class LayerTiles:
    """All that a layer takes from a table.

    Fields
        sorted           (bound, tile): a tile serves the routes an expert has on average below its
                         bound, from the bound before it; the last bound is infinite
        direct           the tile of one route
        split_k          spans of K that direct programs share
        batch_invariant  the tile of every count, where a row must have the same bits at each
        wgmma            (first, below, tile): what goes before `sorted` on Hopper
    """

    sorted: tuple[tuple[float, Tile], ...]
    direct: Tile
    split_k: int
    batch_invariant: Tile
    wgmma: tuple[tuple[float, float, Tile], ...] = ()

    def rows(self, shape: Shape) -> tuple[Row, ...]:
        """The rows of a table that give these tiles."""
        firsts = (0.0, *(bound for bound, _ in self.sorted))
        return (
            Row(shape, "direct", self.direct, split_k=self.split_k),
            *(
                Row(shape, "sorted", tile, first, below)
                for first, (below, tile) in zip(firsts, self.sorted, strict=False)
            ),
            *(Row(shape, "wgmma", tile, first, below) for first, below, tile in self.wgmma),
            Row(shape, "batch_invariant", self.batch_invariant),
        )

    def of_sorted(self, routes_per_expert: float) -> Tile:
        """The tile of sorted routes, so many an expert on average."""
        return next(tile for bound, tile in self.sorted if routes_per_expert < bound)

    def of_wgmma(self, routes_per_expert: float) -> Tile | None:
        """The tile of so many an expert on Hopper's own kernels; None where there is none."""
        for first, below, tile in self.wgmma:
            if first <= routes_per_expert < below:
                return tile
        return None


@dataclass(frozen=True, slots=True, eq=False)
class TileTable:
    """Rows measured on one device. Tables are equal where name, device and rows are.

    Fields
        name                the stem of its file
        device              as the driver names it: "NVIDIA H200"
        compute_capability  "9.0"
        date                of the last measurement, "2026-11-29"
        torch, triton       versions that it was measured with
        rows                of each shape one direct, one batch invariant, and sorted ones that
                            serve every number of routes; of mode "wgmma" any, without overlaps
        digest              SHA-256 of all that

    Raises
        InvalidArgumentError: ranges of a shape leave a hole or overlap, a row is missing, or a
            tile is not of its mode's kernels.
    """

    name: str
    device: str
    compute_capability: str
    date: str
    torch: str
    triton: str
    rows: tuple[Row, ...] = field(repr=False)
    digest: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_rows(self.rows)
        # Not the dataclass's own comparison: a spec is hashed often, and its table is long.
        parts = (self.name, self.device, self.compute_capability, self.date, self.torch)
        text = repr((*parts, self.triton, self.rows))
        object.__setattr__(self, "digest", hashlib.sha256(text.encode()).hexdigest())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TileTable) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Every shape that has rows, in their order."""
        return tuple(dict.fromkeys(row.shape for row in self.rows))

    @property
    def capability(self) -> int:
        """90 of "9.0"."""
        major, minor = self.compute_capability.split(".")
        return 10 * int(major) + int(minor)

    def nearest(self, hidden_size: int, intermediate_size: int, recipe: str) -> Shape:
        """The shape whose rows serve a layer; the rule is in this module's docstring.

        Raises
            UnsupportedError: the table has neither the recipe nor the default one.
        """
        for name in (recipe, DEFAULT_RECIPE):
            found = [shape for shape in self.shapes if shape.recipe == name]
            if found:
                return min(
                    found,
                    key=lambda shape: (
                        _ratio(hidden_size, shape.hidden_size)
                        * _ratio(intermediate_size, shape.intermediate_size),
                        shape,
                    ),
                )
        known = ", ".join(sorted({shape.recipe for shape in self.shapes}))
        raise UnsupportedError(
            f"table {self.name}: has rows of {known or 'no recipe'}, must have some of "
            f"{' or '.join(dict.fromkeys((recipe, DEFAULT_RECIPE)))}"
        )

    def tiles(self, shape: Shape) -> LayerTiles:
        """The tiles of one of `shapes`."""
        rows = [row for row in self.rows if row.shape == shape]
        ranges = sorted((r for r in rows if r.mode in RANGED), key=lambda row: row.first)
        (direct,) = (row for row in rows if row.mode == "direct")
        (invariant,) = (row for row in rows if row.mode == "batch_invariant")
        return LayerTiles(
            tuple((row.below, row.tile) for row in ranges if row.mode == "sorted"),
            direct.tile,
            direct.split_k,
            invariant.tile,
            tuple((row.first, row.below, row.tile) for row in ranges if row.mode == "wgmma"),
        )


def check_rows(rows: Sequence[Row]) -> None:
    """Refuse rows of which a layer would find no tile, or two.

    Raises
        InvalidArgumentError: they are such; the message names the row.
    """
    if not rows:
        raise InvalidArgumentError("rows: got none, must be at least one shape's")
    for shape in dict.fromkeys(row.shape for row in rows):
        numbered = [(number, row) for number, row in enumerate(rows) if row.shape == shape]
        title = f"K={shape.hidden_size} N={shape.intermediate_size} {shape.recipe}"
        for mode in ("direct", "batch_invariant"):
            numbers = [number for number, row in numbered if row.mode == mode]
            if len(numbers) != 1:
                raise InvalidArgumentError(
                    f"rows{numbers}.mode: got {len(numbers)} rows {mode} of {title}, must be one"
                )
        for number, row in numbered:
            if row.tile.is_wgmma != (row.mode == "wgmma"):
                raise InvalidArgumentError(
                    f"rows[{number}].tile.is_wgmma: got {row.tile.is_wgmma} of {title} {row.mode}, "
                    "must be True of mode wgmma and of no other"
                )
            if row.tile.is_wgmma:
                _check_hopper(f"rows[{number}].tile", row.tile)
        for mode in RANGED:
            _check_ranges(mode, title, [each for each in numbered if each[1].mode == mode])


def _check_hopper(where: str, tile: Tile) -> None:
    """Refuse what Hopper's own kernels cannot be compiled for, or would read too early."""
    if tile.is_joint:
        raise InvalidArgumentError(f"{where}.is_joint: got True, must be False of such a tile")
    # Tiles of up to 16 rows are multiplied by warps, others by groups of four of them.
    least, warps = (2, 1) if tile.rows <= 16 else (3, 4)
    for name, shape in (("gate_up", tile.gate_up), ("down", tile.down)):
        # FC1 has gate and up rows in one operand.
        rows = 2 * tile.gate_up.columns if name == "gate_up" else tile.down.rows
        if shape.stages < least:
            raise InvalidArgumentError(
                f"{where}.{name}.stages: got {shape.stages}, must be at least {least}"
            )
        if shape.warps % warps or 16 * shape.warps > rows:
            raise InvalidArgumentError(
                f"{where}.{name}.warps: got {shape.warps}, must be a multiple of {warps} and have "
                "16 rows of weights each"
            )


def _check_ranges(mode: Mode, title: str, rows: Sequence[tuple[int, Row]]) -> None:
    """Ranges that follow each other; those of sorted routes from 0 and without end."""
    end = 0.0
    for number, row in sorted(rows, key=lambda each: each[1].first):
        may_start = row.first == end or (mode == "wgmma" and row.first > end)
        if not may_start or row.below <= row.first:
            word = "at" if mode == "sorted" else "from"
            raise InvalidArgumentError(
                f"rows[{number}].routes_per_expert: got {[row.first, row.below]} of {title}, "
                f"must start {word} {end}, where the range before it ends, and end later"
            )
        end = row.below
    if mode == "sorted" and end != INFINITY:
        raise InvalidArgumentError(
            f"rows.routes_per_expert: sorted rows of {title} end at {end}, the last one must "
            "end at null"
        )


def _ratio(a: int, b: int) -> Fraction:
    """How many times the larger is the smaller. Exact: every machine must find the same shape."""
    return Fraction(max(a, b), min(a, b))


@lru_cache(maxsize=256)
def recipe_name(element: str, group_size: int, has_zero_points: bool) -> str:
    """`int4-g128-asym`, or the element alone where it says all that: `mxfp4`."""
    if not element.startswith("int"):
        return element
    return f"{element}-g{group_size}" + "-asym" * has_zero_points


@lru_cache(maxsize=256)
def layer_tiles(
    table: TileTable,
    hidden_size: int,
    intermediate_size: int,
    recipe: str,
) -> LayerTiles:
    """The tiles of a layer. `select` asks at every token count, so they are kept.

    Raises
        UnsupportedError: as `TileTable.nearest`.
    """
    shape = table.nearest(hidden_size, intermediate_size, recipe)
    found = table.tiles(shape)
    # Between FP4 and what is scaled group by group what is fastest on Hopper does not carry over.
    is_alike = ("fp4" in recipe) == ("fp4" in shape.recipe)
    return found if is_alike else replace(found, wgmma=())
