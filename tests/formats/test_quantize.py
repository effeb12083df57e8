"""Rounding to nearest: what a recipe means, and how far a weight may move."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firesteel.errors import InvalidArgumentError
from firesteel.formats.base import QuantizedMatrix, Scheme, scales_to_float
from firesteel.formats.quantize import Recipe, parse_recipe, quantize_matrix, round_to_e2m1
from firesteel.formats.registry import format_named
from tests.strategies import headers_of

RECIPES = (
    "int3-g32",
    "int3-g128-asym",
    "int4-g16",
    "int4-g128",
    "int4-g32-asym",
    "int4-channel",
    "int8-g64",
    "int8-channel-asym",
    "mxfp4",
    "nvfp4",
)
INT_RECIPES = tuple(name for name in RECIPES if name.startswith("int"))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@st.composite
def weights(draw: st.DrawFn, recipes: tuple[str, ...] = RECIPES) -> tuple[torch.Tensor, Recipe]:
    """A matrix with rows of zeros, of one sign, of outliers, tiny and large, and a recipe."""
    recipe = parse_recipe(draw(st.sampled_from(recipes)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    group_size = 32 if recipe.group_size == -1 else recipe.group_size
    n, k = draw(st.integers(1, 6)), group_size * draw(st.integers(1, 3))
    weight = torch.randn(n, k, generator=generator)
    kinds = st.sampled_from(("plain", "zero", "positive", "outlier", "tiny", "large", "flat"))
    for row in weight:
        kind = draw(kinds)
        if kind == "zero":
            row.zero_()
        elif kind == "positive":
            row.abs_().add_(3)
        elif kind == "outlier":
            row[draw(st.integers(0, k - 1))] = -50.0
        elif kind == "tiny":
            row.mul_(1e-6)
        elif kind == "large":
            row.mul_(1e3)
        elif kind == "flat":
            row.fill_(0.37)
    return weight.to(draw(st.sampled_from(DTYPES))), recipe


def steps_of(scheme: Scheme, matrix: QuantizedMatrix) -> torch.Tensor:
    """The scale of each weight, float64 [n, k]."""
    scales = scales_to_float(matrix.scales, scheme.scale)
    if matrix.global_scale is not None:
        scales = matrix.global_scale.apply(scales)
    return scales.double().repeat_interleave(scheme.group_size, 1)


@given(weights())
def test_the_result_is_a_file_s(case):
    weight, recipe = case
    scheme, matrix = quantize_matrix(weight, recipe)
    entry = format_named(scheme.format)
    stored = entry.pack(scheme, matrix)
    config = recipe.config(["lm_head"])
    assert entry.scheme(config, "m.gate_proj", headers_of(stored)) == scheme
    assert config["ignore"] == ["lm_head"]
    assert torch.equal(entry.unpack(scheme, stored).codes, matrix.codes)


@given(weights())
def test_scales_are_finite_and_never_zero(case):
    scheme, matrix = quantize_matrix(*case)
    steps = steps_of(scheme, matrix)
    assert bool((steps.isfinite() & (steps > 0)).all())


@given(weights())
def test_no_other_code_is_nearer(case):
    """Every code against every other one, in float64, at the scales that were chosen."""
    weight, recipe = case
    scheme, matrix = quantize_matrix(weight, recipe)
    steps = steps_of(scheme, matrix).unsqueeze(-1)
    if scheme.element == "e2m1":
        numbers = torch.tensor(MAGNITUDES + tuple(-value for value in MAGNITUDES)).double()
    else:
        codes = torch.arange(1 << scheme.bits).double()
        zeros = torch.tensor(float(1 << scheme.bits - 1)).double()
        if matrix.zero_points is not None:
            zeros = matrix.zero_points.double().repeat_interleave(scheme.group_size, 1)
        numbers = codes - zeros.unsqueeze(-1)
    distance = (weight.double().unsqueeze(-1) - numbers * steps).abs()
    got = distance.gather(-1, matrix.codes.long().unsqueeze(-1))
    # The quotient is rounded to fp32 before the tie is decided.
    slack = 2.0**-23 * weight.double().abs().unsqueeze(-1)
    assert bool((got <= distance.amin(-1, keepdim=True) + slack).all())


@given(weights(INT_RECIPES))
def test_integers_stay_within_a_step(case):
    """Half a step; with zero points another half, as rounding one shifts the whole range."""
    weight, recipe = case
    scheme, matrix = quantize_matrix(weight, recipe)
    steps = steps_of(scheme, matrix)
    error = (matrix.dequantize(scheme).double() - weight.double()).abs()
    # A scale is rounded by half an eps, and a subnormal fp16 one to 5 bits at worst: that moves
    # the ends of the range by as much of `2**bits - 1` steps.
    half_eps = 2.0**-6 if scheme.scale == "fp16" else torch.finfo(matrix.scales.dtype).eps / 2
    ends = ((1 << scheme.bits) - 1) * half_eps / (1 - half_eps)
    bound = (0.5 + 0.5 * scheme.has_zero_points + ends) * steps
    assert bool((error <= bound + 2.0**-22 * weight.double().abs()).all())


@given(weights(("mxfp4",)))
def test_mxfp4_brings_the_largest_into_range(case):
    """The largest of a group is 3.5 to 7 steps; the step is a power of two."""
    weight, recipe = case
    scheme, matrix = quantize_matrix(weight, recipe)
    largest = weight.double().unflatten(1, (-1, 32)).abs().amax(-1)
    steps = scales_to_float(matrix.scales, scheme.scale).double()
    ratio = largest / steps
    assert bool(((ratio < 7) & ((ratio >= 3.5) | (largest == 0))).all())
    error = (matrix.dequantize(scheme).double() - weight.double()).abs()
    assert bool((error <= steps.repeat_interleave(32, 1)).all())


@pytest.mark.parametrize(
    ("largest", "step"), [(7.0, 2.0), (6.9999995, 1.0), (3.5, 1.0), (3.49, 0.5)]
)
def test_mxfp4_doubles_the_step_at_seven(largest, step):
    weight = torch.zeros(1, 32)
    weight[0, 3] = largest
    _, matrix = quantize_matrix(weight, parse_recipe("mxfp4"))
    assert scales_to_float(matrix.scales, "e8m0").tolist() == [[step]]


@given(weights(("nvfp4",)))
def test_nvfp4_uses_the_whole_range(case):
    weight, recipe = case
    scheme, matrix = quantize_matrix(weight, recipe)
    if bool(weight.any()):
        assert matrix.scales.float().max() == 448
        wanted = 448 * 6 / weight.double().abs().max()
        assert matrix.global_scale.value.double() == pytest.approx(wanted.item(), rel=2.0**-23)
    steps = steps_of(scheme, matrix)
    largest = weight.double().unflatten(1, (-1, 16)).abs().amax(-1).repeat_interleave(16, 1)
    error = (matrix.dequantize(scheme).double() - weight.double()).abs()
    # One step where values are 2 apart; clamping adds what rounding the scale to E4M3 takes.
    bound = torch.maximum(steps, largest - 6 * steps) * (1 + 2.0**-20)
    assert bool((error <= bound).all())


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_matrix_of_zeros_stays_zero(recipe):
    scheme, matrix = quantize_matrix(torch.zeros(2, 128), parse_recipe(recipe))
    assert not matrix.dequantize(scheme).any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_same_weights_give_the_same_bytes_row_by_row(recipe):
    weight = torch.randn(4, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole = quantize_matrix(weight, parse_recipe(recipe))[1]
    again = quantize_matrix(weight.t().contiguous().t(), parse_recipe(recipe))[1]
    assert torch.equal(whole.codes, again.codes)
    if recipe != "nvfp4":
        part = quantize_matrix(weight[2:3], parse_recipe(recipe))[1]
        assert torch.equal(part.codes, whole.codes[2:3])


def test_scales_take_fp16_from_fp16_weights_and_bf16_otherwise():
    recipe = parse_recipe("int4-g32")
    for dtype, scale in zip(DTYPES, ("bf16", "fp16", "bf16"), strict=True):
        assert quantize_matrix(torch.ones(1, 32, dtype=dtype), recipe)[0].scale == scale


def test_e2m1_ties_go_to_the_even_code():
    numbers = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 9.0, -0.25, -0.75, -9.0, 0.0])
    assert round_to_e2m1(numbers).tolist() == [0, 2, 2, 4, 4, 6, 6, 7, 0, 10, 15, 0]
    above = torch.nextafter(numbers[:7], torch.tensor(10.0))
    assert round_to_e2m1(above).tolist() == [1, 2, 3, 4, 5, 6, 7]
    below = torch.nextafter(numbers[:7], torch.tensor(0.0))
    assert round_to_e2m1(below).tolist() == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("name", "element", "group_size", "has_zero_points"),
    [
        ("int4-g128", "int4", 128, False),
        ("int3-g32-asym", "int3", 32, True),
        ("int8-channel", "int8", -1, False),
        ("mxfp4", "e2m1", 32, False),
        ("nvfp4", "e2m1", 16, False),
        ("nf3", "nf3", 32, False),
    ],
)
def test_recipes_are_read(name, element, group_size, has_zero_points):
    recipe = parse_recipe(name)
    assert (recipe.name, recipe.element) == (name, element)
    assert (recipe.group_size, recipe.has_zero_points) == (group_size, has_zero_points)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "int4",
        "int5-g32",
        "int4-g48",
        "int4-g0",
        "INT4-g128",
        "mxfp4-g32",
        "int4-g128-sym",
        "fp8",
    ],
)
def test_other_recipes_list_those_allowed(name):
    with pytest.raises(InvalidArgumentError, match=f"recipe: got '{name}', must be int") as caught:
        parse_recipe(name)
    assert all(
        word in str(caught.value) for word in ("g{16,32,", "channel", "asym", "nvfp4", "nf3")
    )


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.zeros(4), r"weight: got torch.float32 \[4\], must be floating point \[n, k\]"),
        (torch.zeros(2, 32, dtype=torch.int32), "must be floating point"),
        (torch.zeros(0, 32), "not empty"),
        (torch.zeros(2, 48), "recipe 'int4-g32': group_size: got 32, .*divide k = 48"),
        (torch.full((2, 32), float("nan")), r"weight\[0, 0\]: got nan, must be finite"),
        (torch.full((2, 32), float("-inf")), r"weight\[0, 0\]: got -inf, must be finite"),
    ],
)
def test_other_weights_are_refused(weight, message):
    with pytest.raises(InvalidArgumentError, match=message):
        quantize_matrix(weight, parse_recipe("int4-g32"))
