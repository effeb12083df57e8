"""What the plugin does in an engine that it is not made for; vLLM is stood in for."""

import logging
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import tomllib

from firesteel.errors import UnsupportedError
from firesteel.integrations.vllm import register
from firesteel.integrations.vllm.support import SUPPORTED, mismatch

QUANTIZATION = "vllm.model_executor.layers.quantization"


def test_the_range_is_that_of_the_package():
    root = Path(__file__).parents[3]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    stated = {}
    for wanted in (*extras["vllm"], *extras["transformers"]):
        match = re.match(r"(\w+)>=(\d+)\.(\d+),<(\d+)\.(\d+)", wanted)
        if match:
            numbers = [int(text) for text in match.groups()[1:]]
            stated[match[1]] = (tuple(numbers[:2]), tuple(numbers[2:]))
    assert stated == SUPPORTED


@pytest.mark.parametrize(
    ("vllm", "transformers", "reason"),
    [
        ("0.32.0", "5.16.0", None),
        ("0.33.1.dev7+g12", "5.24.9", None),
        ("0.31.0", "5.19.0", "got vllm 0.31.0, supported is vllm 0.32 to 0.33 with transformers"),
        ("0.34.0rc1", "5.19.0", "got vllm 0.34.0rc1"),
        ("dev", "5.19.0", "got vllm dev"),
        ("0.32.0", "5.15.2", "got transformers 5.15.2"),
        ("0.32.0", "5.25.0", "got transformers 5.25.0, supported is .* 5.16 to 5.24"),
    ],
)
def test_versions_that_are_not_supported_are_named(vllm, transformers, reason):
    got = mismatch({"vllm": vllm, "transformers": transformers})
    assert got is None if reason is None else re.match(reason, got)


@pytest.fixture
def engine(monkeypatch):
    """A vLLM that has a registry of methods and nothing that firesteel imports besides."""
    registry = {}
    modules = {name: ModuleType(name) for name in ("vllm", QUANTIZATION)}
    modules[f"{QUANTIZATION}.base_config"] = base = ModuleType("base_config")
    base.QuantizationConfig = type("QuantizationConfig", (), {})
    modules[QUANTIZATION].register_quantization_config = lambda name: (
        lambda c: registry.update({name: c})
    )
    for parent in ("vllm.model_executor", "vllm.model_executor.layers"):
        modules[parent] = ModuleType(parent)
    for name, module in modules.items():
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    modules["vllm"].__version__ = "0.32.0"
    modules["vllm"].registry = registry
    return modules["vllm"]


@pytest.mark.parametrize(
    ("version", "reason"),
    [("0.31.0", "got vllm 0.31.0, supported is"), ("0.32.0", r"ModuleNotFoundError: .*got vllm")],
)
def test_an_engine_that_does_not_fit_is_warned_of_and_loads_other_models(
    engine, caplog, version, reason
):
    engine.__version__ = version
    with caplog.at_level(logging.WARNING):
        register()
    (record,) = caplog.records
    assert re.search(f"firesteel is off, it loads no model: {reason}", record.getMessage())
    refusal = engine.registry["firesteel"]
    assert refusal.override_quantization_method({}, None, hf_config=None) is None
    assert refusal.override_quantization_method({}, "gptq") is None
    assert refusal.get_config_filenames() == []
    for use in (
        lambda: refusal.override_quantization_method({}, "firesteel"),
        lambda: refusal.from_config({}),
        refusal,
    ):
        with pytest.raises(UnsupportedError, match=f"got 'firesteel', which is off: {reason}"):
            use()


def test_an_engine_without_a_registry_is_warned_of_too(engine, caplog):
    del sys.modules[QUANTIZATION].register_quantization_config
    register()
    assert "will not know --quantization firesteel" in caplog.text
