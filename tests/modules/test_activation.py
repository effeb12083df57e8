"""The activation that a config says."""

from __future__ import annotations

from typing import Any

import pytest

from firesteel.checkpoint.families import FAMILIES
from firesteel.errors import CheckpointError, UnsupportedError
from firesteel.modules.activation import stored_activation
from firesteel.moe.activation import Activation

GPT_OSS, QWEN3 = FAMILIES["gpt_oss"], FAMILIES["qwen3_moe"]


@pytest.mark.parametrize("config", [{}, {"hidden_act": "silu", "swiglu_limit": 5.0}])
def test_it_is_that_of_hidden_act_or_the_host_s_default(config: dict[str, Any]) -> None:
    assert stored_activation(QWEN3, config) == Activation()


def test_constants_are_the_config_s_or_the_usual_ones() -> None:
    usual = Activation(name="swigluoai")
    assert stored_activation(GPT_OSS, {"hidden_act": "silu", "swiglu_limit": None}) == usual
    found = stored_activation(GPT_OSS, {"swiglu_limit": 0.5, "swiglu_alpha": 1})
    assert found == Activation(name="swigluoai", limit=0.5, alpha=1)


@pytest.mark.parametrize(
    ("family", "config", "reason"),
    [
        (QWEN3, {"hidden_act": "gelu"}, "activation: got 'gelu', supported are"),
        (QWEN3, {"hidden_act": "relu2"}, "hidden_act: got 'relu2', which has no gate"),
        (GPT_OSS, {"swiglu_limit": "7"}, "swiglu_limit is '7', must be a number"),
        (GPT_OSS, {"swiglu_alpha": True}, "swiglu_alpha is True, must be a number"),
    ],
)
def test_others_are_refused(family: Any, config: dict[str, Any], reason: str) -> None:
    with pytest.raises((UnsupportedError, CheckpointError), match=reason):
        stored_activation(family, config)
