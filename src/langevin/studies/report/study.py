"""The page of a study: the answer and what shows it, then the rest, by section."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from langevin.evaluation.rows import Metric
from langevin.studies import numbers, words
from langevin.studies.inference import estimate
from langevin.studies.numbers import NOTHING, amount, counted, number
from langevin.studies.report.page import Cell, Chart, Column, Page, Part, Section, Table
from langevin.studies.results import (
    COSTS,
    TO_MATCH,
    Answer,
    ArmResult,
    Contrast,
    Key,
    PartResult,
    Results,
)

LONGEST_SAMPLE = 3000
LONGEST_MISTAKE = 200
TALL = 10
"""A forest plot of more rows than this stands beside the text."""
BOUND = "upper bound"  # under the value of one
MAIN_COSTS = ("parameters", "time_ratio", "peak_memory_bytes")
NOTES = {
    "judged": "Fixed by the plan. Exact sign-flip p over pairs of the same seed, alone and with Holm's "
    "correction for all of them; at or under 0.05 is confirmed. A run that diverged ranks last.",
    "metrics": "Means over seeds with 95 % t intervals; under them the paired difference to the reference "
    "with its own. None of it is judged here.",
    "reliability": "All seeds pooled. On the dashed diagonal a model is right as often as it says; under "
    "it, it is too sure.",
    "scalars": "A marker a head, means over seeds; lines through the means of layers.",
    "grids": "Means over seeds. They describe; nothing here is judged.",
    "matched": "Where each pair of runs had the same validation loss, the larger of their two best. Under "
    "a schedule that decays, one of the two models is in mid-schedule there, and the other at its end.",
    "samples": "The prompt is in bold, the rest is the model's own. The first seed that has one.",
    "mistakes": "Of the first seed that has some, the ten to which the model gave most probability.",
    "costs": "Times come from interleaved rounds, with 95 % intervals; sizes are exact.",
    "tuning": "Validation losses by learning rate, of seeds that are not judged; the chosen one is strong.",
}


def study_page(results: Results, figures: bool = True) -> Page:
    """The page of any study. Without figures it takes milliseconds, and says the same."""
    drawn: dict[str, list[Chart]] = {}
    if figures:
        from langevin.studies.report.charts import charts

        drawn = charts(results)
    ends = {run.curve[-1].amount for run in results.runs if run.curve}
    spent, up_to = max(ends, default=0), "up to " if len(ends) > 1 else ""
    facts = [
        counted(len(marks(results)), "arm"),
        counted(len(results.seeds), "seed"),
        f"{up_to}{amount(spent)} training {results.unit} a run" if spent else "",
        *(str(results.data.get(key) or "") for key in ("name", "tokenizer")),
        str(results.environment.get("device") or ""),
        f"exploratory: {results.exploratory}" if results.exploratory else "",
    ]
    sections = [
        Section(key, title, parts, NOTES.get(key, "")) for key, title, parts in _sections(results, drawn)
    ]
    shared: dict[str, Any] = {"facts": [fact for fact in facts if fact], "sections": sections}
    if not results.finished:
        ended = sum(run.status != "missing" for run in results.runs)
        answer = f"{ended} of {len(results.runs)} runs have ended."
        sure = "Nothing is judged before all of them have. This page follows by itself."
        hero = drawn.get("curves", [])[:2]
        return Page(results.title, answer, sure, hero=hero, table=_costs(results), reload=True, **shared)
    verdict, tall = results.verdict, len(_rows(results)) > TALL
    said = (verdict.answer, verdict.sure, verdict.more)
    hero = drawn.get("forest", []) + drawn.get("cost", [])
    return Page(results.title, *said, hero=hero, tall=tall, table=main_table(results), **shared)


def marks(results: Results) -> dict[str, int]:
    """Every arm with the number of its mark, the same in all parts."""
    names = dict.fromkeys(arm.name for _, arm in _rows(results))
    return {name: index for index, name in enumerate(names)}


def titled(title: str, part: PartResult, results: Results) -> str:
    return f"{title}, {part.name}" if len(results.parts) > 1 else title


def _sections(
    results: Results, drawn: Mapping[str, list[Chart]]
) -> Iterator[tuple[str, str, list[Table | Part]]]:
    """All that there is, in reading order; of an unfinished study, what compares nothing."""

    def charts(key: str, first: int = 0) -> Part:
        return Part("charts", drawn.get(key, [])[first:])

    done = results.finished
    if done:
        yield "judged", "Judged contrasts", [_judged(results)]
        yield "claims", "Published claims", [claims_table(results.answers)]
        yield "metrics", "Other metrics", [_others(results)]
    yield "curves", "Learning curves", [charts("curves", 0 if done else 2), _reached(results)]
    if done:
        places = dict.fromkeys(name for run in results.runs for row in run.rows for name in row.at)
        over = numbers.listed([name for name in places if name != "step"] or ["place"])
        yield "reliability", "Calibration", [charts("reliability")]
        yield "scalars", "Learned scalars", [charts("scalars")]
        yield "grids", f"By {over}", [charts("grids")]
        yield "matched", "At matched loss", [_matched(results)]
        yield "samples", "Samples", [_samples(results)]
        yield "mistakes", "The surest mistakes", [_mistakes(results)]
        yield "costs", "Costs", [_costs(results)]
    yield "tuning", "Tuning", [_tuning(results)]
    yield "commands", "Commands", [Part("code", results.commands)]
    settings = [
        Part("facts", _flat(part.settings), titled("Settings", part, results)) for part in results.parts
    ]
    told = {"Environment": results.environment, "Data": results.data}
    shown = [Part("facts", _flat(facts), title) for title, facts in told.items()]
    yield "versions", "Versions, data and settings", [*shown, *settings]
    yield "uncontrolled", "What was not controlled", [Part("points", results.not_controlled)]
    yield "failed", "Runs that failed or diverged", [_failed(results)]


def _rows(results: Results) -> list[tuple[PartResult, ArmResult]]:
    return [(part, arm) for part in results.parts for arm in part.arms]


Cells = list[Cell | None]


def _by_arm(
    results: Results,
    caption: str,
    columns: Sequence[Column],
    cells: Callable[[PartResult, ArmResult], Cells],
) -> Table:
    """A row an arm; those without a cell are left out."""
    several, mark, rows = len(results.parts) > 1, marks(results), []
    for part, arm in _rows(results):
        found = cells(part, arm)
        own = {key: value for key, value in arm.settings.items() if value not in (arm.name, None)}
        fine = tuple(str(value) if key == "mixer" else f"{key} {value}" for key, value in own.items())
        head = [Cell(arm.name, arm.name, fine=fine, arm=mark[arm.name])]
        head += [Cell(part.name, part.name, kind="quiet")] * several
        if any(found):
            rows.append([*head, *(cell or Cell(NOTHING) for cell in found)])
    heads = [Column("arm")] + [Column("part", kind="left")] * several
    return Table(caption, [*heads, *columns], rows)


def _cell(value: float, ends: Any, spread: float | None = None, sign: bool = False, unit: str = "") -> Cell:
    """A number with the interval that an estimate, a contrast or a row has, as precise as that is wide."""
    low, high = (ends.low, ends.high) if ends.low != ends.high else (None, None)
    if abs(value) < 1000 or sign:
        spread = spread or numbers.half_width(low, high)
        return Cell(number(value, spread, sign), value, numbers.interval(low, high, sign, spread))
    aside = "" if low is None or high is None else f"[{amount(low, unit)}, {amount(high, unit)}]"
    return Cell(amount(value, unit), value, aside)


def _mean(arm: ArmResult, metric: Metric, spread: float | None = None) -> Cell | None:
    found = arm.estimate(metric)
    if found is None:
        return None
    if not math.isfinite(found.mean):
        diverged = sum(run.status == "diverged" for run in arm.runs)
        return Cell("diverged", aside=f"{diverged} of {counted(found.n, 'run')}", kind="quiet")
    bound = (BOUND,) if arm.kind(metric.name) == "bound" else ()
    return replace(_cell(found.mean, found, spread), fine=bound)


def _difference(contrast: Contrast | None, spread: float | None = None) -> Cell | None:
    """To the reference, with its interval; of amounts and trends in percent."""
    if contrast is None or not contrast.pairs:
        return None
    if contrast.difference is None:
        return Cell("diverged", kind="quiet")
    if contrast.key.metric == TO_MATCH or contrast.key.place == "trend":
        low, high = (None if end is None else 100 * end for end in (contrast.low, contrast.high))
        contrast = replace(contrast, difference=100 * contrast.difference, low=low, high=high)
    return _cell(contrast.difference or 0.0, contrast, spread, sign=True)


def main_table(results: Results) -> Table:
    """The primary metric with its paired difference, and beside it what each arm costs."""
    metric = results.primary
    estimates = [arm.estimate(metric) for _, arm in _rows(results)]
    contrasts = [c for c in results.contrasts if c.key.metric == metric.name and c.key.place == "best"]
    wide = numbers.common_spread([(one.low, one.high) for one in estimates if one])
    spread = numbers.common_spread([(one.low, one.high) for one in contrasts])
    costs = [name for name in MAIN_COSTS if any(arm.cost(name) for _, arm in _rows(results))]

    def cells(part: PartResult, arm: ArmResult) -> Cells:
        contrast = results.contrast(Key(part.name, arm.name, metric.name))
        told: Cells = [Cell("reference", kind="quiet") if arm is part.reference else None, None, None]
        if contrast is not None:
            p = contrast.p_adjusted
            shown = None if p is None else Cell(numbers.probability(p), p)
            told = [_difference(contrast, spread), shown, _state(results, contrast)]
        return [_mean(arm, metric, wide), *told, *(_cost(arm, name) for name in costs)]

    against = numbers.listed(dict.fromkeys(part.reference.name for part in results.parts))
    columns = [Column(metric.label, _unit(metric)), Column(f"difference to {against}", metric.unit)]
    columns += [Column("p", "adjusted"), Column("state", kind="left"), *map(_cost_column, costs)]
    return _by_arm(results, f"{numbers.sentence_case(metric.label)} and cost by arm", columns, cells)


def _state(results: Results, contrast: Contrast) -> Cell:
    kinds = {"better": "good", "worse": "bad", "lower": "strong", "higher": "strong", "as good": "strong"}
    longer = {
        "as good": f"as good as {contrast.against}",
        "does not survive": f"does not survive {counted(len(results.judged), 'contrast')}",
        "too few": "too few seeds",
    }
    if results.bounded(contrast.key):
        longer |= {"lower": "lower upper bound", "higher": "higher upper bound"}
        longer |= {"as good": f"upper bound as low as {contrast.against}'s"}
    state = contrast.state
    return Cell(longer.get(state, state), state, kind=kinds.get(state, "quiet"))


def _unit(metric: Metric) -> str:
    good = f"{metric.better} is good" if metric.better != "neither" else ""
    return ", ".join(part for part in (metric.unit, good) if part)


def _cost_column(name: str) -> Column:
    metric = COSTS.get(name) or Metric(name, name.replace("_", " "), "", "lower")
    return Column(metric.label, metric.unit if metric.unit != "B" else "")


def _cost(arm: ArmResult, name: str) -> Cell | None:
    row = arm.cost(name)
    if row is None:
        return None
    at = tuple(f"{key} {value}" for key, value in row.at.items())
    return replace(_cell(row.value, row, unit="B" if name.endswith("_bytes") else ""), fine=at)


def _costs(results: Results) -> Table:
    names = dict.fromkeys(row.metric for _, arm in _rows(results) for row in arm.costs)
    columns = [_cost_column(name) for name in names]
    columns = [replace(column, unit=column.unit.replace("tokens", results.unit)) for column in columns]
    return _by_arm(results, "Costs by arm", columns, lambda _, arm: [_cost(arm, name) for name in names])


def _judged(results: Results) -> Table:
    columns = [Column("contrast", kind="words"), Column("pairs")]
    columns += [Column("p", "alone"), Column("p", "adjusted")]
    rows = [
        [words.contrast_in_words(results, c), str(c.judged), *map(numbers.probability, (c.p, c.p_adjusted))]
        for c in results.judged
    ]
    return Table("Judged contrasts", columns, rows, sortable=False)


def claims_table(answers: Sequence[Answer]) -> Table:
    columns = [Column("claim", kind="words"), Column("published", kind="words")]
    columns += [Column("direction", kind="left"), Column("ours", kind="words")]
    rows = [
        [Cell(told.claim, fine=(told.part,) * bool(told.part)), told.published, told.direction, told.ours]
        for told in answers
    ]
    return Table("Published claims and what was seen", columns, rows, sortable=False)


def _others(results: Results) -> Table:
    def cell(part: PartResult, arm: ArmResult, metric: Metric) -> Cell | None:
        mean = _mean(arm, metric)
        told = _difference(results.contrast(Key(part.name, arm.name, metric.name)))
        return (
            replace(mean, fine=(*mean.fine, f"{told.shown} {told.aside}"))
            if mean and told and told.value is not None
            else mean
        )

    metrics = results.metrics[1:]
    columns = [Column(metric.label, _unit(metric)) for metric in metrics]
    return _by_arm(
        results, "Other metrics", columns, lambda part, arm: [cell(part, arm, m) for m in metrics]
    )


def _matched(results: Results) -> Table:
    found = {c.key: c for c in results.contrasts if c.key.place == "matched"}
    metrics = [results.metric(name) for name in dict.fromkeys(key.metric for key in found)]

    def cells(part: PartResult, arm: ArmResult) -> Cells:
        keys = [Key(part.name, arm.name, metric.name, "matched") for metric in metrics]
        return [_difference(found.get(key)) for key in keys]

    units = ["%" if metric.name == TO_MATCH else metric.unit for metric in metrics]
    columns = [Column(m.label, f"difference, {unit}") for m, unit in zip(metrics, units, strict=True)]
    return _by_arm(results, "At matched loss", columns, cells)


def _reached(results: Results) -> Table:
    """How much of the budget each arm needed to come near the untouched model."""

    def cells(part: PartResult, arm: ArmResult) -> Cells:
        needed = list(words.to_untouched(results, part, arm).values())
        found = estimate([one for one in needed if one is not None], scale="log")
        if found is None:
            return [Cell("not within the budget", kind="quiet") if needed else None]
        return [replace(_cell(found.mean, found), fine=(f"{found.n} of {counted(len(needed), 'seed')}",))]

    near = f"training {results.unit} to come within {results.within or 0:g} of the untouched model's loss"
    return _by_arm(results, near, [Column(near, "mean of the seeds that did")], cells)


def _samples(results: Results) -> Part:
    items = []
    for part, arm in _rows(results):
        sample = next((run.details["sample"] for run in arm.runs if run.details.get("sample")), None)
        if sample:
            prompt = sample.get("prompt") or ""
            text = sample["text"].removeprefix(prompt)
            cut = "…" if len(text) > LONGEST_SAMPLE else ""
            items.append((titled(arm.name, part, results), prompt, text[:LONGEST_SAMPLE] + cut))
    return Part("samples", items)


def _mistakes(results: Results) -> Table:
    columns = [Column("arm"), Column("predicted", kind="left"), Column("sure"), Column("is", kind="left")]
    rows = []
    for part, arm in _rows(results):
        for wrong in next((found for run in arm.runs if (found := run.details.get("mistakes"))), ()):
            text, sure = " ".join(wrong["text"].split()), wrong["probability"]
            cut = text[:LONGEST_MISTAKE] + "…" * (len(text) > LONGEST_MISTAKE)
            shown = [wrong["predicted"], Cell(numbers.percent(sure), sure), wrong["class"], cut]
            rows.append([titled(arm.name, part, results), *shown])
    columns.append(Column(results.unit.removesuffix("s"), kind="words"))
    return Table("The surest mistakes", columns, rows)


def _tuning(results: Results) -> Table:
    rates = sorted({trial.lr for _, arm in _rows(results) for trial in arm.tuning})

    def cells(_: PartResult, arm: ArmResult) -> Cells:
        losses = {trial.lr: trial.loss for trial in arm.tuning}
        least = min((loss for loss in losses.values() if loss is not None), default=None)
        found: Cells = []
        for rate in rates:
            loss, kind = losses.get(rate), "strong" if losses.get(rate) == least else ""
            diverged = Cell("diverged", kind="quiet") if rate in losses else None
            found.append(diverged if loss is None else Cell(number(loss), loss, kind=kind))
        return found

    columns = [Column(f"{rate:g}") for rate in rates]
    return _by_arm(results, "Validation loss by learning rate", columns, cells)


def _failed(results: Results) -> Table:
    rows = [
        [titled(arm.name, part, results), str(run.seed), run.status, run.error or ""]
        for part, arm, run in results.placed_runs
        if run.status in ("failed", "diverged")
    ]
    troubles = (trouble.split(": ", 1) for trouble in results.troubles)
    rows += [[what, "", "failed", why] for what, why in troubles]
    columns = [Column("arm"), Column("seed"), Column("what", kind="left"), Column("why", kind="words")]
    return Table("Runs that failed or diverged", columns, rows, sortable=False)


def _flat(facts: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Facts inside facts under both names."""
    flat: dict[str, Any] = {}
    for key, value in facts.items():
        name = f"{before} {key}".strip()
        flat |= _flat(value, name) if isinstance(value, Mapping) else {} if value is None else {name: value}
    return flat
