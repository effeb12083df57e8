"""Tables of tiles as JSON: the files that ship in `tables/`, and those of users.

    {"version": 1, "device": "NVIDIA H200", "compute_capability": "9.0", "date": "2026-11-29",
     "torch": "2.11.0", "triton": "3.6.0", "rows": [
      {"hidden_size": 6144, "intermediate_size": 512, "recipe": "int4-g128", "mode": "sorted",
       "routes_per_expert": [0, 5.0], "tile": {"rows": 8, "gate_up": {"columns": 64, ...}, ...}},
      ...]}

`mode` is "sorted", "wgmma", "direct" (with "split_k" in the place of "routes_per_expert") or
"batch_invariant" (with neither). Every field is checked, one that is unknown is refused, and a
message names file, row, field, value and what is allowed. The fields of a tile are those of
`firesteel.moe.tuning.Tile`, with their types.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args, get_origin, get_type_hints

import torch

from firesteel.device import device_name, device_target
from firesteel.errors import InvalidArgumentError
from firesteel.moe.tuning import INFINITY, MODES, RANGED, Mode, Row, Shape, SplitK, Tile, TileTable

__all__ = [
    "DEFAULT_TABLE",
    "VERSION",
    "default_table",
    "find_table",
    "format_table",
    "nearest_table",
    "parse_table",
    "read_table",
    "shipped_tables",
    "table_of_device",
    "write_table",
]

VERSION = 1
DEFAULT_TABLE = "h200"
"""The table of a spec that names none, and of a device that no table is near to."""

_SUFFIX = ".json"
_TEXTS = {
    "device": (re.compile(r"\S(.*\S)?"), "a name"),
    "compute_capability": (re.compile(r"[1-9][0-9]?\.[0-9]"), 'as "9.0"'),
    "date": (re.compile(r"20[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"), 'as "2026-11-29"'),
    "torch": (re.compile(r"\d+\.\d+\S*"), "a version"),
    "triton": (re.compile(r"\d+\.\d+\S*"), "a version"),
}
_RECIPE = re.compile(r"int[34]-g[1-9]\d*(-asym)?|mxfp4|nvfp4|nf3")
_MOST = 1 << 31
# Fields of a row that only some modes have.
_OWN: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(RANGED, ("routes_per_expert",)),
    "direct": ("split_k",),
}


@lru_cache(maxsize=1)
def shipped_tables() -> Mapping[str, TileTable]:
    """The tables of this package by name. Read once: a table is part of what a plan is made of."""
    folder = resources.files("firesteel.moe") / "tables"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(_SUFFIX)), key=lambda f: f.name)
    found: dict[str, TileTable] = {}
    for file in files:
        name = file.name.removesuffix(_SUFFIX)
        found[name] = parse_table(file.read_text(encoding="utf-8"), name=name, where=file.name)
    return found


def default_table() -> TileTable:
    """The table that a spec has if it is given none."""
    return shipped_tables()[DEFAULT_TABLE]


def table_of_device(device: torch.device) -> TileTable:
    """The shipped table that is nearest to a device; the default one for a CPU."""
    if device.type != "cuda":
        return default_table()
    return nearest_table(device_name(device), device_target(device))


def nearest_table(
    device: str | None, target: str, tables: Mapping[str, TileTable] | None = None
) -> TileTable:
    """The table measured on a device of this name; else of its compute capability; else below it.

    Of several of one capability it is the default one, else the first by name. A device below all
    of them has the default one.

    Args:
        device: its name, None where only the target is known.
        target: "sm_90".
        tables: shipped ones by default.
    """
    found = list((shipped_tables() if tables is None else tables).values())
    # The default one first.
    found.sort(key=lambda table: (table.name != DEFAULT_TABLE, table.name))
    named = [table for table in found if table.device == device]
    if named:
        return named[0]
    number = target.removeprefix("sm_")
    if not (number.isascii() and number.isdecimal()):
        raise InvalidArgumentError(f"target: got {target!r}, must be as sm_90")
    capability = int(number)
    below = [table for table in found if table.capability <= capability]
    return max(below, key=lambda table: table.capability) if below else found[0]


def find_table(text: str) -> TileTable:
    """A shipped table by its name, or the table in a file.

    Raises
        InvalidArgumentError: it is neither.
    """
    shipped = shipped_tables()
    if text in shipped:
        return shipped[text]
    if not _is_file(text):
        raise InvalidArgumentError(
            f"table: got {text!r}, must be a file, or one of {', '.join(shipped)}"
        )
    return read_table(Path(text))


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except OSError:
        # A name that no file can have.
        return False


def read_table(path: Path) -> TileTable:
    """The table in a file.

    Raises
        InvalidArgumentError: the file cannot be read, or is no table.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"{path}: cannot be read: {error}") from error
    return parse_table(text, name=path.name.removesuffix(_SUFFIX), where=str(path))


def parse_table(text: str, *, name: str, where: str) -> TileTable:
    """The table of a JSON text.

    Args:
        text: all of the file.
        name: of the table.
        where: what messages start with.

    Raises
        InvalidArgumentError: it is no table.
    """
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{where}: not JSON: {error}") from error
    try:
        return _table(name, value)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{where}: {error}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice!r} stands twice in one object")
    return found


def _no_constant(text: str) -> object:
    raise ValueError(f"{text} is no number of JSON")


def _table(name: str, value: object) -> TileTable:
    found = _named("table", value, ("version", *_TEXTS, "rows"))
    if type(found["version"]) is not int or found["version"] != VERSION:
        raise InvalidArgumentError(f"version: got {found['version']!r}, must be {VERSION}")
    for key, (pattern, allowed) in _TEXTS.items():
        text = found[key]
        if not isinstance(text, str) or pattern.fullmatch(text) is None:
            raise InvalidArgumentError(f"{key}: got {text!r}, must be {allowed}")
    rows = found["rows"]
    if not isinstance(rows, list):
        raise InvalidArgumentError(f"rows: got {rows!r}, must be a list")
    parsed = tuple(_row(f"rows[{n}]", row) for n, row in enumerate(cast(list[Any], rows)))
    return TileTable(name, **{key: found[key] for key in _TEXTS}, rows=parsed)


def _row(where: str, value: object) -> Row:
    mode = cast(dict[str, Any], value).get("mode") if isinstance(value, dict) else None
    if isinstance(value, dict) and mode not in MODES:
        raise InvalidArgumentError(f"{where}.mode: got {mode!r}, must be one of {', '.join(MODES)}")
    own = _OWN.get(str(mode), ())
    found = _named(where, value, (*Shape._fields, "mode", *own, "tile"))
    recipe = found["recipe"]
    if not isinstance(recipe, str) or _RECIPE.fullmatch(recipe) is None:
        raise InvalidArgumentError(
            f'{where}.recipe: got {recipe!r}, must be as "int4-g128", "int4-g32-asym" or "mxfp4"'
        )
    shape = Shape(
        _value(f"{where}.hidden_size", int, found["hidden_size"]),
        _value(f"{where}.intermediate_size", int, found["intermediate_size"]),
        recipe,
    )
    more: dict[str, Any] = {}
    if "split_k" in found:
        more["split_k"] = _value(f"{where}.split_k", SplitK, found["split_k"])
    if "routes_per_expert" in found:
        ends = _range(f"{where}.routes_per_expert", found["routes_per_expert"])
        more["first"], more["below"] = ends
    tile = _value(f"{where}.tile", Tile, found["tile"])
    return Row(shape, cast(Mode, mode), tile, **more)


def _range(where: str, value: object) -> tuple[float, float]:
    ends = cast(list[Any], value) if isinstance(value, list) else []
    if len(ends) == 2 and ends[1] is None:
        ends = [ends[0], INFINITY]
    are_numbers = all(
        type(end) in (int, float) and 0 <= end <= (INFINITY if type(end) is float else _MOST)
        for end in ends
    )
    if len(ends) != 2 or not are_numbers or ends[0] == INFINITY:
        raise InvalidArgumentError(
            f"{where}: got {value!r}, must be [first, below], numbers from 0, below null for no end"
        )
    return float(ends[0]), float(ends[1])


def _value(where: str, kind: object, value: object) -> Any:  # noqa: ANN401
    """A value of a field's type: an integer, a truth value, a literal, or fields of their own.

    An integer is from 1, or one of those that `Annotated` lists.
    """
    hint: Any = kind
    allowed: tuple[object, ...] = ()
    if get_origin(hint) is Annotated:
        hint, allowed = hint.__origin__, hint.__metadata__[0]
    if get_origin(hint) is Literal:
        allowed = get_args(hint)
        hint = type(allowed[0])
    if hint in (int, bool, str):
        is_in = value in allowed if allowed else hint is bool or _is_size(value)
        if type(value) is hint and is_in:
            return value
        words = ", ".join(map(repr, allowed)) or "true, false"
        must = f"one of {words}" if allowed or hint is bool else "a positive integer"
        raise InvalidArgumentError(f"{where}: got {value!r}, must be {must}")
    known = get_type_hints(hint, include_extras=True)
    found = _named(where, value, tuple(known), optional=_optional(hint))
    return hint(**{name: _value(f"{where}.{name}", known[name], found[name]) for name in found})


def _is_size(value: object) -> bool:
    return isinstance(value, int) and 0 < value < _MOST


def _optional(kind: type[Any]) -> tuple[str, ...]:
    """The fields of a dataclass or named tuple that have a default."""
    if not is_dataclass(kind):
        return tuple(cast(Any, kind)._field_defaults)
    return tuple(f.name for f in fields(kind) if f.default is not MISSING)


def _named(
    where: str, value: object, names: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, Any]:
    """An object of exactly these names."""
    if not isinstance(value, dict):
        raise InvalidArgumentError(f"{where}: got {value!r}, must be an object")
    found = cast(dict[str, Any], value)
    unknown = [name for name in found if name not in names]
    missing = [name for name in names if name not in found and name not in optional]
    if unknown or missing:
        raise InvalidArgumentError(
            f"{where}: got the fields {', '.join(found) or 'none'}, must be {', '.join(names)}"
        )
    return found


def format_table(table: TileTable) -> str:
    """The text of a table's file, one line a row."""
    head = {"version": VERSION, **{key: getattr(table, key) for key in _TEXTS}}
    lines = [f' "{key}": {json.dumps(value)},' for key, value in head.items()]
    rows = ",\n".join(f"  {json.dumps(_row_dict(row))}" for row in table.rows)
    return "\n".join(["{", *lines, ' "rows": [', rows, " ]", "}", ""])


def _row_dict(row: Row) -> dict[str, Any]:
    found: dict[str, Any] = {**row.shape._asdict(), "mode": row.mode}
    if row.mode in RANGED:
        below = None if math.isinf(row.below) else row.below
        found["routes_per_expert"] = [row.first, below]
    if row.mode == "direct":
        found["split_k"] = row.split_k
    found["tile"] = plain_fields(row.tile)
    return found


def plain_fields(value: object) -> Any:  # noqa: ANN401
    """Fields of a dataclass or named tuple as objects of JSON, those within them too."""
    names = (
        [f.name for f in fields(value)] if is_dataclass(value) else getattr(value, "_fields", ())
    )
    return {name: plain_fields(getattr(value, name)) for name in names} if names else value


def write_table(path: Path, table: TileTable) -> None:
    """Write a table whole or not at all: beside its place, then renamed.

    Raises
        InvalidArgumentError: the file cannot be written, or would not be read back as this table.
    """
    text = format_table(table)
    parse_table(text, name=table.name, where=str(path))
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        # Made for this user alone; a table is for whoever may read the folder.
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise InvalidArgumentError(f"{path}: cannot be written: {error}") from error
