import inspect
import logging
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import firesteel
from firesteel.moe.tuning_file import shipped_tables

ROOT = Path(__file__).parent.parent

IMPORT_PROBE = """
import sys
import firesteel
import torch
unwanted = {"triton", "transformers", "typer"} & set(sys.modules)
assert not unwanted, unwanted
assert not torch.cuda.is_initialized()
"""

BUILD = """
import sys
from setuptools import build_meta
# A build sets arguments of its own.
folder = sys.argv[1]
build_meta.build_wheel(folder)
build_meta.build_sdist(folder)
"""


def test_import_loads_neither_triton_nor_a_host_and_touches_no_gpu():
    subprocess.run([sys.executable, "-W", "error", "-c", IMPORT_PROBE], check=True, cwd=ROOT)


def test_all_is_sorted_and_lists_the_public_names():
    public = {
        name
        for name, value in vars(firesteel).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert firesteel.__all__ == sorted(firesteel.__all__)
    assert public <= set(firesteel.__all__)
    for name in firesteel.__all__:
        assert getattr(firesteel, name) is not None


def test_logger_is_silent_until_asked():
    handlers = logging.getLogger("firesteel").handlers
    assert any(isinstance(handler, logging.NullHandler) for handler in handlers)


def test_wheel_and_sdist_hold_py_typed_licence_and_tables(tmp_path: Path):
    project = tmp_path / "project"
    shutil.copytree(ROOT / "src", project / "src", ignore=shutil.ignore_patterns("*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project)
    subprocess.run(
        [sys.executable, "-c", BUILD, str(tmp_path)],
        check=True,
        cwd=project,
        env={**os.environ, "PYTHONWARNINGS": "default"},
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"firesteel-{firesteel.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "firesteel/py.typed" in names
    assert any(name.endswith("/LICENSE") for name in names)
    tables = {f"firesteel/moe/tables/{name}.json" for name in shipped_tables()}
    assert tables == {name for name in names if name.endswith(".json")}
    (source,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = archive.getnames()
    top = source.name.removesuffix(".tar.gz")
    assert {f"{top}/src/{name}" for name in (*tables, "firesteel/py.typed")} <= set(names)
    assert f"{top}/LICENSE" in names
