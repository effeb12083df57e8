"""A launch outside the plan: refused, or compiled, and never under capture."""

import logging
import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch

from firesteel.errors import ArenaError, NotPlannedError
from firesteel.launch import Arena, Bound
from firesteel.launch.bound import MAX_UNPLANNED
from tests.launch.gather_rows import WIDTH, GatherRows
from tests.launch.rig import Compiler, call_of, tensors_of
from tests.launch.test_bound import I64, MAX, PLAN, SPEC, Rig


@pytest.fixture
def rig(kind: str) -> Iterator[Rig]:
    made = Rig(kind)
    yield made
    made.driver.reset()


def misses_of(bound: Bound) -> list[str]:
    return [str(miss) for miss in bound._ready.audit.misses]


MISS = (
    r"^not planned: 33 tokens, the plan holds 0\.\.20 tokens; key gather_kernel\(.*BLOCK=256, .*\)"
    r"; nearest gather_kernel\(.*BLOCK=64, .*\); BLOCK: 256, nearest has 64$"
)


def test_a_count_outside_the_plan_raises(rig: Rig) -> None:
    bound, compiler = rig.bound(), Compiler()
    with patch("firesteel.launch.ready.compile_all", compiler):
        for count in (1, 2):
            with pytest.raises(NotPlannedError, match=MISS):
                bound.run(*call_of(SPEC, I64, 33))
            assert len(misses_of(bound)) == 1
            (listed,) = bound._ready.audit.as_dict()["misses"]
            assert listed["count"] == count
    assert compiler.asked == []
    assert rig.driver.launches() == []
    assert bound.run(*call_of(SPEC, I64, MAX)) == 2


@pytest.mark.parametrize("on_miss", ["warn", "compile"])
def test_a_count_outside_the_plan_is_compiled_once(
    rig: Rig, on_miss: str, caplog: pytest.LogCaptureFixture
) -> None:
    ready = rig.ready(on_miss=on_miss)
    arena = Arena.allocate(100 * WIDTH * 4, torch.device("cpu"))
    bound = ready.bind(tensors_of(SPEC, I64), arena, ids="i64")
    compiler = Compiler()
    caplog.clear()
    with patch("firesteel.launch.ready.compile_all", compiler):
        for num_tokens in (33, 34, 33):
            call = call_of(SPEC, I64, num_tokens)
            rig.driver.reset()
            assert bound.run(*call) == 2
            first, second = rig.driver.launches()[-2:]
            assert first.grid == (-(-num_tokens * WIDTH // 256), 1, 1)
            assert second.grid == (num_tokens, 1, 1)
    (key,) = compiler.asked
    assert dict(key.constexprs)["BLOCK"] == 256
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    # One for each count: the second has no new key.
    assert len(warnings) == (2 if on_miss == "warn" else 0)
    if warnings:
        assert all(w.endswith("; compiling it now") for w in warnings)
        assert "BLOCK: 256, nearest has 64" in warnings[0]
        assert "34 tokens, the plan holds 0..20 tokens; its keys are all planned" in warnings[1]
    found = ready.audit.as_dict()
    assert found["launched_unplanned"] == [str(key)]
    (launches,) = (n["launches"] for n in found["launches_by_key"] if n["key"] == str(key))
    assert launches == 3
    assert found["launches"] == 6
    assert [miss["asked"] for miss in found["misses"]] == ["33 tokens", "34 tokens"]


def test_launchers_of_counts_outside_the_plan_make_room_and_lose_no_count(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    ready = rig.ready(on_miss="warn")
    last = MAX + MAX_UNPLANNED + 5
    arena = Arena.allocate(last * WIDTH * 4 + 256, torch.device("cpu"))
    bound = ready.bind(tensors_of(SPEC, I64), arena, ids="i64")
    call = call_of(SPEC, I64, last)
    with patch("firesteel.launch.ready.compile_all", Compiler()):
        for _ in range(2):
            for num_tokens in range(MAX + 1, last + 1):
                assert bound.run(*(tensor[:num_tokens] for tensor in call)) == 2
    counts = last - MAX
    assert len(bound._unplanned) == MAX_UNPLANNED < counts
    # One more for what is planned.
    assert len(ready.audit._live) == MAX_UNPLANNED + 1
    assert sum(ready.audit.launches().values()) == 2 * 2 * counts
    warnings = [r for r in caplog.records if "compiling it now" in r.getMessage()]
    # One more at 32 tokens: its kernel was new at first, and is loaded by now.
    assert len(warnings) == counts + 1


def test_a_launcher_that_made_room_while_another_thread_was_in_it_still_counts(rig: Rig) -> None:
    ready = rig.ready(on_miss="compile")
    last = MAX + MAX_UNPLANNED + 1
    arena = Arena.allocate(last * WIDTH * 4 + 256, torch.device("cpu"))
    bound = ready.bind(tensors_of(SPEC, I64), arena, ids="i64")
    call, keep, compiler = call_of(SPEC, I64, last), bound._keep_unplanned, Compiler()
    rig.driver.reset()

    def keep_and_make_room(num_tokens: int, made: Any) -> None:
        keep(num_tokens, made)
        if num_tokens == MAX + 1:
            for other in range(MAX + 2, last + 1):
                assert bound.run(*(tensor[:other] for tensor in call)) == 2
            assert num_tokens not in bound._unplanned

    with (
        patch("firesteel.launch.ready.compile_all", compiler),
        patch.object(bound, "_keep_unplanned", keep_and_make_room),
    ):
        assert bound.run(*(tensor[: MAX + 1] for tensor in call)) == 2
    # Loading launches each new kernel once, which is no call's.
    assert len(rig.driver.launches()) == 2 * (last - MAX) + len(compiler.asked)
    assert sum(ready.audit.launches().values()) == 2 * (last - MAX)
    assert len(ready.audit._live) == MAX_UNPLANNED + 1


def test_a_parameter_of_an_unplanned_launch_is_the_calls_own(rig: Rig) -> None:
    ready = rig.ready(on_miss="compile")
    arena = Arena.allocate(100 * WIDTH * 4, torch.device("cpu"))
    bound = ready.bind(tensors_of(SPEC, I64), arena, ids="i64")
    for num_tokens in (21, 30):
        x, ids, out = call_of(SPEC, I64, num_tokens)
        rig.driver.reset()
        with patch("firesteel.launch.ready.compile_all", Compiler()):
            bound.run(x, ids, out)
        gather, combine = (launch.params for launch in rig.driver.launches())
        # 21 and 30 use planned keys, whose parameters the stub knows.
        assert gather == (x.data_ptr(), ids.data_ptr(), arena.address, num_tokens, WIDTH, 0, 0)
        assert combine[2:5] == (out.data_ptr(), num_tokens, WIDTH)


@pytest.mark.parametrize("on_miss", ["raise", "warn", "compile"])
def test_under_capture_a_miss_raises_and_compiles_nothing(rig: Rig, on_miss: str) -> None:
    ready = rig.ready(on_miss=on_miss)
    arena = Arena.allocate(100 * WIDTH * 4, torch.device("cpu"))
    bound, compiler = ready.bind(tensors_of(SPEC, I64), arena, ids="i64"), Compiler()
    rig.driver.set_capturing(0, True)
    with patch("firesteel.launch.ready.compile_all", compiler):
        with pytest.raises(NotPlannedError, match="33 tokens"):
            bound.run(*call_of(SPEC, I64, 33))
        assert compiler.asked == []
        assert "cuModuleLoadData" not in rig.driver.calls()
        assert rig.driver.launches() == []
        # What is planned is captured, as the first call ever.
        assert bound.run(*call_of(SPEC, I64, MAX)) == 2
        rig.driver.set_capturing(0, False)
        if on_miss == "raise":
            return
        assert bound.run(*call_of(SPEC, I64, 33)) == 2
        # Also after it has run once: what capture allows does not depend on what came before.
        rig.driver.set_capturing(0, True)
        with pytest.raises(NotPlannedError, match="under CUDA graph capture"):
            bound.run(*call_of(SPEC, I64, 33))
        rig.driver.set_capturing(0, False)
        assert bound.run(*call_of(SPEC, I64, 33)) == 2


def test_an_arena_too_small_for_an_unplanned_count_compiles_nothing(rig: Rig) -> None:
    bound, compiler = rig.bound(on_miss="compile"), Compiler()
    provided = PLAN.workspace.num_bytes
    with (
        patch("firesteel.launch.ready.compile_all", compiler),
        pytest.raises(ArenaError, match=f"requested 1280 bytes, provided {provided}"),
    ):
        bound.run(*call_of(SPEC, I64, 40))
    assert compiler.asked == []
    assert rig.driver.launches() == []


def test_a_count_far_outside_the_plan_is_refused_at_once(rig: Rig) -> None:
    asked: list[int] = []
    bound = rig.bound()
    select = GatherRows.select

    def count(spec: GatherRows, num_tokens: int, flags: Any) -> Any:
        asked.append(num_tokens)
        return select(spec, num_tokens, flags)

    far = call_of(SPEC, I64, 60_000)
    with patch.object(GatherRows, "select", count), pytest.raises(NotPlannedError, match="60000"):
        bound.run(*far)
    # Not one for each count below it.
    assert asked == [60_000]


def test_threads_that_miss_at_once_compile_once(rig: Rig) -> None:
    ready = rig.ready(on_miss="compile")
    arena = Arena.allocate(100 * WIDTH * 4, torch.device("cpu"))
    bound, compiler = ready.bind(tensors_of(SPEC, I64), arena, ids="i64"), Compiler()
    call, barrier = call_of(SPEC, I64, 33), threading.Barrier(4)
    found: list[int] = []

    def work() -> None:
        barrier.wait()
        found.append(bound.run(*call))

    with patch("firesteel.launch.ready.compile_all", compiler):
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [2] * 4
    assert len(compiler.asked) == 1
    assert sum(ready.audit.launches().values()) == 8
