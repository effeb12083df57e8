"""The rotation of a layer's input against its oracle, and the laws of its rows."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from firesteel.moe.trellis.reference import rotate_reference
from firesteel.moe.trellis.rotate import rotate_kernel
from tests.moe.kernels import Routing
from tests.moe.trellis.launches import (
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
    rotated_bound,
    scales,
    spread,
    units,
)


@dataclass(frozen=True)
class Case:
    """One call, and how it is cut."""

    x: Tensor = field(repr=False)
    suh: Tensor = field(repr=False)
    routing: Routing
    has_ids: bool
    padding: int = 0
    warps: int = 4

    @property
    def num_columns(self) -> int:
        return self.x.shape[1]

    def run(self) -> Tensor:
        """`[R, P, KP]`, by a program more than there are routes."""
        num_parts, width = self.suh.shape[1:]
        routes = self.routing.num_routes
        x = spread(self.x, self.padding)
        rotated = poisoned(routes, num_parts, width, dtype=torch.float16)
        launch(
            rotate_kernel,
            (routes + 1, -(-width // (1024 * self.warps)), 1),
            "rotated_ptr",
            x_ptr=x,
            suh_ptr=self.suh,
            topk_ids_ptr=self.routing.topk_ids if self.has_ids else None,
            expert_map_ptr=self.routing.expert_map,
            rotated_ptr=rotated,
            stride_x=units(x),
            R=routes,
            **self.routing.constexprs,
            **{"K": self.num_columns, "TOP_K": self.routing.top_k, "PARTS": num_parts},
            WARPS=self.warps,
        )
        return rotated

    def reference(self, x: Tensor, suh: Tensor) -> Tensor:
        return rotate_reference(x, suh, self.routing.topk_ids, expert_map=self.routing.expert_map)

    def bound(self, wanted: Tensor) -> Tensor:
        """x and x * suh are rounded to fp16 before the sum."""
        rows = self.x.double().abs().repeat_interleave(self.routing.top_k, dim=0).unsqueeze(1)
        suh = self.suh[[max(0, expert) for expert in self.routing.experts]].double().abs()
        rows = torch.nn.functional.pad(rows, (0, suh.shape[2] - rows.shape[2]))
        error = rows * 2.0**-11 + 2.0**-25
        terms = rows * suh
        return half_bound(wanted, rotated_bound(terms, half_bound(terms, error * suh)))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    generator = draw(generators())
    k, num_parts = draw(st.sampled_from(COLUMNS)), draw(st.sampled_from((1, 2)))
    routing, is_dense = draw(few_routings())
    x = torch.randn(routing.num_tokens, k, generator=generator)
    return Case(
        x=x.to(draw(st.sampled_from(DTYPES_OF_ROWS))),
        suh=scales(routing.num_experts, num_parts, padded(k), generator=generator),
        routing=routing,
        has_ids=not is_dense,
        padding=draw(st.integers(0, 3)),
        warps=draw(st.sampled_from(WARPS)),
    )


@given(case=cases())
def test_rows_are_the_oracle_s(case: Case) -> None:
    rotated = case.run()
    wanted = case.reference(case.x, case.suh)
    is_held = has_expert(case.routing)
    assert is_untouched(rotated[~is_held])
    error = (rotated.double() - wanted).abs()
    assert (error <= case.bound(wanted))[is_held].all()


@given(case=cases())
def test_small_integers_are_rotated_exactly(case: Case) -> None:
    case = replace(case, x=(2 * case.x).round(), suh=case.suh.sign())
    wanted = case.reference(case.x, case.suh)
    is_held = has_expert(case.routing)
    # Times the root of 128 they are integers, which fp32 sums exactly.
    sums = (wanted[is_held] * 128**0.5).round().float()
    assert torch.equal(case.run()[is_held], (sums * 0.08838834764831845).half())


@given(case=cases())
def test_no_cut_no_type_and_no_other_row_changes_a_bit(case: Case) -> None:
    whole = case.run()
    for warps in WARPS:
        assert torch.equal(bits_of(whole), bits_of(replace(case, warps=warps).run()))
    # It is rounded first, whatever it is.
    assert torch.equal(bits_of(whole), bits_of(replace(case, x=case.x.half()).run()))
    order = torch.arange(case.routing.num_tokens).flip(0)
    turned = replace(case, x=case.x[order], routing=case.routing.at_tokens(order)).run()
    by_token = turned.unflatten(0, (-1, case.routing.top_k))[order].flatten(0, 1)
    assert torch.equal(bits_of(whole), bits_of(by_token))


@pytest.mark.parametrize("has_ids", [False, True])
def test_no_rows(has_ids: bool) -> None:
    routing = dense_routing(1)
    launch_on_nothing(
        rotate_kernel,
        "rotated_ptr",
        x_ptr=torch.ones(1, 192, dtype=torch.bfloat16),
        suh_ptr=torch.ones(1, 2, 256, dtype=torch.float16),
        topk_ids_ptr=routing.topk_ids if has_ids else None,
        rotated_ptr=torch.ones(1, 2, 256, dtype=torch.float16),
        **{"stride_x": 0, "R": 0, "K": 192, "TOP_K": 1, "PARTS": 2, "WARPS": 2},
        **routing.constexprs,
    )
