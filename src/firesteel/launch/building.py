"""`build`: compiles plans for GPUs that need not be there, into a bundle for `prewarm`."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from firesteel.errors import InvalidArgumentError
from firesteel.launch.binary import Binary, compile_all, identity
from firesteel.launch.kernel import Kernel
from firesteel.launch.key import LaunchKey
from firesteel.launch.store import Cache, check_out, write_bundle
from firesteel.launch.table import Plan
from firesteel.progress import progress_bar

__all__ = ["TARGETS", "Built", "build", "build_plans", "checked_targets"]

TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")
"""What Triton compiles for. LLVM ends the process on an architecture that it does not know."""


@dataclass(slots=True)
class Built:
    """What one target took.

    Fields
        compiled    kernels
        from_cache  kernels
        num_bytes   of their machine code
    """

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


def build(
    made: Plan,
    *,
    targets: Collection[str],
    out: Path | str,
    threads: int = 0,
    show_progress: bool = False,
) -> int:
    """Compile every key of a plan for every target into a bundle, whole or not at all.

    The bundle serves `prewarm(made, bundle=out)` on those GPUs. Nothing is read from a cache.

    Args:
        made: what `plan` returned.
        targets: some of `TARGETS`, as "sm_90".
        out: folder of the bundle; new or empty.
        threads: that compile at once; 0 is one a core.
        show_progress: a bar with the time left, on stderr.

    Returns
        The bytes of the bundle's kernels.

    Raises
        InvalidArgumentError: a target or number is not allowed, or `out` holds something or cannot
            be written; nothing was compiled.
        UnsupportedError: Triton is not installed, or does not compile a kernel for a target.
    """
    plans = {target: [made] for target in checked_targets(targets)}
    _, num_bytes = build_plans(
        plans, out=Path(out), cache=Cache(None), threads=threads, show_progress=show_progress
    )
    return num_bytes


def build_plans(
    plans: Mapping[str, Sequence[Plan]],
    *,
    out: Path,
    cache: Cache,
    threads: int,
    show_progress: bool,
) -> tuple[dict[str, Built], int]:
    """As `build`, of other plans for each target, by way of a cache.

    Returns
        What each target took, and the bytes of the bundle's kernels.
    """
    if type(threads) is not int or threads < 0:
        raise InvalidArgumentError(f"threads: got {threads!r}, must be an integer from 0")
    check_out(out)
    jobs: dict[str, _Job] = {}
    for target, several in plans.items():
        for job in _jobs(target, several):
            jobs.setdefault(job.digest, job)
    built = {target: Built() for target in plans}
    found: dict[str, Binary] = {}
    with progress_bar("compiling kernels", len(jobs), show=show_progress) as advance:
        for target, count in built.items():
            own = [job for job in jobs.values() if job.target == target]
            for job in own:
                if (binary := cache.read(job.digest, target)) is not None:
                    found[job.digest] = binary
                    count.from_cache += 1
                    advance()
            missing = [(job.kernel, job.key) for job in own if job.digest not in found]
            done = _keeper(found, count, cache, advance)
            compile_all(missing, target, threads=threads or os.cpu_count() or 1, done=done)
            count.num_bytes = sum(len(found[job.digest].image) for job in own)
    digests = {made.digest for several in plans.values() for made in several}
    binaries = [found[digest] for digest in jobs]
    return built, write_bundle(out, binaries, plans=digests, targets=plans)


def checked_targets(targets: Iterable[str]) -> tuple[str, ...]:
    """The targets, each once.

    Raises
        InvalidArgumentError: there is none, or one is not of `TARGETS`.
    """
    found = tuple(dict.fromkeys([targets] if isinstance(targets, str) else targets))
    for target in found or ("",):
        if target not in TARGETS:
            raise InvalidArgumentError(
                f"target: got {target!r}, must be some of {', '.join(TARGETS)}"
            )
    return found


def _jobs(target: str, plans: Sequence[Plan]) -> Iterable[_Job]:
    for made in plans:
        for key in made.keys:
            kernel = made.kernels[key.kernel]
            yield _Job(target, kernel, key, identity(kernel, key, target))


def _keeper(
    found: dict[str, Binary], count: Built, cache: Cache, advance: Callable[[], None]
) -> Callable[[LaunchKey, Binary], None]:
    def done(key: LaunchKey, binary: Binary) -> None:
        del key
        found[binary.digest] = binary
        count.compiled += 1
        cache.write(binary)
        advance()

    return done
