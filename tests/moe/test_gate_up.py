"""FC1's kernel against its oracle, and the laws of its rows."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from firesteel.moe.activation import Activation
from firesteel.moe.gate_up import gate_up_kernel
from firesteel.moe.reference import gate_up_reference
from tests.moe.kernels import (
    DTYPES,
    ROUNDING,
    Int4Stack,
    Placed,
    Routing,
    activation_constexprs,
    at,
    launch,
    routings,
    run_gate_up,
    run_on_nothing,
    run_place,
    sparse_memory,
    stacks,
)

pytestmark = pytest.mark.interpret

# k, group size: whole blocks, remainders of 1, 2 and 3 planes, a plane cut, groups of every kind.
SHAPES = (
    *((128, 32), (128, 64), (128, 128), (256, 256), (384, 128), (256, 32)),
    *((96, 32), (160, 32), (192, 64), (320, 64), (352, 32), (96, 96), (160, 160), (200, 200)),
    *((64, 64), (32, 32), (40, 40)),
)
# Limits that values of about 1 reach.
ACTIVATIONS = (
    *(Activation(), Activation(limit=0.5), Activation(name="relu2"), Activation(name="situ")),
    *(Activation(name="swigluoai", limit=0.75), Activation(name="swigluoai")),
)


@dataclass(frozen=True)
class Case:
    """One call of FC1, and the tile it is run with."""

    x: Tensor
    stack: Int4Stack
    routing: Routing
    activation: Activation
    bias: Tensor | None
    topk_weights: Tensor | None
    padding: int
    block_m: int
    block_n: int

    def run(self, placed: Placed | None) -> Tensor:
        """By route, whatever the mode."""
        hidden = run_gate_up(
            *(self.x, self.stack, self.routing, placed),
            activation=self.activation,
            bias=self.bias,
            topk_weights=self.topk_weights,
            padding=self.padding,
            block_m=self.block_m,
            block_n=self.block_n,
        )
        return hidden if placed is None else placed.by_route(hidden)

    def run_packed(self) -> Tensor:
        return self.run(run_place(self.routing, block_m=self.block_m))

    def at_tokens(self, order: Tensor) -> "Case":
        weights = None if self.topk_weights is None else self.topk_weights[order]
        return replace(
            self, x=self.x[order], routing=self.routing.at_tokens(order), topk_weights=weights
        )


@st.composite
def cases(
    draw: st.DrawFn,
    shapes: tuple[tuple[int, int], ...] = SHAPES,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
) -> Case:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    routing = draw(routings(max_tokens=5, max_experts=4))
    dtype = draw(st.sampled_from(dtypes))
    shape = draw(st.sampled_from(shapes))
    activation = draw(st.sampled_from(ACTIVATIONS))
    rows = draw(st.integers(1, 40)) * (2 if activation.is_gated else 1)
    stack = draw(stacks(routing.num_experts, rows, shape))
    weights, bias = None, None
    if draw(st.booleans()):
        weights = torch.rand(routing.topk_ids.shape, generator=generator)
    if draw(st.booleans()):
        bias = torch.randn(routing.num_experts, rows, generator=generator).to(dtype)
    x = 4 * torch.randn(routing.num_tokens, shape[0], generator=generator)
    return Case(
        *(x.to(dtype), stack, routing, activation, bias, weights),
        padding=draw(st.sampled_from((0, 8, 33))),
        block_m=draw(st.sampled_from((1, 4, 16))),
        block_n=draw(st.sampled_from((16, 32))),
    )


def bound_of(case: Case, wanted: Tensor) -> Tensor:
    """How far rounding may carry hidden from the oracle.

    A product of k columns is at most 2k + 16 fp32 operations in a row (products, sums within a
    group, scaling, sums over groups, router weight, bias), each off by at most ROUNDING of the sum
    of magnitudes S. So gate is off by e_g = (2k + 16) * ROUNDING * S_g, and up likewise.
    With f(gate, up) = a(gate) * b(up): |a| <= |gate| and |a'| <= 2, |b| <= |up| + |beta| and
    |b'| <= 1 hold for every gated activation (1.1 bounds a' but for situ's two factors), so f moves
    by at most 2 e_g (S_u + |beta| + e_u) + S_g e_u. relu2 moves by at most 2 S_g e_g + e_g**2.
    The activation itself takes at most 16 operations and an exponential, whose argument z is
    rounded by ROUNDING * |z| <= 2 * ROUNDING * S_g: another (32 + 4 S_g) * ROUNDING of the
    magnitude. The last rounding is half an eps of the result, or of the smallest normal number.
    """
    routing, beta = case.routing, abs(case.activation.beta)
    dense = case.stack.dense.abs()
    sums = torch.zeros(len(routing.experts), dense.shape[1], dtype=torch.float64)
    for route, expert in enumerate(routing.experts):
        sums[route] = dense[expert] @ case.x[route // routing.top_k].double().abs()
        if case.topk_weights is not None:
            sums[route] *= float(case.topk_weights.flatten()[route])
        if case.bias is not None:
            sums[route] += case.bias[expert].double().abs()
    error = (2 * dense.shape[2] + 16) * ROUNDING * sums
    if case.activation.is_gated:
        (gate, up), (gate_error, up_error) = sums.chunk(2, dim=1), error.chunk(2, dim=1)
        moved = 2 * gate_error * (up + beta + up_error) + gate * up_error
        size = gate * (up + beta)
    else:
        gate, moved, size = sums, 2 * sums * error + error**2, sums**2
    finfo = torch.finfo(case.x.dtype)
    last = finfo.eps / 2 * (wanted.abs() + finfo.smallest_normal)
    return moved + (32 + 4 * gate) * ROUNDING * size + last


def check(case: Case, hidden: Tensor) -> None:
    """Within its bound where there is a route, and never written where there is none."""
    wanted = gate_up_reference(
        *(case.x, case.stack.dense, case.routing.topk_ids),
        activation=case.activation,
        expert_map=case.routing.expert_map,
        topk_weights=case.topk_weights,
        bias13=case.bias,
    )
    assert hidden.dtype == case.x.dtype
    is_route = torch.tensor(case.routing.experts) >= 0
    assert hidden[~is_route].isnan().all()
    close = (hidden.double() - wanted).abs() <= bound_of(case, wanted)
    assert close[is_route].all()


@given(case=cases())
@settings(max_examples=60)
def test_packed_mode_stays_within_its_rounding_bound(case: Case) -> None:
    check(case, case.run_packed())


@given(case=cases())
@settings(max_examples=40)
def test_direct_mode_stays_within_its_rounding_bound(case: Case) -> None:
    check(case, case.run(None))


@given(case=cases(shapes=((2880, 32), (2880, 2880))))
@settings(max_examples=12)
def test_a_long_row_with_a_ragged_last_block(case: Case) -> None:
    check(case, case.run_packed())


@given(case=cases(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_permuting_tokens_permutes_rows_to_the_bit(case: Case, seed: int) -> None:
    order = torch.randperm(case.routing.num_tokens, generator=torch.Generator().manual_seed(seed))
    shape = (case.routing.num_tokens, case.routing.top_k, -1)
    before, after = case.run_packed(), case.at_tokens(order).run_packed()
    if case.routing.num_tokens:
        wanted = before.view(shape)[order].view_as(after)
        torch.testing.assert_close(after, wanted, rtol=0, atol=0, equal_nan=True)


@given(case=cases())
@settings(max_examples=30)
def test_a_row_s_bits_do_not_depend_on_other_rows(case: Case) -> None:
    """All at once, one token at a time, and each route in a tile of its own."""
    together = case.run_packed()
    torch.testing.assert_close(case.run(None), together, rtol=0, atol=0, equal_nan=True)
    top_k = case.routing.top_k
    for token in range(case.routing.num_tokens):
        alone = case.at_tokens(torch.tensor([token])).run_packed()
        rows = together[token * top_k : (token + 1) * top_k]
        torch.testing.assert_close(alone, rows, rtol=0, atol=0, equal_nan=True)


def test_not_a_number_passes_through_every_activation() -> None:
    stack = Int4Stack(
        torch.full((1, 32, 128), 9, dtype=torch.uint8), torch.ones(1, 32, 1), None, 128
    )
    x = torch.ones(1, 128)
    x[0, 5] = float("nan")
    routing = Routing(torch.zeros(1, 1, dtype=torch.int32), 1)
    for activation in ACTIVATIONS:
        assert run_gate_up(x, stack, routing, None, activation=activation).isnan().all()


def test_situ_keeps_its_digits_near_zero() -> None:
    """There tanh(g / 4) is g / 4, and 1 - exp(-g / 2) would lose most of g."""
    codes = torch.full((1, 2, 32), 9, dtype=torch.uint8)
    stack = Int4Stack(codes, torch.tensor([[[1.0], [2.0**10]]]), None, 32)
    routing = Routing(torch.zeros(40, 1, dtype=torch.int32), 1)
    x = torch.zeros(40, 32)
    x[:, 0] = 2.0 ** -torch.arange(40)
    placed = run_place(routing, block_r=64)
    situ = Activation(name="situ")
    hidden = run_gate_up(x, stack, routing, placed, activation=situ)
    wanted = gate_up_reference(x, stack.dense, routing.topk_ids, activation=situ)
    assert ((hidden.double() - wanted).abs() <= 32 * ROUNDING * wanted.abs()).all()


def test_group_32_zero_points_reach_only_their_own_columns() -> None:
    """One column of x at a time: each number of a row is (code - its group's zero) * scale."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (1, 16, 160), dtype=torch.uint8, generator=generator)
    zeros = torch.randint(0, 16, (1, 16, 5), dtype=torch.uint8, generator=generator)
    stack = Int4Stack(codes, torch.ones(1, 16, 5), zeros, 32)
    x = torch.eye(160, dtype=torch.float16)
    routing = Routing(torch.zeros(160, 1, dtype=torch.int32), 1)
    hidden = run_gate_up(
        *(x, stack, routing, run_place(routing, block_r=256)), activation=Activation(name="relu2")
    )
    assert torch.equal(hidden.double().T, stack.dense[0].clamp(min=0).square())


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_points_of_0_to_16_are_exact(dtype: torch.dtype) -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(1, 17, 2)
    zeros = torch.arange(17, dtype=torch.uint8).view(1, 17, 1)
    stack = Int4Stack(codes, torch.ones(1, 17, 1), zeros, 32)
    x = torch.eye(32, dtype=dtype)[:16]
    routing = Routing(torch.zeros(16, 1, dtype=torch.int32), 1)
    hidden = run_gate_up(
        *(x, stack, routing, run_place(routing)), activation=Activation(name="relu2")
    )
    wanted = (torch.arange(16).view(16, 1) - torch.arange(17)).clamp(min=0) ** 2
    assert torch.equal(hidden.double(), wanted.double())


def test_offsets_pass_2_to_the_31() -> None:
    """Token 1 of rows 2**31 apart, the last of 2**21 + 2 experts, place 2**28 of hidden."""
    k, n, place = 128, 8, 2**28
    num_experts, stride = 2**31 // (2 * n * 32) + 2, 2**31 + 8
    expert = num_experts - 1
    # Bytes before each pointer, so that an offset that wraps to negative reads zeros.
    room = 2**32
    codes = sparse_memory(2 * room + 2**20)
    scales = sparse_memory(num_experts * 2 * n * 2)
    hidden = sparse_memory(2 * room + 2**20)
    rows = sparse_memory(2 * room + 2**20)
    routes = sparse_memory(4 * place + 2**12)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, 16, (1, 2 * n, k), dtype=torch.uint8, generator=generator)
    stack = Int4Stack(drawn, torch.full((1, 2 * n, 1), 0.0625, dtype=torch.float16), None, k)
    x = torch.randn(1, k, generator=generator).half()
    at(codes, room + 2 * expert * 2 * n * 32, 2 * n * 32, torch.int16).copy_(stack.words.flatten())
    at(scales, 2 * expert * 2 * n, 2 * n, torch.float16).fill_(0.0625)
    at(rows, room + 2 * stride, k, torch.float16).copy_(x[0])
    at(routes, 4 * place, 1, torch.int32).fill_(1)
    # One tile of one row; offsets of experts are read at expert + 1 alone.
    ends = sparse_memory(4 * (num_experts + 1))
    at(ends, 4 * num_experts, 1, torch.int32).fill_(place + 1)
    launch(
        *(gate_up_kernel, (1, 1), at(rows, room, 1, torch.float16)),
        *(at(codes, room, 1, torch.int16), at(scales, 0, 1, torch.float16), None, None),
        *(torch.zeros(1, dtype=torch.int32), None, None, at(routes, 0, 1, torch.int32)),
        *(at(ends, 0, 1, torch.int32), torch.tensor([expert]).int(), torch.tensor([place]).int()),
        *(torch.ones(1, dtype=torch.int32), at(hidden, room, 1, torch.float16), stride, place + 1),
        **activation_constexprs(Activation()),
        **{"K": k, "N": n, "E": num_experts, "NUM_GLOBAL": num_experts, "TOP_K": 1},
        **{"GROUP_SIZE": k, "BLOCK_M": 1, "BLOCK_N": 8},
    )
    got = at(hidden, room + 2 * place * n, n, torch.float16)
    routing = Routing(torch.zeros(1, 1, dtype=torch.int32), 1)
    case = Case(x, stack, routing, Activation(), None, None, padding=0, block_m=1, block_n=8)
    check(case, got.view(1, n))


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("has_optional", [True, False])
def test_empty_work_ends(is_packed: bool, has_optional: bool) -> None:
    absent = set() if is_packed else {8, 9, 10, 11, 12}
    absent |= set() if has_optional else {3, 4, 6, 7}
    floats = dict.fromkeys((0, 2, 4, 7, 13), torch.float16)
    run_on_nothing(
        gate_up_kernel,
        num_pointers=14,
        num_integers=2,
        absent=absent,
        dtypes=floats | {1: torch.int16, 3: torch.uint8},
        **activation_constexprs(Activation()),
        **{"K": 6144, "N": 512, "E": 256, "NUM_GLOBAL": 512, "TOP_K": 8, "GROUP_SIZE": 128},
        **{"BLOCK_M": 16, "BLOCK_N": 64},
    )


def test_without_the_interpreter_a_launch_raises() -> None:
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET: must be 1"):
        launch(object(), (1,))
