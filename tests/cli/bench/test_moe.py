"""`firesteel bench moe`: its floor, its oracle and its inputs; the timing itself needs a GPU."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from firesteel.cli.bench.moe import BANDWIDTH, MoeRequest, floor_us, run
from firesteel.cli.bench.moe_inputs import random_call, random_weights
from firesteel.cli.bench.moe_torch import dense_weights, layer_in_float64
from firesteel.cli.options import counts_of
from firesteel.errors import InvalidArgumentError, UnsupportedError
from firesteel.formats.trellis import TrellisCode
from firesteel.launch.key import DTYPES
from firesteel.moe.activation import Activation
from firesteel.moe.spec import MoeSpec, StoredWeights, geometry
from firesteel.moe.trellis.spec import StoredTrellis, trellis_geometry
from tests.moe.layers import random_layer

CPU = torch.device("cpu")
SMALL = MoeSpec(hidden_size=256, intermediate_size=96, num_experts=8, top_k=2,
                w2=StoredWeights(group_size=32))  # fmt: skip


@pytest.mark.parametrize(
    ("tokens", "floor"), [(1, 9.1), (8, 64.6), (64, 250), (256, 291), (3072, 587), (8192, 1566)]
)
def test_the_floor_is_that_of_the_reference_table(tokens: int, floor: float) -> None:
    spec = geometry("glm-5.2", tensor_parallel=4)
    hit = 256 * (1 - (1 - 8 / 256) ** tokens)
    assert floor_us(spec, tokens, hit) == pytest.approx(floor, rel=0.02)


@pytest.mark.parametrize(
    ("element", "each"), [("mxfp4", 0.53125), ("nvfp4", 0.5625), ("nf3", 0.40625)]
)
def test_the_floor_counts_the_bytes_of_the_format(element: str, each: float) -> None:
    spec = geometry("gpt-oss-120b", element=element)
    found = floor_us(spec, 1, 4) * BANDWIDTH / 1e6
    assert found == pytest.approx(4 * 3 * 2880 * 2880 * each + 4 * 2880)


def test_the_floor_of_exl3_counts_the_scales_of_rows_and_columns() -> None:
    spec = trellis_geometry("glm-5.2", TrellisCode(3.0, "mcg"), tensor_parallel=4)
    found = floor_us(spec, 1, 8) * BANDWIDTH / 1e6
    each = 6144 * 512 * 3 / 8 + 2 * (6144 + 512)
    assert found == pytest.approx(8 * 3 * each + 4 * 6144)
    # And each matrix its own rate, on average.
    mixed = replace(spec, w2=StoredTrellis(rates=(2, 6)))
    more = floor_us(mixed, 1, 8) * BANDWIDTH / 1e6 - found
    assert more == pytest.approx(8 * 6144 * 512 / 8)


@pytest.mark.parametrize(
    "spec",
    [
        SMALL,
        replace(SMALL, w13=StoredWeights.fp4("mxfp4"), w2=StoredWeights.fp4("mxfp4")),
        replace(
            SMALL,
            w13=StoredWeights.fp4("nvfp4", has_bias=True),
            w2=StoredWeights.fp4("nvfp4", global_scale="multiplier"),
        ),
        replace(SMALL, w13=StoredWeights(group_size=64, has_zero_points=True, has_bias=True)),
        replace(SMALL, w13=StoredWeights.nf3(), w2=StoredWeights.nf3()),
        replace(SMALL, w13=StoredWeights(element="int3", has_zero_points=True)),
        replace(SMALL, w13=StoredWeights(element="int3", group_size=32)),
        replace(SMALL, activation=Activation(name="swigluoai")),
    ],
)
def test_the_oracle_is_the_librarys(spec: MoeSpec) -> None:
    layer = random_layer(spec)
    call = random_call(spec, 3, CPU)
    got = layer_in_float64(spec, layer.tensors("cpu"), call.x, call.topk_ids, call.topk_weights)
    expected = layer.reference(call.x, call.topk_ids, call.topk_weights)
    # The library's rounds what a matrix-wide scale makes of a weight to fp32.
    tolerance = 1e-12 if spec.w13.global_scale == "none" else 1e-6
    assert torch.allclose(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "stored",
    [
        *(SMALL.w2, StoredWeights.fp4("mxfp4"), StoredWeights.fp4("nvfp4"), StoredWeights.nf3()),
        StoredWeights(element="int3", group_size=32, has_zero_points=True),
    ],
    ids=lambda stored: stored.element,
)
def test_inputs_are_of_the_operands_shapes(stored: StoredWeights) -> None:
    spec = replace(SMALL, w13=stored, w2=stored)
    weights = random_weights(spec, CPU)
    for operand in spec.operands((("ids", "i32"),)):
        if not operand.is_per_call:
            assert tuple(weights[operand.name].shape) == operand.shape_for(0)
            assert weights[operand.name].dtype == DTYPES[operand.dtype]
    # Of about the size that a trained layer's have.
    dense = dense_weights(spec, weights)
    assert 0.005 < float(dense._w13.float().std()) < 0.05
    call = random_call(SMALL, 5, CPU)
    assert torch.allclose(call.topk_weights.sum(1), torch.ones(5))
    assert all(len(set(row)) == 2 for row in call.topk_ids.tolist())


def test_zipf_prefers_the_first_experts() -> None:
    spec = replace(SMALL, num_experts=64)
    drawn = random_call(spec, 2000, CPU, zipf=True).topk_ids.reshape(-1)
    counts = torch.bincount(drawn.long(), minlength=64)
    assert counts[0] > 3 * counts[8]
    assert counts[:8].sum() > counts[32:].sum()


@pytest.mark.parametrize("text", ["", "1,,2", "a", "1,-2", "1.5", "1,0"])
def test_wrong_sizes_are_named(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="--m: got"):
        MoeRequest(sizes=counts_of("--m", "token counts", text))


def test_a_cpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="timed on a CUDA device"):
        run(MoeRequest(device="cpu"), as_json=True, out=tmp_path / "moe.jsonl")
    with pytest.raises(InvalidArgumentError, match="--routing"):
        MoeRequest(routing="even")
