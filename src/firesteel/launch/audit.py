"""What a plan's launches did: planned, loaded, launched and never launched keys, and misses."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from firesteel.launch.key import LaunchKey, nearest_key
from firesteel.launch.watch import Seen

if TYPE_CHECKING:
    from firesteel.launch.bound import Bound
    from firesteel.launch.runner import RunnerLike
    from firesteel.launch.table import Plan, Table

__all__ = ["Audit", "Miss", "Prewarmed", "Replay", "replay", "replay_keys"]

MAX_MISSES = 1000
"""Misses that an audit tells apart; of more it says how many there were."""


@dataclass(slots=True)
class Prewarmed:
    """How many kernels came from where, all in all, and how long it took."""

    compiled: int = 0
    from_cache: int = 0
    from_bundle: int = 0
    loaded: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        """`12 kernels loaded: 10 compiled, 2 from the cache, 0 from the bundle, 3.1 s`."""
        return (
            f"{self.loaded} kernels loaded: {self.compiled} compiled, {self.from_cache} from the "
            f"cache, {self.from_bundle} from the bundle, {self.seconds:.2f} s"
        )


@dataclass(frozen=True, slots=True)
class Miss:
    """A launch that a plan does not hold.

    Fields
        asked        "4097 tokens", or the flags
        max_tokens   where the plan ends
        key          the first key that is not planned; None where only the count is outside
        nearest      the planned key that it is closest to
        differences  the fields in which they differ
    """

    asked: str
    max_tokens: int
    key: LaunchKey | None
    nearest: LaunchKey | None
    differences: tuple[str, ...]

    def __str__(self) -> str:
        """One line with the key, the nearest planned key and what differs."""
        text = f"not planned: {self.asked}, the plan holds 0..{self.max_tokens} tokens"
        if self.key is None:
            return text + "; its keys are all planned"
        if self.nearest is None:
            return f"{text}; key {self.key}, the plan has no key"
        return f"{text}; key {self.key}; nearest {self.nearest}; {'; '.join(self.differences)}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "asked": self.asked,
            "key": None if self.key is None else self.key.as_dict(),
            "nearest": None if self.nearest is None else self.nearest.as_dict(),
            "differences": list(self.differences),
        }


class Audit:
    """Counters of one plan that is ready, over everything that was bound from it.

    Fields
        prewarmed  how many kernels came from where
        seen       what was seen while a watch was on; None where none ever was
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        # Reentrant: `_end` may run inside any allocation, also in one made under the lock.
        self._lock = threading.RLock()
        self._num_ended = 0
        self._ended: Counter[LaunchKey] = Counter()
        self._live: dict[int, tuple[Table, RunnerLike]] = {}
        self._misses: dict[tuple[str, LaunchKey | None], tuple[Miss, int]] = {}
        self._num_left_out = 0
        self.seen: Seen | None = None
        self.prewarmed = Prewarmed()

    def note(self, miss: Miss) -> bool:
        """Count a miss; whether it was not known before."""
        place = (miss.asked, miss.key)
        with self._lock:
            known = self._misses.get(place)
            if known is not None:
                self._misses[place] = (known[0], known[1] + 1)
            elif len(self._misses) < MAX_MISSES:
                self._misses[place] = (miss, 1)
            else:
                self._num_left_out += 1
        return known is None

    def saw(self, seen: Seen) -> None:
        """Add the counts of a watch."""
        with self._lock:
            if self.seen is None:
                self.seen = Seen()
            self.seen.add(seen)

    def follow(
        self, caller: Bound | Callable[..., object], table: Table, runner: RunnerLike
    ) -> None:
        """Count the launches of a runner, also after `caller`, which alone calls it, is gone."""
        token = id(runner)
        with self._lock:
            self._live[token] = (table, runner)
        weakref.finalize(caller, self._end, token).atexit = False

    def _end(self, token: int) -> None:
        with self._lock:
            table, runner = self._live.pop(token)
            self._ended.update(_counts(table, runner))
            self._num_ended += 1

    def launches(self) -> Counter[LaunchKey]:
        """Launches of each key so far."""
        with self._lock:
            while True:
                before = self._num_ended
                total = Counter(self._ended)
                for table, runner in tuple(self._live.values()):
                    total.update(_counts(table, runner))
                if before == self._num_ended:
                    return total

    @property
    def misses(self) -> tuple[Miss, ...]:
        """What was asked for and not planned, each once; of very many the first."""
        with self._lock:
            return tuple(miss for miss, _ in self._misses.values())

    def as_dict(self) -> dict[str, Any]:
        """The counters, for JSON."""
        launches = self.launches()
        with self._lock:
            misses, left_out = list(self._misses.values()), self._num_left_out
        planned = set(self._plan.keys)
        return {
            "planned": len(planned),
            "launched": sum(1 for key in planned if launches[key]),
            "launches": sum(launches.values()),
            "launches_by_key": _by_key(launches),
            "never_launched": [str(key) for key in self._plan.keys if not launches[key]],
            "launched_unplanned": [str(k) for k in launches if launches[k] and k not in planned],
            "misses": [{**miss.as_dict(), "count": count} for miss, count in misses],
            "misses_left_out": left_out,
            "prewarmed": asdict(self.prewarmed),
            "seen_in_run": None if self.seen is None else self.seen.as_dict(),
        }


def _by_key(launches: Mapping[LaunchKey, int]) -> list[dict[str, Any]]:
    """For JSON: a list, since keys of different modules and constants may read alike."""
    return [
        {"kernel": key.kernel, "key": str(key), "launches": count}
        for key, count in launches.items()
        if count
    ]


def _counts(table: Table, runner: RunnerLike) -> Counter[LaunchKey]:
    found: Counter[LaunchKey] = Counter()
    for steps, counts in zip(table.sequences, runner.counts(), strict=True):
        for step, count in zip(steps, counts, strict=True):
            found[step.key] += count
    return found


@dataclass(frozen=True, slots=True)
class Replay:
    """What traffic would launch, against what was prewarmed.

    Fields
        prewarmed  the keys that a warm-up compiled
        launches   launches of each key by the traffic
        misses     keys that the traffic needs and the warm-up did not compile, each once
        too_long   token counts past the plan's end
    """

    prewarmed: tuple[LaunchKey, ...]
    launches: Counter[LaunchKey]
    misses: tuple[Miss, ...]
    too_long: tuple[int, ...]

    @property
    def reached(self) -> tuple[LaunchKey, ...]:
        """Prewarmed keys that the traffic launches."""
        return tuple(key for key in self.prewarmed if self.launches[key])

    @property
    def never_reached(self) -> tuple[LaunchKey, ...]:
        """Prewarmed keys that the traffic never launches."""
        return tuple(key for key in self.prewarmed if not self.launches[key])

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "prewarmed": len(self.prewarmed),
            "reached": [str(key) for key in self.reached],
            "never_reached": [str(key) for key in self.never_reached],
            "launches": sum(self.launches.values()),
            "launches_by_key": _by_key(self.launches),
            "misses": [miss.as_dict() for miss in self.misses],
            "too_long": list(self.too_long),
        }


def replay(
    plan: Plan, traffic: Iterable[int], *, prewarmed: Sequence[LaunchKey] | None = None
) -> Replay:
    """Run token counts through a plan on a CPU: which keys they reach, and which they miss.

    Traffic does not say its flags, so that a call counts under each combination that is planned; a
    key that several of them launch counts as often as the one that launches it most.

    Args:
        plan: what run time would index.
        traffic: the token count of each call.
        prewarmed: keys that a warm-up compiled; the plan's own by default.
    """
    keys = plan.keys if prewarmed is None else prewarmed
    return replay_keys(
        lambda num_tokens: plan.used(num_tokens).elements(),
        plan.max_tokens,
        traffic,
        prewarmed=keys,
    )


def replay_keys(
    used: Callable[[int], Iterable[LaunchKey]],
    max_tokens: int,
    traffic: Iterable[int],
    *,
    prewarmed: Iterable[LaunchKey],
) -> Replay:
    """As `replay`, for what is no `Plan`: `used` gives the keys that a call of a count launches."""
    keys = tuple(dict.fromkeys(prewarmed))
    counts = Counter(traffic)
    too_long = tuple(sorted(n for n in counts if not 0 <= n <= max_tokens))
    launches: Counter[LaunchKey] = Counter()
    first: dict[LaunchKey, int] = {}
    for num_tokens in sorted(counts):
        if num_tokens in too_long:
            continue
        for key in used(num_tokens):
            launches[key] += counts[num_tokens]
            first.setdefault(key, num_tokens)
    misses: list[Miss] = []
    known = set(keys)
    for key, num_tokens in first.items():
        if key not in known:
            nearest = nearest_key(key, keys)
            differences = () if nearest is None else key.differences(nearest)
            misses.append(Miss(f"{num_tokens} tokens", max_tokens, key, nearest, differences))
    return Replay(keys, launches, tuple(misses), too_long)
