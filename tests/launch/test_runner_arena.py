"""Who may launch on an arena, and that the launches of two calls on one do not mix."""

import ctypes
import os
import subprocess
import sys
import threading
import time
from itertools import groupby
from pathlib import Path

import pytest

from firesteel.launch.runner import FOREIGN_STREAM
from tests.launch.stage import CALL, OTHER_STREAM, STREAM, Plan, arena_cell, simple_plan

ROOT = Path(__file__).parent.parent.parent


def slow_driver(stage):
    """The driver's functions, of which the launching one first lets other threads run.

    And what has to live as long as they do.
    """
    launch, *others = stage.driver.runner_addresses
    function = ctypes.CFUNCTYPE(ctypes.c_int, *(ctypes.c_void_p,) * 4)
    forward = function(launch)

    @function
    def launch_later(*arguments):
        time.sleep(1e-6)
        return forward(*arguments)

    address = ctypes.cast(launch_later, ctypes.c_void_p).value
    return (address, *others), launch_later


def test_a_free_arena_becomes_the_streams(kind, stage):
    owner = arena_cell()
    runner = stage.runner(kind, simple_plan(stage), owner=owner)
    assert runner.run(1, STREAM, 0) == 1
    assert owner[0] == STREAM
    stage.driver.reset()
    stage.push(stage.context)
    assert runner.run(1, STREAM, 0) == 1
    expected = {"cuCtxPushCurrent_v2": 1, "cuCtxGetCurrent": 1, "cuLaunchKernelEx": 1}
    assert stage.driver.calls() == expected


def test_a_foreign_stream_launches_nothing(kind, stage):
    owner = arena_cell(STREAM)
    runner = stage.runner(kind, simple_plan(stage), owner=owner)
    assert runner.run(1, OTHER_STREAM, 0) == FOREIGN_STREAM
    assert stage.driver.launches() == []
    assert owner[0] == STREAM
    assert stage.current() is None
    owner[0] = -1
    assert runner.run(1, OTHER_STREAM, 0) == 1
    assert owner[0] == OTHER_STREAM


@pytest.mark.parametrize("before", [-1, STREAM])
def test_a_capturing_stream_passes_and_never_owns(kind, stage, before):
    owner = arena_cell(before)
    runner = stage.runner(kind, simple_plan(stage), owner=owner)
    stage.driver.set_capturing(OTHER_STREAM, True)
    assert runner.run(1, OTHER_STREAM, 0) == 1
    assert owner[0] == before


def test_without_an_arena_every_stream_passes_and_none_is_asked(kind, stage):
    runner = stage.runner(kind, simple_plan(stage))
    for stream in (0, STREAM, OTHER_STREAM):
        assert runner.run(1, stream, 0) == 1
    assert "cuStreamIsCapturing" not in stage.driver.calls()


def test_threads_on_different_streams_cannot_both_claim_an_arena(kind, stage):
    plan = simple_plan(stage)
    for _ in range(50):
        owner = arena_cell()
        runner = stage.runner(kind, plan, owner=owner)
        barrier = threading.Barrier(4)
        codes = {}

        def claim(stream, runner=runner, barrier=barrier, codes=codes):
            barrier.wait()
            codes[stream] = runner.run(1, stream, 0)

        threads = [threading.Thread(target=claim, args=(stream,)) for stream in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        winners = [stream for stream, code in codes.items() if code == 1]
        assert winners == [owner[0]]
        assert sorted(codes.values()) == [FOREIGN_STREAM] * 3 + [1]


@pytest.mark.parametrize("is_capturing", [False, True])
def test_calls_of_two_runners_on_one_arena_do_not_mix(kind, stage, is_capturing):
    num_launches, num_calls = 8, 50
    function = stage.functions[0]
    stage.expect_params(function, 1)
    launches = ((function, 32, 0, 0, ((CALL, 0),)),) * num_launches
    plan = Plan((launches,), 1, {1: (0, [((1, 1, 1), ())] * num_launches)})
    owner = arena_cell()
    # The native launcher's lock is the interpreter's, which the real driver never gives up.
    functions, held = (
        (stage.driver.runner_addresses, None) if kind == "native" else slow_driver(stage)
    )
    runners = [
        stage.runner(kind, plan, owner=owner, held=(held,), driver_addresses=functions)
        for _ in range(2)
    ]
    # Streams that capture pass without owning it, and so may be of two kinds of work.
    streams = (STREAM, OTHER_STREAM) if is_capturing else (STREAM, STREAM)
    for stream in set(streams):
        stage.driver.set_capturing(stream, is_capturing)
    barrier = threading.Barrier(2)
    codes = []

    def call(number):
        barrier.wait()
        for turn in range(num_calls):
            codes.append(runners[number].run(1, streams[number], number * num_calls + turn))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert codes == [num_launches] * (2 * num_calls)
    values = [launch.params[0] for launch in stage.driver.launches()]
    assert len(values) == 2 * num_calls * num_launches
    runs = [(value, len(list(group))) for value, group in groupby(values)]
    assert sorted(runs) == [(value, num_launches) for value in range(2 * num_calls)]
    assert [runner.counts() for runner in runners] == [((num_calls,) * num_launches,)] * 2
    assert owner[1] == 0


def test_a_failed_launch_leaves_the_arena_to_the_next_call(kind, stage):
    owner = arena_cell()
    first, second = (stage.runner(kind, simple_plan(stage), owner=owner) for _ in range(2))
    stage.driver.fail("cuLaunchKernelEx", 719)
    assert first.run(1, STREAM, 0) < -1000
    result = []
    thread = threading.Thread(target=lambda: result.append(second.run(1, STREAM, 0)), daemon=True)
    thread.start()
    thread.join(10)
    assert result == [1]


BUSY_FORK_PROBE = """
import os, signal, sys, threading
from array import array
from firesteel.launch.runner import FORKED, runner_class
from firesteel.launch.stub import StubDriver

driver = StubDriver.open()
context = driver.context(0)
function = driver.load(context, b"cubin", "f", shared_bytes=0).handle
index, rows = array("i", [0]), array("q", [0] + [1, 1, 1] * 16)

def make():
    return runner_class(kind)(
        driver_addresses=driver.runner_addresses, context=context, max_tokens=0,
        index=index.buffer_info()[0], rows=rows.buffer_info()[0],
        sequences=(((function, 32, 0, 0, ()),) * 16,), num_values=0,
        owner=cell.buffer_info()[0], keep=(cell, index, rows),
    )

def launch():
    while not is_done.is_set():
        before.run(0, 1)

sys.setswitchinterval(1e-6)
for kind in sys.argv[1:]:
    cell = array("q", [-1, 0])
    before = make()
    is_done = threading.Event()
    thread = threading.Thread(target=launch)
    thread.start()
    try:
        for _ in range(20):
            child = os.fork()
            if child == 0:
                # Ends a child that waits for ever; a handler of Python's would never get its turn.
                signal.alarm(10)
                code = 1
                try:
                    code = int((before.run(0, 1), make().run(0, 1)) != (FORKED, 16))
                finally:
                    os._exit(code)
            assert os.waitpid(child, 0)[1] == 0, kind
    finally:
        is_done.set()
        thread.join()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_fork_while_another_thread_launches_leaves_the_arena_free(kinds, stage):
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", BUSY_FORK_PROBE, *kinds]
    subprocess.run(command, check=True, cwd=ROOT, timeout=120)
