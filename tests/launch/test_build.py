"""The C extensions are built where a compiler is, and missed by nobody where none is."""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from firesteel.launch.runner import native_failure

ROOT = Path(__file__).parent.parent.parent


def build(folder: Path, **environment: str) -> tuple[str, set[str]]:
    """What building into the folder said, and the names of what it built."""
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", folder, "--build-temp"]
    result = subprocess.run(
        [*command, folder / "temp"],
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "default", **environment},
        capture_output=True,
        text=True,
    )
    built = {path.name.partition(".")[0] for path in folder.glob("firesteel/launch/*.so")}
    return result.stdout + result.stderr, built


def test_with_a_compiler_both_are_built_and_the_native_runner_is_in_use(tmp_path):
    """Or every test of them is skipped, and nobody notices."""
    if sys.platform != "linux" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        pytest.skip("nothing is built here")
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
    if shutil.which(compiler) is None:
        pytest.skip(f"no C compiler: {compiler}")
    output, built = build(tmp_path)
    assert built == {"_native", "_stub_driver"}, output
    assert native_failure() is None


def test_without_a_compiler_the_installation_goes_on_and_says_what_is_missing(tmp_path):
    if sys.platform != "linux":
        pytest.skip("nothing is built here")
    output, built = build(tmp_path, CC=str(tmp_path / "no-such-compiler"))
    assert built == set()
    for name in ("_native", "_stub_driver"):
        assert f'building extension "firesteel.launch.{name}" failed' in output


ELSEWHERE = """
import runpy, sys, sysconfig
import setuptools
setuptools.setup = lambda **options: print(options["ext_modules"], options["options"])
sysconfig.get_config_var("Py_GIL_DISABLED")
sys.platform = "elsewhere"
runpy.run_path("setup.py")
"""


def test_elsewhere_nothing_is_built():
    command = [sys.executable, "-c", ELSEWHERE]
    result = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True)
    assert result.stdout.split() == ["[]", "{}"]
