"""`prewarm`: from nothing, from the cache, from bundles, and by many processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.scale_rows.scale_rows import ScaleRows
from firesteel.errors import (
    DriverError,
    InvalidArgumentError,
    UnsupportedError,
)
from firesteel.launch import Kernel, LaunchKey, Plan, Ready, plan, prewarm, store
from firesteel.launch import binary as binaries
from firesteel.launch import ready as ready_module
from firesteel.launch.store import write_bundle
from firesteel.launch.stub import StubDriver
from firesteel.settings import Settings
from tests.launch.gather_rows import GatherRows
from tests.launch.rig import Compiler, pretended, ready_on_stub, warnings_of

ROOT = Path(__file__).parent.parent.parent
CPU = torch.device("cpu")
PLAN = plan(GatherRows(), 40)
I64 = (("ids", "i64"),)


def counts(ready: Ready) -> tuple[int, int, int, int]:
    """Compiled, from the cache, from the bundle, loaded."""
    found = ready.audit.prewarmed
    return found.compiled, found.from_cache, found.from_bundle, found.loaded


def bundle_of(
    folder: Path,
    made: Plan = PLAN,
    target: str = "sm_90",
    keys: tuple[LaunchKey, ...] | None = None,
) -> Path:
    listed = [
        pretended(made.kernels[key.kernel], key, target)
        for key in (made.keys if keys is None else keys)
    ]
    write_bundle(folder, listed, plans=[made.digest], targets=[target])
    return folder


ALL = len(PLAN.keys)


def test_from_nothing_every_key_is_compiled_loaded_and_launched_once(driver: StubDriver) -> None:
    compiler = Compiler()
    ready = ready_on_stub(PLAN, driver, compiler=compiler)
    assert compiler.asked == list(PLAN.keys)
    assert counts(ready) == (ALL, 0, 0, ALL)
    assert driver.calls()["cuModuleLoadData"] == ALL
    launches = driver.launches()
    assert [x.function for x in launches] == [ready.function(k)[0].handle for k in PLAN.keys]
    assert {x.grid for x in launches} == {(1, 1, 1)}
    # Warming up is no launch of the plan.
    assert sum(ready.audit.launches().values()) == 0
    assert ready.target == "sm_90"


def test_a_launch_on_empty_work_passes_zeros_and_one_zeroed_address(driver: StubDriver) -> None:
    ready = ready_on_stub(PLAN, driver)
    driver.reset()
    # Handles stay, so that the parameters of a second one can be read.
    again = ready_on_stub(PLAN, driver)
    for key in PLAN.keys:
        driver.reset()
        again._launch_empty(PLAN.kernels[key.kernel], key, 0)
        (launch,) = driver.launches()
        kinds = [kind for _, kind in key.arguments]
        addresses = {p for p, kind in zip(launch.params, kinds, strict=False) if kind[0] == "*"}
        assert len(addresses) == 1
        assert not any(p for p, kind in zip(launch.params, kinds, strict=False) if kind[0] != "*")
        # Hidden parameters are null.
        assert launch.params[len(kinds) :] == (0, 0)
        assert dict(launch.attributes) == ({6: 1} if key.pdl else {})
    assert ready.plan is again.plan


def test_a_kernel_that_cannot_run_on_empty_work_is_only_loaded(driver: StubDriver) -> None:
    made = plan(GatherRows(), 40)
    for kernel in made.kernels.values():
        object.__setattr__(kernel, "launches_empty", "combine" not in kernel.name)
    try:
        ready = ready_on_stub(made, driver)
    finally:
        for kernel in made.kernels.values():
            object.__setattr__(kernel, "launches_empty", True)
    assert counts(ready)[3] == ALL
    assert driver.num_launches() == sum("gather_kernel" in key.kernel for key in made.keys)


def test_the_cache_serves_the_second_time(
    driver: StubDriver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(cache_dir=tmp_path)
    compiler = Compiler()
    first = ready_on_stub(PLAN, driver, settings=settings, compiler=compiler)
    assert counts(first) == (ALL, 0, 0, ALL)
    second = ready_on_stub(PLAN, driver, settings=settings, compiler=compiler)
    assert counts(second) == (0, ALL, 0, ALL)
    assert len(compiler.asked) == ALL
    assert [second.function(k)[1] for k in PLAN.keys] == [first.function(k)[1] for k in PLAN.keys]
    # A larger plan shares what it can.
    larger = plan(GatherRows(), 100)
    third = ready_on_stub(larger, driver, settings=settings, compiler=compiler)
    assert counts(third) == (0, ALL, 0, ALL)
    assert warnings_of(caplog) == []


def test_a_cache_that_is_off_is_neither_read_nor_written(
    driver: StubDriver, tmp_path: Path
) -> None:
    off, on = Settings(cache="off", cache_dir=tmp_path), Settings(cache_dir=tmp_path)
    ready_on_stub(PLAN, driver, settings=off)
    assert list(tmp_path.iterdir()) == []
    ready_on_stub(PLAN, driver, settings=on)
    assert counts(ready_on_stub(PLAN, driver, settings=off)) == (ALL, 0, 0, ALL)


def test_corrupt_entries_are_rebuilt_with_one_warning(
    driver: StubDriver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(cache_dir=tmp_path)
    ready_on_stub(PLAN, driver, settings=settings)
    first, second, third, *_ = sorted(tmp_path.rglob("*.kernel"))
    first.write_bytes(b"")
    second.write_bytes(third.read_bytes())
    ready = ready_on_stub(PLAN, driver, settings=settings)
    assert counts(ready) == (2, ALL - 2, 0, ALL)
    (message,) = warnings_of(caplog)
    assert "compiled again" in message
    assert counts(ready_on_stub(PLAN, driver, settings=settings)) == (0, ALL, 0, ALL)
    assert len(warnings_of(caplog)) == 1


def test_a_cache_that_cannot_be_used_is_worked_without(
    driver: StubDriver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "under"):
        caplog.clear()
        ready = ready_on_stub(PLAN, driver, settings=Settings(cache_dir=folder))
        assert counts(ready) == (ALL, 0, 0, ALL)
        assert len(warnings_of(caplog)) == 1


def test_a_bundle_needs_no_compiler(driver: StubDriver, tmp_path: Path) -> None:
    compiler = Compiler()
    bundle = bundle_of(tmp_path / "bundle")
    ready = ready_on_stub(PLAN, driver, compiler=compiler, bundle=bundle)
    assert counts(ready) == (0, 0, ALL, ALL)
    assert compiler.asked == []
    assert counts(ready_on_stub(PLAN, driver, bundle=str(bundle))) == (0, 0, ALL, ALL)
    settings = Settings(bundle=bundle)
    assert counts(ready_on_stub(PLAN, driver, settings=settings)) == (0, 0, ALL, ALL)
    # One that is passed comes first.
    with pytest.raises(InvalidArgumentError, match=r"bundle: .* has no readable manifest"):
        ready_on_stub(PLAN, driver, settings=settings, bundle=tmp_path)


def test_what_a_bundle_lacks_comes_from_the_cache_and_the_compiler(
    driver: StubDriver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(cache_dir=tmp_path / "cache")
    in_cache = ready_on_stub(
        plan(GatherRows(), 7, flags={"ids": ["i32"]}), driver, settings=settings
    )
    cached = set(in_cache.plan.keys)
    assert len(cached) == 2
    rest = [key for key in PLAN.keys if key not in cached]
    bundle = bundle_of(tmp_path / "bundle", keys=tuple(rest[:2]))
    ready = ready_on_stub(PLAN, driver, settings=settings, bundle=bundle)
    assert counts(ready) == (ALL - 4, 2, 2, ALL)
    (message,) = warnings_of(caplog)
    assert (
        "it was made of other sources, another plan, or in another environment; compiling instead"
        in message
    )


@pytest.mark.parametrize("kind", ["target", "triton", "sources"])
def test_a_foreign_bundle_is_compiled_instead_with_one_warning(
    driver: StubDriver,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
) -> None:
    with monkeypatch.context() as patched:
        if kind == "triton":
            for module in (binaries, store):
                patched.setattr(module, "triton_version", lambda: "9.9.9")
        if kind == "sources":
            patched.setattr(Kernel, "source_digest", "of an older release")
        target = "sm_120" if kind == "target" else "sm_90"
        bundle = bundle_of(tmp_path / "bundle", target=target)
    ready = ready_on_stub(PLAN, driver, bundle=bundle)
    assert counts(ready) == (ALL, 0, 0, ALL)
    (message,) = warnings_of(caplog)
    assert {
        "target": "it is for sm_120, this device is sm_90",
        "triton": "it was made by Triton 9.9.9, here is",
        "sources": "it was made of other sources",
    }[kind] in message


def test_a_bundle_that_is_none_is_refused_before_anything_is_loaded(
    driver: StubDriver, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgumentError, match=r"has no readable manifest\.json"):
        ready_on_stub(PLAN, driver, bundle=tmp_path / "nowhere")
    assert "cuModuleLoadData" not in driver.calls()


PREWARM = """
import os, signal, sys, time
from pathlib import Path
from firesteel.launch import plan
from firesteel.launch.stub import StubDriver
from firesteel.settings import Settings
from tests.launch.gather_rows import GatherRows
from tests.launch.rig import Compiler, ready_on_stub

folder, kill_at, wait_for = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
replace = os.replace
writes = []


class Slow(Compiler):
    def __call__(self, wanted, target, *, threads, done):
        print("compiling", flush=True)
        while wait_for and not Path(wait_for).exists():
            time.sleep(0.01)

        def killed(key, binary):
            if kill_at == "compile" and len(self.asked) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            done(key, binary)

        super().__call__(wanted, target, threads=threads, done=killed)


def write(source, target):
    writes.append(target)
    if kill_at == "write" and len(writes) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)


os.replace = write
ready = ready_on_stub(
    plan(GatherRows(), 40), StubDriver.open(), settings=Settings(cache_dir=folder), compiler=Slow()
)
found = ready.audit.prewarmed
print(found.compiled, found.from_cache, found.loaded)
"""


def start(folder: Path, kill_at: str = "", wait_for: str = "") -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", PREWARM, str(folder), kill_at, wait_for]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_two_processes_prewarm_one_cache_at_once(driver: StubDriver, tmp_path: Path) -> None:
    folder, go = tmp_path / "cache", tmp_path / "go"
    workers = [start(folder, wait_for=str(go)) for _ in range(2)]
    for worker in workers:
        assert worker.stdout is not None
        # Both have found nothing, and compile.
        assert worker.stdout.readline() == "compiling\n"
    go.touch()
    for worker in workers:
        stdout, stderr = worker.communicate(timeout=60)
        assert (worker.returncode, stderr) == (0, "")
        assert stdout == f"{ALL} 0 {ALL}\n"
    assert len(list(folder.rglob("*.kernel"))) == ALL
    assert not list(folder.rglob(".*"))
    ready = ready_on_stub(PLAN, driver, settings=Settings(cache_dir=folder))
    assert counts(ready) == (0, ALL, 0, ALL)


@pytest.mark.parametrize("kill_at", ["compile", "write"])
def test_a_prewarm_that_was_killed_leaves_a_cache_of_use(
    driver: StubDriver, tmp_path: Path, kill_at: str, caplog: pytest.LogCaptureFixture
) -> None:
    worker = start(tmp_path, kill_at)
    worker.communicate(timeout=60)
    assert worker.returncode == -signal.SIGKILL
    assert len(list(tmp_path.rglob("*.kernel"))) == 2
    assert len(list(tmp_path.rglob(".*.kernel-*"))) == (kill_at == "write")
    settings = Settings(cache_dir=tmp_path)
    assert counts(ready_on_stub(PLAN, driver, settings=settings)) == (ALL - 2, 2, 0, ALL)
    assert counts(ready_on_stub(PLAN, driver, settings=settings)) == (0, ALL, 0, ALL)
    assert warnings_of(caplog) == []


def test_no_progress_is_shown_unless_asked_for(
    driver: StubDriver, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ready_on_stub(PLAN, driver)
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")
    monkeypatch.setattr("firesteel.launch.ready.compile_all", Compiler())
    off = Settings(cache="off")
    for is_terminal in (False, True):
        # What rich takes for a terminal.
        monkeypatch.setenv("TTY_COMPATIBLE", str(int(is_terminal)))
        monkeypatch.setenv("FORCE_COLOR", "1" if is_terminal else "")
        prewarm(PLAN, device="cpu", driver=driver, settings=off, show_progress=True)
        captured = capfd.readouterr()
        assert captured.out == ""
        assert ("compiling kernels" in captured.err) == is_terminal
        assert (f"{ALL}/{ALL}" in captured.err) == is_terminal
        assert bool(captured.err) == is_terminal


def test_under_capture_it_is_refused_before_anything_is_loaded(driver: StubDriver) -> None:
    compiler = Compiler()
    driver.set_capturing(0, True)
    with pytest.raises(InvalidArgumentError, match="under CUDA graph capture, must not be"):
        ready_on_stub(PLAN, driver, compiler=compiler)
    assert compiler.asked == []
    assert "cuModuleLoadData" not in driver.calls()


@pytest.mark.parametrize("device", ["cpu", CPU])
def test_a_device_without_a_driver_is_refused(device: Any) -> None:
    with pytest.raises(UnsupportedError, match="device: got cpu, kernels need a CUDA device"):
        prewarm(PLAN, device=device, settings=Settings(cache="off"))


def test_the_default_device_is_the_gpu_also_for_a_driver_that_was_given(
    driver: StubDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The CPU's addresses mean nothing to a real driver.
    monkeypatch.setattr(ready_module, "default_device", lambda: torch.device("cuda", 3))
    assert ready_module._checked_device(None, driver) == torch.device("cuda", 3)
    assert ready_module._checked_device("cpu", driver) == CPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_no_gpu_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="kernels need a CUDA device"):
        prewarm(PLAN, settings=Settings(cache="off"))


def test_no_triton_is_refused(driver: StubDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(UnsupportedError, match="triton: not installed, kernels need it"):
        ready_on_stub(PLAN, driver)


def test_a_wrong_variable_is_refused_before_anything_is_loaded(
    driver: StubDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIRESTEEL_ON_MISS", "sometimes")
    with pytest.raises(InvalidArgumentError, match="FIRESTEEL_ON_MISS: got 'sometimes'"):
        prewarm(PLAN, device="cpu", driver=driver)
    assert driver.calls() == {}


@pytest.mark.parametrize(
    ("function", "result"), [("cuModuleLoadData", 209), ("cuLaunchKernelEx", 701)]
)
def test_a_driver_that_refuses_a_kernel_is_quoted(
    driver: StubDriver, function: str, result: int
) -> None:
    driver.fail(function, result)
    with pytest.raises(DriverError, match=f"{function}: got CUresult {result}"):
        ready_on_stub(PLAN, driver)


@pytest.mark.compile
def test_the_example_is_really_compiled_cached_and_loaded(
    driver: StubDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    made = plan(ScaleRows(k=96), 100)
    settings = Settings(cache_dir=tmp_path / "ours")
    found = []
    for _ in range(2):
        ready = prewarm(made, device="cpu", driver=driver, settings=settings)
        found.append(counts(ready))
        assert all(ready.function(key)[1].image.startswith(b"\x7fELF") for key in made.keys)
    assert found == [(4, 0, 0, 4), (0, 4, 0, 4)]
    assert not (tmp_path / "triton").exists()
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "triton")
