"""How many replays of a graph are timed; the graph itself needs a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from firesteel.cli.bench import timing


class Clock:
    """Seconds that pass at replays alone."""

    def __init__(self, each: float) -> None:
        self.each = each
        self.now = 0.0
        self.replays = 0

    def captured(self, functions: Sequence[Callable[[], object]]) -> Clock:
        assert len(functions) == 2
        return self

    def replay(self) -> None:
        self.replays += 1
        self.now += self.each

    def event(self, *, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.at = 0.0

    def record(self) -> None:
        self.at = self.clock.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Event) -> float:
        return (other.at - self.at) * 1000


@pytest.mark.parametrize(
    ("each", "given", "counted"),
    [
        (0.01, {}, 25),
        (0.01, {"replays": 7}, 7),
        (100.0, {}, 25),
        # 1.5 s are over after 15 replays, of which three are not counted.
        (0.1001, {"seconds": 1.5}, 12),
        (0.01, {"seconds": 1.5}, 25),
        (100.0, {"seconds": 1.5}, 5),
    ],
)
def test_replays_end_when_time_is_up_but_not_before_a_few(
    monkeypatch: pytest.MonkeyPatch, each: float, given: dict, counted: int
) -> None:
    clock = Clock(each)
    monkeypatch.setattr(timing, "captured", clock.captured)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(torch.cuda, "Event", clock.event)
    found = timing.graph_us([lambda: None, lambda: None], **given)
    assert len(found) == counted
    assert clock.replays == counted + 3
    # Of each of two functions.
    assert found == pytest.approx([each * 1e6 / 2] * counted)
