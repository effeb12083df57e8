import importlib.metadata
import json
import subprocess
import sys

import torch
import transformers

import firesteel
from firesteel.checkpoint.families import FAMILIES
from firesteel.cli import environment
from firesteel.launch.runner import default_kind, native_failure
from firesteel.settings import Settings
from tests.cli.command import ROOT, assert_error, invoke, invoke_json, run_apart


def test_env_json_has_versions_machine_formats_and_families():
    found = invoke_json("env")
    assert found["versions"]["firesteel"] == firesteel.__version__
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["transformers"] == transformers.__version__
    assert found["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"cpu", "cpus", "threads", "gpu", "platform"} <= set(found)
    assert {family["model_type"] for family in found["families"]} == set(FAMILIES)
    assert {"compressed-tensors", "gptq", "awq"} <= {entry["name"] for entry in found["formats"]}
    assert (found["gpu"] is None) == (found["default_device"] == "cpu")


def test_env_table_says_what_is_not_installed(monkeypatch):
    def version(name: str) -> str:
        if name == "triton":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.2.3"

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert environment.versions()["triton"] is None
    assert "not installed" in invoke("env").stdout


def test_env_says_which_launcher_there_is_and_what_is_set(monkeypatch):
    monkeypatch.delenv("FIRESTEEL_LAUNCHER", raising=False)
    monkeypatch.setenv("FIRESTEEL_MAX_TOKENS", "77")
    found = invoke_json("env")
    assert found["launcher"] == {"kind": default_kind(), "native_failure": native_failure()}
    assert found["settings"]["max_tokens"] == 77
    assert set(found["settings"]) == set(Settings.__dataclass_fields__)
    shown = invoke("env").stdout
    assert "FIRESTEEL_MAX_TOKENS=77" in shown
    assert f"launcher      {default_kind()}" in shown


def test_env_says_why_the_native_launcher_is_missing(monkeypatch):
    monkeypatch.delenv("FIRESTEEL_LAUNCHER", raising=False)
    monkeypatch.setattr(environment, "default_kind", lambda: "python")
    monkeypatch.setattr(environment, "native_failure", lambda: "no module _native")
    found = invoke_json("env")
    assert found["launcher"] == {"kind": "python", "native_failure": "no module _native"}
    assert "python; the native one was not built: no module _native" in invoke("env").stdout
    monkeypatch.setenv("FIRESTEEL_LAUNCHER", "native")
    assert "native, as set, but it was not built" in invoke("env").stdout


_NOT_BUILT = """
import sys

class NotBuilt:
    def find_spec(self, name, path=None, target=None):
        if name == "firesteel.launch._native":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NotBuilt())
"""


def test_env_of_a_checkout_that_was_not_built_names_the_module():
    done = run_apart("env", "--json", code=_NOT_BUILT)
    assert done.returncode == 0, done.stderr
    failure = json.loads(done.stdout)["launcher"]["native_failure"]
    assert failure == "No module named 'firesteel.launch._native'"


def test_env_of_the_python_launcher_as_set(monkeypatch):
    monkeypatch.setattr(environment, "native_failure", lambda: None)
    monkeypatch.setenv("FIRESTEEL_LAUNCHER", "python")
    assert invoke_json("env")["launcher"]["kind"] == "python"


def test_env_names_a_variable_that_is_none(monkeypatch):
    monkeypatch.setenv("FIRESTEEL_MAX_TOKEN", "77")
    assert_error(invoke("env"), "FIRESTEEL_MAX_TOKEN: no such variable", "FIRESTEEL_MAX_TOKENS")


def test_commit_is_that_of_the_checkout():
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    found = environment.commit()
    if head == "" or head == "HEAD":
        assert found is None
    else:
        assert found is not None
        assert head.startswith(found.removesuffix("-dirty"))
