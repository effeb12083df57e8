"""`build`: a bundle of any plan, for GPUs that are not here, whole or not at all."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from firesteel.errors import InvalidArgumentError, UnsupportedError
from firesteel.launch import build, plan
from firesteel.launch.store import Bundle
from firesteel.launch.stub import StubDriver
from tests.launch.gather_rows import GatherRows
from tests.launch.rig import Compiler, ready_on_stub

PLAN = plan(GatherRows(), 40)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler()
    monkeypatch.setattr("firesteel.launch.building.compile_all", made)
    return made


def test_a_bundle_holds_every_key_for_every_target(compiler: Compiler, tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    num_bytes = build(PLAN, targets=["sm_90", "sm_120", "sm_90"], out=str(out))
    assert sorted(map(str, compiler.asked)) == sorted(map(str, PLAN.keys * 2))
    assert num_bytes == sum(path.stat().st_size for path in out.glob("*.kernel"))
    assert Bundle(out).manifest["targets"] == ["sm_120", "sm_90"]
    assert Bundle(out).manifest["plans"] == [PLAN.digest]
    ready = ready_on_stub(PLAN, StubDriver.open(), compiler=compiler, bundle=out)
    counted = ready.audit.prewarmed
    assert (counted.compiled, counted.from_bundle) == (0, len(PLAN.keys))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"targets": []}, "target: got '', must be some of sm_80, "),
        ({"targets": ["sm_90", "sm_99"]}, "target: got 'sm_99', must be some of sm_80, "),
        ({"targets": "sm_91"}, "target: got 'sm_91', must be some of sm_80, "),
        ({"threads": -1}, "threads: got -1, must be an integer from 0"),
        ({"threads": True}, "threads: got True, must be an integer from 0"),
        ({"threads": 1.5}, "threads: got 1.5, must be an integer from 0"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_is_compiled(
    compiler: Compiler, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        build(PLAN, **{"targets": ["sm_90"], "out": tmp_path / "bundle", **changes})
    assert compiler.asked == []
    assert list(tmp_path.iterdir()) == []


def test_one_target_may_be_given_by_itself(compiler: Compiler, tmp_path: Path) -> None:
    build(PLAN, targets="sm_80", out=tmp_path / "bundle")
    assert Bundle(tmp_path / "bundle").manifest["targets"] == ["sm_80"]


@pytest.mark.parametrize(
    "make", [lambda path: path.write_text("mine"), lambda path: (path / "mine").mkdir(parents=True)]
)
def test_a_folder_that_holds_something_is_refused_first(
    compiler: Compiler, tmp_path: Path, make: Callable[[Path], object]
) -> None:
    make(tmp_path / "bundle")
    with pytest.raises(
        InvalidArgumentError, match=r"out: .* exists, must be new or an empty folder"
    ):
        build(PLAN, targets=["sm_90"], out=tmp_path / "bundle")
    assert compiler.asked == []


def test_a_compile_that_fails_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise UnsupportedError("gather_kernel: too large")

    monkeypatch.setattr("firesteel.launch.building.compile_all", fail)
    with pytest.raises(UnsupportedError, match="too large"):
        build(PLAN, targets=["sm_90"], out=tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []
