"""How the benchmarks take time: of the host, and of a graph on the GPU."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from firesteel.device import synchronize

__all__ = ["BATCHES", "captured", "graph_us", "host_ns"]

BATCHES = 15
_REPLAYS, _UNCOUNTED, _LEAST = 25, 3, 5


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


def graph_us(
    functions: Sequence[Callable[[], object]],
    *,
    replays: int = _REPLAYS,
    seconds: float = math.inf,
) -> list[float]:
    """Microseconds a function, of each replay of a graph that calls each once.

    Args:
        replays: how many are counted.
        seconds: after so many there is no further replay, once `_LEAST` are counted.
    """
    graph = captured(functions)
    found: list[float] = []
    began = time.perf_counter()
    for number in range(_UNCOUNTED + replays):
        if number >= _UNCOUNTED + _LEAST and time.perf_counter() - began > seconds:
            break
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) * 1000 / len(functions))
    return found[_UNCOUNTED:]


def captured(functions: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """A graph that calls each function once; each was called once before."""
    for function in functions:
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for function in functions:
            function()
    return graph
