"""compressed-tensors integers: layouts, config groups, and what is refused."""

import copy
from typing import Any

import pytest
import torch

from firesteel.errors import CheckpointError, UnsupportedError
from firesteel.formats.base import QuantizedMatrix, Scheme, TensorHeader
from firesteel.formats.compressed_tensors import CompressedTensors
from tests.strategies import headers_of

LAYER = "model.layers.0.mlp.experts.0.gate_proj"
FORMAT = CompressedTensors()


def config_of(**changes: Any) -> dict[str, Any]:
    """The config of `layer`, with some entries of its weights changed."""
    weights = {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": 32,
        "symmetric": True,
        "actorder": None,
        **changes,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


def layer(*, bits: int = 4, k: int = 64, layout: str = "stream", **options: Any) -> dict:
    """Stored tensors of a layer [16, k] whose codes count up."""
    scheme = Scheme(
        format="compressed-tensors",
        element=f"int{bits}",
        n=16,
        k=k,
        group_size=options.pop("group_size", 32),
        scale="bf16",
        layout=layout,
        **options,
    )
    groups = scheme.num_groups
    return FORMAT.pack(
        scheme,
        QuantizedMatrix(
            codes=(torch.arange(16 * k).reshape(16, k) % (1 << bits)).byte(),
            scales=torch.full((16, groups), 0.5, dtype=torch.bfloat16),
            zero_points=torch.full((16, groups), 1, dtype=torch.uint8)
            if scheme.has_zero_points
            else None,
            group_index=(torch.arange(k) % groups).int() if scheme.has_group_index else None,
        ),
    )


def scheme_of(stored: dict, **changes: Any) -> Scheme:
    return FORMAT.scheme(config_of(**changes), LAYER, headers_of(stored))


def test_the_worked_example_of_the_documents():
    stored = layer(has_zero_points=True)
    assert stored["weight_packed"][0, 0].item() == 0x76543210
    assert stored["weight_zero_point"].tolist() == [[0x11111111] * 2] * 2
    assert stored["weight_shape"].tolist() == [16, 64]
    scheme = scheme_of(stored, symmetric=False)
    assert FORMAT.unpack(scheme, stored).dequantize(scheme)[0, :4].tolist() == [-0.5, 0, 0.5, 1]
    symmetric = layer()
    scheme = scheme_of(symmetric)
    assert FORMAT.unpack(scheme, symmetric).dequantize(scheme)[0, :2].tolist() == [-4.0, -3.5]


@pytest.mark.parametrize("k", [32, 64, 96, 128, 320])
def test_three_bit_layouts_are_told_apart_by_the_words(k):
    for layout, words in (("stream", k * 3 // 32), ("ten-a-word", -(-k // 10))):
        stored = layer(bits=3, k=k, layout=layout)
        assert stored["weight_packed"].shape == (16, words)
        assert scheme_of(stored, num_bits=3).layout == layout


@pytest.mark.parametrize(("version", "layout"), [("0.18.0", "stream"), ("0.17.1", "ten-a-word")])
def test_where_words_do_not_tell_the_release_does(version, layout):
    stored = layer(bits=3, k=48, group_size=16, layout=layout)
    config = {**config_of(num_bits=3, group_size=16), "version": version}
    assert FORMAT.scheme(config, LAYER, headers_of(stored)).layout == layout


def test_where_nothing_tells_the_layout_it_is_refused():
    stored = layer(bits=3, k=48, group_size=16)
    with pytest.raises(CheckpointError, match=r"quantization_config.version: missing"):
        scheme_of(stored, num_bits=3, group_size=16)


@pytest.mark.parametrize(
    ("version", "layout", "k"),
    [("0.20.1", "stream", 480), ("0.17.0", "ten-a-word", 448), (None, "stream", 128)],
)
def test_rows_with_one_scale_find_their_length(version, layout, k):
    stored = layer(bits=3, k=k, group_size=k, layout=layout)
    config = {**config_of(num_bits=3, strategy="channel", group_size=None), "version": version}
    scheme = FORMAT.scheme(config, LAYER, headers_of(stored))
    assert (scheme.layout, scheme.k) == (layout, k)
    FORMAT.unpack(scheme, stored)


def test_a_length_that_words_do_not_give_is_never_misread():
    """480 codes as a stream take 45 words, as do 448 at ten a word."""
    stored = layer(bits=3, k=448, group_size=448, layout="ten-a-word")
    scheme = scheme_of(stored, num_bits=3, strategy="channel", group_size=None)
    assert scheme.k == 480
    with pytest.raises(CheckpointError, match=r"weight_shape: got \[16, 448\], must be \[16, 480"):
        FORMAT.unpack(scheme, stored)


def test_no_strategy_and_a_group_size_of_minus_one_is_one_scale_a_row():
    stored = layer(group_size=64)
    assert scheme_of(stored, strategy=None, group_size=-1).group_size == 64


def test_the_order_of_columns_is_read_where_it_is_stored():
    stored = layer(has_group_index=True)
    scheme = scheme_of(stored, actorder="group")
    assert scheme.has_group_index
    matrix = FORMAT.unpack(scheme, stored)
    assert matrix.group_index.tolist() == [0, 1] * 32
    stored["weight_g_idx"][5] = -1
    with pytest.raises(CheckpointError, match="weight_g_idx: got group -1, must be 0 to 1"):
        FORMAT.unpack(scheme, stored)


def test_scales_may_be_of_any_float():
    for dtype, name in ((torch.float16, "fp16"), (torch.float32, "fp32")):
        stored = layer()
        stored["weight_scale"] = stored["weight_scale"].to(dtype)
        assert scheme_of(stored).scale == name
    stored["weight_scale"] = stored["weight_scale"].to(torch.float64)
    with pytest.raises(CheckpointError, match="weight_scale: got dtype float64, expected one of"):
        scheme_of(stored)


def test_activation_scales_are_let_be():
    stored = {**layer(), "input_scale": torch.ones(1), "bias": torch.ones(16)}
    assert scheme_of(stored).n == 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_bits": 2}, r"compressed-tensors bits: got 2, supported are \[3, 4, 8\]"),
        ({"num_bits": 6}, "bits: got 6"),
        ({"group_size": 40}, "group_size: got 40, supported are"),
        ({"type": "float"}, "weights.type: got 'float', supported is 'int'"),
        ({"strategy": "tensor", "group_size": None}, "weights.strategy: got 'tensor', supported"),
        ({"strategy": "block"}, r"got 'block', supported are \['channel', 'group'\]"),
    ],
)
def test_unsupported_options_list_what_is_supported(changes, message):
    with pytest.raises(UnsupportedError, match=message):
        scheme_of(layer(), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_bits": 8}, r"weight_packed: got int32 \[16, 8\], expected int32 \[16, 16\]"),
        ({"num_bits": 3}, r"weight_packed: got int32 \[16, 8\], expected int32 \[16, 6\]"),
        ({"group_size": 64}, r"weight_packed: got int32 \[16, 8\], expected int32 \[16, 16\]"),
        ({"symmetric": False}, "weight_zero_point: missing, expected int32"),
        ({"group_size": None}, "weights.group_size: got None, must be int"),
        ({"num_bits": None}, "weights.num_bits: got None, must be int"),
        ({"strategy": "channel"}, r"weight_scale: got bfloat16 \[16, 2\], expected bfloat16 \[16"),
    ],
)
def test_a_config_that_the_file_contradicts_is_refused(changes, message):
    with pytest.raises(CheckpointError, match=message):
        scheme_of(layer(), **changes)


def test_zero_points_that_the_config_denies_are_refused():
    with pytest.raises(CheckpointError, match="weight_zero_point: unexpected int32"):
        scheme_of(layer(has_zero_points=True))


@pytest.mark.parametrize("suffix", ["weight_packed", "weight_scale", "weight_shape"])
def test_a_missing_tensor_is_named(suffix):
    stored = layer()
    scheme = scheme_of(stored)
    del stored[suffix]
    with pytest.raises(CheckpointError, match=rf"{LAYER}\.{suffix}: missing"):
        scheme_of(stored)
    with pytest.raises(CheckpointError, match=f"{suffix}: missing"):
        FORMAT.unpack(scheme, stored)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_scale_that_is_no_number_is_refused(value):
    stored = layer()
    stored["weight_scale"][3, 1] = value
    with pytest.raises(CheckpointError, match=r"weight_scale\[3, 1\]: got .*must be finite"):
        FORMAT.unpack(scheme_of(stored), stored)


def test_a_shape_that_is_not_that_of_the_codes_is_refused():
    stored = layer()
    stored["weight_shape"] = torch.tensor([64, 16])
    with pytest.raises(CheckpointError, match=r"weight_shape: got \[64, 16\], must be \[16, 64\]"):
        FORMAT.unpack(scheme_of(stored), stored)


def test_an_empty_tensor_is_refused():
    headers = headers_of(layer())
    headers["weight_packed"] = TensorHeader((0, 8), torch.int32)
    with pytest.raises(CheckpointError, match=r"weight_packed: got .*none of them 0"):
        FORMAT.scheme(config_of(), LAYER, headers)
    headers["weight_packed"] = TensorHeader((8,), torch.int32)
    with pytest.raises(CheckpointError, match="expected 2 dimensions"):
        FORMAT.scheme(config_of(), LAYER, headers)


def test_reading_leaves_the_config_alone():
    config = config_of()
    before = copy.deepcopy(config)
    FORMAT.scheme(config, LAYER, headers_of(layer()))
    assert config == before
