"""The activation of a checkpoint's experts, as its config says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from firesteel.checkpoint.families import Family
from firesteel.errors import CheckpointError, UnsupportedError
from firesteel.moe.activation import Activation

__all__ = ["stored_activation"]


def stored_activation(family: Family, config: Mapping[str, Any]) -> Activation:
    """What stands between the products of an expert.

    Args:
        family: of the checkpoint.
        config: `config.json`, or a host's config as a dict.

    Raises
        CheckpointError: a constant is no number.
        UnsupportedError: an activation that firesteel does not have, or one without a gate.
    """
    if family.activation is None:
        # As in the config class of each of these families.
        activation = Activation(name=str(config.get("hidden_act", "silu")))
        if not activation.is_gated:
            raise UnsupportedError(
                f"hidden_act: got {activation.name!r}, which has no gate; the experts of "
                f"{family.title} have one"
            )
        return activation
    # transformers 5.16 has the constants in the module, later ones in the config.
    given = {"limit": config.get("swiglu_limit"), "alpha": config.get("swiglu_alpha")}
    for name, value in given.items():
        if value is not None and (not isinstance(value, int | float) or isinstance(value, bool)):
            raise CheckpointError(f"config.json: swiglu_{name} is {value!r}, must be a number")
    known = {name: value for name, value in given.items() if value is not None}
    return Activation(name=family.activation, **known)
