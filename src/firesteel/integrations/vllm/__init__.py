# vLLM is not there where types are checked.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportAttributeAccessIssue=false
# pyright: reportUnknownParameterType=false
"""The vLLM host: a plugin that loads quantised mixtures of experts and runs them.

`register` is the entry point that vLLM calls in each of its processes. vLLM is imported when it is
called, and not before.
"""

__all__ = ["register"]


def register() -> None:
    """Make `--quantization firesteel` known to vLLM; as often as it likes."""
    from vllm.model_executor.layers.quantization import register_quantization_config

    from firesteel.integrations.vllm.config import METHOD, FiresteelConfig

    register_quantization_config(METHOD)(FiresteelConfig)
