"""What the plugin finds of a checkpoint by the engine's names; vLLM is not needed."""

import re

import pytest
import torch

from firesteel.checkpoint import Checkpoint, scan
from firesteel.errors import CheckpointError
from firesteel.integrations.vllm.model import Model, why_not
from tests.checkpoints import FAMILY_NAMES, STORAGES, edit_config, write, write_tensors

EXPERTS = "model.layers.1.mlp.experts"
ATTENTION = "model.layers.1.self_attn"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("vllm") / "it"
    return write(path, "qwen3_moe", STORAGES["ct-w4-g32"], linears=True)


@pytest.fixture
def model(written) -> Model:
    return Model.open(str(written.path))


def test_experts_and_linears_are_found_by_the_names_of_modules(model):
    experts = model.experts(EXPERTS)
    assert experts is not None
    assert experts.prefix == EXPERTS
    assert model.experts("model.layers.0.mlp.experts") is None
    merged = model.linears(f"{ATTENTION}.qkv_proj", {"qkv_proj": ["q_proj", "k_proj", "v_proj"]})
    assert [s.layer for s in merged] == [f"{ATTENTION}.{p}_proj" for p in "qkv"]
    # An engine's model may not say in time what it merges.
    assert model.linears(f"{ATTENTION}.qkv_proj", {}) == merged
    (one,) = model.linears(f"{ATTENTION}.o_proj", {})
    assert one is not None
    assert one.layer == f"{ATTENTION}.o_proj"
    assert model.linears("lm_head", {}) == (None,)


def test_names_are_the_engine_s(model):
    model.rename = lambda name: name.replace("model.", "language_model.")
    assert model.experts(EXPERTS) is None
    assert model.experts(EXPERTS.replace("model.", "language_model.")) is not None


def test_what_no_module_takes_is_an_error_in_a_layer_that_was_made(model):
    model.check_taken(has_head=True)
    model.experts(EXPERTS)
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.\w+: quantised in the check"):
        model.check_taken(has_head=True)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        model.linears(f"{ATTENTION}.{name}", {})
    # Layers 0 and 2 belong to other ranks.
    model.check_taken(has_head=True)


def test_a_layer_under_another_name_is_an_error_too(model):
    assert model.experts(f"language_{EXPERTS}") is None
    with pytest.raises(CheckpointError, match=rf"{EXPERTS}: quantised in the checkpoint"):
        model.check_taken(has_head=True)


def test_a_head_that_the_engine_makes_plain_is_an_error_where_it_is(tmp_path):
    path = write(tmp_path / "it", "gpt_oss", STORAGES["ct-w4-g32"], also=("lm_head.weight",)).path
    model = Model.open(str(path))
    for layer in (0, 1):
        model.experts(f"model.layers.{layer}.mlp.experts")
    model.check_taken(has_head=False)
    with pytest.raises(CheckpointError, match="lm_head: quantised in the checkpoint"):
        model.check_taken(has_head=True)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_checkpoint_that_lacks_any_tensor_is_refused(tmp_path, family):
    storage = STORAGES["nf3" if family == "gpt_oss" else "ct-w4-g32"]
    written = write(tmp_path / "it", family, storage, linears=family != "gpt_oss")
    # Older checkpoints hold it, and every host computes it.
    computed = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    scale = {"model.layers.0.self_attn.k_scale": torch.ones(1)}
    write_tensors(written.path, {**written.tensors, **computed, **scale})
    Model.open(str(written.path)).check_complete()
    own = {n: t for n, t in written.tensors.items() if ".experts." not in n}
    # One of each kind, in the last layer that has it.
    kinds = {re.sub(r"\d+", "", name): name for name in sorted(own)}
    for name in kinds.values():
        packed = any(name.startswith(f"{layer}.") for layer in written.schemes)
        left = {n: t for n, t in written.tensors.items() if n != name}
        if packed:
            layer = name.rpartition(".")[0]
            left = {n: t for n, t in left.items() if not n.startswith(f"{layer}.")}
        write_tensors(written.path, left)
        with pytest.raises(CheckpointError, match=r"lacks \d tensor"):
            Model.open(str(written.path)).check_complete()


def test_patterns_match_what_is_read_and_nothing_else(written, model):
    read = {name for s in model.contents.dense for name in s.tensors.values()}
    read |= {name for name in written.tensors if f"{EXPERTS}." in name or "2.mlp.experts." in name}
    matched = {n for n in written.tensors if any(p.search(n) for p in model.patterns)}
    assert matched == read
    assert any("norm" in name for name in written.tensors.keys() - matched)
    assert not any(p.search(f"draft.{name}") for p in model.patterns for name in read)


def test_why_a_checkpoint_is_left_alone(written, tmp_path):
    config = Checkpoint.open(written.path).quantization
    assert config
    assert why_not(str(written.path), config, "qwen3_moe") is None
    assert "model_type: got 'llama'" in str(why_not(str(written.path), config, "llama"))
    fp8 = {"quant_method": "fp8"}
    assert "quant_method 'fp8'" in str(why_not(str(written.path), fp8, "qwen3_moe"))
    none = write(tmp_path / "a", "qwen3_moe", STORAGES["ct-w4-g32"], plain_layers=(0, 1, 2),
                 linears=True)  # fmt: skip
    assert why_not(str(none.path), config, "qwen3_moe") == "experts: none is quantised"
    broken = write(tmp_path / "b", "qwen3_moe", STORAGES["ct-w4-g32"])
    edit_config(broken.path, num_experts=5)
    reason = why_not(str(broken.path), config, "qwen3_moe")
    with pytest.raises(CheckpointError) as error:
        scan(Checkpoint.open(broken.path))
    assert reason == str(error.value)


def test_the_report_says_what_was_packed(model):
    model.linears(f"{ATTENTION}.qkv_proj", {})
    assert model.as_dict() == {"layers": 0, "bytes": 0, "expanded_linears": 3, "kernels": None}


def test_a_quantised_head_that_the_config_ties_is_refused(tmp_path):
    tied = write(tmp_path / "it", "qwen3_moe", STORAGES["ct-w4-g32"], also=("lm_head.weight",))
    model = Model.open(str(tied.path))
    (head,) = model.linears("lm_head", {})
    assert head is not None
    edit_config(tied.path, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"lm_head: quantised, but the config says tie"):
        Model.open(str(tied.path))


def test_files_that_the_engine_alone_would_read_are_refused(tmp_path):
    one = write(tmp_path / "a", "qwen3_moe", STORAGES["ct-w4-g32"]).path
    many = write(tmp_path / "b", "qwen3_moe", STORAGES["ct-w4-g32"], num_shards=2).path
    shards = sorted(file.name for file in many.glob("*.safetensors"))
    (many / "other.safetensors").write_bytes(b"")
    Model.open(str(many))
    stale = one / "model-00001-of-00002.safetensors"
    stale.write_bytes((many / shards[0]).read_bytes())
    with pytest.raises(
        CheckpointError, match=rf"one reader alone would take \(vLLM {stale.name}\)"
    ):
        Model.open(str(one))
    for file in many.glob("model*"):
        (one / file.name).write_bytes(file.read_bytes())
    both = rf"\(firesteel model.safetensors; vLLM {', '.join(shards)}\)"
    with pytest.raises(CheckpointError, match=both):
        Model.open(str(one))


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        ("model.norm.weight", torch.ones(64), r"shape \[64\], the config gives \[128\]"),
        ("lm_head.weight", torch.ones(95, 128), r"shape \[95, 128\], the config gives \[96, 128\]"),
        ("model.layers.1.mlp.gate.weight", torch.ones(3, 128), r"shape \[3, 128\], .* \[4, 128\]"),
        (f"{ATTENTION}.sinks", torch.zeros(4), rf"no place for, first {ATTENTION}.sinks"),
        (f"{ATTENTION}.q_proj.bias", torch.ones(128), rf"first {ATTENTION}.q_proj.bias"),
        (f"{ATTENTION}.q_proj.bias", torch.zeros(128), None),
        (
            f"{EXPERTS}.1.up_proj.bias",
            torch.ones(64),
            rf"{EXPERTS}.1.up_proj.bias: holds other num",
        ),
        (f"{EXPERTS}.1.up_proj.bias", torch.zeros(64), None),
    ],
)
def test_plain_tensors_that_are_not_the_model_s_are_refused(
    written, tmp_path, name, tensor, reason
):
    (tmp_path / "config.json").write_bytes((written.path / "config.json").read_bytes())
    write_tensors(tmp_path, {**written.tensors, name: tensor})
    model = Model.open(str(tmp_path))
    if reason is None:
        model.check_complete()
        return
    with pytest.raises(CheckpointError, match=reason):
        model.check_complete()


def test_more_experts_a_token_than_there_are_is_an_error(written, tmp_path):
    for file in written.path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    edit_config(tmp_path, num_experts_per_tok=9)
    model = Model.open(str(tmp_path))
    with pytest.raises(CheckpointError, match="num_experts_per_tok is 9, must be from 1 to the 4"):
        model.check_complete()
