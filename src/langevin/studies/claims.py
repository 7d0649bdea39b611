"""Published claims beside what was found: for each one, our numbers, whether it held, and a sentence.

A claim held ("yes") or did not ("no") only where the paired test of a comparison says so. Where that found
no difference, it did not hold if the interval excludes the published size; else, or with too few seeds to
judge, the answer is "cannot tell", with what was observed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from langevin.mixers import parse
from langevin.studies.recipe import Best, Claim, Difference, NoWorse, Part, Speed, Trend
from langevin.studies.results import Results, Row, comparison, metric_named, width
from langevin.studies.statistics import ERROR_RATE, LEAST_PAIRS, by_seed, interval, judge, paired, summarise
from langevin.studies.words import counted, in_words, listed, p_value

LEAST_RUNS = 5  # of a timing, for its spread to be known
ANSWERS = {"yes": "held", "no": "did not hold", "cannot tell": "cannot be judged"}
PLACES = {"best": "at the best checkpoint", "matched": "at the matched validation loss"}


@dataclass(frozen=True)
class Finding:
    ours: str
    held: str
    because: str


def published(claims: tuple[Claim, ...], part: Part, results: Results) -> list[Row]:
    """The rows of a comparison's `published`: every claim that one comparison can answer."""
    answers: dict[Any, Any] = {Difference: _difference, NoWorse: _no_worse, Best: _best}
    return [
        _row(claim, part, answers[type(claim.test)](claim.test, part, results))
        for claim in claims
        if type(claim.test) in answers
    ]


def published_trends(claims: tuple[Claim, ...], parts: list[tuple[Part, Results]]) -> list[Row]:
    """The claims about how the parts differ: needs two of them."""
    return [
        _row(claim, Part(), _trend(claim.test, parts))
        for claim in claims
        if isinstance(claim.test, Trend) and len(parts) > 1
    ]


def published_speeds(claims: tuple[Claim, ...], speeds: Results) -> list[Row]:
    return [
        _row(claim, Part(), _speed(claim.test, speeds)) for claim in claims if isinstance(claim.test, Speed)
    ]


def in_short(rows: list[Row]) -> str:
    """How many claims held, in one sentence."""
    counts = {answer: sum(row["held"] == held for row in rows) for held, answer in ANSWERS.items()}
    told = [f"{count} {answer}" for answer, count in counts.items() if count]
    return f"Of {counted(len(rows), 'published claim')} {listed(told)}."


def _row(claim: Claim, part: Part, found: Finding) -> Row:
    text = part.filled(claim.claim) if part.values else claim.claim
    where = f"{part.name}: " if part.name else ""
    return {
        "part": part.name,
        "claim": text,
        "published": part.filled(claim.published) if part.values else claim.published,
        "ours": found.ours,
        "held": found.held,
        "sentence": f"{where}“{text.rstrip('.')}” {ANSWERS[found.held]}: {found.because}.",
    }


def _difference(test: Difference, part: Part, results: Results) -> Finding:
    row = comparison(results, part.filled(test.arm), test.metric, test.at)
    if row is None or row["difference"] is None:
        return _unmeasured(test.metric, test.at, results)
    metric = metric_named(results, test.metric)
    ours, observed = _numbers(row, results)
    if row["verdict"] == "too few seeds":
        return Finding(ours, "cannot tell", _few(row["pairs"], observed, _points(row, test.expect)))
    tested = f"{p_value(row['p'])}, {row['pairs']} pairs"
    if row["verdict"] == "no difference found":
        return _none_found(test, row, f"no difference in {metric['label']} was found ({tested})", results)
    held = (row["difference"] < 0) == (test.expect == "lower")
    corrected = "" if row["p_adjusted"] <= ERROR_RATE else "; this does not survive Holm's correction"
    share = max(abs(row["low"]), abs(row["high"])) / (abs(_means(row, results)[1]) or math.inf)
    smaller = f"; smaller than the published {_whole(test.size)}" if held and share < test.size else ""
    return Finding(ours, "yes" if held else "no", f"{observed} ({tested}{corrected}{smaller})")


def _none_found(test: Difference, row: Row, told: str, results: Results) -> Finding:
    """What the interval still allows, against the size that was published."""
    ours, _ = _numbers(row, results)
    base = abs(_means(row, results)[1])
    if not base:
        return Finding(ours, "cannot tell", told)
    low, high = row["low"] / base, row["high"] / base
    if low == high == 0:
        return Finding(ours, "cannot tell", f"{told}: all pairs are exactly equal")
    span = f"the 95 % interval, {_percent(low)} to {_percent(high)},"
    if test.size:
        claimed, reach = (test.size, high) if test.expect == "higher" else (-test.size, -low)
        held, verb = ("no", "excludes") if reach < test.size else ("cannot tell", "does not exclude")
        return Finding(ours, held, f"{told}, and {span} {verb} the published {_percent(claimed)}")
    if low <= 0 <= high:
        return Finding(ours, "cannot tell", f"{told}, and {span} allows either sign")
    return Finding(ours, "cannot tell", f"{told}, though {span} excludes zero")


def _no_worse(test: NoWorse, part: Part, results: Results) -> Finding:
    row = comparison(results, part.filled(test.arm), test.metric, test.at)
    if row is None or row["difference"] is None:
        return _unmeasured(test.metric, test.at, results)
    ours, observed = _numbers(row, results)
    sign = 1 if metric_named(results, test.metric)["better"] == "lower" else -1
    limit = test.by * abs(_means(row, results)[1])
    if row["pairs"] < LEAST_PAIRS or row["low"] is None:
        worse = sign * row["difference"] > limit
        return Finding(ours, "cannot tell", _few(row["pairs"], observed, "against" if worse else "for"))
    low, high = sorted((sign * row["low"], sign * row["high"]))
    about = f"{observed}; the 95 % interval"
    if high <= limit:
        return Finding(ours, "yes", f"{about} stays within {_whole(test.by)}")
    if low > limit:
        return Finding(ours, "no", f"{about} lies beyond {_whole(test.by)}")
    return Finding(ours, "cannot tell", f"{about} reaches over the limit of {_whole(test.by)}")


def _best(test: Best, part: Part, results: Results) -> Finding:
    """The first arm against every other: one that is better refutes, only worse ones confirm."""
    rows = [r for r in results["comparisons"] if r["metric"] == test.metric and r["at"] == test.at]
    rows = [row for row in rows if row["difference"] is not None]
    if not rows:
        return _unmeasured(test.metric, test.at, results)
    metric, first = metric_named(results, test.metric), rows[0]["against"]
    found = {arm["name"]: summarise(arm, [test.metric], test.at) for arm in results["arms"]}
    means = {name: one[test.metric]["mean"] for name, one in found.items() if one}
    order = sorted(means, key=lambda name: means[name], reverse=metric["better"] == "higher")
    place = order.index(first) + 1
    ours = (
        f"{order[0]} {means[order[0]]:.4g}; {first} {means[first]:.4g}, {_ordinal(place)} of {len(order)}"
    )
    ahead = [row for row in rows if row["verdict"] == "better"]
    better = [row["arm"] for row in ahead if row["p_adjusted"] <= ERROR_RATE]
    told = f"{order[0]} has the best mean {metric['label']}, {first} is {_ordinal(place)} of {len(order)}"
    if better:
        return Finding(ours, "no", f"{listed(better)} did better by the paired test; {told}")
    pairs = min(row["pairs"] for row in rows)
    if pairs < LEAST_PAIRS:
        return Finding(ours, "cannot tell", _few(pairs, told, "for" if place == 1 else "against"))
    if ahead:
        names = listed(row["arm"] for row in ahead)
        return Finding(
            ours, "cannot tell", f"that {names} did better does not survive Holm's correction; {told}"
        )
    if all(row["verdict"] == "worse" for row in rows):
        return Finding(ours, "yes", f"it did better than each of the {len(rows)} others by the paired test")
    alike = [row["arm"] for row in rows if row["verdict"] == "no difference found"]
    return Finding(ours, "cannot tell", f"no difference to {listed(alike)} was found; {told}")


def _trend(test: Trend, parts: list[tuple[Part, Results]]) -> Finding:
    """The ratio to the first arm by seed, in logarithms, in the last part against the first part."""
    shares = []
    for part, results in parts:
        arms = {arm["name"]: arm for arm in results["arms"]}
        ours = by_seed(arms[part.filled(test.arm)], test.metric, test.at)
        base = by_seed(results["arms"][0], test.metric, test.at)
        both = [seed for seed in ours.keys() & base.keys() if ours[seed] > 0 and base[seed] > 0]
        shares.append({seed: math.log(ours[seed] / base[seed]) for seed in both})
    means = [interval(share.values()).mean for share in shares]
    ours_text = ", ".join(
        f"{part.name}: {'not measured' if mean is None else _percent(math.expm1(mean))}"
        for (part, _), mean in zip(parts, means, strict=True)
    )
    pair = paired(shares[-1], shares[0])
    if pair.difference is None or pair.p is None:
        return _unmeasured(test.metric, test.at, parts[0][1])
    label = metric_named(parts[0][1], test.metric)["label"]
    told = f"against {parts[0][1]['arms'][0]['name']}, the {label} was {ours_text} (geometric means)"
    for_it = (pair.difference < 0) == (test.expect == "lower")
    if pair.pairs < LEAST_PAIRS:
        return Finding(ours_text, "cannot tell", _few(pair.pairs, told, "for" if for_it else "against"))
    tested = f"{p_value(pair.p)}, {pair.pairs} pairs"
    if judge(pair, test.expect) == "no difference found":
        return Finding(ours_text, "cannot tell", f"{told}; no change over the parts was found ({tested})")
    last = means[-1] or 0.0
    if for_it and (last < 0) != (test.expect == "lower"):
        return Finding(ours_text, "no", f"{told} ({tested}); in the last part there is no gain")
    return Finding(ours_text, "yes" if for_it else "no", f"{told} ({tested})")


def _speed(test: Speed, speeds: Results) -> Finding:
    """The ratio of times at the longest length; what lies within the spread of the runs stays open."""
    rows = _speed_rows(test, speeds)
    row, base = (next(r for r in rows if r["mixer"] == name) for name in (str(parse(test.arm)), "softmax"))
    if test.measure == "training":
        ratio, noise = 1 / row["ratio"], max(r["spread"] / r["tokens_per_second"] for r in (row, base))
        what, runs = "a training step", speeds["training"]["settings"]["rounds"]
    else:
        ratio = row["forward_ratio"]
        noise = max(r["forward_spread_ms"] / r["forward_ms"] for r in (row, base))
        runs = speeds["mixers"]["settings"]["repeats"]
        what = f"the {test.measure}, forward at {row['length']:,} tokens,"
    spread = f"spread {_whole(noise)} over {runs} runs"
    ours = f"{ratio:.2f} times softmax, {spread}"
    told = f"{what} takes {ratio:.2f} times as long as softmax's ({spread})"
    if runs < LEAST_RUNS:
        return Finding(ours, "cannot tell", f"{told}; fewer than {LEAST_RUNS} say nothing about the spread")
    if row.get("length", test.length) < test.length:
        return Finding(ours, "cannot tell", f"{told}; the claim is about {test.length:,} tokens and more")
    if test.expect == "same":
        apart = abs(ratio - 1)
        held = "yes" if apart + noise <= test.margin else "no" if apart - noise > test.margin else None
        told += f"; the same means within {_whole(test.margin)}"
    else:
        faster = ratio < 1
        held = None if abs(ratio - 1) <= noise else "yes" if faster == (test.expect == "faster") else "no"
    return Finding(ours, held or "cannot tell", told)


def _speed_rows(test: Speed, speeds: Results) -> list[Row]:
    if test.measure == "training":
        return list(speeds["training"]["rows"])
    rows = [row for row in speeds["mixers"]["rows"] if row["part"] == test.measure]
    longest = max(row["length"] for row in rows)
    return [row for row in rows if row["length"] == longest]


def _few(pairs: int, observed: str, points: str) -> str:
    seeds = "1 pair of seeds is" if pairs == 1 else f"{pairs} pairs of seeds are"
    return f"{seeds} too few, it takes {LEAST_PAIRS}; observed, {points} the claim: {observed}"


def _points(row: Row, expect: str) -> str:
    return "for" if (row["difference"] < 0) == (expect == "lower") and row["difference"] else "against"


def _unmeasured(metric: str, at: str, results: Results) -> Finding:
    label = metric_named(results, metric)["label"]
    return Finding("not measured", "cannot tell", f"there is no {label} {PLACES[at]} to judge by")


def _numbers(row: Row, results: Results) -> tuple[str, str]:
    """Our numbers for the table, and the same in words."""
    ours, base = _means(row, results)
    size = min(width(row), abs(base)) or abs(base)
    shown, against = in_words(ours, size / 2), in_words(base, size / 2)
    share = f" ({_percent(row['difference'] / abs(base))})" if base else ""
    text = f"{shown} against {against}{share}"
    if row["low"] is not None:
        difference, low, high = (in_words(row[k], size, sign=True) for k in ("difference", "low", "high"))
        text += f"; difference {difference}, 95 % interval {low} to {high}"
    metric = metric_named(results, row["metric"])
    # What leads to a loss is not measured at a checkpoint.
    place = "" if row["metric"] == "tokens_to_match" else f" {PLACES[row['at']]}"
    words = f"{metric['label']} of {row['arm']}{place} {shown} against {against}{share}"
    return f"{text}; {counted(row['pairs'], 'pair')}", words


def _means(row: Row, results: Results) -> tuple[float, float]:
    """Of both arms, over the seeds that both have."""
    arms = {arm["name"]: by_seed(arm, row["metric"], row["at"]) for arm in results["arms"]}
    ours, base = arms[row["arm"]], arms[row["against"]]
    seeds = ours.keys() & base.keys()
    return sum(ours[s] for s in seeds) / len(seeds), sum(base[s] for s in seeds) / len(seeds)


def _percent(share: float) -> str:
    text = f"{100 * share:+.1f}"
    return f"{text if float(text) else f'{100 * share:+.1g}'} %".replace("-", "−")


def _whole(share: float) -> str:
    return f"{100 * share:.0f} %"


def _ordinal(place: int) -> str:
    teens = 10 <= place % 100 <= 20
    return f"{place}{'th' if teens else {1: 'st', 2: 'nd', 3: 'rd'}.get(place % 10, 'th')}"
