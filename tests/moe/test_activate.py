"""The kernel that ends a split FC1 against its oracle, and the order of its sums."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from firesteel.moe.activate import activate_kernel
from firesteel.moe.activation import Activation
from firesteel.moe.reference import activate_reference
from tests.moe.kernels import (
    DTYPES,
    ROUNDING,
    Routing,
    activation_bound,
    activation_constexprs,
    launch,
    routings,
    run_activate,
    run_on_nothing,
)
from tests.moe.sparse import at, sparse_memory

pytestmark = pytest.mark.interpret

# Limits that values of about 1 reach.
ACTIVATIONS = (
    *(Activation(), Activation(limit=0.5), Activation(name="relu2"), Activation(name="situ")),
    *(Activation(name="swigluoai", limit=0.75), Activation(name="swigluoai")),
)
RELU2 = Activation(name="relu2")


@dataclass(frozen=True)
class Case:
    """One call: partials [S, R, P * N] fp32, NaN where no route has an expert."""

    partials: Tensor
    routing: Routing
    activation: Activation
    dtype: torch.dtype
    bias: Tensor | None
    topk_weights: Tensor | None

    def run(self) -> Tensor:
        return run_activate(
            *(self.partials, self.routing),
            activation=self.activation,
            dtype=self.dtype,
            bias=self.bias,
            topk_weights=self.topk_weights,
        )

    def at_tokens(self, order: Tensor) -> "Case":
        routes = torch.arange(self.routing.num_routes).view_as(self.routing.topk_ids)[order]
        return replace(
            self,
            partials=self.partials[:, routes.flatten()],
            routing=self.routing.at_tokens(order),
            topk_weights=None if self.topk_weights is None else self.topk_weights[order],
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    routing = draw(routings(max_tokens=5, max_experts=4))
    activation = draw(st.sampled_from(ACTIVATIONS))
    columns = draw(st.integers(1, 140)) * (2 if activation.is_gated else 1)
    dtype = draw(st.sampled_from(DTYPES))
    shape = (draw(st.integers(2, 8)), routing.num_routes, columns)
    partials = torch.randn(shape, generator=generator)
    partials[:, torch.tensor(routing.experts) < 0] = float("nan")
    weights, bias = None, None
    if draw(st.booleans()):
        weights = torch.rand(routing.topk_ids.shape, generator=generator)
        weights = weights.to(draw(st.sampled_from((torch.float32, dtype))))
    if draw(st.booleans()):
        bias = torch.randn(routing.num_experts, columns, generator=generator).to(dtype)
    return Case(partials, routing, activation, dtype, bias, weights)


def check(case: Case, hidden: Tensor) -> None:
    """Within its bound where there is a route, and never written where there is none.

    A sum is at most S + 4 fp32 operations in a row (sums over spans, router weight, bias), each
    off by at most ROUNDING of the sum of magnitudes; `activation_bound` has the rest.
    """
    routing = case.routing
    wanted = activate_reference(
        *(case.partials, routing.topk_ids, routing.num_experts),
        activation=case.activation,
        expert_map=routing.expert_map,
        topk_weights=case.topk_weights,
        bias13=case.bias,
    )
    is_route = torch.tensor(routing.experts) >= 0
    sums = case.partials.double().abs().sum(0)
    if case.topk_weights is not None:
        sums *= case.topk_weights.double().view(-1, 1)
    if case.bias is not None:
        sums += case.bias.double().abs()[torch.tensor(routing.experts).clamp(min=0).long()]
    error = (len(case.partials) + 4) * ROUNDING * sums
    bound = activation_bound(case.activation, sums, error, wanted, case.dtype)
    assert hidden.dtype == case.dtype
    assert hidden[~is_route].isnan().all()
    assert ((hidden.double() - wanted).abs() <= bound)[is_route].all()


@given(case=cases())
@settings(max_examples=80)
def test_sums_stay_within_their_rounding_bound(case: Case) -> None:
    check(case, case.run())


@given(case=cases(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_permuting_tokens_permutes_rows_to_the_bit(case: Case, seed: int) -> None:
    order = torch.randperm(case.routing.num_tokens, generator=torch.Generator().manual_seed(seed))
    shape = (case.routing.num_tokens, case.routing.top_k, -1)
    before, after = case.run(), case.at_tokens(order).run()
    if case.routing.num_tokens:
        wanted = before.view(shape)[order].view_as(after)
        torch.testing.assert_close(after, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_spans_are_summed_in_order(dtype: torch.dtype) -> None:
    """2**24 + 1 is 2**24 in fp32, so the order of these terms shows in the sum."""
    partials = torch.tensor([2.0**24, 1.0, -(2.0**24), 3.0]).view(4, 1, 1)
    routing = Routing(torch.zeros(1, 1, dtype=torch.int32), 1)
    assert run_activate(partials, routing, activation=RELU2, dtype=dtype).item() == 9.0


def test_not_a_number_passes_through_every_activation() -> None:
    routing = Routing(torch.zeros(1, 1, dtype=torch.int32), 1)
    partials = torch.ones(3, 1, 32)
    partials[1] = float("nan")
    for activation in ACTIVATIONS:
        hidden = run_activate(partials, routing, activation=activation, dtype=torch.float32)
        assert hidden.isnan().all()


def test_offsets_pass_2_to_the_31() -> None:
    """Span 1 of route 2 of rows of 2**30 + 8 columns."""
    n, num_routes = 2**30 + 8, 3
    # Bytes before each pointer, so that an offset that wraps to negative reads zeros.
    room = 2**33
    partials = sparse_memory(room + 4 * 2 * num_routes * n + 2**20)
    hidden = sparse_memory(room + 2 * num_routes * n + 2**20)
    for span in range(2):
        at(partials, room + 4 * (span * num_routes + 2) * n, 16, torch.float32).fill_(span + 1)
    launch(
        *(activate_kernel, (num_routes, 1), at(partials, room, 1, torch.float32), None),
        *(torch.tensor([-1, -1, 0], dtype=torch.int32), None, None),
        *(at(hidden, room, 1, torch.float16), num_routes),
        **activation_constexprs(RELU2),
        **{"N": n, "E": 1, "NUM_GLOBAL": 1, "SPLIT_K": 2, "BLOCK_N": 16},
    )
    assert (at(hidden, room + 2 * 2 * n, 16, torch.float16) == 9).all()
    assert (at(hidden, room, 16, torch.float16) == 0).all()


@pytest.mark.parametrize("has_optional", [True, False])
def test_empty_work_ends(has_optional: bool) -> None:
    run_on_nothing(
        activate_kernel,
        num_pointers=6,
        num_integers=1,
        absent=set() if has_optional else {1, 3, 4},
        dtypes={0: torch.float32, 1: torch.float16, 4: torch.float32, 5: torch.float16},
        **activation_constexprs(Activation()),
        **{"N": 512, "E": 256, "NUM_GLOBAL": 512, "SPLIT_K": 4, "BLOCK_N": 512},
    )
