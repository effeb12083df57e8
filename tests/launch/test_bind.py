"""`bind`: every tensor, flag and arena that is refused, and the memory that a Bound keeps."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from firesteel.errors import ArenaError, InvalidArgumentError, NotPlannedError
from firesteel.launch import ANY_SIZE, Arena, Operand, Ready, plan
from firesteel.launch.spec import Flags
from firesteel.launch.stub import StubDriver
from firesteel.settings import Settings
from tests.launch.gather_rows import GatherRows
from tests.launch.rig import Compiler, aligned, call_of, ready_on_stub, tensors_of, warnings_of

CPU = torch.device("cpu")
PLAN = plan(GatherRows(), 40)
I64 = (("ids", "i64"),)


@pytest.fixture(scope="module")
def ready() -> Ready:
    return ready_on_stub(PLAN, StubDriver.open())


def mutations() -> dict[str, Callable[[Tensor], object]]:
    def shifted(tensor: Tensor) -> Tensor:
        raw = torch.zeros(tensor.numel() + 16, dtype=tensor.dtype)
        start = -raw.data_ptr() % 16 // tensor.dtype.itemsize + 1
        return raw[start : start + tensor.numel()].view(tensor.shape)

    return {
        "dtype": lambda t: t.to(torch.float16),
        "class of numbers": lambda t: t.view(torch.int32),
        "longer": lambda t: torch.cat([t, t]),
        "shorter": lambda t: t[1:],
        "empty": lambda t: t[:0],
        "another dimension": lambda t: t[None],
        "no dimension": lambda t: t.sum(),
        "device": lambda t: t.to("meta"),
        "strided": lambda t: torch.cat([t, t])[::2],
        "expanded": lambda t: t[:1].expand(t.shape),
        "alignment": shifted,
        "sparse": lambda t: t.to_sparse(),
        "list": lambda t: t.tolist(),
        "array": lambda t: t.numpy(),
        "none": lambda t: None,
    }


@given(mutation=st.sampled_from(sorted(mutations())), fill=st.floats(width=32, allow_nan=False))
@hypothesis_settings(max_examples=60)
def test_a_wrong_tensor_is_refused_by_name(ready: Ready, mutation: str, fill: float) -> None:
    right = aligned((8,), torch.float32).fill_(fill)
    assert ready.bind({"w": right}, ready.arena(), ids="i32")
    wrong: Any = mutations()[mutation](right)
    with pytest.raises(InvalidArgumentError, match=r"^w: (got|is on|starts at) .*, must be "):
        ready.bind({"w": wrong}, ready.arena(), ids="i32")


class AnyWeights(GatherRows):
    """As GatherRows, of weights of any size."""

    def operands(self, flags: Flags) -> tuple[Operand, ...]:
        first, *rest = super().operands(flags)
        return (replace(first, shape=(ANY_SIZE,)), *rest)


@pytest.mark.parametrize("size", [0, 1, 8, 1000])
def test_a_tensor_of_any_size_is_bound(driver: StubDriver, size: int) -> None:
    made = plan(AnyWeights(), 3)
    weights = aligned((size,), torch.float32)
    bound = ready_on_stub(made, driver).bind(
        {"w": weights}, Arena.allocate(made.workspace.num_bytes, CPU), ids="i64"
    )
    driver.reset()
    bound.run(*call_of(GatherRows(), I64, 3))
    assert driver.launches()[1].params[1] == weights.data_ptr()


@pytest.mark.parametrize(
    "mutation", [*sorted(set(mutations()) - {"longer", "shorter", "empty"}), "matrix"]
)
def test_a_tensor_of_any_size_is_refused_for_all_else(driver: StubDriver, mutation: str) -> None:
    made = plan(AnyWeights(), 3)
    right = aligned((8,), torch.float32)
    wrong: Any = right.view(2, 4) if mutation == "matrix" else mutations()[mutation](right)
    ready = ready_on_stub(made, driver)
    with pytest.raises(
        InvalidArgumentError, match=r"^w: (got|is on|starts at) .*, must be "
    ) as caught:
        ready.bind({"w": wrong}, ready.arena(), ids="i64")
    if mutation == "matrix":
        assert str(caught.value) == "w: got shape [2, 4], must be [any]"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], r"tensors: got \[\], must be exactly \['w'\]"),
        (["w", "x"], r"tensors: got \['w', 'x'\], must be exactly \['w'\]"),
        (["W"], r"tensors: got \['W'\]"),
    ],
)
def test_missing_and_extra_tensors_are_refused(
    ready: Ready, names: list[str], message: str
) -> None:
    tensors = {name: aligned((8,), torch.float32) for name in names}
    with pytest.raises(InvalidArgumentError, match=message):
        ready.bind(tensors, ready.arena(), ids="i32")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, r"flags: got \[\], must be \['ids'\]"),
        ({"ids": "i64", "pdl": "on"}, r"flags: got \['ids', 'pdl'\], must be \['ids'\]"),
        ({"ids": "i16"}, "ids: got 'i16', must be one of i32, i64"),
        ({"ids": None}, "ids: got None"),
    ],
)
def test_wrong_flags_are_refused(ready: Ready, flags: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        ready.bind(tensors_of(GatherRows(), I64), ready.arena(), **flags)


def test_an_arena_that_is_too_small_says_both_sizes(ready: Ready) -> None:
    tensors = tensors_of(GatherRows(), I64)
    needed = PLAN.workspace.num_bytes
    assert ready.bind(tensors, Arena.allocate(needed, CPU), ids="i64")
    for provided in (0, needed - 1):
        with pytest.raises(ArenaError, match=f"requested {needed} bytes, provided {provided}"):
            ready.bind(tensors, Arena.allocate(provided, CPU), ids="i64")


def test_an_arena_of_another_kind_is_refused(ready: Ready) -> None:
    tensors = tensors_of(GatherRows(), I64)
    storage: Any = ready.arena().storage
    with pytest.raises(ArenaError, match="arena: got Tensor, must be an Arena"):
        ready.bind(tensors, storage, ids="i64")
    elsewhere = Arena.allocate(4096, torch.device("meta"))
    with pytest.raises(ArenaError, match="arena: is on meta, must be on cpu"):
        ready.bind(tensors, elsewhere, ids="i64")
    freed = ready.arena()
    freed.storage.untyped_storage().resize_(0)
    with pytest.raises(ArenaError, match="its storage was freed or replaced"):
        ready.bind(tensors, freed, ids="i64")


def test_binding_allocates_nothing_and_asks_the_driver_nothing(
    ready: Ready, driver: StubDriver
) -> None:
    arena, tensors = ready.arena(), tensors_of(GatherRows(), I64)
    driver.reset()
    with ready.watch() as seen:
        ready.bind(tensors, arena, ids="i64")
    assert seen.is_clean, seen
    assert driver.calls() == {}


class Memory(bytearray):
    """Memory whose end can be noticed."""


def owned(size: int) -> tuple[Tensor, "weakref.ref[Memory]"]:
    """A tensor of fp32, and whether its memory still lives."""
    memory = Memory(4 * size + 16)
    start = -torch.frombuffer(memory, dtype=torch.float32).data_ptr() % 16
    # No view: one would keep the memory through its base.
    made = torch.frombuffer(memory, dtype=torch.float32, offset=start, count=size)
    return made, weakref.ref(memory)


def test_a_bound_keeps_its_memory_until_it_ends(driver: StubDriver) -> None:
    ready = ready_on_stub(PLAN, driver)
    weights, memory = owned(8)
    storage, arena_memory = owned(PLAN.workspace.num_bytes // 4 + 64)
    storage = storage.view(torch.uint8)
    arena = Arena(storage[-storage.data_ptr() % 256 :])
    address = weights.data_ptr()
    bound = ready.bind({"w": weights}, arena, ids="i64")
    # As `module.to` does it: the tensor that was bound is another one now.
    weights.data = torch.ones(8)
    del weights, storage, arena
    gc.collect()
    assert memory() is not None
    assert arena_memory() is not None
    driver.reset()
    bound.run(*call_of(GatherRows(), I64, 3))
    assert driver.launches()[1].params[1] == address

    # It ends with the object: no cycle waits for the collector.
    gc.disable()
    try:
        del bound
        assert memory() is None
        assert arena_memory() is None
    finally:
        gc.enable()


class Changing(GatherRows):
    """A spec that breaks the contract: its operands change."""

    name = "w"

    def operands(self, flags: Any) -> tuple[Operand, ...]:
        first, *rest = super().operands(flags)
        return (replace(first, name=self.name), *rest)


def test_what_was_planned_is_bound_though_the_spec_has_changed(
    driver: StubDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = ready_on_stub(
        plan(Changing(), 10), driver, settings=Settings(on_miss="compile", cache="off")
    )
    monkeypatch.setattr(Changing, "name", "weights")
    tensors = tensors_of(GatherRows(), I64)
    arena = Arena.allocate(4096, CPU)
    bound = ready.bind(tensors, arena, ids="i64")
    assert bound.run(*call_of(GatherRows(), I64, 3)) == 2
    with pytest.raises(InvalidArgumentError):
        bound.run(*call_of(GatherRows(), I64, 11))
    monkeypatch.setattr(Changing, "name", "w")
    monkeypatch.setattr(
        Changing,
        "operands",
        lambda self, flags: (*GatherRows.operands(self, flags), Operand("more", "fp32", (4,))),
    )
    with pytest.raises(InvalidArgumentError, match="has other operands than when it was planned"):
        bound.run(*call_of(GatherRows(), I64, 11))


def test_an_arena_that_another_launcher_uses_is_refused(ready: Ready) -> None:
    arena = ready.arena()
    arena.take("another")
    with pytest.raises(ArenaError, match="must be another, which uses it already"):
        ready.bind(tensors_of(GatherRows(), I64), arena, ids="i64")


def test_what_belongs_to_a_process_says_that_it_cannot_be_copied(ready: Ready) -> None:
    bound = ready.bind(tensors_of(GatherRows(), I64), ready.arena(), ids="i64")
    for owner, name in ((ready, "Ready"), (bound, "Bound")):
        for copying in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=f"{name}: cannot be pickled or copied"):
                copying(owner)


def test_flags_that_the_plan_left_out_are_refused_or_compiled(
    driver: StubDriver, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = plan(GatherRows(), 40, flags={"ids": ["i32"]})
    tensors = tensors_of(GatherRows(), I64)
    text = (
        r"not planned: flags \{'ids': 'i64'\}, the plan holds 0..40 tokens; key gather_kernel\(.*"
        r"ids_ptr: \*i64, .*; nearest gather_kernel\(.*; ids_ptr: '\*i64', nearest has '\*i32'"
    )
    ready = ready_on_stub(made, driver)
    with pytest.raises(NotPlannedError, match=text + "$"):
        ready.bind(tensors, ready.arena(), ids="i64")
    assert len(ready.audit.misses) == 1

    for on_miss in ("warn", "compile"):
        caplog.clear()
        compiler = Compiler()
        ready = ready_on_stub(made, driver, settings=Settings(on_miss=on_miss, cache="off"))
        monkeypatch.setattr("firesteel.launch.ready.compile_all", compiler)
        bound = ready.bind(tensors, ready.arena(), ids="i64")
        assert bound.run(*call_of(GatherRows(), I64, 40)) == 2
        ready.bind(tensors, ready.arena(), ids="i64")
        # Once, and only what is new: the second kernel reads no ids.
        assert len(compiler.asked) == 3
        assert all(dict(key.arguments)["ids_ptr"] == "*i64" for key in compiler.asked)
        assert len(warnings_of(caplog)) == (on_miss == "warn")
        found = ready.audit.as_dict()
        assert len(found["misses"]) == 1
        assert len(found["launched_unplanned"]) == 1


def test_flags_that_the_plan_left_out_are_refused_under_capture(driver: StubDriver) -> None:
    made = plan(GatherRows(), 40, flags={"ids": ["i32"]})
    ready = ready_on_stub(made, driver, settings=Settings(on_miss="compile", cache="off"))
    driver.reset()
    driver.set_capturing(0, True)
    with pytest.raises(NotPlannedError, match="nothing is compiled under CUDA graph capture"):
        ready.bind(tensors_of(GatherRows(), I64), ready.arena(), ids="i64")
    assert "cuModuleLoadData" not in driver.calls()
