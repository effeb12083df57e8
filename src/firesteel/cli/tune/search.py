"""How `firesteel tune` chooses, whatever tells the time: by a GPU, or a function in a test."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count as count_up
from itertools import pairwise
from typing import Protocol, TypeVar

from firesteel.cli.tune.candidates import Candidate, Group, Job, join
from firesteel.errors import FiresteelError
from firesteel.moe.plan import has_wgmma, is_direct
from firesteel.moe.spec import MoeSpec
from firesteel.moe.tuning import INFINITY, LayerTiles, Tile

__all__ = ["NOISE", "Bench", "Found", "Timing", "search", "tuned_tiles"]

NOISE = 0.01
"""By so much of its time the incumbent must be beaten; by its spread, where that is more."""

_FINALISTS, _ROUNDS = 3, 2

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of a call of the whole layer, and the spread of replays as a part of them."""

    us: float
    spread: float = 0.0


class Bench(Protocol):
    """What times the candidates of one job."""

    def prepare(self, candidates: Sequence[Candidate]) -> None:
        """Compile what `time` will run, all at once."""
        ...

    def time(self, candidate: Candidate, *, is_final: bool) -> Timing | None:
        """Time it, more thoroughly in the end; None where it is wrong or cannot run."""
        ...

    def is_over(self) -> bool:
        """Whether the time for this job is used up."""
        ...


@dataclass(frozen=True, slots=True)
class Found:
    """What came out of a job.

    Fields
        job              of which
        chosen           the candidate to take
        incumbent        what was taken before; of "wgmma" the best of the others
        us, incumbent_us of both, timed one after the other; equal where the incumbent stays
        timed, skipped   candidates that were timed, and that no time was left for
        dropped          that were wrong or could not run
    """

    job: Job
    chosen: Candidate
    incumbent: Candidate
    us: float
    incumbent_us: float
    timed: int
    skipped: int
    dropped: int

    @property
    def is_decided(self) -> bool:
        """Whether the incumbent had a rival."""
        return self.timed + self.dropped > 1


def search(
    job: Job,
    incumbent: Candidate,
    groups: Sequence[Group],
    bench: Bench,
    known: Sequence[Candidate] = (),
) -> Found:
    """Time a job's candidates, and take the fastest if it beats the incumbent by more than noise.

    Args:
        job: what is chosen for.
        incumbent: what its calls take now.
        groups: the candidates.
        bench: what times them.
        known: what other jobs took. One that is as fast as the fastest, but for noise, is preferred
            to it: each tile is more kernels to compile and load.

    Raises
        FiresteelError: the incumbent itself is wrong or cannot run.
    """
    bench.prepare([incumbent])
    first = bench.time(incumbent, is_final=False)
    if first is None:
        raise FiresteelError(f"{job}: the tile in use, {incumbent}, is wrong or cannot run")
    results: dict[Candidate, Timing | None] = {incumbent: first}
    skipped: set[Candidate] = set()

    def fastest(candidates: Sequence[Candidate]) -> Candidate | None:
        for candidate in candidates:
            if candidate in results:
                continue
            if bench.is_over():
                skipped.add(candidate)
            else:
                results[candidate] = bench.time(candidate, is_final=False)
        return _fastest(results, candidates)

    for group in groups:
        if bench.is_over():
            skipped.update(c for c in group.all if c not in results)
            continue
        bench.prepare(group.all)
        gate_up = fastest((group.start, *group.gate_up))
        down = fastest((group.start, *group.down))
        if gate_up is not None and down is not None:
            joined = join(gate_up, down)
            if joined not in results and not bench.is_over():
                bench.prepare([joined])
            fastest([joined])
    if not bench.is_over():
        bench.prepare(known)
        fastest(known)
    chosen, us, incumbent_us = _confirmed(incumbent, results, bench, known)
    return Found(
        job,
        chosen,
        incumbent,
        us,
        incumbent_us,
        timed=sum(found is not None for found in results.values()),
        skipped=len(skipped),
        dropped=sum(found is None for found in results.values()),
    )


def _fastest(
    results: dict[Candidate, Timing | None], candidates: Sequence[Candidate]
) -> Candidate | None:
    timed = [(found.us, c) for c in candidates if (found := results.get(c)) is not None]
    return min(timed, key=lambda each: each[0])[1] if timed else None


def _confirmed(
    incumbent: Candidate,
    results: dict[Candidate, Timing | None],
    bench: Bench,
    known: Sequence[Candidate],
) -> tuple[Candidate, float, float]:
    """The candidate to take, its time and the incumbent's, of the fastest few timed once more.

    The fastest of many is fast by luck too; so they and the incumbent are timed in turns.
    """
    timed = [(found.us, c) for c, found in results.items() if found is not None and c != incumbent]
    timed.sort(key=lambda each: each[0])
    # Those of other jobs that may turn out as fast.
    near = [c for us, c in timed if c in known and us < timed[0][0] * (1 + 2 * NOISE)]
    finalists = list(dict.fromkeys([c for _, c in timed[:_FINALISTS]] + near[:_FINALISTS]))
    first = results[incumbent]
    assert first is not None
    if not finalists:
        return incumbent, first.us, first.us
    again: dict[Candidate, list[Timing]] = {c: [] for c in (incumbent, *finalists)}
    for _ in range(_ROUNDS):
        for candidate, timings in again.items():
            timing = bench.time(candidate, is_final=True)
            if timing is not None:
                timings.append(timing)
    means = {c: _mean(timings) for c, timings in again.items() if len(timings) == _ROUNDS}
    if incumbent not in means:
        raise FiresteelError(f"{incumbent}: ran once and not again")
    before = means[incumbent]
    faster = [
        c
        for c, mean in means.items()
        if mean.us < before.us * (1 - max(NOISE, before.spread, mean.spread))
    ]
    if not faster:
        return incumbent, before.us, before.us
    best = min(faster, key=lambda candidate: means[candidate].us)
    as_fast = [c for c in faster if c in known and means[c].us < means[best].us * (1 + NOISE)]
    best = min(as_fast or [best], key=lambda candidate: means[candidate].us)
    return best, means[best].us, before.us


def _mean(timings: Sequence[Timing]) -> Timing:
    """The mean of rounds, and their widest spread, that between them included."""
    times = [timing.us for timing in timings]
    us = sum(times) / len(times)
    between = (max(times) - min(times)) / us
    return Timing(us, max(between, *(timing.spread for timing in timings)))


def tuned_tiles(spec: MoeSpec, found: Sequence[Found]) -> LayerTiles:
    """The layer's tiles with what was found; a job that was not done leaves them as they were."""
    tiles = spec.tiles
    if not has_wgmma(spec):
        # Of the recipe or the device that it started from.
        tiles = replace(tiles, wgmma=())
    points: list[tuple[int, Tile]] = []
    wgmma: list[tuple[int, Tile | None]] = []
    for each in found:
        chosen = each.chosen
        if each.job.mode == "direct":
            tiles = replace(tiles, direct=chosen.tile, split_k=_split_of(tiles, each))
        elif each.job.mode == "batch_invariant":
            tiles = replace(tiles, batch_invariant=chosen.tile)
        elif each.job.mode == "sorted":
            points += [(count, chosen.tile) for count in each.job.counts]
        elif each.is_decided:
            tile = chosen.tile if chosen.tile.is_wgmma else None
            wgmma += [(count, tile) for count in each.job.counts]
    return replace(
        tiles,
        sorted=_ranges(tiles.sorted, sorted(points, key=lambda p: p[0]), spec),
        wgmma=_wgmma_ranges(tiles.wgmma, sorted(wgmma, key=lambda p: p[0]), spec),
    )


def _split_of(tiles: LayerTiles, found: Found) -> int:
    """Spans of K; where the incumbent stays, those of the table, of which a short K takes one."""
    return tiles.split_k if found.chosen == found.incumbent else found.chosen.split_k


def _wgmma_ranges(
    base: Sequence[tuple[float, float, Tile]],
    points: Sequence[tuple[int, Tile | None]],
    spec: MoeSpec,
) -> tuple[tuple[float, float, Tile], ...]:
    """The same where there may be no tile; but a tile does not reach down to fewer routes than its
    first count, where before there was none or one of fewer rows; nor across the border of direct
    counts.
    """
    if not points:
        return tuple(base)
    steps: list[tuple[float, Tile | None]] = []
    end = 0.0
    for first, below, tile in base:
        if first > end:
            steps.append((first, None))
        steps.append((below, tile))
        end = below
    if end < INFINITY:
        steps.append((INFINITY, None))
    direct, border = ((_first_sorted(spec) - n) / spec.num_experts for n in (1, 0))
    place = next(n for n, (bound, _) in enumerate(steps) if direct < bound)
    if border < steps[place][0]:
        steps.insert(place, (border, steps[place][1]))
    count, chosen = points[0]
    first = count * spec.top_k / spec.num_experts
    place = next(n for n, (bound, _) in enumerate(steps) if first < bound)
    start, before = steps[place - 1][0] if place else 0.0, steps[place][1]
    if start < first and chosen is not None and (before is None or before.rows < chosen.rows):
        steps.insert(place, (first, before))
    found = _ranges(steps, points, spec)
    firsts = (0.0, *(bound for bound, _ in found))
    return tuple(
        (start, bound, tile)
        for start, (bound, tile) in zip(firsts, found, strict=False)
        if tile is not None
    )


def _ranges(
    base: Sequence[tuple[float, T]], points: Sequence[tuple[int, T]], spec: MoeSpec
) -> tuple[tuple[float, T], ...]:
    """Ranges in which a measured count speaks for those around it.

    Between two counts that is up to their geometric mean, or where only the second is not direct
    up to the first that is not; below the first and above the last one to the end of the range of
    `base` that they are in, beyond which `base` stays as it is.
    """
    if not points:
        return tuple(base)

    def routes(num_tokens: int) -> float:
        return num_tokens * spec.top_k / spec.num_experts

    first, last = routes(points[0][0]), routes(points[-1][0])
    border = _first_sorted(spec) / spec.num_experts
    found = [(bound, tile) for bound, tile in base if bound <= first]
    for (count, tile), (following, _) in pairwise(points):
        # The first count that is the next one's: the geometric mean, rounded up.
        mean = routes(math.isqrt(count * following - 1) + 1)
        found.append((border if routes(count) < border <= routes(following) else mean, tile))
    end = next(bound for bound, _ in base if last < bound)
    found.append((end, points[-1][1]))
    found += [(bound, tile) for bound, tile in base if bound > end]
    merged: list[tuple[float, T]] = []
    for bound, tile in found:
        if merged and merged[-1][1] == tile:
            merged.pop()
        merged.append((bound, tile))
    return tuple(merged)


def _first_sorted(spec: MoeSpec) -> int:
    """The fewest routes that are sorted: where direct counts end."""
    return next(routes for routes in count_up(1) if not is_direct(spec, routes))
