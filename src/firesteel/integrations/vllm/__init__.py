# vLLM is not there where types are checked.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportAttributeAccessIssue=false
# pyright: reportUnknownParameterType=false
"""The vLLM host: a plugin that loads quantised mixtures of experts and runs them.

`register` is the entry point that vLLM calls in each of its processes. vLLM is imported when it is
called, and not before.
"""

import logging

__all__ = ["register"]

# vLLM shows what is logged under its own name alone.
log = logging.getLogger("vllm.firesteel")


def register() -> None:
    """Make `--quantization firesteel` known to vLLM; as often as it likes.

    vLLM calls it for every model, and an error here would end them all. So with an engine that the
    plugin does not fit it warns, and `--quantization firesteel` alone is an error.
    """
    from firesteel.integrations.vllm import support

    found = support.found_versions()
    reason = support.mismatch(found)
    if reason is None:
        try:
            _register()
            return
        # What an engine lacks shows as whatever its import raises.
        except Exception as error:
            versions = ", ".join(f"{name} {version}" for name, version in found.items())
            reason = (
                f"{type(error).__name__}: {error} (got {versions}, "
                f"supported is {support.supported()})"
            )
    log.warning("firesteel is off, it loads no model: %s", reason)
    try:
        support.register_refusal(reason)
    except (ImportError, AttributeError) as error:
        log.warning("vLLM will not know --quantization %s: %s", support.METHOD, error)


def _register() -> None:
    from vllm.model_executor.layers.quantization import register_quantization_config

    from firesteel.integrations.vllm.config import METHOD, FiresteelConfig

    register_quantization_config(METHOD)(FiresteelConfig)
