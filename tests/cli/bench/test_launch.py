"""`firesteel bench launch` against the stub driver; on a GPU it is run by hand."""

import json
from pathlib import Path

import pytest

from firesteel.cli.bench.launch import HOST_SIZES, LaunchRequest, run
from firesteel.cli.planning import PlanChoice
from firesteel.errors import InvalidArgumentError
from firesteel.launch import plan
from firesteel.moe.spec import geometry

pytestmark = pytest.mark.compile


def test_the_whole_command_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "launch.jsonl"
    choice = PlanChoice(model="qwen3-30b-a3b", max_tokens=300)
    run(LaunchRequest(choice=choice, device="cpu"), as_json=True, out=out)
    record = json.loads(out.read_text())
    assert json.loads(capsys.readouterr().out) == record
    assert record["driver"].startswith("stub")
    made = plan(geometry("qwen3-30b-a3b"), 300)
    assert record["plan"]["keys"] == len(made.keys)
    assert record["plan"]["digest"] == made.digest
    assert [row["tokens"] for row in record["host"]] == [n for n in HOST_SIZES if n <= 300]
    assert all(row["host_ns"] > 0 for row in record["host"])
    # Relative: a whole call costs less than this many look-ups of one row of the table,
    parts = record["components"]
    assert all(row["host_ns"] < 200 * parts["resolve_ns"] for row in record["host"])
    # and the native part is the small one.
    assert parts["patch_and_look_up_ns"] < parts["check_ns"]
    traffic = record["traffic"]
    assert traffic["calls"] == 2 * 301
    assert traffic["keys_launched"] == traffic["keys_planned"]
    for name in ("compiles", "allocations", "environment_reads", "host_syncs", "misses"):
        assert traffic[name] == 0
    assert traffic["launched_unplanned"] == 0
    assert traffic["torch_operations"] == {}


def test_a_wrong_option_is_named() -> None:
    with pytest.raises(InvalidArgumentError, match="--captures: got -1"):
        LaunchRequest(choice=PlanChoice(model="glm-5.2"), captures=-1)
