"""Scanning a checkpoint: every expert tensor accounted for, or an error of ours."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file

from firesteel.checkpoint import Checkpoint, scan
from firesteel.checkpoint.sources import QuantizedSource, RoundedSource
from firesteel.errors import CheckpointError, InvalidArgumentError, UnsupportedError
from firesteel.formats.packed import packed_bytes
from firesteel.formats.quantize import parse_recipe
from tests.checkpoints import (
    FAMILY_NAMES,
    PLAIN,
    STORAGES,
    edit_config,
    write,
    write_tensors,
)

EXPERT = "model.layers.1.mlp.experts.2"
FUSED = "model.layers.1.mlp.experts"


def scanned(path, recipe=None):
    return scan(Checkpoint.open(path), None if recipe is None else parse_recipe(recipe))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Checkpoints that tests change copies of, written once."""
    root = tmp_path_factory.mktemp("base")
    return {
        "ct": write(root / "ct", "qwen3_moe", STORAGES["ct-w4-g32-asym"], linears=True),
        "gptq": write(root / "gptq", "olmoe", STORAGES["gptq-w4-desc_act"]),
        "awq": write(root / "awq", "mixtral", STORAGES["awq-asym"]),
        "nvfp4": write(root / "nvfp4", "qwen3_moe", STORAGES["nvfp4"]),
        "modelopt": write(root / "modelopt", "qwen3_moe", STORAGES["nvfp4-modelopt"]),
        "gpt_oss": write(root / "gpt_oss", "gpt_oss", STORAGES["mxfp4-gpt-oss"]),
        "nf3": write(root / "nf3", "gpt_oss", STORAGES["nf3"]),
        "plain": write(root / "plain", "qwen3_moe"),
        "plain_fused": write(root / "plain_fused", "gpt_oss"),
    }


def changed(base, tmp_path, *, config=None, **tensors):
    """A copy of a checkpoint with tensors put in, changed, or (None) taken away."""
    own = {**load_file(base.path / "model.safetensors"), **tensors}
    tmp_path.mkdir(exist_ok=True)
    write_tensors(tmp_path, {name: tensor for name, tensor in own.items() if tensor is not None})
    fields = json.loads((base.path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, **(config or {})}))
    return tmp_path


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_matrix_of_every_expert_has_a_source(tmp_path, family):
    written = write(tmp_path / "in", family, STORAGES["ct-w4-g32"])
    contents = scanned(written.path)
    assert contents.family.model_type == family
    schemes = {}
    for layer in contents.experts:
        assert layer.is_packed
        assert {len(sources) for sources in layer.sources} == {contents.geometry.num_experts}
        for sources in layer.sources:
            schemes.update({source.layer: source.scheme for source in sources})
    wanted = {name: scheme for name, scheme in written.schemes.items() if ".experts." in name}
    assert schemes == wanted
    assert contents.dense == ()


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_plain_experts_are_read_with_a_recipe_only(tmp_path, family):
    written = write(tmp_path / "in", family, PLAIN)
    assert not any(layer.is_packed for layer in scanned(written.path).experts)
    contents = scanned(written.path, "int4-g32")
    state = written.state
    with contents.checkpoint.reader() as reader:
        for layer in contents.experts:
            prefix = f"model.layers.{layer.layer}.mlp.experts"
            for expert, sources in enumerate(zip(*layer.sources, strict=True)):
                assert all(isinstance(source, RoundedSource) for source in sources)
                gate, up, down = (source.plain.read(reader).float() for source in sources)
                fused = state[f"{prefix}.gate_up_proj"][expert]
                if family == "gpt_oss":
                    wanted = (fused[:, 0::2].T, fused[:, 1::2].T)
                    down = down.T
                else:
                    wanted = fused.chunk(2)
                assert torch.equal(gate, wanted[0])
                assert torch.equal(up, wanted[1])
                assert torch.equal(down, state[f"{prefix}.down_proj"][expert])


def test_dense_layers_and_neighbours_are_found(base):
    contents = scanned(base["ct"].path)
    names = {source.layer for source in contents.dense}
    assert names == {name for name in base["ct"].schemes if ".experts." not in name}
    assert "model.layers.0.mlp.gate_proj" in names
    assert all(isinstance(source, QuantizedSource) for source in contents.dense)
    assert all(packed_bytes(source.scheme) > 0 for source in contents.dense)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("ct", f"{EXPERT}.up_proj.weight_packed"),
        ("ct", f"{EXPERT}.up_proj.weight_scale"),
        ("ct", f"{EXPERT}.down_proj.weight_shape"),
        ("ct", f"{EXPERT}.gate_proj.weight_zero_point"),
        ("gptq", f"{EXPERT}.gate_proj.qweight"),
        ("gptq", f"{EXPERT}.gate_proj.qzeros"),
        ("gptq", f"{EXPERT}.gate_proj.scales"),
        ("gptq", f"{EXPERT}.down_proj.g_idx"),
        ("awq", "model.layers.1.block_sparse_moe.experts.2.w1.qzeros"),
        ("nvfp4", f"{EXPERT}.down_proj.weight_global_scale"),
        ("modelopt", f"{EXPERT}.down_proj.weight_scale"),
        ("modelopt", f"{EXPERT}.down_proj.weight_scale_2"),
        ("modelopt", f"{EXPERT}.down_proj.weight"),
        ("gpt_oss", f"{FUSED}.gate_up_proj_blocks"),
        ("gpt_oss", f"{FUSED}.gate_up_proj_scales"),
        ("gpt_oss", f"{FUSED}.gate_up_proj_bias"),
        ("gpt_oss", f"{FUSED}.down_proj_bias"),
        ("plain", f"{EXPERT}.down_proj.weight"),
        ("plain_fused", f"{FUSED}.down_proj"),
        ("plain_fused", f"{FUSED}.gate_up_proj_bias"),
    ],
)
def test_a_missing_tensor_of_an_expert_is_an_error(base, tmp_path, name, tensor):
    path = changed(base[name], tmp_path, **{tensor: None})
    layer = tensor.split(".experts")[0]
    with pytest.raises((CheckpointError, UnsupportedError), match=re.escape(layer)):
        scanned(path)


def test_a_missing_expert_projection_or_layer_is_an_error(base, tmp_path):
    stored = load_file(base["ct"].path / "model.safetensors")
    for index, (part, message) in enumerate(
        (
            (f"{EXPERT}.", f"{EXPERT} gate: missing"),
            (f"{EXPERT}.up_proj.", f"{EXPERT} up: missing"),
            ("model.layers.2.", "num_hidden_layers is 3, .* no tensor of layer 2"),
            ("model.layers.0.", "num_hidden_layers is 3, .* no tensor of layer 0"),
        )
    ):
        gone = {name: None for name in stored if name.startswith(part)}
        assert gone
        with pytest.raises(CheckpointError, match=message):
            scanned(changed(base["ct"], tmp_path / str(index), **gone))
    gone = {name: None for name in stored if ".experts." in name}
    with pytest.raises(CheckpointError, match="has no expert tensors"):
        scanned(changed(base["ct"], tmp_path / "none", **gone))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("ct", f"{FUSED}.4.up_proj.weight_packed"),
        ("ct", f"{EXPERT}.up_proj.weight"),
        ("ct", f"{EXPERT}.up_proj.bias"),
        ("ct", f"{EXPERT}.up_proj.qweight"),
        ("ct", f"{EXPERT}.side_proj.weight_packed"),
        ("ct", f"{EXPERT}.weight"),
        ("ct", f"{FUSED}.gate_up_proj"),
        ("ct", f"{FUSED}.up_proj.weight"),
        ("ct", f"{FUSED}.-1.up_proj.weight_packed"),
        ("ct", f"model.{FUSED}.0.up_proj.weight_packed"),
        ("ct", f"{FUSED}.01.up_proj.weight_packed"),
        ("ct", f"{EXPERT}.w3.weight_packed"),
        ("gptq", f"{EXPERT}.up_proj.weight"),
        ("gpt_oss", f"{FUSED}.gate_up_proj"),
        ("gpt_oss", f"{FUSED}.gate_up_proj_qweight"),
        ("gpt_oss", f"{FUSED}.0.up_proj.weight"),
        ("plain", f"{EXPERT}.up_proj.weight_scale"),
        ("plain", f"{EXPERT}.up_proj.weight_scale_inv"),
        ("plain_fused", f"{FUSED}.gate_up_proj_blocks"),
    ],
)
def test_an_unexpected_tensor_among_the_experts_is_an_error(base, tmp_path, name, tensor):
    path = changed(base[name], tmp_path, **{tensor: torch.ones(2, 2)})
    with pytest.raises((CheckpointError, UnsupportedError), match="layers"):
        scanned(path)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("ct", f"{EXPERT}.up_proj.weight_packed"),
        ("ct", f"{EXPERT}.up_proj.weight_scale"),
        ("ct", f"{EXPERT}.up_proj.weight_zero_point"),
        ("gptq", f"{EXPERT}.up_proj.qweight"),
        ("gptq", f"{EXPERT}.up_proj.g_idx"),
        ("awq", "model.layers.1.block_sparse_moe.experts.2.w1.scales"),
        ("nvfp4", f"{EXPERT}.up_proj.weight_global_scale"),
        ("modelopt", f"{EXPERT}.up_proj.weight"),
        ("gpt_oss", f"{FUSED}.gate_up_proj_blocks"),
        ("gpt_oss", f"{FUSED}.down_proj_scales"),
        ("gpt_oss", f"{FUSED}.down_proj_bias"),
        ("plain", f"{EXPERT}.up_proj.weight"),
        ("plain_fused", f"{FUSED}.gate_up_proj"),
    ],
)
def test_a_wrong_shape_or_dtype_is_an_error(base, tmp_path, name, tensor):
    own = load_file(base[name].path / "model.safetensors")[tensor]
    wrong = {
        "longer": torch.cat([own, own]),
        "shorter": own[: len(own) // 2],
        "empty": own[:0],
        "flat": own.reshape(1, *own.shape),
        "scalar": own.flatten()[0],
        "int8": torch.zeros(own.shape, dtype=torch.int8),
        "int64": torch.zeros(own.shape, dtype=torch.int64),
        "bool": torch.zeros(own.shape, dtype=torch.bool),
        "double": torch.zeros(own.shape, dtype=torch.float64),
    }
    for kind, changed_tensor in wrong.items():
        path = changed(base[name], tmp_path / kind, **{tensor: changed_tensor})
        with pytest.raises((CheckpointError, UnsupportedError), match="layers"):
            scanned(path)


@pytest.mark.parametrize("field", ["hidden_size", "moe_intermediate_size", "num_experts"])
def test_a_config_of_another_shape_is_an_error(base, tmp_path, field):
    for name in ("ct", "plain"):
        for value in (1, 64, 128, 256, 10**9):
            fields = json.loads((base[name].path / "config.json").read_text())
            field_in_file = field if field in fields else "num_local_experts"
            if fields[field_in_file] == value:
                continue
            path = changed(base[name], tmp_path / f"{name}{value}", config={field_in_file: value})
            with pytest.raises(CheckpointError, match="layers"):
                scanned(path)


@pytest.mark.parametrize("value", [None, 0, -4, 1.5, "4", True, [4]])
@pytest.mark.parametrize(
    "field", ["hidden_size", "moe_intermediate_size", "num_local_experts", "num_hidden_layers"]
)
def test_a_config_without_a_field_is_an_error(base, tmp_path, field, value):
    config = json.loads((base["ct"].path / "config.json").read_text())
    field = field if field in config else "num_experts"
    path = changed(base["ct"], tmp_path)
    edit_config(path, **{field: value})
    with pytest.raises(CheckpointError, match=rf"config.json: .*{field}"):
        scanned(path)


def test_more_layers_than_the_files_have_are_refused_at_once(base, tmp_path):
    path = changed(base["ct"], tmp_path, config={"num_hidden_layers": 10**12})
    with pytest.raises(CheckpointError, match=r"layers is 1000000000000, .* layer 3"):
        scanned(path)


@pytest.mark.parametrize("model_type", ["llama", "", "Qwen3_MoE", "mixtral "])
def test_an_unsupported_family_is_an_error_that_lists_those_supported(base, tmp_path, model_type):
    path = changed(base["ct"], tmp_path, config={"model_type": model_type})
    with pytest.raises(UnsupportedError, match=r"deepseek_v3, .*qwen3_moe") as caught:
        scanned(path)
    assert all(name in str(caught.value) for name in FAMILY_NAMES)


def _quantization(base, **fields):
    config = json.loads((base.path / "config.json").read_text())["quantization_config"]
    return {"quantization_config": {**config, **fields}}


@pytest.mark.parametrize(
    ("name", "fields", "known"),
    [
        ("gptq", {"quant_method": "exl9"}, "'gptq', 'awq'"),
        ("gptq", {"bits": 5}, r"\[3, 4, 8\]"),
        ("gptq", {"bits": 2}, r"\[3, 4, 8\]"),
        ("gptq", {"group_size": 48}, r"\[16, 32, 64"),
        ("gptq", {"checkpoint_format": "marlin"}, r"\['gptq', 'gptq_v2'\]"),
        ("awq", {"bits": 8}, r"\[4\]"),
        ("awq", {"version": "gemv"}, "'gemm'"),
        ("awq", {"group_size": 24}, r"\[16, 32, 64"),
        ("modelopt", {"quant_algo": "FP8"}, "known are"),
    ],
)
def test_an_unknown_format_width_or_group_is_an_error_that_lists_those_known(
    base, tmp_path, name, fields, known
):
    path = changed(base[name], tmp_path, config=_quantization(base[name], **fields))
    with pytest.raises(UnsupportedError, match=known):
        scanned(path)


def test_a_group_that_does_not_divide_k_is_an_error(base, tmp_path):
    path = changed(base["gptq"], tmp_path, config=_quantization(base["gptq"], group_size=256))
    with pytest.raises(CheckpointError, match="group_size: got 256, must be positive and divide"):
        scanned(path)


def test_a_quantised_file_without_its_config_is_an_error(base, tmp_path):
    for name in ("ct", "gptq", "awq", "nvfp4", "modelopt", "gpt_oss"):
        path = changed(base[name], tmp_path / name)
        edit_config(path, quantization_config=None)
        with pytest.raises((CheckpointError, UnsupportedError)):
            scanned(path)
        edit_config(path, quantization_config={"bits": 4})
        with pytest.raises(CheckpointError, match="quant_method: missing"):
            scanned(path)


def test_experts_that_are_not_stored_alike_are_an_error(base, tmp_path):
    plain = load_file(base["plain"].path / "model.safetensors")
    quantised = load_file(base["ct"].path / "model.safetensors")
    gone = {name: None for name in quantised if name.startswith(f"{EXPERT}.down_proj")}
    mixed = {**gone, f"{EXPERT}.down_proj.weight": plain[f"{EXPERT}.down_proj.weight"]}
    path = changed(base["ct"], tmp_path / "mixed", **mixed)
    with pytest.raises(CheckpointError, match="some experts are quantised and some are plain"):
        scanned(path)
    scale = f"{EXPERT}.up_proj.weight_scale"
    path = changed(base["ct"], tmp_path / "scale", **{scale: quantised[scale].half()})
    with pytest.raises(UnsupportedError, match="must be stored alike"):
        scanned(path)


def test_units_of_nf3_are_not_cut_out_of_a_tensor_of_all_experts(base, tmp_path):
    own = load_file(base["nf3"].path / "model.safetensors")
    fused = {name: None for name in own if name.startswith(f"{FUSED}.")}
    for suffix in ("codes", "scales"):
        for projection, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj",) * 2):
            names = [parts] if isinstance(parts, str) else parts
            fused[f"{FUSED}.{projection}_{suffix}"] = torch.stack(
                [
                    torch.cat([own[f"{FUSED}.{expert}.{name}.{suffix}"] for name in names])
                    for expert in range(4)
                ]
            )
            bias = torch.zeros(4, 128)
            fused[f"{FUSED}.{projection}_bias"] = bias
    path = changed(base["nf3"], tmp_path, **fused)
    with pytest.raises(UnsupportedError, match=rf"{FUSED}\.gate_up_proj: got all experts in one"):
        scanned(path)


def test_a_recipe_is_refused_where_it_cannot_be_used(base, tmp_path):
    for name in ("ct", "gpt_oss"):
        with pytest.raises(InvalidArgumentError, match="quantised already"):
            scanned(base[name].path, "int4-g32")
    with pytest.raises(InvalidArgumentError, match="recipe 'int4-g128': group_size"):
        scanned(base["plain"].path, "int4-g128")
    path = write(tmp_path / "in", "olmoe", intermediate_size=96).path
    with pytest.raises(InvalidArgumentError, match="recipe 'nf3': n: got 96, must be a multiple"):
        scanned(path, "nf3")


def test_a_weight_too_large_for_a_recipe_names_its_layer(base, tmp_path):
    name = f"{EXPERT}.up_proj.weight"
    weight = load_file(base["plain"].path / "model.safetensors")[name]
    weight[3, 5] = -40
    contents = scanned(changed(base["plain"], tmp_path, **{name: weight}), "nf3")
    source = contents.experts[0].sources[1][2]
    with contents.checkpoint.reader() as reader, pytest.raises(InvalidArgumentError) as caught:
        source.read(reader)
    assert str(caught.value) == (
        f"{EXPERT}.up_proj: weight[3, 5]: got -40, must be below 32 in magnitude for nf3"
    )


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_plain_weight_that_is_no_number_is_not_rounded(base, tmp_path, number):
    name = f"{EXPERT}.up_proj.weight"
    weight = load_file(base["plain"].path / "model.safetensors")[name]
    weight[3, 5] = number
    contents = scanned(changed(base["plain"], tmp_path, **{name: weight}), "int4-g32")
    source = contents.experts[0].sources[1][2]
    with contents.checkpoint.reader() as reader, pytest.raises(CheckpointError, match="NaN or inf"):
        source.read(reader)


def test_a_config_may_choose_by_the_names_of_the_experts_layers(base, tmp_path):
    """Expressions and lists of names match what the file calls a layer, down to its projection."""
    config = json.loads((base["nvfp4"].path / "config.json").read_text())["quantization_config"]
    group = config["config_groups"]["group_0"]
    group["targets"] = [r"re:model\.layers\.\d+\.mlp\.experts\.\d+\.(gate|up|down)_proj$"]
    path = changed(base["nvfp4"], tmp_path / "ct", config={"quantization_config": config})
    assert all(layer.is_packed for layer in scanned(path).experts)
    group["targets"] = [r"re:.*(gate|up)_proj$"]
    path = changed(base["nvfp4"], tmp_path / "not", config={"quantization_config": config})
    with pytest.raises(CheckpointError, match=r"experts\.0\.down_proj: stored as nvfp4"):
        scanned(path)
    layers = {
        name.removesuffix(".weight_scale_2"): {"quant_algo": "NVFP4", "group_size": 16}
        for name in base["modelopt"].tensors
        if name.endswith(".weight_scale_2")
    }
    mixed = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    config = {"quantization_config": {**mixed, "quantized_layers": layers}}
    path = changed(base["modelopt"], tmp_path / "mixed", config=config)
    assert all(layer.is_packed for layer in scanned(path).experts)
    rules = {r"+:.*\.down_proj$": {"bits": 3}}
    config = _quantization(base["gptq"], dynamic=rules)
    with pytest.raises(CheckpointError, match=r"down_proj.qzeros: .* config says 3"):
        scanned(changed(base["gptq"], tmp_path / "dynamic", config=config))


def test_a_bias_that_the_family_has_not_is_noted(base, tmp_path):
    bias = f"{EXPERT}.up_proj.bias"
    experts = scanned(changed(base["gptq"], tmp_path, **{bias: torch.ones(64)})).experts
    noted = {layer.prefix: layer.zero_biases for layer in experts if layer.zero_biases}
    assert noted == {FUSED: (bias,)}
    assert not any(layer.biases for layer in experts)
    with pytest.raises(CheckpointError, match=rf"{bias}: shape \[63\], the config gives \[64\]"):
        scanned(changed(base["gptq"], tmp_path, **{bias: torch.ones(63)}))
    with pytest.raises(CheckpointError, match=f"{bias}: unexpected"):
        scanned(changed(base["plain"], tmp_path, **{bias: torch.zeros(64)}))
