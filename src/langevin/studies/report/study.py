"""The page of a study: the answer and what shows it, then the rest, by section."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from langevin.evaluation.rows import Metric, Row
from langevin.studies import numbers, words
from langevin.studies.inference import Estimate, estimate
from langevin.studies.numbers import NOTHING, amount, counted, interval, number, sentence_case
from langevin.studies.report.page import (
    Cell,
    Chart,
    Charts,
    Code,
    Column,
    Facts,
    Page,
    Points,
    Samples,
    Section,
    Table,
)
from langevin.studies.results import COSTS, TO_MATCH, Answer, ArmResult, Contrast, Key, PartResult, Results

LONGEST_SAMPLE = 3000
ROWS_BESIDE = 10
"""A forest plot of more rows than this stands beside the text."""
MATCHED = (
    "Where each pair of runs had the same validation loss: the larger of their two best ones. Under a "
    "schedule that decays, one of the two models is in mid-schedule there, the other at its end."
)
OTHERS = (
    "Means over seeds with 95 % t intervals; under them the paired difference to the reference with its "
    "own. Only what the plan judges gets a verdict."
)
COST = "Times come from interleaved rounds and have 95 % intervals; sizes are exact. A dash: not measured."
RELIABILITY = (
    "All seeds pooled. On the dashed diagonal a model is right as often as it says; under it, too sure."
)
GRID = "Means over seeds: they describe, and nothing here is judged."
SAMPLES = "The prompt is in bold; the rest is the model's own. The first seed that has one."


def study_page(results: Results, figures: bool = True) -> Page:
    """The page of any study. Without figures it takes milliseconds, and says the same."""
    drawn: dict[str, list[Chart]] = {}
    if figures:
        from langevin.studies.report.charts import charts

        drawn = charts(results)
    facts = [counted(len(arms(results)), "arm"), counted(len(results.seeds), "seed")]
    spent = max((point.amount for run in results.runs for point in run.curve), default=0)
    facts += [f"{amount(spent)} training {results.unit} a run"] if spent else []
    facts += [str(results.data[key]) for key in ("name", "tokenizer") if results.data.get(key)]
    facts += [str(results.environment[key]) for key in ("device",) if results.environment.get(key)]
    facts += [f"exploratory: {results.exploratory}"] if results.exploratory else []
    sections = tuple(_sections(results, drawn))
    if not results.finished:
        ended = sum(run.status != "missing" for run in results.runs)
        return Page(
            results.title,
            f"{ended} of {len(results.runs)} runs have ended.",
            "Nothing is judged before all of them have; this page follows by itself.",
            facts=facts,
            hero=drawn.get("curves", [])[:2],
            table=_costs(results),
            sections=sections,
            reload=True,
        )
    return Page(
        results.title,
        results.verdict.answer,
        results.verdict.sure,
        results.verdict.more,
        facts,
        hero=drawn.get("forest", []) + drawn.get("cost", []),
        tall=len(_rows(results)) > ROWS_BESIDE,
        table=main_table(results),
        sections=sections,
    )


def arms(results: Results) -> dict[str, int]:
    """Every arm with the number of its mark, the same in all parts."""
    names = dict.fromkeys(arm.name for part in results.parts for arm in part.arms)
    return {name: index for index, name in enumerate(names)}


def _sections(results: Results, drawn: Mapping[str, list[Chart]]) -> Iterator[Section]:
    """All that there is, in reading order; of an unfinished study, what needs no verdict."""
    done = results.finished
    curves = [Charts(drawn.get("curves", [])[0 if done else 2 :]), _reached(results)]
    reliability, scalars, grids = (
        Charts(drawn.get(key, [])) for key in ("reliability", "scalars", "grids")
    )
    if done:
        yield Section("judged", "Judged contrasts", [_judged(results)], _family(results))
        yield Section("claims", "Published claims", [claims_table(results.answers)])
        yield Section("metrics", "Other metrics", [_others(results)], OTHERS)
    yield Section("curves", "Learning curves", curves)
    if done:
        yield Section("reliability", "Calibration", [reliability], RELIABILITY)
        yield Section("scalars", "Learned scalars", [scalars], "A marker a head, means over seeds.")
        yield Section("grids", "By length, depth and the like", [grids], GRID)
        yield Section("matched", "At matched loss", [_matched(results)], MATCHED)
        yield Section("samples", "Samples", [_samples(results)], SAMPLES)
        yield Section("costs", "Costs", [_costs(results)], COST)
    yield Section(
        "tuning", "Tuning", [_tuning(results)], "Validation losses, of seeds that are not judged."
    )
    yield Section("commands", "Commands", [Code(results.commands)])
    settings = [Facts(_of("Settings", part, results), _flat(part.settings)) for part in results.parts]
    told = [Facts("Environment", _flat(results.environment)), Facts("Data", _flat(results.data)), *settings]
    yield Section("versions", "Versions, data and settings", told)
    yield Section("uncontrolled", "What was not controlled", [Points(results.not_controlled)])
    yield Section("failed", "Runs that failed or diverged", [_failed(results)])


def _rows(results: Results) -> list[tuple[PartResult, ArmResult]]:
    return [(part, arm) for part in results.parts for arm in part.arms]


def _of(words: str, part: PartResult, results: Results) -> str:
    return f"{words}: {part.name}" if len(results.parts) > 1 else words


def _by_arm(
    results: Results, caption: str, columns: Sequence[Column], of: Any, sortable: bool = True
) -> Table:
    """A row an arm: its name, its part where there are several, and the cells that `of` makes of both."""
    several, marks = len(results.parts) > 1, arms(results)
    rows = []
    for part, arm in _rows(results):
        own = {key: value for key, value in arm.settings.items() if value != arm.name}
        fine = [str(value) if key == "mixer" else f"{key} {value}" for key, value in own.items()]
        head: list[Cell | str] = [Cell(arm.name, arm.name, fine=tuple(fine), arm=marks[arm.name])]
        cells = of(part, arm)
        if any(cell is not None for cell in cells):
            head += [Cell(part.name, part.name, kind="quiet")] if several else []
            rows.append(head + [Cell(NOTHING) if cell is None else cell for cell in cells])
    part_column = [Column("part", kind="left")] if several else []
    return Table(caption, [Column("arm"), *part_column, *columns], rows, sortable)


def _contrast(
    results: Results, part: PartResult, arm: ArmResult, metric: str, place: Any = "best"
) -> Contrast | None:
    return results.contrast(Key(part.name, arm.name, metric, place))


def main_table(results: Results) -> Table:
    """The primary metric with its paired difference, and beside it what each arm costs."""
    metric = results.primary
    means = numbers.common_spread([_ends(arm.estimate(metric)) for _, arm in _rows(results)])
    own = [c for c in results.contrasts if c.key.metric == metric.name and c.key.place == "best"]
    spread = numbers.common_spread([(c.low, c.high) for c in own])
    shown = [name for name in ("parameters", "time_ratio", "peak_memory_bytes") if _measured(results, name)]

    def cells(part: PartResult, arm: ArmResult) -> list[Cell | None]:
        found = _contrast(results, part, arm, metric.name)
        judged = [Cell("reference", kind="quiet"), None, None]
        if arm is not part.reference:
            judged = [None, None, None]
        if found is not None:
            p = (
                None
                if found.p_adjusted is None
                else Cell(numbers.probability(found.p_adjusted), found.p_adjusted)
            )
            judged = [difference(results, found, spread), p, _state(results, found)]
        return [_mean(arm, metric, means), *judged, *(_cost(arm.cost(name)) for name in shown)]

    against = numbers.listed(dict.fromkeys(part.reference.name for part in results.parts))
    columns = [
        Column(metric.label, _unit(metric)),
        Column(f"difference to {against}", metric.unit),
        Column("p", "adjusted"),
        Column("state", kind="left"),
        *(_cost_column(name) for name in shown),
    ]
    return _by_arm(results, f"{sentence_case(metric.label)} and cost by arm", columns, cells)


def _ends(found: Estimate | None) -> tuple[float | None, float | None]:
    return (None, None) if found is None else (found.low, found.high)


def _mean(arm: ArmResult, metric: Metric, spread: float | None, under: Sequence[str] = ()) -> Cell | None:
    found = arm.estimate(metric)
    if found is None:
        return None
    if not math.isfinite(found.mean):
        diverged = sum(run.status == "diverged" for run in arm.runs)
        return Cell(
            "diverged", aside=f"{diverged} of {counted(found.n, 'run')}", fine=tuple(under), kind="quiet"
        )
    shown = number(found.mean, spread)
    shown = f"≤ {shown}" if arm.kind(metric.name) == "bound" else shown
    return Cell(shown, found.mean, interval(found.low, found.high, spread=spread), tuple(under))


def difference(results: Results, contrast: Contrast, spread: float | None = None) -> Cell:
    """An arm's paired difference with its interval; amounts and trends as a share."""
    value, low, high = contrast.difference, contrast.low, contrast.high
    if value is None:
        return Cell("diverged" if contrast.pairs else NOTHING, kind="quiet")
    if contrast.key.metric == TO_MATCH or contrast.key.place == "trend":
        ends = [None if end is None else 100 * end for end in (low, high)]
        wide = numbers.half_width(*ends)
        return Cell(f"{number(100 * value, wide, sign=True)} %", value, interval(*ends, sign=True))
    wide = spread or numbers.half_width(low, high)
    return Cell(number(value, wide, sign=True), value, interval(low, high, sign=True, spread=wide))


def _state(results: Results, contrast: Contrast) -> Cell:
    kinds = {"better": "good", "worse": "bad", "lower": "strong", "higher": "strong", "as good": "strong"}
    longer = {
        "as good": f"as good as {contrast.against}",
        "does not survive": f"does not survive {counted(len(results.judged), 'contrast')}",
        "too few": "too few seeds",
    }
    return Cell(
        longer.get(contrast.state, contrast.state), contrast.state, kind=kinds.get(contrast.state, "quiet")
    )


def _unit(metric: Metric) -> str:
    good = {"lower": "lower is good", "higher": "higher is good"}.get(metric.better, "")
    return ", ".join(part for part in (metric.unit, good) if part)


def _measured(results: Results, name: str) -> bool:
    return any(arm.cost(name) for _, arm in _rows(results))


def _cost_column(name: str) -> Column:
    metric = COSTS.get(name, Metric(name, name.replace("_", " "), "", "lower"))
    return Column(metric.label, "" if metric.unit == "B" else metric.unit)


def _cost(row: Row | None) -> Cell | None:
    if row is None:
        return None
    unit = "B" if row.metric.endswith("_bytes") else ""
    large = abs(row.value) >= 1000
    shown = amount(row.value, unit) if large else number(row.value, numbers.half_width(row.low, row.high))
    ends = interval(row.low, row.high)
    if large and row.low is not None and row.high is not None:
        ends = f"[{amount(row.low, unit)}, {amount(row.high, unit)}]"
    return Cell(shown, row.value, ends, tuple(f"{key} {value}" for key, value in row.at.items()))


def _costs(results: Results) -> Table:
    names = list(dict.fromkeys(row.metric for _, arm in _rows(results) for row in arm.costs))
    columns = [_cost_column(name) for name in names]
    return _by_arm(
        results, "Costs by arm", columns, lambda _, arm: [_cost(arm.cost(name)) for name in names]
    )


def _judged(results: Results) -> Table:
    rows = [
        [
            words.contrast_in_words(results, c),
            str(c.pairs),
            numbers.probability(c.p),
            numbers.probability(c.p_adjusted),
        ]
        for c in results.judged
    ]
    columns = [
        Column("contrast", kind="words"),
        Column("pairs"),
        Column("p", "alone"),
        Column("p", "adjusted"),
    ]
    return Table("Judged contrasts", columns, rows, sortable=False)


def _family(results: Results) -> str:
    return (
        "Fixed by the plan. Exact sign-flip p over pairs of the same seed, alone and after Holm's correction "
        f"for {counted(len(results.judged), 'contrast')}; at or under 0.05 is confirmed. A run that diverged "
        "ranks after every run that did not."
    )


def claims_table(answers: Sequence[Answer]) -> Table:
    heads = ["claim", "published", "direction", "ours"]
    rows = [
        [
            Cell(answer.claim, fine=(answer.part,) if answer.part else ()),
            answer.published,
            answer.direction,
            answer.ours,
        ]
        for answer in answers
    ]
    columns = [Column(head, kind="left" if head == "direction" else "words") for head in heads]
    return Table("Published claims and what was seen", columns, rows, sortable=False)


def _others(results: Results) -> Table:
    shown = [m for m in results.metrics[1:] if any(arm.estimate(m) for _, arm in _rows(results))]

    def cells(part: PartResult, arm: ArmResult) -> list[Cell | None]:
        made = []
        for metric in shown:
            found = _contrast(results, part, arm, metric.name)
            told = found and difference(results, found)
            under = [f"{told.shown} {told.aside}"] if told else []
            made.append(_mean(arm, metric, numbers.half_width(*_ends(arm.estimate(metric))), under))
        return made

    return _by_arm(results, "The other metrics", [Column(m.label, _unit(m)) for m in shown], cells)


def _matched(results: Results) -> Table:
    seen = [c.key.metric for c in results.contrasts if c.key.place == "matched"]
    shown = [results.metric(name) for name in dict.fromkeys(seen)]

    def cells(part: PartResult, arm: ArmResult) -> list[Cell | None]:
        found = [_contrast(results, part, arm, metric.name, "matched") for metric in shown]
        return [None if c is None else difference(results, c) for c in found]

    columns = [
        Column(
            m.label, "difference, % of the reference's" if m.name == TO_MATCH else f"difference, {m.unit}"
        )
        for m in shown
    ]
    return _by_arm(results, "At matched loss", columns, cells)


def _reached(results: Results) -> Table:
    """How much of the budget each arm needed to come near the untouched model."""

    def cells(part: PartResult, arm: ArmResult) -> list[Cell | None]:
        untouched = part.untouched and part.untouched.best
        if untouched is None or results.within is None or not arm.done:
            return [None, None]
        needed = [run.amount_to(untouched.loss + results.within) for run in arm.done]
        reached = [float(one) for one in needed if one is not None]
        seeds = Cell(f"{len(reached)} of {len(needed)}", len(reached))
        found = estimate(reached)
        if found is None:
            return [Cell("not within the budget", kind="quiet"), seeds]
        ends = (
            ""
            if found.low is None or found.high is None
            else f"[{amount(max(0.0, found.low))}, {amount(found.high)}]"
        )
        return [Cell(amount(found.mean), found.mean, ends), seeds]

    near = f"{number(results.within)} of the untouched model's validation loss" if results.within else ""
    columns = [
        Column(f"training {results.unit} to within {near}", "mean of the seeds that came there"),
        Column("seeds", "that came there"),
    ]
    return _by_arm(results, f"Training {results.unit} to the untouched model's loss", columns, cells)


def _samples(results: Results) -> Samples:
    items = []
    for part, arm in _rows(results):
        sample = next((run.details["sample"] for run in arm.runs if run.details.get("sample")), None)
        if sample:
            prompt, text = sample.get("prompt") or "", sample["text"]
            text = text.removeprefix(prompt)
            cut = "…" if len(text) > LONGEST_SAMPLE else ""
            items.append((_of(arm.name, part, results), prompt, text[:LONGEST_SAMPLE] + cut))
    return Samples(items)


def _tuning(results: Results) -> Table:
    rates = sorted({trial.lr for _, arm in _rows(results) for trial in arm.tuning})

    def cells(_: PartResult, arm: ArmResult) -> list[Cell | None]:
        losses = {trial.lr: trial.loss for trial in arm.tuning}
        least = min((loss for loss in losses.values() if loss is not None), default=None)
        return [
            None
            if lr not in losses
            else Cell("diverged", kind="quiet")
            if losses[lr] is None
            else Cell(number(losses[lr]), losses[lr], kind="strong" if losses[lr] == least else "")
            for lr in rates
        ]

    columns = [Column(f"{rate:g}", "learning rate") for rate in rates]
    return _by_arm(results, "Validation loss by learning rate; the chosen one is strong", columns, cells)


def _failed(results: Results) -> Table:
    rows = [
        [_of(arm.name, part, results), str(run.seed), run.status, run.error or ""]
        for part, arm in _rows(results)
        for run in arm.runs
        if run.status in ("failed", "diverged")
    ]
    columns = [Column("arm"), Column("seed"), Column("what", kind="left"), Column("why", kind="words")]
    return Table("Runs that failed or diverged", columns, rows, sortable=False)


def _flat(facts: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Facts inside facts under both names."""
    flat: dict[str, Any] = {}
    for key, value in facts.items():
        name = f"{before} {key}".strip()
        flat |= _flat(value, name) if isinstance(value, Mapping) else {} if value is None else {name: value}
    return flat
