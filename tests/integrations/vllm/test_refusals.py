"""What the plugin's classes refuse when an engine asks them; they need vLLM, and no engine runs."""

import pytest

from firesteel.errors import InvalidArgumentError

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def config_class():
    from firesteel.integrations.vllm.config import FiresteelConfig

    return FiresteelConfig


def test_a_wrong_variable_ends_a_model_that_firesteel_shall_load(config_class, monkeypatch):
    monkeypatch.setenv("FIRESTEEL_CACHE", "maybe")
    with pytest.raises(InvalidArgumentError, match="FIRESTEEL_CACHE: got 'maybe'"):
        config_class.override_quantization_method({}, "firesteel")
    with pytest.raises(InvalidArgumentError, match="FIRESTEEL_CACHE: got 'maybe'"):
        config_class.from_config({})
    for other in (None, "gptq"):
        assert config_class.override_quantization_method({}, other) is None
