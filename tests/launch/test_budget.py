"""What a steady call costs, counted and not timed: bytecodes, C calls, driver calls.

Counts are the same on every machine and on a busy one; they depend on Python's version a little.
"""

import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest

from firesteel.launch import Bound, Plan, plan
from firesteel.launch.stub import StubDriver
from firesteel.moe.layer import MoeLayer
from firesteel.moe.spec import MoeSpec
from tests.launch.rig import call_of, ready_on_stub, tensors_of

SPEC = MoeSpec(hidden_size=256, intermediate_size=128, num_experts=64, top_k=8)
FLAGS = (("ids", "i32"),)
# CPython 3.11 takes 217 and 18; a loop over operands took half as much again.
MAX_BYTECODES, MAX_C_CALLS, MAX_PYTHON_CALLS = 250, 24, 3


def _counted(function: Any, *arguments: Any) -> Counter[str]:
    """Bytecodes, C calls and Python calls of one call."""
    found: Counter[str] = Counter()

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        del argument
        frame.f_trace_opcodes = True
        found["python"] += event == "call"
        found["bytecodes"] += event == "opcode"
        return trace

    def profile(frame: FrameType, event: str, argument: object) -> None:
        del frame, argument
        found["c"] += event == "c_call"

    sys.setprofile(profile)
    sys.settrace(trace)
    try:
        function(*arguments)
    finally:
        sys.settrace(None)
        sys.setprofile(None)
    return found


@pytest.fixture
def driver() -> StubDriver:
    made = StubDriver.open()
    made.reset()
    return made


@pytest.fixture(scope="module")
def made() -> Plan:
    return plan(SPEC, 3072)


@pytest.fixture
def bound(made: Plan, driver: StubDriver) -> Bound:
    ready = ready_on_stub(made, driver)
    return ready.bind(tensors_of(SPEC, FLAGS), ready.arena(), ids="i32")


@pytest.mark.parametrize("num_tokens", [1, 8, 64, 3072])
def test_a_call_takes_few_bytecodes_at_any_count(bound: Bound, num_tokens: int) -> None:
    call = call_of(SPEC, FLAGS, num_tokens)
    bound.run(*call)
    found = _counted(bound.run, *call)
    assert found["bytecodes"] <= MAX_BYTECODES, found
    assert found["c"] <= MAX_C_CALLS, found
    assert found["python"] <= MAX_PYTHON_CALLS, found


def test_a_layer_adds_little_to_a_call(made: Plan, driver: StubDriver) -> None:
    ready = ready_on_stub(made, driver)
    layer = MoeLayer(ready, tensors_of(SPEC, FLAGS), ready.arena())
    call = call_of(SPEC, FLAGS, 64)
    layer.run(*call)
    found = _counted(layer.run, *call)
    assert found["bytecodes"] <= MAX_BYTECODES + 30, found
    assert found["python"] <= MAX_PYTHON_CALLS + 1, found


def test_the_driver_is_asked_once_a_launch_and_once_a_call(
    bound: Bound, driver: StubDriver
) -> None:
    call = call_of(SPEC, FLAGS, 64)
    with driver.current(driver.context(0)):
        # The first one asks whether the stream captures, and takes the arena.
        bound.run(*call)
        before = driver.calls()
        for _ in range(10):
            bound.run(*call)
        calls = {name: n - before.get(name, 0) for name, n in driver.calls().items()}
    asked = {name: count for name, count in calls.items() if count}
    launches = len(bound.resolve(64))
    assert asked == {"cuLaunchKernelEx": 10 * launches, "cuCtxGetCurrent": 10}


def test_resolving_a_count_is_one_c_call(bound: Bound) -> None:
    nothing = _counted(lambda number: number, 64)
    found = _counted(bound.runner.resolve, 64)
    assert found["c"] <= nothing["c"] + 1
    assert found["python"] <= nothing["python"]
