"""Whole calls and single launches of the indexer, planned and bound against a stub driver."""

from __future__ import annotations

import pytest
import torch

from firesteel.cli.bench import indexer_operation
from firesteel.cli.bench.indexer_cases import CASES, Case
from firesteel.cli.bench.indexer_inputs import random_inputs
from firesteel.cli.bench.indexer_operation import OneLaunch, Operation
from firesteel.errors import UnsupportedError
from firesteel.indexer.plan import MAX_WORKSPACE
from firesteel.launch import Plan, Ready, plan
from firesteel.launch.stub import StubDriver
from tests.launch.rig import ready_on_stub

CPU = torch.device("cpu")
DECODE = Case(name="decode", requests=2, rows=3, heads=8, context=40_000, top_k=2048)
PREFILL = Case(name="prefill", mode="prefill", requests=1, rows=20, heads=8, context=9000)


@pytest.mark.parametrize("name", ["turnkey-8k", "turnkey-1m", "batch-131k", "prefill-32k"])
def test_launches_alone_are_those_of_the_whole(name: str) -> None:
    case = CASES[name]
    spec, count = case.spec(), min(case.count, 20)
    whole = plan(spec, count)
    (table,) = whole.tables.values()
    launches = table.launches(count)
    assert len(launches) == len(spec.select(count, ())) > 1
    for place, launch in enumerate(launches):
        alone = plan(OneLaunch(spec, place), count)
        (own,) = alone.tables.values()
        assert own.launches(count) == [launch]
        assert alone.workspace == whole.workspace
        assert own.operands == table.operands
    beyond = plan(OneLaunch(spec, len(launches)), count)
    assert not beyond.keys


def test_a_context_of_a_million_tokens_keeps_to_the_bound_of_memory() -> None:
    for name in ("turnkey-1m", "prefill-1m"):
        made = plan(CASES[name].spec(), 8)
        assert 0 < made.workspace.num_bytes <= MAX_WORKSPACE


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> StubDriver:
    try:
        made = StubDriver.open()
    except UnsupportedError as error:
        pytest.skip(str(error))
    made.reset()

    def prewarm(planned: Plan, *, device: torch.device) -> Ready:
        assert device == CPU
        return ready_on_stub(planned, made)

    monkeypatch.setattr(indexer_operation, "prewarm", prewarm)
    monkeypatch.setattr(indexer_operation, "device_target", lambda _: "sm_90")
    return made


@pytest.mark.parametrize("case", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_a_call_launches_all_and_each_alone_with_the_same_memory(
    case: Case, driver: StubDriver
) -> None:
    operation = Operation(case.spec(), case.count, CPU)
    inputs = random_inputs(case, CPU, 1)[0]
    call = operation.call(inputs)
    assert set(call.outputs) == {"indices"}
    before = len(driver.launches())
    call.run()
    whole = driver.launches()[before:]
    expected = operation.spec.select(case.count, ())
    assert operation.workspace_bytes == plan(case.spec(), case.count).workspace.num_bytes
    assert [each.grid for each in whole] == [launch.grid for launch in expected]
    assert operation.spec.pdl
    for (said, alone), launched, launch in zip(operation.launches(), whole, expected, strict=True):
        assert said["grid"] == list(launch.grid)
        assert f"{said['kernel']}_kernel" == launch.key.name
        again = alone.call(inputs)
        before = len(driver.launches())
        again.run()
        (one,) = driver.launches()[before:]
        assert one.grid == launched.grid
        # The same inputs, workspace and integers; only the outputs are others.
        moved = {t.data_ptr() for t in (*call.outputs.values(), *again.outputs.values())}
        pairs = zip(one.params, launched.params, strict=True)
        assert all(a == b or {a, b} <= moved for a, b in pairs)
