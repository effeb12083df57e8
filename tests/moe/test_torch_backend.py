"""The MoE layer in PyTorch against its float64 oracle, and the laws of its state."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from firesteel.errors import InvalidArgumentError
from firesteel.moe.activation import Activation
from firesteel.moe.experts import DenseWeights, MoeWeights
from firesteel.moe.reference import moe_reference
from firesteel.moe.torch_backend import run_experts

EPS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
SENTINELS = (-1, -(2**31), 2**31 - 1)


@dataclass(frozen=True)
class Case:
    """One call: weights in the type of x, routing, and what the oracle needs."""

    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    w13: Tensor
    w2: Tensor
    bias13: Tensor | None
    bias2: Tensor | None
    activation: Activation

    def run(self, rows: slice | Tensor = slice(None)) -> Tensor:
        weights = MoeWeights(
            w13=DenseWeights(self.w13),
            w2=DenseWeights(self.w2),
            activation=self.activation,
            bias13=self.bias13,
            bias2=self.bias2,
        )
        return run_experts(weights, self.x[rows], self.topk_ids[rows], self.topk_weights[rows])

    def oracle(self) -> Tensor:
        return moe_reference(
            self.x,
            self.w13,
            self.w2,
            self.topk_ids,
            self.topk_weights,
            activation=self.activation,
            bias13=self.bias13,
            bias2=self.bias2,
        )


@st.composite
def cases(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = tuple(EPS)) -> Case:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    dtype = draw(st.sampled_from(dtypes))
    num_experts, top_k = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    num_tokens, k, n = draw(st.integers(0, 9)), draw(st.integers(1, 24)), draw(st.integers(1, 12))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    kind = draw(st.sampled_from(("spread", "one expert", "with sentinels", "sentinels only")))
    ids = torch.randint(0, num_experts, (num_tokens, top_k), generator=generator)
    if kind == "one expert":
        ids.fill_(num_experts - 1)
    elif kind == "sentinels only":
        ids.fill_(num_experts)
    elif kind == "with sentinels":
        outside = torch.tensor([*SENTINELS, num_experts])
        chosen = outside[torch.randint(0, 4, ids.shape, generator=generator)]
        ids = torch.where(torch.rand(ids.shape, generator=generator) < 0.5, chosen, ids)
    x = normal(num_tokens, k)
    if draw(st.booleans()):
        # Rows and columns with a stride of their own.
        x = normal(2 * num_tokens, 2 * k)[::2, ::2]
    has_bias = draw(st.booleans())
    return Case(
        x=x,
        topk_ids=ids.to(draw(st.sampled_from((torch.int32, torch.int64)))),
        topk_weights=torch.rand(num_tokens, top_k, generator=generator).to(
            draw(st.sampled_from((torch.float32, dtype)))
        ),
        w13=normal(num_experts, 2 * n, k),
        w2=normal(num_experts, k, n),
        bias13=normal(num_experts, 2 * n) if has_bias else None,
        bias2=normal(num_experts, k) if has_bias else None,
        # Small, so that the clamp is reached.
        activation=draw(st.sampled_from((Activation(), Activation(name="swigluoai", limit=0.75)))),
    )


@given(case=cases())
@settings(max_examples=150)
def test_stays_within_its_rounding_bound(case: Case) -> None:
    out = case.run()
    assert out.dtype == case.x.dtype
    assert out.shape == case.x.shape
    expected = case.oracle()
    # FC1, the two steps of the activation and FC2 round once each, relative to sums of magnitudes;
    # an activation is at most |gate| * (|up| + 1) and as steep as 1.1 in gate (1.7 with alpha).
    eps = EPS[case.x.dtype] + 2.0**-23 * (case.x.shape[1] + case.w2.shape[2])
    x, w13, w2 = case.x.double().abs(), case.w13.double().abs(), case.w2.double().abs()
    bound = torch.zeros_like(expected)
    n = case.w2.shape[2]
    for m in range(x.shape[0]):
        for j, expert in enumerate(case.topk_ids[m].tolist()):
            if not 0 <= expert < w13.shape[0]:
                continue
            hidden = w13[expert] @ x[m]
            if case.bias13 is not None:
                hidden = hidden + case.bias13[expert].double().abs()
            gate, up = hidden[:n], hidden[n:]
            acted = 2 * 3 * (gate + 1e-3) * (up + 1)
            routed = w2[expert] @ acted
            if case.bias2 is not None:
                routed = routed + case.bias2[expert].double().abs()
            bound[m] += 4 * eps * abs(float(case.topk_weights[m, j])) * routed
    bound += eps * expected.abs() + torch.finfo(case.x.dtype).tiny
    assert ((out.double() - expected).abs() <= bound).all()


@given(case=cases())
def test_same_bits_on_every_run_and_inputs_are_left_alone(case: Case) -> None:
    before = [tensor.clone() for tensor in (case.x, case.topk_ids, case.topk_weights)]
    assert torch.equal(case.run(), case.run())
    for was, now in zip(before, (case.x, case.topk_ids, case.topk_weights), strict=True):
        assert torch.equal(was, now)


@given(case=cases((torch.float32,)), seed=st.integers(0, 2**32 - 1))
def test_permuting_tokens_permutes_rows(case: Case, seed: int) -> None:
    order = torch.randperm(len(case.x), generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(case.run(order), case.run()[order], rtol=1e-5, atol=1e-5)


@given(case=cases())
def test_a_row_without_experts_is_zero_and_poisons_no_other(case: Case) -> None:
    clean = case.run()
    is_lost = ((case.topk_ids < 0) | (case.topk_ids >= len(case.w13))).all(dim=1)
    assert (clean[is_lost] == 0).all()
    case.x[is_lost] = float("nan")
    assert torch.equal(case.run(), clean)


def tiny(**changes: Tensor) -> Tensor:
    """A call of 3 tokens, top-2 of 2 experts, with some arguments changed."""
    arguments = {
        "x": torch.zeros(3, 8),
        "topk_ids": torch.zeros(3, 2, dtype=torch.int64),
        "topk_weights": torch.zeros(3, 2),
    } | changes
    weights = MoeWeights(
        w13=DenseWeights(torch.zeros(2, 8, 8)),
        w2=DenseWeights(torch.zeros(2, 8, 4)),
        activation=Activation(),
    )
    return run_experts(weights, **arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(3, 9)}, r"x: got torch.float32 \[3, 9\], must be .* \[M, 8\]"),
        ({"x": torch.zeros(3, 8).int()}, r"x: got torch.int32"),
        ({"x": torch.zeros(8)}, r"x: got torch.float32 \[8\]"),
        ({"topk_ids": torch.zeros(3, 2)}, r"topk_ids: got torch.float32, must be int32 or int64"),
        ({"topk_ids": torch.zeros(4, 2).int()}, r"topk_ids: got shape \[4, 2\], must be \[3, top"),
        ({"topk_weights": torch.zeros(3, 1)}, r"topk_weights: got torch.float32 \[3, 1\]"),
        ({"topk_weights": torch.zeros(3, 2).int()}, r"topk_weights: got torch.int32"),
    ],
)
def test_bad_arguments_are_named(changes: dict[str, Tensor], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        tiny(**changes)


def test_no_tokens_give_no_rows() -> None:
    empty = tiny(
        x=torch.zeros(0, 8),
        topk_ids=torch.zeros(0, 2, dtype=torch.int32),
        topk_weights=torch.zeros(0, 2),
    )
    assert empty.shape == (0, 8)


@given(cases(dtypes=(torch.float32,)), st.data())
def test_ids_of_all_ranks_experts_go_through_the_map(case: Case, data: st.DataObject) -> None:
    num_experts = case.w13.shape[0]
    num_global = num_experts + data.draw(st.integers(0, 5))
    places = data.draw(st.permutations(range(num_global)))
    expert_map = torch.tensor([p if p < num_experts else -1 for p in places], dtype=torch.int32)
    ids = torch.randint(-2, num_global + 2, case.topk_ids.shape)
    known = (ids >= 0) & (ids < num_global)
    local = torch.where(known, expert_map[torch.where(known, ids, 0)].long(), -1)
    weights = MoeWeights(
        w13=DenseWeights(case.w13),
        w2=DenseWeights(case.w2),
        activation=case.activation,
        bias13=case.bias13,
        bias2=case.bias2,
    )
    wanted = run_experts(weights, case.x, local, case.topk_weights)
    own = replace(weights, expert_map=expert_map)
    for dtype in (torch.int32, torch.int64):
        assert torch.equal(run_experts(own, case.x, ids.to(dtype), case.topk_weights), wanted)
