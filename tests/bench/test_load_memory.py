import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_the_terms_add_up_and_the_bound_holds(tmp_path):
    out = tmp_path / "out.jsonl"
    shape = ("--layers", "4", "--experts", "16", "--hidden", "1024", "--intermediate", "512")
    done = subprocess.run(
        [sys.executable, ROOT / "bench" / "load_memory.py", *shape, "--out", out],
        capture_output=True,
        text=True,
    )
    record = json.loads(done.stdout)
    assert out.read_text() == done.stdout
    assert record["packed_bytes"] == 4 * 16 * 3 * 1024 * 512 * (4 + 16 / 128) / 8
    assert record["layer_bf16_bytes"] == 16 * 3 * 1024 * 512 * 2
    assert (
        record["bound_bytes"]
        == record["packed_bytes"] + record["layer_bf16_bytes"] + record["host_bytes"]
    )
    # What stays packed is resident; less would say that the measurement misses it.
    assert record["peak_bytes"] > record["packed_bytes"]
    assert record["passed"] == (record["peak_bytes"] <= record["bound_bytes"])
    assert done.returncode == (0 if record["passed"] else 1)
    assert record["passed"], record
