"""Counters of launches, kept beyond the objects that made them, and traffic replayed on a CPU."""

import gc
import json
import threading
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from firesteel.errors import NotPlannedError
from firesteel.launch import Arena, Bound, LaunchKey, Ready, plan, replay
from firesteel.launch.audit import MAX_MISSES, Audit, Miss, Prewarmed, replay_keys
from firesteel.launch.stub import StubDriver
from firesteel.settings import Settings
from tests.launch.gather_rows import WIDTH, GatherRows
from tests.launch.rig import Compiler, call_of, ready_on_stub, tensors_of

SPEC = GatherRows()
I32, I64 = (("ids", "i32"),), (("ids", "i64"),)
PLAN = plan(SPEC, 40)
ONE_FLAG = plan(SPEC, 40, flags={"ids": ["i32"]})
CALLS = {flags: [call_of(SPEC, flags, m) for m in range(41)] for flags in (I32, I64)}


def made_ready(kind: str, **settings: Any) -> Ready:
    chosen = Settings(cache="off", launcher=kind, **settings)  # type: ignore[arg-type]
    return ready_on_stub(PLAN, StubDriver.open(), settings=chosen)


def bound_of(ready: Ready, flags: Any = I64) -> Bound:
    return ready.bind(tensors_of(SPEC, flags), ready.arena(), **dict(flags))


def expected(calls: list[tuple[Any, int]]) -> Counter[LaunchKey]:
    return Counter(
        launch.key
        for flags, num_tokens in calls
        for launch in SPEC.select(num_tokens, flags)
        if all(launch.grid)
    )


@given(
    calls=st.lists(st.tuples(st.sampled_from([I32, I64]), st.integers(0, 40)), max_size=40),
    data=st.data(),
)
@hypothesis_settings(max_examples=25)
def test_launches_are_those_that_were_made(calls: Any, data: st.DataObject) -> None:
    ready = made_ready(data.draw(st.sampled_from(["auto", "python"]), label="launcher"))
    bounds = {flags: [bound_of(ready, flags)] for flags in (I32, I64)}
    for flags, num_tokens in calls:
        again = data.draw(st.sampled_from(["same", "new", "instead"]), label="bound")
        if again == "instead":
            bounds[flags].clear()
        if again != "same":
            bounds[flags].append(bound_of(ready, flags))
        bounds[flags][0].run(*CALLS[flags][num_tokens])
    wanted = expected(calls)
    assert +ready.audit.launches() == wanted
    bounds.clear()
    # What ended counts as before.
    assert +ready.audit.launches() == wanted
    found = ready.audit.as_dict()
    assert found["planned"] == len(PLAN.keys)
    assert found["launched"] == len(wanted)
    assert found["launches"] == sum(wanted.values())
    listed = {
        (entry["kernel"], entry["key"]): entry["launches"] for entry in found["launches_by_key"]
    }
    assert listed == {(key.kernel, str(key)): count for key, count in wanted.items()}
    assert found["never_launched"] == [str(key) for key in PLAN.keys if key not in wanted]
    assert found["launched_unplanned"] == found["misses"] == []


def test_a_bound_that_ends_leaves_its_counts_and_nothing_else(kind: str) -> None:
    ready = made_ready(kind)
    for number in range(1, 4):
        bound = bound_of(ready)
        bound.run(*CALLS[I64][5])
        del bound
        assert sum(ready.audit.launches().values()) == 2 * number
        assert ready.audit._live == {}


def test_a_bound_that_ends_while_launches_are_counted_does_no_harm(kind: str) -> None:
    """The collector may run inside any allocation, also in one that the audit makes."""
    ready = made_ready(kind)
    bounds = [bound_of(ready) for _ in range(4)]
    for bound in bounds:
        bound.run(*CALLS[I64][5])
    counting = type(bounds[0].runner).counts
    del bound
    found: list[int] = []

    def counts_and_ends(table: Any, runner: Any) -> Counter[LaunchKey]:
        # As the collector would, in the middle of the count.
        if len(bounds) > 1:
            bounds.pop()
        made: Counter[LaunchKey] = Counter()
        for steps, numbers in zip(table.sequences, counting(runner), strict=True):
            made.update({step.key: n for step, n in zip(steps, numbers, strict=True)})
        return made

    def count() -> None:
        found.append(sum(ready.audit.launches().values()))

    with patch("firesteel.launch.audit._counts", counts_and_ends):
        # On a thread, so that a lock taken twice fails the test rather than hangs it.
        thread = threading.Thread(target=count, daemon=True)
        thread.start()
        thread.join(timeout=20)
    assert found == [8]

    class Ending(Counter[LaunchKey]):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            # After what had ended was copied, and before the live are.
            bounds.clear()

    with patch("firesteel.launch.audit.Counter", Ending):
        count()
    assert ready.audit._live == {}
    assert found == [8, 8]


def test_unplanned_launches_are_counted_as_such(kind: str) -> None:
    small = plan(SPEC, 7)
    settings = Settings(cache="off", launcher=kind, on_miss="compile")  # type: ignore[arg-type]
    ready = ready_on_stub(small, StubDriver.open(), settings=settings)
    arena = Arena.allocate(40 * WIDTH * 4, torch.device("cpu"))
    bound = ready.bind(tensors_of(SPEC, I64), arena, ids="i64")
    with patch("firesteel.launch.ready.compile_all", Compiler()):
        for num_tokens in (3, 9, 9, 40):
            bound.run(*CALLS[I64][num_tokens])
    del bound
    gc.collect()
    found = ready.audit.as_dict()
    unplanned = [launch.key for m in (9, 40) for launch in SPEC.select(m, I64)[:1]]
    assert sorted(found["launched_unplanned"]) == sorted(map(str, unplanned))
    assert found["launches"] == 8
    assert found["launched"] == 2
    assert [miss["asked"] for miss in found["misses"]] == ["9 tokens", "40 tokens"]
    assert ready.audit.prewarmed.compiled == len(small.keys) + 2


def test_misses_have_the_key_the_nearest_and_what_differs(kind: str) -> None:
    ready = ready_on_stub(
        plan(SPEC, 7),
        StubDriver.open(),
        settings=Settings(cache="off", launcher=kind),  # type: ignore[arg-type]
    )
    with pytest.raises(NotPlannedError):
        bound_of(ready).run(*CALLS[I64][8])
    (miss,) = ready.audit.misses
    assert miss.asked == "8 tokens"
    assert miss.differences == ("BLOCK: 128, nearest has 64",)
    assert miss.nearest in ready.plan.keys
    listed = json.loads(json.dumps(ready.audit.as_dict()))["misses"]
    assert LaunchKey.from_dict(listed[0]["key"]) == miss.key
    assert listed[0]["differences"] == list(miss.differences)


def test_kernels_of_one_short_name_lose_no_launches() -> None:
    keys = [LaunchKey("first.a", (), (("B", 1),)), LaunchKey("second.a", (), (("B", 1),))]
    assert str(keys[0]) == str(keys[1])
    found = replay_keys(lambda m: keys, 9, [1, 2, 3], prewarmed=keys).as_dict()
    assert found["launches"] == sum(entry["launches"] for entry in found["launches_by_key"]) == 6
    assert [entry["kernel"] for entry in found["launches_by_key"]] == ["first.a", "second.a"]


def test_misses_are_told_apart_up_to_a_number() -> None:
    audit = Audit(PLAN)
    asked = [Miss(f"{number} tokens", 40, None, None, ()) for number in range(MAX_MISSES + 3)]
    assert all(audit.note(miss) for miss in asked)
    assert not audit.note(asked[5])
    assert not audit.note(asked[5])
    assert len(audit.misses) == MAX_MISSES
    found = audit.as_dict()
    assert (len(found["misses"]), found["misses_left_out"]) == (MAX_MISSES, 3)
    assert [miss["count"] for miss in found["misses"][4:7]] == [1, 3, 1]


def test_a_key_that_a_call_launches_twice_counts_twice() -> None:
    class Twice(GatherRows):
        def select(self, num_tokens: int, flags: Any) -> Any:
            gather, combine = super().select(num_tokens, flags)
            return (gather, combine, combine) if num_tokens > 20 else (gather, combine)

    made = plan(Twice(), 40, flags={"ids": ["i32"]})
    (combine,) = (key for key in made.keys if key.name == "combine_kernel")
    found = replay(made, [0, 3, 21, 30])
    assert found.launches[combine] == 1 + 2 + 2
    assert made.launch_ranges()[combine] == [(1, 20, 1), (21, 40, 2)]
    assert made.ranges()[combine] == [(1, 40)]
    (listed,) = (key for key in made.as_dict()["keys"] if key["kernel"] == combine.kernel)
    assert listed["tokens"] == [(1, 20), (21, 40, 2)]


def test_a_miss_says_what_there_is() -> None:
    key = PLAN.keys[0]
    assert str(Miss("9 tokens", 7, None, None, ())) == (
        "not planned: 9 tokens, the plan holds 0..7 tokens; its keys are all planned"
    )
    assert str(Miss("9 tokens", 7, key, None, ())).endswith(f"; key {key}, the plan has no key")


def test_where_kernels_came_from_is_one_line() -> None:
    assert str(Prewarmed(1, 2, 3, 6, 0.5)) == (
        "6 kernels loaded: 1 compiled, 2 from the cache, 3 from the bundle, 0.50 s"
    )


@given(traffic=st.lists(st.integers(-3, 60), max_size=60))
def test_replayed_traffic_is_what_select_says(traffic: list[int]) -> None:
    found = replay(PLAN, traffic)
    inside = [m for m in traffic if 0 <= m <= 40]
    # Under each flag once; what both launch counts once.
    wanted = expected([(I32, m) for m in inside]) | expected([(I64, m) for m in inside])
    assert +found.launches == wanted
    assert found.too_long == tuple(sorted({m for m in traffic if not 0 <= m <= 40}))
    assert found.misses == ()
    assert set(found.reached) == set(wanted)
    assert found.never_reached == tuple(key for key in PLAN.keys if key not in wanted)
    listed = json.loads(json.dumps(found.as_dict()))
    assert listed["launches"] == sum(wanted.values())
    assert listed["misses"] == []


def test_a_warm_up_that_derives_its_keys_again_is_found_out() -> None:
    """As it happens elsewhere: the warm-up compiles, and none of it is what run time asks for."""
    warmed = [replace(key, num_stages=key.num_stages + 1) for key in ONE_FLAG.keys]
    found = replay(ONE_FLAG, [3, 3, 9, 0], prewarmed=[*warmed, *warmed])
    assert found.reached == ()
    assert found.never_reached == tuple(warmed)
    gather, combine = (launch.key for launch in SPEC.select(3, I32))
    (wide,) = {launch.key for launch in SPEC.select(9, I32)} - {combine}
    assert [miss.key for miss in found.misses] == [gather, combine, wide]
    assert [miss.asked for miss in found.misses] == ["3 tokens", "3 tokens", "9 tokens"]
    for miss in found.misses:
        assert miss.nearest is not None
        assert miss.key is not None
        assert miss.nearest.kernel == miss.key.kernel
        assert miss.differences == ("num_stages: 3, nearest has 4",)
    assert found.launches == {gather: 2, combine: 3, wide: 1}


def test_nothing_prewarmed_misses_everything() -> None:
    found = replay(ONE_FLAG, [5], prewarmed=[])
    assert len(found.misses) == 2
    assert all(miss.nearest is None for miss in found.misses)


def test_keys_of_what_is_no_plan_can_be_replayed() -> None:
    first, second = PLAN.keys[:2]
    found = replay_keys(
        lambda m: [first] if m < 5 else [second], 9, [1, 7, 12, -1], prewarmed=[first]
    )
    assert found.launches == {first: 1, second: 1}
    assert [miss.key for miss in found.misses] == [second]
    assert found.too_long == (-1, 12)
