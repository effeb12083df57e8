"""MXFP4 and NVFP4, four formats: values, global scales, and what is refused."""

from typing import Any

import pytest
import torch

from firesteel.errors import CheckpointError, InvalidArgumentError, UnsupportedError
from firesteel.formats.base import Divisor, Format, Multiplier, QuantizedMatrix, Scheme
from firesteel.formats.mxfp4 import Mxfp4
from firesteel.formats.mxfp4_gpt_oss import Mxfp4GptOss
from firesteel.formats.nvfp4 import Nvfp4
from firesteel.formats.nvfp4_modelopt import Nvfp4Modelopt
from tests.strategies import headers_of

LAYER = "model.layers.0.mlp.experts.0.gate_proj"
VALUES = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
ALL = [Mxfp4(), Mxfp4GptOss(), Nvfp4(), Nvfp4Modelopt()]


def scheme_for(entry: Format, n: int = 3) -> Scheme:
    is_mx = "mx" in entry.name
    global_scale = {"nvfp4": "divisor", "nvfp4-modelopt": "multiplier"}.get(entry.name, "none")
    return Scheme(
        format=entry.name,
        element="e2m1",
        n=n,
        k=64,
        group_size=32 if is_mx else 16,
        scale="e8m0" if is_mx else "e4m3",
        global_scale=global_scale,
    )


def layer(entry: Format) -> dict[str, torch.Tensor]:
    """Codes count up, scales are 2, and a global scale halves."""
    scheme = scheme_for(entry)
    scales = torch.full((3, scheme.num_groups), 2.0).to(torch.float8_e4m3fn)
    if scheme.scale == "e8m0":
        scales = torch.full((3, scheme.num_groups), 128, dtype=torch.uint8)
    global_scale = {
        "none": None,
        "divisor": Divisor(torch.tensor(4.0)),
        "multiplier": Multiplier(torch.tensor(0.25)),
    }[scheme.global_scale]
    codes = (torch.arange(3 * 64) % 16).reshape(3, 64).byte()
    return entry.pack(
        scheme, QuantizedMatrix(codes=codes, scales=scales, global_scale=global_scale)
    )


def scheme_of(entry: Format, stored: dict, **changes: Any) -> Scheme:
    config = {**entry.config(scheme_for(entry)), **changes}
    return entry.scheme(config, LAYER, headers_of(stored))


@pytest.mark.parametrize("entry", ALL, ids=lambda entry: entry.name)
def test_the_worked_example_of_the_documents(entry):
    stored = layer(entry)
    codes = stored[
        {"mxfp4-gpt-oss": "blocks", "nvfp4-modelopt": "weight"}.get(entry.name) or ("weight_packed")
    ]
    assert codes.flatten()[:4].tolist() == [0x10, 0x32, 0x54, 0x76]
    scheme = scheme_of(entry, stored)
    assert scheme == scheme_for(entry)
    step = 2.0 if scheme.global_scale == "none" else 0.5
    weight = entry.unpack(scheme, stored).dequantize(scheme)
    assert weight[0, :16].tolist() == [step * value for value in VALUES]


@pytest.mark.parametrize("entry", ALL, ids=lambda entry: entry.name)
def test_every_missing_or_wrong_tensor_is_named(entry):
    stored = layer(entry)
    scheme = scheme_of(entry, stored)
    for suffix in entry.tensors(scheme):
        rest = {key: value for key, value in stored.items() if key != suffix}
        with pytest.raises(CheckpointError, match=rf"{LAYER}\.{suffix}: missing"):
            scheme_of(entry, rest)
        with pytest.raises(CheckpointError, match=f"{suffix}: missing"):
            entry.unpack(scheme, rest)
        wrong = {**stored, suffix: stored[suffix].float().to(torch.float64)}
        with pytest.raises(CheckpointError, match=rf"{suffix}: got float64"):
            scheme_of(entry, wrong)
        with pytest.raises(CheckpointError, match=rf"{suffix}: got float64"):
            entry.unpack(scheme, wrong)


@pytest.mark.parametrize("entry", ALL, ids=lambda entry: entry.name)
def test_a_scale_that_is_no_number_is_refused(entry):
    stored = layer(entry)
    scheme = scheme_of(entry, stored)
    suffix = "scales" if entry.name == "mxfp4-gpt-oss" else "weight_scale"
    bits = 255 if scheme.scale == "e8m0" else 0x7F
    stored[suffix].view(torch.uint8)[2, 1] = bits
    with pytest.raises(CheckpointError, match=rf"{suffix}\[2, 1\]: got nan, must be finite"):
        entry.unpack(scheme, stored)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_global_scale_that_is_no_number_is_refused(value):
    for entry, suffix in ((Nvfp4(), "weight_global_scale"), (Nvfp4Modelopt(), "weight_scale_2")):
        stored = layer(entry)
        stored[suffix].fill_(value)
        with pytest.raises(CheckpointError, match=f"{suffix}: got {value}, must be finite"):
            entry.unpack(scheme_of(entry, stored), stored)


def test_a_divisor_of_zero_is_refused_and_a_multiplier_is_not():
    stored = layer(Nvfp4())
    stored["weight_global_scale"].zero_()
    with pytest.raises(CheckpointError, match="must be finite and not zero"):
        Nvfp4().unpack(scheme_of(Nvfp4(), stored), stored)
    stored = layer(Nvfp4Modelopt())
    stored["weight_scale_2"].zero_()
    scheme = scheme_of(Nvfp4Modelopt(), stored)
    assert not Nvfp4Modelopt().unpack(scheme, stored).dequantize(scheme).any()


def test_a_divisor_cannot_be_packed_as_a_multiplier():
    matrix = Nvfp4().unpack(scheme_for(Nvfp4()), layer(Nvfp4()))
    with pytest.raises(InvalidArgumentError, match=r"global_scale: .*scheme wants 'multiplier'"):
        Nvfp4Modelopt().pack(scheme_for(Nvfp4Modelopt()), matrix)


@pytest.mark.parametrize("entry", ALL, ids=lambda entry: entry.name)
def test_a_width_that_is_no_whole_group_is_refused(entry):
    stored = layer(entry)
    if entry.name == "mxfp4-gpt-oss":
        stored["blocks"] = stored["blocks"][..., :15]
        with pytest.raises(CheckpointError, match=r"blocks: got uint8 \[3, 2, 15\], expected"):
            scheme_of(entry, stored)
        return
    suffix = entry.marker() if entry.name != "nvfp4-modelopt" else "weight"
    stored[suffix] = stored[suffix][:, :-1]
    with pytest.raises(CheckpointError, match="must be positive and divide k = 62"):
        scheme_of(entry, stored)


def test_another_group_size_is_refused():
    for entry in (Mxfp4(), Nvfp4()):
        config = entry.config(scheme_for(entry))
        config["config_groups"]["group_0"]["weights"]["group_size"] = 64
        with pytest.raises(UnsupportedError, match=f"{entry.name} group_size: got 64, supported"):
            entry.scheme(config, LAYER, headers_of(layer(entry)))
    with pytest.raises(UnsupportedError, match="group_size: got 32, supported is 16"):
        scheme_of(Nvfp4Modelopt(), layer(Nvfp4Modelopt()), group_size=32)


def test_quantised_activations_are_let_be():
    for entry, suffix in ((Nvfp4(), "input_global_scale"), (Nvfp4Modelopt(), "input_scale")):
        stored = {**layer(entry), suffix: torch.ones(1)}
        assert scheme_of(entry, stored) == scheme_for(entry)
        assert suffix in entry.optional()
    config = Nvfp4().config(scheme_for(Nvfp4()))
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 4, "dynamic": "local"}
    assert Nvfp4().scheme(config, LAYER, headers_of(layer(Nvfp4()))) == scheme_for(Nvfp4())


MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


@pytest.mark.parametrize(
    "config",
    [
        MODELOPT,
        {**MODELOPT, "group_size": 16, "exclude_modules": ["lm_head"]},
        {**MODELOPT, "quant_algo": "W4A16_NVFP4"},
        {**MODELOPT, "config_groups": {"group_0": {"weights": {"group_size": 16}}}},
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}},
        {
            "quant_method": "modelopt",
            "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": []},
        },
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                LAYER: {"quant_algo": "NVFP4", "group_size": 16},
                "model.other": {"quant_algo": "FP8"},
            },
        },
    ],
)
def test_every_form_of_modelopt_s_config_is_read(config):
    entry = Nvfp4Modelopt()
    assert entry.claims(config)
    assert entry.scheme(config, LAYER, headers_of(layer(entry))) == scheme_for(entry)


def test_modelopt_layers_that_the_config_does_not_say_are_refused():
    entry, headers = Nvfp4Modelopt(), headers_of(layer(Nvfp4Modelopt()))
    mixed = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    with pytest.raises(CheckpointError, match="quantized_layers has no such layer"):
        entry.scheme({**mixed, "quantized_layers": {}}, LAYER, headers)
    other = {**mixed, "quantized_layers": {LAYER: {"quant_algo": "NVFP4_AWQ"}}}
    with pytest.raises(UnsupportedError, match="quant_algo: got 'NVFP4_AWQ', supported are"):
        entry.scheme(other, LAYER, headers)
    assert not entry.claims({"quant_method": "modelopt", "quant_algo": "FP8"})
    assert not entry.claims({"quant_method": "compressed-tensors"})
