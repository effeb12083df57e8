"""The end of an EXL3 layer against its oracle, and the laws of its rows."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from firesteel.formats.trellis import hadamard128
from firesteel.moe.trellis.finish import finish_kernel
from firesteel.moe.trellis.reference import finish_reference
from tests.moe.kernels import ROUNDING, Routing
from tests.moe.trellis.launches import (
    COLUMNS,
    DTYPES_OF_ROWS,
    WARPS,
    bits_of,
    dense_routing,
    few_routings,
    generators,
    has_expert,
    is_untouched,
    launch,
    launch_on_nothing,
    padded,
    poisoned,
    products,
    rotated_bound,
    scales,
    spread,
    sums_of,
    units,
)


@dataclass(frozen=True)
class Case:
    """One call, and how it is cut. Products `[S, R, NP]`: fp32 of spans, or one in fp16."""

    products: Tensor = field(repr=False)
    svh: Tensor = field(repr=False)
    bias: Tensor | None = field(repr=False)
    weights: Tensor | None = field(repr=False)
    routing: Routing
    has_ids: bool
    n: int
    dtype: torch.dtype
    padding: int = 0
    warps: int = 4

    def run(self) -> Tensor:
        """`[M, N]`, by a program more than there are tokens; what lies between rows is checked."""
        num_tokens = self.routing.num_tokens
        wide = spread(poisoned(num_tokens, self.n, dtype=self.dtype), self.padding)
        is_partial = self.products.dtype == torch.float32
        launch(
            finish_kernel,
            (num_tokens + 1, -(-self.n // 1024), 1),
            "out_ptr",
            **{"partials_ptr" if is_partial else "products_ptr": self.products},
            svh_ptr=self.svh,
            bias_ptr=self.bias,
            topk_ids_ptr=self.routing.topk_ids if self.has_ids else None,
            expert_map_ptr=self.routing.expert_map,
            topk_weights_ptr=self.weights,
            out_ptr=wide,
            stride_out=units(wide),
            M=num_tokens,
            **self.routing.constexprs,
            **{"N": self.n, "TOP_K": self.routing.top_k, "SPLIT_K": len(self.products)},
            WARPS=self.warps,
        )
        if num_tokens:
            between = wide.as_strided((num_tokens, wide.stride(0)), (wide.stride(0), 1))
            assert is_untouched(between[:, self.n :])
        return wide

    def reference(self) -> Tensor:
        return finish_reference(
            *(self.products.double().sum(0), self.svh, self.routing.topk_ids, self.weights),
            n=self.n,
            expert_map=self.routing.expert_map,
            bias=self.bias,
        )

    def bound(self, wanted: Tensor) -> Tensor:
        experts = [max(0, expert) for expert in self.routing.experts]
        terms, error = sums_of(self.products)
        svh = self.svh[experts, 0].double().abs()[:, : self.n]
        size = hadamard128(terms).abs()[:, : self.n] * svh
        error = rotated_bound(terms, error)[:, : self.n] * svh
        if self.bias is not None:
            size = size + self.bias[experts].double().abs()
        if self.weights is not None:
            weights = self.weights.double().view(-1, 1)
            size, error = size * weights, error * weights
        # Products with svh and the weight, the sum with bias, and a sum for each slot.
        error = error + (3 + self.routing.top_k) * ROUNDING * (size + error)
        error = torch.where(has_expert(self.routing)[:, None], error, 0.0)
        error = error.unflatten(0, (-1, self.routing.top_k)).sum(1)
        finfo = torch.finfo(self.dtype)
        return error + finfo.eps / 2 * (wanted.abs() + error + finfo.smallest_normal)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    generator = draw(generators())
    n = draw(st.sampled_from(COLUMNS))
    routing, is_dense = draw(few_routings(max_slots=9))
    given = draw(products(routing, padded(n), generator))
    svh = scales(routing.num_experts, 1, padded(n), generator=generator)
    svh[..., n:] = torch.nan
    bias = weights = None
    if draw(st.booleans()):
        bias = torch.randn(routing.num_experts, n, generator=generator)
        bias = bias.to(draw(st.sampled_from(DTYPES_OF_ROWS)))
    if draw(st.booleans()):
        weights = torch.rand(routing.topk_ids.shape, generator=generator)
    return Case(
        *(given, svh, bias, weights, routing),
        has_ids=not is_dense,
        n=n,
        dtype=draw(st.sampled_from(DTYPES_OF_ROWS)),
        padding=draw(st.integers(0, 3)),
        warps=draw(st.sampled_from(WARPS)),
    )


@given(case=cases())
def test_rows_are_the_oracle_s(case: Case) -> None:
    wanted = case.reference()
    assert ((case.run().double() - wanted).abs() <= case.bound(wanted)).all()


@given(case=cases())
@settings(max_examples=40)
def test_no_cut_and_no_other_row_changes_a_bit(case: Case) -> None:
    whole = case.run()
    for warps in WARPS:
        assert torch.equal(bits_of(whole), bits_of(replace(case, warps=warps).run()))
    # A token by itself.
    for token in range(case.routing.num_tokens):
        routes = slice(token * case.routing.top_k, (token + 1) * case.routing.top_k)
        alone = replace(
            case,
            products=case.products[:, routes].contiguous(),
            weights=None if case.weights is None else case.weights[token : token + 1].clone(),
            routing=case.routing.at_tokens(torch.tensor([token])),
        )
        assert torch.equal(bits_of(whole[token : token + 1]), bits_of(alone.run()))


@pytest.mark.parametrize("has_ids", [False, True])
@pytest.mark.parametrize("is_partial", [False, True])
def test_no_rows(is_partial: bool, has_ids: bool) -> None:
    routing = dense_routing(1, 2)
    name = "partials_ptr" if is_partial else "products_ptr"
    launch_on_nothing(
        finish_kernel,
        "out_ptr",
        **{name: torch.ones(2, 128, dtype=torch.float32 if is_partial else torch.float16)},
        svh_ptr=torch.ones(1, 1, 128, dtype=torch.float16),
        topk_ids_ptr=routing.topk_ids if has_ids else None,
        topk_weights_ptr=torch.ones(1, 2),
        out_ptr=torch.ones(1, 100, dtype=torch.bfloat16),
        **routing.constexprs,
        **{"stride_out": 0, "M": 0, "N": 100, "TOP_K": 2, "SPLIT_K": 2, "WARPS": 4},
    )
