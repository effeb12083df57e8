"""`firesteel bench moe`: a whole MoE layer on a GPU, against its floor and against torch in bf16.

Each time is that of a CUDA graph over rotated routings, so that weights come from memory and not
from the cache; the error is against float64 on the same numbers.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from firesteel.cli.bench.moe_inputs import random_call, random_weights, routings_of
from firesteel.cli.bench.moe_torch import (
    MAX_ERROR,
    TorchLayer,
    dense_weights,
    first_tokens_in_float64,
    relative_error,
)
from firesteel.cli.bench.records import context, progress, writer
from firesteel.cli.bench.timing import graph_us, host_ns
from firesteel.cli.console import stdout, table
from firesteel.cli.options import check_counts
from firesteel.cli.planning import make_specs, shape_choice
from firesteel.device import checked_device, default_device, device_target
from firesteel.errors import FiresteelError, InvalidArgumentError, UnsupportedError
from firesteel.launch import plan, prewarm
from firesteel.moe.layer import MoeLayer
from firesteel.moe.spec import MoeSpec
from firesteel.moe.trellis.spec import LayerSpec
from firesteel.moe.tuning_file import table_of_device

__all__ = ["MoeRequest", "floor_us", "run"]

# What an H200 reaches: bytes a second of a copy, and bf16 operations a second of a product.
BANDWIDTH, MATRIX_RATE = 4.3e12, 790e12


@dataclass(frozen=True, kw_only=True)
class MoeRequest:
    """The options of `firesteel bench moe`.

    Fields
        shape     a model's name, and "-tpN" for one of N ranks
        recipe    how the experts are stored
        sizes     token counts
        routing   "uniform", or "zipf": expert i is chosen as often as 1 / (i + 1)
        baseline  also time bf16 grouped products of torch
        table     tiles by measurement; of None the table nearest to the device
    """

    shape: str = "glm-5.2-tp4"
    recipe: str = "int4-g128"
    sizes: tuple[int, ...] = (1, 8, 32, 64, 256, 1024, 3072, 8192)
    routing: str = "uniform"
    device: str | None = None
    batch_invariant: bool = False
    baseline: bool = True
    table: str | None = None

    def __post_init__(self) -> None:
        check_counts("--m", "token counts", self.sizes)
        if self.routing not in ("uniform", "zipf"):
            raise InvalidArgumentError(f"--routing: got {self.routing!r}, must be uniform or zipf")


def run(request: MoeRequest, *, as_json: bool, out: Path | None) -> None:
    """Measure, and print a line a size.

    Raises
        UnsupportedError: no GPU.
        FiresteelError: the layer's numbers are wrong.
    """
    device = default_device() if request.device is None else checked_device(request.device)
    if device.type != "cuda":
        raise UnsupportedError(f"device: got {device}, a layer is timed on a CUDA device")
    choice = replace(
        shape_choice(request.shape, request.recipe),
        batch_invariant=request.batch_invariant,
        table=request.table,
    )
    (spec,) = make_specs(choice, table_of_device(device))
    spec = spec.for_target(device_target(device))
    rows: list[dict[str, Any]] = []
    with writer(out, as_json=as_json) as write, progress() as say:
        say("prewarming")
        ready = prewarm(plan(spec, max(request.sizes), flags={"ids": ["i32"]}), device=device)
        weights = random_weights(spec, device)
        layer = MoeLayer(ready, weights, ready.arena())
        dense = dense_weights(spec, weights) if request.baseline else None
        for num_tokens in request.sizes:
            say(f"{num_tokens} tokens")
            row: dict[str, Any] = {
                "bench": "moe",
                "shape": request.shape,
                "recipe": request.recipe,
                "table": spec.table.name if isinstance(spec, MoeSpec) else None,
                "batch_invariant": request.batch_invariant,
                "routing": request.routing,
                **_measure(request, spec, layer, weights, num_tokens, dense),
                **context(device),
            }
            write(row)
            rows.append(row)
            if row["rel_err"] > MAX_ERROR:
                raise FiresteelError(f"rel_err: {row['rel_err']} at {num_tokens} tokens")
    if not as_json:
        _print(rows)


def _measure(
    request: MoeRequest,
    spec: LayerSpec,
    layer: MoeLayer,
    weights: dict[str, Tensor],
    num_tokens: int,
    dense: TorchLayer | None,
) -> dict[str, Any]:
    device = next(iter(weights.values())).device
    calls = [
        random_call(spec, num_tokens, device, seed=seed, zipf=request.routing == "zipf")
        for seed in range(routings_of(num_tokens))
    ]
    times = graph_us([partial(layer.run, *call.tensors) for call in calls])
    layer.run(*calls[0].tensors)
    expected = first_tokens_in_float64(spec, weights, calls[0])
    few = slice(0, expected.shape[0])
    hit = statistics.mean(len(call.topk_ids.unique()) for call in calls)
    floor = floor_us(spec, num_tokens, hit)
    us = statistics.median(times)
    row: dict[str, Any] = {
        "m": num_tokens,
        "us": us,
        "us_p20": statistics.quantiles(times, n=5)[0],
        "us_p80": statistics.quantiles(times, n=5)[3],
        "floor_us": floor,
        "fraction_of_floor": floor / us,
        "tflops": _operations(spec, num_tokens) / us / 1e6,
        "experts_hit": hit,
        "launches": len(layer.bounds[torch.int32].resolve(num_tokens)),
        "host_us": host_ns(partial(layer.run, *calls[0].tensors), device) / 1000,
        "rel_err": relative_error(calls[0].out[few], expected),
    }
    if dense is not None:
        row["torch_bf16_us"] = statistics.median(graph_us([partial(dense, call) for call in calls]))
        row["torch_bf16_rel_err"] = relative_error(dense(calls[0])[few], expected)
    return row


def floor_us(spec: LayerSpec, num_tokens: int, experts_hit: float) -> float:
    """Microseconds in which no version can run: bytes over bandwidth, or operations over rate."""
    n, k = spec.intermediate_size, spec.hidden_size
    expert = spec.num_parts * spec.w13.matrix_bytes(n, k) + spec.w2.matrix_bytes(k, n)
    total = experts_hit * expert + 4 * num_tokens * k
    return max(total / BANDWIDTH, _operations(spec, num_tokens) / MATRIX_RATE) * 1e6


def _operations(spec: LayerSpec, num_tokens: int) -> float:
    sizes = spec.hidden_size * spec.intermediate_size
    return 2.0 * num_tokens * spec.top_k * sizes * (spec.num_parts + 1)


def _print(rows: Sequence[dict[str, Any]]) -> None:
    shown = table("tokens", "us>", "p20-p80>", "floor us>", "of floor>", "TFLOP/s>", "host us>",
                  "torch bf16 us>", "rel. error>")  # fmt: skip
    for row in rows:
        torch_us = row.get("torch_bf16_us")
        shown.add_row(
            str(row["m"]),
            f"{row['us']:.1f}",
            f"{row['us_p20']:.1f}-{row['us_p80']:.1f}",
            f"{row['floor_us']:.1f}",
            f"{row['fraction_of_floor']:.2f}",
            f"{row['tflops']:.0f}",
            f"{row['host_us']:.1f}",
            "-" if torch_us is None else f"{torch_us:.1f}",
            f"{row['rel_err']:.4f}",
        )
    stdout().print(f"{rows[0]['shape']} {rows[0]['recipe']}, {rows[0]['routing']} routing")
    stdout().print(shown)
