"""Which config group says how a layer is stored."""

from typing import Any

import pytest

from firesteel.errors import CheckpointError
from firesteel.formats.config_groups import (
    config_for_group,
    group_of_layer,
    is_compressed,
    read_groups,
)

LAYER = "model.layers.0.mlp.experts.0.gate_proj"
INT = "pack-quantized"


def config_of(*targets: list[str], formats: tuple[str | None, ...] = ()) -> dict[str, Any]:
    """A config of groups with these targets."""
    formats = formats or (None,) * len(targets)
    return {
        "quant_method": "compressed-tensors",
        "format": INT,
        "config_groups": {
            f"group_{i}": {"targets": names, "weights": {"num_bits": 4}, "format": stored_as}
            for i, (names, stored_as) in enumerate(zip(targets, formats, strict=True))
        },
    }


@pytest.mark.parametrize(
    ("targets", "name"),
    [
        ((["Linear"],), "group_0"),
        # A name beats an expression, which beats a class.
        ((["Linear"], [r"re:.*experts.*"]), "group_1"),
        (([r"re:.*experts.*"], [LAYER]), "group_1"),
        ((["Linear", LAYER], [r"re:.*experts.*"]), "group_0"),
        # Of equals the first; an expression must match from the start.
        (([r"re:.*experts.*"], [r"re:model.*"]), "group_0"),
        (([r"re:experts"], ["Linear"]), "group_1"),
        # A class that the file cannot show counts only where nothing else does.
        ((["Qwen3MoeExpertLinear"],), "group_0"),
        ((["Qwen3MoeExpertLinear"], ["Linear"]), "group_1"),
        ((["model.layers.1.mlp.gate_proj"], ["Linear"]), "group_1"),
    ],
)
def test_the_closest_target_wins(targets, name):
    assert group_of_layer(config_of(*targets), LAYER, (INT,)).name == name


def test_groups_of_other_formats_do_not_count():
    config = config_of([LAYER], ["Linear"], formats=("nvfp4-pack-quantized", None))
    assert group_of_layer(config, LAYER, (INT,)).name == "group_1"
    assert is_compressed(config, ("nvfp4-pack-quantized",))
    assert not is_compressed(config, ("mxfp4-pack-quantized",))
    assert not is_compressed({**config, "quant_method": "gptq"}, (INT,))


def test_a_layer_that_no_group_names_is_refused():
    with pytest.raises(CheckpointError, match=f"{LAYER}: stored as {INT}, but no such entry"):
        group_of_layer(config_of(["model.other"]), LAYER, (INT,))


def test_groups_without_weights_are_passed_over():
    config = config_of(["Linear"])
    config["config_groups"]["kv"] = {"targets": ["re:.*k_proj"], "weights": None}
    assert [group.name for group in read_groups(config)] == ["group_0"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config_groups": None}, "config_groups: got None, must be dict"),
        ({"config_groups": {"a": 3}}, "config_groups.a: got 3, must be dict"),
        ({"config_groups": {"a": {"weights": {}}}}, "config_groups.a.targets: missing"),
        ({"config_groups": {"a": {"weights": 4, "targets": []}}}, "a.weights: got 4, must be dict"),
    ],
)
def test_malformed_groups_are_named(change, message):
    with pytest.raises(CheckpointError, match=message):
        read_groups({**config_of(["Linear"]), **change})
    with pytest.raises(CheckpointError, match="config_groups: missing"):
        read_groups({"quant_method": "compressed-tensors"})


def test_a_target_that_is_no_expression_is_refused():
    with pytest.raises(CheckpointError, match="got target 're:\\('"):
        group_of_layer(config_of(["re:("]), LAYER, (INT,))


def test_a_written_config_is_read_back():
    config = config_for_group(INT, {"num_bits": 8, "group_size": 32}, ["lm_head"])
    group = group_of_layer(config, LAYER, (INT,))
    assert group.weights["num_bits"] == 8
    assert config["ignore"] == ["lm_head"]
