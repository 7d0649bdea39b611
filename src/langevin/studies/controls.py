"""What a comparison left uncontrolled, read off its results: a sentence only where it applies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from langevin.studies.statistics import LEAST_PAIRS
from langevin.studies.wording import listed

TOLERANCE = 0.01  # difference in parameters that passes for none
"""Arms whose sizes differ by less than this are called equal."""


def not_controlled(results: dict[str, Any]) -> list[str]:
    """What could explain a difference, or its absence, besides the arms themselves."""
    arms = results["arms"]
    between = [
        *_tuning(results),
        *_unequal(arms, "parameters", "parameters"),
        *_unequal(arms, "flops_per_token", "FLOPs a token, on the same tokens"),
        *_changes(arms),
        *_unequal_tokens(arms),
    ]
    return [
        *(between if len(arms) > 1 else []),
        *_still_improving(arms),
        *_one_of_each(results),
        *_seeds(results),
        *_many_metrics(results),
        *_shared_machine(results),
    ]


def _tuning(results: dict[str, Any]) -> list[str]:
    settings, changes = results.get("settings", {}), [arm.get("changes") or {} for arm in results["arms"]]
    if settings.get("tune") or any("tune" in change or "lr" in change for change in changes):
        return [
            "Only the learning rate was chosen per arm; every other setting is shared, whoever it suits."
        ]
    rate = f" of {settings['lr']:g}" if settings.get("lr") else ""
    return [f"The learning rate{rate} was not tuned per arm: another rate may suit another arm."]


def _unequal(arms: list[dict[str, Any]], key: str, words: str) -> list[str]:
    reference, *others = arms
    base = reference.get(key)
    parts = []
    for arm in others:
        if base and arm.get(key) and abs(arm[key] / base - 1) > TOLERANCE:
            change = 100 * (arm[key] / base - 1)
            parts.append(f"{arm['name']} {abs(change):.1f} % {'more' if change > 0 else 'fewer'}")
    return [f"Against {reference['name']}, not the same {words}: {listed(parts)}."] if parts else []


def _changes(arms: list[dict[str, Any]]) -> list[str]:
    parts = []
    for arm in arms:
        changed = [f"{key} {value}" for key, value in (arm.get("changes") or {}).items() if key != "tune"]
        if changed:
            parts.append(f"{arm['name']} ({', '.join(changed)})")
    return [f"Settings of their own besides the mixer: {listed(parts)}."] if parts else []


def _unequal_tokens(arms: list[dict[str, Any]]) -> list[str]:
    counts = [
        tokens for arm in arms for run in _done(arm) if (tokens := (run.get("cost") or {}).get("tokens"))
    ]
    if len(set(counts)) < 2:
        return []
    return [f"Runs did not train on the same number of tokens: from {min(counts):,} to {max(counts):,}."]


def _still_improving(arms: list[dict[str, Any]]) -> list[str]:
    """An arm whose runs mostly end at their best had not converged within the budget."""
    named = []
    for arm in arms:
        ends = [
            run["best"]["tokens"] >= run["cost"]["tokens"]
            for run in _done(arm)
            if (run.get("best") or {}).get("tokens") and (run.get("cost") or {}).get("tokens")
        ]
        if ends and 2 * sum(ends) > len(ends):
            named.append(arm["name"])
    if not named:
        return []
    return [f"Still improving when the budget ended: {listed(named)}. A longer run could change the order."]


def _one_of_each(results: dict[str, Any]) -> list[str]:
    settings = results.get("settings", {})
    size = [
        f"{settings[key]} {words}"
        for key, words in (("layers", "layers"), ("width", "wide"), ("context", "tokens of context"))
        if settings.get(key)
    ]
    schedule = [
        f"{settings[key]:,} {key}"
        for key in ("tokens", "steps", "minutes")
        if settings.get(key) is not None
    ] + ([f"{settings['schedule']} schedule"] if settings.get("schedule") else [])
    name = results.get("data", {}).get("name")
    parts = [
        f"One data set{_bracketed([name] if name else [])}",
        f"one model size{_bracketed(size)}",
        f"one training budget{_bracketed(schedule)}",
    ]
    return [f"{listed(parts)}: others were not tried."]


def _seeds(results: dict[str, Any]) -> list[str]:
    seeds, failed = (
        len(results["seeds"]),
        [arm for arm in results["arms"] if len(_done(arm)) < len(arm["runs"])],
    )
    sentences = []
    if seeds < LEAST_PAIRS:
        sentences.append(
            f"Only {seeds} {'seed' if seeds == 1 else 'seeds'}: too few to tell arms apart from chance."
        )
    if failed:
        names = listed(arm["name"] for arm in failed)
        sentences.append(f"Runs of {names} failed: the ones that finished may be the easier ones.")
    if seeds > 1:
        sentences.append(
            "Intervals are over seeds (initial weights and data order); every run was scored on the same "
            "text, so the choice of text is not in them."
        )
    return sentences


def _many_metrics(results: dict[str, Any]) -> list[str]:
    tested = {row["metric"] for row in results.get("comparisons", [])}
    if len(tested) < 2:
        return []
    return [f"{len(tested)} metrics were tested; p is corrected for the number of arms, not of metrics."]


def _shared_machine(results: dict[str, Any]) -> list[str]:
    workers = (
        results.get("environment", {}).get("workers") or results.get("settings", {}).get("workers") or 1
    )
    timed_alone = all(arm.get("alone") for arm in results["arms"] if _done(arm))
    if workers < 2 or timed_alone:
        return []
    return [f"{workers} runs shared the machine at a time: times, tokens/s and latencies are rough."]


def _done(arm: dict[str, Any]) -> list[dict[str, Any]]:
    return [run for run in arm["runs"] if run["status"] == "done"]


def _bracketed(parts: Iterable[str]) -> str:
    text = ", ".join(parts)
    return f" ({text})" if text else ""
