"""FC1's and FC2's kernels with NF3 and 3-bit integer weights, against the oracles."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firesteel.moe.activation import Activation
from tests.moe import test_down as down
from tests.moe import test_gate_up as gate_up
from tests.moe.kernels import DTYPES, Routing, routings, run_down, run_gate_up, run_place
from tests.moe.narrow import E5M3_BYTES, NarrowStack, narrow_stacks

pytestmark = pytest.mark.interpret

# Columns and group size: whole blocks, and last ones of one, two and three planes.
NF3_SHAPES = tuple((k, 32) for k in (128, 256, 96, 160, 64, 32, 320))
INT3_SHAPES = ((128, 32), (128, 128), (192, 64), (352, 32), (256, 256), (160, 160), (40, 40))
ELEMENTS = ("nf3", "int3")
RELU2 = Activation(name="relu2")


@st.composite
def stored(draw: st.DrawFn) -> tuple[str, int, int]:
    """Element, columns and group size."""
    element = draw(st.sampled_from(ELEMENTS))
    return (element, *draw(st.sampled_from(NF3_SHAPES if element == "nf3" else INT3_SHAPES)))


@st.composite
def gate_up_cases(draw: st.DrawFn) -> gate_up.Case:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    element, k, group_size = draw(stored())
    routing = draw(routings(max_tokens=5, max_experts=4))
    dtype = draw(st.sampled_from(DTYPES))
    activation = draw(st.sampled_from(gate_up.ACTIVATIONS))
    rows = draw(gate_up.COLUMNS) * (2 if activation.is_gated else 1)
    shape = (routing.num_experts, rows, k)
    stack = draw(narrow_stacks(element, shape, group_size=group_size))
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
    element, n, group_size = draw(stored())
    routing = draw(routings(max_tokens=5, max_experts=4))
    dtype = draw(st.sampled_from(DTYPES))
    k = draw(st.integers(1, 70) | st.sampled_from((128, 130, 300)))
    stack = draw(narrow_stacks(element, (routing.num_experts, k, n), group_size=group_size))
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
@settings(max_examples=8)
def test_gate_up_stays_within_its_rounding_bound(case: gate_up.Case) -> None:
    gate_up.check(case, case.run_packed())
    gate_up.check(case, case.run(None))


@given(case=gate_up_cases(), split_k=st.sampled_from((2, 3, 8)))
@settings(max_examples=5)
def test_split_sums_stay_within_their_rounding_bound(case: gate_up.Case, split_k: int) -> None:
    gate_up.check(case, case.run_split(split_k))


@given(case=down_cases())
@settings(max_examples=10)
def test_down_stays_within_its_rounding_bound(case: down.Case) -> None:
    down.check(case, case.run_packed())
    torch.testing.assert_close(case.run(None), case.run_packed(), rtol=0, atol=0, equal_nan=True)


def columns_of(stack: NarrowStack, dtype: torch.dtype) -> torch.Tensor:
    """The matrix of the one expert: one column of hidden at a time gives a column of it."""
    n = stack.codes.shape[2]
    routing = Routing(torch.zeros(n, 1, dtype=torch.int32), 1)
    hidden = torch.eye(n, dtype=dtype)
    return run_down(hidden, stack, routing, run_place(routing, block_r=256)).T


def test_every_nf3_weight_is_exact() -> None:
    """A row a scale, with every code in it; in fp32, which has all products."""
    codes = torch.arange(8, dtype=torch.uint8).repeat(1, len(E5M3_BYTES), 4)
    stack = NarrowStack("nf3", codes, E5M3_BYTES.view(1, -1, 1))
    assert torch.equal(columns_of(stack, torch.float32).double(), stack.dense[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_zero_points", [True, False])
def test_every_int3_code_and_zero_point_is_exact(dtype: torch.dtype, has_zero_points: bool) -> None:
    codes = torch.arange(8, dtype=torch.uint8).repeat(1, 9, 4)
    zeros = torch.arange(9, dtype=torch.uint8).view(1, 9, 1) if has_zero_points else None
    stack = NarrowStack("int3", codes, torch.ones(1, 9, 1), zeros)
    assert torch.equal(columns_of(stack, dtype).double(), stack.dense[0])


@pytest.mark.parametrize("element", ELEMENTS)
def test_scales_and_codes_reach_only_their_own_columns(element: str) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 8, (1, 70, 160), dtype=torch.uint8, generator=generator)
    scales = (56 + 8 * torch.arange(5)).byte().repeat(1, 70, 1)
    zeros = torch.randint(0, 8, (1, 70, 5), dtype=torch.uint8, generator=generator)
    is_nf3 = element == "nf3"
    stack = NarrowStack(
        element, codes, scales if is_nf3 else scales.half(), None if is_nf3 else zeros
    )
    assert torch.equal(columns_of(stack, torch.float32).double(), stack.dense[0])


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("is_joint", [True, False])
def test_what_lies_past_the_end_reaches_no_output(element: str, is_joint: bool) -> None:
    """Codes of 0 and of 7 there, and bytes of 255: scales of one group end where guards begin."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 8, (1, 65, 160), dtype=torch.uint8, generator=generator)
    scales = torch.randint(40, 56, (1, 65, 5), dtype=torch.uint8, generator=generator)
    if element == "int3":
        scales = scales.half() / 1024
    x = torch.randn(3, 160, generator=generator).half()
    routing = Routing(torch.zeros(3, 1, dtype=torch.int32), 1)
    found = []
    for padding in (0, 7):
        stack = NarrowStack(element, codes, scales, padding=padding)
        case = gate_up.Case(
            *(x, stack, routing, RELU2, None, None),
            padding=8,
            block_m=4,
            block_n=128,
            is_joint=is_joint,
        )
        runs = [case.run_packed(), case.run(None), case.run_split(2)]
        for hidden in runs:
            gate_up.check(case, hidden)
        found.append(torch.cat(runs))
    assert torch.equal(*found)
    assert run_gate_up(x, stack, routing, None, activation=RELU2).isfinite().all()
