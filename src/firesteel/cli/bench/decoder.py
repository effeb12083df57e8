"""Decode steps of a transformers model on a static cache, eager and as a CUDA graph."""

from __future__ import annotations

import gc
import inspect
import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from firesteel.device import synchronize, syncs_warn
from firesteel.errors import FiresteelError, UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Decoder", "step_us"]

_WARM_STEPS = 3
_SYNC = "synchronizing CUDA operation"


class Decoder:
    """Decode steps of one model: each takes the tokens that it is given, and gives logits.

    Args:
        model: on the device of `tokens`.
        tokens: int64 `[T, B]`, row t the tokens of step t; the static cache has T places.
    """

    def __init__(self, model: PreTrainedModel, tokens: Tensor) -> None:
        from transformers import StaticCache

        self._model = model
        # transformers renamed it; under the old name each call would pay for a warning.
        known = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in known else "past_key_values"
        self._tokens = tokens
        self._at = torch.zeros(1, dtype=torch.int64, device=tokens.device)
        self._cache = StaticCache(config=model.config, max_cache_len=tokens.shape[0])

    @property
    def device(self) -> torch.device:
        """Of the tokens."""
        return self._tokens.device

    @torch.no_grad()
    def step(self) -> Tensor:
        """Logits `[B, vocabulary]` of the next step. Nothing of it depends on the host."""
        ids = self._tokens.index_select(0, self._at).view(-1, 1)
        self._at.add_(1)
        given: dict[str, Any] = {"input_ids": ids, self._cache_name: self._cache}
        output = self._model(**given, use_cache=True)
        return output.logits[:, -1]

    def reset(self) -> None:
        """Start over with an empty cache, in the same memory."""
        self._cache.reset()
        self._at.zero_()

    def warm_up(self) -> None:
        """A few steps, so that nothing is set up for the first time afterwards."""
        self.reset()
        for _ in range(min(_WARM_STEPS, self._tokens.shape[0])):
            self.step()
        synchronize(self.device)

    def capture(self) -> Callable[[], Tensor]:
        """A function that replays a step as a graph; its logits are the same memory each time.

        Raises
            UnsupportedError: no GPU, or a step that waits for it or cannot be captured.
        """
        if self.device.type != "cuda":
            raise UnsupportedError(f"graphs were not measured: {self.device} is no CUDA device")
        self.warm_up()
        # Before: an error during capture would leave PyTorch's state in disorder.
        self._check_free_of_syncs()
        self.reset()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                logits = self.step()
        except (RuntimeError, FiresteelError) as error:
            raise UnsupportedError(f"capture: {_first_line(error)}") from error

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay

    def _check_free_of_syncs(self) -> None:
        self.reset()
        with warnings.catch_warnings(record=True) as caught, syncs_warn(self.device):
            warnings.simplefilter("always")
            self.step()
        count = sum(_SYNC in str(warning.message) for warning in caught)
        if count:
            raise UnsupportedError(f"capture: a step waits for the GPU {count} times")


def step_us(
    step: Callable[[], Tensor], decoder: Decoder, *, steps: int, repeats: int
) -> list[float]:
    """Microseconds a step, of each of `repeats` runs of `steps` steps from an empty cache."""
    found: list[float] = []
    for _ in range(repeats):
        decoder.reset()
        synchronize(decoder.device)
        gc.disable()
        try:
            start = time.perf_counter_ns()
            for _ in range(steps):
                step()
            synchronize(decoder.device)
            found.append((time.perf_counter_ns() - start) / 1000 / steps)
        finally:
            gc.enable()
    return found


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
