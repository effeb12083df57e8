"""`bench/vllm_engine.py`, of which a CPU has the half that is firesteel's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.vllm.engine import ENVIRONMENT

pytestmark = pytest.mark.vllm

SCRIPT = Path(__file__).parents[3] / "bench" / "vllm_engine.py"
OPTIONS = {"enforce_eager": True, "kv_cache_memory_bytes": 100_000_000}


def _run(out):
    command = [sys.executable, str(SCRIPT), "--model", "qwen3-tiny", "--layers", "2"]
    command += ["--experts", "firesteel", "--batches", "1", "--prefill", "128", "--out", str(out)]
    return subprocess.run(
        [*command, "--options", json.dumps(OPTIONS)],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_each_case_has_a_row_and_logprobs_are_the_models(tmp_path):
    out = tmp_path / "rows.jsonl"
    done = _run(out)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["case"] for row in rows] == ["decode 1", "prefill 128"]
    for row in rows:
        assert row["experts"] == "firesteel"
        assert set(row["differences"]) == {"8", "64"}
        for differences in row["differences"].values():
            assert 0 < differences[0] < row["tolerances"][0]
            assert differences[1] < row["tolerances"][1]
        assert row["wall_us"] > 0
        assert row["gpu_us"] is None
