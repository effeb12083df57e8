import importlib.metadata
import subprocess
import sys

import torch
import transformers

import firesteel
from firesteel.checkpoint.families import FAMILIES
from firesteel.cli import environment
from tests.cli.command import ROOT, invoke, invoke_json


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
