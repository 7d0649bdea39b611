"""Write the report and its numbers into a folder, each file whole or not at all."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from langevin.errors import UsageError
from langevin.runs.files import not_written, write_text
from langevin.studies.report.exports import latex_table, runs_csv, summary_csv
from langevin.studies.report.page import page

NEEDED = ("title", "primary", "metrics", "arms")


def write_report(results: dict[str, Any], folder: Path) -> Path:
    """Write report.html, results.json, results.csv, summary.csv and table.tex; return the page's path.

    A number that is not finite is written as null, in the page as a dash: JSON has no NaN, and a
    mean over a diverged run is not a mean.
    """
    missing = [key for key in NEEDED if key not in results]
    if missing:
        raise UsageError(
            f"these results have no {', '.join(missing)}",
            "Give the results of langevin compare or reproduce.",
        )
    results = _plain(results)
    files = {
        "results.json": json.dumps(results, indent=1, ensure_ascii=False, allow_nan=False) + "\n",
        "results.csv": runs_csv(results),
        "summary.csv": summary_csv(results),
        "table.tex": latex_table(results),
        "report.html": page(results),
    }
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
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, Path):
        return str(value)
    number = value.item() if hasattr(value, "item") else value
    if isinstance(number, float):
        return number if math.isfinite(number) else None
    if isinstance(number, bool | int):
        return number
    raise UsageError(
        f"a report cannot hold a {type(value).__name__}: {value!r}", "Give numbers, text, lists or dicts."
    )
