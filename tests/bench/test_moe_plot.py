import importlib
import json
import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"
SHAPE, RECIPE = "glm-5.2-tp4", "int4-g128"


@pytest.fixture(scope="module")
def plots(tables: ModuleType) -> ModuleType:
    return importlib.import_module("moe_plot")


@pytest.fixture(scope="module")
def charts(tables: ModuleType) -> ModuleType:
    return importlib.import_module("svg_chart")


def record(m: int, us: float, floor_us: float, **changed: object) -> dict:
    return {
        "shape": SHAPE,
        "recipe": RECIPE,
        "routing": "uniform",
        "batch_invariant": False,
        "m": m,
        "us": us,
        "floor_us": floor_us,
        "date": "2026-01-02T03:04:05Z",
        "commit": "abc",
        "machine": {"name": "GPU"},
        **changed,
    }


def titles(text: str) -> list[str]:
    """What the markers of a picture say."""
    root = ElementTree.fromstring(text)
    marks = [mark for tag in ("circle", "polygon") for mark in root.iter(f"{SVG}{tag}")]
    return [title.text or "" for mark in marks for title in mark.iter(f"{SVG}title")]


def test_the_committed_picture_has_every_measured_point():
    lines = (ROOT / "bench" / "results" / "h200" / "moe.jsonl").read_text().splitlines()
    found = [
        row
        for row in map(json.loads, lines)
        if (row["shape"], row["recipe"], row["routing"]) == (SHAPE, RECIPE, "uniform")
        and not row["batch_invariant"]
    ]
    newest = {row["m"]: row for row in found}
    # A run without a baseline leaves that of the one before it.
    baseline = {row["m"]: row["torch_bf16_us"] for row in found if "torch_bf16_us" in row}
    times = [(f"firesteel {RECIPE}", m, row["us"]) for m, row in newest.items()]
    times += [("torch bf16 grouped products", m, us) for m, us in baseline.items()]
    peers = json.loads((ROOT / "bench" / "peers.json").read_text())[f"{SHAPE} {RECIPE}"]
    times += [(name, int(m), us) for name, each in peers.items() for m, us in each.items()]
    expected = [f"{name}, {m} tokens: {us:.1f} us" for name, m, us in times]
    expected += [
        f"{name}, {m} tokens: {newest[m]['floor_us'] / us:.2f} of the floor"
        for name, m, us in times
        if m in newest
    ]
    found = titles((ROOT / "docs" / "images" / f"moe-{SHAPE}.svg").read_text())
    assert sorted(found) == sorted(expected)


def test_only_the_layer_itself_is_drawn(plots):
    records = [
        record(8, 90.0, 45.0),
        record(1, 20.0, 10.0, torch_bf16_us=100.0),
        record(1, 7.0, 1.0, routing="zipf"),
        record(1, 7.0, 1.0, batch_invariant=True),
        record(1, 7.0, 1.0, shape="other"),
    ]
    # A peer measured at 64 tokens, where the layer was not, has a time but no fraction.
    peers = {"source": "a & b", f"{SHAPE} {RECIPE}": {"Marlin": {"8": 180, "64": 400}}}
    found = titles(plots.moe_picture(records, peers, SHAPE, RECIPE))
    assert sorted(found) == sorted(
        [
            "firesteel int4-g128, 1 tokens: 20.0 us",
            "firesteel int4-g128, 8 tokens: 90.0 us",
            "torch bf16 grouped products, 1 tokens: 100.0 us",
            "Marlin, 8 tokens: 180.0 us",
            "Marlin, 64 tokens: 400.0 us",
            "firesteel int4-g128, 1 tokens: 0.50 of the floor",
            "firesteel int4-g128, 8 tokens: 0.50 of the floor",
            "torch bf16 grouped products, 1 tokens: 0.10 of the floor",
            "Marlin, 8 tokens: 0.25 of the floor",
        ]
    )


def test_one_size_alone_is_drawn(plots):
    found = titles(plots.moe_picture([record(64, 20.0, 10.0)], {"source": ""}, SHAPE, RECIPE))
    assert found == [
        "firesteel int4-g128, 64 tokens: 20.0 us",
        "firesteel int4-g128, 64 tokens: 0.50 of the floor",
    ]


def test_a_layer_that_was_not_measured_is_refused(plots):
    with pytest.raises(ValueError, match=re.escape(f"records: got none of {SHAPE} {RECIPE}")):
        plots.moe_picture([], {"source": ""}, SHAPE, RECIPE)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (9.1, 8003.0, (5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)),
        (10.0, 10.0, (10,)),
        (0.3, 0.6, (0.2, 0.5, 1)),
    ],
)
def test_ticks_go_around_a_range(charts, low, high, ticks):
    assert charts.log_ticks(low, high) == pytest.approx(ticks)


def test_markers_stand_where_the_axes_say(charts):
    x = charts.Axis("x", (1.0, 10.0, 100.0), is_log=True)
    y = charts.Axis("y", (0.0, 4.0), is_log=False)
    series = charts.Series("a < b", ((1.0, 0.0), (10.0, 1.0), (100.0, 4.0)), "blue", "circle", "")
    panel = charts.Panel("title", x, y, (series,), "units")
    root = ElementTree.fromstring(charts.draw("head", "below", (panel,), ("note",)))
    marks = [mark for mark in root.iter(f"{SVG}circle") if mark.find(f"{SVG}title") is not None]
    across = [float(mark.attrib["cx"]) for mark in marks]
    left, right = charts.LEFT, charts.WIDTH - charts.RIGHT
    assert across == pytest.approx([left, (left + right) / 2, right], abs=0.1)
    top, bottom = charts.TOP, charts.TOP + charts.PANEL_HEIGHT
    down = [float(mark.attrib["cy"]) for mark in marks]
    assert down == pytest.approx([bottom, bottom - (bottom - top) / 4, top], abs=0.1)
    (line, _) = root.iter(f"{SVG}polyline")
    assert line.attrib["points"] == " ".join(
        f"{mark.attrib['cx']},{mark.attrib['cy']}" for mark in marks
    )
