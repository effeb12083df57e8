"""What the plugin uses of vLLM is there; also of the GPU build, which a CPU can import, not run."""

import inspect
import re
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

pytestmark = [
    pytest.mark.vllm,
    # torch's, numpy's and vLLM's own, which differ between builds.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def plugin():
    from firesteel.integrations.vllm import config, experts, linear, register

    for _ in range(2):
        register()
    return config, experts, linear


def test_it_registers_as_often_as_it_likes(plugin):
    from vllm.model_executor.layers.quantization import (
        QUANTIZATION_METHODS,
        get_quantization_config,
    )

    config, _, _ = plugin
    assert get_quantization_config("firesteel") is config.FiresteelConfig
    assert QUANTIZATION_METHODS.count("firesteel") == 1


def _overridden(own):
    """Methods of a class that a class of vLLM has too, and that one."""
    for name, method in vars(own).items():
        for base in own.__mro__[1:]:
            if inspect.isroutine(getattr(method, "__func__", method)) and name in vars(base):
                if not name.startswith("__"):
                    yield name, base
                break


def test_methods_take_what_vllm_gives_them(plugin):
    config, experts, linear = plugin
    seen = set()
    own = (
        config.FiresteelConfig,
        experts.FiresteelExperts,
        linear.FiresteelLinear,
        linear.FiresteelHead,
    )
    for cls in own:
        assert not inspect.isabstract(cls), cls.__abstractmethods__
        for name, base in _overridden(cls):
            seen.add(name)
            ours = inspect.signature(getattr(cls, name)).parameters
            theirs = inspect.signature(getattr(base, name)).parameters
            takes_all = any(p.kind is p.VAR_KEYWORD for p in ours.values())
            missing = [n for n in theirs if n not in ours and not takes_all]
            assert not missing, (cls, name, missing)
    assert seen >= {
        "apply",
        "apply_vllm_mapper",
        "create_weights",
        "get_checkpoint_weight_mapper",
        "get_quant_method",
        "maybe_update_config",
        "override_quantization_method",
        "process_weights_after_loading",
    }


def test_routers_give_the_type_of_ids_that_is_planned(plugin):
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    _, experts, _ = plugin
    method = object.__new__(experts.FiresteelExperts)
    assert method.topk_indices_dtype is torch.int32
    asked = "topk_indices_dtype=self._quant_method.topk_indices_dtype"
    assert asked in inspect.getsource(MoERunner).replace(" ", "")
    assert "_convert_indices_dtype(topk_ids, topk_indices_dtype)" in inspect.getsource(
        BaseRouter._select_experts
    )
    ids = BaseRouter._convert_indices_dtype(None, torch.zeros(2, dtype=torch.int64), torch.int32)
    assert ids.dtype is torch.int32


def test_kernels_are_attached_within_the_engine_s_limits(plugin, monkeypatch):
    from firesteel.modules.kernels import KernelReport
    from firesteel.settings import Settings

    _, experts, _ = plugin
    given, registered = {}, []

    def attach(layers, **options):
        given.update(options, layers=list(layers))
        return KernelReport(num_layers=1, ready=["a plan"])

    planned = SimpleNamespace(register_warmup=lambda: registered.append("a plan"))
    monkeypatch.setattr(experts, "attach_kernels", attach)
    monkeypatch.setattr(experts, "PlannedKernels", {"a plan": planned}.get)
    model = SimpleNamespace(filled={"0": "a layer"}, summary=str, kernels=None)
    moe = SimpleNamespace(experts_per_token=3, in_dtype=torch.bfloat16)
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=77),
        model_config=SimpleNamespace(enforce_eager=False),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )
    monkeypatch.setattr(experts, "get_current_vllm_config", lambda: config)
    settings = Settings(launcher="python", max_tokens=5)
    method = experts.FiresteelExperts(moe, model, None, settings)
    method._attach(torch.device("cuda"))
    assert given == {
        "layers": ["a layer"],
        "top_k": 3,
        "dtype": torch.bfloat16,
        "ids": ("i32",),
        "one_arena": True,
        "settings": Settings(launcher="python", max_tokens=77),
    }
    assert registered == ["a plan"]
    assert model.kernels.num_layers == 1


def test_layers_and_configs_have_what_is_read_of_them():
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    assert isinstance(RoutedExperts.expert_map, property)
    source = inspect.getsource(RoutedExperts.__init__)
    for name in (
        "activation",
        "apply_router_weight_on_input",
        "layer_name",
        "moe_config",
        "swiglu_alpha",
        "swiglu_beta",
        "swiglu_limit",
    ):
        assert f"self.{name} =" in source, name
    known = {field.name for field in fields(FusedMoEConfig)}
    assert known >= {"experts_per_token", "in_dtype", "moe_parallel_config"}
    known = {field.name for field in fields(FusedMoEParallelConfig)}
    assert known >= {"tp_rank", "tp_size", "all2all_backend", "enable_eplb"}
    assert known >= {"dp_size", "pcp_size", "ep_size"}
    assert isinstance(FusedMoEParallelConfig.use_all2all_kernels, property)
    names = {member.name for member in MoEActivation}
    assert names >= {"SILU", "SWIGLUOAI", "SWIGLUOAI_UNINTERLEAVE", "RELU2_NO_MUL", "SITU"}
    for cls, own in (
        (QKVParallelLinear, ("total_num_heads", "total_num_kv_heads", "head_size", "v_head_size")),
        (MergedColumnParallelLinear, ("output_sizes",)),
        (ParallelLMHead, ("org_vocab_size", "embedding_dim")),
    ):
        sources = "".join(inspect.getsource(each.__init__) for each in cls.__mro__[:-1])
        for name in own:
            assert f"self.{name}" in sources, (cls, name)


def test_a_name_that_is_mapped_to_nothing_leaves_the_stream():
    from vllm.config import VllmConfig
    from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper

    mapper = WeightsMapper(orig_to_new_regex={re.compile(r"^a\.b\."): None})
    mapper |= WeightsMapper(orig_to_new_suffix={".g_idx": "x"})
    assert list(mapper.apply([("a.b.c", 1), ("a.bc.d", 2)])) == [("a.bc.d", 2)]
    assert "get_checkpoint_weight_mapper()" in inspect.getsource(AutoWeightsLoader.load_weights)
    assert "maybe_update_config(" in inspect.getsource(inspect.getmodule(VllmConfig))


def test_the_registry_of_warm_ups_has_the_keys_of_a_plan(plugin):
    from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry

    from firesteel.integrations.vllm.warmup import PlannedKernels
    from firesteel.launch.stub import StubDriver
    from tests.launch.rig import ready_on_stub
    from tests.launch.test_bound import PLAN

    driver = StubDriver.open()
    kernels = PlannedKernels(ready_on_stub(PLAN, driver))
    registry = JitWarmupRegistry(None)
    kernels.register_warmup()
    assert len(registry) == 0
    with registry.activate():
        kernels.register_warmup()
        kernels.register_warmup()
    assert len(registry) == 1
    launches = len(driver.launches())
    assert kernels.get_warmup_keys() == list(PLAN.keys)
    kernels.warmup()
    assert len(driver.launches()) == launches
    with pytest.raises(KeyError):
        kernels.compile(None)
    driver.reset()
