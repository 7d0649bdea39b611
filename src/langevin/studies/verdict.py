"""What a comparison found, in words: every sentence is read off the results' own rows.

"better" and "worse" are said only where a row of `comparisons` says so, and "significant" only where that
row also survives Holm's correction, which takes six pairs or more.
"""

from __future__ import annotations

from collections.abc import Iterator

from langevin.errors import unknown
from langevin.studies.controls import TOLERANCE
from langevin.studies.results import Results, Row, done, metric_named, width
from langevin.studies.statistics import ERROR_RATE, by_seed, cost_of, interval, least_pairs
from langevin.studies.words import counted, in_words, listed, p_value

MATCHED = "the matched validation loss"
# Each of these is an increasing function of the loss on the same text: a second verdict would say nothing.
_LOSSES = {"nll", "perplexity", "bits_per_token", "bits_per_character", "bits_per_byte"}


def verdict(results: Results) -> list[str]:
    """The finding on the primary metric, then other metrics, cost, the true entropy, and what failed."""
    known = [metric["name"] for metric in results["metrics"]]
    if results["primary"] not in known:
        raise unknown("metric", results["primary"], known)
    metric, arms = metric_named(results, results["primary"]), results["arms"]
    if not any(map(done, arms)):
        return ["No run finished: there is nothing to compare.", *_failures(arms)]
    primary = [r for r in results["comparisons"] if (r["metric"], r["at"]) == (metric["name"], "best")]
    return [
        *_in_short(primary, metric),
        *_standing(arms, metric),
        *_found(primary, metric),
        *_not_found(primary, metric),
        *_declined(primary, metric),
        *_elsewhere(results, metric),
        *_cost(arms, [row["arm"] for row in primary if row["verdict"] == "better"]),
        *_entropy(results),
        *_failures(arms),
        *_unmeasured(arms, metric),
    ]


def _in_short(rows: list[Row], metric: Row) -> Iterator[str]:
    """One sentence over all arms, where there are several and some are judged."""
    judged: dict[str, list[str]] = {}
    for row in rows:
        judged.setdefault(row["verdict"], []).append(row["arm"])
    parts: list[str] = []
    for word in ("better", "worse"):
        if arms := judged.get(word):
            than = word if parts else f"{word} than {rows[0]['against']}"
            parts.append(f"{listed(arms)} {'are' if len(arms) > 1 else 'is'} {than}")
    if alike := judged.get("no difference found"):
        parts.append(f"no difference to {rows[0]['against']} was found for {listed(alike)}")
    if len(rows) > 1 and parts:
        yield f"In short, by {metric['label']}: {'; '.join(parts)}."


def _standing(arms: list[Row], metric: Row) -> Iterator[str]:
    """Where the reference stands; all arms where none can be judged."""
    if len(arms) == 1:
        yield _mean(arms[0], metric)
        yield "There is no other arm to compare it with."
    elif metric["better"] == "neither":
        yield f"Neither a low nor a high {metric['label']} is preferred, so no arm is judged by it."
        yield from (_mean(arm, metric) for arm in arms)
    else:
        yield _mean(arms[0], metric, role=", the reference")


def _mean(arm: Row, metric: Row, role: str = "") -> str:
    found = interval(by_seed(arm, metric["name"]).values())
    if found.mean is None:
        return f"{arm['name']}{role}: no {metric['label']} was measured."
    if found.low is None or found.high is None:
        value, how_sure = in_words(found.mean, abs(found.mean) / 100), "1 seed"
    else:
        width = found.high - found.low
        value, low, high = (in_words(x, width) for x in (found.mean, found.low, found.high))
        how_sure = f"95 % interval {low} to {high}, {found.n} seeds"
    return f"{arm['name']}{role}: {metric['label']} {_with(value, metric)} ({how_sure})."


def _found(rows: list[Row], metric: Row) -> Iterator[str]:
    found = [row for word in ("better", "worse") for row in _largest_first(rows, word)]
    family = sum(row["p"] is not None for row in rows)
    for row in found:
        corrected = f"Holm's correction for {family} arms ({p_value(row['p_adjusted'])})"
        if row["p_adjusted"] > ERROR_RATE:
            how_sure = f"this does not survive {corrected}"
        else:
            how_sure = f"significant {f'after {corrected}' if family > 1 else 'at the 5 % level'}"
        yield (
            f"{row['arm']} is {row['verdict']} than {row['against']}: {metric['label']} "
            f"{_size(row, metric)} ({_interval_of_size(row)}, {p_value(row['p'])}, {row['pairs']} pairs); "
            f"{how_sure}."
        )
    pairs = max((row["pairs"] for row in rows), default=0)
    if found and pairs < least_pairs(family):
        yield (
            f"With {pairs} seeds nothing found among {family} arms can survive that correction: "
            f"it takes at least {least_pairs(family)} seeds."
        )


def _not_found(rows: list[Row], metric: Row) -> Iterator[str]:
    for row in rows:
        if row["verdict"] != "no difference found":
            continue
        if row["low"] == row["high"] == 0:
            facts = f"all {row['pairs']} pairs are exactly equal"
        else:
            mean, low, high = (
                in_words(row[k], width(row), sign=True) for k in ("difference", "low", "high")
            )
            facts = (
                f"{_with(mean, metric)} on average, {p_value(row['p'])}, {row['pairs']} pairs; "
                f"the 95 % interval still allows {low} to {_with(high, metric)}"
            )
        yield f"{row['arm']} against {row['against']}: no difference found in {metric['label']} ({facts})."


def _declined(rows: list[Row], metric: Row) -> Iterator[str]:
    few, family = [row for row in rows if row["verdict"] == "too few seeds"], len(rows)
    if few:
        least, most = (choose(row["pairs"] for row in few) for choose in (min, max))
        pairs = counted(most, "pair") if least == most else f"{least} to {most} pairs"
        together = f", and {least_pairs(family)} for a finding among {family} arms" if family > 1 else ""
        yield (
            f"Too few seeds to judge {listed(row['arm'] for row in few)}: {pairs}. "
            f"It takes at least {least_pairs()}{together}, because fewer cannot reach p ≤ {ERROR_RATE}."
        )
    for row in few:
        if row["difference"] is None:
            yield f"No seed of {row['arm']} has a partner in {row['against']}."
            continue
        with_interval = f"{_interval_of_size(row)}, " if row["low"] is not None else ""
        yield (
            f"Observed, not judged: {metric['label']} of {row['arm']} {_size(row, metric)} against "
            f"{row['against']} ({with_interval}{counted(row['pairs'], 'pair')})."
        )


def _elsewhere(results: Results, primary: Row) -> Iterator[str]:
    """Other metrics at the best checkpoint, all at the matched loss: a sentence where an arm differs."""
    nothing: dict[str, list[str]] = {}
    for metric in results["metrics"]:
        for at in ("best", "matched"):
            own = {metric["name"], primary["name"]}
            if at == "best" and (len(own) == 1 or own <= _LOSSES):
                continue
            here = [r for r in results["comparisons"] if (r["metric"], r["at"]) == (metric["name"], at)]
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
                yield f"By {metric['label']}{_place(results, at, metric['label'])}, {'; '.join(parts)}."
            elif any(row["verdict"] != "too few seeds" for row in here):
                nothing.setdefault(at, []).append(metric["label"])
    for at, labels in nothing.items():
        where = _place(results, at, labels[0] if len(labels) == 1 else "")
        yield f"No difference found in {listed(labels)}{where}."


def _cost(arms: list[Row], named: list[str]) -> Iterator[str]:
    reference, *others = arms
    for arm in others:
        facts = []
        for key, words in (("tokens_per_second", "tokens/s"), ("peak_memory_bytes", "peak memory")):
            ours, theirs = (cost_of(a, key) for a in (arm, reference))
            if ours and theirs:
                facts.append(f"{ours / theirs:.2f} times the {words}")
        ours, theirs = (a.get("parameters") for a in (arm, reference))
        if ours and theirs and abs(ours / theirs - 1) > TOLERANCE:
            facts.append(f"{ours / theirs:.3f} times the parameters")
        if facts and arm["name"] in named:
            yield f"The cost: {arm['name']} trained with {listed(facts)} of {reference['name']}."


def _entropy(results: Results) -> Iterator[str]:
    true = results.get("data", {}).get("true_nats_per_token")
    means = {arm["name"]: interval(by_seed(arm, "nll").values()).mean for arm in results["arms"]}
    finite = {name: mean for name, mean in means.items() if mean is not None}
    if true is not None and finite:
        name = min(finite, key=lambda arm: finite[arm])
        gap = finite[name] - true
        yield (
            f"The true entropy of the data is {true:.3f} nats/token; the lowest mean loss ({name}, "
            f"{finite[name]:.3f}) is {abs(gap):.3f} {'above' if gap >= 0 else 'below'} it."
        )


def _failures(arms: list[Row]) -> Iterator[str]:
    for arm in arms:
        failed = [run for run in arm["runs"] if run["status"] != "done"]
        if failed:
            errors = [str(run["error"]).splitlines()[0] for run in failed if run.get("error")]
            why = f" ({errors[0]})" if errors else ""
            yield f"Failed and left out, with its pair: {_runs(arm, failed)}{why}."


def _unmeasured(arms: list[Row], metric: Row) -> Iterator[str]:
    for arm in arms:
        there = by_seed(arm, metric["name"])
        missing = [run for run in done(arm) if run["seed"] not in there]
        if missing:
            yield f"Without a finite {metric['label']}, and so left out: {_runs(arm, missing)}."


def _largest_first(rows: list[Row], word: str) -> list[Row]:
    return sorted((row for row in rows if row["verdict"] == word), key=lambda row: -abs(row["difference"]))


def _place(results: Results, at: str, after: str) -> str:
    """Where something was measured, after words that may say it already."""
    if at == "best":
        return " at the best checkpoint"
    loss = results.get("matched_loss")
    place = "" if after.endswith(MATCHED) else f" at {MATCHED}"
    return place + ("" if loss is None else f" of {loss:.4g}")


def _runs(arm: Row, runs: list[Row]) -> str:
    seeds = listed(str(run["seed"]) for run in runs)
    return f"{arm['name']} {'seed' if len(runs) == 1 else 'seeds'} {seeds}"


def _size(row: Row, metric: Row) -> str:
    """lower by 0.012 nats/token"""
    if row["difference"] == 0:
        return "equal"
    direction = "lower" if row["difference"] < 0 else "higher"
    return f"{direction} by {_with(in_words(abs(row['difference']), width(row)), metric)}"


def _interval_of_size(row: Row) -> str:
    """The interval in the direction of the difference, so that it reads as sizes."""
    sign = -1 if row["difference"] < 0 else 1
    low, high = sorted((sign * row["low"], sign * row["high"]))
    return f"95 % interval {in_words(low, width(row))} to {in_words(high, width(row))}"


def _with(value: str, metric: Row) -> str:
    return f"{value} {metric['unit']}" if metric["unit"] not in ("", "fraction") else value
