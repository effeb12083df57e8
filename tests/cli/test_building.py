import json
import logging
from pathlib import Path

import pytest

from firesteel.cli.planning import PlanChoice, make_plans, make_specs
from firesteel.errors import UnsupportedError
from firesteel.launch import prewarm
from firesteel.launch.binary import Binary, checked_target, identity
from firesteel.launch.building import TARGETS
from firesteel.launch.store import Bundle
from firesteel.launch.stub import StubDriver
from firesteel.settings import Settings
from tests.cli.command import ROOT, assert_error, invoke, invoke_json

LITTLE = ROOT / "examples" / "little_moe" / "int4-g128"
# One token takes the direct way: three kernels.
CHOICE = ("--checkpoint", LITTLE, "--max-tokens", 1, "--ids", "int32")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FIRESTEEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FIRESTEEL_COMPILE_THREADS", "1")


@pytest.fixture
def compiled(monkeypatch) -> list[tuple[str, str, bool]]:
    """Stands in for the compiler: (target, kernel, pdl) of each compile."""
    found = []

    def compile_all(wanted, target, *, threads, done):
        assert threads == 1
        for kernel, key in wanted:
            found.append((target, key.name, key.pdl))
            digest = identity(kernel, key, target)
            fields = {"symbol": key.name, "shared_bytes": 0, "num_warps": 4, "num_hidden": 2}
            done(key, Binary(digest=digest, target=target, image=b"code", **fields))

    monkeypatch.setattr("firesteel.launch.building.compile_all", compile_all)
    return found


def read_all(folder: Path) -> dict[str, Binary]:
    return {
        digest: Binary.from_bytes((folder / f"{digest}.kernel").read_bytes(), digest)
        for digest in Bundle(folder).manifest["entries"]
    }


def test_every_key_is_compiled_for_every_target(compiled, tmp_path):
    out = tmp_path / "deep" / "bundle"
    result = invoke("build", *CHOICE, "--target", "sm_90,sm_120, sm_90", "--out", out)
    assert result.exit_code == 0, result.output
    # Each target has the kernels that it can run.
    names = {
        "sm_90": ["gate_up_stream_kernel", "down_stream_kernel", "combine_kernel"],
        "sm_120": ["gate_up_kernel", "down_kernel", "combine_kernel"],
    }
    assert compiled == [(target, name, True) for target, each in names.items() for name in each]
    binaries = read_all(out)
    assert sorted(b.target for b in binaries.values()) == ["sm_120"] * 3 + ["sm_90"] * 3
    assert {path.suffix for path in out.iterdir()} == {".kernel", ".json"}
    (spec,) = make_specs(choice(1))
    made = make_plans(choice(1), [spec.for_target(target) for target in names])
    assert sorted(Bundle(out).manifest["plans"]) == sorted(each.digest for each in made)
    lines = result.stdout.splitlines()
    assert lines[1].split() == ["sm_90", "3", "3", "0", "12"]
    assert lines[-1].startswith(f"{out}: 6 kernels, ")
    assert lines[-1].endswith(" s")
    assert [path.name for path in out.parent.iterdir()] == ["bundle"]


def choice(max_tokens: int, **given: int) -> PlanChoice:
    return PlanChoice(checkpoint=LITTLE, max_tokens=max_tokens, ids="int32", **given)


@pytest.mark.parametrize("ranks", ["tp", "ep"])
def test_ranks_that_differ_are_in_one_bundle(compiled, tmp_path, ranks: str):
    out = tmp_path / "bundle"
    result = invoke("build", *CHOICE, f"--{ranks}", 3, "--target", "sm_90", "--out", out)
    assert result.exit_code == 0, result.output
    assert len(result.stderr.splitlines()) == 2
    specs = make_specs(choice(1, **{ranks: 3}))
    made = make_plans(choice(1), [spec.for_target("sm_90") for spec in specs])
    assert len({each.digest for each in made}) == 2
    assert sorted(Bundle(out).manifest["plans"]) == sorted(each.digest for each in made)
    assert len(compiled) == len({key for each in made for key in each.keys})


def test_launches_overlap_only_where_a_gpu_can(compiled, tmp_path):
    invoke("build", *CHOICE, "--target", "sm_80,sm_90", "--out", tmp_path / "b")
    assert {(target, pdl) for target, _, pdl in compiled} == {("sm_80", False), ("sm_90", True)}
    assert len(Bundle(tmp_path / "b").manifest["plans"]) == 2


def test_what_the_cache_has_is_not_compiled(compiled, tmp_path):
    invoke("build", *CHOICE, "--target", "sm_90", "--out", tmp_path / "a")
    assert len(compiled) == 3
    arguments = (*CHOICE, "--target", "sm_90,sm_120", "--out", tmp_path / "b")
    found = invoke_json("build", *arguments)
    assert len(compiled) == 6
    assert (found["kernels"], found["out"]) == (6, str(tmp_path / "b"))
    assert found["targets"]["sm_90"]["from_cache"] == 3
    assert found["targets"]["sm_120"]["compiled"] == 3
    files = (tmp_path / "b").glob("*.kernel")
    assert found["bytes"] == sum(path.stat().st_size for path in files)


def test_the_cache_can_be_off(compiled, tmp_path, monkeypatch):
    monkeypatch.setenv("FIRESTEEL_CACHE", "off")
    for name in ("a", "b"):
        invoke("build", *CHOICE, "--target", "sm_90", "--out", tmp_path / name)
    assert len(compiled) == 6
    assert not (tmp_path / "cache").exists()


def test_an_empty_folder_is_filled_and_a_full_one_refused_first(compiled, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    assert invoke("build", *CHOICE, "--target", "sm_90", "--out", out).exit_code == 0
    before = sorted(out.iterdir())
    compiled.clear()
    result = invoke("build", *CHOICE, "--target", "sm_120", "--out", out)
    assert_error(result, "out:", "must be new or an empty folder")
    assert compiled == []
    assert sorted(out.iterdir()) == before
    assert_error(invoke("build", *CHOICE, "--target", "sm_90", "--out", LITTLE / "config.json"))


def test_a_compile_that_fails_leaves_nothing(monkeypatch, tmp_path):
    def fail(*_, **__):
        raise UnsupportedError("gate_up_kernel: too large")

    monkeypatch.setattr("firesteel.launch.building.compile_all", fail)
    result = invoke("build", *CHOICE, "--target", "sm_90", "--out", tmp_path / "b")
    assert_error(result, "gate_up_kernel: too large")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("target", ["sm_75", "sm_99", "90", "", "sm_90,", "sm_90a", "gfx942"])
def test_targets_that_are_none(compiled, tmp_path, target: str):
    result = invoke("build", *CHOICE, "--target", target, "--out", tmp_path / "b")
    assert_error(result, "target: got", "sm_90", "sm_120")
    assert compiled == []


def test_every_target_is_one_of_the_launch_path():
    assert [f"sm_{checked_target(target)}" for target in TARGETS] == list(TARGETS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--target", "sm_90"), ["--out"]),
        (("--out", "x"), ["--target"]),
        (("--target", "sm_90", "--out", "x"), ["--model, --checkpoint: got neither"]),
    ],
)
def test_usage_errors(arguments: tuple, words: list[str]):
    assert_error(invoke("build", *arguments), *words)


@pytest.mark.compile
def test_prewarm_from_a_bundle_compiles_nothing(tmp_path, caplog):
    out = tmp_path / "bundle"
    found = invoke_json("build", *CHOICE, "--target", "sm_90", "--out", out)
    assert found["targets"]["sm_90"]["compiled"] == found["kernels"] == 3
    assert json.loads((out / "manifest.json").read_text())["targets"] == ["sm_90"]
    for binary in read_all(out).values():
        assert binary.image.startswith(b"\x7fELF")
    try:
        driver = StubDriver.open()
    except UnsupportedError as error:
        pytest.skip(str(error))
    (made,) = make_plans(choice(1), make_specs(choice(1)))
    with caplog.at_level(logging.WARNING):
        ready = prewarm(
            made, device="cpu", driver=driver, bundle=out, settings=Settings(cache="off")
        )
    counted = ready.audit.prewarmed
    assert (counted.compiled, counted.from_cache, counted.from_bundle) == (0, 0, 3)
    assert counted.loaded == 3
    assert caplog.records == []


@pytest.mark.compile
def test_a_bundle_of_another_gpu_is_refused_with_its_name(tmp_path, caplog):
    out = tmp_path / "bundle"
    small = (*CHOICE[:-1], "int64")
    assert invoke("build", *small, "--target", "sm_80", "--out", out).exit_code == 0
    assert Bundle(out).read("0" * 64, "sm_90") is None
    assert "it is for sm_80, this device is sm_90" in caplog.text
