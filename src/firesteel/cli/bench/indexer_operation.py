"""The indexer's specs made ready for measurement: whole calls, and their first launches."""

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

__all__ = ["Call", "FirstLaunches", "Operation"]


@dataclass(frozen=True, slots=True)
class FirstLaunches:
    """A spec of which each call makes so many launches only.

    What a launch takes is what it adds to those before it: by itself, over and over, it could find
    what it counts in as it left it, and not as a call does.

    Fields
        spec    the whole
        number  of launches, or fewer where a call has fewer
    """

    spec: Spec
    number: int

    @property
    def title(self) -> str:
        """One line for logs."""
        return f"{self.number} launches of {self.spec.title}"

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
        """The first launches."""
        return self.spec.select(num_tokens, flags)[: self.number]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"number": self.number, **self.spec.as_dict()}


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
        number: int | None = None,
        arena: Arena | None = None,
    ) -> None:
        self.spec = spec = spec.for_target(device_target(device))
        self._device = device
        made = plan(spec if number is None else FirstLaunches(spec, number), count)
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
        """Each launch of a full call: its kernel and grid, and the operation of those up to it.

        Of a call that goes in slices those of the first.
        """
        found: list[tuple[dict[str, Any], Operation]] = []
        launches = self.spec.select(self._count, ())
        for number, launch in enumerate(launches, 1):
            if found and launch.key == launches[0].key:
                break
            kernel = launch.key.kernel.rpartition(".")[2].removesuffix("_kernel")
            until = Operation(
                self.spec, self._count, self._device, number=number, arena=self._arena
            )
            found.append(({"kernel": kernel, "grid": list(launch.grid)}, until))
        return found
