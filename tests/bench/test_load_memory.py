import json
import sys

import pytest


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_the_terms_add_up_and_the_bound_holds(load_memory, monkeypatch, capsys, tmp_path):
    out = tmp_path / "out.jsonl"
    shape = ("--layers", "4", "--experts", "16", "--hidden", "1024", "--intermediate", "512")
    monkeypatch.setattr(sys, "argv", ["load_memory.py", *shape, "--out", str(out)])
    # What is measured, it starts processes for.
    code = load_memory.main()
    printed = capsys.readouterr().out
    record = json.loads(printed)
    assert out.read_text() == printed
    assert record["packed_bytes"] == 4 * 16 * 3 * 1024 * 512 * (4 + 16 / 128) / 8
    assert record["layer_bf16_bytes"] == 16 * 3 * 1024 * 512 * 2
    assert (
        record["bound_bytes"]
        == record["packed_bytes"] + record["layer_bf16_bytes"] + record["host_bytes"]
    )
    # What stays packed is resident; less would say that the measurement misses it.
    assert record["peak_bytes"] > record["packed_bytes"]
    assert record["passed"] == (record["peak_bytes"] <= record["bound_bytes"])
    assert code == (0 if record["passed"] else 1)
    assert record["passed"], record
