"""The kernel that sums slots against its oracle, and all kernels together against the layer's."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from firesteel.moe.activation import Activation
from firesteel.moe.combine import combine_kernel
from firesteel.moe.reference import combine_reference, moe_reference
from tests.moe.kernels import (
    DTYPES,
    ROUNDING,
    Routing,
    launch,
    routings,
    run_activate,
    run_combine,
    run_count,
    run_down,
    run_gate_up,
    run_on_nothing,
    run_partials,
    run_place,
    stacks,
)
from tests.moe.sparse import at, sparse_memory

pytestmark = pytest.mark.interpret


@st.composite
def rows_and_weights(
    draw: st.DrawFn, routing: Routing, *, max_k: int = 70
) -> tuple[Tensor, Tensor | None]:
    """y, NaN where no route has an expert; router weights of any sign, NaN there too; or None."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    dtype = draw(st.sampled_from(DTYPES))
    is_lost = torch.tensor(routing.experts) < 0
    y = torch.randn(routing.num_routes, draw(st.integers(1, max_k)), generator=generator)
    y[is_lost] = float("nan")
    weights = None
    if draw(st.booleans()):
        weights = torch.randn(routing.topk_ids.shape, generator=generator)
        weights = weights.to(draw(st.sampled_from((torch.float32, dtype))))
    return y.to(dtype), weights


@given(data=st.data(), routing=routings(), padding=st.sampled_from((0, 8, 24)))
@settings(max_examples=80)
def test_sums_stay_within_their_rounding_bound(
    data: st.DataObject, routing: Routing, padding: int
) -> None:
    """top_k products and sums in fp32, each off by ROUNDING of the sum of magnitudes; one cast."""
    y, weights = data.draw(rows_and_weights(routing))
    out = run_combine(y, routing, weights, padding=padding)
    wanted, sums = (
        combine_reference(rows, routing.topk_ids, gates, routing.num_experts, expert_map=mapped)
        for mapped in (routing.expert_map,)
        for rows, gates in ((y, weights), (y.abs(), None if weights is None else weights.abs()))
    )
    finfo = torch.finfo(y.dtype)
    bound = 2 * routing.top_k * ROUNDING * sums
    bound += finfo.eps / 2 * (wanted.abs() + finfo.smallest_normal)
    assert out.dtype == y.dtype
    assert ((out.double() - wanted).abs() <= bound).all()


@given(data=st.data(), routing=routings(), seed=st.integers(0, 2**32 - 1))
def test_permuting_tokens_permutes_rows_to_the_bit(
    data: st.DataObject, routing: Routing, seed: int
) -> None:
    y, weights = data.draw(rows_and_weights(routing))
    order = torch.randperm(routing.num_tokens, generator=torch.Generator().manual_seed(seed))
    moved = y.view(routing.num_tokens, routing.top_k, -1)[order].flatten(0, 1) if len(y) else y
    gates = None if weights is None else weights[order]
    out = run_combine(moved, routing.at_tokens(order), gates)
    assert torch.equal(out, run_combine(y, routing, weights)[order])


@pytest.mark.parametrize("dtype", DTYPES)
def test_slots_are_summed_in_order(dtype: torch.dtype) -> None:
    """2**24 + 1 is 2**24 in fp32, so the order of these terms shows in the sum."""
    routing = Routing(torch.zeros(1, 4, dtype=torch.int32), 1)
    y = torch.tensor([[1.0], [1.0], [-1.0], [1.0]], dtype=dtype)
    weights = torch.tensor([[2.0**24, 1.0, 2.0**24, 1.0]])
    assert run_combine(y, routing, weights).item() == 1.0


def test_offsets_pass_2_to_the_31() -> None:
    """Token 1 of rows of 2**28 columns, top-8, and of an out whose rows are 2**31 apart."""
    k, top_k, stride = 2**28, 8, 2**31 + 8
    # Bytes before each pointer, so that an offset that wraps to negative reads zeros.
    room = 2**32
    y, out = sparse_memory(3 * room), sparse_memory(2 * room + 2**20)
    for slot in range(top_k):
        at(y, room + 2 * (top_k + slot) * k, 16, torch.float16).fill_(2.0**slot)
    launch(
        *(combine_kernel, (2, 1), at(y, room, 1, torch.float16)),
        *(torch.zeros(2, top_k, dtype=torch.int32), None, None, at(out, room, 1, torch.float16)),
        *(stride // 8, 2),
        **{"K": k, "E": 1, "NUM_GLOBAL": 1, "TOP_K": top_k, "BLOCK_K": 16},
    )
    assert (at(out, room + 2 * stride, 16, torch.float16) == 255).all()
    assert (at(out, room, 16, torch.float16) == 0).all()


def test_programs_past_the_last_token_write_nothing() -> None:
    routing = Routing(torch.zeros(1, 1, dtype=torch.int32), 1)
    out = torch.full((3, 4), float("nan"))
    launch(
        *(combine_kernel, (3, 1), torch.ones(1, 4), routing.topk_ids, None, None, out, 1, 1),
        **{"K": 4, "E": 1, "NUM_GLOBAL": 1, "TOP_K": 1, "BLOCK_K": 4},
    )
    assert (out[0] == 1).all()
    assert out[1:].isnan().all()


@pytest.mark.parametrize("has_optional", [True, False])
def test_empty_work_ends(has_optional: bool) -> None:
    run_on_nothing(
        combine_kernel,
        num_pointers=5,
        num_integers=2,
        absent=set() if has_optional else {2, 3},
        dtypes={0: torch.float16, 3: torch.float32, 4: torch.float16},
        **{"K": 6144, "E": 256, "NUM_GLOBAL": 512, "TOP_K": 8, "BLOCK_K": 1024},
    )


@given(
    data=st.data(),
    routing=routings(max_tokens=5, max_experts=4),
    activation=st.sampled_from(
        (Activation(), Activation(name="swigluoai", limit=0.75), Activation(name="situ"))
    ),
    mode=st.sampled_from(("packed", "direct", "split")),
    weight_on_input=st.booleans(),
)
@settings(max_examples=30)
def test_the_kernels_make_the_layer(
    data: st.DataObject,
    routing: Routing,
    activation: Activation,
    mode: str,
    weight_on_input: bool,
) -> None:
    """Against the layer's oracle; the bound follows hidden's rounding through FC2.

    With S_g, S_u, S_y sums of magnitudes along the way, and eps of x's dtype: hidden is at most
    S_g * (S_u + 1) =: S_h, off by its rounding eps/2 * S_h and by what FC1's fp32 sums carry
    through the activation, at most 4 * (2K + 16) * ROUNDING * S_h + (32 + 4 S_g) * ROUNDING * S_h
    (test_gate_up has the terms). FC2 and the sum over slots are linear in magnitudes, so the same
    relative error holds for S_y, plus their own: (2N + 16) * ROUNDING, eps/2 and 2 * top_k.
    """
    dtype = data.draw(st.sampled_from(DTYPES))
    n = data.draw(st.sampled_from((32, 96)))
    k = data.draw(st.sampled_from((64, 160, 320)))
    w13 = data.draw(stacks(routing.num_experts, 2 * n, (k, 32)))
    w2 = data.draw(stacks(routing.num_experts, k, (n, n)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32 - 1)))
    x = (2 * torch.randn(routing.num_tokens, k, generator=generator)).to(dtype)
    gates = torch.rand(routing.topk_ids.shape, generator=generator)
    placed = None
    if mode == "packed":
        placed = run_place(routing, counts=run_count(routing))
    on_input = gates if weight_on_input else None
    is_joint = data.draw(st.booleans())
    if mode == "split":
        partials = run_partials(x, w13, routing, split_k=3, is_joint=is_joint)
        hidden = run_activate(
            partials, routing, activation=activation, dtype=dtype, topk_weights=on_input
        )
    else:
        hidden = run_gate_up(
            *(x, w13, routing, placed),
            activation=activation,
            topk_weights=on_input,
            is_joint=is_joint,
        )
    y = run_down(hidden, w2, routing, placed, span=data.draw(st.sampled_from((1, 4))))
    out = run_combine(y, routing, None if weight_on_input else gates)
    wanted = moe_reference(
        *(x, w13.dense, w2.dense, routing.topk_ids, gates),
        activation=activation,
        expert_map=routing.expert_map,
        weight_on_input=weight_on_input,
    )
    eps = torch.finfo(dtype).eps / 2
    bound = torch.zeros_like(wanted)
    for route, expert in enumerate(routing.experts):
        if expert < 0:
            continue
        token, gate = route // routing.top_k, float(gates.flatten()[route])
        sums = w13.dense[expert].abs() @ x[token].double().abs()
        sums = sums * gate if weight_on_input else sums
        size = sums[:n] * (sums[n:] + 1)
        error = eps + (4 * (2 * k + 16) + 2 * n + 2 * routing.top_k + 48 + 4 * sums[:n]) * ROUNDING
        moved = w2.dense[expert].abs() @ (size * (error + eps))
        bound[token] += moved if weight_on_input else gate * moved
    finfo = torch.finfo(dtype)
    # Of hidden, y and out each, where they are subnormal.
    bound += eps * wanted.abs() + (n + 2) * routing.top_k * finfo.eps * finfo.smallest_normal
    assert ((out.double() - wanted).abs() <= bound).all()
