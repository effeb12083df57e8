"""GPTQ: what its config means, and what is refused."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firesteel.errors import CheckpointError, UnsupportedError
from firesteel.formats.base import QuantizedMatrix, Scheme
from firesteel.formats.gptq import Gptq
from tests.strategies import headers_of, matrices, schemes

LAYER = "model.layers.0.mlp.experts.0.gate_proj"
CONFIG = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "sym": False,
    "desc_act": False,
    "checkpoint_format": "gptq",
}


def layer(*, layout: str = "v1", bits: int = 4, k: int = 64, **options: object) -> dict:
    """Stored tensors of a small layer whose codes count up and whose zero points are 3."""
    scheme = Scheme(
        format="gptq",
        element=f"int{bits}",
        n=32,
        k=k,
        group_size=32,
        scale="fp16",
        has_zero_points=True,
        layout=layout,
        **options,
    )
    codes = torch.arange(32 * k).reshape(32, k) % (1 << bits)
    return Gptq().pack(
        scheme,
        QuantizedMatrix(
            codes=codes.byte(),
            scales=torch.full((32, k // 32), 0.5, dtype=torch.float16),
            zero_points=torch.full((32, k // 32), 3, dtype=torch.uint8),
            group_index=(torch.arange(k) % (k // 32)).int()
            if options.get("has_group_index")
            else None,
        ),
    )


def scheme_of(stored: dict, **changes: object) -> Scheme:
    return Gptq().scheme({**CONFIG, **changes}, LAYER, headers_of(stored))


def test_the_worked_example_of_the_documents():
    stored = layer()
    assert stored["qweight"][0, 0].item() == 0x76543210
    # Zero point 3 is stored as 2 in v1, as 3 in v2.
    assert stored["qzeros"][0, 0].item() == 0x22222222
    assert layer(layout="v2")["qzeros"][0, 0].item() == 0x33333333
    assert stored["g_idx"].tolist() == [0] * 32 + [1] * 32
    weight = Gptq().unpack(scheme_of(stored), stored).dequantize(scheme_of(stored))
    assert weight[0, :5].tolist() == [-1.5, -1.0, -0.5, 0.0, 0.5]


def test_a_zero_point_of_0_borrows_from_the_next_in_v1():
    """As gptqmodel writes: 0x11111111 taken from the whole word of zero points 0, 5, 5, ..."""
    stored = layer()
    scheme = scheme_of(stored)
    matrix = Gptq().unpack(scheme, stored)
    matrix.zero_points[:] = 5
    matrix.zero_points[0] = 0
    word = Gptq().pack(scheme, matrix)["qzeros"][0, 0].item()
    assert word == 0x55555550 - 0x11111111 == 0x4444443F
    again = Gptq().unpack(scheme, Gptq().pack(scheme, matrix))
    assert torch.equal(again.zero_points, matrix.zero_points)


def test_three_bit_zero_points_of_0_are_stored_as_7_in_v1():
    stored = layer(bits=3)
    scheme = scheme_of(stored, bits=3)
    matrix = Gptq().unpack(scheme, stored)
    matrix.zero_points[:] = 0
    assert Gptq().pack(scheme, matrix)["qzeros"][0].tolist() == [-1, -1, -1]


@pytest.mark.parametrize(("named", "layout"), [("gptq", "v1"), (None, "v1"), ("gptq_v2", "v2")])
def test_the_checkpoint_format_says_the_version(named, layout):
    assert scheme_of(layer(), checkpoint_format=named).layout == layout


def test_a_group_size_of_minus_one_is_one_scale_a_row():
    stored = layer(k=32)
    assert scheme_of(stored, group_size=-1).group_size == 32


def test_symmetric_layers_must_have_the_middle_as_zero_point():
    stored = layer()
    scheme = scheme_of(stored, sym=True)
    assert not scheme.has_zero_points
    with pytest.raises(CheckpointError, match="qzeros: got a zero point of 3, must be 8"):
        Gptq().unpack(scheme, stored)


def test_a_config_that_does_not_say_symmetric_is_read_with_zero_points():
    config = {key: value for key, value in CONFIG.items() if key != "sym"}
    assert Gptq().scheme(config, LAYER, headers_of(layer())).has_zero_points


@given(st.data())
def test_act_order_needs_whole_groups(data):
    drawn = data.draw(schemes(["gptq"]))
    scheme = replace(drawn, group_size=16, has_group_index=True, layout="v1")
    stored = Gptq().pack(scheme, data.draw(matrices(scheme)))
    column = data.draw(st.integers(0, scheme.k - 1))
    old = int(stored["g_idx"][column])
    new = data.draw(st.integers(-2, scheme.num_groups + 1).filter(lambda group: group != old))
    stored["g_idx"][column] = new
    with pytest.raises(CheckpointError, match="g_idx: got"):
        Gptq().unpack(scheme, stored)


def test_an_order_of_columns_without_desc_act_is_refused():
    stored = layer(has_group_index=True)
    with pytest.raises(CheckpointError, match=r"g_idx: got an order of columns.*desc_act: false"):
        Gptq().unpack(scheme_of(stored), stored)


def test_desc_act_without_g_idx_is_refused():
    stored = layer(layout="v1-without-g_idx")
    with pytest.raises(CheckpointError, match=r"g_idx: missing.*desc_act"):
        scheme_of(stored, desc_act=True)


@pytest.mark.parametrize(
    ("rules", "bits"),
    [
        ({r"+:.*\.experts\..*": {"bits": 8, "group_size": 64}}, 8),
        ({r".*gate_proj": {"bits": 8, "group_size": 64}}, 8),
        # The first rule that matches wins; a match begins at the name's start.
        ({r"+:mlp": {"bits": 3}, r"+:model": {"bits": 8, "group_size": 64}}, 8),
        ({r"-:.*up_proj": {}, r"+:.*gate": {"bits": 8, "group_size": 64}, r"+:m": {"bits": 3}}, 8),
        ({r"+:.*up_proj": {"bits": 8}}, 4),
    ],
)
def test_dynamic_rules_override_bits_and_group_size(rules, bits):
    scheme = Scheme(
        format="gptq",
        element=f"int{bits}",
        n=32,
        k=64,
        group_size=64 if bits == 8 else 32,
        scale="fp16",
        has_zero_points=True,
        layout="v1",
    )
    headers = Gptq().tensors(scheme)
    assert Gptq().scheme({**CONFIG, "dynamic": rules}, LAYER, headers) == scheme


def test_a_layer_that_a_dynamic_rule_excludes_must_not_be_stored():
    with pytest.raises(CheckpointError, match=r"stored, but dynamic rule '-:.\*gate' excludes"):
        scheme_of(layer(), dynamic={"-:.*gate": {}})


def test_a_dynamic_rule_that_is_no_expression_is_refused():
    with pytest.raises(CheckpointError, match="dynamic: got"):
        scheme_of(layer(), dynamic={"+:(": {"bits": 8}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpoint_format": "marlin"}, "'marlin', supported are .'gptq', 'gptq_v2'"),
        ({"checkpoint_format": "gptq_p"}, "'gptq_p', supported are"),
        ({"is_marlin_format": True}, "'marlin', supported are"),
        ({"pack_dtype": "int64"}, "pack_dtype: got 'int64'"),
        ({"bits": 2}, r"bits: got 2, supported are \[3, 4, 8\]"),
        ({"group_size": 48}, r"group_size: got 48, supported are \[16, 32"),
    ],
)
def test_unsupported_options_list_what_is_supported(changes, message):
    with pytest.raises(UnsupportedError, match=message):
        scheme_of(layer(), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": None}, "quantization_config.bits: got None, must be int"),
        ({"bits": "4"}, "bits: got '4', must be int"),
        ({"bits": True}, "bits: got True, must be int"),
        ({"bits": 8}, "which is 4 bits, config says 8"),
        ({"bits": 3}, "which is 4 bits, config says 3"),
        ({"group_size": 128}, "group_size: got 128, must be positive and divide k = 64"),
        ({"group_size": 16}, r"scales: got float16 \[2, 32\], expected float16 \[4, 32\]|qzeros"),
    ],
)
def test_a_config_that_the_file_contradicts_is_refused(changes, message):
    with pytest.raises(CheckpointError, match=message):
        scheme_of(layer(), **changes)


def test_a_config_without_bits_is_refused():
    config = {key: value for key, value in CONFIG.items() if key != "bits"}
    with pytest.raises(CheckpointError, match=r"quantization_config.bits: missing"):
        Gptq().scheme(config, LAYER, headers_of(layer()))


@pytest.mark.parametrize("suffix", ["qweight", "qzeros", "scales"])
def test_a_missing_tensor_is_named(suffix):
    stored = layer()
    scheme = scheme_of(stored)
    del stored[suffix]
    with pytest.raises(CheckpointError, match=rf"{LAYER}\.{suffix}: missing"):
        scheme_of(stored)
    with pytest.raises(CheckpointError, match=rf"{suffix}: missing"):
        Gptq().unpack(scheme, stored)


@pytest.mark.parametrize("suffix", ["qweight", "qzeros", "scales", "g_idx"])
def test_a_wrong_dtype_or_shape_is_named(suffix):
    stored = layer()
    scheme = scheme_of(stored)
    for wrong in (stored[suffix].to(torch.float64), stored[suffix][..., :-1]):
        changed = {**stored, suffix: wrong}
        with pytest.raises(CheckpointError, match=r"(qzeros|scales|g_idx|qweight): got"):
            scheme_of(changed)
        with pytest.raises(CheckpointError, match=f"{suffix}: got"):
            Gptq().unpack(scheme, changed)


def test_an_unknown_tensor_is_refused_and_a_bias_is_not():
    stored = layer()
    scheme = scheme_of({**stored, "bias": torch.zeros(32)})
    assert scheme.n == 32
    with pytest.raises(CheckpointError, match=r"gate_proj.perm: unexpected"):
        scheme_of({**stored, "perm": torch.zeros(64, dtype=torch.int32)})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_scale_that_is_no_number_is_refused(value):
    stored = layer()
    scheme = scheme_of(stored)
    stored["scales"][1, 7] = value
    with pytest.raises(CheckpointError, match=r"scales\[1, 7\]: got .*must be finite"):
        Gptq().unpack(scheme, stored)
