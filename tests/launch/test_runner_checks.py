"""What `run` and a Runner refuse, what it keeps alive, and which kind there is."""

import gc
import inspect
import sys
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firesteel.errors import InvalidArgumentError, UnsupportedError
from firesteel.launch import runner as runner_module
from firesteel.launch.runner import (
    FOREIGN_STREAM,
    FORKED,
    MISS,
    decode_driver_failure,
    default_kind,
    native_failure,
    runner_class,
)
from tests.launch.stage import STREAM, UINT64, simple_plan


@given(result=st.integers(1, 2**20), place=st.integers(0, 63))
def test_every_failure_code_is_decoded(result, place):
    assert decode_driver_failure(-(1000 + 64 * result + place)) == (result, place)


@pytest.mark.parametrize("code", [3, 0, MISS, FOREIGN_STREAM, FORKED, -1000, -1063])
def test_other_codes_are_not_decoded(code):
    with pytest.raises(InvalidArgumentError, match=rf"code: got {code}, must be -1064 or less"):
        decode_driver_failure(code)


class Indexable:
    """Would be taken for an integer by an eager reader, as a GPU tensor would."""

    def __index__(self):
        raise AssertionError("__index__ was called")

    def __repr__(self):
        return "Indexable()"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((1, STREAM), TypeError, "run: got 0 values, must be 1"),
        ((1, STREAM, 0, 0), TypeError, "run: got 2 values, must be 1"),
        (("1", STREAM, 0), TypeError, "num_tokens: got '1', must be an int"),
        ((1.0, STREAM, 0), TypeError, "num_tokens: got 1.0, must be an int"),
        ((Indexable(), STREAM, 0), TypeError, "num_tokens: got Indexable(), must be an int"),
        ((1, None, 0), TypeError, "stream: got None, must be an int"),
        ((1, Indexable(), 0), TypeError, "stream: got Indexable(), must be an int"),
        ((1, -1, 0), ValueError, f"stream: got -1, must be in 0..{2**63 - 1}"),
        ((1, 2**63, 0), ValueError, f"stream: got {2**63}, must be in 0..{2**63 - 1}"),
        ((1, STREAM, None), TypeError, "values[0]: got None, must be an int"),
        ((1, STREAM, 1.0), TypeError, "values[0]: got 1.0, must be an int"),
        ((1, STREAM, Indexable()), TypeError, "values[0]: got Indexable(), must be an int"),
        (
            (1, STREAM, UINT64),
            ValueError,
            f"values[0]: got {UINT64}, must be in {-(2**63)}..{UINT64 - 1}",
        ),
        (
            (1, STREAM, -(2**63) - 1),
            ValueError,
            f"values[0]: got {-(2**63) - 1}, must be in {-(2**63)}..{UINT64 - 1}",
        ),
    ],
)
def test_wrong_arguments_of_run_launch_nothing(kind, stage, arguments, error, message):
    runner = stage.runner(kind, simple_plan(stage))
    with pytest.raises(error) as raised:
        runner.run(*arguments)
    assert str(raised.value) == message
    assert stage.driver.calls() == {}


def test_run_and_resolve_want_their_arguments_by_position(kind, stage):
    runner = stage.runner(kind, simple_plan(stage, num_values=0))
    for wrong in (runner.run, lambda: runner.run(1), runner.resolve):
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(TypeError):
        runner.run(num_tokens=1, stream=STREAM)
    with pytest.raises(TypeError, match=r"num_tokens: got '1', must be an int"):
        runner.resolve("1")


LAUNCH = (16, 32, 0, 0, ())


def with_params(*params):
    return {"sequences": (((16, 32, 0, 0, params),),)}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"driver_addresses": [1] * 5}, TypeError, "driver_addresses: got [1, 1, 1, 1, 1], must"),
        (
            {"driver_addresses": (1,) * 4},
            InvalidArgumentError,
            "driver_addresses: got 4 items, must be 5..5",
        ),
        (
            {"driver_addresses": (1, 1, 0, 1, 1)},
            InvalidArgumentError,
            "driver_addresses[2]: got 0, must be",
        ),
        ({"context": 0}, InvalidArgumentError, f"context: got 0, must be in 1..{2**63 - 1}"),
        ({"context": None}, TypeError, "context: got None, must be an int"),
        (
            {"max_tokens": -1},
            InvalidArgumentError,
            f"max_tokens: got -1, must be in 0..{2**31 - 2}",
        ),
        ({"max_tokens": 2**31}, InvalidArgumentError, f"max_tokens: got {2**31}, must be in 0"),
        ({"index": 0}, InvalidArgumentError, "index: got 0, must be in 1.."),
        ({"index": 6}, InvalidArgumentError, "index: got 6, must be a multiple of 4"),
        ({"rows": 4}, InvalidArgumentError, "rows: got 4, must be a multiple of 8"),
        ({"rows": 8.0}, TypeError, "rows: got 8.0, must be an int"),
        ({"num_values": 129}, InvalidArgumentError, "num_values: got 129, must be in 0..128"),
        ({"owner": 12}, InvalidArgumentError, "owner: got 12, must be a multiple of 8"),
        ({"owner": -1}, InvalidArgumentError, "owner: got -1, must be in 0.."),
        ({"keep": None}, TypeError, "keep: got None, must be a tuple"),
        ({"sequences": []}, TypeError, "sequences: got [], must be a tuple"),
        ({"sequences": ([],)}, TypeError, "sequences[0]: got [], must be a tuple"),
        (
            {"sequences": ((LAUNCH,) * 1025,)},
            InvalidArgumentError,
            "sequences[0]: got 1025 items, must be 0..1024",
        ),
        ({"sequences": ((), (7,))}, TypeError, "sequences[1][0]: got 7, must be a tuple"),
        (
            {"sequences": ((LAUNCH[:4],),)},
            InvalidArgumentError,
            "sequences[0][0]: got 4 items, must be 5..5",
        ),
        (
            {"sequences": (((0, 32, 0, 0, ()),),)},
            InvalidArgumentError,
            "sequences[0][0].function: got 0, ",
        ),
        (
            {"sequences": (((16, 0, 0, 0, ()),),)},
            InvalidArgumentError,
            "sequences[0][0].threads: got 0, ",
        ),
        (
            {"sequences": (((16, 1025, 0, 0, ()),),)},
            InvalidArgumentError,
            "sequences[0][0].threads: got 1025",
        ),
        (
            {"sequences": (((16, 32, -1, 0, ()),),)},
            InvalidArgumentError,
            "sequences[0][0].shared_bytes: got ",
        ),
        (
            {"sequences": (((16, 32, 0, 4, ()),),)},
            InvalidArgumentError,
            "sequences[0][0].flags: got 4, must ",
        ),
        ({"sequences": (((16, 32, 0, 0, None),),)}, TypeError, "sequences[0][0].params: got None"),
        (
            with_params(*[(0, 0)] * 65),
            InvalidArgumentError,
            "sequences[0][0].params: got 65 items, must be ",
        ),
        (with_params((0, 0), 5), TypeError, "sequences[0][0].params[1]: got 5, must be a tuple"),
        (
            with_params((0, 0, 0)),
            InvalidArgumentError,
            "sequences[0][0].params[0]: got 3 items, must be 2..2",
        ),
        (
            with_params((3, 0)),
            InvalidArgumentError,
            "sequences[0][0].params[0].source: got 3, must be in 0..2",
        ),
        (
            with_params((0, UINT64)),
            InvalidArgumentError,
            "sequences[0][0].params[0].value: got 18446744073709",
        ),
        (
            with_params((0, -1)),
            InvalidArgumentError,
            "sequences[0][0].params[0].value: got -1, must be in 0..",
        ),
        (
            with_params((1, 1)),
            InvalidArgumentError,
            "sequences[0][0].params[0].value: got 1, must be in 0..0",
        ),
        (
            with_params((2, 64)),
            InvalidArgumentError,
            "sequences[0][0].params[0].value: got 64, must be in 0..",
        ),
        (
            {**with_params((1, 0)), "num_values": 0},
            InvalidArgumentError,
            "sequences[0][0].params[0].value: got 0, but num_values is 0",
        ),
    ],
)
def test_construction_errors(kind, stage, changes, error, message):
    plan = simple_plan(stage)
    with pytest.raises(error) as raised:
        stage.runner(kind, plan, **changes)
    assert type(raised.value) is error
    assert str(raised.value).startswith(message)
    assert stage.driver.calls() == {}


def test_every_argument_is_needed_and_by_keyword(kind, stage):
    plan = simple_plan(stage)
    with pytest.raises(TypeError):
        runner_class(kind)()
    with pytest.raises(TypeError):
        runner_class(kind)(*range(9))
    with pytest.raises(TypeError):
        stage.runner(kind, plan, surplus=1)


def test_a_runner_keeps_what_it_is_told_to_and_nothing_else(kind, stage):
    class Kept:
        pass

    kept = Kept()
    watched = [kept, stage.driver.runner_addresses, runner_class(kind)]
    plan = simple_plan(stage, num_launches=3)
    watched += [plan.sequences, plan.sequences[0][0][4], plan.index]
    gc.collect()
    before = [sys.getrefcount(item) for item in watched]
    kept_before = sys.getrefcount(kept)
    for _ in range(50):
        runner = stage.runner(kind, plan, held=(kept,))
        assert sys.getrefcount(kept) == kept_before + 1
        for value in (5, -5, 2**40, UINT64 - 1):
            runner.run(1, STREAM, value)
        with pytest.raises(TypeError):
            runner.run(1, STREAM, None)
        with pytest.raises(ValueError, match="must be in"):
            stage.runner(kind, plan, held=(kept,), sequences=((LAUNCH, (16, 0, 0, 0, ())),))
        del runner
    gc.collect()
    assert [sys.getrefcount(item) for item in watched] == before


def test_run_does_not_leak_references_to_its_values(kind, stage):
    runner = stage.runner(kind, simple_plan(stage))
    value = 2**50
    before = sys.getrefcount(value)
    for _ in range(20):
        runner.run(1, STREAM, value)
    assert sys.getrefcount(value) == before


def test_a_cycle_through_keep_is_collected(kind, stage):
    class Holder:
        pass

    holder = Holder()
    holder.runner = stage.runner(kind, simple_plan(stage), held=(holder,))
    watch = weakref.ref(holder)
    del holder
    gc.collect()
    assert watch() is None


def test_both_kinds_have_the_same_methods(stage):
    if (reason := native_failure()) is not None:
        pytest.skip(f"the native launcher was not built: {reason}")
    plan = simple_plan(stage)
    native, python = (stage.runner(kind, plan) for kind in ("native", "python"))
    assert (native.kind, python.kind) == ("native", "python")
    for name in ("run", "resolve"):
        ours, theirs = (inspect.signature(getattr(runner, name)) for runner in (native, python))
        kinds = [[p.kind for p in signature.parameters.values()] for signature in (ours, theirs)]
        assert kinds[0] == kinds[1]
        # A call goes straight to the launcher.
        owners = [type(getattr(runner, name).__self__) for runner in (native, python)]
        assert [owner.__name__ for owner in owners] == ["Launcher", "Launcher"]
        assert owners[0] is not owners[1]


def test_run_outlives_its_runner(kind, stage):
    runner = stage.runner(kind, simple_plan(stage))
    run, watch = runner.run, weakref.ref(runner)
    del runner
    gc.collect()
    assert watch() is None
    assert run(1, STREAM, 7) == 1
    assert [launch.params for launch in stage.driver.launches()] == [(7, 1)]


def test_a_native_launcher_cannot_be_changed_or_called_with_more(stage):
    if (reason := native_failure()) is not None:
        pytest.skip(f"the native launcher was not built: {reason}")
    from firesteel.launch._native import Launcher

    with pytest.raises(TypeError, match="not an acceptable base type"):
        type("Changed", (Launcher,), {})
    for arguments in ((), (8,), ("8", ()), (8, (), ())):
        with pytest.raises(TypeError):
            Launcher(*arguments)
    with pytest.raises(TypeError):
        Launcher(program=8, keep=())


def test_the_kind_that_was_built_is_the_default():
    built = native_failure() is None
    assert default_kind() == ("native" if built else "python")
    assert runner_class() is runner_class(default_kind())


def test_native_where_it_was_not_built_says_why(monkeypatch):
    monkeypatch.setattr(runner_module, "_native", None)
    monkeypatch.setattr(runner_module, "_native_failure", "No module named 'x'")
    with pytest.raises(UnsupportedError, match=r"kind: got 'native', .*No module named 'x'"):
        runner_class("native")
    assert default_kind() == "python"
    assert native_failure() == "No module named 'x'"
    assert runner_class() is runner_class("python")


def test_no_such_kind():
    with pytest.raises(InvalidArgumentError, match=r"kind: got 'rust', must be 'native' or"):
        runner_class("rust")
