"""The charts, of plain data: for `langevin plot` as PNG, SVG or PDF, and inside the page of a study.

Lengths are points of a chart 360 points wide, which is how wide a phone shows it: text of 10 is legible
there, and half as large again beside a table. A chart has no title and no legend of its own on a page,
which tells both in HTML; its colours there are the page's variables, so that they follow light and dark.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median_low

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextToPath
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox, blended_transform_factory

from langevin.errors import UsageError

FORMATS = (".png", ".svg", ".pdf")
WIDTH, TEXT, LONGEST_NAME = 360.0, 10.0, 22
INK, QUIET, RULE, PAGE = "#1b1c1e", "#5d6166", "#e2e4e7", "#ffffff"
COLOURS = ("#2f3437", "#0069b0", "#c84f00", "#00805c", "#a23b86", "#8f6a00", "#2493c9", "#b3263e")
MARKERS = {"o": "●", "s": "■", "^": "▲", "D": "◆", "v": "▼"}
VARIABLES = {INK: "ink", QUIET: "quiet", RULE: "rule", PAGE: "page"}
VARIABLES |= {colour: f"c{i}" for i, colour in enumerate(COLOURS)}
PALE_POINTS = 5_000
START = 0.15
"""The share of training whose losses may lie above the frame, so that the ends can be told apart."""
CUT = 6
"""An effect this many times as large as the middle one is an arrow at the edge of its plot."""

styled = matplotlib.rc_context(
    {
        **dict.fromkeys(("font.size", "xtick.labelsize", "ytick.labelsize", "axes.labelsize"), TEXT),
        **dict.fromkeys(("axes.titlesize", "legend.fontsize"), TEXT),
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor"), INK),
        **dict.fromkeys(("xtick.color", "ytick.color", "axes.edgecolor"), QUIET),
        **dict.fromkeys(("axes.spines.top", "axes.spines.right", "axes.spines.left"), False),
        **{"axes.facecolor": "none", "axes.titlelocation": "left", "axes.titleweight": "normal"},
        **{"axes.grid": True, "axes.grid.axis": "y", "grid.color": RULE, "grid.linewidth": 0.8},
        **{"axes.axisbelow": True, "xtick.major.size": 3, "ytick.major.size": 0, "axes.titlepad": 8},
        **{"axes.linewidth": 0.8, "legend.frameon": False, "path.simplify_threshold": 0.5},
    }
)


def colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def marker(index: int) -> str:
    return list(MARKERS)[index % len(MARKERS)]


@dataclass(frozen=True)
class Effect:
    """A row of a forest plot; without a value, or an interval, what is shown says why."""

    name: str
    index: int
    value: float | None
    ends: tuple[float, float] | None
    shown: str
    sure: bool = False


@dataclass(frozen=True)
class Spot:
    """A point of a scatter plot; those of a group are joined."""

    name: str
    index: int
    x: float
    y: float
    x_ends: tuple[float, float] | None = None
    y_ends: tuple[float, float] | None = None
    group: str = ""


Path2 = tuple[Sequence[float], Sequence[float]]


@dataclass(frozen=True)
class Line:
    """A strong line, with whiskers where it has ends, over pale ones, such as those of its seeds."""

    name: str
    index: int
    x: Sequence[float]
    y: Sequence[float]
    ends: Sequence[tuple[float, float] | None] = ()
    pale: Sequence[Path2] = ()


@dataclass(frozen=True)
class Bins:
    """Of a reliability diagram: confidence, accuracy and count of each bin that holds something."""

    name: str
    index: int
    confidence: Sequence[float]
    accuracy: Sequence[float]
    count: Sequence[float]


def forest_height(rows: int) -> float:
    return rows * min(26, max(13, 150 / rows)) + 46


@styled
def forest(groups: Mapping[str, Sequence[Effect]], label: str) -> Figure:
    """Effects around zero, a row each under the name of its group: names left, what is shown right."""
    effects = [effect for group in groups.values() for effect in group]
    rows = [row for name, group in groups.items() for row in ([name] if name else []) + list(group)]
    height = forest_height(len(rows))
    left = 24 + max(_width(_short(effect.name)) for effect in effects)
    right = 12 + max(_width(effect.shown) for effect in effects)
    figure = Figure((WIDTH / 72, height / 72))
    axes = figure.add_axes(
        (left / WIDTH, 40 / height, 1 - (left + right) / WIDTH, 1 - 44 / height),
        ylim=(len(rows) - 0.4, -0.6),
    )
    limit = CUT * median_low([abs(effect.value) for effect in effects if effect.value] or [0.0])
    near = [
        (effect.value, *(effect.ends or ())) for effect in effects if abs(effect.value or limit) <= limit
    ]
    ends = [0.0] + [x for one in near for x in one if x is not None]
    low, high = min(ends), max(ends)
    room = 0.07 * (high - low) or 1.0
    axes.set_xlim(low - room, high + room)
    axes.axvline(0, color=INK, linewidth=1)
    aside = blended_transform_factory(figure.transFigure, axes.transData)
    for y, row in enumerate(rows):
        if isinstance(row, str):
            axes.text(2 / WIDTH, y, row, transform=aside, va="center", weight="bold")
            continue
        own = colour(row.index)
        axes.plot([7 / WIDTH], [y], marker(row.index), color=own, transform=aside, clip_on=False, ms=5)
        axes.text(16 / WIDTH, y, _short(row.name), transform=aside, va="center")
        axes.text(1 - 2 / WIDTH, y, row.shown, transform=aside, va="center", ha="right")
        if row.value is None:
            continue
        if row.ends:
            inside = [min(max(end, low - room), high + room) for end in row.ends]
            axes.plot(inside, [y, y], color=own, linewidth=1.8, solid_capstyle="butt")
        beyond = "<" if row.value < low else ">" if row.value > high else ""
        at = min(max(row.value, low - room / 2), high + room / 2)
        axes.plot(
            [at], [y], beyond or marker(row.index), color=own, mfc=own if row.sure else PAGE, mew=1.4, ms=6
        )
    axes.yaxis.set_major_locator(NullLocator())
    axes.grid(visible=True, axis="x")
    axes.xaxis.set_major_locator(MaxNLocator(max(2, int((WIDTH - left - right) / 42)), steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(_tick))
    figure.text(0.5, 5 / height, label, ha="center", gid="x-label")
    return figure


@styled
def scatter(spots: Sequence[Spot], labels: tuple[str, str], height: float = 200) -> Figure:
    """Points with intervals both ways; a name stands beside its point where there is room for it."""
    figure, axes = _panel(labels, height)
    xs = [spot.x for spot in spots]
    if min(xs) > 0 and max(xs) > 10 * min(xs):
        axes.set_xscale("log")
    for group in dict.fromkeys(spot.group for spot in spots if spot.group):
        joined = sorted((spot.x, spot.y) for spot in spots if spot.group == group)
        axes.plot(*zip(*joined, strict=True), color=QUIET, linewidth=0.8, zorder=1)
    for spot in spots:
        own = colour(spot.index)
        if spot.x_ends:
            axes.plot(spot.x_ends, (spot.y, spot.y), color=own, linewidth=1.5)
        if spot.y_ends:
            axes.plot((spot.x, spot.x), spot.y_ends, color=own, linewidth=1.5)
        axes.plot([spot.x], [spot.y], marker(spot.index), color=own, ms=6)
    axes.margins(0.12, 0.12)
    if spots[0].group:
        left, right = axes.get_xlim()
        axes.set_xlim(left, right + 0.25 * (right - left))
    _name(figure, axes, spots)
    return figure


@styled
def curves(
    lines: Sequence[Line],
    labels: tuple[str, str],
    level: tuple[float, str] | None = None,
    log: bool = False,
    places: Sequence[float] = (),
    start: float = 0.0,
) -> Figure:
    """Lines over an axis. level: a dashed one of this height and name; places: where the axis has ticks;
    start: the share of the axis whose values may lie above the frame."""
    figure, axes = _panel(labels, 220)
    thin = max(12, PALE_POINTS // max(1, sum(len(line.pale) for line in lines)))
    for line in lines:
        for x, y in line.pale:
            axes.plot(
                _thinned(x, thin), _thinned(y, thin), color=colour(line.index), alpha=0.28, linewidth=0.8
            )
    for line in lines:
        own = colour(line.index)
        for x, ends in zip(line.x, line.ends, strict=False):
            if ends:
                axes.plot((x, x), ends, color=own, linewidth=1.3)
        few = len(line.x) <= 12
        marks = {"marker": marker(line.index), "markersize": 5, "markevery": 1 if few else [-1]}
        axes.plot(line.x, line.y, color=own, linewidth=1.8, label=line.name, **marks)
    if start:
        _late(axes, lines, level, start)
    if level:
        axes.axhline(level[0], color=QUIET, linewidth=1.2, linestyle=(0, (5, 4)))
        where = axes.get_yaxis_transform()
        axes.text(1, level[0], level[1], transform=where, color=QUIET, ha="right", va="bottom")
    if log:
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
    if places:
        axes.xaxis.set_major_locator(FixedLocator(list(places)))
    axes.xaxis.set_major_formatter(FuncFormatter(_tick))
    return figure


@styled
def reliability(arms: Sequence[Bins]) -> Figure:
    """Accuracy against confidence, and under it how much there is in each bin."""
    figure = Figure((WIDTH / 72, 300 / 72), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    top.plot([0, 1], [0, 1], color=QUIET, linewidth=1.2, linestyle=(0, (5, 4)))
    for arm in arms:
        look = {"color": colour(arm.index), "linewidth": 1.5}
        top.plot(arm.confidence, arm.accuracy, marker=marker(arm.index), ms=4, label=arm.name, **look)
        bottom.step(arm.confidence, arm.count, where="mid", **look)
    top.set(xlim=(0, 1), ylim=(0, 1))
    bottom.set_yscale("log")
    _label(top, "", "accuracy")
    _label(bottom, "confidence", "tokens in a bin, log scale")
    return figure


@styled
def scalars(lines: Sequence[Line], label: str) -> Figure:
    """What heads learned by layer: a marker each (`pale`), and a line through their means."""
    figure, axes = _panel(("layer", label), 220)
    for place, line in enumerate(lines):
        own, shift = colour(line.index), 0.14 * (place - (len(lines) - 1) / 2)
        axes.plot([x + shift for x in line.x], line.y, color=own, linewidth=1.2, label=line.name)
        for x, y in line.pale:
            axes.plot([one + shift for one in x], y, marker(line.index), color=own, ms=4, alpha=0.75)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    return figure


Grid = Sequence[Sequence[float]]


@styled
def heatmap(
    values: Grid,
    names: tuple[Sequence[str], Sequence[str]],
    labels: tuple[str, str],
    meaning: str,
    ends: tuple[float, float] | None = None,
    height: float = 240,
) -> Figure:
    """Rows of values under the names of their columns; written into their cells where there are few."""
    figure = Figure((WIDTH / 72, height / 72), dpi=72, layout="constrained")
    axes = figure.subplots()
    low, high = ends or (None, None)
    mesh = axes.pcolormesh(values, cmap="viridis", vmin=low, vmax=high)
    columns, rows = names
    size = min(TEXT, 0.7 * height / len(rows), 1.4 * WIDTH / max(1, sum(map(len, columns))))
    turned = 90 if size < 6 or len(columns) > 12 else 0
    axes.set_xticks([i + 0.5 for i in range(len(columns))], columns, size=max(size, 6), rotation=turned)
    axes.set_yticks(
        [i + 0.5 for i in range(len(rows))], rows, size=max(min(TEXT, 0.7 * height / len(rows)), 6)
    )
    axes.invert_yaxis()
    axes.grid(visible=False)
    if len(rows) * len(columns) <= 60:
        for i, j in product(range(len(rows)), range(len(columns))):
            ink = "#000000" if mesh.norm(values[i][j]) > 0.6 else "#fffffe"
            axes.text(j + 0.5, i + 0.5, f"{values[i][j]:.3g}", color=ink, size=8, ha="center", va="center")
    bar = figure.colorbar(mesh, ax=axes, shrink=0.9, pad=0.02)
    bar.outline.set_visible(False)
    _label(axes, labels[0], f"{labels[1]}; colour: {meaning}")
    return figure


def with_legend(figure: Figure, title: str) -> Figure:
    """For a picture that stands alone."""
    axes = figure.axes[0]
    with styled:
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=1)
        figure.suptitle(title)
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + (24 + 15 * len(axes.get_legend_handles_labels()[1])) / 72)
    return figure


def save(figure: Figure, path: Path) -> None:
    if path.suffix not in FORMATS:
        raise UsageError(f"{path} is no picture", f"End the name in {', '.join(FORMATS)}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200)


def svg(figure: Figure, key: str) -> str:
    """For a page: text as text, in the page's colours, and the same bytes every time. The key keeps apart
    what several drawings of one page refer to by name."""
    file = io.StringIO()
    figure.patch.set_visible(False)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": key}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    drawn = file.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<style.*?</style>", "", drawn, flags=re.S)
    drawn = re.sub(r' id="([xy])-label"', r' class="axis-label \1"', drawn)
    used = set(re.findall(r"#([\w-]+)[)\"]", drawn))
    drawn = re.sub(r' id="([^"]+)"', lambda found: found[0] if found[1] in used else "", drawn)
    drawn = re.sub(r"<[^>]+>", lambda tag: re.sub(r"-?\d+\.\d+", _rounded, tag[0]), drawn)
    drawn = re.sub(r" font-family:[^;\"]*;|  ?transform=\"rotate\(-0[^\"]*\"|<g/>", "", drawn)
    drawn = re.sub(r'<svg [^>]*?(viewBox="[^"]+")[^>]*>', r'<svg class="drawing" \1>', drawn, count=1)
    drawn = re.sub(
        "#[0-9a-f]{6}", lambda c: f"var(--{VARIABLES[c[0]]})" if c[0] in VARIABLES else c[0], drawn
    )
    return re.sub(r"\s*\n\s*", "\n", re.sub(r"<defs>\s*</defs>", "", drawn))


def _rounded(found: re.Match[str]) -> str:
    return f"{float(found[0]):.2f}".rstrip("0").rstrip(".")


def _panel(labels: tuple[str, str], height: float) -> tuple[Figure, Axes]:
    figure = Figure((WIDTH / 72, height / 72), dpi=72, layout="constrained")
    axes = figure.subplots()
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(_tick))
    _label(axes, *labels)
    return figure, axes


def _label(axes: Axes, x: str, y: str) -> None:
    """The label of the y axis lies above it: nobody has to turn the head."""
    if x:
        axes.set_xlabel(textwrap.fill(x, 54), gid="x-label")
    axes.set_title(textwrap.fill(y, 54), gid="y-label")


def _late(axes: Axes, lines: Sequence[Line], level: tuple[float, str] | None, start: float) -> None:
    every = [path for line in lines for path in ((line.x, line.y), *line.pale)]
    ends = max(x[-1] for x, _ in every)
    late = [b for x, y in every for a, b in zip(x, y, strict=True) if a >= start * ends]
    late += [level[0]] if level else []
    room = 0.06 * (max(late) - min(late)) or 0.1
    axes.set_ylim(min(late) - room, max(late) + room)


def _thinned(values: Sequence[float], most: int) -> list[float]:
    step = max(1, -(-len(values) // most))
    return [*values[:-1:step], *values[-1:]]


def _name(figure: Figure, axes: Axes, spots: Sequence[Spot]) -> None:
    """Names beside their points, where they touch nothing; a group's stands beside its last point."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    frame = axes.get_window_extent()
    whiskers: dict[Spot, list[Bbox]] = {}
    for spot in spots:
        across = [(x, spot.y) for x in spot.x_ends or (spot.x, spot.x)]
        along = [(spot.x, y) for y in spot.y_ends or (spot.y, spot.y)]
        whiskers[spot] = [Bbox(axes.transData.transform(ends)).padded(4) for ends in (across, along)]
    taken = [box for boxes in whiskers.values() for box in boxes]
    last = {spot.group or spot: spot for spot in sorted(spots, key=lambda spot: spot.x)}
    for spot in last.values():
        name = _short(spot.group or spot.name)
        x, y = axes.transData.transform((spot.x, spot.y))
        wide, tall = _width(name), TEXT
        across, along = whiskers[spot]
        sides = [(across.x1 + 1, y - tall / 2), (across.x0 - 1 - wide, y - tall / 2)]
        sides += [(left, base) for base in (y + 6, y - 6 - tall) for left in (x + 6, x - 6 - wide)]
        sides += [(x - wide / 2, along.y1 + 1), (x - wide / 2, along.y0 - 1 - tall)]
        boxes = [Bbox.from_bounds(left, base, wide, tall) for left, base in sides]
        inside = [
            b for b in boxes if frame.x0 <= b.x0 and b.x1 <= WIDTH and frame.y0 <= b.y0 and b.y1 <= frame.y1
        ]
        free = next((box for box in inside if not box.count_overlaps(taken)), None)
        if free is not None:
            figure.text(free.x0 / WIDTH, (free.y0 + 2) / figure.bbox.height, name)
            taken.append(free)


def _width(words: str) -> float:
    return float(TextToPath().get_text_width_height_descent(words, FontProperties(size=TEXT), False)[0])


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"


def _tick(value: float, _: int | None = None) -> str:
    """0.05, −3, 250 k, 2 M"""
    power = 0 if abs(value) < 10_000 else min(4, int(math.log10(abs(value)) / 3))
    return f"{value / 1000**power:.6g} {' kMGT'[power]}".strip().replace("-", "\N{MINUS SIGN}")
