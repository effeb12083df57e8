"""The activations against the host's own formulas in float64."""

import pytest
import torch
from torch.nn import functional

from firesteel.errors import UnsupportedError
from firesteel.moe.activation import ACTIVATIONS, Activation

_GATE_UP = 6 * torch.randn(64, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("limit", [7.0, 0.5])
def test_gpt_oss_gate_is_clamped_above_and_up_on_both_sides(dtype, limit):
    x = _GATE_UP.to(dtype)
    before = x.clone()
    out = Activation(name="swigluoai", limit=limit, alpha=1.5, beta=0.25)(x)
    gate, up = x.double().chunk(2, dim=-1)
    assert (gate > limit).any()
    assert (gate < -limit).any()
    assert (up.abs() > limit).any()
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    wanted = gate * torch.sigmoid(1.5 * gate) * (up + 0.25)
    # Each of scaling, sigmoid, two products and the addition rounds once; a rounding of the
    # sigmoid's argument of size a counts a times where the sigmoid is small.
    eps = torch.finfo(dtype).eps / 2
    size = wanted.abs() + (gate * torch.sigmoid(1.5 * gate)).abs() * (up.abs() + 0.25)
    bound = eps * size * (5 + (1.5 * gate).abs()) + torch.finfo(dtype).tiny
    assert ((out.double() - wanted).abs() <= bound).all()
    assert out.dtype == dtype
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_silu_is_the_host_s_to_the_bit(dtype):
    x = _GATE_UP.to(dtype)
    before = x.clone()
    gate, up = x.chunk(2, dim=-1)
    assert torch.equal(Activation()(x), functional.silu(gate) * up)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_silu_s_limit_clamps_gate_above_and_up_on_both_sides(dtype):
    x = _GATE_UP.to(dtype)
    before = x.clone()
    gate, up = x.chunk(2, dim=-1)
    assert (gate < -2).any()
    wanted = functional.silu(gate.clamp(max=2)) * up.clamp(-2, 2)
    assert torch.equal(Activation(limit=2.0)(x), wanted)
    assert not torch.equal(Activation(limit=2.0)(x), Activation()(x))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_situ_bends_both_factors(dtype):
    x = (5 * _GATE_UP).to(dtype)
    before = x.clone()
    out = Activation(name="situ")(x)
    gate, up = x.double().chunk(2, dim=-1)
    wanted = 100 * torch.tanh(gate / 4) * torch.sigmoid(gate) * torch.tanh(up / 25)
    # Two quotients, two tanh, a sigmoid and four products round once each, and may twice where a
    # library's tanh or sigmoid is off by a unit; a sigmoid of a tiny value may be 0.
    finfo = torch.finfo(dtype)
    bound = 9 * finfo.eps * wanted.abs() + 100 * finfo.tiny
    assert ((out.double() - wanted).abs() <= bound).all()
    assert out.dtype == dtype
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_relu2_has_no_up(dtype):
    x = _GATE_UP.to(dtype)
    before = x.clone()
    assert torch.equal(Activation(name="relu2")(x), torch.where(x > 0, x * x, 0))
    assert torch.equal(x, before)


def test_which_have_up_rows_and_which_a_limit_of_their_own():
    assert [Activation(name=name).is_gated for name in ("silu", "swigluoai", "situ")] == [True] * 3
    assert not Activation(name="relu2").is_gated
    limits = {name: Activation(name=name).clamp_limit for name in ACTIVATIONS}
    assert limits == {"silu": None, "swigluoai": 7.0, "relu2": None, "situ": None}
    assert Activation(name="swigluoai", limit=3.0).clamp_limit == 3.0
    assert Activation(limit=3.0).clamp_limit == 3.0


def test_gpt_oss_limit_is_7_when_none_is_given():
    assert torch.equal(
        Activation(name="swigluoai")(2 * _GATE_UP),
        Activation(name="swigluoai", limit=7.0)(2 * _GATE_UP),
    )


@pytest.mark.parametrize("name", ["relu2", "situ"])
def test_a_limit_that_would_not_be_read_is_an_error(name):
    with pytest.raises(UnsupportedError, match=f"limit: got 1.0, must be None for '{name}'"):
        Activation(name=name, limit=1.0)


def test_an_unknown_activation_is_an_error_that_lists_those_known():
    assert set(ACTIVATIONS) == {"silu", "swigluoai", "relu2", "situ"}
    known = "got 'gelu', supported are relu2, silu, situ, swigluoai"
    with pytest.raises(UnsupportedError, match=known):
        Activation(name="gelu")
