"""The watch sees what `run` must not do, sees nothing of `run`, and leaves nothing behind."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from examples.scale_rows.scale_rows import ScaleRows
from firesteel.launch import plan
from firesteel.launch.binary import compile_all
from firesteel.launch.stub import StubDriver
from firesteel.launch.watch import Seen, watch
from tests.launch.rig import call_of, ready_on_stub, tensors_of

CPU = torch.device("cpu")
FP32 = (("dtype", "fp32"),)


def hooks() -> tuple[object, ...]:
    from triton import knobs

    return (
        knobs.compilation.listener,
        type(os.environ).__getitem__,
        warnings.showwarning,
        tuple(warnings.filters),
        torch._C._len_torch_dispatch_stack(),
    )


READS: dict[str, Callable[[], object]] = {
    "subscript": lambda: os.environ["PATH"],
    "get": lambda: os.environ.get("PATH"),
    "get of nothing": lambda: os.environ.get("NO_SUCH_NAME_AT_ALL", "x"),
    "getenv": lambda: os.getenv("PATH"),
    "in": lambda: "PATH" in os.environ,
    "bytes": lambda: os.environb[b"PATH"],
}


@pytest.mark.parametrize("read", READS)
def test_a_read_of_the_environment_is_seen(read: str) -> None:
    with watch(CPU) as seen:
        READS[read]()
        READS[read]()
    assert seen == Seen(environment_reads=2)
    assert not seen.is_clean


def test_a_torch_operation_is_seen_by_name() -> None:
    x = torch.ones(3)
    with watch(CPU) as seen:
        (x + x).sum()
        torch.empty(2)
    assert seen.torch_operations == {
        "aten.add.Tensor": 1,
        "aten.sum.default": 1,
        "aten.empty.memory_format": 1,
    }
    assert not seen.is_clean


@pytest.mark.compile
def test_a_compile_is_seen_in_any_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    made = plan(ScaleRows(k=96), 100)
    wanted = [(made.kernels[key.kernel], key) for key in made.keys[:2]]
    with watch(CPU) as seen:
        compile_all(wanted, "sm_90", threads=2, done=lambda key, binary: None)
    assert seen.compiles == 2


def test_a_wait_for_the_gpu_is_seen() -> None:
    # As torch warns of one in its mode that warns of each.
    with watch(CPU) as seen:
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
    assert seen == Seen(host_syncs=3)


def test_a_run_is_clean() -> None:
    ready = ready_on_stub(plan(ScaleRows(k=96), 100), StubDriver.open())
    bound = ready.bind(tensors_of(ready.plan.spec, FP32), ready.arena(), dtype="fp32")
    calls = [call_of(ready.plan.spec, FP32, num_tokens) for num_tokens in range(101)]
    assert ready.audit.as_dict()["seen_in_run"] is None
    with ready.watch() as seen:
        for call in calls:
            bound.run(*call)
    assert seen.is_clean
    assert ready.audit.as_dict()["seen_in_run"] == seen.as_dict()


def test_what_is_seen_is_added_to_the_audit() -> None:
    ready = ready_on_stub(plan(ScaleRows(k=96), 10), StubDriver.open())
    for _ in range(2):
        with ready.watch():
            os.environ.get("PATH")
            torch.empty(1)
    with pytest.raises(KeyError), ready.watch():
        os.environ["NO_SUCH_NAME_AT_ALL"]
    found = ready.audit.as_dict()["seen_in_run"]
    assert found == {
        "compiles": 0,
        "allocations": 0,
        "environment_reads": 3,
        "host_syncs": 0,
        "torch_operations": {"aten.empty.memory_format": 2},
    }


@pytest.mark.parametrize("fails", [False, True])
def test_every_hook_is_put_back(fails: bool) -> None:
    before = hooks()
    try:
        with watch(CPU):
            assert hooks() != before
            with watch(CPU):
                assert hooks()[:2] != before[:2]
            if fails:
                raise MemoryError
    except MemoryError:
        assert fails
    assert hooks() == before
    with watch(CPU) as seen:
        pass
    os.environ.get("PATH")
    torch.empty(1)
    assert seen.is_clean


def test_a_listener_of_others_still_hears(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    heard: list[object] = []

    def listener(**values: object) -> None:
        heard.append(values)

    monkeypatch.setattr(knobs.compilation, "listener", listener)
    with watch(CPU) as seen:
        knobs.compilation.listener(cache_hit=False, src=1)  # type: ignore[misc]
        knobs.compilation.listener(cache_hit=True, src=2)  # type: ignore[misc]
    assert seen.compiles == 1
    assert heard == [{"cache_hit": False, "src": 1}, {"cache_hit": True, "src": 2}]
    assert knobs.compilation.listener is listener


def test_warnings_of_others_are_given_again_afterwards() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with watch(CPU) as seen:
            warnings.warn("of somebody else", DeprecationWarning, stacklevel=1)
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        assert seen.host_syncs == 1
    (warning,) = caught
    assert str(warning.message) == "of somebody else"
    assert (warning.category, warning.filename) == (DeprecationWarning, __file__)


def test_counts_add_up() -> None:
    total = Seen(compiles=1, torch_operations={"a": 1})
    total.add(Seen(2, 3, 4, 5, {"a": 1, "b": 2}))
    assert total == Seen(3, 3, 4, 5, {"a": 2, "b": 2})
    assert total.as_dict()["torch_operations"] == {"a": 2, "b": 2}
