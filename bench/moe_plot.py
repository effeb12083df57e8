"""The picture of `bench moe`: a layer's time and its fraction of the floor, beside its peers'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from floor_plot import draw_against_floor, when_and_where
from svg_chart import Axis, Series

# Colours and markers of what is drawn beside firesteel; names as in peers.json.
PEERS = {
    "Marlin": ("vermilion", "square"),
    "Humming": ("green", "triangle"),
    "FlagGems": ("purple", "diamond"),
}


def moe_picture(
    records: Sequence[Mapping[str, Any]], peers: Mapping[str, Any], shape: str, recipe: str
) -> str:
    """The SVG of one layer with uniform routing; `peers` is what peers.json says.

    Raises
        ValueError: no record of that layer.
    """
    found = sorted(
        (
            r
            for r in records
            if (r["shape"], r["recipe"]) == (shape, recipe)
            and r["routing"] == "uniform"
            and not r["batch_invariant"]
        ),
        key=lambda r: r["m"],
    )
    if not found:
        raise ValueError(f"records: got none of {shape} {recipe}, must have one at least")
    times = _times(found, peers.get(f"{shape} {recipe}", {}), recipe)
    tokens = tuple(sorted({m for series in times for m, _ in series.points}))
    return draw_against_floor(
        f"One MoE layer, {shape} {recipe}, uniform routing",
        when_and_where(found),
        times,
        {r["m"]: r["floor_us"] for r in found},
        times_title="Time of the whole layer (lower is better)",
        x=Axis("tokens M of a call", tokens, is_log=True),
        notes=(f"Peers: {peers['source']}.",),
    )


def _times(
    found: Sequence[Mapping[str, Any]], peers: Mapping[str, Mapping[str, float]], recipe: str
) -> tuple[Series, ...]:
    """Microseconds by tokens, in the order of the legend; later ones are drawn on top."""
    ours = tuple((r["m"], r["us"]) for r in found)
    torch = tuple((r["m"], r["torch_bf16_us"]) for r in found if r.get("torch_bf16_us") is not None)
    floor = tuple((r["m"], r["floor_us"]) for r in found)
    series = [Series(f"firesteel {recipe}", ours, "blue", "circle", "")]
    if torch:
        series.append(Series("torch bf16 grouped products", torch, "grey", "wedge", "7 4"))
    series.append(Series("floor", floor, "ink", None, "2 4"))
    for name, us in peers.items():
        points = tuple(sorted((int(m), each) for m, each in us.items()))
        if name not in PEERS:
            raise SystemExit(f"peers.json: got {name!r}, must be one of {', '.join(PEERS)}")
        series.append(Series(name, points, *PEERS[name], None))
    return tuple(series)
