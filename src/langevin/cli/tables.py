"""How commands show things: tables and consoles."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from langevin.errors import UsageError

WIDEST = 12  # classes of a confusion matrix that is printed
LONGEST = 80  # characters of a text


def console_for(stderr: bool = False) -> Console:
    """Wide enough for a table when the output is a file. A class named `:smile:` is shown as it is."""
    console = Console(stderr=stderr, highlight=False, emoji=False)
    if not console.is_terminal:
        console = Console(stderr=stderr, highlight=False, emoji=False, width=140)
    return console


def table_of(title: str | None = None, *columns: str, left: int = 1) -> Table:
    """A table whose first columns stand to the left, the others to the right."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i < left else "right", no_wrap=True)
    return table


def print_rows(rows: list[dict[str, Any]], as_json: bool = False) -> None:
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table(*(rows[0] if rows else ()), box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    console_for().print(table)


def print_pairs(pairs: dict[str, Any]) -> None:
    table = Table(box=box.SIMPLE_HEAD, show_header=False)
    for name, value in pairs.items():
        if value is not None:
            table.add_row(name, f"{value:,}" if isinstance(value, int) else str(value))
    console_for().print(table)


def interval(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"{low:.4f} to {high:.4f}"


def quality_table(rows: list[dict[str, Any]], task: Any) -> Table:
    """Sets of texts beside each other: real ones, those of each temperature, and what lies between two of
    these at the entropy of real text."""
    from langevin.evaluation.quality import COSTS, DIVERSITY, QUALITY, REAL

    places: list[dict[str, Any]] = [REAL]
    places += [row["at"] for row in rows if row["metric"] == "judge_gap" and row["at"]] + [{}]
    heads = ["real text", *(f"at {at['temperature']:g}" for at in places[1:-1]), "at real entropy"]
    table = table_of("What it writes", "", *heads)
    for title, names in (
        ("quality", ("judge_nll", *QUALITY)),
        ("diversity, not quality", DIVERSITY),
        ("cost", COSTS),
    ):
        table.add_section()
        table.add_row(f"[bold]{title}[/]")
        for name in names:
            metric = task.metric(name)
            found = [r for at in places for r in [_at(rows, name, at)]]
            shown = ["" if row is None else f"{row['value']:.{3 + (row['value'] < 1)}f}" for row in found]
            table.add_row(f"{metric.label} ({metric.unit})" if metric.unit else metric.label, *shown)
            if name == "judge_gap":
                ends = ["" if row is None else f"{row['low']:.2f} to {row['high']:.2f}" for row in found]
                table.add_row("  95 % interval", *ends)
    return table


def class_tables(result: dict[str, Any], task: Any) -> Iterator[Table]:
    """Of a classifier: scores by class, what was said of which class, and the surest mistakes."""
    names, counts = result["confusion"]["classes"], result["confusion"]["counts"]
    table = table_of("By class", "class", "precision", "recall", "F1", "examples")
    for name, row in zip(names, counts, strict=True):
        found = [_at(result["rows"], metric, {"class": name}) for metric in ("precision", "recall", "f1")]
        table.add_row(escape(name), *(f"{score['value']:.3f}" for score in found if score), str(sum(row)))
    yield table
    if len(names) <= WIDEST:
        table = table_of("What was said (columns) of each class (rows)", "", *map(escape, names))
        for name, row in zip(names, counts, strict=True):
            table.add_row(escape(name), *map(str, row))
    else:
        table = table_of("Most often confused", "class", "predicted", "examples", left=2)
        cells = [(row[j], a, b) for a, row in zip(names, counts, strict=True) for j, b in enumerate(names)]
        for count, one, other in sorted((c for c in cells if c[0] and c[1] != c[2]), reverse=True)[:10]:
            table.add_row(escape(one), escape(other), str(count))
    yield table
    table = table_of("The surest mistakes", "predicted", "sure", "is", task.reads, left=4)
    for wrong in result["mistakes"]:
        words = [wrong["predicted"], f"{wrong['probability']:.1%}", wrong["class"], wrong["text"][:LONGEST]]
        table.add_row(*(escape(" ".join(word.split())) for word in words))
    if result["mistakes"]:
        yield table


def grid_tables(rows: list[dict[str, Any]], task: Any) -> Iterator[Table]:
    """What was measured over two coordinates, a table for each pair of them."""
    pairs = dict.fromkeys((row["metric"], *row["at"]) for row in rows if len(row["at"]) == 2)
    for metric, down, across in pairs:
        found = {
            tuple(row["at"].values()): row["value"]
            for row in rows
            if (row["metric"], *row["at"]) == (metric, down, across)
        }
        names, columns = (list(dict.fromkeys(sorted(place[i] for place in found))) for i in (0, 1))
        title = f"{task.metric(metric).label} by {down} (rows) and {across}"
        table = table_of(title, "", *(f"{column:,}" for column in columns))
        for name in names:
            shown = (found.get((name, column)) for column in columns)
            table.add_row(f"{name:,}", *("" if value is None else f"{value:.3f}" for value in shown))
        yield table


def _at(rows: list[dict[str, Any]], name: str, at: dict[str, Any]) -> dict[str, Any] | None:
    return next((row for row in rows if row["metric"] == name and row["at"] == at), None)


def check_folder(place: Path | None) -> None:
    """What is written at the end must have a folder from the beginning."""
    if place is not None and ("\0" in str(place) or not place.parent.is_dir()):
        raise UsageError(f"no such folder: {place.parent}", "Make it first.")


def check_file(file: Path | None) -> None:
    """A file that is written at the end must have a place from the beginning."""
    check_folder(file)
    if file is None:
        return
    if file.is_dir():
        raise UsageError(f"{file} is a folder", "Name a file in it.")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise UsageError(f"{file} cannot be written", "Choose another place.")


def write_numbers(result: dict[str, Any], file: Path | None) -> None:
    if file is not None:
        file.write_text(json.dumps(result, indent=1) + "\n")
        console_for(stderr=True).print(f"wrote {file}")


def show(title: str, task: Any, result: dict[str, Any], elsewhere: list[Any] | None = None) -> None:
    """What was measured, but for rows that are shown elsewhere."""
    table = table_of(title, "metric", "value", "95 % interval")
    table.columns[0].no_wrap = False  # where it is narrow, words fold before numbers are cut
    rows = [row for row in result["rows"] if row not in (elsewhere or ()) and "class" not in row["at"]]
    passed = 0  # positions in the ranges so far
    for row in rows:
        if len(row["at"]) > 1:
            continue
        metric = task.metric(row["metric"])
        label = f"{metric.label} ({metric.unit})" if metric.unit else metric.label
        label += " (upper bound)" if row["kind"] == "bound" else ""
        if not row["at"] and "at" in result:
            label += f", at length {result['at']:,}"
        for name, place in row["at"].items():
            if name == "position":
                label, passed = f"{label}, positions {passed + 1:,}–{place:,}", place
            else:
                label += f", {place:.0%} taken" if name == "gap" else f", {name} {place:,}"
            label += " (training)" if (name, place) == ("length", result.get("context")) else ""
        table.add_row(label, f"{row['value']:.4f}", interval(row["low"], row["high"]))
    console_for().print(table)
    for more in grid_tables(rows, task):
        console_for().print(more)
    for more in class_tables(result, task) if "confusion" in result else ():
        console_for().print(more)
