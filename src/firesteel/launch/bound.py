"""`Bound`: tensors that were checked once, and `run`, which looks up, patches and launches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from torch import Tensor

from firesteel.errors import (
    ArenaError,
    DriverError,
    ForkedError,
    InvalidArgumentError,
)
from firesteel.launch.check import check_operand, quick_caller
from firesteel.launch.op import handle_of
from firesteel.launch.runner import (
    FOREIGN_STREAM,
    FORKED,
    MISS,
    PLACE_NAMES,
    RunnerLike,
    decode_driver_failure,
)
from firesteel.launch.table import Step, Table
from firesteel.launch.workspace import Arena

if TYPE_CHECKING:
    from firesteel.launch.driver import Driver
    from firesteel.launch.ready import Ready

__all__ = ["Bound", "launch_error"]

MAX_UNPLANNED = 64
"""Counts outside the plan whose launchers a Bound keeps; the oldest makes room."""


class Bound:
    """An operation with its weights and workspace; `Ready.bind` makes it.

    `run` takes the tensors that change from call to call. It compiles nothing, reads no
    environment, allocates nothing and never waits for the device, so it can be captured in a CUDA
    graph, as its first call too. It keeps the storages that it was bound to; whoever frees or
    replaces what is in them must bind again.

    Fields
        flags    the combination that it was bound for
        tensors  those that stay the same, by name
        arena    its workspace
        handle   its number for `run_op`, which torch.compile can trace
    """

    def __init__(
        self,
        ready: Ready,
        table: Table,
        tensors: Mapping[str, Tensor],
        arena: Arena,
        runner: RunnerLike,
    ) -> None:
        self.flags = table.flags
        self.tensors = dict(tensors)
        self.arena = arena
        self._ready = ready
        self._runner = runner
        self._stream_of = ready.stream_of
        self._device = ready.device
        self._stream_index = ready.device.index or 0
        # As `Tensor.get_device` numbers them.
        self._device_index = -1 if ready.device.type == "cpu" else self._stream_index
        self._operands = tuple(o for o in table.operands if o.is_per_call)
        self._call = quick_caller(self._operands, self._device_index, runner.run)
        self._arena_address: Callable[[], int] = arena.storage.data_ptr
        self._address = arena.address
        self._unplanned_lock = threading.Lock()
        self._unplanned: dict[int, Callable[..., int | None]] = {}
        self.handle = handle_of(self)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "Bound: cannot be pickled or copied, it holds addresses of this process; bind again"
        )

    @property
    def runner(self) -> RunnerLike:
        """The object that launches; it counts."""
        return self._runner

    def run(self, *tensors: Tensor) -> int:
        """Launch; returns the number of launches.

        Args:
            tensors: what each call passes, in the order of the spec's operands. Their first
                dimension is the token count.

        Raises
            InvalidArgumentError: a tensor is not as the spec says, or wants a gradient.
            NotPlannedError: the token count is outside the plan, and `on_miss` is "raise", or the
                stream is under capture.
            ArenaError: the arena belongs to another stream, or its storage was freed.
            ForkedError: this process was forked after the plan was made ready.
            DriverError: the driver refuses a launch.
        """
        if self._arena_address() != self._address:
            raise ArenaError("arena: its storage was freed or replaced while it was bound")
        stream = self._stream_of(self._stream_index)
        try:
            launched = self._call(stream, *tensors)
        # A RuntimeError is torch's, for a tensor without memory of its own, as a sparse one.
        except (AttributeError, IndexError, RuntimeError, TypeError):
            self._refuse(tensors)
            raise
        if launched is None:
            self._refuse(tensors)
            raise AssertionError("the quick check refused what the thorough one lets pass")
        if launched < 0:
            return self._failed(launched, tensors, stream)
        return launched

    def _refuse(self, tensors: Sequence[object]) -> None:
        """Say which tensor is at fault, and how."""
        if len(tensors) != len(self._operands):
            names = [operand.name for operand in self._operands]
            raise InvalidArgumentError(f"run: got {len(tensors)} tensors, must be {names}")
        first = tensors[0]
        num_tokens = first.shape[0] if isinstance(first, Tensor) and first.dim() else None
        for operand, tensor in zip(self._operands, tensors, strict=True):
            check_operand(operand, tensor, num_tokens, self._device)

    def _failed(self, code: int, tensors: Sequence[Tensor], stream: int) -> int:
        """Say what a launcher's code means; run what is not planned, where that is allowed."""
        num_tokens = tensors[0].shape[0]
        if code == MISS:
            return self._run_unplanned(num_tokens, tensors, stream)
        if code == FOREIGN_STREAM:
            raise ArenaError(
                f"stream: got {stream:#x}, {self.arena!r} must be run on its own stream, or be "
                "released first (Arena.release) by who has made the new stream wait"
            )
        if code == FORKED:
            raise ForkedError(
                "run: this process was forked after the plan was made ready; "
                "a worker must prewarm for itself (start it by spawn)"
            )
        what = f"{self._ready.plan.spec.title}, M = {num_tokens}"
        raise launch_error(self._ready.driver, code, what)

    def _run_unplanned(self, num_tokens: int, tensors: Sequence[Tensor], stream: int) -> int:
        call = self._unplanned.get(num_tokens)
        # Under capture it is refused whether or not it has run before.
        if call is None or self._ready.driver.is_capturing(stream):
            table, runner = self._ready.unplanned(self, num_tokens, stream)

            def launch(num_tokens: int, stream: int, *values: int) -> int:
                del num_tokens  # the runner's only row stands first
                return runner.run(0, stream, *values)

            call = quick_caller(self._operands, self._device_index, launch)
            # Another thread may still be in it when it has made room, or was made twice.
            self._ready.audit.follow(call, table, runner)
            self._keep_unplanned(num_tokens, call)
        launched = call(stream, *tensors)
        assert launched is not None
        return launched if launched >= 0 else self._failed(launched, tensors, stream)

    def _keep_unplanned(self, num_tokens: int, call: Callable[..., int | None]) -> None:
        with self._unplanned_lock:
            self._unplanned[num_tokens] = call
            if len(self._unplanned) > MAX_UNPLANNED:
                del self._unplanned[next(iter(self._unplanned))]

    def in_order(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of a call in `run`'s order, from those that are read and those written."""
        read, written = iter(inputs), iter(outputs)
        try:
            found = [next(written if o.is_written else read) for o in self._operands]
        except StopIteration:
            found = []
        if len(found) != len(inputs) + len(outputs):
            raise InvalidArgumentError(
                f"run_: got {len(inputs)} inputs and {len(outputs)} outputs, must be "
                f"{[o.name for o in self._operands if not o.is_written]} and "
                f"{[o.name for o in self._operands if o.is_written]}"
            )
        return found

    def resolve(self, num_tokens: int) -> tuple[Step, ...]:
        """The launches of a token count within the plan; nothing is launched."""
        return self._ready.table(self.flags).resolve(num_tokens)


def launch_error(driver: Driver, code: int, what: str) -> DriverError:
    """The error of a code with which a launcher says that the driver refused."""
    result, place = decode_driver_failure(code)
    if place in PLACE_NAMES:
        return driver.error(PLACE_NAMES[place], result, f"around the launches of {what}")
    return driver.error("cuLaunchKernelEx", result, f"launch {place} of {what}")
