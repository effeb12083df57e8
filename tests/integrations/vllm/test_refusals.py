"""What the plugin's config refuses when an engine asks it; it needs vLLM, and no engine runs."""

from types import SimpleNamespace

import pytest
import torch

from firesteel.errors import InvalidArgumentError, UnsupportedError
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


def test_weights_are_read_once(config, engine):
    config.get_checkpoint_weight_mapper()
    config.model.is_read = True
    with pytest.raises(
        UnsupportedError, match="are read once; the engine has dropped its own, start"
    ):
        config.get_checkpoint_weight_mapper()


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
