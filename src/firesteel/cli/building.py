"""`firesteel build`: compiles plans for GPUs that need not be there, into a bundle."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from firesteel.cli.console import format_bytes, print_json, stderr, stdout, table
from firesteel.cli.planning import PlanChoice, make_all_specs, make_plans
from firesteel.launch import Plan
from firesteel.launch.building import build_plans, checked_targets
from firesteel.launch.store import Cache, check_out
from firesteel.moe.spec import MoeSpec
from firesteel.moe.trellis.linear import PlannedSpec
from firesteel.moe.tuning_file import default_table, nearest_table
from firesteel.settings import Settings

__all__ = ["BuildRequest", "run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRequest:
    """What to build.

    Fields
        choice   the plan
        targets  with commas between: "sm_90,sm_120"
        out      folder of the bundle; new or empty
    """

    choice: PlanChoice
    targets: str
    out: Path


def run(request: BuildRequest, *, as_json: bool) -> None:
    """Compile every key for every target, then write the bundle, whole or not at all.

    Raises
        InvalidArgumentError: a target is not allowed, or `out` holds something; nothing was
            compiled.
        UnsupportedError: a plan has no kernels, or this Triton does not compile for a target.
    """
    start = time.perf_counter()
    targets = checked_targets(target.strip() for target in request.targets.split(","))
    check_out(request.out)
    settings = Settings.from_env()
    specs = make_all_specs(request.choice)
    plans: dict[str, tuple[Plan, ...]] = {}
    for target in targets:
        suited = [_suited(spec, target, request.choice) for spec in specs]
        plans[target] = make_plans(request.choice, suited)
    built, num_bytes = build_plans(
        plans,
        out=request.out,
        cache=Cache(settings.cache_path),
        threads=settings.compile_threads,
        show_progress=stderr().is_terminal,
    )
    num_kernels = sum(one.compiled + one.from_cache for one in built.values())
    summary = {
        "out": str(request.out),
        "plans": sorted({made.digest for several in plans.values() for made in several}),
        "kernels": num_kernels,
        "bytes": num_bytes,
        "seconds": time.perf_counter() - start,
        "targets": {
            target: {
                "kernels": one.compiled + one.from_cache,
                "compiled": one.compiled,
                "from_cache": one.from_cache,
                "bytes": one.num_bytes,
            }
            for target, one in built.items()
        },
    }
    if as_json:
        print_json(summary)
        return
    shown = table("target", "kernels>", "compiled>", "from the cache>", "cubin bytes>")
    for target, one in built.items():
        numbers = (one.compiled + one.from_cache, one.compiled, one.from_cache, one.num_bytes)
        shown.add_row(target, *(f"{number:,}" for number in numbers))
    stdout().print(shown)
    stdout().print(
        f"{request.out}: {num_kernels} kernels, {format_bytes(num_bytes)}, "
        f"{summary['seconds']:.1f} s",
        highlight=False,
        soft_wrap=True,
    )


def _suited(spec: PlannedSpec, target: str, choice: PlanChoice) -> PlannedSpec:
    """The spec with what a GPU of the target takes by itself, its name not being known here."""
    if isinstance(spec, MoeSpec) and choice.table is None:
        spec = replace(spec, table=nearest_table(None, target) or default_table())
    return spec.for_target(target)
