"""Layers whose streams take one arena in turn or have their own, against the stub driver."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from firesteel.errors import ArenaError
from firesteel.integrations.transformers import PackedExperts, load_model
from firesteel.launch import Arena, Plan, Ready, plan
from firesteel.launch.runner import runner_class
from firesteel.launch.stub import StubDriver
from firesteel.modules import kernels
from firesteel.modules.kernels import Arenas, LayerKernels, attach_kernels, workspace_bytes
from firesteel.moe.spec import MoeSpec
from firesteel.moe.supports import moe_spec_of
from firesteel.settings import Settings
from tests.launch.gather_rows import GatherRows
from tests.launch.rig import call_of, ready_on_stub, run_in_threads, tensors_of

LITTLE = Path(__file__).parents[2] / "examples" / "little_moe" / "int4-g128"
SPEC = GatherRows()
PLAN = plan(SPEC, 20)
IDS = (("ids", "i64"),)
CALL = call_of(SPEC, IDS, 5)
PER_CALL = len(SPEC.select(5, IDS))
LAUNCHERS = sorted({"python", runner_class(None).kind})


class Layer:
    """As `MoeLayer`, of the tests' own kernel."""

    def __init__(self, ready: Ready, tensors: dict[str, Tensor], arena: Arena) -> None:
        self._bound = ready.bind(tensors, arena, ids="i64")

    def __call__(self, *inputs: Tensor) -> Any:
        return self._bound.run(*inputs)


class Rig:
    """A layer on one arena, or on one a stream; each thread says which stream is its own.

    Fields
        arenas     of the layer
        arena      the first, which streams take in turn where it is the only one
        waits      of each wait: the stream that waits, the other, and the calls before it
        capturing  streams under capture
    """

    def __init__(
        self, driver: StubDriver, launcher: str, patch: pytest.MonkeyPatch, *, is_one: bool = True
    ) -> None:
        self._own = threading.local()
        self._driver = driver
        self.waits: list[tuple[int, int, int]] = []
        self.capturing: set[int] = set()
        patch.setattr(kernels, "stream_getter", lambda _: lambda _: self._own.stream)
        patch.setattr(kernels, "is_capturing", lambda _: self._own.stream in self.capturing)
        patch.setattr(kernels, "wait_for_stream", self._wait)
        ready = ready_on_stub(PLAN, driver, settings=Settings(cache="off", launcher=launcher))
        ready.stream_of = lambda _: self._own.stream
        self.arenas = Arenas(PLAN.workspace.num_bytes, torch.device("cpu"), is_one=is_one)
        self.arena = self.arenas.first
        self._layer = LayerKernels(ready, tensors_of(SPEC, IDS), self.arenas, Layer)
        driver.reset()

    def _wait(self, _: torch.device, other: int) -> None:
        calls, rest = divmod(self._driver.num_launches(), PER_CALL)
        assert rest == 0
        self.waits.append((self._own.stream, other, calls))

    def call(self, stream: int) -> None:
        self._own.stream = stream
        self._layer(*CALL)

    def streams(self) -> list[int]:
        """The stream of each call."""
        launched = [launch.stream for launch in self._driver.launches()]
        calls = launched[::PER_CALL]
        assert launched == [stream for stream in calls for _ in range(PER_CALL)]
        return calls


@pytest.fixture
def driver() -> Iterator[StubDriver]:
    found = StubDriver.open()
    found.reset()
    yield found
    found.reset()


@pytest.fixture(params=LAUNCHERS)
def rig(driver: StubDriver, request: Any, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(driver, request.param, monkeypatch)


def test_a_stream_waits_for_the_last_one_before_it_launches(rig: Rig) -> None:
    for stream in (1, 1, 2, 0, 0, 1):
        rig.call(stream)
    assert rig.streams() == [1, 1, 2, 0, 0, 1]
    assert rig.waits == [(2, 1, 2), (0, 2, 3), (1, 0, 5)]
    assert rig.arena.owner == 1


def test_a_stream_under_capture_neither_waits_nor_takes_the_arena(
    rig: Rig, driver: StubDriver
) -> None:
    rig.call(1)
    rig.capturing.add(2)
    driver.set_capturing(2, True)
    rig.call(2)
    driver.set_capturing(2, False)
    assert (rig.waits, rig.arena.owner) == ([], 1)
    rig.capturing.clear()
    rig.call(2)
    assert rig.waits == [(2, 1, 2)]


def test_a_stream_that_may_not_wait_does_not_launch(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.call(1)

    def refuse(*_: object) -> None:
        raise ArenaError("under capture")

    with monkeypatch.context() as patch:
        patch.setattr(kernels, "wait_for_stream", refuse)
        with pytest.raises(ArenaError, match="under capture"):
            rig.call(2)
    assert (rig.streams(), rig.arena.owner) == ([1], 1)
    # Nor does it keep the turn.
    rig.call(1)
    assert rig.streams() == [1, 1]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_stream_has_no_arena_of_its_own_until_it_is_called_without_capture(
    driver: StubDriver, launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(driver, launcher, monkeypatch, is_one=False)
    rig.call(1)
    rig.capturing.add(2)
    driver.set_capturing(2, True)
    rig.call(2)
    assert (rig.arenas.as_dict()["count"], rig.arena.owner) == (1, 1)
    driver.set_capturing(2, False)
    rig.capturing.clear()
    rig.call(2)
    assert (rig.arenas.as_dict()["count"], rig.arenas.of(2).owner) == (2, 2)
    assert (rig.streams(), rig.waits) == ([1, 2, 2], [])


def test_threads_on_streams_of_their_own_launch_after_each_other(rig: Rig) -> None:
    start = threading.Barrier(3)
    failures: list[Exception] = []

    def work(stream: int) -> None:
        start.wait()
        try:
            for _ in range(300):
                rig.call(stream)
        except Exception as error:
            failures.append(error)

    run_in_threads([partial(work, stream) for stream in (1, 2, 3)])
    assert failures == []
    launched = rig.streams()
    assert len(launched) == 900
    changes = [
        (stream, last, place)
        for place, (last, stream) in enumerate(pairwise(launched), start=1)
        if stream != last
    ]
    assert rig.waits == changes
    assert changes


@pytest.fixture
def attach(driver: StubDriver, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`attach_kernels` to the example's layers on the stub, the second one of more experts a token.

    Gives the report, and the layers.
    """
    model = load_model(LITTLE, device="cpu")
    layers = [module for module in model.modules() if isinstance(module, PackedExperts)]

    def spec_of(module: PackedExperts, top_k: int, dtype: torch.dtype) -> MoeSpec:
        spec = moe_spec_of(
            module.gate_up.scheme,
            module.down.scheme,
            num_experts=module.num_experts,
            hidden_size=module.hidden_dim,
            intermediate_size=module.intermediate_dim,
            top_k=top_k + (module is layers[1]),
            activation=module.activation,
            dtype=dtype,
            has_bias=False,
        )
        return spec.for_target("sm_90")

    def made_ready(made: Plan, **given: Any) -> Ready:
        return ready_on_stub(made, driver, settings=given["settings"])

    monkeypatch.setattr(kernels, "_spec_of", spec_of)
    monkeypatch.setattr(kernels, "prewarm", made_ready)
    settings = Settings(cache="off", max_tokens=8)

    def attached(**options: Any) -> Any:
        report = attach_kernels(layers, top_k=2, dtype=torch.bfloat16, settings=settings, **options)
        return report, layers

    return attached


def test_layers_share_a_workspace_that_holds_each_plan(attach: Callable[..., Any]) -> None:
    report, layers = attach()
    sizes = [ready.plan.workspace.num_bytes for ready in report.ready]
    assert len(set(sizes)) == 2
    assert report.as_dict()["arenas"] == [{"device": "cpu", "bytes": max(sizes), "count": 1}]
    assert all(module.kernels is not None for module in layers)
    for ready in report.ready:
        assert list(ready.plan.tables) == [(("ids", "i32"),), (("ids", "i64"),)]
    assert [arenas.is_one for arenas in report.arenas] == [False]


def test_a_workspace_is_known_before_it_is_planned(attach: Callable[..., Any]) -> None:
    report, layers = attach()
    known = [
        workspace_bytes(layer, top_k=2, dtype=torch.bfloat16, max_tokens=8) for layer in layers[:2]
    ]
    assert known == [ready.plan.workspace.num_bytes for ready in report.ready]


def test_a_workspace_without_memory_names_what_sizes_it(
    attach: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(*_: object) -> Arena:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(Arena, "allocate", allocate)
    with pytest.raises(torch.OutOfMemoryError, match=r"workspace: .* lower FIRESTEEL_MAX_TOKENS"):
        attach()


def test_one_type_of_ids_and_one_arena_are_planned_where_asked_for(
    attach: Callable[..., Any],
) -> None:
    report, _ = attach(ids=("i32",), one_arena=True)
    for ready in report.ready:
        assert list(ready.plan.tables) == [(("ids", "i32"),)]
        assert ready.plan.max_tokens == 8
    assert [arenas.is_one for arenas in report.arenas] == [True]


@pytest.mark.parametrize("one_arena", [False, True])
def test_compiled_code_runs_on_the_first_arena_and_on_its_stream_alone(
    attach: Callable[..., Any], driver: StubDriver, one_arena: bool
) -> None:
    report, (layer, *_) = attach(one_arena=one_arena)
    (arenas,) = report.arenas
    x = torch.ones(5, layer.hidden_dim, dtype=torch.bfloat16)
    call = (x, torch.zeros(5, 2, dtype=torch.int64), torch.ones(5, 2))
    torch.compiler.reset()
    compiled: Any = torch.compile(layer.kernels, backend="eager", fullgraph=True, dynamic=False)
    driver.reset()
    arenas.first.owner_cell[0] = 7
    with pytest.raises(ArenaError, match="must be run on its own stream"):
        compiled(*call)
    assert driver.launches() == []
    arenas.first.release()
    compiled(*call)
    launched = [launch.function for launch in driver.launches()]
    layer.kernels(*call)
    assert launched
    assert [launch.function for launch in driver.launches()] == launched * 2
    assert arenas.as_dict()["count"] == 1
    torch.compiler.reset()
