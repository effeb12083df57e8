"""Checks that a layer's first call ever can be under CUDA graph capture, at any token count."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from firesteel.cli.bench.moe_inputs import random_call
from firesteel.errors import FiresteelError
from firesteel.launch import Ready
from firesteel.moe.layer import MoeLayer
from firesteel.moe.spec import MoeSpec

__all__ = ["check_captures"]

SMALL = 64
_INT = {2: torch.int16, 4: torch.int32}


def check_captures(ready: Ready, weights: dict[str, Tensor], num_random: int) -> dict[str, Any]:
    """Bind, capture at once, replay, and compare with an eager call bit for bit.

    At every count of 1..64 and at `num_random` others up to the plan's end, with ids of both types
    in turn. Nothing of the plan ran before.

    Raises
        FiresteelError: a replay differs from the eager call.
    """
    spec, most = ready.plan.spec, ready.plan.max_tokens
    assert isinstance(spec, MoeSpec)
    larger = range(SMALL + 1, most + 1)
    others = random.Random(1).sample(larger, min(num_random, len(larger)))
    counts = [*range(1, min(SMALL, most) + 1), *others]
    arena = ready.arena()
    # The counts differ in the launches, so one call's memory serves all; its ids are redrawn.
    for number, num_tokens in enumerate(counts):
        ids = ("i32", "i64")[number % 2]
        call = random_call(spec, num_tokens, ready.device, ids=ids, seed=number)
        layer = MoeLayer(ready, weights, arena)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layer.run(*call.tensors)
        graph.replay()
        replayed = call.out.clone()
        call.out.fill_(torch.nan)
        layer.run(*call.tensors)
        kind = _INT[call.out.element_size()]
        same = torch.equal(replayed.view(kind), call.out.view(kind))
        if not same or not bool(call.out.isfinite().all()):
            raise FiresteelError(
                f"capture: at {num_tokens} tokens the replay and the eager call differ, or are "
                "not finite"
            )
    return {"counts": len(counts), "first_use_captured": len(counts), "equal_to_eager": len(counts)}
