"""What a comparison can be about: the metrics of its task, and those of the comparison itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from langevin.errors import UsageError, unknown
from langevin.evaluation.rows import Metric
from langevin.tasks import TASKS

OWN = (
    Metric("valid_loss", "best validation loss", "nats/token", "lower"),
    Metric("tokens_to_match", "training tokens to the matched validation loss", "tokens", "lower"),
)


def known(task: str) -> dict[str, Metric]:
    """The metrics of a comparison on a task, by name."""
    return {metric.name: metric for metric in (*TASKS.parse(task).metrics, *OWN)}


def chosen(task: str, names: Iterable[str], primary: str | None) -> tuple[tuple[str, ...], str]:
    """Metric names without repeats, the primary one first (default: those of the task), and the primary;
    unknown ones raise."""
    tried, metrics = TASKS.parse(task), known(task)
    primary = primary or tried.primary
    usual = tried.reported or tuple(m.name for m in tried.metrics if m.better != "neither")
    wanted = list(dict.fromkeys((primary, *(tuple(names) or (*usual, "tokens_to_match")))))
    for name in wanted:
        if name not in metrics:
            raise unknown("metric", name, metrics)
    if primary == "tokens_to_match":
        raise UsageError(
            "tokens_to_match is known at the matched loss only, so no verdict can begin with it",
            "Choose another --primary, such as nll; it stays among the --metrics.",
        )
    if metrics[primary].better == "neither":
        raise UsageError(
            f"{primary} is neither better high nor low, so no verdict can be about it",
            f"Choose another --primary, such as {tried.primary}.",
        )
    return tuple(wanted), primary


def described(task: str, names: Iterable[str]) -> list[dict[str, Any]]:
    metrics = known(task)
    return [asdict(metrics[name]) for name in names]


def values_of(evaluation: dict[str, Any], valid_loss: float) -> dict[str, float | None]:
    """Every metric of one run, from what `evaluate` found and its best validation loss."""
    found = {row["metric"]: row["value"] for row in evaluation["rows"] if not row["at"]}
    return {**found, "valid_loss": valid_loss}
