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


def test_an_unknown_activation_is_an_error_that_lists_those_known():
    assert set(ACTIVATIONS) == {"silu", "swigluoai"}
    with pytest.raises(UnsupportedError, match="got 'gelu', supported are silu, swigluoai"):
        Activation(name="gelu")
