"""The page and its numbers as files, each whole or not at all."""

import csv
import io
import json
import math
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from langevin.evaluation.rows import Row
from langevin.runs.files import not_written, write_text
from langevin.studies.numbers import MINUS, NOTHING
from langevin.studies.report.page import Cell, Table, render
from langevin.studies.report.study import BOUND, main_table, study_page
from langevin.studies.results import Key, Results


def write_report(results: Results, folder: Path) -> Path:
    """Write report.html, results.json, results.csv, summary.csv and table.tex; return the page's path.

    A number that is not finite is written as null: JSON has no such number.
    """
    files = {
        "results.json": json.dumps(_plain(asdict(results)), indent=1, ensure_ascii=False) + "\n",
        "results.csv": _runs_csv(results),
        "report.html": render(study_page(results)),
    }
    if results.finished:  # before, nothing is compared
        files["summary.csv"] = _summary_csv(results)
        files["table.tex"] = _latex_table(results.title, main_table(results))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise not_written(folder, error) from error
    for name, content in files.items():
        write_text(folder / name, content)
    return folder / "report.html"


def _plain(value: Any) -> Any:
    """The same value in JSON's own types: numpy numbers become Python's, NaN and infinity null."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value) if isinstance(value, Path) else value


def _csv(head: list[str], rows: list[list[Any]]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([head, *_plain(rows)])
    return file.getvalue()


def _runs_csv(results: Results) -> str:
    """A row for every run and each thing that was measured of it."""
    head = ["part", "arm", "seed", "status", *(field.name for field in fields(Row))]
    rows = []
    for part, arm, run in results.placed_runs:
        own = [part.name, arm.name, run.seed, run.status]
        measured = [{**asdict(row), "at": json.dumps(row.at)} for row in run.rows]
        rows += [own + list(row.values()) for row in measured or [{}]]
    return _csv(head, rows)


def _summary_csv(results: Results) -> str:
    """A row for every arm and metric, at each place: its kind (exact, bound, diagnostic), its mean over
    seeds, its contrast to the reference."""
    found = ["mean", "low", "high", "n"]
    compared = ["against", "pairs", "difference", "low", "high", "relative", "p", "p_adjusted", "state"]
    head = ["part", "arm", "metric", "place", "kind", *found]
    head += [f"difference_{name}" if name in found else name for name in compared]
    contrasts = {contrast.key: contrast for contrast in results.contrasts}
    means = {
        Key(part.name, arm.name, metric.name): mean
        for part in results.parts
        for arm in part.arms
        for metric in results.metrics
        if (mean := arm.estimate(metric)) is not None
    }
    rows = [
        [key.part, key.arm, key.metric, key.place, results.arms(key)[0].kind(key.metric)]
        + [getattr(means.get(key), name, None) for name in found]
        + [getattr(contrasts.get(key), name, None) for name in compared]
        for key in dict.fromkeys([*means, *contrasts])
    ]
    return _csv(head, rows)


LATEX = {mark: f"\\{mark}" for mark in "&%$#_{}"} | {MINUS: "$-$", NOTHING: "--", "×": r"$\times$"}
LATEX |= {"≤": r"$\le$", "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
LATEX |= {"<": r"\textless{}", ">": r"\textgreater{}", "'": r"\textquotesingle{}", '"': "''", "\n": " "}


def _latex(words: str) -> str:
    return "".join(LATEX.get(mark, mark) for mark in words)


def _latex_table(title: str, table: Table) -> str:
    """The first table of the page, with booktabs."""
    heads = [f"{column.label} ({column.unit})" if column.unit else column.label for column in table.columns]
    lines = [heads]
    for row in table.rows:
        cells = [cell if isinstance(cell, Cell) else Cell(cell) for cell in row]
        lines.append([f"{'≤ ' * (BOUND in cell.fine)}{cell.shown} {cell.aside}".strip() for cell in cells])
    head, *body = [" & ".join(map(_latex, line)) + r" \\" for line in lines]
    begin = f"% {_latex(title)}; needs \\usepackage{{booktabs}}; intervals are 95 %\n"
    begin += "\\begin{tabular}{l" + "r" * (len(heads) - 1) + "}\n\\toprule"
    return "\n".join([begin, head, "\\midrule", *body, "\\bottomrule", "\\end{tabular}", ""])
