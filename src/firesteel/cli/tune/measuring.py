"""Times candidates on a GPU: whole calls of the layer, by plan, prewarm, bind and run.

A candidate is a table of one tile, so that what is timed is what a plan with it would launch. Its
output is compared with float64 on the first tokens, and with the incumbent's on all.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from firesteel.cli.bench.moe_inputs import Call, random_call, routings_of
from firesteel.cli.bench.moe_torch import MAX_ERROR, first_tokens_in_float64, relative_error
from firesteel.cli.bench.timing import graph_us
from firesteel.cli.tune.candidates import Candidate, Job, with_candidate
from firesteel.cli.tune.search import Timing
from firesteel.errors import DriverError, UnsupportedError
from firesteel.launch import Arena, Flags, Kernel, Launch, LaunchKey, Operand, Plan, Region, plan
from firesteel.launch.binary import Binary, compile_all
from firesteel.launch.ready import prewarm
from firesteel.launch.store import Cache
from firesteel.moe.layer import MoeLayer
from firesteel.moe.products import HOPPER
from firesteel.moe.spec import MoeSpec
from firesteel.settings import Settings

__all__ = ["Compiler", "LayerBench", "OneCount"]

_REPLAYS, _FINAL_REPLAYS = 7, 25


class OneCount:
    """A layer's calls of one token count: a plan of no other is quick to make."""

    def __init__(self, spec: MoeSpec, num_tokens: int) -> None:
        self.spec = spec
        self.num_tokens = num_tokens
        self._regions = spec.workspace(num_tokens)

    @property
    def title(self) -> str:
        """The layer's, and the count."""
        return f"{self.spec.title}, {self.num_tokens} tokens alone"

    def flags(self) -> dict[str, tuple[str, ...]]:
        """The layer's."""
        return dict(self.spec.flags())

    def operands(self, flags: Flags) -> tuple[Operand, ...]:
        """The layer's."""
        return self.spec.operands(flags)

    def workspace(self, num_tokens: int) -> tuple[Region, ...]:
        """That of the one count, at all."""
        del num_tokens
        return self._regions

    def select(self, num_tokens: int, flags: Flags) -> tuple[Launch, ...]:
        """The layer's launches of the one count, none of others."""
        return self.spec.select(num_tokens, flags) if num_tokens == self.num_tokens else ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"spec": self.spec.as_dict(), "num_tokens": self.num_tokens}

    def plan(self) -> Plan:
        """The plan of it."""
        return plan(self, self.num_tokens, flags={"ids": ["i32"]})


class Compiler:
    """Compiles the kernels of plans, each once, into a cache from which `prewarm` takes them.

    Args:
        target: as "sm_90".
        folder: of the cache.
        shared_bytes: that a program may have.
        wgmma_shared_bytes: that one of Hopper's own kernels may have; as others by default.
    """

    def __init__(
        self,
        target: str,
        folder: Path,
        shared_bytes: int,
        *,
        wgmma_shared_bytes: int | None = None,
    ) -> None:
        self.settings = replace(Settings.from_env(), bundle=None, cache="on", cache_dir=folder)
        self.num_compiled = 0
        self._target = target
        self._cache = Cache(self.settings.cache_path)
        self._shared_bytes = shared_bytes
        self._wgmma_shared_bytes = wgmma_shared_bytes or shared_bytes
        # Of each key why it cannot be used, or None.
        self._known: dict[LaunchKey, str | None] = {}

    def compile(self, plans: Sequence[Plan]) -> None:
        """Compile what is not known yet, as many at once as there are CPUs."""
        missing = {
            key: made.kernels[key.kernel]
            for made in plans
            for key in made.keys
            if key not in self._known
        }
        threads = self.settings.compile_threads or os.cpu_count() or 1
        with ThreadPoolExecutor(threads) as pool:
            # One by one: that one cannot be compiled must not end the others.
            reasons = pool.map(self._compile, missing.values(), missing)
            self._known.update(zip(missing, reasons, strict=True))
        self.num_compiled += len(missing)

    def _compile(self, kernel: Kernel, key: LaunchKey) -> str | None:
        found: list[Binary] = []
        try:
            wanted = [(kernel, key)]
            compile_all(wanted, self._target, threads=1, done=lambda _, made: found.append(made))
        except UnsupportedError as error:
            return str(error)
        (binary,) = found
        most = self._wgmma_shared_bytes if kernel in HOPPER else self._shared_bytes
        if binary.shared_bytes > most:
            return (
                f"{key.name}: {binary.shared_bytes} bytes of shared memory, must be at most {most}"
            )
        self._cache.write(binary)
        return None

    def why_not(self, made: Plan) -> str | None:
        """Why a plan that was compiled cannot be run; None if it can."""
        return next((why for key in made.keys if (why := self._known[key]) is not None), None)


class LayerBench:
    """Times the candidates of one job; see `firesteel.cli.tune.search.Bench`.

    Args:
        spec: the layer, with the table to start from.
        job: what is chosen for.
        weights: of the layer, on the GPU.
        compiler: shared by all jobs.
        end: of `time.monotonic()`, after which no candidate is begun.
        say: told what runs.
        drop: told what is wrong with a candidate.
    """

    def __init__(
        self,
        spec: MoeSpec,
        job: Job,
        weights: dict[str, Tensor],
        *,
        compiler: Compiler,
        end: float,
        say: Callable[[str], None],
        drop: Callable[[str], None],
    ) -> None:
        self._spec = spec
        self._job = job
        self._weights = weights
        self._compiler = compiler
        self._end = end
        self._say = say
        self._drop = drop
        self._device = next(iter(weights.values())).device
        self._calls = {
            count: [
                random_call(spec, count, self._device, seed=seed)
                for seed in range(routings_of(count))
            ]
            for count in job.counts
        }
        self._expected = {
            count: first_tokens_in_float64(spec, weights, calls[0])
            for count, calls in self._calls.items()
        }
        # By count, of the first candidate that was right: the incumbent. What it gave, and the
        # bytes of registers that it spills, which no other may exceed.
        self._outputs: dict[int, Tensor] = {}
        self._spilled: dict[int, int] = {}
        self._made: dict[Candidate, list[Plan]] = {}
        self._arena: Arena | None = None
        self._timed = 0

    def is_over(self) -> bool:
        """Whether the time for this job is used up."""
        return time.monotonic() > self._end

    def prepare(self, candidates: Sequence[Candidate]) -> None:
        """Compile the kernels of all of them at once."""
        self._say(f"{self._job}: compiling for {len(candidates)} candidates")
        self._compiler.compile([made for c in candidates for made in self._plans(c)])

    def time(self, candidate: Candidate, *, is_final: bool) -> Timing | None:
        """Microseconds of a call; None of a candidate that is wrong or cannot run, and says so."""
        self._timed += 1
        self._say(f"{self._job}: candidate {self._timed}")
        timings: list[Timing] = []
        for made in self._plans(candidate):
            reason = self._compiler.why_not(made)
            found = reason if reason is not None else self._time(made, is_final)
            if isinstance(found, str):
                self._drop(f"{self._job}: dropped {candidate}: {found}")
                return None
            timings.append(found)
        mean = math.exp(statistics.mean(math.log(timing.us) for timing in timings))
        return Timing(mean, max(timing.spread for timing in timings))

    def _plans(self, candidate: Candidate) -> list[Plan]:
        if candidate not in self._made:
            spec = with_candidate(self._spec, candidate)
            self._made[candidate] = [OneCount(spec, count).plan() for count in self._job.counts]
        return self._made[candidate]

    def _time(self, made: Plan, is_final: bool) -> Timing | str:
        """A timing, or what is wrong."""
        count = made.max_tokens
        calls = self._calls[count]
        try:
            ready = prewarm(made, device=self._device, settings=self._compiler.settings)
            layer = MoeLayer(ready, self._weights, self._arena_for(made))
            spilled = max(ready.function(key)[0].local_bytes for key in made.keys)
            wrong = self._what_is_wrong(layer, calls[0], count, spilled)
        except DriverError as error:
            return str(error)
        if wrong is not None:
            return wrong
        replays = _FINAL_REPLAYS if is_final else _REPLAYS
        times = graph_us([partial(layer.run, *call.tensors) for call in calls], replays=replays)
        fifths = statistics.quantiles(times, n=5)
        us = statistics.median(times)
        return Timing(us, (fifths[3] - fifths[0]) / us)

    def _arena_for(self, made: Plan) -> Arena:
        num_bytes = made.workspace.num_bytes
        if self._arena is None or self._arena.num_bytes < num_bytes:
            # A little more: those that follow need about as much.
            self._arena = Arena.allocate(num_bytes * 5 // 4, self._device)
        return self._arena

    def _what_is_wrong(self, layer: MoeLayer, call: Call, count: int, spilled: int) -> str | None:
        call.out.fill_(math.nan)
        layer.run(*call.tensors)
        expected = self._expected[count]
        error = relative_error(call.out[: expected.shape[0]], expected)
        # Not `>`: an output that was not written is NaN.
        if not error <= MAX_ERROR:
            return f"rel_err: {error:.4g} at {count} tokens, must be at most {MAX_ERROR}"
        if count not in self._outputs:
            self._outputs[count] = call.out.clone()
            self._spilled[count] = spilled
        if spilled > self._spilled[count]:
            return f"spills {spilled} bytes of registers, the incumbent {self._spilled[count]}"
        known = self._outputs[count].float()
        rows = (call.out.float() - known).norm(dim=1) / known.norm(dim=1)
        worst = float(rows.max())
        if not worst <= MAX_ERROR:
            return f"a row is {worst:.4g} off the incumbent's at {count} tokens"
        return None
