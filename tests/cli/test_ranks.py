"""`firesteel plan` for ranks that share a layer: what vLLM's ranks have, which its plugin plans."""

import json
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from firesteel.checkpoint import Checkpoint, scan
from firesteel.checkpoint.families import Geometry
from firesteel.checkpoint.shards import shard_layer
from firesteel.cli.planning import PlanChoice, make_specs, shape_choice
from firesteel.cli.ranks import named_ranks, where
from firesteel.errors import InvalidArgumentError, UnsupportedError
from firesteel.formats.quantize import parse_recipe
from firesteel.integrations.vllm.limits import activation_of, held_experts
from firesteel.modules import kernels
from firesteel.modules.activation import stored_activation
from firesteel.modules.packed import PackedExperts
from firesteel.moe.products import HOPPER
from firesteel.moe.spec import GEOMETRIES, geometry
from firesteel.moe.trellis.spec import LayerSpec
from firesteel.moe.tuning_file import default_table
from tests.checkpoints import STORAGES, Storage, write
from tests.cli.command import ROOT, assert_error, invoke, invoke_json

LITTLE = ROOT / "examples" / "little_moe"
SHARED = [{"tp": 1}, {"tp": 2}, {"tp": 3}, {"ep": 2}, {"ep": 3}, {"ep": 4}]
WITHOUT_KERNELS = {
    *("ct-w4-actorder", "gptq-w4-desc_act", "ct-w8-channel", "gptq-w8-channel"),
    *("exl3-2.5-mul1", "exl3-mixed"),
}
needs_exl3 = pytest.mark.skipif(not HOPPER, reason="kernels for EXL3 need Triton 3.6 or later")


def engine_map(num_experts: int, rank: int, count: int) -> Tensor | None:
    """As vLLM's determine_expert_map has it."""
    if count == 1:
        return None
    each, more = divmod(num_experts, count)
    start, own = rank * each + min(rank, more), each + (rank < more)
    found = torch.full((num_experts,), -1, dtype=torch.int32)
    found[start : start + own] = torch.arange(own, dtype=torch.int32)
    return found


def packed_of(contents: Any, whole: Any, rank: int, *, tp: int, ep: int) -> PackedExperts:
    """The module that FiresteelExperts.create_weights makes."""
    sizes = contents.geometry
    stored = stored_activation(contents.family, contents.checkpoint.config)
    expert_map = engine_map(sizes.num_experts, rank if ep > 1 else 0, ep)
    num_experts = sizes.num_experts if expert_map is None else int((expert_map >= 0).sum())
    held = held_experts(expert_map, sizes, num_experts)
    own = shard_layer(whole, held=held, rank=rank if tp > 1 else 0, count=tp)
    activation = SimpleNamespace(name=stored.name.upper())
    # Its models pass none.
    constants = dict.fromkeys(("swiglu_limit", "swiglu_alpha", "swiglu_beta"))
    return PackedExperts(
        None,
        Geometry(
            num_layers=sizes.num_layers,
            num_experts=num_experts,
            hidden_size=sizes.hidden_size,
            intermediate_size=own.scheme(2).k,
        ),
        (own.schemes(0, 1), own.schemes(2)),
        activation_of(SimpleNamespace(activation=activation, **constants), stored),
        bias_dtype=torch.bfloat16 if own.biases else None,
        expert_map=expert_map,
    )


def specs_of_plugin(folder: Path, *, tp: int = 1, ep: int = 1) -> set[LayerSpec]:
    """What the kernels of each rank are planned for, as attach_kernels does."""
    contents = scan(Checkpoint.open(folder))
    top_k = contents.checkpoint.config["num_experts_per_tok"]
    found: set[Any] = set()
    for rank in range(max(tp, ep)):
        modules = [packed_of(contents, each, rank, tp=tp, ep=ep) for each in contents.experts]
        wanted = [
            (module, (kernels._spec_of(module, top_k, torch.bfloat16), torch.device("cuda")))
            for module in modules
        ]
        found |= {spec for _, (spec, _) in kernels._sharing_plans(wanted)}
    return found


@pytest.fixture
def _pretend_gpu(monkeypatch):
    monkeypatch.setattr(kernels, "_device_of", lambda _: torch.device("cuda"))
    monkeypatch.setattr(kernels, "device_target", lambda _: "sm_90")
    monkeypatch.setattr(kernels, "table_of_device", lambda _: default_table())


@pytest.mark.usefixtures("_pretend_gpu")
@pytest.mark.parametrize("name", list(STORAGES))
def test_ranks_of_a_checkpoint_are_planned_as_the_plugin_plans_them(tmp_path, name: str):
    storage = STORAGES[name]
    if storage.format == "exl3" and not HOPPER:
        pytest.skip("kernels for EXL3 need Triton 3.6 or later")
    is_gpt_oss = name in ("mxfp4-gpt-oss", "nf3")
    # Of 640 a third is no whole number of groups, and a half of 128s none either.
    given = {"intermediate_size": 640} if is_gpt_oss else {"moe_intermediate_size": 640}
    family = "gpt_oss" if is_gpt_oss else "qwen3_moe"
    folder = write(tmp_path / "in", family, storage, **given).path
    for shared in SHARED:
        choice = PlanChoice(checkpoint=folder, **shared)
        if name in WITHOUT_KERNELS:
            with pytest.raises(UnsupportedError) as refused:
                specs_of_plugin(folder, **shared)
            with pytest.raises(UnsupportedError) as told:
                make_specs(choice)
            assert str(refused.value) in str(told.value)
            continue
        found = make_specs(choice)
        wanted = specs_of_plugin(folder, **shared)
        assert {spec.for_target("sm_90") for spec in found} == wanted, shared
        assert len(set(found)) == len(found)


@pytest.mark.usefixtures("_pretend_gpu")
def test_a_group_that_is_cut_is_planned_as_the_plugin_plans_it(tmp_path):
    storage = Storage("compressed-tensors", "int4-g128", "stream")
    folder = write(tmp_path / "in", "qwen3_moe", storage, moe_intermediate_size=640).path
    for tp, sizes in ((2, [(320, 64)]), (3, [(224, 32), (192, 64)])):
        found = make_specs(PlanChoice(checkpoint=folder, tp=tp))
        assert {spec.for_target("sm_90") for spec in found} == specs_of_plugin(folder, tp=tp)
        assert [(s.intermediate_size, s.w2.group_size) for s in found] == sizes
        assert {spec.w13.group_size for spec in found} == {128}


@pytest.mark.parametrize("recipe", ["int4-g128", "int4-g64-asym", "int3-g32", "mxfp4", "nvfp4"])
def test_ranks_of_a_model_by_name_are_cut_as_those_of_its_checkpoint(recipe: str):
    (whole,) = make_specs(PlanChoice(checkpoint=LITTLE / "bf16", recipe=recipe))
    for tp, ep in ((1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (1, 3), (1, 8)):
        ranks = named_ranks(whole, parse_recipe(recipe), tp=tp, ep=ep)
        assert len(ranks) == max(tp, ep)
        stored = make_specs(PlanChoice(checkpoint=LITTLE / "bf16", recipe=recipe, tp=tp, ep=ep))
        assert tuple(dict.fromkeys(ranks)) == stored


@pytest.mark.parametrize("model", list(GEOMETRIES))
def test_ranks_with_whole_groups_are_those_of_geometry(model: str, capsys):
    cases = product((2, 3, 4, 6, 8, 16), ("mxfp4", "nvfp4", "nf3", "int4-g32", "int4-g128"))
    found = set()
    for tp, recipe in cases:
        element, _, group = recipe.partition("-g")
        given = {"group_size": int(group)} if group else {}
        try:
            even = geometry(model, tensor_parallel=tp, element=element, **given)
        except (InvalidArgumentError, UnsupportedError):
            continue
        found.add((tp, recipe))
        assert make_specs(PlanChoice(model=model, tp=tp, recipe=recipe)) == (even,)
    assert (2, "mxfp4") in found
    # 45 groups of 16 are no whole number of units.
    note = "--tp: each rank has 720 columns here, those of vLLM have 736, 704: --checkpoint plans"
    assert (note in capsys.readouterr().err) == (model == "gpt-oss-120b")


def test_a_group_that_is_cut_becomes_smaller_ones():
    result = invoke("plan", "--model", "qwen3-30b-a3b", "--tp", 4, "--max-tokens", 2, "--json")
    spec = json.loads(result.stdout)["spec"]
    assert (spec["intermediate_size"], spec["w2"]["group_size"]) == (192, 64)
    assert spec["w13"]["group_size"] == 128
    # All ranks are alike.
    assert result.stderr == ""


def kinds_of(*arguments: object) -> list[str]:
    """What stderr says of kinds, after checking that each has a plan."""
    result = invoke("plan", *arguments, "--max-tokens", 2, "--json")
    assert result.exit_code == 0, result.output
    titles = [json.loads(line)["title"] for line in result.stdout.splitlines()]
    lines = result.stderr.splitlines()
    assert [line.partition(": ")[2] for line in lines] == titles
    return [line.partition(" top_k")[0] for line in lines]


def test_sizes_that_do_not_divide_are_planned_apart_and_told():
    assert kinds_of("--model", "glm-5.2", "--tp", 3) == [
        "rank 0: MoE int4-g128/int4-g64 K=6144 N=704 E=256",
        "ranks 1, 2: MoE int4-g128/int4-g32 K=6144 N=672 E=256",
    ]
    assert kinds_of("--checkpoint", LITTLE / "int4-g128", "--tp", 3) == [
        "rank 0: MoE int4-g128/int4-g64 K=256 N=64 E=8",
        "ranks 1, 2: MoE int4-g128/int4-g32 K=256 N=32 E=8",
    ]


@needs_exl3
def test_exl3_is_cut_by_whole_blocks():
    assert kinds_of("--model", "qwen3-30b-a3b", "--recipe", "exl3-3.0-mcg", "--tp", 4) == [
        "ranks 0, 1: MoE exl3-3-mcg K=2048 N=256 E=128",
        "ranks 2, 3: MoE exl3-3-mcg K=2048 N=128 E=128",
    ]


def test_experts_are_shared_out_as_vllm_does():
    assert kinds_of("--model", "glm-5.2", "--ep", 7) == [
        "ranks 0, 1, 2, 3: MoE int4-g128 K=6144 N=2048 E=37 of 256",
        "ranks 4, 5, 6: MoE int4-g128 K=6144 N=2048 E=36 of 256",
    ]
    assert kinds_of("--checkpoint", LITTLE / "int4-g128", "--ep", 3) == [
        "ranks 0, 1: MoE int4-g128 K=256 N=128 E=3 of 8",
        "rank 2: MoE int4-g128 K=256 N=128 E=2 of 8",
    ]
    found = invoke_json("plan", "--model", "mixtral-8x7b", "--ep", 8, "--max-tokens", 2)
    assert (found["spec"]["num_experts"], found["spec"]["num_global_experts"]) == (1, 8)


@needs_exl3
def test_a_rank_that_has_some_of_the_experts_has_their_rates_alone(tmp_path):
    folder = write(tmp_path / "in", "qwen3_moe", STORAGES["exl3-whole-mcg"]).path
    told = kinds_of("--checkpoint", folder, "--ep", 4)
    assert told[0] == "rank 0: MoE exl3-2,3-mcg/exl3-3-mcg K=128 N=64 E=1 of 4"
    assert len(told) == 4


def test_layers_and_ranks_that_differ_are_told_together():
    places = [(3, 0), (3, 1), (4, 0), (4, 1), (5, 1)]
    assert where(places, ranks=2) == "layers 3, 4 and layer 5 of rank 1"
    assert where(places[:4], ranks=3) == "layers 3, 4 of ranks 0, 1"
    assert where([(3, 1), (4, 1)], ranks=2, layers={3, 4}) == "rank 1"
    assert where([(3, 1)], ranks=2, layers={3, 4}) == "layer 3 of rank 1"


@pytest.mark.parametrize("name", ["ct-w4-actorder", "gptq-w4-desc_act"])
def test_columns_that_name_their_groups_are_refused_with_the_reason(tmp_path, name: str):
    folder = write(tmp_path / "in", "qwen3_moe", STORAGES[name]).path
    reason = "down: columns name their group (act-order), must lie in order"
    for shared in (("--tp", 1), ("--tp", 2), ("--ep", 2)):
        result = invoke("plan", "--checkpoint", folder, *shared)
        assert_error(result, "layers 1, 2: no kernel for these experts", reason)


@pytest.mark.parametrize("named", [("--model", "mixtral-8x7b"), ("--checkpoint", LITTLE / "bf16")])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--ep", 9), "--ep: got 9, must be 1 to 8: a rank has at least one of 8 experts"),
        (("--ep", 0), "--ep: got 0, must be 1 to 8"),
        (("--ep", -1), "--ep: got -1, must be 1 to 8"),
        (("--tp", 0), "--tp: got 0, must be 1 or more"),
        (("--tp", -2), "--tp: got -2, must be 1 or more"),
        (
            ("--tp", 2, "--ep", 4),
            "--tp, --ep: got 2 and 4, one of them must be 1: with expert parallel vLLM gives whole",
        ),
    ],
)
def test_numbers_of_ranks_that_are_none(named: tuple, arguments: tuple, words: str):
    assert_error(invoke("plan", *named, *arguments, "--recipe", "int4-g128"), words)


def test_more_ranks_than_parts():
    words = "--tp: got 449 ranks, 14336 columns of 32 each make at most 448 parts"
    assert_error(invoke("plan", "--model", "mixtral-8x7b", "--tp", 449), words)
    words = "layers 0, 1, 2, 3: --tp: got 5 ranks, 128 columns of 32 each make at most 4 parts"
    assert_error(invoke("plan", "--checkpoint", LITTLE / "int4-g128", "--tp", 5), words)


def test_a_shape_that_is_timed_has_ranks_that_are_alike():
    """Benchmarks and `tune` time one layer."""
    (spec,) = make_specs(shape_choice("glm-5.2-tp4", "int4-g128"))
    assert spec == geometry("glm-5.2", tensor_parallel=4)
    with pytest.raises(InvalidArgumentError, match="tensor_parallel: got 3, must divide"):
        make_specs(shape_choice("glm-5.2-tp3", "int4-g128"))
