"""The tables that have a row an arm: the main one, every metric, and the metrics at matched loss."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any

from langevin.studies.report.numbers import (
    NOTHING,
    amount,
    common_spread,
    half_width,
    interval,
    mean,
    number,
    probability,
    sentence_case,
)
from langevin.studies.report.reading import Results, comparison, metric_named
from langevin.studies.report.svg import Look
from langevin.studies.report.tables import Cell, Column, Row, table
from langevin.studies.statistics import cost_of

COST_COLUMNS = (
    ("parameters", "size", "parameters"),
    ("flops_per_token", "work", "FLOP/token"),
    ("tokens_per_second", "training", "tokens/s"),
    ("peak_memory_bytes", "peak memory", "bytes"),
    ("state_bytes", "decoding state", "bytes"),
    ("decode_ms_per_token", "decoding", "ms/token"),
)


@dataclass(frozen=True)
class Measured:
    """One metric over all arms: summaries and comparisons by arm, and the spread that sets the digits."""

    name: str
    summaries: dict[str, dict[str, Any]]
    comparisons: dict[str, dict[str, Any]]
    spread: float | None

    def value(self, arm: str) -> Cell:
        """Mean and interval over seeds."""
        found = self.summaries.get(arm)
        if not found or found.get("mean") is None:
            return Cell(NOTHING)
        between = interval(found.get("low"), found.get("high"), spread=self.spread)
        return Cell(number(found["mean"], self.spread), found["mean"], (between,))

    def difference(self, arm: str) -> Cell:
        """Paired difference to the reference and its interval."""
        c = self.comparisons.get(arm)
        if c is None or c.get("difference") is None:
            return Cell(NOTHING)
        low, high = c.get("low"), c.get("high")
        shown = number(c["difference"], half_width(low, high), sign=True)
        return Cell(shown, c["difference"], (interval(low, high, sign=True),))

    def p(self, arm: str) -> Cell:
        c = self.comparisons.get(arm) or {}
        adjusted = f"{probability(c['p_adjusted'])} Holm" if c.get("p_adjusted") is not None else ""
        return Cell(probability(c.get("p")), c.get("p"), (adjusted,))

    def verdict(self, arm: str) -> Cell:
        found = (self.comparisons.get(arm) or {}).get("verdict")
        return Cell(found, found, kind=f"wrap {_tone(found)}") if found else Cell(NOTHING)

    def stacked(self, arm: str) -> Cell:
        """All of it in one cell, line by line."""
        value, difference, p = self.value(arm), self.difference(arm), self.p(arm)
        if difference.value is None:
            return Cell(value.shown, value.value, value.fine, "stacked")
        judged = str(self.comparisons[arm]["verdict"])
        told = [f"p {p.shown}"] if p.value is not None else []
        told += [judged] if judged in ("better", "worse") else []
        fine = (*value.fine, f"Δ {difference.shown}", *difference.fine, ", ".join(told))
        return Cell(value.shown, value.value, fine, f"stacked {_tone(judged)}")


def measured(results: Results, name: str, at: str = "best") -> Measured:
    summaries = {}
    for arm in results["arms"]:
        if at == "best":
            summaries[arm["name"]] = (arm.get("summary") or {}).get(name) or {}
        else:
            found = [(run.get("matched") or {}).get(name) for run in arm["runs"]]
            summaries[arm["name"]] = {"mean": mean([value for value in found if value is not None])}
    compared = {arm["name"]: comparison(results, arm["name"], name, at) for arm in results["arms"]}
    comparisons = {arm: c for arm, c in compared.items() if c is not None}
    of_differences = common_spread([(c.get("low"), c.get("high")) for c in comparisons.values()])
    of_means = common_spread([(s.get("low"), s.get("high")) for s in summaries.values()])
    return Measured(name, summaries, comparisons, of_means or of_differences)


def main_table(results: Results) -> str:
    """The primary metric with its paired difference, and beside it what each arm costs."""
    metric = metric_named(results, results["primary"])
    found = measured(results, metric["name"])
    arms = results["arms"]
    costs = [column for column in COST_COLUMNS if any(cost_of(arm, column[0]) is not None for arm in arms)]
    columns = [Column("arm"), Column(metric["label"], _unit(metric))]
    if found.comparisons:
        against = next(iter(found.comparisons.values()))["against"]
        columns += [Column(f"difference to {against}", metric["unit"]), Column("p"), Column("verdict")]
    columns += [Column(label, unit) for _, label, unit in costs]
    rows = []
    for index, arm in enumerate(arms):
        name = arm["name"]
        cells = [found.value(name)]
        if found.comparisons:
            cells += [found.difference(name), found.p(name), found.verdict(name)]
        cells += [Cell(_cost(unit, value := cost_of(arm, key)), value) for key, _, unit in costs]
        rows.append(Row(_arm_head(index, arm, len(arms)), cells))
    return table(columns, rows, f"{sentence_case(metric['label'])} and cost by arm", sortable=True)


def metrics_table(results: Results) -> str:
    """Every metric but the primary: mean, interval over seeds, paired difference and p."""
    every = [measured(results, m["name"]) for m in results["metrics"] if m["name"] != results["primary"]]
    shown = [m for m in every if any(s.get("mean") is not None for s in m.summaries.values())]
    return _stacked_table(results, shown, "The other metrics")


def matched_table(results: Results) -> str:
    """The metrics where every arm had the same validation loss."""
    names: dict[str, None] = {}
    for arm in results["arms"]:
        for run in arm["runs"]:
            names.update(dict.fromkeys(run.get("matched") or {}))
    return _stacked_table(
        results, [measured(results, name, "matched") for name in names], "At matched loss"
    )


def _stacked_table(results: Results, found: list[Measured], caption: str) -> str:
    if not found:
        return ""
    arms = results["arms"]
    metrics = [metric_named(results, m.name) for m in found]
    columns = [Column("arm")] + [Column(m["label"], _unit(m)) for m in metrics]
    rows = [
        Row(_arm_head(index, arm, len(arms)), [m.stacked(arm["name"]) for m in found])
        for index, arm in enumerate(arms)
    ]
    return table(columns, rows, caption, sortable=True)


def _arm_head(index: int, arm: dict[str, Any], arms: int) -> str:
    """The name of an arm with its key in the charts, its spec and the settings that are its own."""
    fine = [arm["spec"]] if arm.get("spec") not in (None, arm["name"]) else []
    fine += [f"{key} {value}" for key, value in (arm.get("changes") or {}).items()]
    fine += ["reference"] if index == 0 and arms > 1 else []
    done = sum(run["status"] == "done" for run in arm["runs"])
    fine += [f"{done} of {len(arm['runs'])} runs"] if done < len(arm["runs"]) else []
    under = "".join(f'<span class="fine">{_breakable(str(part))}</span>' for part in fine)
    return (
        f'<th scope="row" data-value="{escape(arm["name"])}"><span class="arm">{Look(index).swatch()}'
        f"<span>{_breakable(arm['name'])}{under}</span></span></th>"
    )


def _breakable(spec: str) -> str:
    """A spec that may break before its arguments and its wrappers rather than inside a word."""
    return escape(spec).replace("(", "(<wbr>").replace("+", "<wbr>+")


def _cost(unit: str, value: float | None) -> str:
    return amount(value, "B" if unit == "bytes" else "")


def _unit(metric: dict[str, str]) -> str:
    better = {"lower": "lower is better", "higher": "higher is better"}.get(metric["better"], "")
    return ", ".join(part for part in (metric["unit"], better) if part)


def _tone(verdict: str) -> str:
    return verdict if verdict in ("better", "worse") else "quiet"
