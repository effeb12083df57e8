"""`firesteel bench indexer`: scores and selection on a GPU, against their floor and against torch.

Each time is that of a CUDA graph over rotated inputs, so that keys come from memory and not from
the cache. No case has a time before its selections were found right.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from firesteel.cli.bench.indexer_cases import CASES, Case
from firesteel.cli.bench.indexer_checks import DOT_ROUNDING
from firesteel.cli.bench.indexer_exact import verify
from firesteel.cli.bench.indexer_inputs import (
    COLD_BYTES,
    Inputs,
    calls_to_rotate,
    random_inputs,
)
from firesteel.cli.bench.indexer_operation import Operation
from firesteel.cli.bench.indexer_torch import baseline_bytes, select_in_torch
from firesteel.cli.bench.records import context, progress, writer
from firesteel.cli.bench.timing import graph_us
from firesteel.cli.console import format_bytes, stderr, stdout, table
from firesteel.device import checked_device, default_device, free_bytes
from firesteel.errors import FiresteelError, UnsupportedError

__all__ = ["IndexerRequest", "run"]

# Of the replays of one graph.
_SECONDS = 1.5


@dataclass(frozen=True, kw_only=True)
class IndexerRequest:
    """The options of `firesteel bench indexer`.

    Fields
        cases     what is measured
        baseline  also time torch's operators
    """

    cases: tuple[Case, ...] = tuple(CASES.values())
    device: str | None = None
    baseline: bool = True


def run(request: IndexerRequest, *, as_json: bool, out: Path | None) -> None:
    """Measure, and print a line a case.

    Raises
        UnsupportedError: no GPU, or a case that no kernel takes.
        FiresteelError: selections are wrong; their record says `exact` false and has no time.
    """
    for case in request.cases:
        case.spec()
    device = _gpu(request.device)
    rows: list[dict[str, Any]] = []
    with writer(out, as_json=as_json) as write, progress() as say:
        for case in request.cases:
            say(case.name)
            row = {"bench": "indexer", **_measure(case, device, request), **context(device)}
            write(row)
            rows.append(row)
            if row["torch_bf16_reason"] is not None:
                stderr().print(f"{case.name}: torch was not timed: {row['torch_bf16_reason']}")
    if not as_json:
        _print(rows)
    wrong = [f"{row['case']}: {row['differs']}" for row in rows if not row["exact"]]
    if wrong:
        raise FiresteelError(f"indexer: selections are wrong: {'; '.join(wrong)}")


def _gpu(name: str | None) -> torch.device:
    device = default_device() if name is None else checked_device(name)
    if device.type != "cuda":
        raise UnsupportedError(f"device: got {device}, the indexer is timed on a CUDA device")
    return device


def _measure(case: Case, device: torch.device, request: IndexerRequest) -> dict[str, Any]:
    ready = partial(Operation, device=device)
    operation = ready(case.spec(), case.count)
    inputs = random_inputs(case, device, calls_to_rotate(case))
    reason = _no_baseline(inputs[0], device, request)
    selected = select_in_torch(inputs[0], case.top_k) if reason is None else None
    if selected is not None:
        selected = selected.sort(dim=1).values
    found = verify(case, operation, ready, inputs, baseline=selected)
    floor, what = case.floor()
    row: dict[str, Any] = {
        "case": case.name,
        "mode": case.mode,
        "requests": case.requests,
        "rows_per_request": case.rows,
        "heads": case.heads,
        "context": case.context,
        "top_k": case.top_k,
        "cache_dtype": case.cache_dtype,
        "route": case.route,
        "exact": found.differs is None,
        "differs": found.differs,
        "rows_exact": found.rows_exact,
        "rows_bounded": found.rows_bounded,
        "tied_rows": found.tied_rows,
        "score_error": found.score_error,
        "dot_rounding": DOT_ROUNDING[case.cache_dtype],
        "workspace_bytes": operation.workspace_bytes,
        "rotated": len(inputs),
        **{name: None for name in ("us", "us_p20", "us_p80", "fraction_of_floor")},
        "floor_us": floor,
        "floor": what,
        "launches": [],
        "torch_bf16_us": None,
        "torch_bf16_reason": reason,
        "torch_bf16_differs": found.baseline_fault,
    }
    if found.differs is None:
        row |= _times(operation, inputs, floor)
        if selected is not None:
            row["torch_bf16_us"] = _torch_us(case, inputs)
    return row


def _times(operation: Operation, inputs: Sequence[Inputs], floor: float) -> dict[str, Any]:
    """Of whole calls, and of what each launch adds to those before it."""
    times = _graph_us(operation, inputs)
    us = statistics.median(times)
    launches: list[dict[str, Any]] = []
    before = 0.0
    for said, until in operation.launches():
        until_us = statistics.median(_graph_us(until, inputs))
        launches.append({**said, "us": until_us - before})
        before = until_us
    return {
        "us": us,
        "us_p20": statistics.quantiles(times, n=5)[0],
        "us_p80": statistics.quantiles(times, n=5)[3],
        "fraction_of_floor": floor / us,
        "launches": launches,
    }


def _graph_us(operation: Operation, inputs: Sequence[Inputs]) -> list[float]:
    return graph_us([operation.call(each).run for each in inputs], seconds=_SECONDS)


def _no_baseline(inputs: Inputs, device: torch.device, request: IndexerRequest) -> str | None:
    """Why torch is not timed; None where it is."""
    if not request.baseline:
        return "--no-baseline"
    wanted, free = baseline_bytes(inputs), free_bytes(device)
    if wanted > free:
        return f"it takes about {format_bytes(wanted)}, of which {format_bytes(free)} are free"
    return None


def _torch_us(case: Case, inputs: Sequence[Inputs]) -> float:
    # What it holds drives keys out of L2 by itself, and takes long, where it is so much.
    rotated = inputs if baseline_bytes(inputs[0]) < COLD_BYTES else inputs[:1]
    functions = [partial(select_in_torch, each, case.top_k) for each in rotated]
    return statistics.median(graph_us(functions, seconds=_SECONDS))


def _print(rows: Sequence[dict[str, Any]]) -> None:
    shown = table("case", "us>", "p20-p80>", "floor us>", "of floor>", "launches us>",
                  "torch bf16 us>", "workspace>", "score error>", "exact")  # fmt: skip
    for row in rows:
        launches = " + ".join(f"{each['kernel']} {each['us']:.1f}" for each in row["launches"])
        shown.add_row(
            row["case"],
            _tenths(row["us"]),
            "-" if row["us"] is None else f"{row['us_p20']:.1f}-{row['us_p80']:.1f}",
            f"{row['floor_us']:.1f}",
            "-" if row["us"] is None else f"{row['fraction_of_floor']:.2f}",
            launches or "-",
            _tenths(row["torch_bf16_us"]),
            format_bytes(row["workspace_bytes"]),
            "-" if row["score_error"] is None else f"{row['score_error']:.2g}",
            "yes" if row["exact"] else "NO",
        )
    stdout().print(f"Indexer, top_k {rows[0]['top_k']}, {rows[0]['cache_dtype']} keys")
    stdout().print(shown)


def _tenths(us: float | None) -> str:
    return "-" if us is None else f"{us:.1f}"
