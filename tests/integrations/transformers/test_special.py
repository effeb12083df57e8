"""What single families and files have beside plain experts: ties, biases, caches, odd layers."""

import json

import pytest
import torch
from transformers import CONFIG_MAPPING

from firesteel.checkpoint.families import FAMILIES
from firesteel.errors import CheckpointError
from firesteel.integrations.transformers import PackedLinear, load_model, load_report
from tests.checkpoints import STORAGES, edit_config, oracle, write, write_tensors
from tests.integrations.transformers.compare import (
    assert_same,
    assert_same_bits,
    assert_saved,
    buffers,
    files_of,
    packed_experts,
    prompts,
)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_tied_embeddings_stay_one_tensor(tmp_path, family):
    written = write(tmp_path / "in", family, STORAGES["ct-w4-g32"], tie_word_embeddings=True)
    assert "lm_head.weight" not in written.tensors
    model = load_model(written.path, dtype=torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_same(model, oracle(written))
    load_model(written.path).save_pretrained(tmp_path / "out")
    assert_saved(tmp_path / "out", written.tensors, torch.bfloat16)


@pytest.mark.parametrize("storage", ["mxfp4-gpt-oss", "ct-w4-g32", ""])
@pytest.mark.parametrize("limit", [7.0, 0.5])
def test_gpt_oss_clamps_gate_and_up(tmp_path, storage, limit, monkeypatch):
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    if not hasattr(GptOssExperts, "_apply_gate"):
        pytest.fail("the host's experts have no _apply_gate to watch")
    given = {"storage": STORAGES[storage]} if storage else {}
    written = write(tmp_path / "in", "gpt_oss", **given, swiglu_limit=limit)
    model = load_model(written.path, dtype=torch.float32)
    reference = oracle(written)
    limits = {m.limit for m in reference.modules() if isinstance(m, GptOssExperts)}
    if limits != {limit}:
        pytest.skip(f"this transformers has the limit {limits} in its code, not in the config")
    seen: list[float] = []
    own = GptOssExperts._apply_gate

    def watched(module, gate_up):
        seen.append((gate_up.abs() > module.limit).float().mean().item())
        return own(module, gate_up)

    # The test's own watch on the oracle; taken off before the packed model runs.
    with monkeypatch.context() as patch:
        patch.setattr(GptOssExperts, "_apply_gate", watched)
        with torch.no_grad():
            reference(prompts())
    # Some numbers pass the limit of 7 and most that of a half, on both sides.
    assert max(seen) > (0.001 if limit == 7.0 else 0.5)
    assert_same(model, reference)


def test_gpt_oss_biases_are_read_and_matter(tmp_path):
    written = write(tmp_path / "in", "gpt_oss", STORAGES["mxfp4-gpt-oss"])
    model = load_model(written.path, dtype=torch.float32)
    for name, module in packed_experts(model).items():
        gate_up = written.state[f"{name}.gate_up_proj_bias"]
        wanted = torch.cat([gate_up[:, 0::2], gate_up[:, 1::2]], dim=1)
        assert torch.equal(module.gate_up_bias, wanted)
        assert torch.equal(module.down_bias, written.state[f"{name}.down_proj_bias"])
        module.down_bias.zero_()
    with torch.no_grad():
        moved = model(prompts()).logits - oracle(written)(prompts()).logits
    assert moved.abs().max() > 0.01


@pytest.mark.parametrize("storage", ["ct-w4-g32-asym", "nvfp4-modelopt"])
def test_scales_of_a_quantised_cache_are_kept_and_not_read(tmp_path, storage):
    prefix = "model.layers.1.self_attn"
    scales = {
        f"{prefix}.k_proj.k_scale": torch.tensor(0.5),
        f"{prefix}.v_proj.v_scale": torch.tensor(0.25),
    }
    written = write(tmp_path / "in", "qwen3_moe", STORAGES[storage], linears=True, added=scales)
    model = load_model(written.path, dtype=torch.float32)
    assert_same(model, oracle(written))
    load_model(written.path).save_pretrained(tmp_path / "out")
    assert_saved(tmp_path / "out", written.tensors, torch.bfloat16)


def test_scales_of_quantised_activations_are_kept_and_not_read(tmp_path):
    base = "model.layers.1.mlp.experts"
    scales = {f"{base}.{e}.up_proj.input_scale": torch.tensor(0.5) for e in range(4)}
    written = write(tmp_path / "in", "qwen3_moe", STORAGES["nvfp4-modelopt"], added=scales)
    model = load_model(written.path, dtype=torch.float32)
    assert_same(model, oracle(written))
    load_model(written.path).save_pretrained(tmp_path / "out")
    assert_saved(tmp_path / "out", written.tensors, torch.bfloat16)


def _copy_of_layer(tensors, source, target):
    """The tensors of one layer under another number, and some that only such a layer has."""
    head = f"model.layers.{source}."
    copied = {
        f"model.layers.{target}.{name.removeprefix(head)}": tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith(head)
    }
    own = {f"model.layers.{target}.eh_proj.weight": torch.zeros(128, 256, dtype=torch.bfloat16)}
    return {**copied, **own}


@pytest.mark.host
@pytest.mark.parametrize("is_plain", [False, True], ids=["quantised", "plain"])
@pytest.mark.parametrize(
    ("family", "layer"), [("deepseek_v3", 61), ("glm4_moe", 46), ("glm_moe_dsa", 78)]
)
def test_a_layer_of_token_prediction_is_left_out_and_said(tmp_path, family, layer, is_plain):
    storage = STORAGES["ct-w4-g32"]
    written = write(tmp_path / "in", family, storage, linears=True)
    donor = write(tmp_path / "plain", family) if is_plain else written
    write_tensors(written.path, {**written.tensors, **_copy_of_layer(donor.tensors, 2, layer)})
    model = load_model(written.path, dtype=torch.float32)
    assert_same(model, oracle(written))
    report = load_report(model)
    assert f"model.layers.{layer}.mlp.experts" in report.ignored
    assert sum(report.experts.values()) == 2
    assert report.host_experts == 0


def test_a_plain_layer_of_token_prediction_is_not_counted(tmp_path):
    written = write(tmp_path / "in", "deepseek_v3")
    write_tensors(written.path, {**written.tensors, **_copy_of_layer(written.tensors, 2, 61)})
    report = load_report(load_model(written.path))
    assert (report.host_experts, report.ignored) == (2, ("model.layers.61.mlp.experts",))
    assert report.experts_bf16_bytes == 2 * 3 * 6 * 128 * 64 * 2
    report = load_report(load_model(written.path, quantize="int4-g32"))
    assert report.ignored == ("model.layers.61.mlp.experts",)
    assert sum(report.experts.values()) == 2


def test_a_layer_of_token_prediction_is_known_by_the_config(tmp_path):
    storage = STORAGES["ct-w4-g32"]
    written = write(tmp_path / "in", "deepseek_v3", storage)
    more = {**_copy_of_layer(written.tensors, 2, 3), **_copy_of_layer(written.tensors, 2, 4)}
    write_tensors(written.path, {**written.tensors, **more})
    edit_config(written.path, num_nextn_predict_layers=2)
    ignored = ("model.layers.3.mlp.experts", "model.layers.4.mlp.experts")
    assert load_report(load_model(written.path)).ignored == ignored
    for count, lacking in ((1, 4), (None, 3)):
        edit_config(written.path, num_nextn_predict_layers=count)
        with pytest.raises(CheckpointError, match=rf"layers\.{lacking}\.mlp\.experts: .* no such"):
            load_model(written.path)
    edit_config(written.path, num_nextn_predict_layers="2")
    with pytest.raises(CheckpointError, match="num_nextn_predict_layers is '2', must be an integ"):
        load_model(written.path)


def test_a_layer_that_the_model_lacks_and_does_not_leave_out_is_an_error(tmp_path):
    written = write(tmp_path / "in", "deepseek_v3", STORAGES["ct-w4-g32"])
    write_tensors(written.path, {**written.tensors, **_copy_of_layer(written.tensors, 2, 7)})
    with pytest.raises(CheckpointError, match=r"layers\.7\.mlp\.experts: .* no such layer"):
        load_model(written.path)


@pytest.mark.parametrize("storage", ["ct-w4-g32", "gptq-w4-v2-asym", "awq-asym", "nvfp4-modelopt"])
def test_a_quantised_head(tmp_path, storage):
    also = ("lm_head.weight",)
    written = write(tmp_path / "in", "qwen3_moe", STORAGES[storage], also=also)
    model = load_model(written.path, dtype=torch.float32)
    assert isinstance(model.lm_head, PackedLinear)
    assert_same(model, oracle(written))
    assert torch.equal(model.get_output_embeddings().weight, written.state["lm_head.weight"])
    model = load_model(written.path)
    model.save_pretrained(tmp_path / "out")
    assert_saved(tmp_path / "out", written.tensors, torch.bfloat16)
    assert_same_bits(buffers(load_model(tmp_path / "out")), buffers(model))


def test_a_quantised_head_that_the_config_ties_is_an_error(tmp_path):
    # The host would take the embedding for it.
    written = write(tmp_path / "in", "qwen3_moe", STORAGES["ct-w4-g32"], also=("lm_head.weight",))
    edit_config(written.path, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        load_model(written.path)


@pytest.mark.host
@pytest.mark.parametrize("family", ["mixtral", "glm4_moe", "gpt_oss"])
def test_a_layer_with_plain_experts_is_the_host_s_own(tmp_path, family):
    written = write(tmp_path / "in", family, STORAGES["ct-w4-g32"], plain_layers=(1,))
    model = load_model(written.path, dtype=torch.float32)
    assert_same(model, oracle(written))
    others = {"glm4_moe": 1}.get(family, 1)
    assert len(packed_experts(model)) == others
    assert load_report(model).host_experts == 1
    model = load_model(written.path)
    model.save_pretrained(tmp_path / "out")
    assert_saved(tmp_path / "out", written.tensors, torch.bfloat16)
    assert_same_bits(buffers(load_model(tmp_path / "out")), buffers(model))


@pytest.mark.host
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v32"])
def test_weights_of_other_modules_are_expanded_and_said(tmp_path, family, dtype):
    # A router is no nn.Linear, an embedding neither; the indexer's weights_proj is kept in fp32.
    also = ("mlp.gate.weight", "embed_tokens.weight", "weights_proj.weight")
    written = write(tmp_path / "in", family, STORAGES["ct-w4-g32"], also=also)
    model = load_model(written.path, dtype=dtype)
    report = load_report(model)
    expanded = {name for name in written.schemes if ".experts." not in name}
    assert set(report.expanded) == expanded
    assert report.linears == {}
    for name in expanded:
        weight = model.get_parameter(f"{name}.weight")
        assert torch.equal(weight, written.state[f"{name}.weight"].to(weight.dtype))
    if dtype == torch.float32:
        assert_same(model, oracle(written))
    model.save_pretrained(tmp_path / "out")
    saved = files_of(tmp_path / "out")
    wanted = {key: t for key, t in written.tensors.items() if key.rpartition(".")[0] in expanded}
    assert wanted
    assert_same_bits({name: saved[name] for name in wanted}, wanted)
    assert_same_bits(buffers(load_model(tmp_path / "out", dtype=dtype)), buffers(model))


def test_shared_experts_may_be_plain_or_packed(tmp_path):
    for linears in (False, True):
        written = write(
            tmp_path / str(linears), "glm4_moe", STORAGES["gptq-w4-desc_act"], linears=linears
        )
        model = load_model(written.path, dtype=torch.float32)
        shared = model.model.layers[1].mlp.shared_experts
        assert isinstance(shared.gate_proj, PackedLinear) == linears
        assert_same(model, oracle(written))


def test_the_config_may_stand_beside_config_json(tmp_path):
    written = write(tmp_path / "in", "qwen3_moe", STORAGES["gptq-w4-v1"])
    config = json.loads((written.path / "config.json").read_text())["quantization_config"]
    wanted = buffers(load_model(written.path))
    edit_config(written.path, quantization_config=None)
    del config["quant_method"]
    (written.path / "quantize_config.json").write_text(json.dumps(config))
    assert_same_bits(buffers(load_model(written.path)), wanted)


def test_a_save_in_shards_loads_again(tmp_path):
    model = load_model(write(tmp_path / "in", "qwen3_moe", STORAGES["gptq-w3-v2"]).path)
    model.save_pretrained(tmp_path / "out", max_shard_size="50KB")
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    assert_same_bits(buffers(load_model(tmp_path / "out")), buffers(model))


@pytest.mark.parametrize("layer", ["1.self_attn.o_proj", "1.mlp.experts.2.down_proj"])
def test_biases_of_zeros_are_passed_over_where_there_is_no_place_for_them(tmp_path, layer):
    written = write(tmp_path / "in", "qwen3_moe", STORAGES["gptq-w4-v1"], linears=True)
    bias = f"model.layers.{layer}.bias"
    write_tensors(written.path, {**written.tensors, bias: torch.zeros(128)})
    assert bias not in load_model(written.path).state_dict()
    write_tensors(written.path, {**written.tensors, bias: torch.ones(128)})
    with pytest.raises(CheckpointError, match=bias):
        load_model(written.path)


@pytest.mark.parametrize("family", [name for name, f in FAMILIES.items() if f.activation is None])
def test_without_hidden_act_a_config_says_silu(family):
    assert CONFIG_MAPPING[family]().hidden_act == "silu"
