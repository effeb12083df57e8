"""The tensors of a layer are what its spec says they are; oracles of a whole layer agree."""

from dataclasses import replace

import pytest
import torch

from firesteel.cli.bench.moe_inputs import random_call, random_weights
from firesteel.cli.bench.moe_torch import dense_weights, layer_in_float64
from firesteel.formats.trellis_weights import MATRIX_UNIT
from firesteel.launch.key import DTYPES
from firesteel.moe.activation import Activation
from firesteel.moe.trellis.linear import TrellisLinearSpec
from firesteel.moe.trellis.spec import StoredTrellis, TrellisMoeSpec
from tests.moe.trellis.launches import run_plan, spread
from tests.moe.trellis.layers import max_error, random_trellis_layer, random_trellis_linear

CPU = torch.device("cpu")
MIXED = StoredTrellis(rates=(2, 3, 4), codebook="mul1", has_bias=True)
PLAIN = TrellisMoeSpec(hidden_size=200, intermediate_size=136, num_experts=4, top_k=2)
SPECS = {
    "plain": PLAIN,
    "mixed-biased-fp16": replace(PLAIN, w13=MIXED, w2=MIXED, dtype="fp16"),
    "relu2-3inst": replace(
        PLAIN, activation=Activation(name="relu2"), w2=StoredTrellis(codebook="3inst")
    ),
    "swigluoai": replace(PLAIN, activation=Activation(name="swigluoai"), w13=MIXED),
}


def operands_of(spec: TrellisMoeSpec | TrellisLinearSpec) -> dict[str, tuple[object, ...]]:
    """Type and shape of each that is given once; of any size those of its one dimension."""
    flags = (("ids", "i32"),) if isinstance(spec, TrellisMoeSpec) else ()
    return {
        operand.name: (
            DTYPES[operand.dtype], "any" if operand.is_any_size else operand.shape_for(0)
        )
        for operand in spec.operands(flags)
        if not operand.is_per_call
    }  # fmt: skip


def shapes_of(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[object, ...]]:
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    return {
        name: (tensor.dtype, "any" if name.endswith(".words") else tuple(tensor.shape))
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("name", SPECS)
def test_stacks_are_the_operands_without_a_copy(name: str) -> None:
    spec = replace(SPECS[name], num_global_experts=16)
    layer = random_trellis_layer(spec)
    tensors = layer.tensors("cpu")
    assert shapes_of(tensors) == operands_of(spec)
    for stack, prefix in ((layer.w13, "w13"), (layer.w2, "w2")):
        for part in ("words", "suh", "svh"):
            assert tensors[f"{prefix}.{part}"].data_ptr() == getattr(stack, part).data_ptr()


def test_a_linear_is_a_stack_of_one() -> None:
    spec = TrellisLinearSpec(in_features=200, out_features=136, stored=replace(MIXED, rates=(4,)))
    tensors, dense, bias = random_trellis_linear(spec)
    assert shapes_of(tensors) == operands_of(spec)
    assert dense.shape == (136, 200)
    assert bias is not None


@pytest.mark.parametrize("name", SPECS)
def test_the_benchmark_s_oracle_is_the_library_s(name: str) -> None:
    layer = random_trellis_layer(SPECS[name])
    call = random_call(layer.spec, 3, CPU)
    given = (call.x, call.topk_ids, call.topk_weights)
    got = layer_in_float64(layer.spec, layer.tensors("cpu"), *given)
    expected = layer.reference(*given)
    # The library turns weights in fp32: of 14 additions and 2 factors.
    assert (got - expected).norm() <= 2 * 16 * 2.0**-24 * expected.norm()


@pytest.mark.parametrize("name", SPECS)
def test_inputs_are_of_the_operands_shapes(name: str) -> None:
    spec = replace(SPECS[name], num_global_experts=16)
    weights = random_weights(spec, CPU)
    assert shapes_of(weights) == operands_of(spec)
    for prefix, stored in (("w13", spec.w13), ("w2", spec.w2)):
        # Every rate comes up, and matrices fill the words one after the other.
        starts, bits = weights[f"{prefix}.matrices"].view(-1, 2).T.tolist()
        assert set(bits) == set(stored.rates)
        ends = [start + 4 * rate for start, rate in zip(starts, bits, strict=True)]
        assert starts == [0, *ends[:-1]]
        assert ends[-1] * MATRIX_UNIT == weights[f"{prefix}.words"].nbytes
    # Of about the size that a trained layer's have.
    dense = dense_weights(replace(spec, num_global_experts=None), weights)
    for matrices in (dense._w13, dense._w2):
        assert 0.005 < float(matrices.float().std()) < 0.05
    again = random_weights(spec, CPU)
    assert all(torch.equal(weights[each], again[each]) for each in weights)


# Split sums and whole ones; direct routes, tiles of 8, 16, 64 and 128 rows.
CALLS = [*(("plain", count) for count in (1, 5, 15, 82)), ("mixed-biased-fp16", 26)]
CALLS += [(name, 1) for name in SPECS if name != "plain"]


@pytest.mark.parametrize(("name", "num_tokens"), CALLS)
def test_a_plan_in_the_emulator_is_the_oracle_s(name: str, num_tokens: int) -> None:
    spec = replace(SPECS[name], hidden_size=760, num_global_experts=6)
    layer, generator = random_trellis_layer(spec), torch.Generator().manual_seed(num_tokens)
    dtype = DTYPES[spec.dtype]
    x = torch.randn(num_tokens, spec.hidden_size, generator=generator).to(dtype)
    ids = torch.rand(num_tokens, 6, generator=generator).topk(2).indices.int()
    ids[torch.rand(ids.shape, generator=generator) < 0.1] = -1
    weights = torch.rand(ids.shape, generator=generator)
    out = spread(torch.full_like(x, torch.nan), 2)
    call = {"x": spread(x, 1), "topk_ids": ids, "topk_weights": weights, "out": out}
    run_plan(
        spec.select(num_tokens, (("ids", "i32"),)),
        spec.workspace(num_tokens),
        {**layer.tensors("cpu"), **call},
        lands_early=num_tokens % 2 == 1,
    )
    expected = layer.reference(x, ids, weights)
    error = (out.double() - expected).norm() / expected.norm()
    assert error <= max_error(dtype)


@pytest.mark.parametrize("num_tokens", [1, 10, 20, 70])
@pytest.mark.parametrize("stored", [StoredTrellis(), replace(MIXED, rates=(4,))])
def test_a_linear_in_the_emulator_is_the_oracle_s(stored: StoredTrellis, num_tokens: int) -> None:
    spec = TrellisLinearSpec(in_features=760, out_features=200, dtype="fp16", stored=stored)
    tensors, dense, bias = random_trellis_linear(spec)
    x = torch.randn(num_tokens, 760, generator=torch.Generator().manual_seed(1)).half()
    out = torch.full((num_tokens, 200), torch.nan, dtype=torch.float16)
    run_plan(
        spec.select(num_tokens, ()),
        spec.workspace(num_tokens),
        {**tensors, "x": x, "out": out},
        lands_early=num_tokens == 10,
    )
    expected = x.double() @ dense.T + (0 if bias is None else bias.double())
    assert (out.double() - expected).norm() <= max_error(x.dtype) * expected.norm()
