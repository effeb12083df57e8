"""The tensors of a layer are what its spec says they are: names, types and shapes."""

import pytest

from firesteel.launch.key import DTYPES
from firesteel.moe.activation import Activation
from firesteel.moe.spec import MoeSpec, StoredWeights
from tests.moe.layers import random_layer

_STORED = StoredWeights(group_size=32, has_zero_points=True, has_bias=True)


@pytest.mark.parametrize(
    "stored",
    [
        StoredWeights.fp4("mxfp4"),
        StoredWeights.fp4("nvfp4", has_bias=True),
        StoredWeights.fp4("nvfp4", global_scale="multiplier"),
        StoredWeights.nf3(has_bias=True),
        StoredWeights(element="int3", group_size=32),
    ],
)
@pytest.mark.parametrize("activation", ["silu", "relu2"])
def test_packed_stacks_of_every_element_are_the_operands_without_a_copy(stored, activation):
    spec = MoeSpec(
        hidden_size=160,
        intermediate_size=96,
        num_experts=3,
        top_k=2,
        w13=stored,
        w2=stored,
        activation=Activation(name=activation),
    )
    layer = random_layer(spec)
    tensors = layer.tensors("cpu")
    wanted = {
        operand.name: (DTYPES[operand.dtype], operand.shape)
        for operand in spec.operands((("ids", "i32"),))
        if not operand.is_per_call
    }
    got = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    assert got == wanted
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    for name, stack in (("w13", layer.w13), ("w2", layer.w2)):
        for part in ("codes", "scales", "global_scale"):
            held = getattr(stack, part)
            if held is not None:
                assert tensors[f"{name}.{part}"].data_ptr() == held.data_ptr()


@pytest.mark.parametrize("activation", ["silu", "relu2"])
@pytest.mark.parametrize(("hidden_size", "intermediate_size"), [(64, 32), (160, 128), (384, 96)])
def test_packed_stacks_are_the_operands(hidden_size, intermediate_size, activation):
    spec = MoeSpec(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_experts=3,
        top_k=2,
        w13=_STORED,
        w2=_STORED,
        activation=Activation(name=activation),
        num_global_experts=5,
    )
    tensors = random_layer(spec).tensors("cpu")
    wanted = {
        operand.name: (DTYPES[operand.dtype], operand.shape)
        for operand in spec.operands((("ids", "i32"),))
        if not operand.is_per_call
    }
    got = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    assert got == wanted
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    num_tiles, num_blocks = -(-hidden_size // 64), -(-intermediate_size // 128)
    assert wanted["w2.codes"][1] == (3, 1, num_tiles, num_blocks, 64, 32)
    assert wanted["w13.scales"][1][1:] == (hidden_size // 32, spec.num_parts * intermediate_size)
