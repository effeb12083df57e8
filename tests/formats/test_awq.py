"""AWQ gemm: the order of rows in a word, and what is refused."""

from typing import Any

import pytest
import torch

from firesteel.errors import CheckpointError, UnsupportedError
from firesteel.formats.awq import Awq
from firesteel.formats.base import QuantizedMatrix, Scheme
from tests.strategies import headers_of

LAYER = "model.layers.0.mlp.experts.0.gate_proj"
CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


def layer() -> dict:
    """Stored tensors of a layer [16, 64]: row j of W holds code j, every zero point is 3."""
    scheme = Scheme(
        format="awq",
        element="int4",
        n=16,
        k=64,
        group_size=32,
        scale="fp16",
        has_zero_points=True,
    )
    matrix = QuantizedMatrix(
        codes=torch.arange(16, dtype=torch.uint8).unsqueeze(1).repeat(1, 64),
        scales=torch.full((16, 2), 0.5, dtype=torch.float16),
        zero_points=torch.full((16, 2), 3, dtype=torch.uint8),
    )
    return Awq().pack(scheme, matrix)


def scheme_of(stored: dict, **changes: Any) -> Scheme:
    return Awq().scheme({**CONFIG, **changes}, LAYER, headers_of(stored))


def test_the_worked_example_of_the_documents():
    stored = layer()
    assert stored["qweight"].shape == (64, 2)
    assert stored["qweight"][0, 0].item() == 0x75316420
    assert stored["qzeros"][0, 0].item() == 0x33333333
    scheme = scheme_of(stored)
    weight = Awq().unpack(scheme, stored).dequantize(scheme)
    assert weight[:5, 0].tolist() == [-1.5, -1.0, -0.5, 0.0, 0.5]


def test_autoawq_s_own_names_are_read():
    config = {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "version": "GEMM"}
    assert Awq().scheme(config, LAYER, headers_of(layer())) == scheme_of(layer())
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "checkpoint_format": "gemm"}
    assert Awq().scheme(config, LAYER, headers_of(layer())) == scheme_of(layer())


def test_symmetric_layers_must_have_the_middle_as_zero_point():
    scheme = scheme_of(layer(), zero_point=False)
    assert not scheme.has_zero_points
    with pytest.raises(CheckpointError, match="qzeros: got a zero point of 3, must be 8"):
        Awq().unpack(scheme, layer())


@pytest.mark.parametrize("version", ["gemv", "gemv_fast", "exllama", "marlin", "ipex"])
def test_other_versions_are_refused(version):
    with pytest.raises(UnsupportedError, match=f"AWQ version: got '{version}', supported is 'gemm"):
        scheme_of(layer(), version=version)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"bits": 8}, UnsupportedError, r"AWQ bits: got 8, supported are \[4\]"),
        ({"group_size": 24}, UnsupportedError, "AWQ group_size: got 24"),
        ({"group_size": 128}, CheckpointError, "must be positive and divide k = 64"),
        ({"group_size": 64}, CheckpointError, r"qzeros: got int32 \[2, 2\], expected int32 \[1, 2"),
        ({"bits": None}, CheckpointError, "bits: got None, must be int"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(changes, error, message):
    with pytest.raises(error, match=message):
        scheme_of(layer(), **changes)


@pytest.mark.parametrize("suffix", ["qweight", "qzeros", "scales"])
def test_a_missing_tensor_is_named(suffix):
    stored = layer()
    scheme = scheme_of(stored)
    del stored[suffix]
    with pytest.raises(CheckpointError, match=rf"{LAYER}\.{suffix}: missing"):
        scheme_of(stored)
    with pytest.raises(CheckpointError, match=f"{suffix}: missing"):
        Awq().unpack(scheme, stored)


def test_a_scale_that_is_no_number_is_refused():
    stored = layer()
    stored["scales"][1, 2] = float("nan")
    with pytest.raises(CheckpointError, match=r"scales\[1, 2\]: got nan, must be finite"):
        Awq().unpack(scheme_of(stored), stored)


def test_g_idx_is_not_awq():
    with pytest.raises(CheckpointError, match="g_idx: unexpected"):
        scheme_of({**layer(), "g_idx": torch.zeros(64, dtype=torch.int32)})
