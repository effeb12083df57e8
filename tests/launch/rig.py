"""A plan made ready on the stub driver, with pretended machine code: quick, and on any machine."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from firesteel.launch import Kernel, LaunchKey, Plan, Ready, prewarm
from firesteel.launch.binary import Binary, identity
from firesteel.launch.key import DTYPES
from firesteel.launch.spec import Flags, Spec
from firesteel.launch.stub import StubDriver
from firesteel.settings import Settings

NUM_HIDDEN = 2
OFF = Settings(cache="off")


def pretended(kernel: Kernel, key: LaunchKey, target: str) -> Binary:
    return Binary(
        digest=identity(kernel, key, target),
        target=target,
        symbol=key.name,
        shared_bytes=1024,
        num_warps=key.num_warps,
        num_hidden=NUM_HIDDEN,
        image=b"cubin of " + str(key).encode(),
    )


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


class Compiler:
    """Stands in for `compile_all`; notes what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[LaunchKey] = []

    def __call__(
        self,
        wanted: Sequence[tuple[Kernel, LaunchKey]],
        target: str,
        *,
        threads: int,
        done: Callable[[LaunchKey, Binary], None],
    ) -> None:
        del threads
        for kernel, key in wanted:
            self.asked.append(key)
            done(key, pretended(kernel, key, target))


def ready_on_stub(
    made: Plan,
    driver: StubDriver,
    *,
    settings: Settings = OFF,
    compiler: Compiler | None = None,
    bundle: object = None,
) -> Ready:
    with patch("firesteel.launch.ready.compile_all", compiler or Compiler()):
        ready = prewarm(made, device="cpu", driver=driver, settings=settings, bundle=bundle)
    for key in made.keys:
        function, _ = ready.function(key)
        driver.expect_params(function.handle, len(key.arguments) + NUM_HIDDEN)
    return ready


def tensors_of(spec: Spec, flags: Flags) -> dict[str, Tensor]:
    """A tensor for each operand that is given once; of any size one of 64 elements."""
    return {
        operand.name: aligned(
            (64,) if operand.is_any_size else operand.shape_for(0), DTYPES[operand.dtype]
        )
        for operand in spec.operands(flags)
        if not operand.is_per_call
    }


def call_of(spec: Spec, flags: Flags, num_tokens: int) -> list[Tensor]:
    """A tensor for each operand that every call passes, in order."""
    return [
        aligned(operand.shape_for(num_tokens), DTYPES[operand.dtype])
        for operand in spec.operands(flags)
        if operand.is_per_call
    ]


def aligned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory at a multiple of 16 bytes, which is never touched however large it is."""
    made = torch.empty(torch.Size(shape).numel() + 16, dtype=dtype)
    start = -made.data_ptr() % 16 // dtype.itemsize
    return made[start : start + torch.Size(shape).numel()].view(shape)


def run_in_threads(works: Sequence[Callable[[], None]]) -> None:
    """Each in a thread of its own, which Python switches as often as it can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
