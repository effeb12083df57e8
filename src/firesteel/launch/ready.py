"""`prewarm`: compiles and loads exactly what a plan holds; `Ready`: what can then be bound."""

from __future__ import annotations

import logging
import os
import threading
import time
from array import array
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from firesteel.device import checked_device, default_device, stream_getter
from firesteel.errors import InvalidArgumentError, NotPlannedError, UnsupportedError
from firesteel.launch.audit import Audit, Miss
from firesteel.launch.binary import Binary, compile_all, identity
from firesteel.launch.bound import Bound, launch_error
from firesteel.launch.check import check_arena, check_operand
from firesteel.launch.driver import Driver, LoadedFunction
from firesteel.launch.kernel import Kernel, Stride
from firesteel.launch.key import LaunchKey, nearest_key
from firesteel.launch.op import register
from firesteel.launch.runner import Launch as RunnerLaunch
from firesteel.launch.runner import RunnerLike, check_tables, runner_class
from firesteel.launch.spec import Flags
from firesteel.launch.store import Bundle, Cache
from firesteel.launch.table import Plan, RowInteger, Step, Table, plan, plan_count
from firesteel.launch.watch import Seen, watch
from firesteel.launch.workspace import Arena, Workspace
from firesteel.progress import progress_bar
from firesteel.settings import Settings

__all__ = ["Ready", "prewarm"]

log = logging.getLogger(__name__)

EMPTY_BYTES = 1 << 20
"""Zeroed memory behind every pointer of a launch on empty work."""

_PDL, _COOPERATIVE = 1, 2


def prewarm(
    made: Plan,
    *,
    device: torch.device | str | int | None = None,
    settings: Settings | None = None,
    bundle: Path | str | None = None,
    driver: Driver | None = None,
    show_progress: bool = False,
) -> Ready:
    """Compile and load every key of a plan, and launch each once on empty work.

    Kernels come from the bundle, else from the cache on disk, else from the compiler, in threads.

    Args:
        made: what `plan` returned.
        device: the current GPU by default; "cpu" only with a driver that pretends to be one.
        settings: the environment's by default, which is read here and never again.
        bundle: a folder that `firesteel build` made; that of the settings by default.
        driver: CUDA's by default.
        show_progress: a bar with the time left, on stderr.

    Raises
        UnsupportedError: no GPU, no driver, or no Triton.
        InvalidArgumentError: the bundle or a setting is not allowed, or the stream is under
            capture.
        DriverError: the driver refuses a kernel.
    """
    settings = Settings.from_env() if settings is None else settings
    where = _checked_device(device, driver)
    register()
    ready = Ready(made, where, driver or Driver.open(), settings)
    bundle = settings.bundle if bundle is None else bundle
    ready.load(made, None if bundle is None else Bundle(Path(bundle)), show_progress)
    return ready


class Ready:
    """A plan whose kernels are loaded on a device. `bind` it; `audit` says what it did.

    Fields
        plan       what was planned
        device     where
        target     what its kernels were compiled for, "sm_90"
        settings   as `prewarm` was given
        driver     the driver in use
        audit      counters of what it did
    """

    def __init__(
        self, made: Plan, device: torch.device, driver: Driver, settings: Settings
    ) -> None:
        index = device.index or 0
        self.plan = made
        self.device = device
        self.driver = driver
        self.settings = settings
        self.context = driver.context(index)
        self.target = "sm_{}{}".format(*driver.compute_capability(index))
        self.stream_of: Callable[[int], int] = stream_getter(device)
        self.audit = Audit(made)
        self._runner_class = runner_class(
            None if settings.launcher == "auto" else settings.launcher
        )
        self._functions: dict[LaunchKey, tuple[LoadedFunction, Binary]] = {}
        self._tables = {flags: _checked(table) for flags, table in made.tables.items()}
        self._lock = threading.Lock()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "Ready: cannot be pickled or copied, it belongs to this process and device; "
            "plan and prewarm where it is needed"
        )

    @property
    def launcher(self) -> str:
        """What launches: "native", or "python" where the C extension was not built."""
        return self._runner_class.kind

    def load(self, made: Plan, bundle: Bundle | None, show_progress: bool) -> None:
        """Compile and load what a plan holds and this does not; `prewarm` calls it."""
        stream = self.stream_of(self.device.index or 0)
        if self.driver.is_capturing(stream):
            raise InvalidArgumentError(
                "prewarm: the current stream is under CUDA graph capture, must not be"
            )
        start = time.perf_counter()
        wanted = [(made.kernels[key.kernel], key) for key in made.keys]
        with self._lock:
            binaries = self._binaries(wanted, bundle, show_progress)
            for kernel, key in wanted:
                if key not in self._functions:
                    self._functions[key] = _load(self.driver, self.context, binaries[key])
                    self._launch_empty(kernel, key, stream)
            self.driver.synchronize(self.context)
        self.audit.prewarmed.seconds += time.perf_counter() - start
        log.info("%s: %s", made.spec.title, self.audit.prewarmed)

    def _binaries(
        self, wanted: Sequence[tuple[Kernel, LaunchKey]], bundle: Bundle | None, show: bool
    ) -> dict[LaunchKey, Binary]:
        cache = Cache(self.settings.cache_path)
        found: dict[LaunchKey, Binary] = {}
        missing: list[tuple[Kernel, LaunchKey]] = []
        for kernel, key in wanted:
            if key in self._functions:
                continue
            digest = identity(kernel, key, self.target)
            binary = None if bundle is None else bundle.read(digest, self.target)
            if binary is not None:
                self.audit.prewarmed.from_bundle += 1
            elif (binary := cache.read(digest, self.target)) is not None:
                self.audit.prewarmed.from_cache += 1
            if binary is None:
                missing.append((kernel, key))
            else:
                found[key] = binary

        with progress_bar("compiling kernels", len(missing), show=show) as advance:

            def done(key: LaunchKey, binary: Binary) -> None:
                found[key] = binary
                self.audit.prewarmed.compiled += 1
                cache.write(binary)
                log.debug("compiled %s", key)
                advance()

            threads = self.settings.compile_threads or os.cpu_count() or 1
            compile_all(missing, self.target, threads=threads, done=done)
        return found

    def _launch_empty(self, kernel: Kernel, key: LaunchKey, stream: int) -> None:
        """Launch once with nothing to do, so that the driver has nothing left to set up."""
        self.audit.prewarmed.loaded += 1
        if not kernel.launches_empty:
            return
        # Not kept between keys: a kernel may write to it.
        zeros = torch.zeros(EMPTY_BYTES, dtype=torch.uint8, device=self.device)
        arguments = tuple(
            "zeros" if kind.startswith("*") else RowInteger(0) for _, kind in key.arguments
        )
        rows = array("q", [0, 1, 1, 1, 0])
        table = Table((), ((Step(key, arguments),),), array("i", [0]), rows)
        runner = self._runner(table, {"zeros": zeros.data_ptr()}, {}, None, (zeros,))
        code = runner.run(0, stream)
        if code < 0:
            raise launch_error(self.driver, code, f"{key} on empty work")
        self.driver.synchronize(self.context)

    @contextmanager
    def watch(self) -> Generator[Seen]:
        """Count compiles, allocations, environment reads and host syncs while open.

        The counts are added to what `audit` reports.
        """
        seen = Seen()
        try:
            with watch(self.device, seen):
                yield seen
        finally:
            self.audit.saw(seen)

    def function(self, key: LaunchKey) -> tuple[LoadedFunction, Binary]:
        """What is loaded for a key of the plan."""
        return self._functions[key]

    def table(self, flags: Flags) -> Table:
        """The table of a combination of flags."""
        return self._tables[flags]

    def arena(self) -> Arena:
        """A workspace of this plan's size, allocated here and now, for calls of one stream."""
        return Arena.allocate(self.plan.workspace.num_bytes, self.device)

    def bind(self, tensors: Mapping[str, Tensor], arena: Arena, **flags: str) -> Bound:
        """Check the tensors that stay the same from call to call; nothing is allocated.

        Args:
            tensors: by name, those operands of the spec that are not of each call.
            arena: workspace of at least `plan.workspace.num_bytes`; one arena may serve many.
            flags: a value for each flag of the spec.

        Raises
            InvalidArgumentError: a tensor or flag is missing, unknown or not as the spec says.
            ArenaError: the arena is too small, elsewhere, freed, or used by another launcher.
            NotPlannedError: the spec allows the flags, the plan left them out.
        """
        chosen = self._flags(flags)
        if chosen not in self._tables:
            self._add_flags(chosen)
        table = self._tables[chosen]
        operands = [o for o in table.operands if not o.is_per_call]
        names = {operand.name for operand in operands}
        if set(tensors) != names:
            raise InvalidArgumentError(
                f"tensors: got {sorted(tensors)}, must be exactly {sorted(names)}"
            )
        for operand in operands:
            check_operand(operand, tensors[operand.name], 0, self.device)
        check_arena(arena, self.plan.workspace, self.device)
        arena.take(self.launcher)
        runner = self._bound_runner(table, tensors, arena, self.plan.workspace)
        bound = Bound(self, table, tensors, arena, runner)
        self.audit.follow(bound, table, runner)
        return bound

    def _flags(self, flags: Mapping[str, str]) -> Flags:
        allowed = self.plan.spec.flags()
        if set(flags) != set(allowed):
            raise InvalidArgumentError(f"flags: got {sorted(flags)}, must be {sorted(allowed)}")
        for name, value in flags.items():
            if value not in allowed[name]:
                raise InvalidArgumentError(
                    f"{name}: got {value!r}, must be one of {', '.join(allowed[name])}"
                )
        return tuple(sorted(flags.items()))

    def _bound_runner(
        self,
        table: Table,
        tensors: Mapping[str, Tensor],
        arena: Arena,
        workspace: Workspace,
    ) -> RunnerLike:
        base = arena.storage.data_ptr()
        addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        addresses.update({name: base + at for name, at in workspace.offsets.items()})
        values: dict[str | Stride, int] = {}
        for operand in table.operands:
            if operand.is_per_call:
                values[operand.name] = len(values)
                if operand.has_stride:
                    values[Stride(operand.name)] = len(values)
        # The memory itself: whoever holds a tensor may put other memory behind it.
        keep = tuple(t.untyped_storage() for t in (arena.storage, *tensors.values()))
        return self._runner(table, addresses, values, arena, keep)

    def _runner(
        self,
        table: Table,
        addresses: Mapping[str, int],
        values: Mapping[str | Stride, int],
        arena: Arena | None,
        keep: tuple[object, ...],
    ) -> RunnerLike:
        def source(argument: str | RowInteger | Stride) -> tuple[int, int]:
            if isinstance(argument, RowInteger):
                return (2, argument.place)
            if argument in values:
                return (1, values[argument])
            assert isinstance(argument, str)
            return (0, addresses[argument])

        sequences: list[tuple[RunnerLaunch, ...]] = []
        for steps in table.sequences:
            launches: list[RunnerLaunch] = []
            for step in steps:
                function, binary = self._functions[step.key]
                params = [source(argument) for argument in step.arguments]
                params += [(0, 0)] * binary.num_hidden
                flags = _PDL * step.key.pdl + _COOPERATIVE * step.key.cooperative
                threads = 32 * binary.num_warps
                launches.append(
                    (function.handle, threads, binary.shared_bytes, flags, tuple(params))
                )
            sequences.append(tuple(launches))
        owner = None if arena is None else arena.owner_cell
        return self._runner_class(
            driver_addresses=self.driver.runner_addresses,
            context=self.context,
            max_tokens=len(table.index) - 1,
            index=table.index.buffer_info()[0],
            rows=table.rows.buffer_info()[0],
            sequences=tuple(sequences),
            num_values=len(values),
            owner=0 if owner is None else owner.buffer_info()[0],
            keep=(table.index, table.rows, owner, *keep),
        )

    def _add_flags(self, flags: Flags) -> None:
        """A combination that the plan left out: refused, or compiled, as `on_miss` says."""
        values = {name: (value,) for name, value in flags}
        made = plan(self.plan.spec, self.plan.max_tokens, flags=values)
        self._on_miss(f"flags {dict(flags)}", made, self.stream_of(self.device.index or 0))
        self.load(made, None, False)
        self._tables[flags] = _checked(made.tables[flags])

    def unplanned(self, bound: Bound, num_tokens: int, stream: int) -> tuple[Table, RunnerLike]:
        """A launcher for one token count outside the plan, as `on_miss` says, and what it launches.

        Raises
            InvalidArgumentError: the spec has other operands than when it was planned.
            NotPlannedError: `on_miss` is "raise", or the stream is under capture.
            ArenaError: the arena is too small for the count.
        """
        made = plan_count(self.plan.spec, num_tokens, bound.flags)
        self._on_miss(f"{num_tokens} tokens", made, stream)
        check_arena(bound.arena, made.workspace, self.device)
        self.load(made, None, False)
        table = _checked(made.tables[bound.flags])
        if table.operands != self._tables[bound.flags].operands:
            raise InvalidArgumentError(
                f"spec: {self.plan.spec.title} has other operands than when it was planned, must "
                "be a frozen value"
            )
        return table, self._bound_runner(table, bound.tensors, bound.arena, made.workspace)

    def _on_miss(self, what: str, made: Plan, stream: int) -> None:
        """Refuse what is not planned, or let it be compiled."""
        miss = self._describe(what, made.keys)
        is_new = self.audit.note(miss)
        if self.driver.is_capturing(stream):
            raise NotPlannedError(f"{miss}; nothing is compiled under CUDA graph capture")
        if self.settings.on_miss == "raise":
            raise NotPlannedError(str(miss))
        if self.settings.on_miss == "warn" and is_new:
            log.warning("%s; compiling it now", miss)

    def _describe(self, what: str, keys: Iterable[LaunchKey]) -> Miss:
        for key in keys:
            if key not in self._functions:
                nearest = nearest_key(key, self.plan.keys)
                differences = () if nearest is None else key.differences(nearest)
                return Miss(what, self.plan.max_tokens, key, nearest, differences)
        return Miss(what, self.plan.max_tokens, None, None, ())


def _checked(table: Table) -> Table:
    """A table whose every entry a launcher can trust; a launcher checks none."""
    counts = [
        [sum(isinstance(argument, RowInteger) for argument in step.arguments) for step in steps]
        for steps in table.sequences
    ]
    check_tables(table.index, table.rows, counts)
    return table


def _load(driver: Driver, context: int, binary: Binary) -> tuple[LoadedFunction, Binary]:
    """Put a kernel on the device. It stays until the process ends: a CUDA graph may hold it."""
    function = driver.load(context, binary.image, binary.symbol, shared_bytes=binary.shared_bytes)
    return function, binary


def _checked_device(device: torch.device | str | int | None, driver: Driver | None) -> torch.device:
    if device is None:
        found = default_device()
    else:
        found = checked_device(torch.device("cuda", device) if isinstance(device, int) else device)
    if found.type != "cuda" and (driver is None or found.type != "cpu"):
        raise UnsupportedError(f"device: got {found}, kernels need a CUDA device")
    return found
