"""`firesteel::run_`: a bound operation in torch's dispatcher and in torch.compile."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from firesteel.errors import InvalidArgumentError
from firesteel.launch import Bound, plan
from firesteel.launch.op import handle_of, register, run_op
from firesteel.launch.stub import StubDriver
from tests.launch.gather_rows import WIDTH, GatherRows
from tests.launch.rig import call_of, ready_on_stub, tensors_of

SPEC = GatherRows()
I64 = (("ids", "i64"),)


@pytest.fixture
def driver() -> StubDriver:
    return StubDriver.open()


@pytest.fixture
def bound(driver: StubDriver) -> Bound:
    ready = ready_on_stub(plan(SPEC, 20), driver)
    made = ready.bind(tensors_of(SPEC, I64), ready.arena(), ids="i64")
    driver.reset()
    return made


def test_the_operator_launches_as_run_does(bound: Bound, driver: StubDriver) -> None:
    x, ids, out = call_of(SPEC, I64, 5)
    bound.run(x, ids, out)
    run_op(bound.handle, [x, ids], [out])
    first, second, third, fourth = driver.launches()
    assert (third, fourth) == (first, second)


def test_registering_again_is_nothing() -> None:
    register()
    operator = torch.ops.firesteel.run_.default
    register()
    assert torch.ops.firesteel.run_.default is operator
    assert [argument.is_write for argument in operator._schema.arguments] == [False, False, True]


@pytest.mark.parametrize(
    ("inputs", "outputs"), [(0, 0), (1, 1), (3, 1), (2, 0), (2, 2), (3, 0), (1, 2)]
)
def test_other_numbers_of_tensors_are_refused(
    bound: Bound, driver: StubDriver, inputs: int, outputs: int
) -> None:
    x = torch.zeros(5, 2, WIDTH // 2)
    with pytest.raises((InvalidArgumentError, NotImplementedError)) as caught:
        run_op(bound.handle, [x] * inputs, [x] * outputs)
    assert driver.launches() == []
    if inputs or outputs:
        assert f"got {inputs} inputs and {outputs} outputs, must be ['x', 'ids'] and ['out']" in (
            str(caught.value)
        )


def test_a_wrong_tensor_is_refused_by_name(bound: Bound) -> None:
    x, ids, out = call_of(SPEC, I64, 5)
    with pytest.raises(InvalidArgumentError, match=r"ids: got torch\.int32, must be torch\.int64"):
        run_op(bound.handle, [x, ids.int()], [out])


@pytest.mark.parametrize("handle", [0, -1, 2**62])
def test_a_handle_that_never_was_is_refused(driver: StubDriver, handle: int) -> None:
    register()
    with pytest.raises(InvalidArgumentError, match=f"handle: got {handle}, whose Bound no longer"):
        run_op(handle, [torch.zeros(1)], [torch.zeros(1)])


def test_the_handle_of_a_bound_that_ended_is_refused(driver: StubDriver) -> None:
    ready = ready_on_stub(plan(SPEC, 20), driver)
    made = ready.bind(tensors_of(SPEC, I64), ready.arena(), ids="i64")
    handle = made.handle
    del made
    x, ids, out = call_of(SPEC, I64, 5)
    with pytest.raises(InvalidArgumentError, match=f"handle: got {handle}, whose Bound no longer"):
        run_op(handle, [x, ids], [out])


def test_handles_are_never_given_twice(bound: Bound) -> None:
    handles = {handle_of(bound) for _ in range(5)}
    assert len(handles | {bound.handle}) == 6


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile_traces_past_it(bound: Bound, driver: StubDriver, backend: str) -> None:
    handle = bound.handle

    def step(x: Tensor, ids: Tensor) -> Tensor:
        out = torch.zeros(x.shape[0], WIDTH)
        run_op(handle, [x * 2, ids], [out])
        return out + 1

    torch.compiler.reset()
    compiled: Any = torch.compile(step, backend=backend, fullgraph=True, dynamic=False)
    x, ids, _ = call_of(SPEC, I64, 5)
    x.fill_(1)
    ids.zero_()
    # While it traces, nothing is launched but what the call itself launches.
    for number in range(1, 4):
        assert torch.equal(compiled(x, ids), torch.ones(5, WIDTH))
        assert driver.num_launches() == 2 * number
    assert [launch.params[3] for launch in driver.launches()] == [5] * 6
    torch.compiler.reset()
    gc.collect()


def test_fake_tensors_launch_nothing(bound: Bound, driver: StubDriver) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(5, 2, WIDTH // 2)
        run_op(bound.handle, [x, torch.empty(5, dtype=torch.int64)], [torch.empty(5, WIDTH)])
    assert driver.launches() == []
