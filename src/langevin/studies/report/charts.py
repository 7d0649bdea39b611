"""The drawings of a study's page: results in, charts out."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np

from langevin import figures
from langevin.evaluation.rows import Metric
from langevin.figures import Bins, Effect, Line, Spot
from langevin.studies.inference import estimate
from langevin.studies.numbers import common_spread, half_width, listed, number, sentence_case, with_unit
from langevin.studies.report.page import Chart, plainly
from langevin.studies.report.study import arms
from langevin.studies.results import CONFIRMED, COSTS, Key, PartResult, Results, RunResult


def charts(results: Results) -> dict[str, list[Chart]]:
    parts = results.parts
    found = {
        "curves": [chart for part in parts for chart in _curves(results, part)],
        "reliability": [chart for part in parts for chart in _reliability(results, part)],
        "scalars": [chart for part in parts for chart in _scalars(results, part)],
        "grids": _grids(results),
    }
    return found | ({"forest": _forest(results), "cost": _cost(results)} if results.finished else {})


def _titled(title: str, part: PartResult, results: Results) -> str:
    return f"{title}, {part.name}" if len(results.parts) > 1 else title


def _forest(results: Results) -> list[Chart]:
    """Paired differences in the primary metric, sorted within each part, the reference at zero."""
    metric, marks = results.primary, arms(results)
    own = [c for c in results.contrasts if c.key.metric == metric.name and c.key.place == "best"]
    spread = common_spread([(c.low, c.high) for c in own])
    groups: dict[str, list[Effect]] = {}
    for part in results.parts:
        effects = [Effect(part.reference.name, marks[part.reference.name], 0.0, None, "reference")]
        for arm in part.arms[1:]:
            found = results.contrast(Key(part.name, arm.name, metric.name))
            if found is None:
                continue
            diverged = sum(run.status == "diverged" for run in arm.runs)
            shown = f"diverged on {diverged} of {len(arm.runs)}" if diverged else "no interval"
            ends = None if found.low is None or found.high is None else (found.low, found.high)
            if found.difference is not None:
                shown = number(found.difference, spread, sign=True)
                shown += f" ± {number(half_width(*ends), spread)}" if ends else ""
            sure = found.state in CONFIRMED
            effects.append(Effect(arm.name, marks[arm.name], found.difference, ends, shown, sure))
        ordered = sorted(effects, key=lambda e: (e.value is None, e.value or 0.0))
        groups[part.name if len(results.parts) > 1 else ""] = ordered
    if not own:
        return []
    against = listed(dict.fromkeys(part.reference.name for part in results.parts))
    title = f"{sentence_case(metric.label)}: difference to {against}"
    told = "; ".join(f"{e.name} {e.shown}" for group in groups.values() for e in group)
    note = "Paired by seed, with 95 % t intervals. Filled: confirmed; open: not."
    drawn = figures.forest(groups, f"difference in {with_unit(metric.label, metric.unit)}")
    return [Chart(title, figures.svg(drawn, "forest"), f"{told}.", note)]


def _cost(results: Results) -> list[Chart]:
    """The primary metric against training time, or against work where no time was measured."""
    metric, marks = results.primary, arms(results)
    every = [arm for part in results.parts for arm in part.arms]
    name = (
        "time_ratio" if sum(arm.cost("time_ratio") is not None for arm in every) > 1 else "flops_per_token"
    )
    spots = []
    for part in results.parts:
        for arm in part.arms:
            row, found = arm.cost(name), arm.estimate(metric)
            x = row.value if row else 1.0 if name == "time_ratio" and arm is part.reference else None
            if x is None or found is None or not np.isfinite(found.mean):
                continue
            wide = None if row is None or row.low is None or row.high is None else (row.low, row.high)
            tall = None if found.low is None or found.high is None else (found.low, found.high)
            group = part.name if len(results.parts) > 1 else ""
            spots.append(Spot(arm.name, marks[arm.name], x, found.mean, wide, tall, group))
    if len(spots) < 2:
        return []
    cost = COSTS[name]
    rows = len(every) + (len(results.parts) if len(results.parts) > 1 else 0)
    labels = with_unit(cost.label, cost.unit), with_unit(metric.label, metric.unit)
    drawn = figures.scatter(spots, labels, min(figures.forest_height(rows), 210))
    told = "; ".join(f"{s.name} {number(s.y)} at {number(s.x)}" for s in spots)
    note = "Means over seeds with 95 % intervals" + (
        "; lines join the arms of a part." if spots[0].group else "."
    )
    return [
        Chart(
            f"{sentence_case(metric.label)} against {cost.label}",
            figures.svg(drawn, "cost"),
            f"{told}.",
            note,
        )
    ]


def _points(run: RunResult) -> tuple[list[float], list[float]]:
    found = [(float(point.amount), point.loss) for point in run.curve if np.isfinite(point.loss)]
    return [x for x, _ in found], [y for _, y in found]


def _curves(results: Results, part: PartResult) -> list[Chart]:
    """Validation loss by how much of the budget was spent: the mean over seeds and each seed."""
    lines, marks = [], arms(results)
    for arm in part.arms:
        seeds = [path for run in arm.runs if len((path := _points(run))[0]) > 1]
        if seeds:
            first, last = max(x[0] for x, _ in seeds), min(x[-1] for x, _ in seeds)
            grid = sorted({at for x, _ in seeds for at in x if first <= at <= last}) or seeds[0][0]
            mean = np.mean([np.interp(grid, x, y) for x, y in seeds], axis=0)
            lines.append(
                Line(arm.name, marks[arm.name], grid, list(mean), pale=seeds if len(seeds) > 1 else ())
            )
    if not lines:
        return []
    untouched = part.untouched and part.untouched.best
    level = (untouched.loss, "the untouched model") if untouched else None
    labels = f"training {results.unit}", "validation loss"
    drawn = figures.curves(lines, labels, level=level, start=figures.START)
    title = _titled("Learning curves", part, results)
    told = "; ".join(f"{line.name} ends at {number(line.y[-1])}" for line in lines)
    note = "Strong: mean over seeds; pale: each seed. The start may lie above the frame."
    return [_chart(title, drawn, told, note, lines)]


def _chart(title: str, drawn: Any, told: str, note: str = "", lines: Sequence[Line | Bins] = ()) -> Chart:
    legend = [(line.index, line.name) for line in lines]
    return Chart(title, figures.svg(drawn, title), f"{told}.", note, legend)


def _reliability(results: Results, part: PartResult) -> list[Chart]:
    """Bins of the same place put together over seeds: counts add, the rest weighs by count."""
    found, marks = [], arms(results)
    for arm in part.arms:
        pooled: dict[int, list[tuple[float, float, float]]] = defaultdict(list)
        for run in arm.runs:
            for place, one in enumerate(run.details.get("reliability") or []):
                if one["count"] and one["accuracy"] is not None:
                    pooled[place].append((one["count"], one["confidence"], one["accuracy"]))
        if pooled:
            sums = [np.array(pooled[place]) for place in sorted(pooled)]
            counts = [float(one[:, 0].sum()) for one in sums]
            sure, right = (
                [float(np.average(one[:, i], weights=one[:, 0])) for one in sums] for i in (1, 2)
            )
            found.append(Bins(arm.name, marks[arm.name], sure, right, counts))
    if not found:
        return []
    gaps = [np.average(np.abs(np.subtract(b.confidence, b.accuracy)), weights=b.count) for b in found]
    told = "; ".join(
        f"{b.name} {number(float(gap))} from the diagonal" for b, gap in zip(found, gaps, strict=True)
    )
    return [_chart(_titled("Reliability", part, results), figures.reliability(found), told, lines=found)]


def _scalars(results: Results, part: PartResult) -> list[Chart]:
    """One chart a name: heads by layer, means over seeds."""
    marks = arms(results)
    heads: dict[str, dict[str, dict[tuple[int, Any], list[float]]]] = {}
    for arm in part.arms:
        for run in arm.runs:
            for row in run.details.get("learned") or []:
                by_head = heads.setdefault(row["name"], {}).setdefault(arm.name, defaultdict(list))
                by_head[row["layer"], row["head"]].append(row["value"])
    made = []
    for name, by_arm in heads.items():
        lines = []
        for arm_name, values in by_arm.items():
            means = [(layer, fmean(found)) for (layer, _), found in values.items()]
            layers = sorted({layer for layer, _ in means})
            strong = [fmean(value for at, value in means if at == layer) for layer in layers]
            pale = [([layer for layer, _ in means], [value for _, value in means])]
            lines.append(Line(arm_name, marks[arm_name], layers, strong, pale=pale))
        drawn = figures.scalars(lines, f"{name} (learned value)")
        told = "; ".join(f"{line.name} {number(min(line.y))} to {number(max(line.y))}" for line in lines)
        made.append(_chart(_titled(f"Learned {name} by layer", part, results), drawn, told, lines=lines))
    return made


Measured = dict[str, dict[tuple[Any, ...], list[float]]]
"""By arm and by place, the values of all seeds."""


def _grids(results: Results) -> list[Chart]:
    """What was measured at places: over one coordinate a line an arm, over two a heatmap each."""
    made = []
    for part in results.parts:
        found: dict[tuple[str, tuple[str, ...]], Measured] = {}
        for arm in part.arms:
            for run in arm.done:
                for row in run.rows:
                    names = tuple(row.at)
                    if names and "step" not in names and np.isfinite(row.value):
                        by_arm = found.setdefault((row.metric, names), {})
                        by_arm.setdefault(arm.name, defaultdict(list))[tuple(row.at.values())].append(
                            row.value
                        )
        for (metric, names), by_arm in found.items():
            draw = {1: _over_one, 2: _over_two}.get(len(names))
            made += draw(results, part, results.metric(metric), names, by_arm) if draw else []
    return made


def _over_one(
    results: Results, part: PartResult, metric: Metric, names: tuple[str, ...], of: Measured
) -> list[Chart]:
    lines, marks = [], arms(results)
    for arm, values in of.items():
        places = sorted(place for (place,) in values)
        found = [estimate(values[place,]) for place in places]
        ends = [None if e is None or e.low is None or e.high is None else (e.low, e.high) for e in found]
        lines.append(Line(arm, marks[arm], places, [e.mean for e in found if e], ends))
    every = sorted({place for line in lines for place in line.x})
    log = every[0] > 0 and every[-1] >= 8 * every[0]
    labels = names[0] + (", log scale" if log else ""), with_unit(metric.label, metric.unit)
    drawn = figures.curves(lines, labels, log=log, places=every if len(every) <= 8 else ())
    title = _titled(f"{sentence_case(metric.label)} by {names[0]}", part, results)
    told = "; ".join(f"{line.name} {number(line.y[0])} to {number(line.y[-1])}" for line in lines)
    return [_chart(title, drawn, told, "Means over seeds with 95 % t intervals.", lines)]


def _over_two(
    results: Results, part: PartResult, metric: Metric, names: tuple[str, ...], of: Measured
) -> list[Chart]:
    every = [fmean(found) for values in of.values() for found in values.values()]
    made = []
    for arm, values in of.items():
        rows, columns = (sorted({place[i] for place in values}) for i in (0, 1))
        grid = [[fmean(values[row, column] or [math.nan]) for column in columns] for row in rows]
        shown = [plainly(column) for column in columns], [plainly(row) for row in rows]
        meaning = with_unit(metric.label, metric.unit)
        drawn = figures.heatmap(grid, shown, (names[1], names[0]), meaning, (min(every), max(every)))
        title = _titled(f"{arm}: {metric.label} by {names[0]} and {names[1]}", part, results)
        made.append(_chart(title, drawn, f"{number(min(map(min, grid)))} to {number(max(map(max, grid)))}"))
    return made
