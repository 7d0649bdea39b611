"""Evaluate a run: what its task measures, kept in its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from langevin.data import same_data
from langevin.errors import UsageError
from langevin.runs import Run


def evaluate(run: Run, split: str = "test", **options: Any) -> tuple[dict[str, Any], Path | None]:
    """What the task of a run measures of its model, and the file it is kept in (None: the folder cannot be
    written to). The options are those of the task's `measure`."""
    best = [row for row in run.metrics("valid") if row.get("best")]
    result = {"step": best[-1]["step"] if best else None, **measured(run, run.model, split, **options)}
    path = run.path / f"evaluation-{split}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return result, path


def measured(run: Run, model: Any, split: str = "test", **options: Any) -> dict[str, Any]:
    """What the task of a run measures of any model: rows, and details that are no single numbers."""
    data = run.task.prepare(run.config)
    changed = same_data(run.environment["data"], data.manifest)
    if changed is not None:
        raise UsageError(
            f"{changed} of {run.config.data} is not what {run.path} was trained with",
            "Bring the same data back, or train again.",
        )
    rows, details = run.task.measure(run, model, split, data=data, **options)
    return {"task": run.config.task, "split": split, "rows": [row.as_dict() for row in rows], **details}
