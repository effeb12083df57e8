"""`firesteel tune` around its measurements: what it refuses, writes and prints."""

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from firesteel.cli.tune import run as tune_run
from firesteel.cli.tune.candidates import Candidate, Group, Job, groups_of, incumbent_of, jobs_of
from firesteel.cli.tune.run import (
    PORTABLE_SHARED_BYTES,
    TuneRequest,
    changes_of,
    merged_table,
    run,
    tune_layer,
)
from firesteel.cli.tune.search import Found
from firesteel.device import device_target
from firesteel.errors import InvalidArgumentError, UnsupportedError
from firesteel.launch import plan
from firesteel.moe.plan import has_wgmma
from firesteel.moe.spec import MoeSpec, geometry
from firesteel.moe.tuning import Down, GateUp, Shape, Tile
from firesteel.moe.tuning_file import default_table, read_table, write_table
from tests.cli.command import assert_error, invoke, invoke_json
from tests.moe.test_tuning import TWO, table
from tests.moe.tiles import FIXED

TILE = Tile(16, GateUp(128, 8, 4), True, Down(128, 2, 8, 3))
GLM = replace(geometry("glm-5.2", tensor_parallel=4), table=FIXED)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--m", "1,0"), ["--m: got [1, 0], must be token counts from 1"]),
        (("--m", "a"), ["--m: got 'a'"]),
        (("--minutes", "0"), ["--minutes: got 0.0"]),
        (("--minutes", "nan"), ["--minutes: got nan"]),
        (("--only-wgmma", "--no-wgmma"), ["--only-wgmma: got --no-wgmma too"]),
        (("--only-wgmma", "--batch-invariant"), ["--only-wgmma: got --batch-invariant too"]),
        (("--out", "table.txt"), ["--out: got table.txt, must end in .json"]),
        (("--out", "nowhere/table.json"), ["--out: nowhere must be a folder"]),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, arguments: tuple, words: list[str]) -> None:
    if "--out" not in arguments:
        arguments = ("--out", tmp_path / "table.json", *arguments)
    assert_error(invoke("tune", *arguments, "--device", "cpu"), *words)


def test_a_cpu_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    words = "device: got cpu, tiles are timed on a CUDA device"
    assert_error(invoke("tune", "--out", out, "--device", "cpu"), words)
    with pytest.raises(UnsupportedError, match=words):
        run(TuneRequest(out=out, device="cpu"), as_json=True)
    assert not out.exists()


def test_a_file_is_not_overwritten_unasked(tmp_path: Path) -> None:
    write_table(tmp_path / "table.json", default_table())
    result = invoke("tune", "--out", tmp_path / "table.json")
    assert_error(result, "table.json exists; --merge replaces its rows")


def test_the_help_names_what_users_choose() -> None:
    text = invoke("tune", "--help").stdout
    for option in ("--out", "--merge", "--shape", "--model", "--recipe", "--m", "--minutes",
                   "--no-wgmma", "--only-wgmma"):  # fmt: skip
        assert option in text


def test_merging_replaces_the_rows_of_a_shape_and_recipe() -> None:
    ours, other = Shape(256, 128, "int4-g128"), Shape(256, 128, "int4-g32")
    old = table(ours, other)
    new = replace(table(ours, tiles=TWO, name="new"), date="2026-12-01", triton="3.7.0")
    merged = merged_table(old, new)
    assert merged.tiles(ours) == TWO
    assert merged.tiles(other) == old.tiles(other)
    assert merged.shapes == (other, ours)
    assert (merged.name, merged.date, merged.triton) == ("new", "2026-12-01", "3.7.0")


def found_of(job: Job, chosen: Candidate, spec: MoeSpec = GLM) -> Found:
    incumbent = incumbent_of(spec, job)
    return Found(job, chosen, incumbent, 90.0, 100.0, timed=12, skipped=3, dropped=1)


def test_changes_are_told_by_the_fields_that_differ() -> None:
    job = Job("sorted", (8,))
    incumbent = incumbent_of(GLM, job)
    assert changes_of(found_of(job, incumbent)) == "as before"
    tile = replace(incumbent.tile, rows=16, down=incumbent.tile.down._replace(span=2))
    assert changes_of(found_of(job, Candidate(tile, 1))) == "rows 8 to 16, down.span 4 to 2"


class Pretended:
    """A driver of 227 KiB."""

    @classmethod
    def open(cls) -> "Pretended":
        return cls()

    def max_shared_bytes(self, device: int) -> int:
        return 227 * 1024


class Tuned:
    """What was tuned on a GPU that is not there."""

    def __init__(self) -> None:
        self.specs: list[MoeSpec] = []
        self.shared_bytes: list[int] = []


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Tuned:
    """Every job finds TILE."""
    made = Tuned()

    def tuned(
        spec: MoeSpec, sizes: Sequence[int], device: torch.device, *, shared_bytes: int, **_: object
    ) -> list[Found]:
        made.specs.append(spec)
        made.shared_bytes.append(shared_bytes)
        return [found_of(job, Candidate(TILE), spec) for job in jobs_of(spec, tuple(sizes))]

    pretend_device(monkeypatch, "NVIDIA A30", "sm_80")
    monkeypatch.setattr(tune_run, "tune_layer", tuned)
    return made


def pretend_device(monkeypatch: pytest.MonkeyPatch, name: str, target: str) -> None:
    """A GPU that is not there, with a table that stays as it is."""
    for attribute, value in {
        "default_device": lambda: torch.device("cuda", 0),
        "device_name": lambda device: name,
        "device_target": lambda device: target,
        "table_of_device": lambda device: FIXED,
        "context": lambda device: {"device": "cuda"},
        "Driver": Pretended,
    }.items():
        monkeypatch.setattr(tune_run, attribute, value)


def test_a_table_is_written_that_plans_read(gpu: Tuned, tmp_path: Path) -> None:
    out = tmp_path / "a30.json"
    result = invoke("tune", "--out", out, "--m", "8,256")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("glm-5.2-tp4 int4-g128, ")
    words = " ".join(" ".join(lines[2:]).split())
    assert words.startswith("sorted 8 100.0 90.0 10.0% 12 3 1 rows 8 to 16, gate_up.columns 64")
    assert "sorted 256 100.0" in words
    made = read_table(out)
    assert (made.device, made.compute_capability, made.name) == ("NVIDIA A30", "8.0", "a30")
    assert made.shapes == (Shape(6144, 512, "int4-g128"),)
    (spec,) = gpu.specs
    # Which GPUs before sm_90 cannot.
    assert not spec.pdl
    assert not made.tiles(made.shapes[0]).wgmma
    usual = invoke_json("plan", "--model", "glm-5.2", "--tp", 4, "--max-tokens", 300)
    tuned = invoke_json(
        "plan", "--model", "glm-5.2", "--tp", 4, "--max-tokens", 300, "--table", out
    )
    assert usual["digest"] != tuned["digest"]
    assert tuned["spec"]["table"] == {"name": "a30", "digest": made.digest}
    assert tuned["title"].endswith("tiles of a30")
    spec = replace(GLM, table=made)
    assert tuned["digest"] == plan(spec, 300).digest
    # Beyond what was measured the tiles are those that it started from.
    assert spec.tiles.sorted[0] == (18.0, TILE)
    assert spec.tiles.sorted[1:] == GLM.tiles.sorted[2:]
    assert spec.tiles.direct == GLM.tiles.direct


def test_a_second_run_is_merged_and_starts_from_the_first(gpu: Tuned, tmp_path: Path) -> None:
    out = tmp_path / "a30.json"
    invoke_json("tune", "--out", out, "--m", "8")
    found = invoke_json("tune", "--out", out, "--m", "1", "--merge")
    assert [job["mode"] for job in found["jobs"]] == ["direct"]
    assert found["started_from"] == "a30"
    spec = replace(GLM, table=read_table(out))
    assert spec.tiles.sorted[0][1] == spec.tiles.direct == TILE
    # Another recipe has nothing to start from in the file.
    found = invoke_json("tune", "--out", out, "--m", "64", "--recipe", "int4-g32", "--merge")
    assert found["started_from"] == FIXED.name
    assert [shape.recipe for shape in read_table(out).shapes] == ["int4-g128", "int4-g32"]
    assert replace(GLM, table=read_table(out)).tiles == spec.tiles
    found = invoke_json("tune", "--out", out, "--m", "64", "--merge", "--batch-invariant")
    assert [job["mode"] for job in found["jobs"]] == ["batch_invariant"]
    assert replace(GLM, table=read_table(out)).tiles.batch_invariant == TILE
    assert gpu.specs[-1].batch_invariant
    found = invoke_json("tune", "--out", out, "--m", "64", "--merge", "--table", "h200")
    assert found["started_from"] == "h200"


def test_tiles_of_much_shared_memory_are_asked_for(gpu: Tuned, tmp_path: Path) -> None:
    for more in ((), ("--no-portable",)):
        invoke_json("tune", "--out", tmp_path / f"{len(more)}.json", "--m", "8", *more)
    assert gpu.shared_bytes == [99 * 1024, 227 * 1024]


def test_tables_of_two_devices_are_not_merged(gpu: Tuned, tmp_path: Path) -> None:
    out = tmp_path / "h200.json"
    write_table(out, default_table())
    result = invoke("tune", "--out", out, "--merge")
    assert_error(result, "--merge:", "of NVIDIA H200, must be of this device, NVIDIA A30")
    assert not gpu.specs


def test_a_table_that_is_none_is_refused_before_anything_is_timed(
    gpu: Tuned, tmp_path: Path
) -> None:
    out = tmp_path / "a30.json"
    out.write_text("{}")
    assert_error(invoke("tune", "--out", out, "--merge"), "a30.json: table: got the fields none")
    assert_error(invoke("tune", "--out", tmp_path / "b.json", "--table", "none"), "got 'none'")
    assert not gpu.specs


@pytest.mark.gpu
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_small_layer_is_tuned(tmp_path: Path, batch_invariant: bool) -> None:
    spec = MoeSpec(
        hidden_size=1024,
        intermediate_size=128,
        num_experts=32,
        top_k=2,
        batch_invariant=batch_invariant,
    )
    device = torch.device("cuda", torch.cuda.current_device())
    spec = spec.for_target(device_target(device))

    def few(spec: MoeSpec, job: Job, shared_bytes: int) -> list[Group]:
        return [
            Group(group.start, group.gate_up[:2], group.down[:2])
            for group in groups_of(spec, job, shared_bytes)[:2]
        ]

    notes: list[str] = []
    found = tune_layer(
        spec,
        (1, 2, 40, 128),
        device,
        shared_bytes=PORTABLE_SHARED_BYTES,
        end=time.monotonic() + 120,
        say=lambda text: None,
        note=notes.append,
        groups=few,
    )
    assert [each.job for each in found] == list(jobs_of(spec, (1, 2, 40, 128)))
    # None is wrong, and each job says what it found.
    assert len(notes) == len(found)
    for each in found:
        assert (each.skipped, each.dropped) == (0, 0)
        assert each.timed >= 4
        assert 0 < each.us <= each.incumbent_us
        assert json.dumps(changes_of(each))


@pytest.mark.gpu
def test_the_command_writes_a_table(tmp_path: Path) -> None:
    out = tmp_path / "made.json"
    found = invoke_json(
        "tune", "--shape", "qwen3-30b-a3b", "--m", "1,64", "--minutes", "0.3", "--out", out
    )
    device = torch.device("cuda", torch.cuda.current_device())
    here = geometry("qwen3-30b-a3b").for_target(device_target(device))
    expected = ["direct", "sorted"]
    if has_wgmma(here):
        expected = ["direct", "wgmma", "sorted", "wgmma"]
    assert [job["mode"] for job in found["jobs"]] == expected
    assert found["seconds"] < 120
    made = read_table(out)
    assert made.device == torch.cuda.get_device_name()
    spec = replace(here, table=made)
    assert plan(spec, 64).keys


def test_out_is_checked_first(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="must end in"):
        TuneRequest(out=tmp_path / "table")
