from dataclasses import replace

import pytest
import torch

from firesteel.errors import InvalidArgumentError, UnsupportedError
from firesteel.formats.base import Scheme
from firesteel.moe.activation import Activation
from firesteel.moe.spec import MoeSpec, StoredWeights, geometry
from firesteel.moe.supports import check_scale_range, moe_spec_of

K, N = 256, 128
UP = Scheme(format="gptq", element="int4", n=N, k=K, group_size=32, scale="fp16")
DOWN = replace(UP, n=K, k=N)


def spec_of(w13: Scheme = UP, w2: Scheme = DOWN, **changes) -> MoeSpec:
    arguments = {
        "num_experts": 8,
        "hidden_size": K,
        "intermediate_size": N,
        "top_k": 2,
        "activation": Activation(),
        "dtype": torch.float16,
        "has_bias": False,
    }
    return moe_spec_of(w13, w2, **{**arguments, **changes})


def test_every_field_is_taken_from_where_it_stands():
    activation = Activation(name="swigluoai", limit=3.0)
    w2 = replace(DOWN, group_size=64, scale="bf16", has_zero_points=True)
    spec = spec_of(w2=w2, activation=activation, has_bias=True)
    assert spec == MoeSpec(
        hidden_size=K,
        intermediate_size=N,
        num_experts=8,
        top_k=2,
        dtype="fp16",
        w13=StoredWeights(group_size=32, scale="fp16", has_bias=True),
        w2=StoredWeights(group_size=64, scale="bf16", has_zero_points=True, has_bias=True),
        activation=activation,
    )


def test_a_model_by_name_and_its_schemes_give_one_spec():
    up = Scheme(format="", element="int4", n=2048, k=6144, group_size=128, scale="bf16")
    spec = moe_spec_of(
        up,
        replace(up, n=6144, k=2048),
        num_experts=256,
        hidden_size=6144,
        intermediate_size=2048,
        top_k=8,
        activation=Activation(),
        dtype=torch.bfloat16,
        has_bias=False,
    )
    assert spec == geometry("glm-5.2")


def test_fp4_schemes_are_taken_as_their_scales_say():
    mxfp4 = replace(UP, element="e2m1", scale="e8m0")
    nvfp4 = replace(DOWN, element="e2m1", scale="e4m3", group_size=16, global_scale="multiplier")
    spec = spec_of(mxfp4, nvfp4)
    assert spec.w13 == StoredWeights.fp4("mxfp4")
    assert spec.w2 == StoredWeights.fp4("nvfp4", global_scale="multiplier")


def test_3_bit_schemes_are_taken_as_they_are():
    nf3 = replace(UP, element="nf3", scale="e5m3")
    int3 = replace(DOWN, element="int3", group_size=64, has_zero_points=True)
    spec = spec_of(nf3, int3)
    assert spec.w13 == StoredWeights.nf3()
    assert spec.w2 == StoredWeights(
        element="int3", group_size=64, scale="fp16", has_zero_points=True
    )


@pytest.mark.parametrize("group_size", [32, 64, 128, N])
def test_group_sizes_that_kernels_read(group_size: int):
    spec = spec_of(w2=replace(DOWN, group_size=group_size))
    assert spec.w2.group_size == group_size


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"element": "int8"}, "gate and up: element is int8, must be one of int3, int4, e2m1, nf3"),
        ({"element": "nf3"}, "scales are fp16, must be one of e5m3 of nf3"),
        ({"element": "nf3", "scale": "e5m3", "group_size": 64}, "must be 32 of nf3"),
        ({"element": "int3", "scale": "e5m3"}, "scales are e5m3, must be one of bf16, fp16, fp32"),
        ({"element": "e2m1"}, "scales are fp16, must be one of e8m0, e4m3 of e2m1"),
        ({"element": "e2m1", "scale": "e8m0", "group_size": 16}, "got 16 for 256 columns, must be"),
        ({"element": "e2m1", "scale": "e4m3", "group_size": 16}, "global_scale: got 'none'"),
        ({"scale": "e4m3"}, "scales are e4m3"),
        ({"has_group_index": True}, "gate and up: columns name their group (act-order)"),
        ({"group_size": 16}, "gate and up.group_size: got 16 for 256 columns"),
        ({"global_scale": "divisor"}, "gate and up.global_scale: got 'divisor', must be 'none'"),
        ({"n": 64}, "matrices are [64, 256], the layer's sizes give [128, 256]"),
    ],
)
def test_a_scheme_without_kernels_is_refused(changes: dict, words: str):
    with pytest.raises(UnsupportedError) as caught:
        spec_of(w13=replace(UP, **changes))
    assert str(caught.value).startswith("no kernel for these experts: ")
    assert words in str(caught.value)
    assert "down" not in str(caught.value)


def test_every_reason_is_given():
    w13 = replace(UP, element="int8", has_group_index=True, group_size=16)
    w2 = replace(DOWN, scale="e4m3", global_scale="multiplier")
    with pytest.raises(UnsupportedError) as caught:
        spec_of(w13, w2, dtype=torch.float32)
    reasons = str(caught.value).removeprefix("no kernel for these experts: ").split("; ")
    # Groups are told right from wrong by the element.
    assert [reason.partition(":")[0] for reason in reasons] == [
        "dtype",
        "gate and up",
        "gate and up",
        "down",
    ]
    assert reasons[0] == "dtype: got torch.float32, must be bfloat16 or float16"


def test_a_hidden_size_whose_rows_are_unaligned_is_refused():
    up = replace(UP, k=132, group_size=132)
    with pytest.raises(UnsupportedError, match="hidden_size: got 132, must be a multiple of 8"):
        spec_of(up, replace(DOWN, n=132), hidden_size=132)


def test_more_experts_a_token_than_there_are_is_refused():
    with pytest.raises(InvalidArgumentError, match="top_k: got 9, must be at most 8 experts"):
        spec_of(top_k=9)


@pytest.mark.parametrize(
    ("dtype", "limit", "words"),
    [
        (torch.bfloat16, 160, "has a scale of 2**34, must be at most 2**33 in bf16"),
        (torch.float16, 128, "has a scale of 2**2, must be at most 2**1 in fp16"),
    ],
)
def test_scales_too_large_for_a_kernel_are_refused(dtype: torch.dtype, limit: int, words: str):
    up, down = (replace(scheme, element="e2m1", scale="e8m0") for scheme in (UP, DOWN))
    spec = spec_of(up, down, dtype=dtype)
    good, bad = torch.tensor([[0, limit]]).byte(), torch.tensor([[0, limit + 1]]).byte()
    check_scale_range(spec, w13=good, w2=good)
    with pytest.raises(UnsupportedError) as caught:
        check_scale_range(spec, w13=bad, w2=good)
    assert str(caught.value) == f"gate and up: {words}"
    with pytest.raises(UnsupportedError, match="down: has a scale"):
        check_scale_range(spec, w13=good, w2=bad)
    # Of int4, and of nvfp4, every scale will do.
    check_scale_range(spec_of(dtype=dtype), w13=bad, w2=bad)
