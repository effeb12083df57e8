# vLLM is not there where types are checked.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportAttributeAccessIssue=false
# pyright: reportUnknownParameterType=false
"""The keys of a prewarmed plan in the engine's own registry of what it warms up."""

from __future__ import annotations

from vllm.model_executor.warmup.jit_warmup import VllmJitKernel

from firesteel.launch import LaunchKey, Ready

__all__ = ["PlannedKernels"]


class PlannedKernels(VllmJitKernel[LaunchKey]):
    """All kernels of a plan; they are loaded already, so that warming one up only looks it up.

    `register_warmup()` puts it into the registry that is active, where one is.
    """

    CompileKey = LaunchKey

    def __init__(self, ready: Ready) -> None:
        super().__init__()
        self._ready = ready

    def get_warmup_keys(self) -> list[LaunchKey]:
        """Every key that a call can reach."""
        return list(self._ready.plan.keys)

    def compile(self, compile_key: LaunchKey) -> None:
        """Nothing is compiled.

        Raises
            KeyError: the key is not of the plan.
        """
        self._ready.function(compile_key)
