"""The numbers as files for other programs: CSV by run and by arm, and a LaTeX table."""

from __future__ import annotations

import csv
import io
import re
from typing import Any

from langevin.studies.report.arm_tables import measured, summary
from langevin.studies.report.tables import Cell
from langevin.studies.results import Results, comparison, metric_named, names_in
from langevin.studies.statistics import cost_of
from langevin.studies.words import MINUS, NOTHING, amount, with_unit


def runs_csv(results: Results) -> str:
    """One row a run: its values at the best checkpoint, at matched loss (`matched_…`), and its costs."""
    runs = [(arm, run) for arm in results["arms"] for run in arm["runs"]]
    values = names_in(run.get("values") for _, run in runs)
    matched = names_in(run.get("matched") for _, run in runs)
    best = ("step", "tokens", "valid_loss")
    cost = names_in(run.get("cost") for _, run in runs)
    head = ["arm", "spec", "seed", "status", "error", "path", *(f"best_{key}" for key in best), *values]
    head += [f"matched_{key}" for key in matched] + [f"cost_{key}" for key in cost]
    rows = []
    for arm, run in runs:
        row = [arm["name"], arm["spec"], *(run.get(key) for key in ("seed", "status", "error", "path"))]
        for part, keys in (("best", best), ("values", values), ("matched", matched), ("cost", cost)):
            row += [(run.get(part) or {}).get(key) for key in keys]
        rows.append(row)
    return _csv(head, rows)


def summary_csv(results: Results) -> str:
    """One row an arm and metric: mean and interval over seeds, paired difference to the reference and p."""
    found = ("mean", "low", "high", "n")
    compared = ("against", "pairs", "difference", "low", "high", "p", "p_adjusted", "verdict")
    head = ["arm", "metric", "label", "unit", "better", "at", *found]
    head += [f"difference_{key}" if key in ("low", "high") else key for key in compared]
    rows = []
    for arm in results["arms"]:
        places = {
            "best": arm.get("summary") or {},
            "matched": names_in(r.get("matched") for r in arm["runs"]),
        }
        for at, name in ((at, name) for at, names in places.items() for name in names):
            metric, told = metric_named(results, name), summary(arm, name, at)
            c = comparison(results, arm["name"], name, at) or {}
            row = [arm["name"], name, *(metric[key] for key in ("label", "unit", "better")), at]
            rows.append(row + [told.get(key) for key in found] + [c.get(key) for key in compared])
    return _csv(head, rows)


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
    shown = [found for name in order if (found := measured(results, name)).known]
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
