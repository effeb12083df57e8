"""FC1's and FC2's kernels with MXFP4 and NVFP4 weights, against the oracles."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firesteel.moe.activation import Activation
from tests.moe import test_down as down
from tests.moe import test_gate_up as gate_up
from tests.moe.fp4 import E4M3_BYTES, ELEMENTS, GROUP_SIZES, Fp4Stack, fp4_stacks
from tests.moe.kernels import DTYPES, Routing, routings, run_down, run_gate_up, run_place

pytestmark = pytest.mark.interpret

# Columns: whole blocks, and last ones of one, two and three planes and of half a plane.
COLUMNS = (128, 256, 96, 160, 64, 32, 320)
HALVES = (16, 48, 112, 144, 240)
RELU2 = Activation(name="relu2")


def columns_of(element: str) -> st.SearchStrategy[int]:
    return st.sampled_from(COLUMNS + HALVES if element == "nvfp4" else COLUMNS)


@st.composite
def gate_up_cases(draw: st.DrawFn) -> gate_up.Case:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    element = draw(st.sampled_from(ELEMENTS))
    routing = draw(routings(max_tokens=5, max_experts=4))
    dtype = draw(st.sampled_from(DTYPES))
    k = draw(columns_of(element))
    activation = draw(st.sampled_from(gate_up.ACTIVATIONS))
    num_parts = 2 if activation.is_gated else 1
    rows = draw(gate_up.COLUMNS) * num_parts
    stack = draw(fp4_stacks(element, (routing.num_experts, rows, k), num_parts=num_parts))
    weights, bias = None, None
    if draw(st.booleans()):
        weights = torch.rand(routing.topk_ids.shape, generator=generator)
    if draw(st.booleans()):
        bias = torch.randn(routing.num_experts, rows, generator=generator).to(dtype)
    x = 4 * torch.randn(routing.num_tokens, k, generator=generator)
    return gate_up.Case(
        *(x.to(dtype), stack, routing, activation, bias, weights),
        padding=draw(st.sampled_from((0, 8, 40))),
        block_m=draw(st.sampled_from((1, 8, 16, 64))),
        block_n=draw(st.sampled_from((64, 128))),
        is_joint=draw(st.booleans()),
    )


@st.composite
def down_cases(draw: st.DrawFn) -> down.Case:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    element = draw(st.sampled_from(ELEMENTS))
    routing = draw(routings(max_tokens=5, max_experts=4))
    dtype = draw(st.sampled_from(DTYPES))
    n = draw(columns_of(element))
    k = draw(st.integers(1, 70) | st.sampled_from((128, 130, 300)))
    stack = draw(fp4_stacks(element, (routing.num_experts, k, n)))
    hidden = 4 * torch.randn(routing.num_routes, n, generator=generator)
    hidden[torch.tensor(routing.experts) < 0] = float("nan")
    bias = None
    if draw(st.booleans()):
        bias = torch.randn(routing.num_experts, k, generator=generator).to(dtype)
    return down.Case(
        *(hidden.to(dtype), stack, routing, bias),
        block_m=draw(st.sampled_from((1, 8, 16, 64))),
        block_n=draw(st.sampled_from((64, 128))),
        span=draw(st.sampled_from((1, 2, 4))),
    )


@given(case=gate_up_cases())
@settings(max_examples=15)
def test_gate_up_stays_within_its_rounding_bound(case: gate_up.Case) -> None:
    gate_up.check(case, case.run_packed())
    gate_up.check(case, case.run(None))


@given(case=gate_up_cases(), split_k=st.sampled_from((2, 3, 8)))
@settings(max_examples=10)
def test_split_sums_stay_within_their_rounding_bound(case: gate_up.Case, split_k: int) -> None:
    gate_up.check(case, case.run_split(split_k))


@given(case=down_cases())
@settings(max_examples=15)
def test_down_stays_within_its_rounding_bound(case: down.Case) -> None:
    down.check(case, case.run_packed())
    torch.testing.assert_close(case.run(None), case.run_packed(), rtol=0, atol=0, equal_nan=True)


@given(data=st.data(), exponent=st.integers(-60, 30), element=st.sampled_from(ELEMENTS))
@settings(max_examples=15)
def test_weights_of_any_size_stay_within_the_bound(
    data: st.DataObject, exponent: int, element: str
) -> None:
    """In fp32, whose numbers go as far as bf16's: mxfp4's scales, and nvfp4's matrix-wide ones."""
    stack = data.draw(fp4_stacks(element, (1, 70, 160), size=2.0**exponent))
    hidden = torch.randn(3, 160, generator=torch.Generator().manual_seed(exponent + 60))
    routing = Routing(torch.zeros(3, 1, dtype=torch.int32), 1)
    case = down.Case(hidden, stack, routing, None, block_m=4, block_n=64, span=1)
    down.check(case, case.run_packed())


def every_scale(element: str, scales: torch.Tensor) -> Fp4Stack:
    """A row a scale, with every code in it."""
    group_size = GROUP_SIZES[element]
    codes = torch.arange(16, dtype=torch.uint8).repeat(1, len(scales), group_size // 16)
    return Fp4Stack(element, codes, scales.view(1, -1, 1))


@pytest.mark.parametrize(
    ("dtype", "lowest", "highest"), [(torch.float32, 27, 160), (torch.float16, 104, 128)]
)
def test_every_mxfp4_weight_is_exact(dtype: torch.dtype, lowest: int, highest: int) -> None:
    """One column of hidden at a time: y is the column of W, to the bit."""
    stack = every_scale("mxfp4", torch.arange(lowest, highest + 1, dtype=torch.uint8))
    hidden = torch.eye(32, dtype=dtype)
    routing = Routing(torch.zeros(32, 1, dtype=torch.int32), 1)
    y = run_down(hidden, stack, routing, run_place(routing, block_r=64))
    assert torch.equal(y.double().T, stack.dense[0])


@pytest.mark.parametrize("byte", [0, 1, 26])
def test_a_smaller_mxfp4_scale_gives_weights_that_are_next_to_nothing(byte: int) -> None:
    stack = every_scale("mxfp4", torch.tensor([byte], dtype=torch.uint8))
    hidden = torch.eye(32)
    routing = Routing(torch.zeros(32, 1, dtype=torch.int32), 1)
    y = run_down(hidden, stack, routing, run_place(routing, block_r=64))
    assert ((y.double().T - stack.dense[0]).abs() <= 2.0**-102).all()


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
@pytest.mark.parametrize(("dtype", "byte"), [(torch.float32, 161), (torch.float16, 129)])
def test_a_larger_mxfp4_scale_gives_no_number_that_passes_for_one(
    dtype: torch.dtype, byte: int
) -> None:
    for scale in (byte, 254):
        codes = torch.full((1, 1, 32), 2, dtype=torch.uint8)
        stack = Fp4Stack("mxfp4", codes, torch.full((1, 1, 1), scale, dtype=torch.uint8))
        routing = Routing(torch.zeros(1, 1, dtype=torch.int32), 1)
        y = run_down(torch.ones(1, 32, dtype=dtype), stack, routing, run_place(routing))
        assert not y.isfinite().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("divides", [True, False])
def test_every_nvfp4_weight_is_exact(dtype: torch.dtype, divides: bool) -> None:
    scale = torch.tensor([[0.25 if divides else 4.0]])
    stack = replace(every_scale("nvfp4", E4M3_BYTES), global_scale=scale, divides=divides)
    hidden = torch.eye(16, dtype=dtype)
    routing = Routing(torch.zeros(16, 1, dtype=torch.int32), 1)
    y = run_down(hidden, stack, routing, run_place(routing))
    assert torch.equal(y.double().T, stack.dense[0])


@pytest.mark.parametrize("element", ELEMENTS)
def test_scales_reach_only_their_own_columns(element: str) -> None:
    """One column of x at a time, each group of a row with another scale."""
    k, group_size = 160, GROUP_SIZES[element]
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (1, 16, k), dtype=torch.uint8, generator=generator)
    groups = torch.arange(k // group_size, dtype=torch.uint8).expand(1, 16, -1)
    # 2**-5 and on; E4M3's 1 and on.
    scales = (122 if element == "mxfp4" else 0x38) + groups
    scale = None if element == "mxfp4" else torch.ones(1, 1)
    stack = Fp4Stack(element, codes, scales.contiguous(), global_scale=scale)
    x = torch.eye(k)
    routing = Routing(torch.zeros(k, 1, dtype=torch.int32), 1)
    hidden = run_gate_up(
        *(x, stack, routing, run_place(routing, block_r=256)), activation=RELU2, block_m=64
    )
    assert torch.equal(hidden.double().T, stack.dense[0].clamp(min=0).square())


@pytest.mark.parametrize("is_joint", [True, False])
def test_gate_and_up_have_matrix_wide_scales_of_their_own(is_joint: bool) -> None:
    """One expert's gate by 2 and up by 8, the other's by 4 and 16; whole and in spans."""
    codes = torch.full((2, 2, 256), 2, dtype=torch.uint8)
    ones = torch.full((2, 2, 16), 0x38, dtype=torch.uint8)
    scales = torch.tensor([[2.0, 8.0], [4.0, 16.0]])
    stack = Fp4Stack("nvfp4", codes, ones, global_scale=scales)
    x = torch.full((1, 256), 1 / 256)
    routing = Routing(torch.tensor([[0, 1]], dtype=torch.int32), 2)

    case = gate_up.Case(
        *(x, stack, routing, Activation(name="swigluoai", limit=100.0), None, None),
        padding=0,
        block_m=1,
        block_n=64,
        is_joint=is_joint,
    )
    for hidden in (case.run_packed(), case.run(None), case.run_split(2)):
        gate_up.check(case, hidden)


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("is_joint", [True, False])
def test_what_lies_past_the_end_reaches_no_output(element: str, is_joint: bool) -> None:
    """Codes of 0 and of 15 there, and scales of NaN: those of one group end where guards begin."""
    k = 144 if element == "nvfp4" else 160
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (1, 65, k), dtype=torch.uint8, generator=generator)
    groups = (1, 65, k // GROUP_SIZES[element])
    lowest = 118 if element == "mxfp4" else 0x20
    scales = torch.randint(lowest, lowest + 5, groups, dtype=torch.uint8, generator=generator)
    scale = None if element == "mxfp4" else torch.full((1, 1), 0.5)
    x = torch.randn(3, k, generator=generator).half()
    routing = Routing(torch.zeros(3, 1, dtype=torch.int32), 1)
    found = []
    for padding in (0, 15):
        stack = Fp4Stack(element, codes, scales, global_scale=scale, padding=padding)
        for block_n in (64, 128):
            case = gate_up.Case(
                *(x, stack, routing, RELU2, None, None),
                padding=8,
                block_m=4,
                block_n=block_n,
                is_joint=is_joint,
            )
            runs = [case.run_packed(), case.run(None), case.run_split(2)]
            for hidden in runs:
                gate_up.check(case, hidden)
        found.append(torch.cat(runs))
    assert torch.equal(*found)
