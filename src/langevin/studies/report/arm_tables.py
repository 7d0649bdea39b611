"""The tables that have a row an arm: the main one, every metric, and the metrics at matched loss."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any

from langevin.studies.report.svg import Look
from langevin.studies.report.tables import Cell, Column, Head, table
from langevin.studies.results import Results, Row, comparison, done, metric_named, names_in
from langevin.studies.statistics import cost_of, summarise
from langevin.studies.words import (
    NOTHING,
    amount,
    common_spread,
    half_width,
    interval,
    number,
    probability,
    sentence_case,
)

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
    """One metric over all arms: summaries and comparisons, by arm."""

    name: str
    summaries: dict[str, Row]
    comparisons: dict[str, Row]

    @property
    def spread(self) -> float | None:
        """Which sets the digits of the whole column."""
        ends = [
            common_spread([(row.get("low"), row.get("high")) for row in rows.values()])
            for rows in (self.summaries, self.comparisons)
        ]
        return ends[0] or ends[1]

    @property
    def known(self) -> bool:
        return any(summary.get("mean") is not None for summary in self.summaries.values())

    def value(self, arm: str) -> Cell:
        """Mean and interval over seeds."""
        found = self.summaries[arm]
        between = interval(found.get("low"), found.get("high"), spread=self.spread)
        return Cell(number(found.get("mean"), self.spread), found.get("mean"), (between,))

    def difference(self, arm: str) -> Cell:
        """Paired difference to the reference and its interval."""
        c = self.comparisons.get(arm) or {}
        if c.get("difference") is None:
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
    arms = {arm["name"]: arm for arm in results["arms"]}
    compared = {arm: comparison(results, arm, name, at) for arm in arms}
    summaries = {arm: summary(of, name, at) for arm, of in arms.items()}
    return Measured(name, summaries, {arm: c for arm, c in compared.items() if c is not None})


def summary(arm: Row, name: str, at: str) -> Row:
    """The mean of a metric over seeds, at the best checkpoint with its interval."""
    if at == "best":
        return (arm.get("summary") or {}).get(name) or {}
    found = summarise(arm, [name], at).get(name, {})
    return {"mean": found.get("mean"), "n": found.get("n", 0)}


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
        cells = [found.value(arm["name"])]
        if found.comparisons:
            cells += [of(arm["name"]) for of in (found.difference, found.p, found.verdict)]
        for key, _, unit in costs:
            value = cost_of(arm, key)
            cells.append(Cell(amount(value, "B" if unit == "bytes" else ""), value))
        rows.append([_arm_head(index, arm, len(arms)), *cells])
    return table(columns, rows, f"{sentence_case(metric['label'])} and cost by arm", sortable=True)


def metrics_table(results: Results) -> str:
    """Every metric but the primary: mean, interval over seeds, paired difference and p."""
    every = [measured(results, m["name"]) for m in results["metrics"] if m["name"] != results["primary"]]
    return _stacked_table(results, [m for m in every if m.known], "The other metrics")


def matched_table(results: Results) -> str:
    """The metrics where every arm had the same validation loss."""
    names = names_in(run.get("matched") for arm in results["arms"] for run in arm["runs"])
    found = [measured(results, name, "matched") for name in names]
    return _stacked_table(results, found, "At matched loss")


def _stacked_table(results: Results, found: list[Measured], caption: str) -> str:
    if not found:
        return ""
    arms = results["arms"]
    metrics = [metric_named(results, m.name) for m in found]
    columns = [Column("arm")] + [Column(m["label"], _unit(m)) for m in metrics]
    rows: list[list[Any]] = [
        [_arm_head(index, arm, len(arms)), *(m.stacked(arm["name"]) for m in found)]
        for index, arm in enumerate(arms)
    ]
    return table(columns, rows, caption, sortable=True)


def _arm_head(index: int, arm: Row, arms: int) -> Head:
    """The name of an arm with its key in the charts, its spec and the settings that are its own."""
    fine = [arm["spec"]] if arm.get("spec") not in (None, arm["name"]) else []
    fine += [f"{key} {value}" for key, value in (arm.get("changes") or {}).items()]
    fine += ["reference"] if index == 0 and arms > 1 else []
    finished, every = len(done(arm)), len(arm["runs"])
    fine += [f"{finished} of {every} runs"] if finished < every else []
    under = "".join(f'<span class="fine">{_breakable(str(part))}</span>' for part in fine)
    name = f"<span>{_breakable(arm['name'])}{under}</span>"
    return Head(f'<span class="arm">{Look(index).swatch()}{name}</span>', arm["name"])


def _breakable(spec: str) -> str:
    """A spec that may break before its arguments and its wrappers rather than inside a word."""
    return escape(spec).replace("(", "(<wbr>").replace("+", "<wbr>+")


def _unit(metric: dict[str, str]) -> str:
    better = {"lower": "lower is better", "higher": "higher is better"}.get(metric["better"], "")
    return ", ".join(part for part in (metric["unit"], better) if part)


def _tone(verdict: str) -> str:
    return verdict if verdict in ("better", "worse") else "quiet"
