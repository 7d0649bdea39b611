"""The charts, of plain data: for `langevin plot` as PNG, SVG or PDF, and inside the page of a study.

Lengths are points of a chart 360 points wide, which is how wide a phone shows it: text of 10 is legible
there, and half as large again beside a table. On a page, title and legend stand in HTML, and colours are
its variables, so that they follow light and dark.
"""

import io
import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median_low
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextToPath
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox, blended_transform_factory

from langevin.errors import UsageError

FORMATS = (".png", ".svg", ".pdf")
WIDTH, WIDEST, TEXT, LONGEST_NAME = 360.0, 576.0, 10.0, 22
INK, QUIET, RULE, PAGE = "#1b1c1e", "#5d6166", "#e2e4e7", "#ffffff"
COLOURS = ("#2f3437", "#0069b0", "#c84f00", "#00805c", "#a23b86", "#8f6a00", "#2493c9", "#b3263e")
MARKERS = "os^Dv*PX"
VARIABLES = {INK: "ink", QUIET: "quiet", RULE: "rule", PAGE: "page"}
VARIABLES |= {colour: f"c{i}" for i, colour in enumerate(COLOURS)}
DASHED: dict[str, Any] = {"color": QUIET, "linewidth": 1.2, "linestyle": (0, (5, 4))}
PALE_POINTS, MOST_WRITTEN = 5_000, 60
EXTENDED = {(False, False): "neither", (True, False): "min", (False, True): "max", (True, True): "both"}
FAR = 6
"""An effect this many times as large as the middle one is an arrow at the edge of its plot."""

styled = matplotlib.rc_context(
    {
        **dict.fromkeys(("font.size", "axes.labelsize", "axes.titlesize", "legend.fontsize"), TEXT),
        **dict.fromkeys(("xtick.labelsize", "ytick.labelsize"), TEXT),
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor"), INK),
        **dict.fromkeys(("xtick.color", "ytick.color", "axes.edgecolor"), QUIET),
        **dict.fromkeys(("axes.spines.top", "axes.spines.right", "axes.spines.left"), False),
        **{"axes.facecolor": "none", "axes.titlelocation": "left", "axes.titlepad": 8},
        **{"axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "grid.color": RULE},
        **{"xtick.major.size": 3, "ytick.major.size": 0, "legend.frameon": False},
        **{"path.simplify_threshold": 0.5, "text.parse_math": False},
    }
)

Ends = tuple[float, float] | None


@dataclass(frozen=True)
class Mark:
    """A point with its intervals: of a scatter plot, or (x alone) a row of a forest plot, filled where it
    is sure; without a value (NaN), what is shown says why."""

    name: str
    index: int
    x: float
    y: float = 0.0
    x_ends: Ends = None
    y_ends: Ends = None
    group: str = ""
    shown: str = ""
    sure: bool = False


@dataclass(frozen=True)
class Line:
    """A strong line, with whiskers where it has ends, over pale ones, such as those of its seeds."""

    name: str
    index: int
    x: Sequence[float]
    y: Sequence[float]
    ends: Sequence[Ends] = ()
    pale: Sequence[tuple[Sequence[float], Sequence[float]]] = ()


@dataclass(frozen=True)
class Grid:
    """Rows of values, with the names of rows and of columns."""

    values: Sequence[Sequence[float]]
    rows: Sequence[str]
    columns: Sequence[str]
    name: str = ""
    picture: Any = None  # (height, width, 3) of which the values are, to stand beside them


def forest_height(rows: int) -> float:
    return rows * min(26, max(12.5, 150 / rows)) + 40


@styled
def forest(marks: Sequence[Mark], label: str) -> Figure:
    """Effects around zero, a row each under the name of its group: names left, what is shown right."""
    rows: list[Mark | str] = []
    for group in dict.fromkeys(mark.group for mark in marks):
        rows += [group] * bool(group) + [mark for mark in marks if mark.group == group]
    height = forest_height(len(rows))
    left = 24 + max(_width(_short(mark.name)) for mark in marks)
    right = 12 + max(_width(mark.shown) for mark in marks)
    figure = Figure((WIDTH / 72, height / 72), dpi=72)
    axes = figure.add_axes((left / WIDTH, 35 / height, 1 - (left + right) / WIDTH, 1 - 37 / height))
    far = FAR * median_low([abs(mark.x) for mark in marks if abs(mark.x) > 0] or [0.0])
    near = [mark for mark in marks if abs(mark.x) <= far]
    ends = [0.0, *(end for mark in near for end in (mark.x, *(mark.x_ends or ())))]
    room = 0.07 * (max(ends) - min(ends)) or 1.0
    low, high = min(ends) - room, max(ends) + room
    axes.set(xlim=(low, high), ylim=(len(rows) - 0.4, -0.6))
    axes.axvline(0, color=INK, linewidth=1)
    aside = blended_transform_factory(figure.transFigure, axes.transData)
    for y, row in enumerate(rows):
        if isinstance(row, str):
            axes.text(2 / WIDTH, y, row, transform=aside, va="center", weight="bold")
            continue
        colour, marker = look(row.index)
        axes.plot([7 / WIDTH], [y], marker, color=colour, transform=aside, clip_on=False, ms=5)
        axes.text(16 / WIDTH, y, _short(row.name), transform=aside, va="center")
        axes.text(1 - 2 / WIDTH, y, row.shown, transform=aside, va="center", ha="right")
        if row.x_ends:
            axes.plot([min(max(end, low), high) for end in row.x_ends], [y, y], color=colour, linewidth=1.8)
        if not math.isnan(row.x):
            marker = "<" if row.x < low else ">" if row.x > high else marker
            at, fill = min(max(row.x, low + room / 2), high - room / 2), colour if row.sure else PAGE
            axes.plot([at], [y], marker, color=colour, mfc=fill, mew=1.4, ms=6)
    axes.yaxis.set_major_locator(NullLocator())
    axes.grid(visible=True, axis="x")
    axes.xaxis.set_major_locator(MaxNLocator(max(1, int((WIDTH - left - right) / 50)), steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(_tick)
    figure.text(0.5, 5 / height, label, ha="center", gid="x-label")
    return figure


@styled
def scatter(marks: Sequence[Mark], labels: tuple[str, str], height: float = 200) -> Figure:
    """Points with intervals both ways, those of a group joined; named where there is room for it."""
    figure, axes = _panel(labels, height)
    for group in dict.fromkeys(mark.group for mark in marks if mark.group):
        joined = sorted((mark.x, mark.y) for mark in marks if mark.group == group)
        axes.plot(*zip(*joined, strict=True), color=QUIET, linewidth=0.8, zorder=1)
    for mark in marks:
        colour, marker = look(mark.index)
        axes.plot(mark.x_ends or [mark.x] * 2, [mark.y] * 2, color=colour, linewidth=1.5)
        axes.plot([mark.x] * 2, mark.y_ends or [mark.y] * 2, color=colour, linewidth=1.5)
        axes.plot([mark.x], [mark.y], marker, color=colour, ms=6)
    axes.margins(0.12, 0.12)
    if marks[0].group:
        left, right = axes.get_xlim()
        axes.set_xlim(left, right + 0.25 * (right - left))
    _name(figure, axes, marks)
    return figure


@styled
def curves(
    lines: Sequence[Line],
    labels: tuple[str, str],
    level: float | None = None,
    log: Literal["", "x", "xy"] = "",
    start: float = 0.0,
    upright: float | None = None,
) -> Figure:
    """Lines over an axis. level: the height of a dashed one; upright: where a dotted one stands; start: the
    share of each line whose values may lie above the frame, so that the ends can be told apart."""
    figure, axes = _panel(labels, 220)
    most = max(12, PALE_POINTS // max(1, sum(len(line.pale) for line in lines)))
    for line in lines:
        for x, y in line.pale:
            step = 1 + len(x) // most
            axes.plot(x[::step], y[::step], color=look(line.index)[0], alpha=0.28, linewidth=0.8)
    for line in lines:
        colour, marker = look(line.index)
        for at, ends in zip(line.x, line.ends, strict=False):
            axes.plot([at] * 2, ends or [math.nan] * 2, color=colour, linewidth=1.3, alpha=0.6)
        every = 1 if len(line.x) <= 12 else [-1]
        axes.plot(line.x, line.y, f"{marker}-", color=colour, ms=5, markevery=every, label=line.name)
    if start:
        paths = [path for line in lines for path in ((line.x, line.y), *line.pale)]
        late = [b for x, y in paths for a, b in zip(x, y, strict=True) if a >= start * x[-1]]
        late += [] if level is None else [level]
        room = 0.06 * (max(late) - min(late)) or 0.1
        axes.set_ylim(min(late) - room, max(late) + room)
    if level is not None:
        axes.axhline(level, **DASHED)
    if upright is not None:
        axes.axvline(upright, color=QUIET, linewidth=1.2, linestyle=":")
    places = _apart(sorted({x for line in lines for x in line.x})) if log else []
    for name in log:
        axes.set(**{f"{name}scale": "log"})
        low, high = axes.get_ylim()
        upward = LogLocator(subs=(1, 2, 5)) if high > 5 * low else MaxNLocator(5, steps=[1, 2, 5, 10])
        axis, ticks = (axes.xaxis, FixedLocator(places)) if name == "x" else (axes.yaxis, upward)
        axis.set_minor_locator(NullLocator())
        axis.set_major_locator(ticks)
        axis.set_major_formatter(_tick)
    return figure


@styled
def reliability(arms: Sequence[Line], counts: Sequence[Sequence[float]]) -> Figure:
    """Accuracy against confidence, and under it how much there is in each bin."""
    figure = Figure((WIDTH / 72, 300 / 72), dpi=72, layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    top.plot([0, 1], [0, 1], **DASHED)
    for arm, count in zip(arms, counts, strict=True):
        colour, marker = look(arm.index)
        top.plot(arm.x, arm.y, f"{marker}-", color=colour, ms=4, label=arm.name)
        bottom.step(arm.x, count, where="mid", color=colour)
    top.set(xlim=(0, 1), ylim=(0, 1))
    bottom.set_yscale("log")
    bottom.yaxis.set_minor_locator(NullLocator())
    bottom.yaxis.set_major_formatter(_tick)
    _label(top, "", "accuracy")
    _label(bottom, "confidence", "how many, log scale")
    return figure


@styled
def scalars(arms: Sequence[Line], label: str) -> Figure:
    """What heads learned (y) by layer (x): a marker each, and a line through the means of layers."""
    figure, axes = _panel(("layer", label), 220)
    for place, arm in enumerate(arms):
        colour, marker = look(arm.index)
        shift = 0.14 * (place - (len(arms) - 1) / 2)
        places = [layer + shift for layer in arm.x]
        axes.plot(places, arm.y, marker, color=colour, ms=4, alpha=0.75, label=arm.name)
        own = sorted(set(arm.x))
        means = [fmean(y for at, y in zip(arm.x, arm.y, strict=True) if at == layer) for layer in own]
        axes.plot([layer + shift for layer in own], means, color=colour, linewidth=1.2)
    layers = [layer for arm in arms for layer in arm.x]
    axes.set_xlim(min(layers) - 0.5, max(layers) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
    return figure


def by_length(
    rows: Sequence[dict[str, Any]], name: str, key: str, label: str, level: float | None = None
) -> tuple[list[Line], Figure]:
    """What `langevin bench` measured, by length: a line for each name, and for each size of batch where a
    length has several."""
    several = len({(row[name], row["length"]) for row in rows}) < len(rows)
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        who = f"{row[name]}, {row['batch']} at a time" if several else row[name]
        points.setdefault(who, []).append((row["length"], row[key]))
    lines = [Line(who, i, *zip(*sorted(own), strict=True)) for i, (who, own) in enumerate(points.items())]
    return lines, curves(lines, ("length (tokens), log scale", f"{label}, log scale"), level, log="xy")


@styled
def heatmap(grids: Sequence[Grid], labels: tuple[str, str], meaning: str, ends: Ends = None) -> Figure:
    """Grids side by side, as many as a printed page is wide; with ends, all in the same colours. Values are
    written out where they are few; beside a picture they are those of its patches. Where all have the same
    rows, these are named at the left alone."""
    down, along = (max(np.shape(grid.values)[axis] for grid in grids) for axis in (0, 1))
    beside, written = grids[0].picture is not None, down * along <= MOST_WRITTEN
    room = (25, 22) if written else (12, 12) if grids[0].columns else (3, 3)  # of a cell, with its name
    same = not beside and bool(grids[0].rows) and all(grid.rows == grids[0].rows for grid in grids)
    names = 40.0
    wide = WIDTH if beside else min(WIDEST, along * room[0] + (8 if same else names))
    tall = 190 if beside else min(WIDEST, max(190, 76 + down * room[1]))
    columns = max(1, min(len(grids), int((WIDEST - names * same) / wide)))
    rows, width = math.ceil(len(grids) / columns), max(WIDTH, columns * wide + names * same + 50)
    figure = Figure((width / 72, rows * tall / 72), dpi=72, layout="constrained")
    every = figure.subplots(rows, columns * (1 + beside), squeeze=False).reshape(-1, 1 + beside)
    for i, ((*left, axes), grid) in enumerate(zip(every, grids, strict=False)):
        mesh = _cells(axes, grid, ends, written and not beside, along * room[0])
        for place in left:
            place.imshow(grid.picture)
            place.set(xticks=[], yticks=[])
            place.grid(visible=False)
            axes.set(xticks=[], yticks=[], box_aspect=1)
        inner = same and i % columns > 0
        if inner:
            axes.set_yticklabels([])
        _label(
            (*left, axes)[0], labels[0], " " if inner else labels[1], grid.name, int(width / columns / 6)
        )
        shared = ends is not None
        if not shared or axes is every[len(grids) - 1, -1]:
            over = every[: len(grids), -1] if shared else axes
            bar = figure.colorbar(mesh, ax=over, shrink=0.8 / (rows if shared else 1), pad=0.02)
            bar.set_label(textwrap.fill(meaning, 30))
            bar.outline.set_visible(False)
    for unused in every[len(grids) :].ravel():
        unused.remove()
    return figure


def _cells(axes: Axes, grid: Grid, ends: Ends, written: bool, width: float) -> Any:
    """Where some values are negative, colours part at 0. Where values are many, the largest hundredth may
    lie beyond the colours, so that the others can be told apart. Names of columns stand upright where the
    width has no room for them."""
    values = np.array(grid.values, dtype=float)
    diverging = ends is None and bool(np.nanmin(values) < 0)
    far = float(np.nanpercentile(np.abs(values), 99 if values.size > MOST_WRITTEN else 100))
    low, high = ends or (-far if diverging else float(np.nanmin(values)), far)
    colours = matplotlib.colormaps["RdBu_r" if diverging else "viridis"].copy()
    beyond = (bool(np.nanmin(values) < low), bool(np.nanmax(values) > high))
    colours.colorbar_extend = EXTENDED[beyond]  # type: ignore[assignment]
    mesh = axes.pcolormesh(values, cmap=colours, vmin=low, vmax=high)
    for names, ticks, turned in ((grid.columns, axes.set_xticks, 90), (grid.rows, axes.set_yticks, 0)):
        few = len(names) <= 12 and (not turned or sum(_width(f"{name} ") for name in names) <= width)
        if names:
            places = [i + 0.5 for i in range(len(names))]
            ticks(places, names, size=TEXT if few else 9, rotation=0 if few else turned)
    axes.invert_yaxis()
    axes.grid(visible=False)
    for (i, j), value in np.ndenumerate(values) if written else ():
        if not math.isnan(value):
            red, green, blue, _ = colours(mesh.norm(value))
            ink = "#000000" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "#fffffe"
            shown = f"{value:.3g}" if abs(value) >= 1 else f"{value:.3f}".rstrip("0").rstrip(".")
            shown = re.sub(r"^(-?)0\.", r"\1.", shown)  # .996, as there is little room
            axes.text(j + 0.5, i + 0.5, shown, color=ink, size=8.5, ha="center", va="center")
    return mesh


@styled
def save(figure: Figure, path: Path, note: str = "") -> None:
    """A picture that stands alone: with a note, and a legend where it has lines with names."""
    if path.suffix not in FORMATS:
        raise UsageError(f"{path} is no picture", f"End the name in {', '.join(FORMATS)}.")
    handles, names = figure.axes[0].get_legend_handles_labels()
    width, height = figure.get_size_inches()
    lines = textwrap.wrap(note, int(72 * width / 6))
    figure.set_size_inches(width, height + 16 * (len(names) + len(lines)) / 72)
    path.parent.mkdir(parents=True, exist_ok=True)
    if names or lines:
        figure.legend(
            handles, names, loc="outside lower left", title="\n".join(lines) or None, alignment="left"
        )
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
    drawn = re.sub(
        r"<[^>]+>", lambda tag: re.sub(r"\d+\.\d+", lambda x: f"{float(x[0]):.4g}", tag[0]), drawn
    )
    drawn = re.sub(
        r" font-family:[^;\"]*;| transform=\"rotate\(-0 [^\"]*\"|<g/>|<defs>\s*</defs>", "", drawn
    )
    drawn = re.sub(r'<svg [^>]*?(viewBox="[^"]+")[^>]*>', r'<svg class="drawing" \1>', drawn, count=1)
    drawn = re.sub(
        "#[0-9a-f]{6}", lambda c: f"var(--{VARIABLES[c[0]]})" if c[0] in VARIABLES else c[0], drawn
    )
    return re.sub(r"\s*\n\s*", "\n", drawn)


def look(index: int) -> tuple[str, str]:
    """Colour and marker: no two of the first 64 have both in common."""
    more, colour = divmod(index, len(COLOURS))
    return COLOURS[colour], MARKERS[(colour + more) % len(MARKERS)]


def _panel(labels: tuple[str, str], height: float) -> tuple[Figure, Axes]:
    figure = Figure((WIDTH / 72, height / 72), dpi=72, layout="constrained")
    axes = figure.subplots()
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(5))
        axis.set_major_formatter(_tick)
    _label(axes, *labels)
    return figure, axes


def _label(axes: Axes, x: str, y: str, name: str = "", wide: int = 54) -> None:
    """The label of the y axis lies above it, under the name of the panel: nobody has to turn the head."""
    if x:
        axes.set_xlabel(textwrap.fill(x, wide), gid="x-label")
    axes.set_title("\n".join(textwrap.fill(part, wide) for part in (name, y) if part), gid="y-label")


def _tick(value: float, _: Any = None) -> str:
    """0.05, −3, 250 k, 2 M, and 16,384 as it is"""
    power = 0 if abs(value) < 10_000 else min(4, int(math.log10(abs(value)) / 3))
    shown = f"{value / 1000**power:.6g} {' kMGT'[power]}".strip()
    shown = f"{value:,.0f}" if power == 1 and len(shown) > 6 else shown
    return shown.replace("-", "\N{MINUS SIGN}")


def _apart(places: Sequence[float]) -> list[float]:
    """Of places on a log scale, those whose names have room, the last one first."""
    least = 0.1 * math.log(places[-1] / places[0]) if len(places) > 1 else 0.0
    kept: list[float] = []
    for place in reversed(places):
        if not kept or math.log(kept[-1] / place) >= least:
            kept.append(place)
    return kept


def _name(figure: Figure, axes: Axes, marks: Sequence[Mark]) -> None:
    """Names beside their points, where they touch nothing; a group's stands beside its last point."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    frame, whiskers = axes.get_window_extent(), {}
    for mark in marks:
        across = [(x, mark.y) for x in mark.x_ends or (mark.x, mark.x)]
        along = [(mark.x, y) for y in mark.y_ends or (mark.y, mark.y)]
        whiskers[mark] = [Bbox(axes.transData.transform(ends)).padded(4) for ends in (across, along)]
    taken = [box for boxes in whiskers.values() for box in boxes]
    last = {mark.group or mark: mark for mark in sorted(marks, key=lambda mark: mark.x)}
    for mark in last.values():
        name = _short(mark.group or mark.name)
        x, y = axes.transData.transform((mark.x, mark.y))
        wide, tall = _width(name), TEXT
        flat, upright = whiskers[mark]
        places = [(flat.x1 + 1, y - tall / 2), (flat.x0 - 1 - wide, y - tall / 2)]
        places += [(left, base) for base in (y + 6, y - 6 - tall) for left in (x + 6, x - 6 - wide)]
        places += [(x - wide / 2, upright.y1 + 1), (x - wide / 2, upright.y0 - 1 - tall)]
        for left, base in places:
            box = Bbox.from_bounds(left, base, wide, tall)
            inside = frame.x0 <= box.x0 and box.x1 <= WIDTH and frame.y0 <= box.y0 and box.y1 <= frame.y1
            if inside and not box.count_overlaps(taken):
                figure.text(left / WIDTH, (base + 2) / figure.bbox.height, name)
                taken.append(box)
                break


def _width(words: str) -> float:
    return float(TextToPath().get_text_width_height_descent(words, FontProperties(size=TEXT), False)[0])


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"
