"""What a comparison left uncontrolled, read off its results: a sentence only where it applies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from langevin.studies.results import Results, Row, done
from langevin.studies.statistics import LEAST_PAIRS
from langevin.studies.words import counted, listed

TOLERANCE = 0.01  # arms whose sizes differ by no more than this are called equal


def not_controlled(results: Results) -> list[str]:
    """What could explain a difference, or its absence, besides the arms themselves."""
    arms = results["arms"]
    between = [
        _tuning(results),
        *_unequal(arms, "parameters", "parameters"),
        *_unequal(arms, "flops_per_token", "FLOPs a token, on the same tokens"),
        *_changes(arms),
        *_unequal_tokens(arms),
    ]
    return [
        *(between if len(arms) > 1 else []),
        *_still_improving(arms),
        _one_of_each(results),
        *_seeds(results),
        *_many_metrics(results),
        *_shared_machine(results),
    ]


def _tuning(results: Results) -> str:
    settings, changes = results.get("settings", {}), [arm.get("changes") or {} for arm in results["arms"]]
    if settings.get("tune") or any("tune" in change or "lr" in change for change in changes):
        return "Only the learning rate was chosen per arm; every other setting is shared, whoever it suits."
    rate = f" of {settings['lr']:g}" if settings.get("lr") else ""
    return f"The learning rate{rate} was not tuned per arm: another rate may suit another arm."


def _unequal(arms: list[Row], key: str, words: str) -> Iterator[str]:
    reference, *others = arms
    base = reference.get(key)
    parts = []
    for arm in others:
        if base and arm.get(key) and abs(arm[key] / base - 1) > TOLERANCE:
            change = 100 * (arm[key] / base - 1)
            parts.append(f"{arm['name']} {abs(change):.1f} % {'more' if change > 0 else 'fewer'}")
    if parts:
        yield f"Against {reference['name']}, not the same {words}: {listed(parts)}."


def _changes(arms: list[Row]) -> Iterator[str]:
    parts = []
    for arm in arms:
        changed = [f"{key} {value}" for key, value in (arm.get("changes") or {}).items() if key != "tune"]
        if changed:
            parts.append(f"{arm['name']} ({', '.join(changed)})")
    if parts:
        yield f"Settings of their own besides the mixer: {listed(parts)}."


def _unequal_tokens(arms: list[Row]) -> Iterator[str]:
    every = [(run.get("cost") or {}).get("tokens") for arm in arms for run in done(arm)]
    counts = [tokens for tokens in every if tokens]
    if len(set(counts)) > 1:
        yield f"Runs did not train on the same number of tokens: from {min(counts):,} to {max(counts):,}."


def _still_improving(arms: list[Row]) -> Iterator[str]:
    """An arm whose runs mostly end at their best had not converged within the budget."""
    late = []
    for arm in arms:
        ends = [
            run["best"]["tokens"] >= run["cost"]["tokens"]
            for run in done(arm)
            if (run.get("best") or {}).get("tokens") and (run.get("cost") or {}).get("tokens")
        ]
        if ends and 2 * sum(ends) > len(ends):
            late.append(arm["name"])
    if late:
        yield f"Still improving when the budget ended: {listed(late)}. A longer run could change the order."


def _one_of_each(results: Results) -> str:
    settings, name = results.get("settings", {}), results.get("data", {}).get("name")
    sizes = (("layers", "layers"), ("width", "wide"), ("context", "tokens of context"))
    size = [f"{settings[key]} {words}" for key, words in sizes if settings.get(key)]
    budgets = [key for key in ("tokens", "steps", "minutes") if settings.get(key) is not None]
    budget = [f"{settings[key]:,} {key}" for key in budgets]
    budget += [f"{settings['schedule']} schedule"] if settings.get("schedule") else []
    return (
        f"One data set{_bracketed([name] if name else [])}, one model size{_bracketed(size)} and "
        f"one training budget{_bracketed(budget)}: others were not tried."
    )


def _seeds(results: Results) -> Iterator[str]:
    seeds = len(results["seeds"])
    failed = [arm["name"] for arm in results["arms"] if len(done(arm)) < len(arm["runs"])]
    if seeds < LEAST_PAIRS:
        yield f"Only {counted(seeds, 'seed')}: too few to tell arms apart from chance."
    if failed:
        yield f"Runs of {listed(failed)} failed: the ones that finished may be the easier ones."
    if seeds > 1:
        yield (
            "Intervals are over seeds (initial weights and data order); every run was scored on the same "
            "text, so the choice of text is not in them."
        )


def _many_metrics(results: Results) -> Iterator[str]:
    tested = {row["metric"] for row in results.get("comparisons", [])}
    if len(tested) > 1:
        yield f"{len(tested)} metrics were tested; p is corrected for the number of arms, not of metrics."


def _shared_machine(results: Results) -> Iterator[str]:
    workers = results.get("environment", {}).get("workers") or 1
    timed_alone = all(arm.get("alone") for arm in results["arms"] if done(arm))
    if workers > 1 and not timed_alone:
        yield f"{workers} runs shared the machine at a time: times, tokens/s and latencies are rough."


def _bracketed(parts: Iterable[str]) -> str:
    text = ", ".join(parts)
    return f" ({text})" if text else ""
