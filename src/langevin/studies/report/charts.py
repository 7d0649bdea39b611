"""The drawings of a study's page: results in, charts out."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from langevin import figures
from langevin.evaluation.rows import Metric
from langevin.figures import Ends, Grid, Heads, Line, Mark
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


def charts(results: Results) -> dict[str, list[Chart]]:
    drawn = {"forest": _forest(results), "cost": _cost(results)} if results.finished else {}
    by_part = {"curves": _curves, "reliability": _reliability, "scalars": _scalars, "grids": _grids}
    for key, draw in by_part.items():
        drawn[key] = [chart for part in results.parts for chart in draw(results, part)]
    return drawn


def _chart(
    title: str, figure: Any, told: Sequence[str], note: str = "", lines: Sequence[Line | Heads] = ()
) -> Chart:
    legend = [(line.index, line.name) for line in lines]
    return Chart(title, figures.svg(figure, title), f"{'; '.join(told)}.", note, legend)


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
    return [_chart(title, figure, told, note)]


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
    if len(rows) < 2:
        return []
    labels = with_unit(cost.label, cost.unit), with_unit(metric.label, metric.unit)
    height = max(150, figures.forest_height(len(rows))) if len(rows) <= TALL else 150
    told = [f"{row.name} {number(row.y)} at {number(row.x)}" for row in rows]
    note = "Means over seeds with 95 % intervals" + ("; lines join a part." if rows[0].group else ".")
    title = f"{sentence_case(metric.label)} against {cost.label}"
    return [_chart(title, figures.scatter(rows, labels, height), told, note)]


def _curves(results: Results, part: PartResult) -> list[Chart]:
    """Validation loss by how much of the budget was spent: the mean over seeds and each seed."""
    lines, numbers = [], marks(results)
    for arm in part.arms:
        found = [[(p.amount, p.loss) for p in run.curve if math.isfinite(p.loss)] for run in arm.runs]
        seeds = [np.array(points, dtype=float).T for points in found if len(points) > 1]
        if seeds:
            first, last = max(x[0] for x, _ in seeds), min(x[-1] for x, _ in seeds)
            grid = sorted({at for x, _ in seeds for at in x if first <= at <= last}) or list(seeds[0][0])
            mean = np.mean([np.interp(grid, x, y) for x, y in seeds], axis=0)
            pale = [(x, y) for x, y in seeds] if len(seeds) > 1 else ()
            lines.append(Line(arm.name, numbers[arm.name], grid, list(mean), pale=pale))
    if not lines:
        return []
    untouched = part.untouched and part.untouched.best
    level = untouched.loss if untouched else None
    figure = figures.curves(lines, (f"training {results.unit}", "validation loss"), level, start=0.2)
    title = titled(f"Validation loss by training {results.unit}", part, results)
    told = [f"{line.name} ends at {number(line.y[-1])}" for line in lines]
    note = "Strong: mean over seeds; pale: each seed. The start may lie above the frame."
    note += f" Dashed: the untouched model, {number(level)}." if untouched else ""
    return [_chart(title, figure, told, note, lines)]


def _reliability(results: Results, part: PartResult) -> list[Chart]:
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
            lines.append(Line(arm.name, marks(results)[arm.name], sure, right))
            counts.append([b[:, 0].sum() for b in bins])
    if not lines:
        return []
    told = [f"{line.name} is right {line.y[-1]:.0%} of the time when it is surest" for line in lines]
    figure = figures.reliability(lines, counts)
    return [_chart(titled("Reliability", part, results), figure, told, lines=lines)]


def _scalars(results: Results, part: PartResult) -> list[Chart]:
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
            values = [(layer, fmean(seeds)) for (layer, _), seeds in heads.items()]
            learned.append(Heads(arm_name, marks(results)[arm_name], values))
        told = [f"{one.name} at {counted(len(one.values), 'head')}" for one in learned]
        title = titled(f"Learned {name} by layer", part, results)
        made.append(_chart(title, figures.scalars(learned, f"{name} (learned value)"), told, lines=learned))
    return made


Measured = dict[str, dict[tuple[Any, ...], list[float]]]
"""By arm and by place, the values of all seeds."""


def _grids(results: Results, part: PartResult) -> list[Chart]:
    """What was measured at places: over one of numbers a line an arm, over one of names a heatmap of all
    arms, over two a heatmap each."""
    found: dict[tuple[str, tuple[str, ...]], Measured] = {}
    for arm in part.arms:
        for row in (row for run in arm.done for row in run.rows):
            if row.at and "step" not in row.at and math.isfinite(row.value):
                values = found.setdefault((row.metric, tuple(row.at)), {}).setdefault(
                    arm.name, defaultdict(list)
                )
                values[tuple(row.at.values())].append(row.value)
    made = []
    for (name, axes), measured in found.items():
        title = titled(f"{results.metric(name).label} by {listed(axes)}", part, results)
        named = any(isinstance(place, str) for values in measured.values() for (place, *_) in values)
        draw = {1: _over_names if named else _over_one, 2: _over_two}.get(len(axes))
        made += draw(title, results.metric(name), axes, measured, marks(results)) if draw else []
    return made


def _over_one(
    title: str, metric: Metric, axes: tuple[str, ...], measured: Measured, numbers: dict[str, int]
) -> list[Chart]:
    lines = []
    for arm, values in measured.items():
        places = sorted(place for (place,) in values)
        means = [fmean(values[place,]) for place in places]
        ends = [_ends(estimated(metric, values[place,])) for place in places]
        lines.append(Line(arm, numbers[arm], places, means, ends))
    every = [place for line in lines for place in line.x]
    log = min(every) > 0 and max(every) >= 8 * min(every)
    labels = f"{axes[0]}, log scale" if log else axes[0], with_unit(metric.label, metric.unit)
    told = [f"{line.name} {number(line.y[0])} to {number(line.y[-1])}" for line in lines]
    figure = figures.curves(lines, labels, log="x" if log else "")
    return [_chart(sentence_case(title), figure, told, "With 95 % t intervals.", lines)]


def _over_names(
    title: str, metric: Metric, axes: tuple[str, ...], measured: Measured, numbers: dict[str, int]
) -> list[Chart]:
    places = list(dict.fromkeys(place for values in measured.values() for (place,) in values))
    means = [[fmean(values[place,] or [math.nan]) for place in places] for values in measured.values()]
    grid = Grid(means, list(measured), places)
    told = [
        f"{arm} {number(min(row))} to {number(max(row))}" for arm, row in zip(measured, means, strict=True)
    ]
    figure = figures.heatmap([grid], (axes[0], "arm"), with_unit(metric.label, metric.unit))
    return [_chart(sentence_case(title), figure, told)]


def _in_order(places: Iterable[Any]) -> list[Any]:
    """Numbers sorted, names as they come."""
    return list(places) if any(isinstance(place, str) for place in places) else sorted(places)


def _over_two(
    title: str, metric: Metric, axes: tuple[str, ...], measured: Measured, numbers: dict[str, int]
) -> list[Chart]:
    every = [fmean(seeds) for values in measured.values() for seeds in values.values()]
    ends = (0.0, 1.0) if metric.unit == "fraction" else (min(every), max(every))
    made = []
    for arm, values in measured.items():
        own = [fmean(seeds) for seeds in values.values()]
        rows, columns = (_in_order({place[i]: 0 for place in values}) for i in (0, 1))
        means = [[fmean(values[row, column] or [math.nan]) for column in columns] for row in rows]
        grid = Grid(means, [plainly(row) for row in rows], [plainly(column) for column in columns])
        labels, meaning = (axes[1], axes[0]), with_unit(metric.label, metric.unit)
        figure = figures.heatmap([grid], labels, meaning, ends)
        told = [f"{number(min(own))} to {number(max(own))}"]
        made.append(_chart(f"{arm}: {title}", figure, told))
    return made
