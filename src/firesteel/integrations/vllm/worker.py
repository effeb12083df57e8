"""What the engine's workers answer about firesteel while they serve.

Start vLLM with `--worker-extension-cls firesteel.integrations.vllm.worker.WorkerExtension`, and
`llm.collective_rpc("firesteel_report")` asks each worker.
"""

from typing import Any

from firesteel.integrations.vllm.experts import report

__all__ = ["WorkerExtension"]


class WorkerExtension:
    """A further base class of vLLM's worker, which finds methods by their names."""

    def firesteel_report(self) -> dict[str, Any] | None:
        """What was packed and what runs it, with counters; None where firesteel loaded nothing."""
        worker: Any = self
        return report(worker.get_model())
