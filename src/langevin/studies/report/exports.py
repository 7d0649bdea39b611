"""The numbers as files for other programs: CSV by run and by arm, and a LaTeX table."""

from __future__ import annotations

import csv
import io
import re
from typing import Any

from langevin.studies.report.arm_tables import measured
from langevin.studies.report.numbers import MINUS, NOTHING, amount, mean
from langevin.studies.report.reading import Results, comparison, metric_named, with_unit
from langevin.studies.report.tables import Cell
from langevin.studies.statistics import cost_of


def runs_csv(results: Results) -> str:
    """One row a run: its values at the best checkpoint, at matched loss (`matched_…`), and its costs."""
    runs = [(arm, run) for arm in results["arms"] for run in arm["runs"]]
    values = _keys(run.get("values") for _, run in runs)
    matched = _keys(run.get("matched") for _, run in runs)
    best = ("step", "tokens", "valid_loss")
    cost = _keys(run.get("cost") for _, run in runs)
    head = ["arm", "spec", "seed", "status", "error", "path", *(f"best_{key}" for key in best), *values]
    head += [f"matched_{key}" for key in matched] + [f"cost_{key}" for key in cost]
    rows = []
    for arm, run in runs:
        row = [arm["name"], arm["spec"], *(run.get(key) for key in ("seed", "status", "error", "path"))]
        for part, keys in (("best", best), ("values", values), ("matched", matched), ("cost", cost)):
            row += [(run.get(part) or {}).get(key) for key in keys]
        rows.append(row)
    return _csv(head, rows)


SUMMARY_HEAD = ["arm", "metric", "label", "unit", "better", "at", "mean", "low", "high", "n"]
COMPARED = [
    "against",
    "pairs",
    "difference",
    "difference_low",
    "difference_high",
    "p",
    "p_adjusted",
    "verdict",
]


def summary_csv(results: Results) -> str:
    """One row an arm and metric: mean and interval over seeds, paired difference to the reference and p."""
    rows = []
    for arm in results["arms"]:
        for at, name, found in _summaries(arm):
            m = metric_named(results, name)
            c = comparison(results, arm["name"], name, at) or {}
            shown = [found.get(key) for key in ("mean", "low", "high", "n")]
            compared = [c.get(key.removeprefix("difference_")) for key in COMPARED]
            rows.append([arm["name"], name, m["label"], m["unit"], m["better"], at, *shown, *compared])
    return _csv(SUMMARY_HEAD + COMPARED, rows)


def _summaries(arm: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    found: list[tuple[str, str, dict[str, Any]]] = [
        ("best", name, summary or {}) for name, summary in (arm.get("summary") or {}).items()
    ]
    for name in _keys(run.get("matched") for run in arm["runs"]):
        values = [v for run in arm["runs"] if (v := (run.get("matched") or {}).get(name)) is not None]
        found.append(("matched", name, {"mean": mean(values), "n": len(values)}))
    return found


def _keys(parts: Any) -> list[str]:
    names: dict[str, None] = {}
    for part in parts:
        names.update(dict.fromkeys(part or {}))
    return list(names)


def _csv(head: list[str], rows: list[list[Any]]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    return file.getvalue()


def latex_table(results: Results) -> str:
    """A booktabs table: every metric with its interval, then the primary difference, p and the costs."""
    primary = results["primary"]
    order = sorted((m["name"] for m in results["metrics"]), key=lambda name: name != primary)
    found = [measured(results, name) for name in order]
    shown = [m for m in found if any(s.get("mean") is not None for s in m.summaries.values())]
    judged, named = measured(results, primary), metric_named(results, primary)
    heads = ["arm", *(_headed(metric_named(results, m.name)) for m in shown)]
    heads += [f"difference in {_headed(named)}", "$p$", "parameters", "tokens/s"]
    lines = [
        "% needs \\usepackage{booktabs}; intervals are 95 %",
        f"% {_latex(results['title'])}",
        "\\begin{tabular}{l" + "r" * (len(heads) - 1) + "}",
        "\\toprule",
        " & ".join(heads) + r" \\",
        "\\midrule",
    ]
    for arm in results["arms"]:
        name = arm["name"]
        cells = [name, *(_in_a_line(m.value(name)) for m in shown)]
        cells += [_in_a_line(judged.difference(name)), judged.p(name).shown]
        cells += [amount(cost_of(arm, key)) for key in ("parameters", "tokens_per_second")]
        lines.append(" & ".join(map(_latex, cells)) + r" \\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", ""])


def _headed(metric: dict[str, str]) -> str:
    return _latex(with_unit(metric["label"], metric["unit"]))


def _in_a_line(cell: Cell) -> str:
    return " ".join([cell.shown, *cell.fine]).strip()


SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    '"': "''",
    "'": r"\textquotesingle{}",
    MINUS: "$-$",
    NOTHING: "--",
    "\n": " ",
    **{mark: "\\" + mark for mark in "&%$#_{}"},
}


def _latex(words: str) -> str:
    return re.sub("|".join(map(re.escape, SPECIAL)), lambda found: SPECIAL[found.group()], words)
