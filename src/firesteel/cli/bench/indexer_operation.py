"""The indexer's specs made ready for measurement: whole calls, and each launch by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from firesteel.cli.bench.indexer_inputs import Inputs, poisoned_outputs
from firesteel.device import device_target
from firesteel.indexer.spec import DecodeSpec, PrefillSpec
from firesteel.launch import Arena, Flags, Launch, Operand, Region, Spec, plan, prewarm

__all__ = ["Call", "OneLaunch", "Operation"]


@dataclass(frozen=True, slots=True)
class OneLaunch:
    """A spec of which each call makes one launch only, and nothing where it has no such.

    It reads what the launches before it left in the workspace, which it never writes: the same
    launch may be repeated.

    Fields
        spec   the whole
        place  of the launch, from 0
    """

    spec: Spec
    place: int

    @property
    def title(self) -> str:
        """One line for logs."""
        return f"launch {self.place} of {self.spec.title}"

    def flags(self) -> Mapping[str, tuple[str, ...]]:
        """As the whole."""
        return self.spec.flags()

    def operands(self, flags: Flags) -> tuple[Operand, ...]:
        """As the whole."""
        return self.spec.operands(flags)

    def workspace(self, num_tokens: int) -> tuple[Region, ...]:
        """As the whole."""
        return self.spec.workspace(num_tokens)

    def select(self, num_tokens: int, flags: Flags) -> tuple[Launch, ...]:
        """The launch alone."""
        return self.spec.select(num_tokens, flags)[self.place : self.place + 1]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"place": self.place, **self.spec.as_dict()}


@dataclass(frozen=True)
class Call:
    """One call: `run` launches it.

    Fields
        run      writes the outputs in place
        outputs  by operand
    """

    run: Callable[[], object]
    outputs: Mapping[str, Tensor]


class Operation:
    """A spec that is ready for up to `count` requests or rows.

    Fields
        spec             what was planned, with what kernels for the device may use
        workspace_bytes  of the plan
    """

    def __init__(
        self,
        spec: DecodeSpec | PrefillSpec,
        count: int,
        device: torch.device,
        *,
        place: int | None = None,
        arena: Arena | None = None,
    ) -> None:
        self.spec = spec = spec.for_target(device_target(device))
        self._device = device
        made = plan(spec if place is None else OneLaunch(spec, place), count)
        self._ready = prewarm(made, device=device)
        self._arena = self._ready.arena() if arena is None else arena
        self._count = count
        self.workspace_bytes = made.workspace.num_bytes

    def call(self, inputs: Inputs) -> Call:
        """A call that is bound to these inputs, with poisoned outputs of its own."""
        operands = self.spec.operands(())
        count = next(len(inputs[each.name]) for each in operands if each.is_per_call)
        outputs = poisoned_outputs(self.spec, count, self._device)
        tensors = {**inputs, **outputs}
        fixed = {each.name: tensors[each.name] for each in operands if not each.is_per_call}
        passed = [tensors[each.name] for each in operands if each.is_per_call]
        bound = self._ready.bind(fixed, self._arena)
        return Call(partial(bound.run, *passed), outputs)

    def launches(self) -> list[tuple[dict[str, Any], Operation]]:
        """Each launch of a full call: its kernel and grid, and the operation that is it alone.

        They share the workspace, so each must be run after the ones before it.
        """
        found: list[tuple[dict[str, Any], Operation]] = []
        for place, launch in enumerate(self.spec.select(self._count, ())):
            kernel = launch.key.kernel.rpartition(".")[2].removesuffix("_kernel")
            alone = Operation(self.spec, self._count, self._device, place=place, arena=self._arena)
            found.append(({"kernel": kernel, "grid": list(launch.grid)}, alone))
        return found
