"""What is refused of an engine's options and layers; vLLM is not needed, and stood in for."""

from types import SimpleNamespace

import pytest
import torch

from firesteel.checkpoint.families import Geometry
from firesteel.errors import UnsupportedError
from firesteel.integrations.vllm.limits import (
    activation_of,
    check_draft,
    check_graphs,
    check_layer,
    check_load_format,
    check_workspace,
    draft_of,
    held_experts,
)
from firesteel.moe.activation import Activation

GEOMETRY = Geometry(num_layers=2, num_experts=4, hidden_size=128, intermediate_size=64)
ACTIVATIONS = {
    "SILU": "silu",
    "SWIGLUOAI": "swigluoai",
    "SWIGLUOAI_UNINTERLEAVE": "swigluoai",
}


def _layer(activation="SILU", **given):
    named = SimpleNamespace(name=activation, value=activation.lower())
    swiglu = {"swiglu_limit": 7.0, "swiglu_alpha": 1.5, "swiglu_beta": None}
    given = {"apply_router_weight_on_input": False, **swiglu, **given}
    return SimpleNamespace(activation=named, **given)


def _ranks(**given):
    one = {"dp_size": 1, "pcp_size": 1, "ep_size": 1, "enable_eplb": False}
    none = {"use_all2all_kernels": False, "all2all_backend": "naive"}
    return SimpleNamespace(**{**one, **none, **given})


def test_load_formats_of_other_files_are_refused(tmp_path):
    for name in ("auto", "safetensors", "dummy"):
        check_load_format(SimpleNamespace(load_format=name), tmp_path)
    with pytest.raises(UnsupportedError, match=r"load_format: got 'pt', must be one of auto, hf"):
        check_load_format(SimpleNamespace(load_format="pt"), tmp_path)
    (tmp_path / "consolidated.safetensors").touch()
    check_load_format(SimpleNamespace(load_format="safetensors"), tmp_path)
    with pytest.raises(UnsupportedError, match=r"got 'auto', .* consolidated.safetensors in"):
        check_load_format(SimpleNamespace(load_format="auto"), tmp_path)


@pytest.mark.parametrize(
    ("layer", "ranks", "hidden_size", "reason"),
    [
        ({}, {}, 64, "hidden_size: got 64, the checkpoint's is 128"),
        ({"apply_router_weight_on_input": True}, {}, 128, "apply_router_weight_on_input: got True"),
        ({}, {"dp_size": 2}, 128, "data_parallel_size: got 2, must be 1"),
        ({}, {"pcp_size": 2}, 128, "prefill_context_parallel_size: got 2, must be 1"),
        ({}, {"use_all2all_kernels": True}, 128, "all2all_backend: naive sends tokens"),
        ({}, {"enable_eplb": True}, 128, "enable_eplb: got True, must be False"),
        ({}, {"ep_size": 5}, 128, "got 5 ranks, must be at most one for each of 4 experts"),
    ],
)
def test_layers_that_would_not_run_right_are_refused(layer, ranks, hidden_size, reason):
    check_layer(_layer(), _ranks(ep_size=4), GEOMETRY, hidden_size=128)
    with pytest.raises(UnsupportedError, match=reason):
        check_layer(_layer(**layer), _ranks(**ranks), GEOMETRY, hidden_size=hidden_size)


def test_a_rank_holds_the_experts_that_the_engine_s_map_gives_it():
    assert held_experts(None, GEOMETRY, 4) == [0, 1, 2, 3]
    expert_map = torch.tensor([1, -1, 0, -1])
    assert held_experts(expert_map, GEOMETRY, 2) == [2, 0]
    for given, count, own in ((None, 6, 4), (expert_map, 3, 2)):
        with pytest.raises(UnsupportedError, match=f"got {count}, the checkpoint has {own} for"):
            held_experts(given, GEOMETRY, count)


def test_activations_are_ours_or_refused():
    for theirs, ours in ACTIVATIONS.items():
        assert activation_of(_layer(theirs), Activation(name=ours)).name == ours
    gpt_oss = Activation(name="swigluoai", limit=5.0, beta=2.0)
    found = activation_of(_layer("SWIGLUOAI"), gpt_oss)
    assert (found.alpha, found.limit, found.beta) == (1.5, 7.0, 2.0)
    assert activation_of(_layer("SWIGLUOAI", swiglu_limit=None), gpt_oss).limit == 5.0
    assert activation_of(_layer("SILU"), Activation()).limit == 7.0
    for theirs in ("GELU", "SWIGLUOAI"):
        with pytest.raises(UnsupportedError, match="must be the checkpoint's silu"):
            activation_of(_layer(theirs), Activation())


def test_layers_without_kernels_are_refused_where_graphs_are_captured():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    check_graphs([], cuda, is_eager=False)
    check_graphs(["a reason"], cuda, is_eager=True)
    check_graphs(["a reason"], cpu, is_eager=False)
    with pytest.raises(UnsupportedError, match="enforce_eager: got False, must be True since a re"):
        check_graphs(["a reason"], cuda, is_eager=False)


@pytest.mark.parametrize(
    ("method", "name", "quantization", "is_refused"),
    [
        ("draft_model", "other", "firesteel", True),
        ("draft_model", "it", "firesteel", True),
        ("eagle3", "other", "firesteel", True),
        ("draft_model", "other", None, False),
        ("draft_model", "other", "awq", False),
        # The target's own config stands for what is no model of its own.
        ("ngram", "it", "firesteel", False),
        ("mtp", "it", "firesteel", False),
    ],
)
def test_quantised_draft_models_are_refused(method, name, quantization, is_refused):
    draft = SimpleNamespace(model=name, quantization=quantization)
    config = SimpleNamespace(
        model_config=SimpleNamespace(model="it"),
        speculative_config=SimpleNamespace(method=method, draft_model_config=draft),
    )
    if not is_refused:
        check_draft(config, ["model.layers.2.mlp.experts"] if method != "mtp" else [])
        return
    with pytest.raises(UnsupportedError, match=f"got the quantised draft model {name}, must be"):
        check_draft(config, [])


def test_quantised_layers_that_predict_are_refused_where_the_engine_would_run_them():
    draft = SimpleNamespace(model="it", quantization="firesteel")
    speculative = SimpleNamespace(method="ngram", draft_model_config=draft)
    config = SimpleNamespace(
        model_config=SimpleNamespace(model="it"), speculative_config=speculative
    )
    check_draft(config, ["model.layers.2.mlp.experts"])
    assert draft_of(config) is None
    speculative.method = "mtp"
    assert draft_of(config) == "target"
    draft.quantization = "compressed-tensors"
    with pytest.raises(UnsupportedError, match=r"got method 'mtp', .* model.layers.2.mlp.experts"):
        check_draft(config, ["model.layers.2.mlp.experts"])


@pytest.mark.parametrize(
    ("method", "name", "kind"),
    [("eagle", "other", "other"), ("mtp", "other", "other"), ("mtp", "it", "target")],
)
def test_a_draft_is_another_model_or_layers_of_the_target(method, name, kind):
    draft = SimpleNamespace(model=name, quantization=None)
    speculative = SimpleNamespace(method=method, draft_model_config=draft)
    model = SimpleNamespace(model="it")
    assert draft_of(SimpleNamespace(model_config=model, speculative_config=speculative)) == kind


def test_no_draft_model_is_no_matter():
    check_draft(SimpleNamespace(speculative_config=None), [])
    assert draft_of(SimpleNamespace(speculative_config=None)) is None
    without = SimpleNamespace(method="suffix", draft_model_config=None)
    check_draft(SimpleNamespace(speculative_config=without), [])


def test_a_workspace_without_room_is_refused_by_the_option_that_sizes_it():
    check_workspace(1000, 1000, 8192)
    with pytest.raises(UnsupportedError, match=r"max_num_batched_tokens: got 8192, .* 1,001 bytes"):
        check_workspace(1001, 1000, 8192)
