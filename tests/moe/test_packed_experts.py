"""The MoE layer on packed weights of every format, in the forms that a load may leave them in."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from firesteel.formats.base import QuantizedMatrix, Scheme
from firesteel.formats.packed import PackedWeights
from firesteel.formats.tiled_int4 import TiledInt4Weights, can_tile
from firesteel.moe.activation import Activation
from firesteel.moe.experts import MoeWeights
from firesteel.moe.reference import moe_reference
from firesteel.moe.torch_backend import run_experts
from tests.strategies import matrices, schemes

_NUM_EXPERTS = 3
_FORMATS = ("compressed-tensors", "gptq", "awq", "mxfp4", "nvfp4", "nvfp4-modelopt")


@dataclass(frozen=True)
class Stack:
    """A packed stack and the same weights in fp32."""

    packed: PackedWeights
    dense: Tensor


@st.composite
def stacks(draw: st.DrawFn, scheme: Scheme, num_parts: int) -> Stack:
    packed = PackedWeights(scheme, _NUM_EXPERTS, num_parts)
    dense = torch.empty(packed.shape)
    for expert in range(_NUM_EXPERTS):
        for part in range(num_parts):
            matrix = draw(matrices(scheme, scales="ordinary"))
            packed.write(expert, part, matrix)
            rows = slice(part * scheme.n, (part + 1) * scheme.n)
            dense[expert, rows] = matrix.dequantize(scheme)
    return Stack(packed, dense)


@st.composite
def layers(draw: st.DrawFn) -> tuple[Stack, Stack]:
    """w13 of a scheme that is drawn, and w2 of the same kind with its shape."""
    first = draw(schemes(_FORMATS, max_n=64, max_groups=3))
    # FC2's rows are FC1's columns; its own columns must be whole groups and whole words.
    size = first.group_size if first.group_size != first.k else 32
    n = -(-first.n // max(size, 32)) * max(size, 32)
    first = replace(first, n=n)
    is_channel = first.group_size == first.k
    second = replace(first, n=first.k, k=n, group_size=n if is_channel else first.group_size)
    if first.k % 8 and first.format in ("awq", "gptq"):
        second = replace(second, format="compressed-tensors", layout="stream")
    return draw(stacks(first, 2)), draw(stacks(second, 1))


@given(layer=layers(), num_tokens=st.sampled_from((0, 1, 2, 7)), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_packed_weights_stay_within_the_bound_of_fp32_sums(layer, num_tokens, seed):
    w13, w2 = layer
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, w13.dense.shape[2], generator=generator)
    # One expert has no token; a token may name an expert twice, or one that is not here.
    ids = torch.randint(0, _NUM_EXPERTS - 1, (num_tokens, 4), generator=generator)
    outside = torch.tensor([-1, _NUM_EXPERTS, 2**40, -(2**62)])
    ids = torch.where(torch.rand(ids.shape, generator=generator) < 0.25, outside, ids)
    gates = torch.rand(num_tokens, 4, generator=generator)
    weights = MoeWeights(w13=w13.packed, w2=w2.packed, activation=Activation())
    out = run_experts(weights, x, ids, gates)
    assert torch.equal(run_experts(weights, x, ids, gates), out)
    wanted = moe_reference(x, w13.dense, w2.dense, ids, gates)
    # A sum of K terms errs by K * 2**-24 of the sum of magnitudes, and so does one of N; silu is no
    # steeper than 1.1. The magnitudes are those of `moe_reference` with everything positive, where
    # silu(g) is at least g / 2; 5 covers that and the activation's own roundings.
    size = moe_reference(x.abs(), w13.dense.abs(), w2.dense.abs(), ids, gates)
    terms = x.shape[1] + w2.dense.shape[2] + 16
    assert ((out.double() - wanted).abs() <= 5 * terms * 2.0**-24 * size + 1e-37).all()


def _symmetric(rows: int, k: int, dtype_name: str) -> tuple[Scheme, QuantizedMatrix]:
    generator = torch.Generator().manual_seed(rows)
    scheme = Scheme(
        format="compressed-tensors",
        element="int4",
        n=rows,
        k=k,
        group_size=32,
        scale=dtype_name,
        layout="stream",
    )
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype_name]
    codes = torch.randint(0, 16, (rows, k), dtype=torch.uint8, generator=generator)
    scales = (0.02 + 0.02 * torch.rand(rows, k // 32, generator=generator)).to(dtype)
    return scheme, QuantizedMatrix(codes=codes, scales=scales)


@pytest.mark.parametrize("num_tokens", [0, 1, 31, 32, 33, 80])
@pytest.mark.parametrize("scale", ["bf16", "fp16", "fp32"])
def test_tiled_weights_give_what_packed_ones_do(scale, num_tokens):
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[scale]
    scheme, matrix = _symmetric(64, 128, scale)
    down_scheme, down = _symmetric(128, 64, scale)
    w13, w2 = PackedWeights(scheme, 2, 2), PackedWeights(down_scheme, 2)
    for expert in range(2):
        w13.write(expert, 0, matrix)
        w13.write(expert, 1, matrix)
        w2.write(expert, 0, down)
    if not can_tile(w13):
        pytest.skip("PyTorch's int4 product on this CPU has another layout")
    tiled = MoeWeights(w13=TiledInt4Weights(w13), w2=TiledInt4Weights(w2), activation=Activation())
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, 128, generator=generator).to(dtype)
    ids = torch.randint(0, 2, (num_tokens, 2), generator=generator)
    gates = torch.rand(num_tokens, 2, generator=generator)
    out = run_experts(tiled, x, ids, gates)
    dense = matrix.dequantize(scheme).repeat(2, 2, 1)
    dense2 = down.dequantize(down_scheme).repeat(2, 1, 1)
    wanted = moe_reference(x, dense, dense2, ids, gates)
    size = moe_reference(x.abs(), dense.abs(), dense2.abs(), ids, gates)
    # FC1, two steps of the activation, FC2 and the result round to dtype; sums are fp32.
    eps = 5 * torch.finfo(dtype).eps / 2 + 200 * 2.0**-23
    assert out.dtype == dtype
    assert ((out.double() - wanted).abs() <= 2.5 * eps * size).all()
