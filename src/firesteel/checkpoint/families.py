"""The model families that are supported: how their checkpoints name expert weights.

One row of the table a family; `inspect` and the hosts both read it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from firesteel.errors import CheckpointError, UnsupportedError

__all__ = [
    "ANY_EXPERT_TENSOR",
    "EXPERT_TENSOR",
    "FAMILIES",
    "FUSED_TENSOR",
    "PARTS",
    "PROJECTIONS",
    "Family",
    "Geometry",
    "expert_name",
    "family_of",
    "module_path",
    "predictors_of",
]

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""The usual name of each part of an expert: 0 gate, 1 up, 2 down."""
# The part of a matrix in its layer, by every name.
PARTS = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1, "down_proj": 2, "w2": 2}

_EXPERTS = r"(?P<prefix>(?:.*\.)?layers\.(?P<layer>\d+)\.(?:mlp|block_sparse_moe)\.experts)"

# A tensor of one expert: groups prefix, layer, expert, projection, suffix.
EXPERT_TENSOR = re.compile(
    rf"{_EXPERTS}\.(?P<expert>\d+)\.(?P<projection>{'|'.join(PARTS)})\.(?P<suffix>\w+)"
)
# A tensor of all experts of a layer: groups prefix, layer, projection, suffix.
FUSED_TENSOR = re.compile(
    rf"{_EXPERTS}\.(?P<projection>gate_up_proj|down_proj)(?:_(?P<suffix>\w+))?"
)
# Anything of the experts of a layer: groups prefix, layer.
ANY_EXPERT_TENSOR = re.compile(rf"{_EXPERTS}\..*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How a family stores its experts.

    Fields
        model_type    `model_type` of `config.json`
        title         the name people use
        num_experts, intermediate_size  the config's fields, first one present counts
        is_interleaved  rows of a fused gate_up alternate gate, up, gate, ...; else gate rows first
        is_transposed   a fused 16-bit tensor is [E, in, out]; else [E, out, in]
        has_bias      gate_up and down have a bias
        activation    name in `firesteel.moe.activation`; None to take the config's hidden_act
    """

    model_type: str
    title: str
    num_experts: tuple[str, ...] = ("num_experts", "n_routed_experts", "num_local_experts")
    intermediate_size: tuple[str, ...] = ("moe_intermediate_size",)
    is_interleaved: bool = False
    is_transposed: bool = False
    has_bias: bool = False
    activation: str | None = None


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family(model_type="deepseek_v3", title="DeepSeek-V3"),
        Family(model_type="deepseek_v32", title="DeepSeek-V3.2"),
        Family(model_type="glm4_moe", title="GLM-4-MoE"),
        Family(model_type="glm_moe_dsa", title="GLM-MoE-DSA"),
        Family(
            model_type="gpt_oss",
            title="gpt-oss",
            intermediate_size=("intermediate_size",),
            is_interleaved=True,
            is_transposed=True,
            has_bias=True,
            activation="swigluoai",
        ),
        Family(model_type="mixtral", title="Mixtral", intermediate_size=("intermediate_size",)),
        Family(model_type="olmoe", title="OLMoE", intermediate_size=("intermediate_size",)),
        Family(model_type="qwen3_moe", title="Qwen3-MoE"),
    )
}


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a config says: how many layers, and E, K = hidden and N = intermediate size."""

    num_layers: int
    num_experts: int
    hidden_size: int
    intermediate_size: int

    def shape(self, part: int) -> tuple[int, int]:
        """`[n, k]` of the projection of `part`: 0 gate, 1 up, 2 down."""
        if part == 2:
            return (self.hidden_size, self.intermediate_size)
        return (self.intermediate_size, self.hidden_size)

    @classmethod
    def of(cls, family: Family, config: Mapping[str, Any]) -> Geometry:
        """Read from `config.json`.

        Raises
            CheckpointError: a field is missing or no positive integer.
        """
        return cls(
            num_layers=_positive(config, ("num_hidden_layers",)),
            num_experts=_positive(config, family.num_experts),
            hidden_size=_positive(config, ("hidden_size",)),
            intermediate_size=_positive(config, family.intermediate_size),
        )


def predictors_of(config: Mapping[str, Any], num_layers: int) -> range:
    """Layers after a model's last that predict further tokens, as its config says.

    Not the default of a host's config class, which counts one where the file has none.

    Raises
        CheckpointError: the field is no integer from 0.
    """
    count = config.get("num_nextn_predict_layers") or 0
    if type(count) is not int or count < 0:
        raise CheckpointError(
            f"config.json: num_nextn_predict_layers is {count!r}, must be an integer from 0"
        )
    return range(num_layers, num_layers + count)


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a checkpoint's config.

    Raises
        UnsupportedError: not one of `FAMILIES`, which the message lists.
    """
    model_type = config.get("model_type")
    family = FAMILIES.get(str(model_type))
    if family is None:
        raise UnsupportedError(
            f"model_type: got {model_type!r}, supported families are {', '.join(FAMILIES)}"
        )
    return family


def expert_name(prefix: str, expert: int, part: int) -> str:
    """The usual name of one projection of one expert: 0 gate, 1 up, 2 down."""
    return f"{prefix}.{expert}.{PROJECTIONS[part]}"


def module_path(name: str) -> str:
    """The transformers module of the layer that a checkpoint calls `name`."""
    return name.replace(".block_sparse_moe.", ".mlp.")


def _positive(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise CheckpointError(f"config.json: {name} is {value!r}, must be a positive integer")
        return value
    raise CheckpointError(f"config.json: has no {' or '.join(names)}")
