"""The ways in: `load_model`, the host's own calls, plain checkpoints; and what they leave alone."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from firesteel.errors import InvalidArgumentError
from firesteel.integrations.transformers import (
    FiresteelConfig,
    firesteel_config,
    load_model,
    load_report,
)
from tests.checkpoints import FAMILY_NAMES, PLAIN, STORAGES, Storage, oracle, write
from tests.integrations.transformers.compare import (
    assert_same,
    assert_same_bits,
    assert_saved,
    buffers,
    digests,
    files_of,
    num_bytes,
    packed_experts,
    prompts,
)

# recipe to the storage whose numbers it gives
_RECIPES = {
    "int4-g32": Storage("compressed-tensors", "int4-g32", "stream"),
    "int4-g64-asym": Storage("compressed-tensors", "int4-g64-asym", "stream"),
    "int3-g32": Storage("compressed-tensors", "int3-g32", "stream"),
    "int8-channel": Storage("compressed-tensors", "int8-channel", "stream"),
    "int8-g16-asym": Storage("compressed-tensors", "int8-g16-asym", "stream"),
    "mxfp4": STORAGES["mxfp4"],
    "nvfp4": STORAGES["nvfp4"],
    "nf3": STORAGES["nf3"],
}
_PAIRS = list(zip(FAMILY_NAMES, _RECIPES, strict=True))
_PAIRS += [("gpt_oss", "nvfp4"), ("mixtral", "int3-g32")]


@pytest.mark.parametrize(("family", "recipe"), _PAIRS)
def test_plain_experts_are_quantised_on_load(tmp_path, family, recipe):
    plain = write(tmp_path / "plain", family)
    before = digests(plain.path)
    wanted = oracle(write(tmp_path / "stored", family, _RECIPES[recipe]))
    model = load_model(plain.path, quantize=recipe, dtype=torch.float32)
    assert_same(model, wanted)
    report = load_report(model)
    assert sum(report.experts.values()) == len(packed_experts(model)) == 2
    assert report.experts_bytes == sum(map(num_bytes, packed_experts(model).values()))
    assert digests(plain.path) == before


@pytest.mark.host
@pytest.mark.parametrize(("family", "recipe"), _PAIRS)
def test_a_model_quantised_on_load_saves_as_a_quantised_checkpoint(tmp_path, family, recipe):
    plain = write(tmp_path / "plain", family)
    model = load_model(plain.path, quantize=recipe)
    model.save_pretrained(tmp_path / "out")
    again = load_model(tmp_path / "out")
    assert_same_bits(buffers(again), buffers(model))
    assert load_report(again).experts == load_report(model).experts
    again.save_pretrained(tmp_path / "more")
    assert_same_bits(files_of(tmp_path / "more"), files_of(tmp_path / "out"))
    stored = files_of(tmp_path / "out")
    assert not [name for name in stored if ".experts." in name and name.endswith("_proj.weight")]


@pytest.mark.host
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_plain_experts_run_as_the_host_s_own(tmp_path, family):
    written = write(tmp_path / "in", family)
    model = load_model(written.path, dtype=torch.float32)
    assert model.config._experts_implementation == "firesteel"
    assert not packed_experts(model)
    assert_same(model, oracle(written))
    report = load_report(model)
    assert (report.host_experts, report.experts) == (2, {})
    model.set_experts_implementation("eager")
    with torch.no_grad():
        assert torch.isfinite(model(prompts()).logits).all()


@pytest.mark.host
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_the_experts_implementation_serves_models_of_the_host_s_own(tmp_path, family):
    written = write(tmp_path / "in", family)
    model = AutoModelForCausalLM.from_pretrained(
        written.path, dtype=torch.float32, experts_implementation="firesteel"
    )
    assert_same(model, oracle(written))


@pytest.mark.host
@pytest.mark.parametrize("name", ["grouped_mm", "batched_mm", "eager"])
def test_no_other_implementation_reads_packed_experts(tmp_path, name):
    model = load_model(write(tmp_path / "in", "qwen3_moe", STORAGES["awq-asym"]).path)
    model.set_experts_implementation(name)
    with pytest.raises(InvalidArgumentError, match=f"experts_implementation: got '{name}'"):
        model(prompts())
    model.set_experts_implementation("firesteel")
    assert torch.isfinite(model(prompts()).logits).all()


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v32"])
def test_the_host_s_own_call_gives_the_same(tmp_path, family):
    written = write(tmp_path / "in", family, STORAGES["ct-w4-g32-asym"])
    config = firesteel_config(written.path)
    model = AutoModelForCausalLM.from_pretrained(written.path, config=config)
    assert_same_bits(buffers(model), buffers(load_model(written.path)))
    config = firesteel_config(write(tmp_path / "plain", family).path, quantize="int4-g32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", config=config)
    wanted = load_model(tmp_path / "plain", quantize="int4-g32")
    assert_same_bits(buffers(model), buffers(wanted))


def test_a_model_may_be_cast_and_its_scales_stay(tmp_path):
    written = write(tmp_path / "in", "qwen3_moe", STORAGES["nvfp4"], linears=True)
    wanted = load_model(written.path, dtype=torch.float32)
    for cast in (torch.float16, torch.float32):
        model = load_model(written.path).to(cast)
        for name, tensor in model.named_buffers():
            if "packed" in name or ".experts." in name:
                assert not tensor.is_floating_point(), name
                assert torch.equal(tensor, wanted.get_buffer(name)), name
    assert_same(model, wanted)


@pytest.mark.parametrize("device_map", ["auto", {"": "cpu"}])
def test_a_device_map_of_the_host_s_own(tmp_path, device_map):
    pytest.importorskip("accelerate")
    written = write(tmp_path / "in", "qwen3_moe", STORAGES["ct-w4-g32"])
    model = load_model(written.path, device_map=device_map)
    assert_same_bits(buffers(model), buffers(load_model(written.path)))


def test_disk_offload_is_refused(tmp_path):
    written = write(tmp_path / "in", "qwen3_moe", STORAGES["ct-w4-g32"])
    with pytest.raises(InvalidArgumentError, match="device_map: got 'disk'"):
        load_model(written.path, device_map={"": "disk"}, offload_folder=tmp_path / "off")


def test_a_recipe_for_quantised_experts_is_refused(tmp_path):
    written = write(tmp_path / "in", "olmoe", STORAGES["ct-w4-g32"])
    with pytest.raises(InvalidArgumentError, match="quantised already"):
        load_model(written.path, quantize="int4-g32")
    with pytest.raises(InvalidArgumentError, match="quantised already"):
        firesteel_config(written.path, quantize="int4-g32")


@pytest.mark.parametrize("recipe", ["", "int5-g32", "int4", "int4-g128-sym", "awq"])
def test_an_unknown_recipe_is_refused_with_those_known(tmp_path, recipe):
    plain = write(tmp_path / "in", "olmoe", PLAIN)
    with pytest.raises(InvalidArgumentError, match="mxfp4; nvfp4; nf3"):
        load_model(plain.path, quantize=recipe)


def test_the_report_is_of_loaded_models_only(tmp_path):
    model = oracle(write(tmp_path / "in", "olmoe"))
    with pytest.raises(TypeError, match="must be one that firesteel loaded"):
        load_report(model)
    with pytest.raises(InvalidArgumentError, match="quant_method"):
        FiresteelConfig(quant_method="gptq")


def test_saving_a_plain_model_gives_the_plain_checkpoint(tmp_path):
    written = write(tmp_path / "in", "mixtral")
    load_model(written.path).save_pretrained(tmp_path / "out")
    assert_saved(tmp_path / "out", written.tensors, torch.bfloat16)
    assert not hasattr(AutoConfig.from_pretrained(tmp_path / "out"), "quantization_config")


_WATCH = """
import sys
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers import core_model_loading, modeling_utils
from transformers.integrations import moe
from transformers.models.qwen3_moe import modeling_qwen3_moe
from transformers.quantizers import auto, base

def watched():
    owners = [core_model_loading, modeling_utils, moe, modeling_qwen3_moe, auto, base,
              PreTrainedModel, AutoConfig, AutoModelForCausalLM, moe.ExpertsInterface,
              base.HfQuantizer, modeling_qwen3_moe.Qwen3MoeForCausalLM,
              modeling_qwen3_moe.Qwen3MoeExperts]
    return {(repr(o), name): id(v) for o in owners for name, v in vars(o).items()
            if callable(v) or isinstance(v, (classmethod, staticmethod, property))}

before = watched()
assert len(before) > 200, len(before)
from firesteel.integrations.transformers import load_model
model = load_model(sys.argv[1])
model.generate(max_new_tokens=2, inputs=model.dummy_inputs["input_ids"][:, :3] % 8)
after = watched()
changed = [key for key in before if after.get(key) != before[key]]
assert not changed, changed
"""


@pytest.mark.host
def test_nothing_of_transformers_is_replaced(tmp_path):
    written = write(tmp_path / "in", "qwen3_moe", STORAGES["gptq-w4-v1"])
    command = [sys.executable, "-W", "error", "-c", _WATCH, str(written.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert Path(written.path).exists()
