import json
import shutil

import pytest
from safetensors import safe_open

from firesteel.checkpoint.files import Checkpoint
from firesteel.checkpoint.layers import scan
from firesteel.cli.bench.synthetic import write_checkpoint
from firesteel.cli.inspection import summarize
from tests.cli.command import CHECKPOINTS, INT4, SHAPE, assert_error, invoke, invoke_json, run_apart

NAMES = sorted(folder.name for folder in CHECKPOINTS.iterdir() if (folder / "config.json").exists())

BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"transformers", "triton", "huggingface_hub"}:
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Blocker())
"""


def tensor_bytes(folder) -> int:
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            total += sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
    return total


@pytest.mark.parametrize("name", NAMES)
def test_every_byte_of_the_file_counts_once(name: str):
    folder = CHECKPOINTS / name
    found = invoke_json("inspect", folder)
    parts = [*found["experts"], *found["linears"], found["plain"], found["ignored"]]
    assert sum(part["file_bytes"] for part in parts) == tensor_bytes(folder)
    assert found["file_bytes"] == sum(p.stat().st_size for p in folder.glob("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    assert found["expert_layers"] == found["num_layers"] == config["num_hidden_layers"]
    matrices = sum(entry["matrices"] for entry in found["experts"])
    assert matrices == config["num_hidden_layers"] * 3 * found["experts_per_layer"]
    linear = found["hidden_size"] * found["intermediate_size"]
    assert sum(entry["bf16_bytes"] for entry in found["experts"]) == 2 * matrices * linear


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_packed_bytes_are_those_of_the_loaded_model(name: str):
    load = invoke_json("generate", CHECKPOINTS / name, "--prompt-ids", "1", "--max-new-tokens", 1)
    found = invoke_json("inspect", CHECKPOINTS / name)
    for kind in ("experts", "linears"):
        entries, loaded = found[kind], load["load"][f"{kind}_bytes"]
        packed = sum(entry["packed_bytes"] for entry in entries)
        if any(entry["element"] == "int4" and entry["symmetric"] for entry in entries):
            # A CPU may hold these in tiles: without padding, with an offset beside each scale.
            four_bits = sum(entry["bf16_bytes"] for entry in entries) / 4
            assert four_bits < loaded <= 1.2 * packed
        elif kind == "experts" or not load["load"]["expanded"]:
            assert loaded == packed


def test_one_storage():
    found = invoke_json("inspect", INT4)
    (entry,) = found["experts"]
    assert entry["format"] == "compressed-tensors"
    assert (entry["element"], entry["bits"], entry["group_size"]) == ("int4", 4, 32)
    assert (entry["symmetric"], entry["act_order"]) == (True, False)
    assert entry["projections"] == ["gate", "up", "down"]
    assert entry["layers"] == list(range(found["num_layers"]))
    assert found["linears"] == []
    assert found["quant_method"] == "compressed-tensors"
    assert found["experts_per_token"] == 2


def test_a_scale_a_row_is_no_group():
    found = invoke_json("inspect", CHECKPOINTS / "llmcompressor-ct-w8-channel-sym")
    assert [entry["group_size"] for entry in found["experts"]] == [None]
    assert "row" in invoke("inspect", CHECKPOINTS / "llmcompressor-ct-w8-channel-sym").stdout


def test_a_group_as_long_as_a_row_is_a_group(packed_folder):
    (entry,) = invoke_json("inspect", packed_folder)["experts"]
    assert entry["group_size"] == 128
    assert entry["projections"] == ["gate", "up", "down"]


def test_a_plain_checkpoint(plain_folder):
    found = invoke_json("inspect", plain_folder)
    (entry,) = found["experts"]
    assert (entry["format"], entry["element"], entry["bits"]) == ("plain", "bfloat16", 16)
    assert entry["file_bytes"] == entry["packed_bytes"] == entry["bf16_bytes"]
    assert "not quantised" in invoke("inspect", plain_folder).stdout


def test_layers_beyond_the_model_are_ignored(tmp_path):
    write_checkpoint(tmp_path, SHAPE)
    whole = summarize(scan(Checkpoint.open(tmp_path)))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    found = invoke_json("inspect", tmp_path)
    assert found["ignored"]["layers"] == [1]
    assert found["expert_layers"] == 1
    (entry,), (before,) = found["experts"], whole["experts"]
    assert entry["layers"] == [0]
    assert 2 * entry["packed_bytes"] == before["packed_bytes"]
    total = entry["file_bytes"] + found["plain"]["file_bytes"] + found["ignored"]["file_bytes"]
    assert total == tensor_bytes(tmp_path)
    assert "layers beyond num_hidden_layers (1)" in invoke("inspect", tmp_path).stdout


@pytest.mark.parametrize("value", [None, "2", 0, True])
def test_the_number_of_layers_must_be_there(tmp_path, value: object):
    shutil.copytree(INT4, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": value}))
    assert_error(invoke("inspect", tmp_path), "config.json", "num_hidden_layers")


def test_an_unsupported_family_lists_those_supported(tmp_path):
    shutil.copytree(INT4, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    assert_error(invoke("inspect", tmp_path), "'llama'", "qwen3_moe", "mixtral")


def test_a_truncated_file(tmp_path):
    shutil.copytree(INT4, tmp_path, dirs_exist_ok=True)
    content = (INT4 / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[: len(content) // 2])
    assert_error(invoke("inspect", tmp_path), "model.safetensors")


def test_inspect_needs_no_host():
    done = run_apart("inspect", INT4, code=BLOCKER)
    assert (done.returncode, done.stderr) == (0, "")
    assert "compressed-tensors pack-quantized" in done.stdout


def test_inspect_reads_no_weights(tmp_path, monkeypatch):
    def refuse(*_):
        raise AssertionError("a tensor was read")

    monkeypatch.setattr("firesteel.checkpoint.files.Reader.tensor", refuse)
    assert invoke("inspect", INT4).exit_code == 0
