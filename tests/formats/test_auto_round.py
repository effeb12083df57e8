"""auto-round native: which tensors and zero points a config stands for."""

from dataclasses import replace
from typing import Any

import pytest

from firesteel.errors import CheckpointError, UnsupportedError
from firesteel.formats.auto_round import AutoRound
from firesteel.formats.base import Scheme

LAYER = "model.layers.0.mlp.experts.0.gate_proj"
CONFIG = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:auto_gptq",
    "bits": 4,
    "group_size": 32,
    "sym": False,
    "data_type": "int",
    "act_bits": 16,
}
SCHEME = Scheme(
    format="auto-round",
    element="int4",
    n=32,
    k=64,
    group_size=32,
    scale="fp16",
    has_zero_points=True,
    layout="gptq:v1-without-g_idx",
)


def scheme_of(expected: Scheme = SCHEME, **changes: Any) -> Scheme:
    """What is made of the config for a layer stored as `expected` says."""
    headers = AutoRound().tensors(expected)
    return AutoRound().scheme({**CONFIG, **changes}, LAYER, headers)


@pytest.mark.parametrize(
    ("packing", "layout"),
    [
        ("auto_round:auto_gptq", "gptq:v1-without-g_idx"),
        ("auto_round:gptq", "gptq:v1-without-g_idx"),
        ("auto_round:gptq:exllamav2", "gptq:v1-without-g_idx"),
        ("auto_round", "gptq:v2-without-g_idx"),
        ("auto_round:exllamav2", "gptq:v2-without-g_idx"),
        ("auto_round:gptqmodel", "gptq:v2"),
        ("auto_round:auto_awq", "awq:"),
        ("auto_round:awq", "awq:"),
    ],
)
def test_the_packing_format_says_tensors_and_zero_points(packing, layout):
    expected = replace(SCHEME, layout=layout)
    assert scheme_of(expected, packing_format=packing) == expected
    assert scheme_of(expected, packing_format=None, backend=packing) == expected


@pytest.mark.parametrize("method", ["auto-round", "auto_round", "intel/auto-round"])
def test_every_spelling_is_claimed(method):
    assert AutoRound().claims({"quant_method": method})


@pytest.mark.parametrize(
    "extra",
    [
        {LAYER: {"bits": 8, "group_size": 64}},
        {LAYER: {"bits": 8, "group_size": 64, "sym": None}},
        {r".*experts\.0.*": {"bits": 8, "group_size": 64}},
        {r"experts\.\d+\.gate": {"bits": 8, "group_size": 64}},
        {r".*": {"bits": 3}, LAYER: {"bits": 8, "group_size": 64}},
        {"model.layers.0.mlp.experts.0.gate": {"bits": 16}, ".*": {"bits": 8, "group_size": 64}},
        {"(": {"bits": 3}, ".*": {"bits": 8, "group_size": 64}},
    ],
)
def test_extra_config_overrides_by_name_or_expression(extra):
    expected = replace(SCHEME, element="int8", group_size=64)
    assert scheme_of(expected, extra_config=extra) == expected


def test_a_layer_of_16_bits_must_not_be_stored():
    with pytest.raises(CheckpointError, match="stored, but extra_config gives it 16 bits"):
        scheme_of(extra_config={LAYER: {"bits": 16}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"packing_format": "auto_round:fp8"}, "packing_format: got 'auto_round:fp8', supported"),
        ({"packing_format": "auto_round:llm_compressor"}, "got 'auto_round:llm_compressor'"),
        ({"packing_format": "marlin"}, "packing_format: got 'marlin'"),
        ({"data_type": "mx_fp"}, "data_type: got 'mx_fp', supported is 'int'"),
        ({"act_bits": 8}, "act_bits: got 8, supported is 16"),
        ({"bits": 2}, r"bits: got 2, supported are \[3, 4, 8\]"),
        ({"rotation_config": {"size": 32}}, "rotation_config: got one"),
    ],
)
def test_unsupported_options_list_what_is_supported(changes, message):
    with pytest.raises(UnsupportedError, match=message):
        scheme_of(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"packing_format": None}, "packing_format: missing, must be a string"),
        ({"sym": None}, "sym: got None, must be bool"),
        ({"group_size": 64}, "qzeros: got|scales: got"),
        ({"packing_format": "auto_round:auto_awq"}, "qzeros: got|scales: got|divide k"),
    ],
)
def test_a_config_that_the_file_contradicts_is_refused(changes, message):
    with pytest.raises(CheckpointError, match=message):
        scheme_of(**changes)


def test_only_gptqmodel_s_packing_has_g_idx():
    without = {"qweight", "qzeros", "scales"}
    for layout, suffixes in (
        ("awq:", without),
        ("gptq:v1-without-g_idx", without),
        ("gptq:v2-without-g_idx", without),
        ("gptq:v2", without | {"g_idx"}),
    ):
        assert AutoRound().tensors(replace(SCHEME, layout=layout)).keys() == suffixes
