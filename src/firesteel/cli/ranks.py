"""Ranks that share a layer, of which each has what `firesteel.integrations.vllm` gives it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from firesteel.checkpoint.layers import ExpertLayer
from firesteel.checkpoint.shards import cuts, shard_layer
from firesteel.errors import InvalidArgumentError
from firesteel.formats.quantize import Recipe
from firesteel.formats.shard import columns_scheme, split
from firesteel.moe.spec import MoeSpec
from firesteel.moe.trellis.spec import LayerSpec

__all__ = ["Place", "check_ranks", "named_ranks", "places_by", "stored_ranks", "where"]

Place = tuple[int, int]
"""A layer and a rank."""
Value = TypeVar("Value")


def check_ranks(tp: int, ep: int, num_experts: int) -> None:
    """Refuse numbers of ranks that vLLM would not have.

    Raises
        InvalidArgumentError: they are such.
    """
    if tp < 1:
        raise InvalidArgumentError(f"--tp: got {tp}, must be 1 or more")
    if not 1 <= ep <= num_experts:
        raise InvalidArgumentError(
            f"--ep: got {ep}, must be 1 to {num_experts}: a rank has at least one of {num_experts} "
            "experts"
        )
    if tp > 1 and ep > 1:
        raise InvalidArgumentError(
            f"--tp, --ep: got {tp} and {ep}, one of them must be 1: with expert parallel vLLM "
            "gives whole experts to the ranks"
        )


def named_ranks(whole: LayerSpec, recipe: Recipe, *, tp: int, ep: int) -> tuple[LayerSpec, ...]:
    """The layer of each rank, by the sizes of the whole one and how it is stored.

    Raises
        UnsupportedError: more ranks than parts of the intermediate size.
    """
    n, k, num_experts = whole.intermediate_size, whole.hidden_size, whole.num_experts
    if ep > 1:
        return tuple(
            replace(whole, num_experts=len(held), num_global_experts=num_experts)
            for held in split(num_experts, ep)
        )
    if tp == 1:
        return (whole,)
    up, down = (recipe.scheme(*shape, torch.bfloat16) for shape in ((n, k), (k, n)))
    found: list[LayerSpec] = []
    for cut in cuts("--tp", (up, up, down), tp):
        if isinstance(whole, MoeSpec):
            group_size = columns_scheme(down, cut).group_size
            w2 = replace(whole.w2, group_size=group_size)
            found.append(replace(whole, intermediate_size=len(cut), w2=w2))
        else:
            found.append(replace(whole, intermediate_size=len(cut)))
    return tuple(found)


def stored_ranks(layer: ExpertLayer, *, tp: int, ep: int) -> tuple[ExpertLayer, ...]:
    """What each rank has of a packed layer of a checkpoint.

    Raises
        UnsupportedError: more ranks than parts that the format allows.
    """
    if ep > 1:
        held_by = split(len(layer.sources[0]), ep)
        return tuple(shard_layer(layer, held=held) for held in held_by)
    # Refused with the option's name, and alike for all layers.
    cuts("--tp", [layer.scheme(part) for part in range(3)], tp)
    return tuple(shard_layer(layer, rank=rank, count=tp) for rank in range(tp))


def places_by(values: Mapping[Place, Value]) -> dict[Value, list[Place]]:
    """The places of each value, in the order in which they come."""
    found: dict[Value, list[Place]] = {}
    for place, value in values.items():
        found.setdefault(value, []).append(place)
    return found


def where(places: Sequence[Place], *, ranks: int, layers: Collection[int] = ()) -> str:
    """`layer 3`, `layers 3, 4 of ranks 0, 1`, or `rank 0`.

    Args:
        ranks: how many there are; all of them are not named.
        layers: nor are all of these.
    """
    ranks_of: dict[int, list[int]] = {}
    for layer, rank in places:
        ranks_of.setdefault(layer, []).append(rank)
    layers_of: dict[tuple[int, ...], list[int]] = {}
    for layer, own in ranks_of.items():
        layers_of.setdefault(tuple(own), []).append(layer)
    found: list[str] = []
    for own, numbers in layers_of.items():
        words = [_numbered("layer", numbers)] * (set(numbers) != set(layers))
        words += [_numbered("rank", own)] * (len(own) < ranks)
        found.append(" of ".join(words))
    return " and ".join(found)


def _numbered(name: str, numbers: Sequence[int]) -> str:
    """`layer 3`, or `layers 3, 4`."""
    return f"{name}{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
