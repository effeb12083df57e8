"""Bundles, and tables: what was compiled for the tiles of one is not what another's plan wants."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path
from unittest.mock import patch

import pytest

from firesteel.launch import build, plan
from firesteel.launch.store import Bundle
from firesteel.launch.stub import StubDriver
from firesteel.moe.spec import MoeSpec
from firesteel.moe.tuning import Down, GateUp, LayerTiles, Shape, Tile
from tests.launch.rig import Compiler, ready_on_stub, warnings_of
from tests.moe.test_tuning import table

SPEC = MoeSpec(hidden_size=256, intermediate_size=128, num_experts=8, top_k=2)
TILE = Tile(16, GateUp(128, 8, 2), False, Down(64, 2, 8, 2))
TILES = LayerTiles(((inf, TILE),), TILE, 1, TILE)


def test_a_bundle_of_another_table_is_no_use(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    usual = plan(SPEC, 40, flags={"ids": ["i32"]})
    tuned = plan(
        replace(SPEC, table=table(Shape(256, 128, "int4-g128"), tiles=TILES)),
        40,
        flags={"ids": ["i32"]},
    )
    driver = StubDriver.open()
    target = "sm_{}{}".format(*driver.compute_capability(0))
    with patch("firesteel.launch.building.compile_all", Compiler()):
        build(usual, targets=[target], out=tmp_path / "bundle")
    assert Bundle(tmp_path / "bundle").manifest["plans"] == [usual.digest] != [tuned.digest]
    compiler = Compiler()
    ready_on_stub(usual, driver, compiler=compiler, bundle=tmp_path / "bundle")
    assert not compiler.asked
    assert not warnings_of(caplog)
    ready_on_stub(tuned, driver, compiler=compiler, bundle=tmp_path / "bundle")
    assert set(compiler.asked) == set(tuned.keys) - set(usual.keys)
    assert {key.name for key in compiler.asked} >= {"gate_up_kernel", "down_kernel"}
    (warning,) = warnings_of(caplog)
    assert "another plan" in warning
