"""What would load to other numbers than the file means is refused; what is odd and right is not."""

import re

import pytest
import torch
from safetensors.torch import load_file

from firesteel.errors import CheckpointError, InvalidArgumentError, UnsupportedError
from firesteel.integrations.transformers import firesteel_config, load_model
from tests.checkpoints import STORAGES, edit_config, write, write_tensors


def add(path, **tensors):
    """Add tensors to a checkpoint, or (None) take them away."""
    own = {**load_file(path / "model.safetensors"), **tensors}
    write_tensors(path, {name: tensor for name, tensor in own.items() if tensor is not None})


@pytest.mark.parametrize("storage", ["mxfp4-gpt-oss", ""])
def test_fused_experts_under_two_prefixes(tmp_path, storage):
    given = {"storage": STORAGES[storage]} if storage else {}
    path = write(tmp_path / "in", "gpt_oss", **given).path
    own = load_file(path / "model.safetensors")
    twins = {"zz." + name: own[name] * 0 for name in own if ".mlp.experts.gate_up_proj" in name}
    add(path, **twins)
    with pytest.raises(CheckpointError, match="unexpected beside"):
        load_model(path)


def test_act_order_without_its_index(tmp_path):
    path = write(tmp_path / "in", "qwen3_moe", STORAGES["ct-w4-actorder"]).path
    own = load_file(path / "model.safetensors")
    add(path, **{name: None for name in own if name.endswith("weight_g_idx")})
    with pytest.raises(CheckpointError, match="weight_g_idx"):
        load_model(path)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "model.layers.0.self_attn.q_proj.bias",
            torch.ones(64),
            "no place for, first .*q_proj.bias",
        ),
        ("model.layers.0.foo.weight", torch.ones(2), r"no place for, first .*foo.weight"),
        ("layers.0.input_layernorm.weight", torch.zeros(64), r"unexpected beside model.layers.0"),
        ("model.layers.0.foo.weight", torch.ones(2).char(), "dtype torch.int8 is of no format"),
    ],
)
def test_tensors_that_the_model_would_leave_out(tmp_path, name, value, message):
    path = write(tmp_path / "in", "qwen3_moe", STORAGES["ct-w4-g32"]).path
    add(path, **{name: value})
    with pytest.raises(CheckpointError, match=message):
        load_model(path)


def test_unexpected_tensors_may_be_allowed_and_a_bias_of_zeros_is(tmp_path):
    path = write(tmp_path / "in", "qwen3_moe", STORAGES["ct-w4-g32"], linears=True).path
    add(path, **{"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)})
    load_model(path)
    add(path, **{"model.layers.0.foo.weight": torch.ones(2)})
    load_model(path, allow_unexpected=True)


def test_a_plain_weight_of_eight_bits(tmp_path):
    path = write(tmp_path / "in", "qwen3_moe", STORAGES["ct-w4-g32"]).path
    name = "model.layers.0.self_attn.q_proj.weight"
    eight = load_file(path / "model.safetensors")[name].to(torch.float8_e4m3fn)
    add(path, **{name: eight})
    with pytest.raises(CheckpointError, match=re.escape(f"tensor {name}: dtype")):
        load_model(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("transform_config", {"config_groups": {"R1": {"type": "hadamard", "apply": []}}}),
        ("sparsity_config", {"format": "sparse-24-bitmask"}),
    ],
)
def test_rotations_and_sparsity(tmp_path, key, value):
    path = write(tmp_path / "in", "qwen3_moe", STORAGES["ct-w4-g32"]).path
    quantization = firesteel_config(path).quantization_config["checkpoint"]
    edit_config(path, quantization_config={**quantization, key: value})
    with pytest.raises(UnsupportedError, match=f"quantization_config.{key}: got"):
        load_model(path)


def test_a_divisor_that_makes_infinite_weights(tmp_path):
    path = write(tmp_path / "in", "qwen3_moe", STORAGES["nvfp4"]).path
    name = "model.layers.1.mlp.experts.0.down_proj.weight_global_scale"
    add(path, **{name: torch.tensor([1e-45])})
    with pytest.raises(CheckpointError, match=r"weight_global_scale: got .* not finite"):
        load_model(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"revision": "v1"}, "revision: got 'v1', must be None for the folder"),
        ({"device": "meta"}, "device: got 'meta'"),
        ({"device": "bogus"}, "device: got 'bogus'"),
        ({"device": "cuda:99"}, "device: got 'cuda:99', there are"),
        ({"dtype": "bogus"}, "dtype: got 'bogus', must be auto, bfloat16"),
        ({"dtype": torch.float64}, "dtype: got torch.float64"),
        ({"config": None}, "config: got None, load_model sets it"),
        ({"experts_implementation": "eager"}, "experts_implementation: got 'eager'"),
        ({"quantize": "int4-g32"}, "quantize: got 'int4-g32', the checkpoint is quantised"),
    ],
)
def test_options(tmp_path, options, message):
    path = write(tmp_path / "in", "qwen3_moe", STORAGES["ct-w4-g32"]).path
    with pytest.raises(InvalidArgumentError, match=message):
        load_model(path, **options)


def test_the_older_name_of_dtype_counts(tmp_path):
    path = write(tmp_path / "in", "qwen3_moe", STORAGES["ct-w4-g32"]).path
    assert load_model(path, torch_dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize("top_k", [9, 0, "two"])
def test_more_experts_a_token_than_there_are(tmp_path, top_k):
    path = write(tmp_path / "in", "qwen3_moe", STORAGES["ct-w4-g32"]).path
    edit_config(path, num_experts_per_tok=top_k)
    with pytest.raises(CheckpointError, match=r"config.json: .*num_experts_per_tok"):
        load_model(path)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_reach_the_input(tmp_path, family, dtype):
    path = write(tmp_path / "in", family, STORAGES["ct-w4-g32"]).path
    model = load_model(path, dtype=dtype)
    hidden = model.get_input_embeddings()(torch.tensor([[1, 2, 3]])).detach().requires_grad_()
    model(inputs_embeds=hidden).logits.float().sum().backward()
    assert hidden.grad is not None
    assert bool(hidden.grad.isfinite().all())
    assert bool(hidden.grad.any())


def test_expanded_modules_save_without_the_original(tmp_path):
    written = write(
        tmp_path / "in", "deepseek_v3", STORAGES["ct-w4-g32"], also=("mlp.gate.weight",)
    )
    model = load_model(written.path)
    assert model.hf_quantizer.report.expanded
    before = load_file(written.path / "model.safetensors")
    (written.path / "model.safetensors").unlink()
    model.save_pretrained(tmp_path / "out")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert set(after) == set(before)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_plain_checkpoint_through_from_pretrained_saves_and_loads(tmp_path):
    from transformers import AutoModelForCausalLM

    path = write(tmp_path / "in", "qwen3_moe").path
    model = AutoModelForCausalLM.from_pretrained(path, config=firesteel_config(path))
    model.save_pretrained(tmp_path / "out")
    again = load_model(tmp_path / "out")
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, again(ids).logits)
