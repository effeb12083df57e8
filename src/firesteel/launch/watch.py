"""Watches for what `run` must never do: compile, allocate, read the environment, wait."""

from __future__ import annotations

import os
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from firesteel.device import allocations, syncs_warn

__all__ = ["Seen", "watch"]

# In the warning that torch gives at each.
_SYNC = "called a synchronizing CUDA operation"


@dataclass(slots=True)
class Seen:
    """What happened while a watch was on; `run` alone leaves every count at 0.

    Fields
        compiles           kernels that Triton compiled, in any thread
        allocations        of GPU memory through torch; on a CPU its operations are counted instead
        environment_reads  of Python's `os.environ`
        host_syncs         waits for the GPU that torch knows of
        torch_operations   torch operations of any kind on this thread, by name
    """

    compiles: int = 0
    allocations: int = 0
    environment_reads: int = 0
    host_syncs: int = 0
    torch_operations: dict[str, int] = field(default_factory=dict)

    @property
    def is_clean(self) -> bool:
        """Whether nothing was seen."""
        return self == Seen()

    def add(self, other: Seen) -> None:
        """Add the counts of another watch."""
        self.compiles += other.compiles
        self.allocations += other.allocations
        self.environment_reads += other.environment_reads
        self.host_syncs += other.host_syncs
        for name, count in other.torch_operations.items():
            self.torch_operations[name] = self.torch_operations.get(name, 0) + count

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@contextmanager
def watch(device: torch.device, seen: Seen | None = None) -> Generator[Seen]:
    """Count while open; for tests and audits, since watching itself costs time.

    Watches of several threads share the process's hooks: open one at a time. Warnings of other
    causes are given at the end.

    Args:
        device: whose allocations and syncs are counted.
        seen: what to count into; new by default.
    """
    seen = Seen() if seen is None else seen
    others: list[warnings.WarningMessage] = []
    with ExitStack() as stack:
        # First, so that it runs last: outside the filter of this watch.
        stack.callback(_warn_again, others)
        stack.enter_context(_compiles(seen))
        stack.enter_context(_environment(seen))
        stack.enter_context(_operations(seen))
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        before = allocations(device)
        try:
            with syncs_warn(device):
                yield seen
        finally:
            seen.allocations += allocations(device) - before
            others += [warning for warning in caught if _SYNC not in str(warning.message)]
            seen.host_syncs += len(caught) - len(others)


def _warn_again(caught: Sequence[warnings.WarningMessage]) -> None:
    for warning in caught:
        warnings.warn_explicit(
            warning.message,
            warning.category,
            warning.filename,
            warning.lineno,
            source=warning.source,
        )


@contextmanager
def _compiles(seen: Seen) -> Generator[None]:
    try:
        from triton import knobs as triton_knobs
    except ImportError:
        # Nothing can be compiled.
        yield
        return
    knobs: Any = triton_knobs
    before = knobs.compilation.listener

    def listen(*, cache_hit: bool, **rest: object) -> None:
        seen.compiles += not cache_hit
        if before is not None:
            before(cache_hit=cache_hit, **rest)

    knobs.compilation.listener = listen
    try:
        yield
    finally:
        knobs.compilation.listener = before


@contextmanager
def _environment(seen: Seen) -> Generator[None]:
    kind: Any = type(os.environ)
    before = kind.__getitem__

    def read(environ: object, name: str) -> str:
        seen.environment_reads += 1
        return before(environ, name)

    kind.__getitem__ = read
    try:
        yield
    finally:
        kind.__getitem__ = before


def _operations(seen: Seen) -> TorchDispatchMode:
    class Counter(TorchDispatchMode):
        def __torch_dispatch__(
            self,
            func: Any,  # noqa: ANN401
            types: Sequence[type],
            args: Sequence[Any] = (),
            kwargs: Mapping[str, Any] | None = None,
        ) -> Any:  # noqa: ANN401
            del types
            name = str(func)
            seen.torch_operations[name] = seen.torch_operations.get(name, 0) + 1
            return func(*args, **(kwargs or {}))

    return Counter()
