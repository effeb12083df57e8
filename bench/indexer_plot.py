"""The picture of `bench indexer`: a call's time and its fraction of the floor, by context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from floor_plot import draw_against_floor, when_and_where
from svg_chart import Axis, Series


def indexer_picture(
    records: Sequence[Mapping[str, Any]], peers: Mapping[str, Any], kind: str
) -> str | None:
    """The SVG of the cases `kind-...` of e4m3 keys; `peers` is the indexer's part of peers.json.

    None where none of them was measured.
    """
    found = sorted(
        (
            r
            for r in records
            if r["case"].startswith(f"{kind}-")
            and (r["cache_dtype"], r["route"]) == ("e4m3", "auto")
            and r["us"] is not None
        ),
        key=lambda r: r["context"],
    )
    if not found:
        return None
    first = found[0]
    floor = {_thousands(r): r["floor_us"] for r in found}
    times = [
        Series("firesteel", tuple((_thousands(r), r["us"]) for r in found), "blue", "circle", ""),
        Series("torch bf16", _points(found, "torch_bf16_us"), "grey", "wedge", "7 4"),
        Series("floor", tuple(floor.items()), "ink", None, "2 4"),
        Series(
            "best scores, then best top-k",
            tuple((_thousands(r), peers[r["case"]]) for r in found if r["case"] in peers),
            "vermilion",
            "square",
            None,
        ),
    ]
    return draw_against_floor(
        f"The indexer: {first['requests']} requests of {first['rows_per_request']} rows, "
        f"{first['heads']} heads, top-k {first['top_k']}",
        when_and_where(found),
        tuple(series for series in times if series.points),
        floor,
        times_title="Time of a call (lower is better)",
        x=Axis("context, 1024 tokens", tuple(floor), is_log=True, unit="k of context"),
        notes=(f"Best scores, then best top-k: {peers['source']}.",),
    )


def _points(records: Sequence[Mapping[str, Any]], name: str) -> tuple[tuple[float, float], ...]:
    return tuple((_thousands(r), r[name]) for r in records if r[name] is not None)


def _thousands(record: Mapping[str, Any]) -> float:
    return record["context"] / 1024
