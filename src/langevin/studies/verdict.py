"""What a comparison found, in words: every sentence is read off the results' own rows.

"better" and "worse" are said only where a row of `comparisons` says so, and "significant" only where that
row also survives Holm's correction, which takes six pairs or more.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from langevin.errors import unknown
from langevin.studies.controls import TOLERANCE, not_controlled
from langevin.studies.statistics import (
    ERROR_RATE,
    LEAST_PAIRS,
    by_seed,
    compare_arms,
    cost_of,
    interval,
    least_pairs,
)
from langevin.studies.wording import listed, number, p_value, signed

__all__ = ["not_controlled", "verdict"]

Row = dict[str, Any]

MATCHED = "the matched validation loss"
# Each of these is an increasing function of the loss on the same text: a second verdict would say nothing.
_LOSSES = {"nll", "perplexity", "bits_per_token", "bits_per_character", "bits_per_byte"}


def verdict(results: dict[str, Any]) -> list[str]:
    """The finding on the primary metric, then other metrics, cost, the true entropy, and what failed."""
    metric = _metric(results, results["primary"])
    rows = results["comparisons"] if "comparisons" in results else compare_arms(results)
    arms = results["arms"]
    if not any(run["status"] == "done" for arm in arms for run in arm["runs"]):
        return ["No run finished: there is nothing to compare.", *_failures(arms)]
    primary = [row for row in rows if row["metric"] == metric["name"] and row["at"] == "best"]
    return [
        *_in_short(primary, metric),
        *_standing(arms, metric),
        *_found(primary, metric),
        *_not_found(primary, metric),
        *_declined(primary, metric),
        *_elsewhere(results, rows, metric),
        *_cost(arms, [row["arm"] for row in primary if row["verdict"] == "better"]),
        *_entropy(results),
        *_failures(arms),
        *_unmeasured(arms, metric),
    ]


def _in_short(rows: list[Row], metric: Row) -> list[str]:
    """One sentence over all arms, where there are several and some are judged."""
    judged: dict[str, list[str]] = {}
    for row in rows:
        judged.setdefault(row["verdict"], []).append(row["arm"])
    judged.pop("too few seeds", None)
    if len(rows) < 2 or not judged:
        return []
    reference = rows[0]["against"]
    parts: list[str] = []
    for word in ("better", "worse"):
        if word in judged:
            arms = judged[word]
            than = f"{word} than {reference}" if not parts else word
            parts.append(f"{listed(arms)} {'are' if len(arms) > 1 else 'is'} {than}")
    if "no difference found" in judged:
        parts.append(f"no difference to {reference} was found for {listed(judged['no difference found'])}")
    return [f"In short, by {metric['label']}: {'; '.join(parts)}."]


def _standing(arms: list[dict[str, Any]], metric: Row) -> list[str]:
    """Where the reference stands; all arms where none can be judged."""
    if len(arms) == 1:
        return [_mean(arms[0], metric), "There is no other arm to compare it with."]
    if metric["better"] == "neither":
        return [
            f"Neither a low nor a high {metric['label']} is preferred, so no arm is judged by it.",
            *(_mean(arm, metric) for arm in arms),
        ]
    return [_mean(arms[0], metric, role=", the reference")]


def _mean(arm: dict[str, Any], metric: Row, role: str = "") -> str:
    found = _summary(arm, metric["name"])
    if not found["n"]:
        return f"{arm['name']}{role}: no {metric['label']} was measured."
    if found["low"] is None:
        value = number(found["mean"], abs(found["mean"]) / 100)
        return f"{arm['name']}{role}: {metric['label']} {_with(value, metric)} (1 seed)."
    width = found["high"] - found["low"]
    mean, low, high = (number(found[key], width) for key in ("mean", "low", "high"))
    return (
        f"{arm['name']}{role}: {metric['label']} {_with(mean, metric)} "
        f"(95 % interval {low} to {high}, {found['n']} seeds)."
    )


def _summary(arm: dict[str, Any], name: str) -> Row:
    return arm.get("summary", {}).get(name) or asdict(interval(by_seed(arm, name).values()))


def _found(rows: list[Row], metric: Row) -> list[str]:
    found = [row for word in ("better", "worse") for row in _largest_first(rows, word)]
    family = sum(row["p"] is not None for row in rows)
    sentences = []
    for row in found:
        sentence = (
            f"{row['arm']} is {row['verdict']} than {row['against']}: {metric['label']} "
            f"{_size(row, metric)} ({_interval_of_size(row)}, {p_value(row['p'])}, {row['pairs']} pairs)"
        )
        corrected = f"Holm's correction for {family} arms ({p_value(row['p_adjusted'])})"
        if row["p_adjusted"] > ERROR_RATE:
            sentence += f"; this does not survive {corrected}"
        elif row["pairs"] >= LEAST_PAIRS:
            sentence += f"; significant {f'after {corrected}' if family > 1 else 'at the 5 % level'}"
        sentences.append(f"{sentence}.")
    pairs = max((row["pairs"] for row in rows), default=0)
    if found and pairs < least_pairs(family):
        sentences.append(
            f"With {pairs} seeds nothing found among {family} arms can survive that correction: "
            f"it takes at least {least_pairs(family)} seeds."
        )
    return sentences


def _not_found(rows: list[Row], metric: Row) -> list[str]:
    sentences = []
    for row in rows:
        if row["verdict"] != "no difference found":
            continue
        if row["low"] == row["high"] == 0:
            facts = f"all {row['pairs']} pairs are exactly equal"
        else:
            width = row["high"] - row["low"]
            mean, low, high = (signed(row[key], width) for key in ("difference", "low", "high"))
            facts = (
                f"{_with(mean, metric)} on average, {p_value(row['p'])}, {row['pairs']} pairs; "
                f"the 95 % interval still allows {low} to {_with(high, metric)}"
            )
        sentences.append(
            f"{row['arm']} against {row['against']}: no difference found in {metric['label']} ({facts})."
        )
    return sentences


def _declined(rows: list[Row], metric: Row) -> list[str]:
    few = [row for row in rows if row["verdict"] == "too few seeds"]
    if not few:
        return []
    family = len(rows)
    counts = sorted({row["pairs"] for row in few})
    pairs = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    together = f", and {least_pairs(family)} for a finding among {family} arms" if family > 1 else ""
    sentences = [
        f"Too few seeds to judge {listed(row['arm'] for row in few)}: {pairs} "
        f"{'pair' if counts == [1] else 'pairs'}. It takes at least {least_pairs()}{together}, because "
        f"fewer cannot reach p ≤ {ERROR_RATE}."
    ]
    for row in few:
        if row["difference"] is None:
            sentences.append(f"No seed of {row['arm']} has a partner in {row['against']}.")
            continue
        with_interval = f"{_interval_of_size(row)}, " if row["low"] is not None else ""
        sentences.append(
            f"Observed, not judged: {metric['label']} of {row['arm']} {_size(row, metric)} against "
            f"{row['against']} ({with_interval}{row['pairs']} {'pair' if row['pairs'] == 1 else 'pairs'})."
        )
    return sentences


def _elsewhere(results: dict[str, Any], rows: list[Row], primary: Row) -> list[str]:
    """Other metrics at the best checkpoint, all at the matched loss: a sentence where an arm differs."""
    sentences = []
    nothing: dict[str, list[str]] = {}
    for metric in results["metrics"]:
        for at in ("best", "matched"):
            own = {metric["name"], primary["name"]}
            if at == "best" and (len(own) == 1 or own <= _LOSSES):
                continue
            here = [row for row in rows if row["metric"] == metric["name"] and row["at"] == at]
            judged = [row for row in here if row["verdict"] != "too few seeds"]
            parts = []
            for word in ("better", "worse"):
                named = [
                    f"{row['arm']} ({_size(row, metric)}, {p_value(row['p'])}, "
                    f"corrected {p_value(row['p_adjusted'])})"
                    for row in _largest_first(here, word)
                ]
                if named:
                    verb = "is" if len(named) == 1 else "are"
                    parts.append(f"{listed(named)} {verb} {word} than {here[0]['against']}")
            if parts:
                where = _place(results, at, metric["label"])
                sentences.append(f"By {metric['label']}{where}, {'; '.join(parts)}.")
            elif judged:
                nothing.setdefault(at, []).append(metric["label"])
    for at, labels in nothing.items():
        where = _place(results, at, labels[0] if len(labels) == 1 else "")
        sentences.append(f"No difference found in {listed(labels)}{where}.")
    return sentences


def _cost(arms: list[dict[str, Any]], named: list[str]) -> list[str]:
    reference, *others = arms
    sentences = []
    for arm in others:
        if arm["name"] not in named:
            continue
        facts = []
        for key, words in (("tokens_per_second", "tokens/s"), ("peak_memory_bytes", "peak memory")):
            ours, theirs = (cost_of(a, key) for a in (arm, reference))
            if ours and theirs:
                facts.append(f"{ours / theirs:.2f} times the {words}")
        ours, theirs = (a.get("parameters") for a in (arm, reference))
        if ours and theirs and abs(ours / theirs - 1) > TOLERANCE:
            facts.append(f"{ours / theirs:.3f} times the parameters")
        if facts:
            sentences.append(
                f"The cost: {arm['name']} trained with {listed(facts)} of {reference['name']}."
            )
    return sentences


def _entropy(results: dict[str, Any]) -> list[str]:
    true = results.get("data", {}).get("true_nats_per_token")
    means = {arm["name"]: _summary(arm, "nll")["mean"] for arm in results["arms"]}
    finite = {name: mean for name, mean in means.items() if mean is not None}
    if true is None or not finite:
        return []
    name = min(finite, key=lambda arm: finite[arm])
    gap = finite[name] - true
    return [
        f"The true entropy of the data is {true:.3f} nats/token; the lowest mean loss ({name}, "
        f"{finite[name]:.3f}) is {abs(gap):.3f} {'above' if gap >= 0 else 'below'} it."
    ]


def _failures(arms: list[dict[str, Any]]) -> list[str]:
    sentences = []
    for arm in arms:
        failed = [run for run in arm["runs"] if run["status"] != "done"]
        if failed:
            errors = [str(run["error"]).splitlines()[0] for run in failed if run.get("error")]
            why = f" ({errors[0]})" if errors else ""
            sentences.append(f"Failed and left out, with its pair: {_runs(arm, failed)}{why}.")
    return sentences


def _unmeasured(arms: list[dict[str, Any]], metric: Row) -> list[str]:
    sentences = []
    for arm in arms:
        there = by_seed(arm, metric["name"])
        missing = [run for run in arm["runs"] if run["status"] == "done" and run["seed"] not in there]
        if missing:
            sentences.append(f"Without a finite {metric['label']}, and so left out: {_runs(arm, missing)}.")
    return sentences


def _metric(results: dict[str, Any], name: str) -> Row:
    metrics = {metric["name"]: metric for metric in results["metrics"]}
    if name not in metrics:
        raise unknown("metric", name, metrics)
    return metrics[name]


def _largest_first(rows: list[Row], word: str) -> list[Row]:
    return sorted((row for row in rows if row["verdict"] == word), key=lambda row: -abs(row["difference"]))


def _place(results: dict[str, Any], at: str, after: str) -> str:
    """Where something was measured, after words that may say it already."""
    if at == "best":
        return " at the best checkpoint"
    loss = results.get("matched_loss")
    place = "" if after.endswith(MATCHED) else f" at {MATCHED}"
    return place + ("" if loss is None else f" of {loss:.4g}")


def _runs(arm: dict[str, Any], runs: list[dict[str, Any]]) -> str:
    seeds = listed(str(run["seed"]) for run in runs)
    return f"{arm['name']} {'seed' if len(runs) == 1 else 'seeds'} {seeds}"


def _size(row: Row, metric: Row) -> str:
    """lower by 0.012 nats/token"""
    if row["difference"] == 0:
        return "equal"
    direction = "lower" if row["difference"] < 0 else "higher"
    return f"{direction} by {_with(number(abs(row['difference']), _width(row)), metric)}"


def _interval_of_size(row: Row) -> str:
    """The interval in the direction of the difference, so that it reads as sizes."""
    sign = -1 if row["difference"] < 0 else 1
    low, high = sorted((sign * row["low"], sign * row["high"]))
    return f"95 % interval {number(low, _width(row))} to {number(high, _width(row))}"


def _width(row: Row) -> float:
    return abs(row["difference"]) if row["low"] is None else row["high"] - row["low"]


def _with(value: str, metric: Row) -> str:
    return f"{value} {metric['unit']}" if metric["unit"] not in ("", "fraction") else value
