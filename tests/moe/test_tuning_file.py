"""Files of tiles: what is written is read back, and each wrong field is named."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import pytest
import torch

from firesteel.errors import InvalidArgumentError
from firesteel.moe import tuning_file
from firesteel.moe.tuning import Shape, TileTable
from firesteel.moe.tuning_file import (
    DEFAULT_TABLE,
    default_table,
    find_table,
    format_table,
    nearest_table,
    parse_table,
    plain_fields,
    read_table,
    shipped_tables,
    table_of_device,
    write_table,
)
from tests.moe.test_tuning import HOLES, TWO, table

MADE = table(Shape(256, 128, "int4-g128"), Shape(512, 64, "int4-g32-asym"), tiles=TWO)
HOPPERS = table(
    Shape(256, 128, "int4-g128"), Shape(512, 64, "nvfp4"), tiles=HOLES, name="hoppers_own"
)


@pytest.mark.parametrize(
    "shipped", [*shipped_tables().values(), MADE, HOPPERS], ids=lambda t: t.name
)
def test_what_is_written_is_read_back(shipped: TileTable, tmp_path: Path) -> None:
    path = tmp_path / f"{shipped.name}.json"
    write_table(path, shipped)
    assert read_table(path) == shipped
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    # Whoever may read the folder may read the table.
    assert path.stat().st_mode & 0o444 == 0o444
    assert find_table(str(path)) == shipped


def test_ranges_of_hoppers_own_are_read_where_a_file_says_so() -> None:
    found = json.loads(format_table(HOPPERS))
    modes = [row["mode"] for row in found["rows"][:7]]
    assert modes == ["direct", "sorted", "sorted", *["wgmma"] * 3, "batch_invariant"]
    assert [row["tile"]["is_wgmma"] for row in found["rows"][:7]] == [
        mode == "wgmma" for mode in modes
    ]
    assert found["rows"][5]["routes_per_expert"] == [20.5, None]
    # It may be left out where it is false, and only there.
    for row in found["rows"]:
        if not row["tile"]["is_wgmma"]:
            del row["tile"]["is_wgmma"]
    assert parse_table(json.dumps(found), name="hoppers_own", where="here") == HOPPERS
    del found["rows"][4]["tile"]["is_wgmma"]
    with pytest.raises(InvalidArgumentError, match=r"here: rows\[4\].tile.is_wgmma: got False"):
        parse_table(json.dumps(found), name="hoppers_own", where="here")


@pytest.mark.parametrize("name", shipped_tables())
def test_shipped_files_are_as_they_would_be_written(name: str) -> None:
    folder = Path(tuning_file.__file__).parent / "tables"
    text = (folder / f"{name}.json").read_text(encoding="utf-8")
    assert text == format_table(shipped_tables()[name])


def test_a_table_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "made.json"
    write_table(path, MADE)

    def fail(*_: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(InvalidArgumentError, match=r"made.json: cannot be written: no room"):
        write_table(path, replace(MADE, date="2026-12-01"))
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    assert read_table(path) == MADE
    with pytest.raises(InvalidArgumentError, match="cannot be written"):
        write_table(tmp_path / "nowhere" / "made.json", MADE)


def _row(number: int, **changes: Any) -> Callable[[dict], None]:
    return lambda found: found["rows"][number].update(changes)


def _gate_up(**changes: Any) -> Callable[[dict], None]:
    return lambda found: found["rows"][1]["tile"]["gate_up"].update(changes)


WRONG: dict[str, Callable[[dict], object]] = {
    "version: got 2, must be 1": lambda found: found.update(version=2),
    "version: got True, must be 1": lambda found: found.update(version=True),
    r"table: got the fields .*more.*, must be version, device": lambda f: f.update(more=1),
    r"table: got the fields .*, must be version, device": lambda found: found.pop("torch"),
    "device: got '', must be a name": lambda found: found.update(device=""),
    'compute_capability: got 9.0, must be as "9.0"': lambda f: f.update(compute_capability=9.0),
    "compute_capability: got '90'": lambda found: found.update(compute_capability="90"),
    "date: got '29.11.2026'": lambda found: found.update(date="29.11.2026"),
    "triton: got None, must be a version": lambda found: found.update(triton=None),
    "rows: got {}, must be a list": lambda found: found.update(rows={}),
    "rows: got none": lambda found: found.update(rows=[]),
    r"rows\[1\]: got 7, must be an object": lambda found: found["rows"].__setitem__(1, 7),
    r"rows\[1\].mode: got 'few', must be one of direct, sorted": _row(1, mode="few"),
    r"rows\[0\]: got the fields .*, must be .*split_k": _row(0, routes_per_expert=[0, None]),
    r"rows\[1\]: got the fields .*, must be .*routes": lambda f: f["rows"][1].pop("tile"),
    r"rows\[0\].split_k: got 3, must be one of 1, 2, 4": _row(0, split_k=3),
    r"rows\[1\].hidden_size: got 0, must be a positive": _row(1, hidden_size=0),
    r"rows\[1\].intermediate_size: got 1.0,": _row(1, intermediate_size=1.0),
    r"rows\[1\].hidden_size: got 2147483648": _row(1, hidden_size=1 << 31),
    r"rows\[1\].recipe: got 'int4-g0', must be as": _row(1, recipe="int4-g0"),
    r"rows\[1\].recipe: got None, must be as": _row(1, recipe=None),
    r"rows\[1\].routes_per_expert: got \[0\], must be": _row(1, routes_per_expert=[0]),
    r"rows\[1\].routes_per_expert: got \[True, 5\],": _row(1, routes_per_expert=[True, 5]),
    r"rows\[1\].routes_per_expert: got \[None, 5\],": _row(1, routes_per_expert=[None, 5]),
    r"rows\[1\].routes_per_expert: got \[-1, 5\],": _row(1, routes_per_expert=[-1, 5]),
    r"rows\[1\].routes_per_expert: got 5, must be": _row(1, routes_per_expert=5),
    r"rows\[2\].routes_per_expert: .* must start at 4.0": _row(1, routes_per_expert=[0, 4]),
    r"rows\[1\].tile: got \[\], must be an object": _row(1, tile=[]),
    r"rows\[1\].tile.gate_up.warps: got 3, must be one of 1, 2, 4, 8, 16": _gate_up(warps=3),
    r"rows\[1\].tile.gate_up.warps: got True, must": _gate_up(warps=True),
    r"rows\[1\].tile.gate_up.columns: got 96, must be": _gate_up(columns=96),
    r"rows\[1\].tile.gate_up: got the fields .*fast": _gate_up(fast=True),
    r"rows\[1\].tile.is_joint: got 1, must be one of true, false": lambda found: found["rows"][1][
        "tile"
    ].update(is_joint=1),
}


@pytest.mark.parametrize("words", WRONG)
def test_what_is_wrong_is_named(words: str, tmp_path: Path) -> None:
    found = json.loads(format_table(MADE))
    WRONG[words](found)
    path = tmp_path / "made.json"
    path.write_text(json.dumps(found))
    with pytest.raises(InvalidArgumentError, match=rf"made\.json: {words}"):
        read_table(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"),
        ("[]", r"table: got \[\], must be an object"),
        ("[" * 100000, "not JSON"),
        ('{"version": 1, "version": 1}', "the name 'version' stands twice"),
        (format_table(MADE).replace("5.0", "NaN"), "NaN is no number of JSON"),
        (format_table(MADE).replace("null", "Infinity"), "Infinity is no number of JSON"),
        (format_table(MADE).replace("5.0", "1e999"), "routes_per_expert"),
    ],
)
def test_text_that_is_no_table(text: str, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"here: .*{words}"):
        parse_table(text, name="made", where="here")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"must be a file, or one of .*h200"):
        find_table("h2000")
    (tmp_path / "made.json").write_bytes(b"\xff")
    with pytest.raises(InvalidArgumentError, match=r"made\.json: cannot be read"):
        find_table(str(tmp_path / "made.json"))
    assert find_table(DEFAULT_TABLE) is default_table()


def test_the_tables_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    before = default_table()
    monkeypatch.setattr(tuning_file, "parse_table", None)
    assert default_table() is before


def measured(name: str, device: str, capability: str) -> TileTable:
    return replace(MADE, name=name, device=device, compute_capability=capability)


TABLES = {
    made.name: made
    for made in (
        measured("a100", "NVIDIA A100", "8.0"),
        measured("b200", "NVIDIA B200", "10.0"),
        measured("gh200", "NVIDIA GH200", "9.0"),
        measured(DEFAULT_TABLE, "NVIDIA H200", "9.0"),
        measured("l40", "NVIDIA L40", "8.9"),
        measured("l4", "NVIDIA L4", "8.9"),
    )
}


@pytest.mark.parametrize(
    ("device", "target", "expected"),
    [
        ("NVIDIA GH200", "sm_90", "gh200"),
        ("NVIDIA L40", "sm_89", "l40"),
        # The same capability: the default one first, else by name.
        ("NVIDIA H100", "sm_90", "h200"),
        (None, "sm_90", "h200"),
        ("NVIDIA L40S", "sm_89", "l4"),
        # The nearest below.
        ("NVIDIA A10", "sm_86", "a100"),
        ("NVIDIA B300", "sm_103", "b200"),
        ("NVIDIA RTX 5090", "sm_120", "b200"),
        # Below all.
        ("NVIDIA T4", "sm_75", "h200"),
    ],
)
def test_an_untuned_device_has_the_nearest_ones(
    device: str | None, target: str, expected: str
) -> None:
    assert nearest_table(device, target, TABLES).name == expected


def test_a_cpu_has_the_default_one() -> None:
    assert table_of_device(torch.device("cpu")) is default_table()


class Part(NamedTuple):
    columns: Annotated[int, (64, 128)]
    depth: int = 2


@dataclass(frozen=True)
class Other:
    part: Part
    order: Literal["before", "after"]
    bits: Annotated[int, (4, 8)] = 4
    is_new: bool = field(default=False)


def test_fields_are_those_of_the_type() -> None:
    """A tile may get fields of any of these types; what has a default may be left out."""
    read: Any = tuning_file._value
    found = {"part": {"columns": 64}, "order": "after"}
    assert read("tile", Other, found) == Other(Part(64), "after")
    whole = Other(Part(128, 7), "before", 8, True)
    assert read("tile", Other, plain_fields(whole)) == whole
    for wrong, words in (
        ({**found, "order": "first"}, "tile.order: got 'first', must be one of 'before', 'after'"),
        ({**found, "bits": 5}, "tile.bits: got 5, must be one of 4, 8"),
        ({**found, "part": {"columns": 64, "depth": 0}}, "tile.part.depth: got 0, must be a pos"),
        ({"order": "after"}, "tile: got the fields order, must be part, order, bits, is_new"),
    ):
        with pytest.raises(InvalidArgumentError, match=words):
            read("tile", Other, wrong)


def test_a_name_that_no_file_can_have_is_no_table() -> None:
    with pytest.raises(InvalidArgumentError, match=r"table: got 'aaa.*must be a file"):
        tuning_file.find_table("a" * 300)


def test_a_range_beyond_every_number_is_refused() -> None:
    text = format_table(HOPPERS)
    assert "[4.0, 9.0]" in text
    text = text.replace("[4.0, 9.0]", f"[4.0, {10**400}]")
    with pytest.raises(InvalidArgumentError, match=r"routes_per_expert: got .* must be"):
        tuning_file.parse_table(text, name="large", where="large.json")
