"""Evaluate a run: what its task measures, kept in its folder."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from langevin.errors import UsageError
from langevin.evaluation.attention import learned_scalars
from langevin.runs import Run
from langevin.runs.folder import check_data


def evaluate(run: Run, split: str = "test", **options: Any) -> tuple[dict[str, Any], Path | None]:
    """What the task of a run measures of its model, and the file it is kept in (None: the folder cannot be
    written to). The options are those of the task's `measure`."""
    return run.keep_evaluation(split, measured(run, run.model, split, **options))


def measured(
    run: Run, model: Any, split: str = "test", *, data: Any = None, **options: Any
) -> dict[str, Any]:
    """What the task of a run measures of any model: rows, and details that are no single numbers, what the
    model learned besides its matrices among them. data: as prepared, where they are at hand."""
    if split not in ("valid", "test"):
        raise UsageError(f"split={split!r} must be 'valid' or 'test'", "Training data are for training.")
    data = run.task.prepare(run.config) if data is None else data
    check_data(run.path, data.manifest, run.config.data)
    rows, details = run.task.measure(run, model, split, data=data, **options)
    learned = [asdict(row) for row in learned_scalars(model)]
    return {"task": run.config.task, "rows": [row.as_dict() for row in rows], "learned": learned, **details}
