"""What a comparison can be about: the metrics by name, with their units and which way is better."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from langevin.errors import UsageError, unknown


@dataclass(frozen=True)
class Metric:
    name: str
    label: str
    unit: str
    better: Literal["lower", "higher", "neither"]


METRICS = {
    metric.name: metric
    for metric in (
        Metric("nll", "test loss", "nats/token", "lower"),
        Metric("perplexity", "perplexity", "", "lower"),
        Metric("bits_per_token", "bits per token", "bits", "lower"),
        Metric("bits_per_character", "bits per character", "bits", "lower"),
        Metric("bits_per_byte", "bits per byte", "bits", "lower"),
        Metric("accuracy", "next-token accuracy", "fraction", "higher"),
        Metric("ece", "calibration error (ECE)", "fraction", "lower"),
        Metric("adaptive_ece", "adaptive ECE, debiased", "fraction", "lower"),
        Metric("scaled_ece", "ECE after temperature scaling", "fraction", "lower"),
        Metric("brier", "Brier score", "", "lower"),
        Metric("top1_brier", "Brier score of the first choice", "", "lower"),
        Metric("entropy", "predictive entropy", "nats", "neither"),
        Metric("temperature", "temperature fitted on validation", "", "neither"),
        Metric("valid_loss", "best validation loss", "nats/token", "lower"),
        Metric("tokens_to_match", "training tokens to the matched validation loss", "tokens", "lower"),
    )
}
DEFAULT = (
    *("nll", "perplexity", "bits_per_character", "accuracy", "ece", "scaled_ece", "brier"),
    "tokens_to_match",
)


def chosen(names: Iterable[str], primary: str) -> tuple[str, ...]:
    """Metric names without repeats, the primary one first; unknown ones raise."""
    wanted = list(dict.fromkeys((primary, *names)))
    for name in wanted:
        if name not in METRICS:
            raise unknown("metric", name, METRICS)
    if primary == "tokens_to_match":
        raise UsageError(
            "tokens_to_match is known at the matched loss only, so no verdict can begin with it",
            "Choose another --primary, such as nll; it stays among the --metrics.",
        )
    if METRICS[primary].better == "neither":
        raise UsageError(
            f"{primary} is neither better high nor low, so no verdict can be about it",
            "Choose another --primary, such as nll.",
        )
    return tuple(wanted)


def described(names: Iterable[str]) -> list[dict[str, Any]]:
    return [asdict(METRICS[name]) for name in names]


def values_of(evaluation: dict[str, Any], valid_loss: float) -> dict[str, float | None]:
    """Every metric of one run, from what `evaluate` found and its best validation loss."""
    calibration = evaluation["calibration"]
    found = {
        **{name: evaluation["likelihood"].get(name) for name in evaluation["likelihood"]},
        **{name: calibration.get(name) for name in ("ece", "adaptive_ece", "brier", "top1_brier")},
        "scaled_ece": evaluation["calibration at that temperature"]["ece"],
        "temperature": evaluation["temperature"]["fitted on validation"],
        "valid_loss": valid_loss,
    }
    return {name: _number(found[name]) for name in METRICS if name in found}


def _number(estimate: Any) -> float | None:
    value = estimate["value"] if isinstance(estimate, dict) else estimate
    return None if value is None else float(value)
