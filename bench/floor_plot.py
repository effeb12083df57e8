"""Two charts side by side: times, and what part of each the floor is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from svg_chart import Axis, Panel, Series, draw, log_ticks

__all__ = ["draw_against_floor", "when_and_where"]


def draw_against_floor(
    title: str,
    subtitle: str,
    times: Sequence[Series],
    floor: Mapping[float, float],
    *,
    times_title: str,
    x: Axis,
    notes: Sequence[str],
) -> str:
    """The SVG of series of microseconds; `floor` has the floor of each x that was measured."""
    lengths = [us for series in times for _, us in series.points]
    shares = tuple(
        Series(
            each.name,
            # A peer's time where nothing was measured has no floor to compare with.
            tuple((at, floor[at] / us) for at, us in each.points if at in floor),
            each.color,
            each.marker,
            each.dash,
        )
        for each in times
    )
    return draw(
        title,
        subtitle,
        (
            Panel(
                times_title,
                x,
                Axis("microseconds", log_ticks(min(lengths), max(lengths)), is_log=True),
                tuple(times),
                "us",
            ),
            Panel(
                "Fraction of the floor (higher is better)",
                x,
                Axis("floor / time", (0.0, 0.2, 0.4, 0.6, 0.8, 1.0), is_log=False),
                shares,
                "of the floor",
            ),
        ),
        notes,
    )


def when_and_where(records: Sequence[Mapping[str, Any]]) -> str:
    """Machines, days and commits of records."""
    days = sorted({r["date"][:10] for r in records})
    commits = ", ".join(dict.fromkeys(r["commit"] for r in records))
    machines = ", ".join(dict.fromkeys(r["machine"]["name"] for r in records))
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return f"{machines}, {when}, commit {commits}"
