"""The choice of `firesteel tune`, with a timer that a test makes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firesteel.cli.tune.candidates import (
    Candidate,
    Group,
    Job,
    groups_of,
    incumbent_of,
    jobs_of,
    known_of,
    with_candidate,
    with_tiles,
)
from firesteel.cli.tune.search import NOISE, Found, Timing, search, tuned_tiles
from firesteel.errors import FiresteelError
from firesteel.moe.spec import MoeSpec, geometry
from firesteel.moe.tuning import Down, GateUp, Tile, TileTable
from tests.moe.tiles import FIXED

GLM = replace(geometry("glm-5.2", tensor_parallel=4), table=FIXED)
JOB = Job("sorted", (1024,))
SHARED = 227 * 1024


class FakeBench:
    """Times by a function; out of time after so many timings."""

    def __init__(
        self,
        us: Callable[[Candidate], float | None],
        *,
        most: int = 10**6,
        spread: float = 0.0,
    ) -> None:
        self.us = us
        self.most = most
        self.spread = spread
        self.prepared: set[Candidate] = set()
        self.timed: list[Candidate] = []
        self.final: list[Candidate] = []

    def prepare(self, candidates: Sequence[Candidate]) -> None:
        self.prepared.update(candidates)

    def time(self, candidate: Candidate, *, is_final: bool) -> Timing | None:
        assert candidate in self.prepared
        (self.final if is_final else self.timed).append(candidate)
        us = self.us(candidate)
        return None if us is None else Timing(us, self.spread)

    def is_over(self) -> bool:
        return len(self.timed) >= self.most


def parts(best: Tile, gain: float) -> Callable[[Candidate], float]:
    """FC1 and FC2 each take 100 us less their share of a gain where they are as in `best`."""

    def us(candidate: Candidate) -> float:
        tile = candidate.tile
        is_gate_up = (tile.gate_up, tile.is_joint) == (best.gate_up, best.is_joint)
        total = 200 - 100 * gain * is_gate_up - 100 * gain * (tile.down == best.down)
        # Other rows are slower.
        return total * (1 if tile.rows == best.rows else 1.5)

    return us


def look(bench: FakeBench) -> Found:
    return search(JOB, incumbent_of(GLM, JOB), groups_of(GLM, JOB, SHARED), bench)


@pytest.mark.parametrize("rows", [16, 32, 64])
def test_the_best_of_both_products_is_found(rows: int) -> None:
    best = Tile(rows, GateUp(128, 8, 4), True, Down(128, 2, 8, 3))
    bench = FakeBench(parts(best, 0.3))
    found = look(bench)
    assert found.chosen.tile == best
    assert found.us == pytest.approx(140)
    assert found.incumbent == incumbent_of(GLM, JOB)
    assert (found.skipped, found.dropped) == (0, 0)
    # Both products apart: far fewer than each with each.
    total = {c for g in groups_of(GLM, JOB, SHARED) for c in g.all}
    assert total <= set(bench.timed)
    assert len(bench.timed) == len(set(bench.timed)) == found.timed <= len(total) + 3


@pytest.mark.parametrize(("gain", "is_taken"), [(0.5 * NOISE, False), (1.5 * NOISE, True)])
def test_a_gain_within_the_noise_changes_nothing(gain: float, is_taken: bool) -> None:
    incumbent = incumbent_of(GLM, JOB)
    best = replace(incumbent.tile, gate_up=GateUp(128, 4, 3), down=Down(128, 1, 4, 3))
    found = look(FakeBench(parts(best, gain)))
    assert found.chosen == (Candidate(best) if is_taken else incumbent)
    assert (found.us < found.incumbent_us) == is_taken
    # Of replays that differ by as much, it is noise.
    assert look(FakeBench(parts(best, gain), spread=0.05)).chosen == incumbent


def test_one_lucky_timing_is_not_enough() -> None:
    incumbent = incumbent_of(GLM, JOB)
    calls: dict[Candidate, int] = {}

    def us(candidate: Candidate) -> float:
        calls[candidate] = calls.get(candidate, 0) + 1
        is_lucky = candidate != incumbent and calls[candidate] == 1
        return 50.0 if is_lucky else 100.0

    assert look(FakeBench(us)).chosen == incumbent


def test_rounds_that_disagree_are_noise() -> None:
    incumbent = incumbent_of(GLM, JOB)
    times = iter([100, 90, 90, 90, 160, 90, 90, 90])
    bench = FakeBench(lambda c: 80 if not bench.final else next(times))
    assert look(bench).chosen == incumbent


@pytest.mark.parametrize(("behind", "is_taken"), [(0.5, True), (1.5, False)])
def test_a_tile_that_another_count_took_is_preferred_within_the_noise(
    behind: float, is_taken: bool
) -> None:
    best = Tile(32, GateUp(128, 8, 4), True, Down(128, 2, 8, 3))
    known = Candidate(replace(best, rows=128))
    us = parts(best, 0.3)
    slower = 140 * (1 + behind * NOISE)
    bench = FakeBench(lambda c: slower if c == known else us(c))
    groups = groups_of(GLM, JOB, SHARED)
    found = search(JOB, incumbent_of(GLM, JOB), groups, bench, [known])
    assert found.chosen == (known if is_taken else Candidate(best))
    assert found.us == pytest.approx(slower if is_taken else 140)


def test_what_is_wrong_is_not_taken() -> None:
    best = Tile(32, GateUp(128, 8, 4), True, Down(128, 2, 8, 3))
    is_right = parts(best, 0.3)
    wrong = GateUp(64, 8, 3)

    def us(candidate: Candidate) -> float | None:
        return None if candidate.tile.gate_up == wrong else is_right(candidate)

    found = look(FakeBench(us))
    assert found.chosen.tile == best
    assert found.dropped > 0
    # Nor is the tile in use.
    incumbent = incumbent_of(GLM, JOB)
    with pytest.raises(FiresteelError, match="sorted 1024: the tile in use"):
        look(FakeBench(lambda c: None if c == incumbent else 1.0))


def test_a_group_of_which_nothing_runs_is_passed_over() -> None:
    incumbent = incumbent_of(GLM, JOB)
    rows = incumbent.tile.rows
    found = look(FakeBench(lambda c: None if c.tile.rows != rows else 100.0))
    assert found.chosen == incumbent
    assert found.dropped > 100


@pytest.mark.parametrize("most", [1, 2, 30, 100])
def test_without_time_the_rest_is_skipped_and_counted(most: int) -> None:
    bench = FakeBench(lambda _: 100.0, most=most)
    found = look(bench)
    assert len(bench.timed) == found.timed == most
    total = {c for g in groups_of(GLM, JOB, SHARED) for c in g.all}
    assert found.timed + found.skipped >= len(total)
    assert found.chosen == incumbent_of(GLM, JOB)


def test_of_no_candidates_the_incumbent_stays() -> None:
    incumbent = incumbent_of(GLM, JOB)
    found = search(JOB, incumbent, [Group(incumbent, (), ())], FakeBench(lambda _: 7.0))
    assert (found.chosen, found.us, found.incumbent_us, found.timed) == (incumbent, 7.0, 7.0, 1)


@pytest.mark.parametrize("gain", [-1.0, 0.5 * NOISE, 1.5 * NOISE])
def test_hoppers_tiles_must_beat_the_best_of_the_others(gain: float) -> None:
    job = Job("wgmma", (1024,))
    best = Tile(64, GateUp(128, 8, 3), False, Down(256, 4, 8, 4), is_wgmma=True)
    incumbent = incumbent_of(GLM, job)
    assert not incumbent.tile.is_wgmma
    among = parts(best, 0.3)
    bench = FakeBench(lambda c: among(c) if c.tile.is_wgmma else 140 / (1 - gain))
    found = search(job, incumbent, groups_of(GLM, job, SHARED), bench)
    assert found.is_decided
    assert found.chosen == (Candidate(best) if gain > NOISE else incumbent)
    assert all(c.tile.is_wgmma for c in bench.timed[1:])


def test_hoppers_tile_in_use_is_preferred_to_others_within_the_noise() -> None:
    job = Job("wgmma", (1024,))
    now = known_of(GLM, job)
    assert now is not None
    groups = groups_of(GLM, job, SHARED)
    best = groups[0].down[0]
    for gain, chosen in ((0.5 * NOISE, now), (3 * NOISE, best)):
        times = {now: 100.0, best: 100 * (1 - gain), incumbent_of(GLM, job): 200.0}
        bench = FakeBench(lambda c, times=times: times.get(c, 150.0))
        assert search(job, incumbent_of(GLM, job), groups, bench, [now]).chosen == chosen


def found_of(job: Job, chosen: Candidate, timed: int = 2) -> Found:
    return Found(job, chosen, incumbent_of(GLM, job), 1.0, 1.0, timed=timed, skipped=0, dropped=0)


TILE = Tile(16, GateUp(128, 8, 4), True, Down(128, 2, 8, 3))
BASE = GLM.tiles
BOUNDS = [bound for bound, _ in BASE.sorted]


def test_what_stays_changes_no_tile() -> None:
    jobs = jobs_of(GLM, (1, 8, 32, 64, 256, 1024, 3072, 8192))
    kept = tuned_tiles(GLM, [found_of(job, incumbent_of(GLM, job)) for job in jobs])
    assert [tile for _, tile in kept.sorted] == [tile for _, tile in BASE.sorted]
    assert (kept.direct, kept.split_k) == (BASE.direct, BASE.split_k)
    assert tuned_tiles(GLM, []) == BASE


def test_a_count_speaks_for_those_up_to_the_geometric_mean() -> None:
    low, high = (Candidate(replace(TILE, rows=rows)) for rows in (8, 64))
    jobs = {64: low, 256: low, 1024: high, 8192: high}
    found = tuned_tiles(GLM, [found_of(Job("sorted", (m,)), c) for m, c in jobs.items()])
    # 512 tokens is the first count that is nearer to 1024 than to 256: 16 routes an expert.
    assert found.sorted == ((16.0, low.tile), (float("inf"), high.tile))


def test_ranges_beyond_what_was_measured_stay() -> None:
    found = tuned_tiles(GLM, [found_of(Job("sorted", (256,)), Candidate(TILE))])
    assert found.sorted == (BASE.sorted[0], (18.0, TILE), *BASE.sorted[2:])


def test_direct_and_batch_invariant_tiles_are_set_apart() -> None:
    direct = tuned_tiles(GLM, [found_of(Job("direct", (1, 4)), Candidate(TILE, 8))])
    assert direct == replace(BASE, direct=TILE, split_k=8)
    invariant = tuned_tiles(GLM, [found_of(Job("batch_invariant", (1, 64)), Candidate(TILE))])
    assert invariant == replace(BASE, batch_invariant=TILE)


@given(
    counts=st.lists(st.integers(5, 20000), min_size=1, max_size=9, unique=True),
    rows=st.lists(st.sampled_from((8, 16, 32)), min_size=9, max_size=9),
)
def test_any_ladder_gives_a_table(counts: list[int], rows: list[int]) -> None:
    chosen = {m: replace(TILE, rows=r) for m, r in zip(counts, rows, strict=False)}
    found = tuned_tiles(
        GLM, [found_of(Job("sorted", (m,)), Candidate(tile)) for m, tile in chosen.items()]
    )
    # It refuses holes and overlaps.
    table = TileTable("made", "A", "9.0", "2026-11-29", "2.11", "3.6",
                      found.rows(GLM.table.shapes[0]))  # fmt: skip
    spec = replace(GLM, table=table)
    for count, tile in chosen.items():
        assert incumbent_of(spec, Job("sorted", (count,))).tile == tile


INFINITY = float("inf")
HOPPER = Tile(64, GateUp(128, 8, 3), False, Down(256, 4, 8, 4), is_wgmma=True)
WIDE = replace(HOPPER, rows=128)
# No tile up to 16 routes an expert, 512 tokens.
BARE = replace(
    GLM,
    table=replace(
        GLM.table,
        rows=replace(BASE, wgmma=((16.0, 64.0, HOPPER), (64.0, INFINITY, WIDE))).rows(
            GLM.table.shapes[0]
        ),
    ),
)


def wgmma_of(spec: MoeSpec, tiles: dict[int, Tile | None]) -> tuple[tuple[float, float, Tile], ...]:
    found = []
    for count, tile in tiles.items():
        job = Job("wgmma", (count,))
        incumbent = incumbent_of(spec, job)
        chosen = incumbent if tile is None else Candidate(tile)
        found.append(Found(job, chosen, incumbent, 1.0, 1.0, timed=2, skipped=0, dropped=0))
    tuned = tuned_tiles(spec, found)
    assert replace(tuned, wgmma=()) == replace(spec.tiles, wgmma=())
    return tuned.wgmma


def test_hoppers_tiles_start_between_the_last_count_lost_and_the_first_won() -> None:
    tile = replace(HOPPER, rows=32)
    # 512 tokens, 16 routes an expert, are between 256 and 1024.
    for lost in ({256: None}, {128: None, 256: None}):
        made = wgmma_of(BARE, {**lost, 1024: tile, 8192: tile})
        assert made == ((16.0, INFINITY, tile),)
    # Of equal tiles there is one range, and one that loses in the middle leaves a hole.
    made = wgmma_of(BARE, {256: None, 1024: tile, 2048: tile, 4096: None, 8192: tile})
    assert [(first, below) for first, below, _ in made] == [(16.0, 90.53125), (181.03125, INFINITY)]
    assert wgmma_of(BARE, {256: None, 8192: None}) == ()


def test_hoppers_tiles_do_not_reach_down_to_fewer_routes_than_were_measured() -> None:
    assert wgmma_of(BARE, {256: HOPPER})[0] == (8.0, 64.0, HOPPER)
    # Nor where a tile of fewer rows was; where one of as many was, it is replaced.
    assert wgmma_of(BARE, {512: WIDE}) == ((16.0, INFINITY, WIDE),)
    assert wgmma_of(BARE, {1024: WIDE}) == ((16.0, 32.0, HOPPER), (32.0, INFINITY, WIDE))
    tile = replace(HOPPER, rows=32)
    assert wgmma_of(BARE, {1024: tile}) == ((16.0, 64.0, tile), (64.0, INFINITY, WIDE))
    # One that loses is lost in all of its range.
    assert wgmma_of(BARE, {1024: None}) == ((64.0, INFINITY, WIDE),)


def test_a_count_whose_hopper_tiles_were_not_timed_keeps_them() -> None:
    job = Job("wgmma", (1024,))
    assert tuned_tiles(BARE, [found_of(job, incumbent_of(BARE, job), timed=1)]) == BARE.tiles
    # Nor does a layer without those kernels take them from the table that it started from.
    assert tuned_tiles(replace(BARE, wgmma=False), []) == replace(BARE.tiles, wgmma=())


STREAM = Tile(8, GateUp(64, 4, 4), False, Down(128, 4, 4, 4), is_wgmma=True)
DIRECT = replace(STREAM, down=Down(64, 1, 4, 4))
# 4 tokens of top-8 of 256 experts are the last that are direct: 33 routes are sorted.
BORDER = 33 / 256


def test_hoppers_tiles_do_not_reach_across_the_border_of_direct_counts() -> None:
    nothing = with_tiles(GLM, replace(BASE, wgmma=()))
    one, eight = 1 / 32, 8 / 32
    # The geometric mean of 1 and 8 tokens is 3, which are direct.
    both = ((one, BORDER, DIRECT), (BORDER, INFINITY, STREAM))
    assert wgmma_of(nothing, {1: DIRECT, 8: STREAM}) == both
    assert wgmma_of(nothing, {1: None, 8: STREAM}) == both[1:]
    assert wgmma_of(nothing, {1: DIRECT, 8: None}) == both[:1]
    # Of direct counts alone, and of others alone.
    assert wgmma_of(nothing, {1: DIRECT}) == both[:1]
    assert wgmma_of(nothing, {8: STREAM}) == ((eight, INFINITY, STREAM),)
    wide = with_tiles(GLM, replace(BASE, wgmma=((0.0, 5.0, STREAM),)))
    assert wgmma_of(wide, {1: None}) == ((BORDER, 5.0, STREAM),)
    assert wgmma_of(wide, {1: DIRECT}) == ((0.0, BORDER, DIRECT), (BORDER, 5.0, STREAM))
    assert wgmma_of(wide, {8: None}) == ((0.0, BORDER, STREAM),)
    other = replace(STREAM, rows=16)
    assert wgmma_of(wide, {8: other}) == ((0.0, eight, STREAM), (eight, 5.0, other))
    # What is not cut stays one range; nor is there a second border beside that of the table.
    assert wgmma_of(wide, {1: STREAM, 8: STREAM}) == wide.tiles.wgmma
    cut = with_tiles(GLM, replace(BASE, wgmma=((0.0, 0.126, DIRECT), (0.126, 5.0, STREAM))))
    assert wgmma_of(cut, {8: None}) == ((0.0, 0.126, DIRECT),)


def test_direct_counts_of_one_job_have_the_same_tile_of_hopper() -> None:
    job = Job("wgmma", (1, 4))
    tuned = tuned_tiles(BARE, [found_of(job, Candidate(DIRECT))])
    assert tuned == replace(BARE.tiles, wgmma=((1 / 32, BORDER, DIRECT), *BARE.tiles.wgmma))
    spec = with_tiles(BARE, tuned)
    assert [known_of(spec, Job("wgmma", (m,))) for m in (1, 2, 3, 4, 5)] == [
        *[Candidate(DIRECT)] * 4, None
    ]  # fmt: skip


@given(
    counts=st.lists(st.integers(1, 20000), min_size=1, max_size=9, unique=True),
    rows=st.lists(st.sampled_from((None, 8, 16, 32, 64, 128)), min_size=9, max_size=9),
    spec=st.sampled_from((GLM, BARE, with_candidate(GLM, Candidate(TILE)))),
)
def test_any_ladder_of_hoppers_tiles_gives_a_table(
    counts: list[int], rows: list[int | None], spec: MoeSpec
) -> None:
    # Direct counts have tiles of few rows.
    rows = [min(r, 16) if m <= 4 and r else r for m, r in zip(counts, rows, strict=False)]
    chosen = {
        m: None if r is None else replace(HOPPER, rows=r) for m, r in zip(counts, rows, strict=True)
    }
    wgmma = wgmma_of(spec, chosen)
    table = TileTable("made", "A", "9.0", "2026-11-29", "2.11", "3.6",
                      replace(BASE, wgmma=wgmma).rows(GLM.table.shapes[0]))  # fmt: skip
    for count, tile in chosen.items():
        known = known_of(replace(GLM, table=table), Job("wgmma", (count,)))
        assert known == (None if tile is None else Candidate(tile))
    assert all(a[1] < b[0] or a[2] != b[2] for a, b in pairwise(wgmma))
    # Fewer routes than were measured have no larger a tile than before.
    before, after = spec.tiles, replace(spec.tiles, wgmma=wgmma)
    for routes in (m / 32 for m in (0, 1, 4, 5, 16, 127) if m < min(counts)):
        now, then = before.of_wgmma(routes), after.of_wgmma(routes)
        assert then is None or (now is not None and then.rows <= now.rows)
