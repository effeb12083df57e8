"""`firesteel bench launch`: the host's side of a MoE layer call, and whether the table is complete.

On a GPU it times and checks the real thing. On a CPU a driver that does nothing takes the GPU's
place: the times are then those of the host's own code, and nothing that needs numbers is checked.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from firesteel.cli.bench.capture import check_captures
from firesteel.cli.bench.moe_inputs import Call, random_call, random_weights
from firesteel.cli.bench.records import context, progress, writer
from firesteel.cli.bench.timing import BATCHES, graph_us, host_ns
from firesteel.cli.console import stdout, table
from firesteel.cli.planning import PlanChoice, make_plans, make_table_specs
from firesteel.device import (
    checked_device,
    default_device,
    device_target,
    stream_getter,
    synchronize,
)
from firesteel.errors import InvalidArgumentError
from firesteel.launch import Plan, Ready, build, plan, prewarm
from firesteel.launch.driver import Driver
from firesteel.launch.stub import StubDriver
from firesteel.moe.layer import MoeLayer
from firesteel.moe.spec import ROW_UNIT, MoeSpec
from firesteel.moe.tuning_file import table_of_device
from firesteel.settings import Settings

__all__ = ["LaunchRequest", "run"]

HOST_SIZES = (1, 8, 64, 256, 1024, 3072)


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """The options of `firesteel bench launch`.

    Raises
        InvalidArgumentError: a number is wrong.
    """

    choice: PlanChoice
    device: str | None = None
    captures: int = 100

    def __post_init__(self) -> None:
        if self.captures < 0:
            raise InvalidArgumentError(f"--captures: got {self.captures}, must be 0 or more")


def run(request: LaunchRequest, *, as_json: bool, out: Path | None) -> None:
    """Measure, check, and print.

    Raises
        FiresteelError: a check failed that makes the numbers worthless.
    """
    device = default_device() if request.device is None else checked_device(request.device)
    spec = make_table_specs(request.choice, table_of_device(device))[0]
    if device.type == "cuda":
        spec = spec.for_target(device_target(device))
    with writer(out, as_json=as_json) as write, progress() as say:
        record: dict[str, Any] = {
            "bench": "launch",
            "model": request.choice.model or str(request.choice.checkpoint),
            "driver": "cuda" if device.type == "cuda" else "stub: launches nothing",
            **context(device),
        }
        say("planning")
        start = time.perf_counter()
        (made,) = make_plans(request.choice, (spec,))
        record["plan"] = {
            "title": spec.title,
            "table": spec.table.name,
            "max_tokens": made.max_tokens,
            "keys": len(made.keys),
            "seconds": time.perf_counter() - start,
            "workspace_bytes": made.workspace.num_bytes,
            "digest": made.digest,
        }
        if device.type == "cuda":
            _on_gpu(request, spec, made, device, record, say)
        else:
            _on_stub(made, record, say)
        write(record)
    if not as_json:
        _print(record)


def _on_gpu(
    request: LaunchRequest,
    spec: MoeSpec,
    made: Plan,
    device: torch.device,
    record: dict[str, Any],
    say: Callable[[str], None],
) -> None:
    driver = Driver.open()
    say("prewarming from nothing, then from a bundle")
    record["prewarm"], ready = _time_prewarm(made, device, driver)
    weights = random_weights(spec, device)
    say("capturing first calls")
    record["capture"] = check_captures(ready, weights, request.captures)
    layer = MoeLayer(ready, weights, ready.arena())
    call = random_call(spec, made.max_tokens, device)
    say("timing the host")
    record["host"] = _time_host(ready, layer, call)
    record["components"] = _components(ready, layer, call)
    say("watching every token count")
    record["traffic"] = _watch_traffic(made, device, weights)
    say("timing dependent launches")
    record["dependent_launch"] = _time_dependent_launch(spec, device, weights)


def _on_stub(made: Plan, record: dict[str, Any], say: Callable[[str], None]) -> None:
    """The same kinds of call against a driver that does nothing, on a layer of little memory."""
    cpu = torch.device("cpu")
    small = replace(_spec(made), num_experts=8, top_k=2, hidden_size=256, intermediate_size=128)
    made = plan(small, made.max_tokens)
    say("prewarming against the stub driver")
    with TemporaryDirectory() as folder:
        settings = replace(Settings.from_env(), bundle=None, cache_dir=Path(folder))
        ready = prewarm(made, device=cpu, driver=StubDriver.open(), settings=settings)
    layer = MoeLayer(ready, random_weights(small, cpu), ready.arena())
    call = random_call(small, min(max(HOST_SIZES), made.max_tokens), cpu)
    say("timing the host")
    record["timed"] = small.title
    record["host"] = _time_host(ready, layer, call)
    record["components"] = _components(ready, layer, call)
    record["traffic"] = _watch_traffic_of(ready, random_weights(small, cpu))


def _spec(made: Plan) -> MoeSpec:
    assert isinstance(made.spec, MoeSpec)
    return made.spec


def _time_prewarm(made: Plan, device: torch.device, driver: Driver) -> tuple[dict[str, Any], Ready]:
    """Seconds to be ready with nothing on disk, and with a bundle."""
    with TemporaryDirectory() as folder:
        cache_dir = Path(folder) / "cache"
        settings = replace(Settings.from_env(), bundle=None, cache="on", cache_dir=cache_dir)
        cold = prewarm(made, device=device, driver=driver, settings=settings)
        bundle = Path(folder) / "bundle"
        num_bytes = build(made, targets=[cold.target], out=bundle)
        settings = replace(settings, cache="off")
        ready = prewarm(made, device=device, driver=driver, settings=settings, bundle=bundle)
    return {
        "cold_seconds": cold.audit.prewarmed.seconds,
        "cold_compiled": cold.audit.prewarmed.compiled,
        "bundle_seconds": ready.audit.prewarmed.seconds,
        "bundle_compiled": ready.audit.prewarmed.compiled,
        "bundle_bytes": num_bytes,
    }, ready


def _floor_ns(ready: Ready, device: torch.device) -> float | None:
    """A bare C loop of cuLaunchKernel with the smallest kernel; None without the extension."""
    if ready.launcher != "native":
        return None
    from firesteel.launch import _native

    key = next(key for key in ready.plan.keys if key.name == "combine_kernel")
    function, binary = ready.function(key)
    zeros = torch.zeros(1 << 20, dtype=torch.uint8, device=device)
    params = [zeros.data_ptr() if kind.startswith("*") else 0 for _, kind in key.arguments]
    params += [0] * binary.num_hidden
    stream = stream_getter(device)(device.index or 0)
    found: list[float] = []
    for _ in range(BATCHES):
        with ready.driver.current(ready.context):
            found.append(
                _native.launch_floor_ns(
                    ready.driver.addresses["cuLaunchKernel"],
                    function.handle,
                    32 * binary.num_warps,
                    binary.shared_bytes,
                    tuple(params),
                    stream,
                    300,
                )
            )
        synchronize(device)
    return statistics.median(found)


def _time_host(ready: Ready, layer: MoeLayer, call: Call) -> list[dict[str, Any]]:
    """Host time of one eager call at each size, against the floor measured beside it."""
    rows: list[dict[str, Any]] = []
    for num_tokens in HOST_SIZES:
        if num_tokens > call.x.shape[0]:
            continue
        tensors = call.rows(num_tokens)
        floor = _floor_ns(ready, ready.device)
        host = host_ns(lambda t=tensors: layer.run(*t), ready.device)
        launches = len(layer.bounds[call.topk_ids.dtype].resolve(num_tokens))
        # A driver that does nothing has no floor to speak of.
        goal = None
        if floor is not None and ready.device.type == "cuda":
            goal = (launches + 1) * floor + 1000
        rows.append(
            {
                "tokens": num_tokens,
                "launches": launches,
                "host_ns": host,
                "floor_ns": floor,
                "goal_ns": goal,
                "is_met": None if goal is None else host <= goal,
            }
        )
    return rows


def _components(ready: Ready, layer: MoeLayer, call: Call) -> dict[str, float | None]:
    """Nanoseconds of each part of a call of 64 tokens."""
    device = ready.device
    tensors = call.rows(64)
    bound = layer.bounds[call.topk_ids.dtype]
    runner = bound.runner
    stream = stream_getter(device)
    index = device.index or 0
    values: list[int] = []
    for tensor in tensors:
        values.append(tensor.data_ptr())
        if tensor is tensors[0] or tensor is tensors[-1]:
            values.append(tensor.stride(0) // ROW_UNIT)
    at = stream(index)
    native = host_ns(lambda: runner.run(64, at, *values), device)
    empty = host_ns(lambda: runner.run(0, at, *values), device, 2000)
    launches = len(bound.resolve(64))
    return {
        "resolve_ns": host_ns(lambda: runner.resolve(64), device, 5000),
        "stream_ns": host_ns(lambda: stream(index), device, 5000),
        "check_ns": host_ns(lambda: bound.run(*tensors), device) - native,
        "patch_and_look_up_ns": empty,
        "launch_ns_each": (native - empty) / launches,
        "triton_jit_launch_ns": _time_triton(ready, call),
    }


def _time_triton(ready: Ready, call: Call) -> float | None:
    """The baseline: Triton's own `kernel[grid](...)` of the smallest of the launches."""
    if ready.device.type == "cpu":
        return None
    from firesteel.moe import combine

    combine_kernel: Any = combine.combine_kernel
    spec = _spec(ready.plan)
    y = torch.zeros(64 * spec.top_k, spec.hidden_size, dtype=call.x.dtype, device=ready.device)
    x, ids, weights, out = call.rows(64)
    del x

    def launch() -> None:
        combine_kernel[(64, 1)](
            y, ids, None, weights, out, out.stride(0) // ROW_UNIT, 64,
            K=spec.hidden_size, E=spec.num_experts, NUM_GLOBAL=None, TOP_K=spec.top_k,
            BLOCK_K=1024, PDL=False,
        )  # fmt: skip

    return host_ns(launch, ready.device)


def _watch_traffic(
    made: Plan, device: torch.device, weights: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Every token count once, in random order, with both types of ids, on a plan of its own."""
    ready = prewarm(made, device=device)
    return _watch_traffic_of(ready, weights)


def _watch_traffic_of(ready: Ready, weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    spec, most = _spec(ready.plan), ready.plan.max_tokens
    layer = MoeLayer(ready, weights, ready.arena())
    counts = list(range(most + 1))
    random.Random(0).shuffle(counts)
    calls: list[tuple[torch.Tensor, ...]] = []
    for flags in ready.plan.tables:
        ids = dict(flags)["ids"]
        call = random_call(spec, most, ready.device, ids=ids)
        # No routes: the launches are what is counted, and their work would take minutes.
        call.topk_ids.fill_(-1)
        calls += [call.rows(num_tokens) for num_tokens in counts]
    synchronize(ready.device)
    with ready.watch() as seen:
        for x, topk_ids, topk_weights, out in calls:
            layer.run(x, topk_ids, topk_weights, out)
    synchronize(ready.device)
    audit = ready.audit.as_dict()
    return {
        "calls": len(calls),
        "launches": audit["launches"],
        "keys_planned": audit["planned"],
        "keys_launched": audit["launched"],
        "launched_unplanned": len(audit["launched_unplanned"]),
        "misses": len(audit["misses"]),
        **seen.as_dict(),
    }


def _time_dependent_launch(
    spec: MoeSpec, device: torch.device, weights: dict[str, torch.Tensor]
) -> list[dict[str, Any]]:
    """GPU time of a call in a graph, with programmatic dependent launch and without."""
    layers = {
        pdl: MoeLayer(ready, weights, ready.arena())
        for pdl in (False, True)
        for ready in [prewarm(plan(replace(spec, pdl=pdl), 1024), device=device)]
    }
    rows: list[dict[str, Any]] = []
    for num_tokens in (1, 8, 64, 1024):
        calls = [random_call(spec, num_tokens, device, seed=seed) for seed in range(8)]
        times = {
            pdl: statistics.median(graph_us([partial(layer.run, *call.tensors) for call in calls]))
            for pdl, layer in layers.items()
        }
        rows.append({"tokens": num_tokens, "off_us": times[False], "on_us": times[True]})
    return rows


def _print(record: dict[str, Any]) -> None:
    console = stdout()
    made = record["plan"]
    console.print(f"{made['title']}: {made['keys']} keys for 0..{made['max_tokens']} tokens")
    console.print(f"driver {record['driver']}; timed {record.get('timed', made['title'])}")
    host = table("tokens", "launches>", "host us>", "bare launch us>", "goal us>", "met")
    for row in record["host"]:
        floor, goal = row["floor_ns"], row["goal_ns"]
        host.add_row(
            str(row["tokens"]),
            str(row["launches"]),
            f"{row['host_ns'] / 1000:.2f}",
            "-" if floor is None else f"{floor / 1000:.2f}",
            "-" if goal is None else f"{goal / 1000:.2f}",
            {True: "yes", False: "no", None: "-"}[row["is_met"]],
        )
    console.print(host)
    for name in ("components", "prewarm", "traffic", "capture"):
        if name in record:
            shown = table(name, "", title=None)
            shown.show_header = False
            for key, value in record[name].items():
                text = f"{value:.3f}" if isinstance(value, float) else str(value)
                shown.add_row(f"{name}: {key}", text)
            console.print(shown)
    for row in record.get("dependent_launch", ()):
        console.print(
            f"dependent launch, {row['tokens']} tokens: "
            f"{row['off_us']:.1f} us off, {row['on_us']:.1f} us on"
        )
