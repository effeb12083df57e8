"""The registry: which formats a config may hold, and which a layer is."""

import time
from pathlib import Path

import pytest

from firesteel.errors import CheckpointError, UnsupportedError
from firesteel.formats.base import Format, Scheme
from firesteel.formats.registry import FORMATS, detect, format_named, formats_for

NAMES = [entry.name for entry in FORMATS]
MIXED = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "config_groups": {
        "group_0": {
            "format": "pack-quantized",
            "targets": ["re:.*self_attn.*"],
            "weights": {"num_bits": 8, "strategy": "channel"},
        },
        "group_1": {
            "format": "nvfp4-pack-quantized",
            "targets": ["re:.*experts.*"],
            "weights": {"num_bits": 4, "type": "float", "group_size": 16},
        },
        "group_2": {
            "format": "mxfp4-pack-quantized",
            "targets": ["re:.*shared_expert.*"],
            "weights": {"num_bits": 4, "type": "float", "group_size": 32},
        },
        "group_3": {
            "format": "float-quantized",
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
        },
    },
}
INT = ["weight_packed", "weight_scale", "weight_shape"]


def test_names_are_unique_and_say_what_they_are():
    assert len(set(NAMES)) == len(NAMES)
    for entry in FORMATS:
        assert isinstance(entry, Format)
        assert format_named(entry.name) is entry
        assert entry.title
        assert not entry.optional() & {entry.marker()}


def test_a_mixed_config_holds_several_formats():
    assert [entry.name for entry in formats_for(MIXED)] == ["compressed-tensors", "mxfp4", "nvfp4"]


@pytest.mark.parametrize(
    ("suffixes", "name"),
    [
        (INT, "compressed-tensors"),
        ([*INT, "weight_zero_point", "bias"], "compressed-tensors"),
        (["weight_packed", "weight_scale"], "mxfp4"),
        (["weight_packed", "weight_scale", "weight_global_scale"], "nvfp4"),
        (["weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"], "nvfp4"),
    ],
)
def test_a_layer_of_a_mixed_config_shows_its_format(suffixes, name):
    assert detect(MIXED, suffixes).name == name


@pytest.mark.parametrize("suffixes", [["weight"], ["weight", "bias"], ["e_score_correction_bias"]])
def test_a_plain_layer_has_no_format(suffixes):
    assert detect(MIXED, suffixes) is None
    assert detect({"quant_method": "gptq"}, suffixes) is None
    assert detect({}, suffixes) is None


@pytest.mark.parametrize(
    ("suffixes", "words"),
    [
        (["trellis", "suh", "svh", "mcg"], "of exl3, and no quantization_config"),
        (["qweight", "qzeros", "scales"], "of gptq or awq or auto-round, and no"),
        (["suh", "svh"], r"\['suh', 'svh'\] of a quantised layer, and no"),
    ],
)
def test_a_quantised_layer_of_a_checkpoint_that_says_nothing_is_refused(suffixes, words):
    with pytest.raises(CheckpointError, match=words):
        detect({}, suffixes)


@pytest.mark.parametrize(
    "suffixes",
    [
        ["weight", "weight_scale"],
        ["qweight", "qzeros", "scales"],
        ["qzeros", "scales"],
        ["weight", "weight_scale_inv"],
        ["suh", "svh"],
    ],
)
def test_a_layer_quantised_otherwise_is_refused_not_taken_for_plain(suffixes):
    with pytest.raises(UnsupportedError, match="which are none of what this config may hold"):
        detect(MIXED, suffixes)


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "bitsandbytes"},
        {"quant_method": "fp8"},
        {"quant_method": "quip"},
        {"quant_method": "no such thing"},
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        {"quantization": {"quant_algo": "W4A8_AWQ"}},
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8}}},
        },
    ],
)
def test_what_is_not_read_lists_what_is(config):
    with pytest.raises(UnsupportedError) as caught:
        formats_for(config)
    message = str(caught.value)
    assert all(name in message for name in NAMES)
    named = config.get("format") or config.get("quant_algo") or config.get("quant_method")
    assert str(named or "W4A8_AWQ") in message


def test_a_config_without_a_method_is_refused():
    with pytest.raises(CheckpointError, match="quant_method: missing, got only"):
        formats_for({"bits": 4})


def test_an_unknown_name_lists_those_known():
    with pytest.raises(UnsupportedError, match="format: got 'gguf', known are") as caught:
        format_named("gguf")
    assert all(name in str(caught.value) for name in NAMES)


def test_the_documents_name_every_format():
    text = (Path(__file__).parents[2] / "docs" / "formats.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in text for name in NAMES)


@pytest.mark.parametrize(
    "config",
    [
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {f"m.{i}.gate": {"quant_algo": "NVFP4"} for i in range(20_000)},
        },
        {
            "quant_method": "auto-round",
            "packing_format": "auto_round",
            "bits": 4,
            "group_size": 32,
            "sym": False,
            "extra_config": {f"m.{i}.gate": {"bits": 4} for i in range(20_000)},
        },
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 32,
            "dynamic": {rf"+:^m\.{i}\.gate$": {"bits": 4} for i in range(2_000)},
        },
    ],
    ids=lambda config: config["quant_method"],
)
def test_a_config_that_names_every_layer_takes_no_square_of_them(config):
    entry = formats_for(config)[0]
    scheme = Scheme(
        format=entry.name,
        element="int4",
        n=32,
        k=32,
        group_size=32,
        scale="fp16",
        has_zero_points=True,
        layout="v1" if entry.name == "gptq" else "gptq:v2-without-g_idx",
    )
    if entry.name == "nvfp4-modelopt":
        scheme = Scheme(
            format=entry.name,
            element="e2m1",
            n=32,
            k=32,
            group_size=16,
            scale="e4m3",
            global_scale="multiplier",
        )
    headers = entry.tensors(scheme)
    begin = time.process_time()
    for i in range(300):
        assert detect(config, headers) is entry
        assert entry.scheme(config, f"m.{i}.gate", headers) == scheme
    # 60 times that many layers are a real model's; slow machines get ten times as long.
    assert time.process_time() - begin < 3
