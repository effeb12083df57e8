"""How the benchmarks take time: of the host, and of a graph on the GPU."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from firesteel.device import synchronize

__all__ = ["BATCHES", "graph_us", "host_ns"]

BATCHES = 15
_REPLAYS, _UNCOUNTED = 25, 3


def host_ns(function: Callable[[], object], device: torch.device, calls: int = 60) -> float:
    """The host's nanoseconds a call, the median over batches.

    Args:
        calls: of one batch; so few that the GPU's queue of launches never fills and the host never
            waits.
    """
    function()
    synchronize(device)
    found: list[float] = []
    gc.disable()
    try:
        for _ in range(BATCHES):
            start = time.perf_counter_ns()
            for _ in range(calls):
                function()
            found.append((time.perf_counter_ns() - start) / calls)
            synchronize(device)
    finally:
        gc.enable()
    return statistics.median(found)


def graph_us(functions: Sequence[Callable[[], object]], *, replays: int = _REPLAYS) -> list[float]:
    """Microseconds a function, of each replay of a graph that calls each once."""
    for function in functions:
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for function in functions:
            function()
    found: list[float] = []
    for _ in range(_UNCOUNTED + replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) * 1000 / len(functions))
    return found[_UNCOUNTED:]
