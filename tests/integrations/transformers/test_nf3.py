"""NF3 from a plain checkpoint to text and back: quantised, saved, inspected, loaded, refused."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from firesteel.errors import CheckpointError
from firesteel.integrations.transformers import load_model, load_report
from tests.checkpoints import edit_config, write, write_tensors
from tests.cli.command import assert_error, invoke, invoke_json
from tests.integrations.transformers.compare import packed_experts, prompts
from tests.integrations.transformers.test_fp4 import check_bound

EXPERT = "model.layers.1.mlp.experts.2.up_proj"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain model, quantised as it is loaded, and saved; the plain one is beside it."""
    root = tmp_path_factory.mktemp("nf3")
    plain = write(root / "plain", "qwen3_moe").path
    load_model(plain, quantize="nf3").save_pretrained(root / "saved")
    return root / "saved"


def changed(saved: Path, path: Path, **tensors: torch.Tensor | None) -> Path:
    """A copy with tensors changed, or (None) taken away."""
    own = {**load_file(saved / "model.safetensors"), **tensors}
    path.mkdir()
    write_tensors(path, {name: tensor for name, tensor in own.items() if tensor is not None})
    (path / "config.json").write_text((saved / "config.json").read_text())
    return path


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_saved_model_gives_the_same_bits(saved: Path, dtype: torch.dtype) -> None:
    first = load_model(saved.parent / "plain", quantize="nf3", dtype=dtype)
    again = load_model(saved, dtype=dtype)
    report = load_report(again)
    assert report.experts == load_report(first).experts == {"nf3 nf3 g32": 2}
    assert (report.backend, report.kernels.num_layers) == ("torch", 0)
    with torch.no_grad():
        wanted, got = first(prompts()).logits, again(prompts()).logits
    assert torch.equal(got, wanted)
    assert wanted.abs().max() > 1
    # Weights are those of bf16 in a model of any type.
    for module in packed_experts(again).values():
        weight = module.down.read(1, 0).dequantize(module.down.scheme)
        assert torch.equal(weight, weight.bfloat16().float())
        picked = module.down.linear(1, torch.eye(weight.shape[1], dtype=dtype))
        assert torch.equal(picked.T.float(), weight)


def test_a_layer_binds_without_a_copy(saved: Path) -> None:
    check_bound(saved, "nf3", "none")


def test_the_commands_show_and_run_it(saved: Path) -> None:
    found = invoke_json("inspect", saved)
    (entry,) = found["experts"]
    assert (found["quant_method"], entry["format"], entry["element"]) == ("nf3", "nf3", "nf3")
    assert (entry["bits"], entry["group_size"], entry["scale"]) == (3, 32, "e5m3")
    assert (entry["symmetric"], entry["layout"]) == (True, "tile-64")
    # 3 bits a weight, and a byte for 32 of them.
    assert entry["file_bytes"] == entry["bf16_bytes"] * 3.25 / 16
    assert "NF3 (nf3_2p1)" in invoke("inspect", saved).stdout
    options = ("--prompt-ids", "1,2,3", "--max-new-tokens", 4, "--device", "cpu")
    stored = invoke_json("generate", saved, *options)
    plain = invoke_json("generate", saved.parent / "plain", *options, "--quantize", "nf3")
    assert stored["token_ids"] == plain["token_ids"]
    assert len(stored["token_ids"]) == 4
    assert stored["experts_bytes"] == entry["packed_bytes"]


@pytest.mark.parametrize("byte", [3, 128, 248, 255])
def test_a_byte_that_is_no_scale_is_an_error(saved: Path, tmp_path: Path, byte: int) -> None:
    name = f"{EXPERT}.scales"
    scales = load_file(saved / "model.safetensors")[name]
    scales[5, 1] = byte
    path = changed(saved, tmp_path / "in", **{name: scales})
    with pytest.raises(CheckpointError, match=rf"{re.escape(EXPERT)}: scales\[5, 1\]: got byte"):
        load_model(path)


@pytest.mark.parametrize("suffix", ["codes", "scales"])
def test_a_missing_tensor_is_named(saved: Path, tmp_path: Path, suffix: str) -> None:
    path = changed(saved, tmp_path / "in", **{f"{EXPERT}.{suffix}": None})
    with pytest.raises(CheckpointError, match=rf"{re.escape(EXPERT)}\.{suffix}: missing"):
        load_model(path)


@pytest.mark.parametrize("width", [128, 32, 0, "64", None])
def test_another_width_of_tiles_is_an_error(saved: Path, tmp_path: Path, width: object) -> None:
    path = changed(saved, tmp_path / "in")
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    assert config["tile_width"] == 64
    edit_config(path, quantization_config={**config, "tile_width": width})
    with pytest.raises(CheckpointError, match=rf"tile_width: got {width!r}, must be"):
        load_model(path)


def test_rows_of_no_whole_block_are_an_error(saved: Path, tmp_path: Path) -> None:
    own = load_file(saved / "model.safetensors")
    codes, scales = own[f"{EXPERT}.codes"], own[f"{EXPERT}.scales"]
    assert (codes.shape, scales.shape) == ((64 * 128 // 32, 3), (64, 4))
    cut = {f"{EXPERT}.codes": codes[:192].clone(), f"{EXPERT}.scales": scales[:48].clone()}
    path = changed(saved, tmp_path / "in", **cut)
    with pytest.raises(CheckpointError, match=rf"{re.escape(EXPERT)}: n: got 48, must be a mul"):
        load_model(path)
    plain = write(tmp_path / "plain", "olmoe", intermediate_size=96).path
    options = ("--prompt-ids", "1", "--quantize", "nf3")
    assert_error(invoke("generate", plain, *options), "recipe 'nf3': n: got 96", "64")
