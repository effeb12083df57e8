"""Timing of candidates on the driver that launches nothing: what is compiled, and what is dropped.

A layer that is told what to write takes the place of one that runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from firesteel.cli.bench.moe_inputs import random_weights
from firesteel.cli.bench.moe_torch import layer_in_float64
from firesteel.cli.tune import measuring, run
from firesteel.cli.tune.candidates import (
    Candidate,
    Group,
    Job,
    groups_of,
    incumbent_of,
    jobs_of,
    with_candidate,
)
from firesteel.cli.tune.measuring import Compiler, LayerBench, OneCount
from firesteel.cli.tune.search import search
from firesteel.errors import DriverError, UnsupportedError
from firesteel.launch import Kernel, LaunchKey, Plan, Ready, plan
from firesteel.launch.binary import Binary
from firesteel.launch.driver import LoadedFunction
from firesteel.launch.stub import StubDriver
from firesteel.moe.layer import MoeLayer
from firesteel.moe.spec import MoeSpec, StoredWeights
from firesteel.moe.tuning import Down, GateUp, Tile
from firesteel.settings import Settings
from tests.launch.rig import pretended, ready_on_stub
from tests.moe.tiles import FIXED

CPU = torch.device("cpu")
SPEC = MoeSpec(hidden_size=256, intermediate_size=96, num_experts=16, top_k=2,
               w2=StoredWeights(group_size=32), table=FIXED)  # fmt: skip
SHARED = 227 * 1024


class Rig:
    """A bench of a job whose compiler, driver, layer and clock are a test's."""

    def __init__(self, folder: Path, count: int) -> None:
        self.dropped: list[str] = []
        self.said: list[str] = []
        self.compiled: list[LaunchKey] = []
        self.shared_bytes = 1024
        self.fails: Callable[[LaunchKey], bool] = lambda key: False
        self.refuses = False
        self.spilled = 0
        self.writes: Callable[[int, Tensor], None] = lambda number, out: None
        self.num_runs = 0
        self.weights = random_weights(SPEC, CPU)
        self.driver = StubDriver.open()
        (self.job,) = jobs_of(SPEC, (count,), ("direct", "sorted"))
        self.incumbent = incumbent_of(SPEC, self.job)
        self.groups = groups_of(SPEC, self.job, SHARED)
        self.bench = LayerBench(
            SPEC,
            self.job,
            self.weights,
            compiler=Compiler("sm_90", folder, SHARED),
            end=time.monotonic() + 60,
            say=self.said.append,
            drop=self.dropped.append,
        )

    def compile_all(
        self,
        wanted: Sequence[tuple[Kernel, LaunchKey]],
        target: str,
        *,
        threads: int,
        done: Callable[[LaunchKey, Binary], None],
    ) -> None:
        del threads
        ((kernel, key),) = wanted
        self.compiled.append(key)
        if self.fails(key):
            raise UnsupportedError("Triton cannot")
        binary = pretended(kernel, key, target)
        object.__setattr__(binary, "shared_bytes", self.shared_bytes)
        done(key, binary)

    def prewarm(self, made: Plan, *, device: torch.device, settings: Settings) -> Ready:
        if self.refuses:
            raise DriverError("cuModuleLoadData: out of resources")
        # Nothing is left to compile.
        ready = ready_on_stub(made, self.driver, settings=settings, compiler=_compiles_nothing)
        assert ready.audit.prewarmed.from_cache == len(made.keys)
        assert device == CPU
        function_of = ready.function

        def function(key: LaunchKey) -> tuple[LoadedFunction, Binary]:
            found, binary = function_of(key)
            return replace(found, local_bytes=self.spilled), binary

        ready.function = function
        return ready

    def run(self, layer: MoeLayer, *tensors: Tensor) -> None:
        x, ids, topk_weights, out = tensors
        assert layer.bounds
        out.copy_(layer_in_float64(SPEC, self.weights, x, ids, topk_weights))
        self.writes(self.num_runs, out)
        self.num_runs += 1


def _compiles_nothing(wanted: Sequence[object], target: str, **_: object) -> None:
    assert not wanted, target


@pytest.fixture(params=[1, 9])
def rig(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(tmp_path, request.param)

    def graph_us(functions: Sequence[partial[None]], *, replays: int) -> list[float]:
        assert functions
        return [100.0] * replays

    with (
        patch.object(measuring, "compile_all", made.compile_all),
        patch.object(measuring, "prewarm", made.prewarm),
        patch.object(measuring, "graph_us", graph_us),
        patch.object(MoeLayer, "run", lambda layer, *tensors: made.run(layer, *tensors)),
    ):
        yield made


def first_candidates(rig: Rig) -> list[Candidate]:
    return list(rig.groups[0].all[:3])


def test_a_right_candidate_is_timed(rig: Rig) -> None:
    candidates = first_candidates(rig)
    rig.bench.prepare(candidates)
    # Kernels that candidates share are compiled once.
    assert len(rig.compiled) == len(set(rig.compiled))
    before = len(rig.compiled)
    for candidate in candidates:
        timing = rig.bench.time(candidate, is_final=False)
        assert timing is not None
        assert timing.us == pytest.approx(100)
    rig.bench.prepare(candidates)
    assert len(rig.compiled) == before
    assert not rig.dropped
    assert not rig.bench.is_over()


def test_a_wrong_first_token_is_named(rig: Rig) -> None:
    rig.writes = lambda number, out: out[0].mul_(1.1)
    rig.bench.prepare([rig.incumbent])
    assert rig.bench.time(rig.incumbent, is_final=False) is None
    (line,) = rig.dropped
    assert "rel_err: " in line
    assert str(rig.incumbent) in line


def test_rows_that_are_not_written_are_named(rig: Rig) -> None:
    rig.writes = lambda number, out: out[-1].fill_(torch.nan)
    rig.bench.prepare([rig.incumbent])
    assert rig.bench.time(rig.incumbent, is_final=False) is None
    assert "nan" in rig.dropped[0]


def test_what_cannot_be_compiled_is_dropped_alone(rig: Rig) -> None:
    start, other, *_ = first_candidates(rig)
    stages = other.tile.gate_up.stages, other.tile.gate_up.warps
    rig.fails = lambda key: (
        key.name == "gate_up_kernel" and (key.num_stages, key.num_warps) == stages
    )
    rig.bench.prepare([start, other])
    assert rig.bench.time(other, is_final=False) is None
    assert "Triton cannot" in rig.dropped[0]
    assert rig.bench.time(start, is_final=False) is not None


def test_too_much_shared_memory_is_dropped(rig: Rig) -> None:
    rig.shared_bytes = SHARED + 1
    rig.bench.prepare([rig.incumbent])
    assert rig.bench.time(rig.incumbent, is_final=False) is None
    assert f"{SHARED + 1} bytes of shared memory, must be at most {SHARED}" in rig.dropped[0]


def test_hoppers_own_kernels_have_all_of_its_shared_memory(rig: Rig, tmp_path: Path) -> None:
    compiler = Compiler("sm_90", tmp_path, SHARED, wgmma_shared_bytes=2 * SHARED)
    rig.shared_bytes = 2 * SHARED
    wgmma = Tile(32, GateUp(64, 4, 3), False, Down(128, 1, 4, 3), is_wgmma=True)
    plans = [
        OneCount(with_candidate(SPEC, candidate), 40).plan()
        for candidate in (Candidate(wgmma), incumbent_of(SPEC, Job("wgmma", (40,))))
    ]
    for made in plans:
        # What both have, as routing, is not what is asked about.
        products = [key for key in made.keys if "gate_up" in key.name or "down" in key.name]
        compiler.compile([replace(made, keys=tuple(products))])
        why = compiler.why_not(replace(made, keys=tuple(products)))
        assert (why is None) == all("wgmma" in key.name for key in products)


def test_what_the_driver_refuses_is_dropped(rig: Rig) -> None:
    rig.bench.prepare([rig.incumbent])
    rig.refuses = True
    assert rig.bench.time(rig.incumbent, is_final=False) is None
    assert "out of resources" in rig.dropped[0]


def test_what_spills_more_than_the_incumbent_is_dropped(rig: Rig) -> None:
    start, other, third = first_candidates(rig)
    rig.bench.prepare([start, other, third])
    rig.spilled = 8
    assert rig.bench.time(start, is_final=False) is not None
    assert rig.bench.time(other, is_final=False) is not None
    rig.spilled = 16
    assert rig.bench.time(third, is_final=False) is None
    assert "spills 16 bytes of registers, the incumbent 8" in rig.dropped[0]


def test_a_search_on_it_keeps_the_incumbent_where_all_are_alike(rig: Rig) -> None:
    first = rig.groups[0]
    group = Group(first.start, first.gate_up[:4], first.down[:4])
    found = search(rig.job, rig.incumbent, [group], rig.bench)
    assert found.chosen == rig.incumbent
    # Both products' best are the start, so that there is no pair of them left to time.
    assert found.timed == 9
    assert any("compiling for" in text for text in rig.said)


@pytest.mark.parametrize("rig", [9], indirect=True)
def test_a_row_past_those_of_the_oracle_is_compared_with_the_incumbents(rig: Rig) -> None:
    start, other, *_ = first_candidates(rig)
    rig.bench.prepare([start, other])
    assert rig.bench.time(start, is_final=False) is not None
    rig.writes = lambda number, out: out[-1].mul_(1.1)
    assert rig.bench.time(other, is_final=False) is None
    assert "off the incumbent's at 9 tokens" in rig.dropped[0]


@pytest.mark.parametrize("rig", [1], indirect=True)
@pytest.mark.parametrize("seconds", [60, -1])
def test_every_job_is_done_or_skipped_and_noted(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, seconds: int
) -> None:
    monkeypatch.setattr(run, "device_target", lambda device: "sm_90")

    def few(spec: MoeSpec, job: Job, shared_bytes: int) -> list[Group]:
        group = next(g for g in groups_of(spec, job, shared_bytes) if g.gate_up)
        return [Group(group.start, group.gate_up[:2], group.down[:1])]

    notes: list[str] = []
    sizes = (40, 1, 9)
    found = run.tune_layer(
        SPEC,
        sizes,
        CPU,
        shared_bytes=SHARED,
        end=time.monotonic() + seconds,
        say=rig.said.append,
        note=notes.append,
        groups=few,
    )
    assert [each.job for each in found] == list(jobs_of(SPEC, sizes))
    assert [each.job.mode for each in found] == [
        mode for other in ("direct", "sorted", "sorted") for mode in (other, "wgmma")
    ]
    for each, note in zip(found, notes, strict=True):
        assert each.chosen == each.incumbent
        is_wgmma = each.job.mode == "wgmma"
        assert each.skipped == (0 if seconds > 0 else 3 + is_wgmma)
        # The candidates, and perhaps what an earlier job took or the table has.
        assert each.timed in ((4, 5, 6) if seconds > 0 else (1,))
        words = "none" if is_wgmma and seconds > 0 else "as before"
        assert ("skipped for time" in note) == (seconds < 0)
        assert note.startswith(f"{each.job}: 100.0 us, then 100.0 us, {words}; ")


@pytest.mark.parametrize("count", [1, 40])
def test_one_count_is_that_of_the_layers_plan(count: int) -> None:
    whole, alone = plan(SPEC, 64, flags={"ids": ["i32"]}), OneCount(SPEC, count).plan()
    (flags,) = alone.tables
    assert alone.tables[flags].resolve(count) == whole.tables[flags].resolve(count)
    assert set(alone.keys) <= set(whole.keys)
    assert all(alone.tables[flags].resolve(m) == () for m in range(count))
    assert alone.max_tokens == count
    assert alone.as_dict()["spec"]["num_tokens"] == count
