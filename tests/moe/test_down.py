"""FC2's kernel against its oracle, and the laws of its rows."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from firesteel.moe.down import down_kernel
from firesteel.moe.reference import down_reference
from tests.moe.kernels import (
    DTYPES,
    ROUNDING,
    Int4Stack,
    Placed,
    Routing,
    launch,
    routings,
    run_down,
    run_on_nothing,
    run_place,
    stacks,
)
from tests.moe.sparse import at, sparse_memory

pytestmark = pytest.mark.interpret

# n, group size: FC2 sums over n.
SHAPES = (
    *((128, 32), (128, 64), (256, 128), (256, 256), (96, 32), (192, 64), (320, 32)),
    *((96, 96), (160, 160), (72, 72), (32, 32)),
)


@dataclass(frozen=True)
class Case:
    """One call of FC2: hidden by route, and the tile it is run with."""

    hidden: Tensor
    stack: Int4Stack
    routing: Routing
    bias: Tensor | None
    block_m: int
    block_n: int
    span: int

    def run(self, placed: Placed | None) -> Tensor:
        hidden = self.hidden
        if placed is not None:
            num_placed = int(placed.expert_offsets[-1])
            # What lies past the last place, and on routes without an expert, is never read.
            hidden = torch.full_like(hidden, float("nan"))
            hidden[:num_placed] = self.hidden[placed.route_ids[:num_placed].long()]
        return run_down(
            *(hidden, self.stack, self.routing, placed),
            bias=self.bias,
            block_m=self.block_m,
            block_n=self.block_n,
            span=self.span,
        )

    def run_packed(self) -> Tensor:
        return self.run(run_place(self.routing, rows=self.block_m))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    routing = draw(routings(max_tokens=5, max_experts=4))
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.sampled_from(SHAPES))
    # Less than a tile of rows, whole ones, and ends in the first or last of a span's blocks.
    k = draw(st.integers(1, 70) | st.sampled_from((128, 130, 192, 300, 520)))
    stack = draw(stacks(routing.num_experts, k, shape))
    hidden = 4 * torch.randn(routing.num_routes, shape[0], generator=generator)
    hidden[torch.tensor(routing.experts) < 0] = float("nan")
    bias = None
    if draw(st.booleans()):
        bias = torch.randn(routing.num_experts, k, generator=generator).to(dtype)
    return Case(
        *(hidden.to(dtype), stack, routing, bias),
        block_m=draw(st.sampled_from((1, 8, 16, 64))),
        block_n=draw(st.sampled_from((64, 128))),
        span=draw(st.sampled_from((1, 2, 4))),
    )


def check(case: Case, y: Tensor) -> None:
    """Within its bound where there is a route, and never written where there is none.

    A product of n columns is at most 2n + 16 fp32 operations in a row, each off by at most
    ROUNDING of the sum of magnitudes; then y rounds once: half an eps of it, or of the smallest
    normal number.
    """
    ids, expert_map = case.routing.topk_ids, case.routing.expert_map
    wanted = down_reference(
        case.hidden, case.stack.dense, ids, expert_map=expert_map, bias2=case.bias
    )
    bias = None if case.bias is None else case.bias.abs()
    sums = down_reference(
        case.hidden.abs(), case.stack.dense.abs(), ids, expert_map=expert_map, bias2=bias
    )
    finfo = torch.finfo(y.dtype)
    bound = (2 * case.hidden.shape[1] + 16) * ROUNDING * sums
    bound += finfo.eps / 2 * (wanted.abs() + finfo.smallest_normal)
    assert y.dtype == case.hidden.dtype
    is_route = torch.tensor(case.routing.experts) >= 0
    assert y[~is_route].isnan().all()
    assert ((y.double() - wanted).abs() <= bound)[is_route].all()


@given(case=cases())
@settings(max_examples=25)
def test_packed_mode_stays_within_its_rounding_bound(case: Case) -> None:
    check(case, case.run_packed())


@given(case=cases())
@settings(max_examples=20)
def test_direct_mode_stays_within_its_rounding_bound(case: Case) -> None:
    check(case, case.run(None))


@given(case=cases())
@settings(max_examples=20)
def test_a_row_s_bits_do_not_depend_on_the_tile_it_is_in(case: Case) -> None:
    torch.testing.assert_close(case.run(None), case.run_packed(), rtol=0, atol=0, equal_nan=True)


@given(case=cases(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=15)
def test_permuting_tokens_permutes_rows_to_the_bit(case: Case, seed: int) -> None:
    order = torch.randperm(case.routing.num_tokens, generator=torch.Generator().manual_seed(seed))
    routes = torch.arange(case.routing.num_routes).view_as(case.routing.topk_ids)[order].flatten()
    moved = Case(
        *(case.hidden[routes], case.stack, case.routing.at_tokens(order), case.bias),
        block_m=case.block_m,
        block_n=case.block_n,
        span=case.span,
    )
    torch.testing.assert_close(
        moved.run_packed(), case.run_packed()[routes], rtol=0, atol=0, equal_nan=True
    )


@given(case=cases())
@settings(max_examples=15)
def test_a_row_s_bits_do_not_depend_on_the_span(case: Case) -> None:
    """One block of rows a program, or several after one another."""
    found = [replace(case, span=span).run_packed() for span in (1, 2, 8)]
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(found[2], found[0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("block_n", [64, 128])
@pytest.mark.parametrize("shape", [(96, 96), (160, 32), (320, 64), (128, 128)])
@pytest.mark.parametrize("has_zero_points", [True, False])
def test_what_lies_past_the_end_reaches_no_output(
    shape: tuple[int, int], block_n: int, has_zero_points: bool
) -> None:
    """Codes of 0 and of 15 there, and scales of NaN: those of the last group end at guards."""
    n, group_size = shape
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (1, 65, n), dtype=torch.uint8, generator=generator)
    scales = torch.rand(1, 65, n // group_size, generator=generator).half() / n
    zeros = torch.full(scales.shape, 7, dtype=torch.uint8) if has_zero_points else None
    hidden = torch.randn(3, n, generator=generator).half()
    routing = Routing(torch.zeros(3, 1, dtype=torch.int32), 1)
    found = []
    for padding in (0, 15):
        stack = Int4Stack(codes, scales, zeros, group_size, padding)
        case = Case(*(hidden, stack, routing, None), block_m=4, block_n=block_n, span=4)
        runs = [case.run_packed(), case.run(None)]
        for y in runs:
            check(case, y)
        found.append(torch.cat(runs))
    assert torch.equal(*found)


def test_offsets_pass_2_to_the_31() -> None:
    """The last of 2**20 + 2 experts, place 2**24 + 1 of hidden, route 2**28 + 1 of y."""
    n, k, place, route = 128, 16, 2**24 + 1, 2**27 + 1
    num_experts = 2**31 // (64 * 32) + 2
    expert = num_experts - 1
    # Bytes before each pointer, so that an offset that wraps to negative reads zeros.
    room = 2**32
    codes, hidden, y = (sparse_memory(2 * room + 2**20) for _ in range(3))
    scales = sparse_memory(2 * num_experts * k)
    routes = sparse_memory(4 * place + 2**12)
    ends = sparse_memory(4 * (num_experts + 1))
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, 16, (1, k, n), dtype=torch.uint8, generator=generator)
    stack = Int4Stack(drawn, torch.full((1, k, 1), 0.0625, dtype=torch.float16), None, n)
    row = torch.randn(1, n, generator=generator).half()
    words = stack.words().flatten()
    at(codes, room + 2 * expert * len(words), len(words), torch.int16).copy_(words)
    at(scales, 2 * expert * k, k, torch.float16).fill_(0.0625)
    at(hidden, room + 2 * place * n, n, torch.float16).copy_(row[0])
    at(routes, 4 * place, 1, torch.int32).fill_(route)
    at(ends, 4 * num_experts, 1, torch.int32).fill_(place + 1)
    launch(
        *(down_kernel, (1, 1), at(hidden, room, 1, torch.float16)),
        *(at(codes, room, 1, torch.int16), at(scales, 0, 1, torch.float16), *(None,) * 3),
        *(torch.zeros(1, dtype=torch.int32), None, at(routes, 0, 1, torch.int32)),
        *(at(ends, 0, 1, torch.int32), torch.tensor([expert]).int(), torch.tensor([place]).int()),
        *(torch.ones(1, dtype=torch.int32), at(y, room, 1, torch.float16), route + 1),
        **{"K": k, "N": n, "E": num_experts, "NUM_GLOBAL": num_experts, **stack.constexprs},
        **{"BLOCK_M": 1, "BLOCK_N": 64, "SPAN": 1, "PAIRS": False},
    )
    got = at(y, room + 2 * route * k, k, torch.float16)
    routing = Routing(torch.zeros(1, 1, dtype=torch.int32), 1)
    check(Case(row, stack, routing, None, block_m=1, block_n=64, span=1), got.view(1, k))


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("has_optional", [True, False])
def test_empty_work_ends(is_packed: bool, has_optional: bool) -> None:
    absent = set() if is_packed else {8, 9, 10, 11, 12}
    absent |= {4} if has_optional else {3, 4, 5, 7}
    floats = dict.fromkeys((0, 2, 5, 13), torch.float16)
    run_on_nothing(
        down_kernel,
        num_pointers=14,
        num_integers=1,
        absent=absent,
        dtypes=floats | {1: torch.int16, 3: torch.uint8},
        **{"K": 6144, "N": 512, "E": 256, "NUM_GLOBAL": 512, "GROUP_SIZE": 128},
        **{"ELEMENT": "int4", "DIVIDES": None},
        **{"BLOCK_M": 16, "BLOCK_N": 64, "SPAN": 4, "PAIRS": False},
    )
