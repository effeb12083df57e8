"""EXL3 checkpoints through the main job: inspected, loaded, run, saved, refused."""

import pytest
import torch
from safetensors.torch import load_file

from firesteel.checkpoint import Checkpoint, scan
from firesteel.errors import CheckpointError, UnsupportedError
from firesteel.formats.trellis_weights import TrellisWeights
from firesteel.integrations.transformers import PackedLinear, load_model, load_report
from tests.checkpoints import STORAGES, edit_config, oracle, write, write_tensors
from tests.cli.command import invoke_json
from tests.integrations.transformers.compare import (
    assert_same,
    assert_same_bits,
    assert_saved,
    buffers,
    packed_experts,
)

EXPERT = "model.layers.1.mlp.experts.0.down_proj"


# Signs alone make weights of order one; in every linear layer, that drowns rounding.
@pytest.mark.parametrize(
    ("storage", "linears"), [("exl3-mixed", True), ("exl3-4-3inst-signs", False)]
)
def test_experts_and_linears_are_loaded_and_saved_bit_for_bit(tmp_path, storage, linears):
    written = write(tmp_path / "in", "glm_moe_dsa", STORAGES[storage], linears=linears)
    model = load_model(written.path, dtype=torch.float32)
    assert_same(model, oracle(written))
    report = load_report(model)
    assert bool(report.linears) == linears
    assert report.backend == "torch"
    for module in packed_experts(model).values():
        assert isinstance(module.gate_up, TrellisWeights)
    model = load_model(written.path)
    model.save_pretrained(tmp_path / "out")
    assert_saved(tmp_path / "out", written.tensors, torch.bfloat16)
    again = load_model(tmp_path / "out")
    assert_same_bits(buffers(again), buffers(model))


def test_a_layer_may_have_experts_of_several_rates(tmp_path):
    written = write(tmp_path / "in", "olmoe", STORAGES["exl3-mixed"])
    (name,) = load_report(load_model(written.path)).experts
    rates = {scheme.element for scheme in written.schemes.values()}
    assert len(rates) == 6
    assert set(name.removeprefix("exl3 ").split(" / exl3 ")) == rates


def test_inspect_lists_every_rate(tmp_path):
    path = write(tmp_path / "in", "qwen3_moe", STORAGES["exl3-mixed"]).path
    found = invoke_json("inspect", path)
    assert found["quant_method"] == "exl3"
    assert {(entry["element"], entry["bits"]) for entry in found["experts"]} == {
        (f"trellis{bits}-{codebook}", float(bits))
        for bits, codebook in (
            *(("1", "mcg"), ("2", "mcg"), ("6", "mcg")),
            *(("3", "3inst"), ("4", "mul1"), ("5.5", "mul1")),
        )
    }
    for entry in found["experts"]:
        assert entry["group_size"] is None
        assert entry["packed_bytes"] <= entry["file_bytes"]


def test_a_call_with_a_gradient_is_differentiated(tmp_path):
    model = load_model(
        write(tmp_path / "in", "qwen3_moe", STORAGES["exl3-3-mcg"]).path, dtype=torch.float32
    )
    (module, *_) = packed_experts(model).values()
    x = torch.randn(3, 128, requires_grad=True)
    ids = torch.tensor([[0, 1], [2, 3], [1, 3]])
    module(x, ids, torch.rand(3, 2)).square().sum().backward()
    assert x.grad is not None
    assert bool(x.grad.isfinite().all())
    assert float(x.grad.norm()) > 0


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"suh": None}, CheckpointError, rf"{EXPERT}\.suh: missing"),
        ({"trellis": None}, CheckpointError, rf"{EXPERT}\.trellis: missing, got only"),
        (
            {"trellis": torch.zeros(8, 8, 47, dtype=torch.int16)},
            UnsupportedError,
            rf"{EXPERT}\.trellis: got shape \[8, 8, 47\]",
        ),
        (
            {"trellis": torch.zeros(16, 8, 48, dtype=torch.int16)},
            CheckpointError,
            rf"{EXPERT}\.suh: got float16 \[128\], expected float16 \[256\]",
        ),
        ({"mcg": torch.tensor(7, dtype=torch.int32)}, CheckpointError, f"{EXPERT}: mcg: got 0x7"),
        ({"mcg3": torch.tensor(7, dtype=torch.int32)}, CheckpointError, rf"{EXPERT}\.mcg3"),
        ({"svh": torch.full((128,), torch.nan).half()}, CheckpointError, f"{EXPERT}: svh.*finite"),
    ],
    ids=[
        "no scales",
        "no tiles",
        "another rate",
        "another size",
        "marker",
        "unknown marker",
        "nan",
    ],
)
def test_what_is_not_exl3_is_refused_by_name(tmp_path, change, error, words):
    path = write(tmp_path / "in", "qwen3_moe", STORAGES["exl3-3-mcg"]).path
    tensors = load_file(path / "model.safetensors")
    for suffix, tensor in change.items():
        if tensor is None:
            del tensors[f"{EXPERT}.{suffix}"]
        else:
            tensors[f"{EXPERT}.{suffix}"] = tensor
    write_tensors(path, tensors)
    with pytest.raises(error, match=words):
        load_model(path)


def test_a_call_of_a_linear_in_another_dtype_is_warned_of_once(tmp_path, caplog):
    path = write(tmp_path / "in", "qwen3_moe", STORAGES["exl3-3-mcg"], linears=True).path
    model = load_model(path, device="cpu")
    linear = next(m for m in model.modules() if isinstance(m, PackedLinear))
    other = torch.float32 if linear.dtype != torch.float32 else torch.bfloat16
    x = torch.randn(3, linear.in_features)
    plain = linear(x.to(other))
    assert caplog.text == ""
    linear.kernels = lambda rows: torch.full((len(rows), linear.out_features), 7.0)
    with torch.no_grad():
        assert (linear(x.to(linear.dtype)) == 7).all()
        assert caplog.text == ""
        for _ in range(2):
            assert torch.equal(linear(x.to(other)), plain)
    (record,) = caplog.records
    assert f"kernels take {linear.dtype}: its calls in {other}" in record.getMessage()


def test_a_model_of_another_size_is_refused(tmp_path):
    path = write(tmp_path / "in", "qwen3_moe", STORAGES["exl3-3-mcg"]).path
    edit_config(path, moe_intermediate_size=192)
    with pytest.raises(CheckpointError, match=r"stored as \[128, 128\], the config gives"):
        load_model(path)


def test_a_linear_layer_without_its_tiles_is_not_taken_for_plain(tmp_path):
    path = write(tmp_path / "in", "qwen3_moe", STORAGES["exl3-3-mcg"], linears=True).path
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.self_attn.q_proj.trellis"]
    write_tensors(path, tensors)
    with pytest.raises(CheckpointError, match=r"self_attn\.q_proj\.trellis: missing, got only"):
        scan(Checkpoint.open(path))


@pytest.mark.parametrize("storage", ["exl3-3-mcg", "gptq-w4-v1", "nf3", "mxfp4"])
def test_a_config_that_does_not_say_how_weights_are_stored_is_named(tmp_path, storage):
    path = write(tmp_path / "in", "qwen3_moe", STORAGES[storage]).path
    edit_config(path, quantization_config=None)
    name = STORAGES[storage].format
    words = rf"experts\.0\.gate_proj: got tensors \[.*\] of {name}.*, and no quantization_config"
    for read in (lambda: scan(Checkpoint.open(path)), lambda: load_model(path)):
        with pytest.raises(CheckpointError, match=words):
            read()
