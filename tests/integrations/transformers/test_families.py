"""Every family in every format: the same numbers as the host's own model with these weights."""

from pathlib import Path

import pytest
import torch

from firesteel.formats.packed import packed_bytes
from firesteel.integrations.transformers import load_model, load_report
from tests.checkpoints import FAMILY_NAMES, STORAGES, oracle, write
from tests.integrations.transformers.compare import (
    assert_same,
    assert_same_bits,
    assert_saved,
    buffers,
    digests,
    num_bytes,
    packed_experts,
)

# Each family in one format of each kind; each further storage in one family, taken in turn.
_EVERYWHERE = ("ct-w4-g32-asym", "gptq-w4-desc_act", "awq-asym", "nvfp4")
_ONCE = [
    (FAMILY_NAMES[index % len(FAMILY_NAMES)], name)
    for index, name in enumerate(name for name in STORAGES if name != "mxfp4-gpt-oss")
    if name not in _EVERYWHERE
]
_PAIRS = [(family, name) for family in FAMILY_NAMES for name in _EVERYWHERE] + _ONCE
_MOE_LAYERS = {"gpt_oss": 2, "mixtral": 2, "olmoe": 2}


@pytest.mark.parametrize(
    ("family", "storage"), [*_PAIRS, ("gpt_oss", "mxfp4-gpt-oss")], ids=lambda value: value
)
def test_a_packed_model_is_the_host_s_with_dequantised_weights(tmp_path, family, storage):
    written = write(tmp_path / "in", family, STORAGES[storage], seed=len(family))
    model = load_model(written.path, dtype=torch.float32)
    assert_same(model, oracle(written))
    modules = packed_experts(model)
    assert len(modules) == _MOE_LAYERS.get(family, 2)
    report = load_report(model)
    assert sum(report.experts.values()) == len(modules)
    assert all(STORAGES[storage].format in name for name in report.experts)
    assert report.experts_bytes == sum(map(num_bytes, modules.values()))
    assert (report.host_experts, report.expanded, report.ignored) == (0, (), ())


@pytest.mark.host
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_each_family_loads_generates_and_saves(tmp_path, family):
    written = write(tmp_path / "in", family, STORAGES["ct-w4-g32"], num_shards=2)
    before = digests(written.path)
    model = load_model(written.path, dtype=torch.float32)
    assert_same(model, oracle(written))
    assert digests(written.path) == before
    model = load_model(written.path)
    model.save_pretrained(tmp_path / "out")
    assert_saved(tmp_path / "out", written.tensors, torch.bfloat16)
    again = load_model(tmp_path / "out")
    assert_same_bits(buffers(again), buffers(model))


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_quantised_attention_and_dense_layers_stay_packed(tmp_path, family):
    written = write(tmp_path / "in", family, STORAGES["gptq-w4-v1-asym"], linears=True)
    model = load_model(written.path, dtype=torch.float32)
    assert_same(model, oracle(written))
    report = load_report(model)
    linears = {name for name in written.schemes if ".experts." not in name}
    assert sum(report.linears.values()) + len(report.expanded) == len(linears) > 4
    assert all(name.endswith("indexer.weights_proj") for name in report.expanded)
    names = dict(model.named_parameters())
    assert not [
        name for name in linears if f"{name}.weight" in names and name not in report.expanded
    ]


@pytest.mark.parametrize("storage", ["ct-w4-g32-asym", "ct-w8-channel", "gptq-w3-v2", "nvfp4"])
def test_no_wider_copy_of_the_experts_is_kept(tmp_path, storage):
    written = write(tmp_path / "in", "qwen3_moe", STORAGES[storage], moe_intermediate_size=128)
    model = load_model(written.path)
    schemes = [scheme for name, scheme in written.schemes.items() if ".experts." in name]
    packed = sum(map(packed_bytes, schemes))
    report = load_report(model)
    assert report.experts_bytes == packed
    assert report.experts_bf16_bytes == sum(2 * scheme.n * scheme.k for scheme in schemes)
    plain = oracle(written, torch.bfloat16)
    host = num_bytes(plain) - report.experts_bf16_bytes
    assert num_bytes(model) == host + packed


def test_two_shards_and_one_file_give_the_same_bits(tmp_path):
    one = write(tmp_path / "one", "olmoe", STORAGES["awq-asym"])
    many = write(tmp_path / "many", "olmoe", STORAGES["awq-asym"], num_shards=3)
    assert len(list(Path(many.path).glob("*.safetensors"))) == 3
    assert_same_bits(buffers(load_model(one.path)), buffers(load_model(many.path)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_models_stay_near_the_float32_one(tmp_path, dtype):
    # Rounding to dtype some fifteen times a layer, each time by eps / 2 of the hidden state at
    # most: 3 * 15 * eps / 2 of the largest logit if all pulled one way. Each token has all experts,
    # since rounding may choose others, as it does on some processors.
    written = write(tmp_path / "in", "qwen3_moe", STORAGES["ct-w4-g32"], num_experts_per_tok=4)
    model = load_model(written.path, dtype=dtype)
    ids = torch.arange(7).unsqueeze(0)
    with torch.no_grad():
        logits = model(ids).logits
        wanted = oracle(written)(ids).logits
    assert logits.dtype == dtype
    bound = 45 * torch.finfo(dtype).eps / 2 * wanted.abs().max()
    assert (logits.float() - wanted).abs().max() <= bound
