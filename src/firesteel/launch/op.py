"""`firesteel::run_`: a bound operation as a torch operator, which torch.compile traces past.

Eager callers call `Bound.run` itself: an operator costs 2.3 us more (H200's host, torch 2.11).
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from firesteel.errors import InvalidArgumentError

if TYPE_CHECKING:
    from firesteel.launch.bound import Bound

__all__ = ["handle_of", "register", "run_op"]

_SCHEMA = "run_(int handle, Tensor[] inputs, Tensor(a!)[] outputs) -> ()"
_bounds: WeakValueDictionary[int, Bound] = WeakValueDictionary()
_numbers = count(1)
_lock = threading.Lock()
# Holds the registration; empty until the first plan is made ready.
_library: list[torch.library.Library] = []


def register() -> None:
    """Register the operator with torch, once a process."""
    with _lock:
        if _library:
            return
        library = torch.library.Library("firesteel", "DEF")
        library.define(_SCHEMA)
        for key in ("CUDA", "CPU"):
            library.impl("run_", _run, key)
        torch.library.register_fake("firesteel::run_", _fake, lib=library)
        _library.append(library)


def handle_of(bound: Bound) -> int:
    """A number for `bound`, by which the operator finds it as long as it lives."""
    handle = next(_numbers)
    _bounds[handle] = bound
    return handle


def run_op(handle: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """`Bound.run` through torch's dispatcher.

    Args:
        handle: as `Bound.handle` gives it.
        inputs, outputs: the tensors of a call, those that are written apart from the others, each
            in the order of the spec's operands.
    """
    operator: Any = torch.ops.firesteel.run_.default
    operator(handle, list(inputs), list(outputs))


def _run(handle: int, inputs: list[Tensor], outputs: list[Tensor]) -> None:
    bound = _bounds.get(handle)
    if bound is None:
        raise InvalidArgumentError(f"handle: got {handle}, whose Bound no longer exists")
    bound.run(*bound.in_order(inputs, outputs))


def _fake(handle: int, inputs: list[Tensor], outputs: list[Tensor]) -> None:
    del handle, inputs, outputs


def _renew_lock() -> None:
    """Runs in a forked child: a thread that held the lock is not there to let go of it."""
    global _lock
    _lock = threading.Lock()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_renew_lock)
