"""Drawing by hand: axes with round ticks, lines and markers as SVG text.

Colours are CSS custom properties of the page, so that one drawing serves light, dark and paper. An arm
has its colour, its dash and its marker everywhere: colour is never the only cue. Charts are 440 units
wide, so that their text stays readable where a phone shows them 330 pixels wide.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

from langevin.studies.words import MINUS

Point = tuple[float, float]
Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""
WIDE = 440.0
COLOURS = 8
DASHES = ("", "7 3", "2 2.5", "8 3 2 3", "12 4", "5 2 1.5 2 1.5 2", "3 5")
MARKERS = (
    "M-4 0A4 4 0 1 0 4 0A4 4 0 1 0 -4 0Z",
    "M-3.6 -3.6H3.6V3.6H-3.6Z",
    "M0 -4.8L4.6 3.4H-4.6Z",
    "M0 -5L5 0L0 5L-5 0Z",
    "M0 4.8L4.6 -3.4H-4.6Z",
    "M-1.8 -5H1.8V-1.8H5V1.8H1.8V5H-1.8V1.8H-5V-1.8H-1.8Z",
    "M0 -5L1.5 -1.6L4.8 -1.5L2.1 0.7L3 4.2L0 2.2L-3 4.2L-2.1 0.7L-4.8 -1.5L-1.5 -1.6Z",
)


@dataclass(frozen=True)
class Look:
    """How the arm of this index is drawn."""

    index: int

    @property
    def style(self) -> str:
        return f"--c:var(--c{self.index % COLOURS})"

    def line(self, points: Iterable[Point], kind: str = "mean") -> str:
        dash = DASHES[self.index % len(DASHES)] if kind == "mean" else ""
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        return f'<path class="{kind}" style="{self.style}"{dashed} d="{trace(points)}"/>'

    def marker(self, at: Point, size: float = 1.0, kind: str = "marker", tip: str = "") -> str:
        shape = MARKERS[self.index % len(MARKERS)]
        title = f"<title>{escape(tip)}</title>" if tip else ""
        place = f"translate({at[0]:.1f} {at[1]:.1f})" + (f" scale({size:g})" if size != 1 else "")
        return f'<path class="{kind}" style="{self.style}" transform="{place}" d="{shape}">{title}</path>'

    def whisker(self, *lines: str) -> str:
        """An interval, of lines."""
        return f'<g class="whisker" style="{self.style}">{"".join(lines)}</g>'

    def swatch(self) -> str:
        """The key in a legend: a stretch of the line with the marker on it."""
        drawn = self.line([(0, 7), (34, 7)]) + self.marker((17, 7))
        size = 'viewBox="0 0 34 14" width="34" height="14"'
        return f'<svg class="swatch" {size} aria-hidden="true">{drawn}</svg>'


@dataclass(frozen=True)
class Axis:
    """A range with its ticks; `log` spaces equal ratios equally."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False

    def share(self, value: float) -> float:
        """Where the value lies between low (0) and high (1)."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class Frame:
    """A plotting area inside a drawing: data coordinates to drawing coordinates."""

    x: Axis
    y: Axis
    left: float
    top: float
    width: float
    height: float

    def at(self, x: float, y: float) -> Point:
        return self.across(x), self.top + self.height * (1 - self.y.share(y))

    def across(self, x: float) -> float:
        return self.left + self.width * self.x.share(x)


def panel(x: Axis, y: Axis) -> Frame:
    """The plotting area of a drawing of 440 by 296, with room for numbers at its left and labels below."""
    return Frame(x, y, left=62, top=28, width=WIDE - 62 - 16, height=222)


def axis(values: Iterable[float], count: int = 5, pad: float = 0.05, log: bool = False) -> Axis:
    """An axis that holds the values with a little room, ticked at about `count` round numbers."""
    held = list(values)
    low, high = min(held), max(held)
    if log:
        if high / low < 1.2:
            low, high = low / 1.1, high * 1.1
        room = (high / low) ** pad
        low, high = low / room, high * room
        return Axis(low, high, tuple(_log_ticks(low, high, count)), log=True)
    if high - low <= 1e-12 * max(abs(low), abs(high), 1e-300):
        half = abs(high) * 0.1 or 1.0
        low, high = low - half, high + half
    room = (high - low) * pad
    low, high = low - room, high + room
    return Axis(low, high, tuple(_ticks(low, high, count)))


def exact_axis(low: float, high: float, ticks: Iterable[float]) -> Axis:
    return Axis(low, high, tuple((tick, f"{tick:g}") for tick in ticks))


def _ticks(low: float, high: float, count: int) -> list[tuple[float, str]]:
    rough = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(rough))
    for step in sorted(
        (s * unit for s in (0.5, 1, 2, 2.5, 5, 10) if s * unit <= 2.5 * rough), reverse=True
    ):
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first >= 2:
            break
    return [(i * step, tick_label(i * step, step)) for i in range(first, last + 1)]


def _log_ticks(low: float, high: float, count: int) -> list[tuple[float, str]]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for within in ((1, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        found = [m * 10.0**d for d in decades for m in within if low <= m * 10.0**d <= high]
        if len(found) <= count + 1:
            break
    if len(found) < 2:
        return _ticks(low, high, 3)
    thin = math.ceil(len(found) / (count + 1))
    return [(tick, tick_label(tick, tick)) for tick in found[::thin]]


def tick_label(value: float, step: float) -> str:
    """A tick with the decimals its step needs, thousands as k, M, B."""
    if value == 0:
        return "0"
    size, prefix = 1.0, ""
    for power, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= power * (1 if power > 1e3 else 10):
            size, prefix = power, letter
            break
    decimals = 0
    while decimals < 9 and abs(round(step / size, decimals) * size / step - 1) > 1e-6:
        decimals += 1
    shown = f"{abs(value) / size:.{decimals}f}"
    return (MINUS if value < 0 else "") + shown + prefix


def trace(points: Iterable[Point]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def text(x: float, y: float, content: str, kind: str = "", anchor: str = "start") -> str:
    named = f' class="{kind}"' if kind else ""
    held = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}"{named}{held}>{escape(content)}</text>'


def line(start: Point, end: Point, kind: str) -> str:
    (x1, y1), (x2, y2) = start, end
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def scaffold(frame: Frame, x_label: str, y_label: str) -> str:
    """Grid, ticks and both labels; the y label lies flat above the frame, where it is easy to read."""
    right, base = frame.left + frame.width, frame.top + frame.height
    parts = []
    for value, label in frame.y.ticks:
        y = frame.at(frame.x.low, value)[1]
        parts += [
            line((frame.left, y), (right, y), "gridline"),
            text(frame.left - 7, y + 4.5, label, "tick", "end"),
        ]
    for value, label in frame.x.ticks:
        x = frame.across(value)
        parts += [line((x, base), (x, base + 5), "tick-mark"), text(x, base + 20, label, "tick", "middle")]
    parts.append(line((frame.left, base), (right, base), "base"))
    parts.append(text(2, frame.top - 12, y_label, "axis-label y"))
    parts.append(text(right, base + 40, x_label, "axis-label x", "end"))
    return "".join(parts)


def clipped(key: str, frame: Frame, body: str) -> str:
    """Cut what leaves the frame."""
    place = f'x="{frame.left:g}" y="{frame.top - 3:g}"'
    box = f'<rect {place} width="{frame.width + 6:g}" height="{frame.height + 6:g}"/>'
    return f'<clipPath id="{key}-c">{box}</clipPath><g clip-path="url(#{key}-c)">{body}</g>'


def place_label(at: Point, content: str, taken: list[Box], room: Box) -> tuple[Point, str]:
    """Where a label covers least of what is already there, near its point if it can: (place, anchor)."""
    wide = 8.2 * len(content)
    heights = (5, -5, 15, -14, 25, -24, 36, -35, 48, -47, 62, -61)
    beside = [(side * 10.0, dy) for dy in heights for side in (1, -1)]
    best, cheapest = (at, "start", at + at), math.inf
    for dx, dy in beside:
        x, y = at[0] + dx, at[1] + dy
        left = x if dx > 0 else x - wide
        box = (left, y - 12, left + wide, y + 4)
        outside = max(0.0, room[0] - left) + max(0.0, left + wide - room[2])
        outside += max(0.0, room[1] - y + 12) + max(0.0, y + 4 - room[3])
        cost = 30 * outside + 4 * sum(_overlap(box, other) for other in taken) + abs(dy - 5)
        if cost < cheapest:
            best, cheapest = ((x, y), "start" if dx > 0 else "end", box), cost
    taken.append(best[2])
    return best[0], best[1]


def _overlap(a: Box, b: Box) -> float:
    wide = min(a[2], b[2]) - max(a[0], b[0])
    tall = min(a[3], b[3]) - max(a[1], b[1])
    return wide * tall if wide > 0 and tall > 0 else 0.0


def shortened(name: str, length: int) -> str:
    return name if len(name) <= length else name[: length - 1] + "…"


def figure(
    key: str,
    title: str,
    description: str,
    size: Point,
    body: str,
    *,
    legend: Iterable[tuple[int, str]] = (),
    note: str = "",
    caption: str = "",
    kind: str = "",
) -> str:
    """A drawing under its title, named and described for those who do not see it, with the arms in its
    legend and what one should know to read it."""
    names = "".join(f"<li>{Look(i).swatch()}<span>{escape(name)}</span></li>" for i, name in legend)
    under = f'<ul class="legend">{names}</ul>' if names else ""
    under += f'<p class="note">{escape(note)}</p>' if note else ""
    classes = f' class="{kind}"' if kind else ""
    return (
        f"<figure{classes}><figcaption>{escape(caption or title)}</figcaption>"
        f'<svg class="chart" role="img" viewBox="0 0 {size[0]:g} {size[1]:g}" '
        f'aria-labelledby="{key}-t {key}-d"><title id="{key}-t">{escape(title)}</title>'
        f'<desc id="{key}-d">{escape(description)}</desc>{body}</svg>{under}</figure>'
    )


@dataclass(frozen=True)
class Dot:
    """A point of a chart, what it says, and its interval."""

    x: float
    y: float
    shown: str
    tip: str
    ends: tuple[float, ...] = ()

    def drawn(self, frame: Frame, look: Look, size: float = 1.0) -> str:
        bar = ""
        if self.ends:
            low, high = (frame.at(self.x, end) for end in self.ends)
            bar = look.whisker(line(low, high, "bar"))
        return bar + look.marker(frame.at(self.x, self.y), size, tip=self.tip)


def line_chart(
    key: str,
    title: str,
    frame: Frame,
    labels: tuple[str, str],
    lines: dict[str, list[Dot]],
    *,
    under: str = "",
    note: str = "",
) -> str:
    """A line for each name, through its dots."""
    marks = [under]
    for look, dots in zip(map(Look, range(len(lines))), lines.values(), strict=True):
        marks.append(look.line([frame.at(dot.x, dot.y) for dot in dots]))
        marks += [dot.drawn(frame, look) for dot in dots]
    told = "; ".join(f"{name}: {', '.join(dot.shown for dot in dots)}" for name, dots in lines.items())
    body = scaffold(frame, *labels) + "".join(marks)
    return figure(key, title, f"{told}.", (WIDE, 296), body, legend=enumerate(lines), note=note)
