"""What is between FC1 and FC2 of an EXL3 layer against its oracle, and the laws of its rows."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from firesteel.formats.trellis import hadamard128
from firesteel.moe.activation import Activation
from firesteel.moe.trellis.act import act_kernel
from firesteel.moe.trellis.reference import act_reference, rotate_reference
from tests.moe.kernels import ROUNDING, Routing, activation_bound, activation_constexprs
from tests.moe.trellis.launches import (
    ACTIVATIONS,
    COLUMNS,
    DTYPES_OF_ROWS,
    WARPS,
    bits_of,
    dense_routing,
    few_routings,
    generators,
    half_bound,
    has_expert,
    is_untouched,
    launch,
    launch_on_nothing,
    padded,
    poisoned,
    products,
    rotated_bound,
    scales,
    sums_of,
)


@dataclass(frozen=True)
class Case:
    """One call, and how it is cut. Products `[S, R, P * NP]`: fp32 of spans, or one in fp16."""

    products: Tensor = field(repr=False)
    svh: Tensor = field(repr=False)
    suh: Tensor = field(repr=False)
    bias: Tensor | None = field(repr=False)
    routing: Routing
    n: int
    activation: Activation
    warps: int = 4

    @property
    def num_parts(self) -> int:
        return self.svh.shape[1]

    def run(self) -> Tensor:
        """`[R, NP]`, by rows of programs one more than there are routes."""
        width, routes = padded(self.n), self.routing.num_routes
        hidden = poisoned(routes, width, dtype=torch.float16)
        is_partial = self.products.dtype == torch.float32
        launch(
            act_kernel,
            (-(-routes // self.warps) + 1, -(-width * self.num_parts // 1024), 1),
            "hidden_ptr",
            **{"partials_ptr" if is_partial else "products_ptr": self.products},
            svh_ptr=self.svh,
            bias_ptr=self.bias,
            suh_ptr=self.suh,
            topk_ids_ptr=self.routing.topk_ids,
            expert_map_ptr=self.routing.expert_map,
            hidden_ptr=hidden,
            R=routes,
            **(self.routing.constexprs | activation_constexprs(self.activation)),
            **{"N": self.n, "SPLIT_K": len(self.products), "WARPS": self.warps},
        )
        return hidden

    def reference(self) -> Tensor:
        parts = self.products.double().sum(0).unflatten(1, (self.num_parts, -1))
        return act_reference(
            *(parts, self.svh, self.suh, self.routing.topk_ids),
            n=self.n,
            activation=self.activation,
            expert_map=self.routing.expert_map,
            bias=self.bias,
        )

    def bound(self, wanted: Tensor) -> Tensor:
        """Rows of no expert have one of no meaning."""
        experts = [max(0, expert) for expert in self.routing.experts]
        terms, error = sums_of(self.products)
        # Of gate and up, columns 0..n of each.
        svh = self.svh[experts].double()
        parts = (self.num_parts, -1)
        y = (hadamard128(terms).unflatten(1, parts) * svh)[..., : self.n]
        error = (rotated_bound(terms, error).unflatten(1, parts) * svh.abs())[..., : self.n]
        sums = y.flatten(1)
        bias = torch.zeros_like(sums) if self.bias is None else self.bias[experts].double()
        # Of the product with svh and the sum with bias.
        error = error.flatten(1) + 2 * ROUNDING * (sums.abs() + bias.abs() + error.flatten(1))
        sums = sums + bias
        acted = self.activation(sums)
        error = activation_bound(
            *(self.activation, sums.abs() + error, error, acted), torch.float32
        )
        suh = self.suh[experts, 0, : self.n].double()
        scaled = acted * suh
        error = half_bound(scaled, error * suh.abs() + ROUNDING * scaled.abs())
        missing = (0, padded(self.n) - self.n)
        scaled, error = (torch.nn.functional.pad(each, missing) for each in (scaled, error))
        return half_bound(wanted, rotated_bound(scaled, error))


@st.composite
def cases(draw: st.DrawFn, activations: tuple[Activation, ...] = ACTIVATIONS) -> Case:
    generator = draw(generators())
    n, activation = draw(st.sampled_from(COLUMNS)), draw(st.sampled_from(activations))
    routing, _ = draw(few_routings())
    num_experts, num_parts = routing.num_experts, 2 if activation.is_gated else 1
    width = num_parts * padded(n)
    given = draw(products(routing, width, generator))
    svh = scales(num_experts, num_parts, padded(n), generator=generator)
    suh = scales(num_experts, 1, padded(n), generator=generator)
    svh[..., n:] = suh[..., n:] = torch.nan
    bias = None
    if draw(st.booleans()):
        bias = torch.randn(num_experts, num_parts * n, generator=generator)
        bias = bias.to(draw(st.sampled_from(DTYPES_OF_ROWS)))
    return Case(
        *(given, svh, suh, bias, routing, n, activation), warps=draw(st.sampled_from(WARPS))
    )


@given(case=cases())
def test_rows_are_the_oracle_s(case: Case) -> None:
    hidden = case.run()
    wanted = case.reference()
    is_held = has_expert(case.routing)
    assert is_untouched(hidden[~is_held])
    error = (hidden.double() - wanted).abs()
    assert (error <= case.bound(wanted))[is_held].all()


@given(case=cases((Activation(name="relu2"),)))
def test_it_rounds_where_it_says_so(case: Case) -> None:
    # Products whose sums are exact, so that all up to the last sums can be told to the last bit.
    case = replace(case, products=(2 * case.products).round(), svh=case.svh.sign())
    experts, is_held = [max(0, expert) for expert in case.routing.experts], has_expert(case.routing)
    sums = (hadamard128(case.products.double().sum(0)) * 128**0.5).round().float()
    y = (sums * 0.08838834764831845)[:, : case.n] * case.svh[experts, 0, : case.n].float()
    if case.bias is not None:
        y = y + case.bias[experts].float()
    scaled = (y.clamp(min=0).square() * case.suh[experts, 0, : case.n].float()).half()
    scaled = torch.nn.functional.pad(scaled, (0, padded(case.n) - case.n))[is_held].double()
    ones = torch.ones(1, 1, padded(case.n))
    wanted = rotate_reference(scaled, ones, dense_routing(len(scaled)).topk_ids)[:, 0]
    bound = half_bound(wanted, rotated_bound(scaled, torch.zeros_like(scaled)))
    assert ((case.run()[is_held].double() - wanted).abs() <= bound).all()


@given(case=cases())
@settings(max_examples=40)
def test_no_cut_and_no_other_row_changes_a_bit(case: Case) -> None:
    whole = case.run()
    for warps in WARPS:
        assert torch.equal(bits_of(whole), bits_of(replace(case, warps=warps).run()))
    # A token by itself.
    for token in range(case.routing.num_tokens):
        routes = slice(token * case.routing.top_k, (token + 1) * case.routing.top_k)
        one = case.routing.at_tokens(torch.tensor([token]))
        alone = replace(case, products=case.products[:, routes].contiguous(), routing=one).run()
        assert torch.equal(bits_of(whole[routes]), bits_of(alone))


@pytest.mark.parametrize("is_partial", [False, True])
def test_no_rows(is_partial: bool) -> None:
    routing = dense_routing(1)
    name = "partials_ptr" if is_partial else "products_ptr"
    launch_on_nothing(
        act_kernel,
        "hidden_ptr",
        **{name: torch.ones(2, 256, dtype=torch.float32 if is_partial else torch.float16)},
        svh_ptr=torch.ones(1, 2, 128, dtype=torch.float16),
        suh_ptr=torch.ones(1, 1, 128, dtype=torch.float16),
        topk_ids_ptr=routing.topk_ids,
        hidden_ptr=torch.ones(1, 128, dtype=torch.float16),
        **(routing.constexprs | activation_constexprs(Activation())),
        **{"R": 0, "N": 100, "SPLIT_K": 2, "WARPS": 4},
    )
