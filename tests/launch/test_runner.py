import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from firesteel.errors import DriverError
from firesteel.launch.runner import (
    MISS,
    PLACE_NAMES,
    check_tables,
    decode_driver_failure,
    native_failure,
)
from tests.launch.rig import run_in_threads
from tests.launch.stage import (
    CALL,
    CONSTANT,
    MAX_PARAMS,
    OTHER_STREAM,
    OUT_OF_MEMORY,
    ROW,
    STREAM,
    UINT64,
    Plan,
    arena_cell,
    num_row_values,
    simple_plan,
)

ROOT = Path(__file__).parent.parent.parent

uint64s = st.one_of(st.sampled_from([0, 1, 2**31, 2**63, UINT64 - 1]), st.integers(0, UINT64 - 1))


def seen(launch):
    return (
        launch.function,
        launch.grid,
        launch.block,
        launch.shared_bytes,
        launch.attributes,
        launch.params,
    )


@st.composite
def launches(draw, function, num_values):
    sources = [CONSTANT, ROW] + [CALL] * (num_values > 0)
    highest = {CONSTANT: None, CALL: num_values - 1, ROW: draw(st.integers(0, 7))}
    num_params = draw(st.sampled_from([0, 1, 3, 10, MAX_PARAMS]))
    rng = draw(st.randoms(use_true_random=False))
    params = []
    for source in (rng.choice(sources) for _ in range(num_params)):
        high = highest[source]
        params.append((source, draw(uint64s) if high is None else rng.randint(0, high)))
    return (
        function,
        draw(st.sampled_from([1, 32, 128, 1024])),
        draw(st.sampled_from([0, 49152, 232448])),
        draw(st.integers(0, 3)),
        tuple(params),
    )


@st.composite
def plans(draw, functions):
    num_values = draw(st.sampled_from([0, 1, 5, 128]))
    # One launch shape a function, since the stub reads as many parameters as a function has.
    of_function = [draw(launches(function, num_values)) for function in functions]
    sequence = st.lists(st.sampled_from(of_function), max_size=16).map(tuple)
    sequences = tuple(draw(st.lists(sequence, min_size=1, max_size=3)))
    grids = st.tuples(
        st.sampled_from([0, 1, 7, 2**31 - 1]), st.integers(0, 65535), st.sampled_from([1, 65535])
    )
    int64s = st.integers(-(2**63), 2**63 - 1)
    chosen = {}
    for num_tokens in draw(st.sets(st.integers(0, 40), min_size=1, max_size=5)):
        number = draw(st.integers(0, len(sequences) - 1))
        rows = []
        for launch in sequences[number]:
            size = num_row_values(launch)
            rows.append((draw(grids), tuple(draw(st.lists(int64s, min_size=size, max_size=size)))))
        chosen[num_tokens] = (number, rows)
    return Plan(sequences, num_values, chosen), of_function


@given(data=st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_launches_arrive_as_planned(kind, stage, data):
    plan, of_function = data.draw(plans(stage.functions))
    for launch in of_function:
        stage.expect_params(launch[0], len(launch[4]))
    check_tables(plan.index, plan.rows, plan.row_counts)
    runner = stage.runner(kind, plan)
    size = plan.num_values
    made = [[0] * len(sequence) for sequence in plan.sequences]
    for num_tokens in range(-1, len(plan.index) + 1):
        stage.driver.reset()
        stream = data.draw(st.sampled_from([0, 1, 2, STREAM, 2**63 - 1]), label="stream")
        call_values = st.integers(-(2**63), UINT64 - 1)
        values = data.draw(st.lists(call_values, min_size=size, max_size=size), label="values")
        if num_tokens not in plan.chosen:
            assert runner.run(num_tokens, stream, *values) == MISS
            assert runner.resolve(num_tokens) == -1
            assert stage.driver.launches() == []
            continue
        expected = list(plan.expected(num_tokens, values))
        sequence, rows = plan.chosen[num_tokens]
        assert runner.resolve(num_tokens) == sequence
        assert runner.run(num_tokens, stream, *values) == len(expected)
        launches = stage.driver.launches()
        assert [seen(launch) for launch in launches] == expected
        assert {(launch.stream, launch.context) for launch in launches} <= {(stream, stage.context)}
        for place, (grid, _) in enumerate(rows):
            made[sequence][place] += 0 not in grid
    assert runner.counts() == tuple(map(tuple, made))
    runner.reset_counts()
    assert runner.counts() == tuple((0,) * len(sequence) for sequence in plan.sequences)


def test_an_empty_sequence_makes_no_launch(kind, stage):
    runner = stage.runner(kind, Plan(((),), 0, {2: (0, [])}))
    assert runner.run(2, STREAM) == 0
    assert runner.resolve(2) == 0
    assert runner.counts() == ((),)


@pytest.mark.parametrize("grid", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (0, 0, 0)])
def test_an_empty_grid_is_left_out_and_the_next_launch_is_made(kind, stage, grid):
    launches = tuple((function, 32, 0, 0, ((ROW, 0),)) for function in stage.functions[:2])
    stage.expect_params(stage.functions[1], 1)
    plan = Plan((launches,), 0, {1: (0, [(grid, (5,)), ((3, 1, 1), (6,))])})
    runner = stage.runner(kind, plan)
    assert runner.run(1, STREAM) == 1
    (launch,) = stage.driver.launches()
    assert (launch.function, launch.grid, launch.params) == (stage.functions[1], (3, 1, 1), (6,))
    assert runner.counts() == ((0, 1),)


@pytest.mark.parametrize("num_tokens", [0, -1, 5, 2**31, 2**63, -(2**63) - 1, 2**200, -(2**200)])
def test_what_is_not_planned_is_a_miss_that_asks_the_driver_nothing(kind, stage, num_tokens):
    runner = stage.runner(kind, simple_plan(stage))
    assert runner.run(num_tokens, STREAM, 0) == MISS
    assert runner.resolve(num_tokens) == -1
    assert stage.driver.calls() == {}


def test_the_current_context_is_used_as_it_is(kind, stage):
    stage.push(stage.context)
    runner = stage.runner(kind, simple_plan(stage, num_launches=3))
    before = stage.driver.calls()
    assert runner.run(2, STREAM, 0) == 3
    after = stage.driver.calls()
    changed = {name: after[name] - before.get(name, 0) for name in after}
    expected = {"cuLaunchKernelEx": 3, "cuCtxGetCurrent": 1}
    assert {name: count for name, count in changed.items() if count} == expected
    assert stage.current() == stage.context


@pytest.mark.parametrize("has_other", [False, True])
def test_another_context_is_put_back(kind, stage, has_other):
    other = stage.driver.context(1) if has_other else None
    runner = stage.runner(kind, simple_plan(stage, num_launches=2))
    stage.driver.reset()
    if other is not None:
        stage.push(other)
    assert runner.run(2, STREAM, 0) == 2
    assert {launch.context for launch in stage.driver.launches()} == {stage.context}
    calls = stage.driver.calls()
    assert calls["cuCtxPushCurrent_v2"] == 1 + has_other
    assert calls["cuCtxPopCurrent_v2"] == 1
    assert stage.current() == other


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_failing_launch_ends_the_call_and_names_its_place(kind, stage, place):
    plan = simple_plan(stage, num_launches=3)
    sequence = list(plan.sequences[0])
    # The driver refuses an unknown function with CUDA_ERROR_INVALID_HANDLE.
    sequence[place] = (8, *sequence[place][1:])
    runner = stage.runner(kind, plan, sequences=(tuple(sequence),))
    code = runner.run(3, STREAM, 0)
    assert code == -(1000 + 64 * 400 + place)
    assert decode_driver_failure(code) == (400, place)
    launches = stage.driver.launches()
    assert [launch.function for launch in launches] == list(stage.functions[:place])
    assert runner.counts() == (tuple(int(i < place) for i in range(3)),)
    assert stage.current() is None
    assert stage.driver.calls()["cuCtxPopCurrent_v2"] == 1


@pytest.mark.parametrize("place", sorted(PLACE_NAMES))
def test_a_failure_around_the_launches_names_its_function(kind, stage, place):
    owner = arena_cell(STREAM)
    runner = stage.runner(kind, simple_plan(stage), owner=owner)
    stage.driver.fail(PLACE_NAMES[place], OUT_OF_MEMORY)
    code = runner.run(1, OTHER_STREAM if "Capturing" in PLACE_NAMES[place] else STREAM, 0)
    assert decode_driver_failure(code) == (OUT_OF_MEMORY, place)
    launched = PLACE_NAMES[place] == "cuCtxPopCurrent_v2"
    assert len(stage.driver.launches()) == launched
    assert owner[0] == STREAM


def test_a_launch_failure_is_told_before_one_of_the_context(kind, stage):
    runner = stage.runner(kind, simple_plan(stage))
    stage.driver.fail("cuLaunchKernelEx", 719)
    stage.driver.fail("cuCtxPopCurrent_v2", OUT_OF_MEMORY)
    assert decode_driver_failure(runner.run(1, STREAM, 0)) == (719, 0)


def test_a_failure_that_lasts_and_one_that_passes(kind, stage):
    runner = stage.runner(kind, simple_plan(stage))
    stage.driver.fail("cuLaunchKernelEx", OUT_OF_MEMORY, times=2)
    codes = [runner.run(1, STREAM, 0) for _ in range(3)]
    assert codes == [-1128, -1128, 1]
    stage.driver.fail("cuLaunchKernelEx", OUT_OF_MEMORY, times=-1)
    assert {runner.run(1, STREAM, 0) for _ in range(5)} == {-1128}


def test_eight_threads_on_one_runner_never_mix_their_parameters(kind, stage):
    num_threads, num_calls, num_values = 8, 60, 20
    params = (*((CALL, i) for i in range(num_values)), (ROW, 0), (CONSTANT, 9))
    launches = tuple((function, 64, 0, 0, params) for function in stage.functions[:2])
    for function in stage.functions[:2]:
        stage.expect_params(function, len(params))
    chosen = {m: (0, [((m, 1, 1), (m,)), ((m, 2, 1), (m,))]) for m in range(1, num_threads + 1)}
    runner = stage.runner(kind, Plan((launches,), num_values, chosen))
    barrier = threading.Barrier(num_threads)
    codes = []

    def call(number):
        barrier.wait()
        for turn in range(num_calls):
            values = [number * 1000 + turn] * num_values
            codes.append(runner.run(number, number, *values))

    run_in_threads([partial(call, i + 1) for i in range(num_threads)])

    assert codes == [2] * (num_threads * num_calls)
    assert runner.counts() == ((num_threads * num_calls,) * 2,)
    turns = {(i + 1, y): [] for i in range(num_threads) for y in (1, 2)}
    for launch in stage.driver.launches():
        number = launch.stream
        value = launch.params[0]
        assert launch.params == (value,) * num_values + (number, 9)
        assert launch.grid[0] == number
        assert value // 1000 == number
        turns[number, launch.grid[1]].append(value % 1000)
    assert set(map(tuple, turns.values())) == {tuple(range(num_calls))}


FORK_PROBE = """
import os, sys
from array import array
from firesteel.launch.runner import FORKED, runner_class
from firesteel.launch.stub import StubDriver

driver = StubDriver.open()
context = driver.context(0)
function = driver.load(context, b"cubin", "f", shared_bytes=0).handle
index, rows = array("i", [0]), array("q", [0, 1, 1, 1])

def make():
    return runner_class(kind)(
        driver_addresses=driver.runner_addresses, context=context, max_tokens=0,
        index=index.buffer_info()[0], rows=rows.buffer_info()[0],
        sequences=(((function, 32, 0, 0, ()),),), num_values=0, owner=0, keep=(index, rows),
    )

def fork(check):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            check()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0

def check_grandchild():
    assert before.run(0, 1) == FORKED
    assert inside.run(0, 1) == FORKED

def check_child():
    global inside
    driver.reset()
    assert before.run(0, 1) == FORKED
    assert before.run(5, 1) == FORKED
    assert driver.calls() == {}
    inside = make()
    assert inside.run(0, 1) == 1
    fork(check_grandchild)

for kind in sys.argv[1:]:
    before = make()
    assert before.run(0, 1) == 1
    fork(check_child)
    assert before.run(0, 1) == 1
    assert make().run(0, 1) == 1
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_fork_ends_the_runners_made_before_it(kinds, stage):
    command = [sys.executable, "-c", FORK_PROBE, *kinds]
    subprocess.run(command, check=True, cwd=ROOT, timeout=60)


class TestLaunchFloor:
    @pytest.fixture
    def floor(self, stage):
        if (reason := native_failure()) is not None:
            pytest.skip(f"the native Runner was not built: {reason}")
        from firesteel.launch._native import launch_floor_ns

        stage.push(stage.context)
        return launch_floor_ns

    def test_launches_as_often_as_it_says(self, stage, floor):
        stage.expect_params(stage.functions[0], 2)
        address = stage.driver.addresses["cuLaunchKernel"]
        took = floor(address, stage.functions[0], 128, 512, (7, UINT64 - 1), STREAM, 100)
        assert 0 < took < 1e9
        launches = stage.driver.launches()
        assert len(launches) == 100
        (launch,) = set(launches)
        assert launch.params == (7, UINT64 - 1)
        assert (launch.grid, launch.block) == ((1, 1, 1), (128, 1, 1))
        assert (launch.shared_bytes, launch.stream) == (512, STREAM)

    def test_a_failure_is_a_driver_error(self, stage, floor):
        stage.driver.fail("cuLaunchKernel", OUT_OF_MEMORY)
        address = stage.driver.addresses["cuLaunchKernel"]
        with pytest.raises(DriverError, match="cuLaunchKernel: got CUresult 2, must be 0"):
            floor(address, stage.functions[0], 128, 0, (), STREAM, 1)

    def test_wrong_arguments(self, stage, floor):
        with pytest.raises(ValueError, match="cu_launch_kernel_address: got 0, must be in"):
            floor(0, stage.functions[0], 128, 0, (), STREAM, 1)
        with pytest.raises(ValueError, match=r"params: got 67 items, must be 0\.\.66"):
            floor(8, stage.functions[0], 128, 0, (0,) * 67, STREAM, 1)


def test_the_stub_remembers_the_last_launches_in_order(kind, stage):
    runner = stage.runner(kind, simple_plan(stage))
    for value in range(4100):
        runner.run(1, STREAM, value)
    seen_values = [launch.params[0] for launch in stage.driver.launches()]
    assert seen_values == list(range(4, 4100))
    assert stage.driver.num_launches() == 4100


@pytest.mark.parametrize("where", ["_claim_arena", "_launch_all"])
def test_an_interrupt_leaves_the_threads_own_context(stage, where):
    """Ctrl-C may come between any two bytecodes of the Python launcher."""
    before = stage.current()
    runner = stage.runner("python", simple_plan(stage), owner=arena_cell())
    launcher = runner.run.__self__

    def interrupt(*_):
        assert stage.current() == stage.context
        raise KeyboardInterrupt

    setattr(launcher, where, interrupt)
    with pytest.raises(KeyboardInterrupt):
        runner.run(1, STREAM, 7)
    assert stage.current() == before != stage.context
    delattr(launcher, where)
    assert runner.run(1, STREAM, 7) == 1
