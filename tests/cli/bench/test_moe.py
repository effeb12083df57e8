"""`firesteel bench moe`: its floor, its oracle and its inputs; the timing itself needs a GPU."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from firesteel.cli.bench.moe import MoeRequest, floor_us, run, sizes_of
from firesteel.cli.bench.moe_inputs import random_call, random_weights
from firesteel.cli.bench.moe_torch import layer_in_float64
from firesteel.errors import InvalidArgumentError, UnsupportedError
from firesteel.moe.activation import Activation
from firesteel.moe.spec import Int4Weights, MoeSpec, geometry
from tests.moe.layers import random_layer

CPU = torch.device("cpu")
SMALL = MoeSpec(hidden_size=256, intermediate_size=96, num_experts=8, top_k=2,
                w2=Int4Weights(group_size=32))  # fmt: skip


@pytest.mark.parametrize(
    ("tokens", "floor"), [(1, 9.1), (8, 64.6), (64, 250), (256, 291), (3072, 587), (8192, 1566)]
)
def test_the_floor_is_that_of_the_reference_table(tokens: int, floor: float) -> None:
    spec = geometry("glm-5.2", tensor_parallel=4)
    hit = 256 * (1 - (1 - 8 / 256) ** tokens)
    assert floor_us(spec, tokens, hit) == pytest.approx(floor, rel=0.02)


@pytest.mark.parametrize(
    "spec",
    [
        SMALL,
        replace(SMALL, w13=Int4Weights(group_size=64, has_zero_points=True, has_bias=True)),
        replace(SMALL, activation=Activation(name="swigluoai")),
    ],
)
def test_the_oracle_is_the_librarys(spec: MoeSpec) -> None:
    layer = random_layer(spec)
    call = random_call(spec, 3, CPU)
    got = layer_in_float64(spec, layer.tensors("cpu"), call.x, call.topk_ids, call.topk_weights)
    expected = layer.reference(call.x, call.topk_ids, call.topk_weights)
    assert torch.allclose(got, expected, rtol=1e-12, atol=1e-12)


def test_inputs_are_of_the_operands_shapes() -> None:
    weights = random_weights(SMALL, CPU)
    for operand in SMALL.operands((("ids", "i32"),)):
        if not operand.is_per_call:
            assert tuple(weights[operand.name].shape) == operand.shape_for(0)
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
        MoeRequest(sizes=sizes_of(text))


def test_a_cpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="timed on a CUDA device"):
        run(MoeRequest(device="cpu"), as_json=True, out=tmp_path / "moe.jsonl")
    with pytest.raises(InvalidArgumentError, match="--routing"):
        MoeRequest(routing="even")
