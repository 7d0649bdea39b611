"""The drawings of a study's page, and of `langevin plot`: results in, charts out."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from langevin import figures
from langevin.evaluation.rows import Metric, Row
from langevin.figures import Ends, Grid, Line, Mark
from langevin.studies.numbers import (
    common_spread,
    counted,
    half_width,
    listed,
    number,
    sentence_case,
    with_unit,
)
from langevin.studies.report.page import Chart, plainly
from langevin.studies.report.study import TALL, marks, titled
from langevin.studies.results import CONFIRMED, COSTS, Key, PartResult, Results, estimated

UNITS = {"length": "tokens", "position": "tokens", "distance": "tokens", "state": "bytes"}


def charts(results: Results) -> dict[str, list[Chart]]:
    drawn = {"forest": _forest(results), "cost": _cost(results)} if results.finished else {}
    by_part = {"curves": curves, "reliability": reliability, "scalars": scalars, "grids": grids}
    for key, draw in by_part.items():
        drawn[key] = [one for part in results.parts for one in draw(results, part)]
    return drawn


def _ends(found: Any) -> Ends:
    return None if found is None or found.low is None or found.high is None else (found.low, found.high)


def _group(results: Results, part: PartResult) -> str:
    return part.name if len(results.parts) > 1 else ""


def _forest(results: Results) -> list[Chart]:
    """Paired differences in the primary metric, sorted within each part, the reference at zero."""
    metric, mark_of, rows = results.primary, marks(results), []
    own = [c for c in results.contrasts if c.key.metric == metric.name and c.key.place == "best"]
    spread = common_spread([(c.low, c.high) for c in own])
    for part in results.parts:
        group, first = _group(results, part), part.reference.name
        effects = [Mark(first, mark_of[first], 0.0, group=group, shown="reference")]
        for arm in part.arms[1:]:
            found = results.contrast(Key(part.name, arm.name, metric.name))
            if found is None:
                continue
            diverged = sum(run.status == "diverged" for run in arm.runs)
            shown = "the reference diverged" if found.pairs else "no pairs"
            shown = f"diverged on {diverged} of {len(arm.runs)}" if diverged else shown
            if found.difference is not None:
                shown = number(found.difference, spread, sign=True)
                shown += f" ± {number(half_width(found.low, found.high), spread)}" if _ends(found) else ""
            x, sure = math.nan if found.difference is None else found.difference, found.state in CONFIRMED
            mark = Mark(
                arm.name, mark_of[arm.name], x, x_ends=_ends(found), group=group, shown=shown, sure=sure
            )
            effects.append(mark)
        rows += sorted(effects, key=lambda effect: math.inf if math.isnan(effect.x) else effect.x)
    if not own:
        return []
    against = listed(dict.fromkeys(part.reference.name for part in results.parts))
    title = f"{sentence_case(metric.label)}: difference to {against}"
    told = [f"{row.name} {row.shown}" for row in rows]
    note = "Paired by seed, with 95 % t intervals. Filled: confirmed; open: not."
    figure = figures.forest(rows, f"difference in {with_unit(metric.label, metric.unit)}")
    return [Chart(title, figure, told, note)]


def _cost(results: Results) -> list[Chart]:
    """The primary metric against training time, or against work where no time was measured."""
    metric, mark_of, rows = results.primary, marks(results), []
    timed = sum(arm.cost("time_ratio") is not None for part in results.parts for arm in part.arms) > 1
    cost = COSTS["time_ratio" if timed else "flops_per_token"]
    for part in results.parts:
        for arm in part.arms:
            row, found = arm.cost(cost.name), arm.estimate(metric)
            x = row.value if row else 1.0 if timed and arm is part.reference else None
            if x is not None and found is not None and math.isfinite(found.mean):
                ends, group = (_ends(row), _ends(found)), _group(results, part)
                rows.append(Mark(arm.name, mark_of[arm.name], x, found.mean, *ends, group=group))
    if len({row.x for row in rows}) < 2:
        return []
    labels = with_unit(cost.label, cost.unit), with_unit(metric.label, metric.unit)
    height = max(150, figures.forest_height(len(rows))) if len(rows) <= TALL else 150
    told = [f"{row.name} {number(row.y)} at {number(row.x)}" for row in rows]
    note = "Means over seeds with 95 % intervals" + ("; lines join a part." if rows[0].group else ".")
    title = f"{sentence_case(metric.label)} against {cost.label}"
    return [Chart(title, figures.scatter(rows, labels, height), told, note)]


def curves(results: Results, part: PartResult) -> list[Chart]:
    """Validation loss by how much of the budget was spent: the mean over seeds and each seed, or, of a
    single run, its training loss where that is known."""
    lines, numbers = [], marks(results)
    for arm in part.arms:
        found = [[(p.amount, p.loss) for p in run.curve if math.isfinite(p.loss)] for run in arm.runs]
        seeds = [np.array(points, dtype=float).T for points in found if len(points) > 1]
        if seeds:
            first, last = max(x[0] for x, _ in seeds), min(x[-1] for x, _ in seeds)
            grid = sorted({at for x, _ in seeds for at in x if first <= at <= last}) or list(seeds[0][0])
            mean = np.mean([np.interp(grid, x, y) for x, y in seeds], axis=0)
            own = [run.details["training"] for run in arm.runs if "training" in run.details]
            pale = [(x, y) for x, y in seeds] if len(seeds) > 1 else own
            lines.append(Line(arm.name, numbers[arm.name], grid, list(mean), pale=pale))
    if not lines:
        return []
    untouched = part.untouched and part.untouched.best
    level = untouched.loss if untouched else None
    figure = figures.curves(lines, (f"training {results.unit}", "validation loss"), level, start=0.2)
    title = titled(f"Validation loss by training {results.unit}", part, results)
    told = [f"{line.name} ends at {number(line.y[-1])}" for line in lines]
    trained = any("training" in run.details for arm in part.arms for run in arm.runs)
    note = "Strong: validation; pale: training." if trained else "Strong: mean over seeds; pale: each seed."
    note += " The start may lie above the frame."
    note += f" Dashed: the untouched model, {number(level)}." if untouched else ""
    return [Chart(title, figure, told, note, lines)]


def reliability(results: Results, part: PartResult) -> list[Chart]:
    """Bins of the same place put together over seeds: counts add, the rest weighs by count."""
    lines, counts = [], []
    for arm in part.arms:
        pooled: dict[int, list[tuple[float, ...]]] = defaultdict(list)
        for run in arm.runs:
            for place, one in enumerate(run.details.get("reliability") or []):
                if one["count"] and one["accuracy"] is not None:
                    pooled[place].append((one["count"], one["confidence"], one["accuracy"]))
        if pooled:
            bins = [np.array(pooled[place]) for place in sorted(pooled)]
            sure, right = ([np.average(b[:, i], weights=b[:, 0]) for b in bins] for i in (1, 2))
            ece = [row.value for run in arm.runs if (row := run.row("ece")) is not None]
            name = f"{arm.name} (ECE {fmean(ece):.3f})" if ece else arm.name
            lines.append(Line(name, marks(results)[arm.name], sure, right))
            counts.append([b[:, 0].sum() for b in bins])
    if not lines:
        return []
    told = [f"{line.name} is right {line.y[-1]:.0%} of the time when it is surest" for line in lines]
    figure = figures.reliability(lines, counts)
    return [Chart(titled("Reliability", part, results), figure, told, lines=lines)]


def scalars(results: Results, part: PartResult) -> list[Chart]:
    """One chart a name: heads by layer, means over seeds."""
    found: dict[str, dict[str, dict[tuple[int, Any], list[float]]]] = {}
    for arm in part.arms:
        for row in (row for run in arm.runs for row in run.details.get("learned") or []):
            heads = found.setdefault(row["name"], {}).setdefault(arm.name, defaultdict(list))
            heads[row["layer"], row["head"]].append(row["value"])
    made = []
    for name, by_arm in found.items():
        learned = []
        for arm_name, heads in by_arm.items():
            layers, means = [layer for layer, _ in heads], [fmean(seeds) for seeds in heads.values()]
            learned.append(Line(arm_name, marks(results)[arm_name], layers, means))
        told = [f"{one.name} at {counted(len(one.x), 'head')}" for one in learned]
        title = titled(f"Learned {name} by layer", part, results)
        made.append(Chart(title, figures.scalars(learned, f"{name} (learned value)"), told, lines=learned))
    return made


Measured = dict[str, dict[tuple[Any, ...], list[Row]]]
"""By arm and by place, the rows of all seeds."""


def measured(part: PartResult) -> dict[tuple[str, tuple[str, ...]], Measured]:
    """What was measured at places, by metric and by what the places are."""
    found: dict[tuple[str, tuple[str, ...]], Measured] = {}
    for arm in part.arms:
        for row in (row for run in arm.done for row in run.rows):
            if row.at and "step" not in row.at and math.isfinite(row.value):
                of_metric = found.setdefault((row.metric, tuple(row.at)), {})
                of_metric.setdefault(arm.name, defaultdict(list))[tuple(row.at.values())].append(row)
    return found


def grids(
    results: Results, part: PartResult, chosen: tuple[str, str] | None = None, together: bool = False
) -> list[Chart]:
    """What was measured at places: over one of numbers a line an arm, over one of names a heatmap of all
    arms, over two a heatmap each, or all of them together. chosen: a metric and the last of its places."""
    made = []
    for (name, axes), found in measured(part).items():
        if chosen is not None and chosen != (name, axes[-1]):
            continue
        metric = results.metric(name)
        title = titled(f"{metric.label} by {listed(axes)}", part, results)
        if len(axes) == 2:
            made += _over_two(title, metric, axes, found, together)
        elif any(isinstance(place, str) for values in found.values() for (place, *_) in values):
            made.append(_over_names(title, metric, axes[0], found))
        elif len(axes) == 1:
            made.append(_over_one(title, metric, axes[0], found, marks(results), part))
    return made


def _context(part: PartResult) -> int | None:
    """The length that all arms were trained at; None: they differ in it."""
    own = {arm.settings.get("context", part.settings.get("context")) for arm in part.arms}
    return own.pop() if len(own) == 1 else None


def _mean(rows: Sequence[Row]) -> float:
    return fmean(row.value for row in rows) if rows else math.nan


def _over_one(
    title: str,
    metric: Metric,
    axis: str,
    found: Measured,
    numbers: dict[str, int],
    part: PartResult,
) -> Chart:
    lines, context = [], _context(part)
    for arm, values in found.items():
        places = sorted(place for (place,) in values)
        by_place = [values[place,] for place in places]
        ends = [
            _ends(rows[0] if len(rows) == 1 else estimated(metric, [row.value for row in rows]))
            for rows in by_place
        ]
        lines.append(Line(arm, numbers[arm], places, [_mean(rows) for rows in by_place], ends))
    lines = _joined(lines, part) if axis == "state" else lines
    every = [place for line in lines for place in line.x]
    log = axis in UNITS and min(every) > 0
    trained = context if axis in ("length", "position") and context and context < max(every) else None
    label = with_unit(axis, UNITS.get(axis, ""))
    labels = f"{label}, log scale" if log else label, with_unit(metric.label, metric.unit)
    told = [f"{line.name} {number(line.y[0])} to {number(line.y[-1])}" for line in lines]
    seeds = max(len(rows) for values in found.values() for rows in values.values())
    note = "With 95 % t intervals over seeds." if seeds > 1 else "With 95 % intervals over what is tested."
    note += f" Dotted: the length of training, {trained}." if trained else ""
    figure = figures.curves(lines, labels, log="x" if log else "", upright=trained)
    return Chart(sentence_case(title), figure, told, note, lines)


def _joined(lines: list[Line], part: PartResult) -> list[Line]:
    """Arms have a point each: those that differ in width alone are a line, named by their mixer."""
    settings = {arm.name: arm.settings for arm in part.arms}
    alike: dict[str, list[Line]] = {}
    for line in lines:
        others = {k: v for k, v in settings[line.name].items() if k not in ("width", "out")}
        alike.setdefault(str(sorted(others.items())), []).append(line)
    found = []
    for own in alike.values():
        own.sort(key=lambda line: line.x[0])
        x, y, ends = zip(*((line.x[0], line.y[0], line.ends[0]) for line in own), strict=True)
        first = own[0].name
        name = settings[first].get("mixer", first) if len(own) > 1 else first
        found.append(Line(name, own[0].index, x, y, ends))
    return found


def _over_names(title: str, metric: Metric, axis: str, found: Measured) -> Chart:
    places = list(dict.fromkeys(place for values in found.values() for (place,) in values))
    means = [[_mean(values[place,]) for place in places] for values in found.values()]
    told = [
        f"{arm} {number(min(row))} to {number(max(row))}" for arm, row in zip(found, means, strict=True)
    ]
    grid = Grid(means, list(found), places)
    figure = figures.heatmap([grid], (axis, "arm"), with_unit(metric.label, metric.unit))
    return Chart(sentence_case(title), figure, told)


def _in_order(places: Iterable[Any]) -> list[Any]:
    """Numbers sorted, names as they come."""
    return list(places) if any(isinstance(place, str) for place in places) else sorted(places)


def _over_two(
    title: str, metric: Metric, axes: tuple[str, ...], found: Measured, together: bool
) -> list[Chart]:
    every = [_mean(rows) for values in found.values() for rows in values.values()]
    ends = (0.0, 1.0) if metric.unit == "fraction" else (min(every), max(every))
    drawn = {}
    for arm, values in found.items():
        rows, columns = (_in_order({place[i]: 0 for place in values}) for i in (0, 1))
        means = [[_mean(values[row, column]) for column in columns] for row in rows]
        down, along = ([plainly(place) for place in places] for places in (rows, columns))
        drawn[arm] = Grid(means, down, along, arm if together else "")
    y, x = (with_unit(axis, UNITS.get(axis, "")) for axis in axes)
    made = []
    for arms in [list(drawn)] if together else [[arm] for arm in drawn]:
        figure = figures.heatmap(
            [drawn[arm] for arm in arms], (x, y), with_unit(metric.label, metric.unit), ends
        )
        own = {arm: [_mean(rows) for rows in found[arm].values()] for arm in arms}
        told = [f"{arm} {number(min(values))} to {number(max(values))}" for arm, values in own.items()]
        made.append(Chart(sentence_case(title) if together else f"{arms[0]}: {title}", figure, told))
    return made
