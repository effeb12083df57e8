"""Compiling apart from the process: no folder, no knob and no lock of it is touched."""

import errno
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from firesteel.errors import InvalidArgumentError, UnsupportedError
from firesteel.launch import Kernel, LaunchKey
from firesteel.launch.binary import Binary, compile_all, identity
from firesteel.launch.compiler import environment

ROOT = Path(__file__).parent.parent.parent


@triton.jit
def product_kernel(x_ptr, y_ptr, SIZE: tl.constexpr):
    row = tl.arange(0, 32)
    at = row[:, None] * 32 + row[None, :]
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, tl.dot(x, x) * SIZE + x * x)


KERNEL = Kernel(product_kernel)


def key_of(size: int) -> LaunchKey:
    return KERNEL.key({"x_ptr": "*fp32", "y_ptr": "*fp32"}, {"SIZE": size})


def compiled(*sizes: int, target: str = "sm_90") -> dict[LaunchKey, Binary]:
    found: dict[LaunchKey, Binary] = {}
    wanted = [(KERNEL, key_of(size)) for size in sizes]
    compile_all(wanted, target, threads=2, done=found.__setitem__)
    return found


VARIABLES = {
    "DISABLE_LLVM_OPT": "1",
    "DISABLE_PTXAS_OPT": "1",
    "TRITON_DISABLE_LINE_INFO": "1",
    "TRITON_F32_DEFAULT": "ieee",
    "TRITON_LIBDEVICE_PATH": "/elsewhere",
    "TRITON_MOCK_PTX_VERSION": "8.0",
}


@pytest.mark.parametrize("name", VARIABLES)
def test_a_variable_that_changes_code_changes_the_identity(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in VARIABLES:
        monkeypatch.delenv(other, raising=False)
    assert environment(90) == environment(120) == {}
    before = identity(KERNEL, key_of(1), "sm_90")
    monkeypatch.setenv(name, VARIABLES[name])
    assert identity(KERNEL, key_of(1), "sm_90") != before
    monkeypatch.delenv(name)
    assert identity(KERNEL, key_of(1), "sm_90") == before


def test_a_knob_that_python_set_counts_as_the_variable_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from triton import knobs

    language: Any = knobs.language
    monkeypatch.setattr(knobs, "propagate_env", False)
    before = identity(KERNEL, key_of(1), "sm_90")
    with language.scope():
        language.fp32_default = "ieee"
        assert "TRITON_F32_DEFAULT" not in os.environ
        assert identity(KERNEL, key_of(1), "sm_90") != before
    assert identity(KERNEL, key_of(1), "sm_90") == before


def test_another_assembler_counts_by_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "ptxas"
    other.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 99.1, V99.1.5'\n")
    other.chmod(0o755)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(other))
    assert environment(90) == {"ptxas": "99.1"}


def test_a_compiler_of_another_form_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "compile", lambda *_, **__: None)
    with pytest.raises(UnsupportedError, match="has a compiler of another form"):
        compiled(1)


@pytest.mark.compile
@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, "No space left on device"), None])
def test_a_temporary_folder_that_is_full_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: OSError | None
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise fault or FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", fail)
    if fault is None:
        monkeypatch.setattr(tempfile, "gettempdir", fail)
    place = tmp_path if fault else "no folder that can be written"
    with pytest.raises(InvalidArgumentError, match=f"TMPDIR: got {place}, must be a folder with"):
        compiled(1)


@pytest.mark.compile
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TRITON_STORE_BINARY_ONLY", "1"),
        ("TRITON_KERNEL_OVERRIDE", "1"),
        ("TRITON_OVERRIDE_ARCH", "sm80"),
        ("TRITON_DEFAULT_FP_FUSION", "0"),
        ("USE_IR_LOC", "ttir"),
    ],
)
def test_a_variable_that_may_not_matter_changes_nothing(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (before,) = compiled(1).values()
    monkeypatch.setenv(name, value)
    (after,) = compiled(1).values()
    assert after.image == before.image
    assert after.num_hidden == before.num_hidden


class Listener(threading.Thread):
    """Compiles an ordinary kernel again and again, as another library would."""

    def __init__(self, ends: threading.Event) -> None:
        super().__init__()
        self._ends = ends
        self.count = 0
        self.errors: list[BaseException] = []

    def run(self) -> None:
        try:
            while not self._ends.is_set() or not self.count:
                constants = {"SIZE": 1000 + self.count}
                types = {"x_ptr": "*fp32", "y_ptr": "*fp32", "SIZE": "constexpr"}
                source: Any = ASTSource(product_kernel, types, constants)
                made: Any = triton.compile(source, target=GPUTarget("cuda", 90, 32))
                assert made.asm["cubin"]
                self.count += 1
        except BaseException as error:
            self.errors.append(error)


@pytest.mark.compile
def test_another_thread_keeps_its_cache_the_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton import knobs

    cache: Any = knobs.cache
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    ends = threading.Event()
    other = Listener(ends)
    other.start()
    try:
        assert len(compiled(*range(6))) == 6
    finally:
        ends.set()
        other.join()
    assert other.errors == []
    # Theirs are all there, ours are not.
    assert len(list(tmp_path.rglob("*.cubin"))) == other.count
    assert cache.dir == str(tmp_path) == os.environ["TRITON_CACHE_DIR"]


FORKS = """
import os, sys, threading, time
from tests.launch.test_compiler import compiled, environment
from firesteel.launch import op

compiled(0)
before = dict(os.environ)
with op._lock:
    thread = threading.Thread(target=compiled, args=range(1, 8))
    thread.start()
    time.sleep(float(sys.argv[1]))
    assert thread.is_alive()
    child = os.fork()
    if not child:
        assert dict(os.environ) == before
        op.register()
        os._exit(0 if len(compiled(*range(10, 13))) == 3 else 1)
deadline = time.monotonic() + 60
status = (0, 0)
while not status[0] and time.monotonic() < deadline:
    time.sleep(0.05)
    status = os.waitpid(child, os.WNOHANG)
if not status[0]:
    os.kill(child, 9)
thread.join()
print("hangs" if not status[0] else status[1])
"""


@pytest.mark.compile
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("delay", ["0.05", "0.3"])
def test_a_child_that_was_forked_during_a_compile_compiles(delay: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKS, delay]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert result.stdout == "0\n", result.stderr
