"""`Bound.run` on the stub driver: what reaches the driver, and every way in which it is refused."""

import ctypes
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from firesteel.errors import (
    ArenaError,
    DriverError,
    FiresteelError,
    InvalidArgumentError,
    NotPlannedError,
)
from firesteel.launch import Bound, Ready, plan
from firesteel.launch.stub import StubDriver
from firesteel.settings import Settings
from tests.launch.gather_rows import WIDTH, GatherRows
from tests.launch.rig import NUM_HIDDEN, call_of, ready_on_stub, tensors_of

ROOT = Path(__file__).parent.parent.parent
SPEC = GatherRows()
I64 = (("ids", "i64"),)
MAX = 20
PLAN = plan(SPEC, MAX)


class Rig:
    """A plan made ready on the stub driver, with one launcher."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.driver = StubDriver.open()

    def ready(self, **settings: Any) -> Ready:
        self.driver.reset()
        made = Settings(cache="off", launcher=self.kind, **settings)  # type: ignore[arg-type]
        ready = ready_on_stub(PLAN, self.driver, settings=made)
        assert ready.launcher == self.kind
        self.driver.reset()
        return ready

    def bound(self, **settings: Any) -> Bound:
        ready = self.ready(**settings)
        return ready.bind(tensors_of(SPEC, I64), ready.arena(), ids="i64")

    @contextmanager
    def current_context(self) -> Iterator[None]:
        """As a program has it that uses the GPU."""
        push = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
        addresses = self.driver.addresses
        assert push(addresses["cuCtxPushCurrent_v2"])(self.driver.context(0)) == 0
        yield
        assert push(addresses["cuCtxPopCurrent_v2"])(ctypes.addressof(ctypes.c_void_p())) == 0


@pytest.fixture
def rig(kind: str) -> Iterator[Rig]:
    made = Rig(kind)
    yield made
    made.driver.reset()


def test_every_count_launches_what_select_says(rig: Rig) -> None:
    bound = rig.bound()
    ready, base = bound._ready, bound.arena.address
    for num_tokens in range(MAX + 1):
        wide = torch.zeros(num_tokens, 3, 2, WIDTH // 2)
        x = wide[:, 1]
        _, ids, out = call_of(SPEC, I64, num_tokens)
        rig.driver.reset()
        wanted = [launch for launch in SPEC.select(num_tokens, I64) if all(launch.grid)]
        assert bound.run(x, ids, out) == len(wanted) == len(rig.driver.launches())
        addresses = {
            "x": x.data_ptr(),
            "ids": ids.data_ptr(),
            "out": out.data_ptr(),
            "w": bound.tensors["w"].data_ptr(),
            "acc": base,
        }
        strides = {"x": 3 * WIDTH if num_tokens > 1 else WIDTH, "out": WIDTH}
        for launch, found in zip(wanted, rig.driver.launches(), strict=True):
            params = [
                addresses[value] if isinstance(value, str)
                else value if isinstance(value, int)
                else strides[value.tensor]  # type: ignore[union-attr]
                for value in launch.arguments
            ]  # fmt: skip
            function, binary = ready.function(launch.key)
            assert (found.function, found.grid) == (function.handle, launch.grid)
            assert found.params == (*params, *[0] * NUM_HIDDEN)
            assert found.block == (32 * launch.key.num_warps, 1, 1)
            assert found.shared_bytes == binary.shared_bytes
            assert dict(found.attributes) == ({6: 1} if launch.key.pdl else {})
    assert ready.audit.misses == ()


def test_a_steady_run_asks_the_driver_for_the_context_and_the_launches(rig: Rig) -> None:
    bound, call = rig.bound(), call_of(SPEC, I64, 5)
    with rig.current_context():
        bound.run(*call)
        before = rig.driver.calls()
        for _ in range(10):
            assert bound.run(*call) == 2
        after = rig.driver.calls()
    made = {name: count - before.get(name, 0) for name, count in after.items()}
    # cuCtxPopCurrent is of the test.
    assert {name: count for name, count in made.items() if count} == {
        "cuCtxGetCurrent": 10,
        "cuLaunchKernelEx": 20,
    }


def test_running_does_nothing_else(rig: Rig) -> None:
    bound = rig.bound()
    calls = [call_of(SPEC, I64, num_tokens) for num_tokens in range(MAX + 1)]
    with bound._ready.watch() as seen:
        for call in calls:
            bound.run(*call)
    assert seen.is_clean, seen


def refusal(bound: Bound, tensors: list[Any]) -> str:
    with pytest.raises(InvalidArgumentError) as caught:
        bound.run(*tensors)
    assert bound._ready.driver.calls() == {}  # type: ignore[attr-defined]
    return str(caught.value)


@pytest.mark.parametrize("count", [0, 1, 2, 4])
def test_another_number_of_tensors_is_refused(rig: Rig, count: int) -> None:
    tensors = (call_of(SPEC, I64, 3) * 2)[:count]
    message = f"run: got {count} tensors, must be ['x', 'ids', 'out']"
    assert refusal(rig.bound(), tensors) == message


MUTATIONS: dict[str, Callable[[Tensor], object]] = {
    "dtype": lambda t: t.to(torch.float64),
    "fewer tokens": lambda t: t[1:],
    "more tokens": lambda t: torch.cat([t, t]),
    "no tokens": lambda t: t[:0],
    "more dimensions": lambda t: t[..., None],
    "no dimension": lambda t: t.sum().to(t.dtype),
    "meta": lambda t: t.to("meta"),
    "columns apart": lambda t: torch.stack([t, t], -1)[..., 0],
    "sparse": lambda t: t.to_sparse(),
    "list": lambda t: t.tolist(),
    "array": lambda t: t.numpy(),
    "none": lambda t: None,
    "text": lambda t: "x",
}


@given(place=st.integers(0, 2), mutation=st.sampled_from(sorted(MUTATIONS)))
@hypothesis_settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_wrong_tensor_is_refused_by_name(rig: Rig, place: int, mutation: str) -> None:
    bound = rig.bound()
    tensors: list[Any] = [tensor.zero_() for tensor in call_of(SPEC, I64, 3)]
    tensors[place] = MUTATIONS[mutation](tensors[place])
    message = refusal(bound, tensors)
    names = ["x", "ids", "out"]
    # The first tensor says how many tokens there are, so that the next one is at fault.
    blamed = 1 if place == 0 and mutation in ("fewer tokens", "more tokens", "no tokens") else place
    assert message.startswith(f"{names[blamed]}: "), message
    assert "must be " in message


def test_an_unaligned_tensor_is_refused_only_where_that_matters(rig: Rig) -> None:
    bound = rig.bound()
    x, ids, out = call_of(SPEC, I64, 3)
    assert bound.run(torch.zeros(3 * WIDTH + 1)[1:].view(x.shape), ids, out) == 2
    assert bound.run(x, torch.zeros(4, dtype=torch.int64)[1:], out) == 2
    rig.driver.reset()
    flat = torch.zeros(3 * WIDTH + 8)
    start = -flat.data_ptr() % 16 // 4 + 1
    message = refusal(bound, [x, ids, flat[start : start + 3 * WIDTH].view(out.shape)])
    assert message.startswith("out: starts at 0x")


@pytest.mark.parametrize(
    ("function", "nth", "words"),
    [
        ("cuLaunchKernelEx", 0, "launch 0 of gather rows of 8, M = 5"),
        ("cuLaunchKernelEx", 1, "launch 1 of gather rows of 8, M = 5"),
        ("cuCtxGetCurrent", 0, "around the launches of gather rows of 8, M = 5"),
        ("cuCtxPushCurrent_v2", 0, "around the launches of gather rows of 8, M = 5"),
    ],
)
def test_a_driver_failure_names_the_launch_and_the_result(
    rig: Rig, function: str, nth: int, words: str
) -> None:
    bound, call = rig.bound(), call_of(SPEC, I64, 5)
    if nth:
        bound = second_fails(rig)
    rig.driver.fail(function, 700)
    with pytest.raises(DriverError) as caught:
        bound.run(*call)
    message = str(caught.value)
    assert message.startswith(f"{function}: got CUresult 700 (")
    assert words in message
    assert bound.run(*call) >= 1


def second_fails(rig: Rig) -> Bound:
    """A bound whose first launch has an empty grid, so that the driver first sees the second."""

    class NoGather(GatherRows):
        def select(self, num_tokens: int, flags: Any) -> Any:
            gather, combine = super().select(num_tokens, flags)
            made = gather.kernel.launch(
                gather.key,
                (0, 1, 1),
                dict(
                    zip([name for name, _ in gather.key.arguments], gather.arguments, strict=True)
                ),
            )
            return made, combine

    made = plan(NoGather(), MAX)
    settings = Settings(cache="off", launcher=rig.kind)  # type: ignore[arg-type]
    ready = ready_on_stub(made, rig.driver, settings=settings)
    return ready.bind(tensors_of(SPEC, I64), ready.arena(), ids="i64")


def test_another_stream_is_refused_until_the_arena_is_released(rig: Rig) -> None:
    ready = rig.ready()
    stream = 0x7000
    ready.stream_of = lambda index: stream
    arena = ready.arena()
    bound, second = (ready.bind(tensors_of(SPEC, I64), arena, ids="i64") for _ in range(2))
    call = call_of(SPEC, I64, 3)
    assert bound.run(*call) == 2
    assert arena.owner == 0x7000
    stream = 0x8000
    ready.stream_of = lambda index: stream
    other = ready.bind(tensors_of(SPEC, I64), arena, ids="i64")
    rig.driver.reset()
    text = r"stream: got 0x8000, Arena\(.* stream 0x7000\) must be run on its own stream, or be rel"
    with pytest.raises(ArenaError, match=text):
        other.run(*call)
    assert rig.driver.launches() == []
    arena.release()
    assert other.run(*call) == 2
    assert {launch.stream for launch in rig.driver.launches()} == {0x8000}
    assert arena.owner == 0x8000
    assert second.flags == other.flags


def test_an_arena_that_was_freed_while_bound_is_refused(rig: Rig) -> None:
    bound, call = rig.bound(), call_of(SPEC, I64, 3)
    assert bound.run(*call) == 2
    rig.driver.reset()
    bound.arena.storage.untyped_storage().resize_(0)
    with pytest.raises(ArenaError, match="freed or replaced while it was bound"):
        bound.run(*call)
    assert rig.driver.calls() == {}


def test_the_callers_mapping_may_change_afterwards(rig: Rig) -> None:
    ready, tensors = rig.ready(), tensors_of(SPEC, I64)
    address = tensors["w"].data_ptr()
    bound = ready.bind(tensors, ready.arena(), ids="i64")
    tensors.clear()
    gc.collect()
    rig.driver.reset()
    bound.run(*call_of(SPEC, I64, 3))
    assert rig.driver.launches()[1].params[1] == address


def test_eight_threads_share_one_bound(rig: Rig) -> None:
    ready = rig.ready()
    arena = ready.arena()
    bound = ready.bind(tensors_of(SPEC, I64), arena, ids="i64")
    calls = {m: call_of(SPEC, I64, m) for m in range(1, MAX + 1)}
    failures: list[object] = []

    def work() -> None:
        try:
            for _ in range(20):
                for call in calls.values():
                    if bound.run(*call) != 2:
                        failures.append(call)
        except FiresteelError as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    made = 8 * 20 * len(calls) * 2
    assert rig.driver.num_launches() == made == sum(ready.audit.launches().values())
    # No launch mixes two calls: address, tokens and grid belong together.
    by_x = {call[0].data_ptr(): m for m, call in calls.items()}
    by_out = {call[2].data_ptr(): m for m, call in calls.items()}
    for launch in rig.driver.launches():
        if launch.block == (32, 1, 1):
            assert by_out[launch.params[2]] == launch.params[3] == launch.grid[0]
        else:
            assert by_x[launch.params[0]] == launch.params[3]


FORK = """
import os, sys
from firesteel.errors import ForkedError
from firesteel.launch import plan
from firesteel.launch.stub import StubDriver
from firesteel.settings import Settings
from tests.launch.gather_rows import GatherRows
from tests.launch.rig import call_of, ready_on_stub, tensors_of

flags = (("ids", "i64"),)
spec = GatherRows()
for kind in sys.argv[1:]:
    settings = Settings(cache="off", launcher=kind)
    ready = ready_on_stub(plan(spec, 8), StubDriver.open(), settings=settings)
    bound = ready.bind(tensors_of(spec, flags), ready.arena(), ids="i64")
    call = call_of(spec, flags, 3)
    assert bound.run(*call) == 2
    child = os.fork()
    if child == 0:
        try:
            bound.run(*call)
        except ForkedError as error:
            os._exit(7 if "a worker must prewarm for itself" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7, kind
    assert bound.run(*call) == 2
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_is_refused_and_its_parent_is_not(kinds: list[str]) -> None:
    command = [sys.executable, "-c", FORK, *kinds]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize(
    ("inputs", "outputs"), [(2, 0), (1, 1), (3, 1), (2, 2), (0, 0), (3, 0), (0, 3)]
)
def test_another_number_of_inputs_or_outputs_is_refused(
    rig: Rig, inputs: int, outputs: int
) -> None:
    bound, tensor = rig.bound(), torch.zeros(1)
    with pytest.raises(InvalidArgumentError, match=r"run_?: got"):
        bound.run(*bound.in_order([tensor] * inputs, [tensor] * outputs))


def test_tensors_of_an_operator_are_put_in_order(rig: Rig) -> None:
    x, ids, out = call_of(SPEC, I64, 3)
    found = rig.bound().in_order([x, ids], [out])
    assert [tensor is given for tensor, given in zip(found, (x, ids, out), strict=True)] == [
        True
    ] * 3


def test_resolve_tells_the_launches_and_makes_none(rig: Rig) -> None:
    bound = rig.bound()
    assert [step.key for step in bound.resolve(5)] == [x.key for x in SPEC.select(5, I64)]
    assert rig.driver.calls() == {}
    for num_tokens in (-1, MAX + 1):
        with pytest.raises(NotPlannedError, match=f"num_tokens: got {num_tokens}, the plan holds"):
            bound.resolve(num_tokens)
