"""Charts as SVG text: panels side by side, series as lines and markers, one legend below.

Only the standard library writes them, so their bytes depend on the data alone, and a test can
say whether a committed picture is fresh. The picture has its own background in light and dark
viewers. Each marker has a `<title>`, which viewers show when the mouse is on it.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

WIDTH, TOP, PANEL_HEIGHT, LEFT, RIGHT, GAP = 960, 68, 300, 66, 24, 76
FONT = 12
# Wider than a letter of most sans-serif fonts, since the viewer's is not known.
LETTER = 0.58 * FONT

# Okabe and Ito's colours, which the colour-blind tell apart; each on light and on dark ground.
COLORS = {
    "blue": ("#0072b2", "#56b4e9"),
    "vermilion": ("#d55e00", "#ff8a3d"),
    "green": ("#007a58", "#2cc79c"),
    "purple": ("#a8478a", "#e39ac6"),
    "grey": ("#6b6b6b", "#a6a6a6"),
    "ink": ("#1a1a1a", "#e8e8e8"),
}
GROUND, GRID = ("#ffffff", "#14171c"), ("#dddddd", "#343a43")

# Corners around the middle of a marker, in units of its size; a circle has none.
MARKERS = {
    "circle": (),
    "square": ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
    "triangle": ((0.0, -1.2), (1.1, 0.8), (-1.1, 0.8)),
    "diamond": ((0.0, -1.3), (1.1, 0.0), (0.0, 1.3), (-1.1, 0.0)),
    "wedge": ((0.0, 1.2), (1.1, -0.8), (-1.1, -0.8)),
}


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one name; `dash` is "" for a whole line, None for hollow markers alone.

    Hollow ones hide nothing of what they lie on.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    color: str
    marker: str | None
    dash: str | None


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis from its first tick to its last; `unit` is what markers' titles count along x."""

    label: str
    ticks: tuple[float, ...]
    is_log: bool
    unit: str = "tokens"

    def place(self, value: float) -> float:
        """Where a value lies, from 0 to 1; in the middle of an axis of one tick."""
        low, high = self.ticks[0], self.ticks[-1]
        if low == high:
            return 0.5
        if self.is_log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return (value - low) / (high - low)


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart: its axes, its series, and the unit of `y` for the markers' titles."""

    title: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    unit: str


def log_ticks(low: float, high: float) -> tuple[float, ...]:
    """The 1, 2 and 5 of each power of ten around a range."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = [
        digit * 10.0**power for power in range(first - 1, last + 1) for digit in (1.0, 2.0, 5.0)
    ]
    start = max(step for step in steps if step <= low)
    end = min(step for step in steps if step >= high)
    return tuple(step for step in steps if start <= step <= end)


def draw(title: str, subtitle: str, panels: Sequence[Panel], notes: Sequence[str]) -> str:
    """The chart as SVG text, notes in small letters below the legend."""
    lines = [line for note in notes for line in textwrap.wrap(note, 140)]
    bottom = TOP + PANEL_HEIGHT
    height = bottom + 92 + 16 * len(lines)
    root = ElementTree.Element(
        "svg",
        {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {WIDTH} {height}", "role": "img"},
    )
    _add(root, "title", text=title)
    _add(root, "style", text=_style())
    _add(root, "rect", class_="ground", width=WIDTH, height=height)
    _text(root, WIDTH / 2, 22, title, class_="head")
    _text(root, WIDTH / 2, 40, subtitle, class_="small")
    width = (WIDTH - LEFT - RIGHT - GAP * (len(panels) - 1)) / len(panels)
    for number, panel in enumerate(panels):
        _panel(root, panel, LEFT + number * (width + GAP), width)
    _legend(root, panels[0].series, bottom + 64)
    for number, line in enumerate(lines):
        _text(root, WIDTH / 2, bottom + 92 + 16 * number, line, class_="small")
    ElementTree.indent(root, " ")
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _add(
    parent: ElementTree.Element, tag: str, text: str | None = None, **attributes: float | str
) -> ElementTree.Element:
    """A new child; numbers to a tenth, `stroke_width` as stroke-width and `class_` as class."""
    written = {
        name.rstrip("_").replace("_", "-"): value if isinstance(value, str) else f"{value:.1f}"
        for name, value in attributes.items()
    }
    child = ElementTree.SubElement(parent, tag, written)
    child.text = text
    return child


def _text(
    parent: ElementTree.Element, x: float, y: float, text: str, **attributes: float | str
) -> None:
    _add(parent, "text", text, x=x, y=y, **{"text_anchor": "middle", **attributes})


def _style() -> str:
    """Rules for light viewers, then for dark ones. Plain ones: converters know no variables."""
    shades: list[str] = []
    for shade in (0, 1):
        rules = [f".ground{{fill:{GROUND[shade]}}}", f".grid{{stroke:{GRID[shade]}}}"]
        rules.append(f"text{{fill:{COLORS['ink'][shade]}}}")
        for name, color in COLORS.items():
            # A rim of the ground's colour parts a marker from its line.
            rules.append(f".{name}{{fill:{color[shade]};stroke:{GROUND[shade]}}}")
            rules.append(f".{name}-line{{stroke:{color[shade]}}}")
        shades.append("".join(rules))
    fixed = (
        f"text{{font:{FONT}px system-ui,'Segoe UI','DejaVu Sans',sans-serif}}"
        ".head{font-size:15px;font-weight:600}.small{font-size:11px}"
        "polyline,.hollow{fill:none;stroke-width:2}"
    )
    return f"{fixed}{shades[0]}@media (prefers-color-scheme:dark){{{shades[1]}}}"


def _panel(root: ElementTree.Element, panel: Panel, left: float, width: float) -> None:
    bottom = TOP + PANEL_HEIGHT

    def x_of(value: float) -> float:
        return left + width * panel.x.place(value)

    def y_of(value: float) -> float:
        return bottom - PANEL_HEIGHT * panel.y.place(value)

    group = _add(root, "g")
    for tick in panel.x.ticks:
        _add(group, "line", class_="grid", x1=x_of(tick), x2=x_of(tick), y1=TOP, y2=bottom)
        _text(group, x_of(tick), bottom + 17, f"{tick:g}")
    for tick in panel.y.ticks:
        y = y_of(tick)
        _add(group, "line", class_="grid", x1=left, x2=left + width, y1=y, y2=y)
        _text(group, left - 7, y + 4, f"{tick:g}", text_anchor="end")
    _text(group, left + width / 2, TOP - 9, panel.title)
    _text(group, left + width / 2, bottom + 36, panel.x.label)
    x, y = left - 48, TOP + PANEL_HEIGHT / 2
    _text(group, x, y, panel.y.label, transform=f"rotate(-90 {x:.1f} {y:.1f})")
    for series in panel.series:
        places = [(x_of(x), y_of(y)) for x, y in series.points]
        _line(group, series, places)
        for place, (x, y) in zip(places, series.points, strict=True):
            amount = f"{y:.1f}" if panel.y.is_log else f"{y:.2f}"
            at = f"{x:g} {panel.x.unit}"
            _marker(group, series, place, f"{series.name}, {at}: {amount} {panel.unit}")


def _line(
    parent: ElementTree.Element, series: Series, places: Sequence[tuple[float, float]]
) -> None:
    if series.dash is not None:
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        line = _add(parent, "polyline", class_=f"{series.color}-line", points=points)
        if series.dash:
            line.set("stroke-dasharray", series.dash)


def _marker(
    parent: ElementTree.Element, series: Series, place: tuple[float, float], title: str | None
) -> None:
    if series.marker is None:
        return
    (x, y), size = place, 4.5
    corners = MARKERS[series.marker]
    look = series.color if series.dash is not None else f"{series.color}-line hollow"
    if corners:
        points = " ".join(f"{x + size * dx:.1f},{y + size * dy:.1f}" for dx, dy in corners)
        marker = _add(parent, "polygon", class_=look, points=points)
    else:
        marker = _add(parent, "circle", class_=look, cx=x, cy=y, r=size)
    if title is not None:
        _add(marker, "title", title)


def _legend(root: ElementTree.Element, series: Sequence[Series], y: float) -> None:
    sample, pad, apart = 26, 7, 22
    widths = [sample + pad + LETTER * len(each.name) for each in series]
    x = (WIDTH - sum(widths) - apart * (len(series) - 1)) / 2
    group = _add(root, "g")
    for each, width in zip(series, widths, strict=True):
        _line(group, each, [(x, y - 4), (x + sample, y - 4)])
        _marker(group, each, (x + sample / 2, y - 4), None)
        _text(group, x + sample + pad, y, each.name, text_anchor="start")
        x += width + apart
