"""`firesteel tune` on Hopper: when the tiles of its own kernels get rows, and which rows stay."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from firesteel.cli.tune import run as tune_run
from firesteel.cli.tune.candidates import Candidate, Job, incumbent_of
from firesteel.launch import plan
from firesteel.moe.plan import select
from firesteel.moe.spec import MoeSpec
from firesteel.moe.tuning import Down, GateUp, Shape, Tile
from firesteel.moe.tuning_file import read_table, write_table
from tests.cli.command import assert_error, invoke, invoke_json
from tests.cli.tune.test_run import GLM, pretend_device
from tests.cli.tune.test_search import FakeBench
from tests.moe.tiles import FIXED


class Timer:
    """A GPU whose calls take what a function says, and how it was asked."""

    def __init__(self) -> None:
        self.us: Callable[[Job, Candidate], float] = lambda job, candidate: 100.0
        self.specs: list[MoeSpec] = []
        # In the order of their specs.
        self.benches: dict[Job, FakeBench] = {}
        self.shared_bytes: list[tuple[int, int]] = []

    def bench(self, spec: MoeSpec, job: Job, weights: object, **_: object) -> FakeBench:
        self.specs.append(spec)
        self.benches[job] = FakeBench(lambda candidate: self.us(job, candidate))
        return self.benches[job]

    def spec_of(self, job: Job) -> MoeSpec:
        """The layer whose calls were timed."""
        return self.specs[list(self.benches).index(job)]

    def compiler(
        self, target: str, folder: Path, shared_bytes: int, *, wgmma_shared_bytes: int
    ) -> None:
        assert target == "sm_90"
        self.shared_bytes.append((shared_bytes, wgmma_shared_bytes))


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> Timer:
    """Times of an H200 by a function."""
    made = Timer()
    pretend_device(monkeypatch, "NVIDIA H200", "sm_90")
    monkeypatch.setattr(tune_run, "random_weights", lambda spec, device: {})
    monkeypatch.setattr(tune_run, "LayerBench", made.bench)
    monkeypatch.setattr(tune_run, "Compiler", made.compiler)
    return made


BEST = Tile(32, GateUp(64, 8, 3), False, Down(128, 2, 8, 3))
HOPPER = Tile(64, GateUp(128, 8, 3), False, Down(256, 4, 8, 4), is_wgmma=True)


def times(job: Job, candidate: Candidate) -> float:
    """BEST takes 60 us and HOPPER 90; from 1024 tokens on the other way round, all others more."""
    tile = candidate.tile
    best = HOPPER if tile.is_wgmma else BEST
    gain = 20 if tile.is_wgmma == (job.counts[-1] >= 1024) else 5
    return 100.0 - gain * products_of(tile, best)


def products_of(tile: Tile, best: Tile) -> int:
    """How many of FC1 and FC2 are as in the best tile."""
    both = (tile.gate_up == best.gate_up) + (tile.down == best.down)
    return both * ((tile.rows, tile.is_wgmma) == (best.rows, best.is_wgmma))


def rows_of(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Rows of a file by mode, as they stand there, those of a shape after each other."""
    found: dict[str, list[dict[str, Any]]] = {}
    names = ("hidden_size", "intermediate_size", "recipe")
    rows = json.loads(path.read_text())["rows"]
    for row in sorted(rows, key=lambda row: [row[name] for name in names]):
        found.setdefault(row["mode"], []).append(row)
    return found


def test_hoppers_tiles_have_rows_where_they_are_faster(h200: Timer, tmp_path: Path) -> None:
    h200.us = times
    out = tmp_path / "h200.json"
    found = invoke_json("tune", "--out", out, "--m", "512,1024,3072")
    assert [(job["mode"], *job["m"]) for job in found["jobs"]] == [
        (mode, count) for count in (512, 1024, 3072) for mode in ("sorted", "wgmma")
    ]
    # What "sorted" has just found is what they must beat.
    assert [job["us"] for job in found["jobs"]] == [60.0, 60.0, 90.0, 60.0, 90.0, 60.0]
    assert [job["incumbent_us"] for job in found["jobs"]] == [100.0, 60.0, 100.0, 90.0, 100.0, 90.0]
    tiles = replace(GLM, table=read_table(out)).tiles
    assert [tile for _, tile in tiles.sorted] == [GLM.tiles.sorted[0][1], BEST]
    # From 725 tokens on, the geometric mean; the table's own at 512 tokens has lost.
    assert tiles.wgmma[-1] == (725 / 32, float("inf"), HOPPER)
    assert all(below <= 5.0 for _, below, _ in tiles.wgmma[:-1])
    assert replace(tiles, sorted=(), wgmma=()) == replace(GLM.tiles, sorted=(), wgmma=())
    # The portable limit is not theirs: their rows serve sm_90 alone.
    assert h200.shared_bytes == [(99 * 1024, 227 * 1024)]
    largest = max(c.tile.down.rows * c.tile.rows for c in h200.benches[Job("wgmma", (3072,))].timed)
    assert largest == 128 * 256


# One that may be of direct counts.
STREAM = Tile(8, GateUp(64, 8, 4), False, Down(64, 1, 4, 4), is_wgmma=True)


def test_hoppers_tiles_of_direct_counts_must_beat_what_was_just_chosen(
    h200: Timer, tmp_path: Path
) -> None:
    def us(job: Job, candidate: Candidate) -> float:
        """Of direct counts STREAM takes 60 us, and tiles of others with 8 spans of K 80."""
        if candidate.tile.is_wgmma:
            return 120.0 - 30 * products_of(candidate.tile, STREAM) * (job.counts == (1, 4))
        return 80.0 if candidate.split_k == 8 else 100.0

    h200.us = us
    out = tmp_path / "h200.json"
    found = invoke_json("tune", "--out", out, "--m", "1,4,64")
    direct, wgmma, *others = found["jobs"]
    assert (direct["mode"], direct["m"], direct["split_k"]) == ("direct", [1, 4], 8)
    assert (wgmma["mode"], wgmma["m"]) == ("wgmma", [1, 4])
    assert (wgmma["incumbent_us"], wgmma["us"]) == (direct["us"], 60.0) == (80.0, 60.0)
    assert [job["us"] for job in others] == [100.0, 100.0]
    tiles = replace(GLM, table=read_table(out)).tiles
    assert tiles.split_k == 8 != GLM.tiles.split_k
    # The chosen tile with its spans is what is timed first, and the others have as many spans.
    job = Job("wgmma", (1, 4))
    assert h200.benches[job].timed[0] == Candidate(tiles.direct, 8)
    assert all(candidate.tile.is_wgmma for candidate in h200.benches[job].timed[1:])
    assert h200.spec_of(job).tiles.split_k == 8
    # Its row ends where routes are sorted.
    first, below, tile = tiles.wgmma[0]
    assert first <= 1 / 32 < below == 33 / 256
    assert tile == STREAM
    assert STREAM not in [tile for *_, tile in tiles.wgmma[1:]]


def test_hoppers_tiles_alone_leave_other_rows_of_the_file_as_they_are(
    h200: Timer, tmp_path: Path
) -> None:
    h200.us = times
    out = tmp_path / "h200.json"
    others = (Shape(6144, 512, "mxfp4"), Shape(2048, 768, "int4-g128"))
    rows = [row for shape in others for row in GLM.tiles.rows(shape)]
    write_table(out, replace(FIXED, rows=(*FIXED.rows, *rows)))
    before = rows_of(out)
    options = ("--m", "1,8,256,512,1024,2048,3072,8192", "--only-wgmma", "--merge")
    result = invoke(
        "tune", "--shape", "glm-5.2-tp4", "--recipe", "int4-g128", "--out", out, *options
    )
    assert result.exit_code == 0, result.output
    assert "wgmma 256" in result.stdout
    assert [job.mode for job in h200.benches] == ["wgmma"] * 8
    after = rows_of(out)
    changed = [row for row in (*before["wgmma"], *after["wgmma"])
               if not (row in before["wgmma"] and row in after["wgmma"])]  # fmt: skip
    shapes = {(row["hidden_size"], row["intermediate_size"], row["recipe"]) for row in changed}
    assert shapes == {(6144, 512, "int4-g128")}
    for mode in ("direct", "sorted", "batch_invariant"):
        assert after[mode] == before[mode]
    # What the file has for "direct" or "sorted" is timed first, and is all that is timed of them.
    for job, bench in h200.benches.items():
        first, *others = bench.timed
        assert first == incumbent_of(GLM, job)
        assert all(candidate.tile.is_wgmma for candidate in others)
        assert len(bench.timed) <= 80


def test_without_hoppers_tiles_their_rows_stay(h200: Timer, tmp_path: Path) -> None:
    h200.us = times
    out = tmp_path / "h200.json"
    found = invoke_json("tune", "--out", out, "--m", "1024", "--no-wgmma")
    assert [job["mode"] for job in found["jobs"]] == ["sorted"]
    tiles = replace(GLM, table=read_table(out)).tiles
    assert tiles.wgmma == GLM.tiles.wgmma
    assert tiles.sorted != GLM.tiles.sorted


def test_modes_that_are_not_tuned_stay_whatever_table_is_started_from(
    h200: Timer, tmp_path: Path
) -> None:
    out = tmp_path / "h200.json"
    h200.us = times
    invoke_json("tune", "--out", out, "--m", "1024")
    mine = replace(GLM, table=read_table(out)).tiles
    more = ("--m", "64", "--merge", "--table", "h200")
    invoke_json("tune", "--out", out, *more, "--batch-invariant")
    assert replace(GLM, table=read_table(out)).tiles == replace(
        mine, batch_invariant=replace(GLM, table=read_table(out)).tiles.batch_invariant
    )
    invoke_json("tune", "--out", out, *more, "--no-wgmma")
    assert replace(GLM, table=read_table(out)).tiles.wgmma == mine.wgmma


@pytest.mark.parametrize("recipe", ["int4-g32", "int4-g32-asym", "mxfp4", "nvfp4", "nf3"])
def test_every_recipe_is_tuned(h200: Timer, tmp_path: Path, recipe: str) -> None:
    h200.us = times
    out = tmp_path / "made.json"
    found = invoke_json("tune", "--out", out, "--m", "1,256,1024", "--recipe", recipe)
    expected = ["direct", "wgmma", "sorted", "wgmma", "sorted", "wgmma"]
    assert [job["mode"] for job in found["jobs"]] == expected
    made = read_table(out)
    assert [shape.recipe for shape in made.shapes] == [recipe]
    tiles = made.tiles(made.shapes[0])
    assert HOPPER in [tile for *_, tile in tiles.wgmma]
    spec = replace(h200.specs[0], table=made)
    assert tiles.of_sorted(32) == BEST
    assert plan(spec, 1024).keys


@pytest.mark.parametrize("recipe", ["int4-g128", "mxfp4", "nvfp4"])
@pytest.mark.parametrize(("won", "lost"), [(1, 8), (8, 1)])
def test_hoppers_tiles_alone_are_tuned_at_counts_of_few_routes(
    h200: Timer, tmp_path: Path, recipe: str, won: int, lost: int
) -> None:
    h200.us = lambda job, c: 100.0 - 5 * products_of(c.tile, STREAM) * (job.counts == (won,))
    out = tmp_path / "made.json"
    found = invoke_json("tune", "--out", out, "--m", "1,8", "--only-wgmma", "--recipe", recipe)
    jobs = {tuple(job["m"]): job for job in found["jobs"]}
    assert {job["mode"] for job in jobs.values()} == {"wgmma"}
    assert (jobs[won,]["us"], jobs[lost,]["us"]) == (90.0, 100.0)
    made = read_table(out)
    tiles = made.tiles(made.shapes[0])
    assert tiles.of_wgmma(won / 32) == STREAM
    assert tiles.of_wgmma(lost / 32) is None
    assert [tile for *_, tile in tiles.wgmma].count(STREAM) == 1
    assert replace(tiles, wgmma=()) == replace(h200.specs[0].tiles, wgmma=())
    spec = replace(h200.specs[0], table=made)
    for count in (won, lost):
        kernels = {launch.key.name for launch in select(spec, count, (("ids", "i32"),))}
        assert ("gate_up_stream_kernel" in kernels) == (count == won)


def test_hoppers_tiles_alone_are_refused_where_there_are_none(
    h200: Timer, gpu_of: Callable[[str], None], tmp_path: Path
) -> None:
    gpu_of("sm_80")
    out = tmp_path / "made.json"
    words = "on sm_90 with Triton 3.6 or later"
    assert_error(invoke("tune", "--out", out, "--only-wgmma"), words)
    assert not h200.benches
    assert not out.exists()


@pytest.fixture
def gpu_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes the GPU another."""
    return lambda target: monkeypatch.setattr(tune_run, "device_target", lambda device: target)
