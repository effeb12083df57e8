"""`firesteel build`: compiles plans for GPUs that need not be there, into a bundle."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from firesteel.cli.console import format_bytes, print_json, stderr, stdout, table
from firesteel.cli.planning import PlanChoice, make_plans, make_specs
from firesteel.errors import InvalidArgumentError, UnsupportedError
from firesteel.launch import Kernel, LaunchKey, Plan
from firesteel.launch.binary import (
    Binary,
    compile_all,
    identity,
    supports_dependent_launch,
)
from firesteel.launch.progress import progress_bar
from firesteel.launch.store import Cache, write_bundle
from firesteel.settings import Settings

__all__ = ["TARGETS", "BuildRequest", "run"]

TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")
"""What Triton compiles for. LLVM ends the process on an architecture that it does not know."""


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


@dataclass(slots=True)
class _Built:
    """What one target took."""

    compiled: int = 0
    from_cache: int = 0
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Job:
    """A kernel to compile, and the digest of what it is compiled from."""

    target: str
    kernel: Kernel
    key: LaunchKey
    digest: str


def run(request: BuildRequest, *, as_json: bool) -> None:
    """Compile every key for every target, then write the bundle, whole or not at all.

    Raises
        InvalidArgumentError: a target is not allowed, or `out` holds something; nothing was
            compiled.
        UnsupportedError: a plan has no kernels, or this Triton does not compile for a target.
    """
    start = time.perf_counter()
    targets = _checked_targets(request.targets)
    _check_out(request.out)
    settings = Settings.from_env()
    specs = make_specs(request.choice)
    plans: list[Plan] = []
    jobs: dict[str, _Job] = {}
    for target in targets:
        # A key says whether launches may overlap, which GPUs before sm_90 cannot.
        pdl = supports_dependent_launch(target)
        made = make_plans(request.choice, tuple(replace(spec, pdl=pdl) for spec in specs))
        plans += made
        for one in made:
            for key in one.keys:
                kernel = one.kernels[key.kernel]
                digest = identity(kernel, key, target)
                jobs.setdefault(digest, _Job(target, kernel, key, digest))
    built = {target: _Built() for target in targets}
    binaries = _compile(list(jobs.values()), settings, built)
    digests = {made.digest for made in plans}
    num_bytes = write_bundle(request.out, binaries, plans=digests, targets=targets)
    summary = {
        "out": str(request.out),
        "plans": sorted(digests),
        "kernels": len(binaries),
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
        f"{request.out}: {len(binaries)} kernels, {format_bytes(num_bytes)}, "
        f"{summary['seconds']:.1f} s",
        highlight=False,
        soft_wrap=True,
    )


def _checked_targets(text: str) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(target.strip() for target in text.split(",")))
    for target in found:
        if target not in TARGETS:
            raise InvalidArgumentError(
                f"target: got {target!r}, must be some of {', '.join(TARGETS)}, with commas between"
            )
    return found


def _check_out(folder: Path) -> None:
    """`write_bundle` refuses such a folder too, but after minutes of compiling."""
    try:
        is_free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    except OSError as error:
        raise InvalidArgumentError(f"out: cannot read {folder}: {error}") from error
    if not is_free:
        raise InvalidArgumentError(f"out: {folder} exists, must be new or an empty folder")


def _compile(
    jobs: Sequence[_Job], settings: Settings, built: dict[str, _Built]
) -> tuple[Binary, ...]:
    """The binary of each job, from the cache or compiled, in the order of the jobs."""
    cache = Cache(settings.cache_path)
    threads = settings.compile_threads or os.cpu_count() or 1
    found: dict[str, Binary] = {}
    show = stderr().is_terminal
    with progress_bar("compiling kernels", len(jobs), show=show) as advance:
        for target, count in built.items():
            own = [job for job in jobs if job.target == target]
            for job in own:
                binary = cache.read(job.digest)
                if binary is not None:
                    found[job.digest] = binary
                    count.from_cache += 1
                    advance()
            missing = [job for job in own if job.digest not in found]
            done = _keeper(found, count, cache, advance)
            _compile_target(target, missing, threads, done)
            count.num_bytes = sum(len(found[job.digest].image) for job in own)
    return tuple(found[job.digest] for job in jobs)


def _keeper(
    found: dict[str, Binary], count: _Built, cache: Cache, advance: Callable[[], None]
) -> Callable[[LaunchKey, Binary], None]:
    def done(key: LaunchKey, binary: Binary) -> None:
        del key
        found[binary.digest] = binary
        count.compiled += 1
        cache.write(binary)
        advance()

    return done


def _compile_target(
    target: str, jobs: Sequence[_Job], threads: int, done: Callable[[LaunchKey, Binary], None]
) -> None:
    if not jobs:
        return
    from triton.runtime.errors import PTXASError

    try:
        wanted = [(job.kernel, job.key) for job in jobs]
        compile_all(wanted, target, threads=threads, done=done)
    except PTXASError as error:
        raise UnsupportedError(f"target: this Triton does not compile for {target}: {error}") from (
            error
        )
