"""The tensors of a layer are what its spec says they are: names, types and shapes."""

import pytest

from firesteel.launch.key import DTYPES
from firesteel.moe.activation import Activation
from firesteel.moe.spec import Int4Weights, MoeSpec
from tests.moe.layers import random_layer

_STORED = Int4Weights(group_size=32, has_zero_points=True, has_bias=True)


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
