"""Whole calls and first launches of the indexer, planned and bound against a stub driver."""

from __future__ import annotations

import pytest
import torch

from firesteel.cli.bench import indexer_operation
from firesteel.cli.bench.indexer_cases import CASES, Case
from firesteel.cli.bench.indexer_inputs import random_inputs
from firesteel.cli.bench.indexer_operation import FirstLaunches, Operation
from firesteel.errors import UnsupportedError
from firesteel.indexer.plan import MAX_WORKSPACE
from firesteel.launch import Plan, Ready, plan
from firesteel.launch.stub import StubDriver
from tests.launch.rig import ready_on_stub

CPU = torch.device("cpu")
DECODE = Case(name="decode", requests=2, rows=3, heads=8, context=40_000, top_k=2048)
PREFILL = Case(name="prefill", mode="prefill", requests=1, rows=20, heads=8, context=9000)


@pytest.mark.parametrize("name", ["turnkey-8k", "turnkey-1m", "batch-131k", "prefill-32k"])
def test_first_launches_are_those_of_the_whole(name: str) -> None:
    case = CASES[name]
    spec, count = case.spec(), min(case.count, 20)
    whole = plan(spec, count)
    (table,) = whole.tables.values()
    launches = table.launches(count)
    assert len(launches) == len(spec.select(count, ())) > 1
    for number in range(1, len(launches) + 1):
        until = plan(FirstLaunches(spec, number), count)
        (own,) = until.tables.values()
        assert own.launches(count) == launches[:number]
        assert until.workspace == whole.workspace
        assert own.operands == table.operands


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
def test_a_call_launches_all_and_its_first_with_the_same_memory(
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
    for place, (said, until) in enumerate(operation.launches()):
        assert said["grid"] == list(expected[place].grid)
        assert f"{said['kernel']}_kernel" == expected[place].key.name
        again = until.call(inputs)
        before = len(driver.launches())
        again.run()
        made = driver.launches()[before:]
        assert [one.grid for one in made] == [each.grid for each in whole[: place + 1]]
        # The same inputs, workspace and integers; only the outputs are others.
        moved = {t.data_ptr() for t in (*call.outputs.values(), *again.outputs.values())}
        for one, launched in zip(made, whole, strict=False):
            pairs = zip(one.params, launched.params, strict=True)
            assert all(a == b or {a, b} <= moved for a, b in pairs)


def test_a_slice_s_launches_stand_for_those_of_all(driver: StubDriver) -> None:
    case = Case(name="sliced", mode="prefill", requests=1, rows=600, heads=8, context=131_072)
    operation = Operation(case.spec(), case.count, CPU)
    assert len(operation.spec.select(case.count, ())) == 6
    names = [said["kernel"].removesuffix("_wgmma") for said, _ in operation.launches()]
    assert names == ["range_scores", "range_select"]
