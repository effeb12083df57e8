import pytest
import torch

from firesteel.checkpoint.files import Checkpoint
from firesteel.checkpoint.layers import scan
from firesteel.cli.bench.stacks import STACKS, stack_config, write_stack
from firesteel.errors import InvalidArgumentError
from firesteel.integrations.transformers import load_model, load_report
from firesteel.moe.spec import GEOMETRIES


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "glm-5.2"])
def test_a_stack_has_its_models_geometry(model: str):
    config = stack_config(model, 3)
    assert config["num_hidden_layers"] == 3
    found = {
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["moe_intermediate_size"],
        "num_experts": config.get("num_experts") or config["n_routed_experts"],
        "top_k": config["num_experts_per_tok"],
    }
    assert found == GEOMETRIES[model]


@pytest.mark.host
@pytest.mark.parametrize("recipe", ["int4-g128", "int4-g32-asym", "int3-g64-asym", "nvfp4"])
@pytest.mark.parametrize("model", ["qwen3-tiny", "glm-tiny"])
def test_a_stack_loads_with_every_layer_packed(tmp_path, model: str, recipe: str):
    write_stack(tmp_path, stack_config(model, 2), recipe)
    loaded = load_model(tmp_path, device="cpu")
    report = load_report(loaded)
    assert sum(report.experts.values()) == 2
    assert report.host_experts == 0
    assert report.linears == {}
    with torch.no_grad():
        logits = loaded(torch.arange(24).view(2, 12)).logits
    assert logits.isfinite().all()


@pytest.mark.parametrize("recipe", ["int4-g128", "int3-g64-asym", "nvfp4"])
def test_an_expert_is_a_drawn_matrix_with_its_rows_moved_round(tmp_path, recipe: str):
    write_stack(tmp_path, stack_config("qwen3-tiny", 1), recipe)
    layer = scan(Checkpoint.open(tmp_path)).experts[0]
    with Checkpoint.open(tmp_path).reader() as reader:
        for sources in layer.sources:
            weights = [s.read(reader).dequantize(s.scheme) for s in sources]
            for first, moved in zip(weights[:8], weights[8:], strict=True):
                assert torch.equal(moved, first.roll(32, 0))
            assert len({tuple(w[0, :16].tolist()) for w in weights}) == len(weights)
            # The product with numbers of spread 1 has spread 2.
            spread = weights[0].std() * weights[0].shape[1] ** 0.5
            assert 1.8 < spread < 2.2


def test_layers_differ(tmp_path):
    write_stack(tmp_path, stack_config("qwen3-tiny", 2), "int4-g128")
    contents = scan(Checkpoint.open(tmp_path))
    with contents.checkpoint.reader() as reader:
        first, second = (
            [s.read(reader).codes for s in layer.sources[0]] for layer in contents.experts
        )
    assert torch.equal(first[1], second[0])
    assert not any(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("model", "layers", "words"),
    [("x", 1, f"--model: got 'x', must be one of {', '.join(STACKS)}"),
     ("glm-5.2", 0, "--layers: got 0, must be 1 or more")],
)  # fmt: skip
def test_what_is_asked_for_is_checked(model: str, layers: int, words: str):
    with pytest.raises(InvalidArgumentError, match=words):
        stack_config(model, layers)


def test_a_recipe_must_fit(tmp_path):
    with pytest.raises(InvalidArgumentError, match="recipe"):
        write_stack(tmp_path, stack_config("qwen3-tiny", 1), "int5-g128")
