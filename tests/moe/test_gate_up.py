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
    activation_bound,
    activation_constexprs,
    launch,
    routings,
    run_activate,
    run_gate_up,
    run_on_nothing,
    run_partials,
    run_place,
    stacks,
)
from tests.moe.sparse import at, sparse_memory

pytestmark = pytest.mark.interpret

# k, group size: whole blocks, remainders of 1, 2 and 3 planes, a plane cut, groups of every kind.
SHAPES = (
    *((128, 32), (128, 64), (128, 128), (256, 256), (384, 128), (256, 32)),
    *((96, 32), (160, 32), (192, 64), (320, 64), (352, 32), (96, 96), (160, 160), (200, 200)),
    *((64, 64), (32, 32), (40, 40)),
)
# Less than a tile of rows, whole ones, and a few past them.
COLUMNS = st.integers(1, 40) | st.sampled_from((63, 64, 65, 128, 130))
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
    is_joint: bool = False

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
            is_joint=self.is_joint,
        )
        return hidden if placed is None else placed.by_route(hidden)

    def run_packed(self) -> Tensor:
        return self.run(run_place(self.routing, rows=self.block_m))

    def run_spans(self, split_k: int) -> Tensor:
        return run_partials(
            *(self.x, self.stack, self.routing),
            split_k=split_k,
            is_gated=self.activation.is_gated,
            padding=self.padding,
            block_m=self.block_m,
            block_n=self.block_n,
            is_joint=self.is_joint,
        )

    def run_split(self, split_k: int) -> Tensor:
        return run_activate(
            *(self.run_spans(split_k), self.routing),
            activation=self.activation,
            dtype=self.x.dtype,
            bias=self.bias,
            topk_weights=self.topk_weights,
        )

    def at_tokens(self, order: Tensor) -> "Case":
        weights = None if self.topk_weights is None else self.topk_weights[order]
        return replace(
            self, x=self.x[order], routing=self.routing.at_tokens(order), topk_weights=weights
        )


@st.composite
def cases(
    draw: st.DrawFn,
    shapes: tuple[tuple[int, int], ...] = SHAPES,
    columns: st.SearchStrategy[int] = COLUMNS,
) -> Case:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    routing = draw(routings(max_tokens=5, max_experts=4))
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.sampled_from(shapes))
    activation = draw(st.sampled_from(ACTIVATIONS))
    rows = draw(columns) * (2 if activation.is_gated else 1)
    stack = draw(stacks(routing.num_experts, rows, shape))
    weights, bias = None, None
    if draw(st.booleans()):
        weights = torch.rand(routing.topk_ids.shape, generator=generator)
    if draw(st.booleans()):
        bias = torch.randn(routing.num_experts, rows, generator=generator).to(dtype)
    x = 4 * torch.randn(routing.num_tokens, shape[0], generator=generator)
    return Case(
        *(x.to(dtype), stack, routing, activation, bias, weights),
        padding=draw(st.sampled_from((0, 8, 40))),
        block_m=draw(st.sampled_from((1, 8, 16, 64))),
        block_n=draw(st.sampled_from((64, 128))),
        is_joint=draw(st.booleans()),
    )


def bound_of(case: Case, wanted: Tensor) -> Tensor:
    """How far rounding may carry hidden from the oracle.

    A product of k columns is at most 2k + 16 fp32 operations in a row (products, sums within a
    group, scaling, sums over groups and over at most 8 spans, router weight, bias), each off by at
    most ROUNDING of the sum of magnitudes S. So gate is off by e_g = (2k + 16) * ROUNDING * S_g,
    and up likewise; `activation_bound` has the rest.
    """
    sums = magnitudes(case)
    error = (2 * case.x.shape[1] + 16) * ROUNDING * sums
    return activation_bound(case.activation, sums, error, wanted, case.x.dtype)


def magnitudes(case: Case) -> Tensor:
    """Sums of magnitudes of gate and up, `[R, P * N]`; 0 where there is no route."""
    dense = case.stack.dense.abs()
    sums = torch.zeros(case.routing.num_routes, dense.shape[1], dtype=torch.float64)
    for route, expert in enumerate(case.routing.experts):
        if expert < 0:
            continue
        sums[route] = dense[expert] @ case.x[route // case.routing.top_k].double().abs()
        if case.topk_weights is not None:
            sums[route] *= float(case.topk_weights.flatten()[route])
        if case.bias is not None:
            sums[route] += case.bias[expert].double().abs()
    return sums


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
@settings(max_examples=30)
def test_packed_mode_stays_within_its_rounding_bound(case: Case) -> None:
    check(case, case.run_packed())


@given(case=cases())
@settings(max_examples=20)
def test_direct_mode_stays_within_its_rounding_bound(case: Case) -> None:
    check(case, case.run(None))


@given(case=cases(), split_k=st.sampled_from((2, 3, 8)))
@settings(max_examples=20)
def test_split_sums_stay_within_their_rounding_bound(case: Case, split_k: int) -> None:
    """Spans of one block and more, and more spans than there are blocks."""
    check(case, case.run_split(split_k))


@given(case=cases(), split_k=st.sampled_from((2, 3, 8)))
@settings(max_examples=20)
def test_each_span_sums_its_own_blocks(case: Case, split_k: int) -> None:
    """Within the bound of `bound_of` each; a span without a block is zeros, a lost row untouched.

    NaN in all columns of x but a span's shows that no other span reads those.
    """
    num_blocks = -(-case.x.shape[1] // 128)
    partials = case.run_spans(split_k)
    is_route = torch.tensor(case.routing.experts) >= 0
    assert partials[:, ~is_route].isnan().all()
    plain = replace(case, bias=None, topk_weights=None)
    for span in range(split_k):
        blocks = range(span * num_blocks // split_k, (span + 1) * num_blocks // split_k)
        columns = slice(128 * blocks.start, 128 * blocks.stop)
        x = torch.zeros_like(case.x)
        x[:, columns] = case.x[:, columns]
        alone = replace(plain, x=x)
        wanted = torch.zeros_like(partials[span], dtype=torch.float64)
        for route, expert in enumerate(case.routing.experts):
            row = x[route // case.routing.top_k].double()
            wanted[route] = case.stack.dense[max(expert, 0)] @ row
        bound = (2 * case.x.shape[1] + 16) * ROUNDING * magnitudes(alone)
        assert ((partials[span].double() - wanted).abs() <= bound)[is_route].all()
        x = torch.full_like(case.x, float("nan"))
        x[:, columns] = case.x[:, columns]
        others = replace(plain, x=x).run_spans(split_k)[span]
        torch.testing.assert_close(others, partials[span], rtol=0, atol=0, equal_nan=True)


@given(case=cases(), split_k=st.sampled_from((2, 3)))
@settings(max_examples=15)
def test_a_split_row_s_bits_do_not_depend_on_other_rows(case: Case, split_k: int) -> None:
    together, top_k = case.run_split(split_k), case.routing.top_k
    for token in range(case.routing.num_tokens):
        alone = case.at_tokens(torch.tensor([token])).run_split(split_k)
        rows = together[token * top_k : (token + 1) * top_k]
        torch.testing.assert_close(alone, rows, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("block_n", [64, 128])
@pytest.mark.parametrize("shape", [(96, 96), (160, 32), (320, 64), (128, 128)])
@pytest.mark.parametrize("has_zero_points", [True, False])
@pytest.mark.parametrize("is_joint", [True, False])
def test_what_lies_past_the_end_reaches_no_output(
    shape: tuple[int, int], block_n: int, has_zero_points: bool, is_joint: bool
) -> None:
    """Codes of 0 and of 15 there, and scales of NaN: those of one group end where guards begin."""
    k, group_size = shape
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (1, 65, k), dtype=torch.uint8, generator=generator)
    scales = torch.rand(1, 65, k // group_size, generator=generator).half() / k
    zeros = torch.full(scales.shape, 7, dtype=torch.uint8) if has_zero_points else None
    x = torch.randn(3, k, generator=generator).half()
    routing = Routing(torch.zeros(3, 1, dtype=torch.int32), 1)
    found = []
    for padding in (0, 15):
        stack = Int4Stack(codes, scales, zeros, group_size, padding)
        case = Case(
            *(x, stack, routing, Activation(name="relu2"), None, None),
            padding=8,
            block_m=4,
            block_n=block_n,
            is_joint=is_joint,
        )
        runs = [case.run_packed(), case.run(None), case.run_split(2)]
        for hidden in runs:
            check(case, hidden)
        found.append(torch.cat(runs))
    assert torch.equal(*found)


@given(case=cases(shapes=((2880, 32), (2880, 2880)), columns=st.integers(1, 20)))
@settings(max_examples=8)
def test_a_long_row_with_a_ragged_last_block(case: Case) -> None:
    check(case, case.run_packed())


@given(case=cases(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=15)
def test_permuting_tokens_permutes_rows_to_the_bit(case: Case, seed: int) -> None:
    order = torch.randperm(case.routing.num_tokens, generator=torch.Generator().manual_seed(seed))
    shape = (case.routing.num_tokens, case.routing.top_k, -1)
    before, after = case.run_packed(), case.at_tokens(order).run_packed()
    if case.routing.num_tokens:
        wanted = before.view(shape)[order].view_as(after)
        torch.testing.assert_close(after, wanted, rtol=0, atol=0, equal_nan=True)


@given(case=cases())
@settings(max_examples=15)
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
    num_experts, stride = 2**31 // (2 * 64 * 32) + 2, 2**31 + 8
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
    words = stack.words(2).flatten()
    at(codes, room + 2 * expert * len(words), len(words), torch.int16).copy_(words)
    at(scales, 2 * expert * 2 * n, 2 * n, torch.float16).fill_(0.0625)
    at(rows, room + 2 * stride, k, torch.float16).copy_(x[0])
    at(routes, 4 * place, 1, torch.int32).fill_(1)
    # One tile of one row; offsets of experts are read at expert + 1 alone.
    ends = sparse_memory(4 * (num_experts + 1))
    at(ends, 4 * num_experts, 1, torch.int32).fill_(place + 1)
    launch(
        *(gate_up_kernel, (1, 1), at(rows, room, 1, torch.float16)),
        *(at(codes, room, 1, torch.int16), at(scales, 0, 1, torch.float16), *(None,) * 3),
        *(torch.zeros(1, dtype=torch.int32), None, None, at(routes, 0, 1, torch.int32)),
        *(at(ends, 0, 1, torch.int32), torch.tensor([expert]).int(), torch.tensor([place]).int()),
        *(torch.ones(1, dtype=torch.int32), at(hidden, room, 1, torch.float16), None),
        *(stride // 8, place + 1),
        **activation_constexprs(Activation()),
        **{"K": k, "N": n, "E": num_experts, "NUM_GLOBAL": num_experts, "TOP_K": 1},
        **{
            **stack.constexprs,
            "BLOCK_M": 1,
            "BLOCK_N": 64,
            "SPLIT_K": 1,
            "JOINT": False,
            "PAIRS": False,
        },
    )
    got = at(hidden, room + 2 * place * n, n, torch.float16)
    routing = Routing(torch.zeros(1, 1, dtype=torch.int32), 1)
    case = Case(x, stack, routing, Activation(), None, None, padding=0, block_m=1, block_n=64)
    check(case, got.view(1, n))


def test_offsets_of_partials_pass_2_to_the_31() -> None:
    """Span 1 of 2**28 + 1 routes, of which the first is run."""
    k, n, num_routes = 256, 8, 2**28 + 1
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, 16, (1, 2 * n, k), dtype=torch.uint8, generator=generator)
    stack = Int4Stack(drawn, torch.full((1, 2 * n, 2), 0.0625), None, 128)
    x = torch.randint(-8, 8, (1, k), generator=generator).float()
    # Bytes before the pointer, so that an offset that wraps to negative writes there.
    room = 2**33
    partials = sparse_memory(room + 4 * num_routes * 2 * n + 2**20)
    launch(
        *(gate_up_kernel, (1, 1, 2), x, stack.words(2), stack.scales.transpose(1, 2).contiguous()),
        *(None, None, None, torch.zeros(1, dtype=torch.int32), None, None, *(None,) * 6),
        *(at(partials, room, 1, torch.float32), k // 4, num_routes),
        **{"ACTIVATION": None, "LIMIT": None, "ALPHA": None, "BETA": None},
        **{"K": k, "N": n, "E": 1, "NUM_GLOBAL": 1, "TOP_K": 1, **stack.constexprs},
        **{"BLOCK_M": 1, "BLOCK_N": 64, "SPLIT_K": 2, "JOINT": False, "PAIRS": False},
    )
    for span in range(2):
        got = at(partials, room + 4 * span * num_routes * 2 * n, 2 * n, torch.float32)
        columns = slice(128 * span, 128 * span + 128)
        # Sixteenths of small integers, which fp32 sums exactly.
        wanted = stack.dense[0][:, columns] @ x[0, columns].double()
        assert wanted.any()
        assert torch.equal(got.double(), wanted)


@pytest.mark.parametrize("mode", ["packed", "direct", "split"])
@pytest.mark.parametrize("has_optional", [True, False])
@pytest.mark.parametrize("is_joint", [True, False])
def test_empty_work_ends(mode: str, has_optional: bool, is_joint: bool) -> None:
    absent = set() if mode == "packed" else {9, 10, 11, 12, 13}
    absent |= {14} if mode == "split" else {15}
    absent |= {4} if has_optional else {3, 4, 5, 7, 8}
    floats = dict.fromkeys((0, 2, 5, 8, 14), torch.float16)
    run_on_nothing(
        gate_up_kernel,
        num_pointers=16,
        num_integers=2,
        absent=absent,
        dtypes=floats | {1: torch.int16, 3: torch.uint8, 15: torch.float32},
        **activation_constexprs(Activation()),
        **{"K": 6144, "N": 512, "E": 256, "NUM_GLOBAL": 512, "TOP_K": 8, "GROUP_SIZE": 128},
        **{"ELEMENT": "int4", "DIVIDES": None},
        **{"BLOCK_M": 16, "BLOCK_N": 64, "SPLIT_K": 4 if mode == "split" else 1},
        **{"JOINT": is_joint, "PAIRS": False},
    )


def test_without_the_interpreter_a_launch_raises() -> None:
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET: must be 1"):
        launch(object(), (1,))
