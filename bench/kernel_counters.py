"""What limits each kernel of a MoE layer, by the GPU's own counters, through Nsight Compute.

    python bench/kernel_counters.py [--shape glm-5.2-tp4 --m 8,64,1024,3072] [--out FILE]

Runs itself under `ncu`, once a kernel of one call a token count, without touching the clocks, and
prints a JSON object a kernel. The share of time that memory, the matrix units and the issue slots
were busy tells what a kernel waits for. Timing under `ncu` is colder than in a graph, so that
`firesteel bench moe` stays the measure of speed. Linux with an NVIDIA GPU and `ncu`.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from firesteel.cli.bench.moe_inputs import random_call, random_weights
from firesteel.cli.bench.records import context, writer
from firesteel.cli.options import counts_of
from firesteel.cli.planning import make_specs, shape_choice
from firesteel.device import checked_device, device_target
from firesteel.errors import FiresteelError, UnsupportedError
from firesteel.launch import plan, prewarm
from firesteel.moe.layer import MoeLayer
from firesteel.moe.tuning_file import table_of_device

SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "Occupancy")
# Fields of a record by the names of Nsight Compute's metrics.
METRICS = {
    "us": "Duration",
    "sm_mhz": "SM Frequency",
    "dram_percent": "DRAM Throughput",
    "l2_percent": "L2 Cache Throughput",
    "matrix_or_busiest_percent": "SM Busy",
    "issue_percent": "Issue Slots Busy",
    "occupancy_percent": "Achieved Occupancy",
}
_SCALE = {
    **{"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6},
    **{"hz": 1e-6, "Mhz": 1.0, "Ghz": 1e3, "%": 1.0},
}
_RANGE = "one call"


def call_once(shape: str, recipe: str, sizes: tuple[int, ...]) -> None:
    """One call a token count, each in a range that `ncu` records; what runs under it."""
    device = checked_device("cuda")
    (spec,) = make_specs(shape_choice(shape, recipe), table_of_device(device))
    spec = replace(spec.for_target(device_target(device)), pdl=False)
    ready = prewarm(plan(spec, max(sizes), flags={"ids": ["i32"]}), device=device)
    layer = MoeLayer(ready, random_weights(spec, device), ready.arena())
    calls = [random_call(spec, size, device) for size in sizes]
    for call in calls:
        layer.run(*call.tensors)
    torch.cuda.synchronize()
    for size, call in zip(sizes, calls, strict=True):
        torch.cuda.nvtx.range_push(f"{_RANGE} {size}")
        layer.run(*call.tensors)
        torch.cuda.synchronize()
        torch.cuda.nvtx.range_pop()


def read_report(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """A record a kernel from the CSV of `ncu --page details`, in the order of the launches."""
    wanted = {metric: name for name, metric in METRICS.items()}
    found: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(line for line in lines if line.startswith('"')):
        record = found.setdefault(row["ID"], {"kernel": row["Kernel Name"].split("(")[0]})
        if row["Metric Name"] in wanted:
            unit, value = row["Metric Unit"], row["Metric Value"].replace(",", "")
            if unit not in _SCALE or not value:
                raise UnsupportedError(
                    f"ncu: {row['Metric Name']} is {value!r} {unit}, must be a number of "
                    f"{', '.join(_SCALE)}"
                )
            record[wanted[row["Metric Name"]]] = float(value) * _SCALE[unit]
    yield from found.values()


def measure(shape: str, recipe: str, size: int) -> list[dict[str, Any]]:
    """The kernels of one call of so many tokens."""
    program = shutil.which("ncu")
    if program is None:
        raise UnsupportedError("ncu: not found, must be on the PATH (Nsight Compute)")
    sections = [word for name in SECTIONS for word in ("--section", name)]
    command = [
        *(program, "--clock-control", "none", "--nvtx", "--nvtx-include", f"{_RANGE} {size}/"),
        *(*sections, "--csv", "--page", "details"),
        *(sys.executable, __file__, "--inside", "--shape", shape, "--recipe", recipe),
        *("--m", str(size)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    records = list(read_report(done.stdout.splitlines()))
    if done.returncode or not records:
        said = f"{done.stdout[-500:]}{done.stderr[-500:]}"
        raise UnsupportedError(f"ncu: ended with {done.returncode}: {said}")
    return records


def main() -> int:
    """Run as a command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="glm-5.2-tp4")
    parser.add_argument("--recipe", default="int4-g128")
    parser.add_argument("--m", default="1,8,64,1024,3072,8192")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    try:
        sizes = counts_of("--m", "token counts", given.m)
        return report(given.shape, given.recipe, sizes, given.out, given.inside)
    except FiresteelError as error:
        sys.stderr.write(f"{error}\n")
        return 1


def report(
    shape: str, recipe: str, sizes: tuple[int, ...], out: Path | None, is_inside: bool
) -> int:
    """Measure, or be what is measured."""
    if is_inside:
        call_once(shape, recipe, sizes)
        return 0
    with writer(out, as_json=True) as write:
        for size in sizes:
            for record in measure(shape, recipe, size):
                head = {"bench": "counters", "shape": shape, "recipe": recipe}
                write({**head, "m": size, **record, **context(checked_device("cuda"))})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
