"""What the plugin's config refuses when an engine asks it; it needs vLLM, and no engine runs."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from firesteel.errors import CheckpointError, InvalidArgumentError, UnsupportedError
from firesteel.settings import Settings
from tests.checkpoints import STORAGES, write, write_tensors

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),
]

ATTENTION = "model.layers.1.self_attn"


@pytest.fixture(scope="module")
def module():
    from firesteel.integrations.vllm import config

    return config


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("vllm") / "it"
    written = write(path, "qwen3_moe", STORAGES["ct-w4-g32"], linears=True)
    scale = {f"{ATTENTION}.{name}_scale": torch.ones(1) for name in "kv"}
    write_tensors(path, {**written.tensors, **scale})
    return path


@pytest.fixture
def engine(module, monkeypatch):
    """The engine's config, as far as it is asked."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(model="it", runner_type="generate"),
        load_config=SimpleNamespace(load_format="auto"),
        speculative_config=None,
    )
    monkeypatch.setattr(module, "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(module, "get_pp_group", lambda: SimpleNamespace(is_last_rank=True))
    return config


@pytest.fixture
def config(module, path):
    made = module.FiresteelConfig.from_config({})
    made.maybe_update_config(str(path))
    return made


def test_a_wrong_variable_ends_a_model_that_firesteel_shall_load(module, monkeypatch):
    monkeypatch.setenv("FIRESTEEL_CACHE", "maybe")
    with pytest.raises(InvalidArgumentError, match="FIRESTEEL_CACHE: got 'maybe'"):
        module.FiresteelConfig.override_quantization_method({}, "firesteel")
    with pytest.raises(InvalidArgumentError, match="FIRESTEEL_CACHE: got 'maybe'"):
        module.FiresteelConfig.from_config({})
    for other in (None, "gptq"):
        assert module.FiresteelConfig.override_quantization_method({}, other) is None


def _linear():
    from vllm.model_executor.layers.linear import RowParallelLinear

    return object.__new__(RowParallelLinear)


def test_a_load_of_other_files_is_refused_with_the_first_module(config, engine):
    engine.load_config.load_format = "npcache"
    with pytest.raises(UnsupportedError, match="load_format: got 'npcache'"):
        config.get_quant_method(_linear(), f"{ATTENTION}.o_proj")


@pytest.mark.parametrize("prefix", ["", "draft_model."])
def test_quantised_modules_of_a_draft_model_are_refused(config, engine, prefix):
    assert config.get_quant_method(_linear(), f"{ATTENTION}.o_proj") is not None
    engine.model_config.runner_type = "draft"
    # One that is plain is the engine's.
    config.get_quant_method(_linear(), f"{prefix}model.layers.1.mlp.gate")
    with pytest.raises(UnsupportedError, match=f"{prefix}{ATTENTION}.o_proj of the draft model is"):
        config.get_quant_method(_linear(), f"{prefix}{ATTENTION}.o_proj")


def test_a_draft_model_is_refused_before_its_target_is_read(config, engine):
    draft = SimpleNamespace(model="other", quantization="firesteel")
    engine.speculative_config = SimpleNamespace(method="draft_model", draft_model_config=draft)
    with pytest.raises(UnsupportedError, match="got the quantised draft model other"):
        config.get_quant_method(_linear(), "lm_head")


def _expanded(config):
    """A linear of the engine's, read."""
    linear = nn.Module()
    linear.weight = nn.Parameter(torch.empty(128, 128), requires_grad=False)
    linear.weight.weight_loader = lambda weight, matrix: weight.copy_(matrix)
    linear.output_size, linear.input_size = linear.weight.shape
    config.get_quant_method(_linear(), f"{ATTENTION}.o_proj")._expand(linear)
    return linear


def test_weights_are_read_once(config, engine):
    assert config.get_checkpoint_weight_mapper().orig_to_new_regex
    _expanded(config)
    with pytest.raises(UnsupportedError, match="reload_weights: quantised weights are read once"):
        config.get_checkpoint_weight_mapper()


def _speculate(engine, method, model):
    draft = SimpleNamespace(model=model, quantization=None)
    engine.speculative_config = SimpleNamespace(method=method, draft_model_config=draft)


def test_a_plain_draft_model_that_comes_after_its_target_is_the_engine_s(config, engine):
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    _speculate(engine, "eagle", "other")
    linear = _expanded(config)
    assert not config.get_checkpoint_weight_mapper().orig_to_new_regex
    # Of the draft's own layer of this name.
    method = config.get_quant_method(_linear(), f"{ATTENTION}.o_proj")
    assert type(method) is UnquantizedLinearMethod
    # So vLLM begins to load a second time.
    linear.to("meta")
    with pytest.raises(UnsupportedError, match="reload_weights: quantised weights are read once"):
        config.get_checkpoint_weight_mapper()


def test_quantised_layers_that_predict_are_refused_where_they_are_made(config, engine):
    _speculate(engine, "mtp", "it")
    _expanded(config)
    assert config.get_quant_method(_linear(), "model.layers.1.mlp.gate") is not None
    with pytest.raises(UnsupportedError, match=f"{ATTENTION}.o_proj of the draft model is quant"):
        config.get_quant_method(_linear(), f"{ATTENTION}.o_proj")


def test_a_head_that_the_engine_ties_is_refused(module, tmp_path):
    storage = STORAGES["ct-w4-g32"]
    written = write(tmp_path / "it", "qwen3_moe", storage, also=("lm_head.weight",))
    made = module.FiresteelConfig.from_config({})
    with pytest.raises(CheckpointError, match="lm_head: quantised, but the config says tie_word_e"):
        made.maybe_update_config(str(written.path), SimpleNamespace(tie_word_embeddings=True))
    made.maybe_update_config(str(written.path), SimpleNamespace(tie_word_embeddings=False))


def _make_experts(experts, model):
    """A layer of the engine's, its weights not read."""
    ranks = SimpleNamespace(
        tp_rank=0, tp_size=1, dp_size=1, pcp_size=1, ep_size=1, enable_eplb=False,
        use_all2all_kernels=False,
    )  # fmt: skip
    method = object.__new__(experts.FiresteelExperts)
    method.moe = SimpleNamespace(
        moe_parallel_config=ranks, experts_per_token=2, in_dtype=torch.bfloat16
    )
    method.model, method._whole = model, model.contents.experts[0]
    method._settings, method._is_eager, method._layers = Settings(max_tokens=256), False, {}
    layer = SimpleNamespace(
        layer_name="it", expert_map=None, apply_router_weight_on_input=False,
        activation=SimpleNamespace(name="SILU", value="silu"), swiglu_limit=None,
    )  # fmt: skip
    sizes = model.contents.geometry
    method.create_weights(
        layer, sizes.num_experts, sizes.hidden_size, sizes.intermediate_size, torch.bfloat16
    )


def test_a_workspace_without_room_is_refused_before_weights_are_read(config, engine, monkeypatch):
    from firesteel.integrations.vllm import experts, model

    monkeypatch.setattr(experts, "why_no_kernels", lambda *_, **__: None)
    monkeypatch.setattr(experts, "workspace_bytes", lambda *_, max_tokens, **__: 4 * max_tokens)
    monkeypatch.setattr(model, "free_bytes", lambda _: 1023)
    _make_experts(experts, config.model)
    with pytest.raises(UnsupportedError, match=r"max_num_batched_tokens: got 256, .* 1,024 bytes"):
        config.get_checkpoint_weight_mapper()
    monkeypatch.setattr(model, "free_bytes", lambda _: 1024)
    config.get_checkpoint_weight_mapper()
    monkeypatch.setattr(model, "free_bytes", lambda _: 0)
    # Once: later much of it is taken by weights that were counted.
    config.get_checkpoint_weight_mapper()


def test_layers_without_kernels_end_a_model_with_graphs_when_they_are_made(config, monkeypatch):
    from firesteel.integrations.vllm import experts

    _make_experts(experts, config.model)
    monkeypatch.setattr(experts, "check_graphs", lambda why, *_, **given: pytest.fail(why[0]))
    with pytest.raises(pytest.fail.Exception, match="device: cpu, kernels need a CUDA device"):
        _make_experts(experts, config.model)


def test_a_checkpoint_is_of_the_revision_that_the_engine_has(module, monkeypatch):
    asked = []

    def refuse(*given):
        asked.append(given)
        raise CheckpointError("here")

    monkeypatch.setattr(module.Model, "open", refuse)
    for hf_config in (SimpleNamespace(_commit_hash="abc"), SimpleNamespace()):
        with pytest.raises(CheckpointError, match="here"):
            module.FiresteelConfig.from_config({}).maybe_update_config("it", hf_config, "main")
    assert asked == [("it", "abc"), ("it", "main")]
    monkeypatch.setenv("FIRESTEEL_VLLM", "auto")
    monkeypatch.setattr(module, "why_not", lambda *given: asked.append(given) or "no")
    theirs = SimpleNamespace(name_or_path="it", model_type="qwen3_moe", _commit_hash="abc")
    assert module.FiresteelConfig.override_quantization_method({}, None, theirs) is None
    assert asked[-1] == ("it", {}, "qwen3_moe", "abc")


def test_a_bundle_that_cannot_be_opened_ends_a_model_before_it_is_read(
    module, tmp_path, monkeypatch
):
    (tmp_path / "manifest.json").write_text("{}")
    monkeypatch.setenv("FIRESTEEL_BUNDLE", str(tmp_path))
    with pytest.raises(InvalidArgumentError, match=r"bundle: .* has no readable manifest"):
        module.FiresteelConfig.from_config({})


def test_scales_of_a_cache_are_warned_of(module, config, engine, monkeypatch):
    said = []

    def say(text, *given):
        said.append(text % given)

    log = SimpleNamespace(info_once=say, warning_once=say)
    monkeypatch.setattr(module, "log", log)
    config.get_checkpoint_weight_mapper()
    first = f"{ATTENTION}.k_scale"
    assert said == [
        "firesteel reads 0 layers of experts, which stay packed, and 0 linears, which are expanded",
        f"2 scales of the KV cache in the checkpoint are not read, first {first}",
    ]
