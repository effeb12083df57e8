"""What is refused of an engine's options and layers; vLLM is not needed, and stood in for."""

from types import SimpleNamespace

import pytest

from firesteel.errors import UnsupportedError
from firesteel.integrations.vllm.limits import check_load_format


def test_load_formats_of_other_files_are_refused(tmp_path):
    for name in ("auto", "safetensors", "dummy"):
        check_load_format(SimpleNamespace(load_format=name), tmp_path)
    with pytest.raises(UnsupportedError, match=r"load_format: got 'pt', must be one of auto, hf"):
        check_load_format(SimpleNamespace(load_format="pt"), tmp_path)
    (tmp_path / "consolidated.safetensors").touch()
    check_load_format(SimpleNamespace(load_format="safetensors"), tmp_path)
    with pytest.raises(UnsupportedError, match=r"got 'auto', .* consolidated.safetensors in"):
        check_load_format(SimpleNamespace(load_format="auto"), tmp_path)
