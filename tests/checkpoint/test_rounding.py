"""`firesteel quantize`: gives what saving a model quantised on load gives; whole or not there."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from firesteel.checkpoint import rounding
from firesteel.checkpoint.rounding import quantize_checkpoint
from firesteel.errors import CheckpointError, InvalidArgumentError
from firesteel.formats.quantize import parse_recipe
from firesteel.integrations.transformers import load_model
from tests.checkpoints import PLAIN, STORAGES, write
from tests.cli.command import assert_error, invoke, invoke_json
from tests.integrations.transformers.compare import assert_same_bits, buffers


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in sorted(path.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def nothing(total: int) -> Callable[[], None]:
    del total
    return lambda: None


@pytest.mark.parametrize(
    ("family", "recipe"),
    [("qwen3_moe", "int4-g32-asym"), ("gpt_oss", "mxfp4"), ("mixtral", "nvfp4")],
)
def test_it_writes_what_a_model_that_is_quantised_on_load_saves(tmp_path, family, recipe):
    plain = write(tmp_path / "in", family, PLAIN, num_shards=3).path
    (plain / "tokenizer.txt").write_text("as it is")
    (plain / "pytorch_model.bin").write_text("never copied")
    found = invoke_json("quantize", plain, "--recipe", recipe, "--out", tmp_path / "out")
    assert (found["recipe"], found["kept"]) == (recipe, 0)
    loaded = load_model(plain, quantize=recipe)
    loaded.save_pretrained(tmp_path / "saved")
    got, wanted = tensors_of(tmp_path / "out"), tensors_of(tmp_path / "saved")
    assert set(got) == set(wanted)
    assert_same_bits(got, wanted)
    assert found["bytes_after"] == sum(tensor.nbytes for tensor in got.values())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["quantization_config"] == saved["quantization_config"]
    assert (tmp_path / "out" / "tokenizer.txt").read_text() == "as it is"
    assert not (tmp_path / "out" / "pytorch_model.bin").exists()
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []
    assert_same_bits(buffers(load_model(tmp_path / "out")), buffers(loaded))


def test_a_run_that_was_stopped_goes_on_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(rounding, "EXPERTS_A_SHARD", 2)
    plain = write(tmp_path / "in", "qwen3_moe", PLAIN).path
    recipe, whole, out = parse_recipe("int4-g32"), tmp_path / "whole", tmp_path / "out"
    quantize_checkpoint(plain, recipe, whole, progress=nothing)

    def stopping_after(steps: int) -> Callable[[int], Callable[[], None]]:
        left = iter(range(steps))

        def step() -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt

        return lambda total: step

    # Two layers of four experts: the fourth step is inside of the second shard.
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(plain, recipe, out, progress=stopping_after(3))
    assert not out.exists()
    shard = tmp_path / "out.partial" / "experts-00001-000.safetensors"
    before = shard.stat().st_mtime_ns
    (tmp_path / "out.partial" / ".experts-00001-001.safetensors.tmp").write_bytes(b"half")
    with pytest.raises(InvalidArgumentError, match="of another checkpoint or recipe"):
        quantize_checkpoint(plain, parse_recipe("int4-g64"), out, progress=nothing)
    done = quantize_checkpoint(plain, recipe, out, progress=nothing)
    assert (done.kept, done.matrices) == (6, 24)
    assert (out / shard.name).stat().st_mtime_ns == before
    assert {path.name for path in out.iterdir()} == {path.name for path in whole.iterdir()}
    for path in whole.iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_checkpoint_that_has_changed_since_is_not_mixed_in(tmp_path, monkeypatch):
    plain = write(tmp_path / "in", "qwen3_moe", PLAIN).path
    monkeypatch.setattr(rounding, "_copy_rest", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(InvalidArgumentError, match="full"):
        quantize_checkpoint(plain, parse_recipe("mxfp4"), tmp_path / "out", progress=nothing)
    monkeypatch.undo()
    shutil.rmtree(plain)
    write(tmp_path / "in", "qwen3_moe", PLAIN, seed=1)
    with pytest.raises(InvalidArgumentError, match="of another checkpoint or recipe"):
        quantize_checkpoint(plain, parse_recipe("mxfp4"), tmp_path / "out", progress=nothing)


def test_a_shard_that_is_damaged_is_named(tmp_path, monkeypatch):
    plain = write(tmp_path / "in", "qwen3_moe", PLAIN).path
    monkeypatch.setattr(rounding, "_write_index", lambda _: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(InvalidArgumentError, match="full"):
        quantize_checkpoint(plain, parse_recipe("mxfp4"), tmp_path / "out", progress=nothing)
    monkeypatch.undo()
    shard = tmp_path / "out.partial" / "experts-00001-000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"remove .*experts-00001-000"):
        quantize_checkpoint(plain, parse_recipe("mxfp4"), tmp_path / "out", progress=nothing)


def test_two_runs_are_not_at_work_in_one_folder(tmp_path):
    plain = write(tmp_path / "in", "qwen3_moe", PLAIN).path
    out = tmp_path / "out"
    second = []

    def meanwhile() -> None:
        if not second:
            args = ("quantize", plain, "--recipe", "mxfp4", "--out", out)
            second.append(invoke(*args))

    quantize_checkpoint(plain, parse_recipe("mxfp4"), out, progress=lambda total: meanwhile)
    assert_error(second[0], "another run is at work in")
    assert not [path.name for path in out.iterdir() if path.name.startswith(".")]
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in out.iterdir())
    assert load_model(out)


def test_a_stop_before_anything_was_said_leaves_no_trace(tmp_path):
    plain = write(tmp_path / "in", "qwen3_moe", PLAIN).path
    (tmp_path / "out.partial").mkdir()
    done = quantize_checkpoint(plain, parse_recipe("mxfp4"), tmp_path / "out", progress=nothing)
    assert done.kept == 0
    (tmp_path / "other.partial").mkdir()
    (tmp_path / "other.partial" / "mine").write_text("")
    with pytest.raises(InvalidArgumentError, match="of another checkpoint or recipe"):
        quantize_checkpoint(plain, parse_recipe("mxfp4"), tmp_path / "other", progress=nothing)
    assert (tmp_path / "other.partial" / "mine").exists()


def test_errors_are_one_line(tmp_path):
    plain = write(tmp_path / "in", "qwen3_moe", PLAIN).path
    quantised = write(tmp_path / "int4", "qwen3_moe", STORAGES["ct-w4-g32"]).path
    out = ("--recipe", "mxfp4", "--out")
    assert_error(invoke("quantize", plain, *out, plain), "must be new or an empty folder")
    assert_error(
        invoke("quantize", plain, *out, plain / "config.json"), "must be new or an empty folder"
    )
    assert_error(invoke("quantize", quantised, *out, tmp_path / "x"), "is quantised already")
    wrong = ("--recipe", "int5-g128", "--out", tmp_path / "x")
    assert_error(invoke("quantize", plain, *wrong), "recipe: got 'int5-g128'")
    assert not (tmp_path / "x").exists()
    assert not (tmp_path / "x.partial").exists()
    (tmp_path / "empty").mkdir()
    result = invoke("quantize", plain, *out, tmp_path / "empty")
    assert result.exit_code == 0, result.output
    assert "as mxfp4" in result.stdout


def test_a_link_to_an_empty_folder_or_to_none_is_followed(tmp_path):
    plain = write(tmp_path / "in", "qwen3_moe", PLAIN).path
    (tmp_path / "empty").mkdir()
    for name in ("empty", "new"):
        link = tmp_path / f"to-{name}"
        link.symlink_to(tmp_path / name)
        quantize_checkpoint(plain, parse_recipe("nf3"), link, progress=nothing)
        assert link.is_symlink()
        assert (tmp_path / name / "config.json").is_file()


def test_a_run_that_is_stopped_before_the_rename_goes_on(tmp_path, monkeypatch):
    plain = write(tmp_path / "in", "qwen3_moe", PLAIN).path
    recipe, out = parse_recipe("nf3"), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", stopped)
        with pytest.raises(KeyboardInterrupt):
            quantize_checkpoint(plain, recipe, out, progress=nothing)
    done = quantize_checkpoint(plain, recipe, out, progress=nothing)
    assert done.kept == done.matrices
    assert not list(out.glob("firesteel-*"))


def stopped(*_args: object) -> None:
    raise KeyboardInterrupt


def test_what_cannot_be_written_is_one_line(tmp_path):
    plain = write(tmp_path / "in", "qwen3_moe", PLAIN).path
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgumentError, match=r"^out: .* cannot be written from "):
        quantize_checkpoint(plain, parse_recipe("nf3"), tmp_path / "file" / "x", progress=nothing)
