"""Loading what cannot be right: one of our errors, which names the tensor or the field."""

import re

import pytest
import torch
from safetensors.torch import load_file

from firesteel.errors import CheckpointError, InvalidArgumentError, UnsupportedError
from firesteel.integrations.transformers import firesteel_config, load_model
from tests.checkpoints import STORAGES, edit_config, write, write_tensors

EXPERT = "model.layers.1.mlp.experts.2.up_proj"
FUSED = "model.layers.1.mlp.experts"


def rewrite(path, **tensors):
    """Change tensors of a checkpoint, or (None) take them away."""
    own = {**load_file(path / "model.safetensors"), **tensors}
    write_tensors(path, {name: tensor for name, tensor in own.items() if tensor is not None})


def changed_at(path, name, place, value):
    tensor = load_file(path / "model.safetensors")[name].clone()
    tensor[place] = value
    rewrite(path, **{name: tensor})


@pytest.mark.host
@pytest.mark.parametrize("storage", ["ct-w4-g32", ""])
@pytest.mark.parametrize(
    "name",
    [
        "model.norm.weight",
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.mlp.gate.weight",
        "model.layers.2.self_attn.q_proj.weight",
    ],
)
def test_a_tensor_of_the_host_s_own_is_never_left_random(tmp_path, storage, name):
    given = {"storage": STORAGES[storage]} if storage else {}
    path = write(tmp_path / "in", "qwen3_moe", **given).path
    weight = load_file(path / "model.safetensors")[name]
    rewrite(path, **{name: None})
    with pytest.raises(CheckpointError, match=f"lacks 1 .* first {re.escape(name)}"):
        load_model(path)
    rewrite(path, **{name: torch.cat([weight, weight])})
    with pytest.raises(CheckpointError, match=r"differs from the config|the config gives"):
        load_model(path)


def test_a_missing_quantised_linear_is_an_error(tmp_path):
    path = write(tmp_path / "in", "qwen3_moe", STORAGES["ct-w4-g32"], linears=True).path
    layer = "model.layers.1.self_attn.k_proj"
    own = load_file(path / "model.safetensors")
    rewrite(path, **{name: None for name in own if name.startswith(layer)})
    with pytest.raises(CheckpointError, match=re.escape(f"{layer}.weight")):
        load_model(path)


def test_a_quantised_linear_of_another_shape_or_place_is_an_error(tmp_path):
    path = write(tmp_path / "in", "qwen3_moe", STORAGES["ct-w4-g32"], linears=True).path
    own = load_file(path / "model.safetensors")
    head, wrong = "model.layers.1.self_attn.k_proj", "model.layers.1.self_attn.q_proj"
    moved = {f"{head}.{key}": own[f"{wrong}.{key}"] for key in ("weight_packed", "weight_scale")}
    moved[f"{head}.weight_shape"] = own[f"{wrong}.weight_shape"]
    rewrite(path, **moved)
    with pytest.raises(CheckpointError, match=r"k_proj: stored as \[128, 128\], .* \[64, 128\]"):
        load_model(path)
    rewrite(path, **{name: own[name] for name in moved})
    other = {f"model.side.{name.rpartition('.')[2]}": own[name] for name in moved}
    rewrite(path, **other)
    with pytest.raises(CheckpointError, match=r"model\.side: .* no such layer"):
        load_model(path)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("storage", "suffix"),
    [
        ("ct-w4-g32", "weight_scale"),
        ("ct-w8-channel", "weight_scale"),
        ("gptq-w4-v1", "scales"),
        ("awq-asym", "scales"),
        ("auto-round-gptq", "scales"),
        ("nvfp4", "weight_global_scale"),
        ("nvfp4-modelopt", "weight_scale_2"),
    ],
)
def test_a_scale_that_is_no_number_is_an_error(tmp_path, storage, suffix, number):
    path = write(tmp_path / "in", "qwen3_moe", STORAGES[storage]).path
    name = f"{EXPERT}.{suffix}"
    place = () if suffix.endswith("_2") else (0,)
    changed_at(path, name, place, number)
    with pytest.raises(CheckpointError, match=rf"{re.escape(EXPERT)}: {suffix}.* must be finite"):
        load_model(path)


@pytest.mark.parametrize(("storage", "family"), [("mxfp4", "olmoe"), ("mxfp4-gpt-oss", "gpt_oss")])
def test_a_power_of_two_that_is_no_number_is_an_error(tmp_path, storage, family):
    path = write(tmp_path / "in", family, STORAGES[storage]).path
    name = f"{EXPERT}.weight_scale" if family == "olmoe" else f"{FUSED}.down_proj_scales"
    changed_at(path, name, (0, 0), 255)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\..*must be finite"):
        load_model(path)


def test_a_divisor_of_zero_is_an_error(tmp_path):
    path = write(tmp_path / "in", "qwen3_moe", STORAGES["nvfp4"]).path
    changed_at(path, f"{EXPERT}.weight_global_scale", 0, 0.0)
    with pytest.raises(CheckpointError, match=r"weight_global_scale: got 0\.0, .* not zero"):
        load_model(path)


@pytest.mark.parametrize("group", [-1, 4, 2**31 - 1, -(2**31), 1])
@pytest.mark.parametrize(("storage", "suffix"), [("gptq-w4-desc_act", "g_idx")])
def test_an_index_of_groups_must_fill_each(tmp_path, storage, suffix, group):
    path = write(tmp_path / "in", "qwen3_moe", STORAGES[storage]).path
    name = f"{EXPERT}.{suffix}"
    index = load_file(path / "model.safetensors")[name]
    place = int((index != group).nonzero()[0])
    changed_at(path, name, place, group)
    with pytest.raises(CheckpointError, match=rf"{re.escape(EXPERT)}: {suffix}: got "):
        load_model(path)


def test_the_shape_that_a_file_states_is_compared(tmp_path):
    path = write(tmp_path / "in", "qwen3_moe", STORAGES["ct-w4-g32"]).path
    changed_at(path, f"{EXPERT}.weight_shape", 1, 96)
    with pytest.raises(CheckpointError, match=rf"{re.escape(EXPERT)}: weight_shape: got \[64, 96"):
        load_model(path)


@pytest.mark.host
@pytest.mark.parametrize(
    "fields",
    [
        {"num_key_value_heads": 0},
        {"head_dim": "x"},
        {"rope_parameters": {"rope_type": ["a"], "rope_theta": 1.0}},
        {"dtype": "no_dtype"},
        {"id2label": 7},
        {"pad_token_id": {}},
        {"vocab_size": 10**30},
        {"layer_types": ["no_type"] * 3},
    ],
    ids=str,
)
def test_a_field_that_the_host_cannot_use_is_an_error(tmp_path, fields):
    for storage in ({}, {"storage": STORAGES["ct-w4-g32"]}):
        path = write(tmp_path / f"in{len(storage)}", "qwen3_moe", **storage).path
        edit_config(path, **fields)
        with pytest.raises(CheckpointError, match=r"config\.json: transformers cannot make"):
            load_model(path)


def test_every_call_checks_before_the_host_is_asked(tmp_path):
    path = write(tmp_path / "in", "qwen3_moe", STORAGES["ct-w4-g32"]).path
    rewrite(path, **{f"{EXPERT}.weight_scale": None})
    for call in (load_model, firesteel_config):
        with pytest.raises((CheckpointError, UnsupportedError), match=re.escape(EXPERT)):
            call(path)
        with pytest.raises(InvalidArgumentError, match="must be a folder or a hub name"):
            call(tmp_path / "nothing here")
    edit_config(path, model_type="llama")
    with pytest.raises(UnsupportedError, match="supported families are deepseek_v3"):
        load_model(path)


def test_files_that_the_host_chooses_otherwise_are_an_error(tmp_path):
    path = write(tmp_path / "in", "qwen3_moe", STORAGES["ct-w4-g32"]).path
    (path / "other.safetensors").write_bytes((path / "model.safetensors").read_bytes())
    edit_config(path, transformers_weights="other.safetensors")
    with pytest.raises(CheckpointError, match=r"transformers reads .*other.* firesteel .*model"):
        load_model(path)


def test_no_tokens_and_experts_that_are_not_here_give_zeros(tmp_path):
    model = load_model(write(tmp_path / "in", "qwen3_moe", STORAGES["nvfp4"]).path)
    experts = model.model.layers[1].mlp.experts
    x = torch.ones(3, 128, dtype=torch.bfloat16)
    ids = torch.tensor([[4, -1], [10**9, 4], [-(2**40), 2**40]])
    gates = torch.ones(3, 2)
    assert torch.equal(experts(x, ids, gates), torch.zeros_like(x))
    assert experts(x[:0], ids[:0], gates[:0]).shape == (0, 128)
    with pytest.raises(InvalidArgumentError, match=r"x: got .* must be floating point \[M, 128\]"):
        experts(x[:, :64], ids, gates)


def test_a_pickle_beside_the_files_is_not_read(tmp_path):
    path = write(tmp_path / "in", "qwen3_moe", STORAGES["ct-w4-g32"]).path
    (path / "pytorch_model.bin").write_bytes(b"not a pickle")
    load_model(path)
    (path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="pickled weights"):
        load_model(path)
    with pytest.raises(CheckpointError, match="pickled weights"):
        firesteel_config(path)


@pytest.mark.parametrize("content", ["{", "[]", "7"])
def test_a_bad_generation_config_is_an_error(tmp_path, content):
    path = write(tmp_path / "in", "qwen3_moe", STORAGES["ct-w4-g32"]).path
    (path / "generation_config.json").write_text('{"eos_token_id": 3}')
    assert load_model(path).generation_config.eos_token_id == 3
    (path / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"generation_config\.json: transformers cannot read"):
        load_model(path)
