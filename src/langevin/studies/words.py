"""What a study says: one sentence for each state of a contrast, and nothing stronger.

"Better" and "worse" are said of a confirmed contrast of the primary metric only; a diagnostic, or an upper
bound beside another, has a direction and no winner; all else is told with its interval.
"""

import math
from collections.abc import Iterator, Sequence

from langevin.evaluation.rows import Metric, Row
from langevin.studies.inference import ERROR_RATE, estimate
from langevin.studies.numbers import counted, in_words, listed, p_value, percent
from langevin.studies.plan import Claim, Part, Plan, seeds_in_words
from langevin.studies.results import (
    CONFIRMED,
    COSTS,
    TO_MATCH,
    Answer,
    ArmResult,
    Contrast,
    Key,
    PartResult,
    Results,
    Verdict,
    differences,
)

LONGEST_ANSWER = 30  # words
TOLERANCE = 0.01  # arms whose sizes differ by no more than this are called equal
MANY = 3  # arms that a sentence names; beyond, it counts them
UNPROVEN = "an upper bound above an exact loss proves nothing"


def contrast_in_words(results: Results, contrast: Contrast) -> str:
    """One sentence for the state of a contrast."""
    arm, seen = arm_of(contrast), observed(results, contrast)
    if contrast.state != "not judged" and contrast.judged < contrast.pairs:
        seen = f"judged with {counted(contrast.judged, 'pair')}; with all {contrast.pairs}, {seen}"
    against = contrast.against
    if contrast.state in ("better", "worse"):
        return f"{arm} is {contrast.state} than {against}: {seen}."
    if contrast.state in ("lower", "higher"):
        return f"{arm} has a {contrast.state} {_label(results, contrast.key)} than {against}: {seen}."
    if contrast.state == "as good":
        margin = with_unit(results.margin or 0.0, results.primary)
        return f"{arm} {_found(results, [contrast], against)} within {margin}: {seen}."
    hypotheses = len(results.judged)
    ending = {
        "does not survive": "; this does not survive "
        + (counted(hypotheses, "contrast") if hypotheses > 1 else "the exact test"),
        "not confirmed": ", not confirmed",
        "not proven": f"; {UNPROVEN}",
        "too few": f"; {counted(contrast.judged, 'pair')} of seeds cannot confirm anything",
        "not judged": "",
    }[contrast.state]
    return f"{arm} against {against}: {seen}{ending}."


def observed(results: Results, contrast: Contrast) -> str:
    """Direction, size and interval: "loss lower by 0.021 nats/token (95 % t interval 0.015 to 0.027)"."""
    metric, difference = results.metric(contrast.key.metric), contrast.difference
    if difference is None:
        counts = {arm.name: _diverged(arm) for arm in results.arms(contrast.key)}
        told = [
            f"{count} {'run' if count == 1 else 'runs'} of {arm}" for arm, count in counts.items() if count
        ]
        return f"{listed(told)} diverged, so there is no interval" if told else "not measured"
    label = _label(results, contrast.key)
    if difference == 0 and contrast.low == contrast.high:
        return f"{label} exactly equal"
    way = "lower" if difference < 0 else "higher"
    kinds = [arm.kind(metric.name) for arm in results.arms(contrast.key)]
    way += " than the upper bound" if kinds == ["exact", "bound"] else ""
    relative = contrast.key.place == "trend" or metric.name == TO_MATCH
    if contrast.key.place == "trend":
        first, last = results.parts[0].name, results.parts[-1].name
        label = f"ratio of {label} to {contrast.against}'s at {last} against {first}"
    if contrast.low is None or contrast.high is None:
        size = percent(abs(difference)) if relative else with_unit(abs(difference), metric)
        return f"{label} {way} by {size}"
    sign, width = math.copysign(1, difference), (contrast.high - contrast.low) / 2
    low, high = sorted((sign * contrast.low, sign * contrast.high))
    if relative:
        size, span = percent(abs(difference)), f"{percent(low)} to {percent(high)}"
    else:
        size = with_unit(abs(difference), metric, width)
        span = f"{in_words(low, width)} to {in_words(high, width)}"
    return f"{label} {way} by {size} (95 % t interval {span})"


def _label(results: Results, key: Key) -> str:
    """What is compared: where the likelihood of an arm is not known, the upper bound of a metric."""
    label = results.metric(key.metric).label
    ours, _ = results.arms(key)
    return f"upper bound of the {label}" if ours.kind(key.metric) == "bound" else label


def with_unit(value: float, metric: Metric, width: float = 0.0) -> str:
    shown = in_words(value, width)
    return f"{shown} {metric.unit}" if metric.unit not in ("", "fraction") else shown


def arm_of(contrast: Contrast) -> str:
    at = f" at {contrast.key.part}" if contrast.key.part and contrast.key.place != "trend" else ""
    return f"{contrast.key.arm}{at}"


def _diverged(arm: ArmResult) -> int:
    return sum(run.status == "diverged" for run in arm.runs)


def verdict(plan: Plan, results: Results) -> Verdict:
    """The answer, how sure it is, and at most three sentences more."""
    ended = sum(run.status != "missing" for run in results.runs)
    if not results.finished:
        far = f"{ended} of {counted(len(results.runs), 'run')} have ended"
        return Verdict(
            f"No answer yet: {far}.", "What is judged is fixed; it is told when all runs have ended."
        )
    # Of the arms against the first: what claims set against each other is told with them.
    own = [c for c in results.contrasts if (c.key.place, c.key.against) == ("best", "")]
    primary = [c for c in own if c.key.metric == results.primary.name]
    if not primary:
        return Verdict("One arm: there is nothing to compare it with.", "95 % t intervals over seeds.")
    if results.exploratory:
        return Verdict(
            _leading(results, primary), f"Exploratory: {results.exploratory}. Nothing is confirmed."
        )
    if not results.looks:
        first = f"the first of the declared looks is at {counted(plan.looks[0], 'seed')}"
        return Verdict(
            f"No answer yet: {first}.", f"There are {len(results.seeds)}. Nothing is judged before."
        )
    return Verdict(
        _answer(plan, results, primary), _sure(plan, results), tuple(_more(plan, results, primary))
    )


def _answer(plan: Plan, results: Results, primary: list[Contrast]) -> str:
    """The most telling sentence that has at most 30 words."""
    state = {
        name: [c for c in primary if c.state == name] for name in ("better", "worse", "lower", "higher")
    }
    first_arms = {c.against for c in primary}
    reference = first_arms.pop() if len(first_arms) == 1 else "the first arm of its part"
    if all(c.state == "too few" for c in primary):
        pairs = counted(max(c.judged for c in primary), "pair")
        return f"Cannot be judged: {pairs} of runs cannot confirm a difference; it takes {plan.least}."
    good = state["better"] or state["lower"]
    same = [c for c in primary if c.state == "as good"]
    others = [every for every in state.values() if every and every is not good]
    if good:
        others += [same] if same else []
        said, share = _found(results, good, reference), f"{len(good)} of {len(primary)}"
        size = _largest(results, good)
        first = [f"{_named(good)} {said}{size}", f"{share} {said}{size}", f"{share} {said}"]
    elif same:
        first = [f"{_named(same)} {_found(results, same, reference)}"]
    elif not others:
        only = f": {observed(results, primary[0])}" if len(primary) == 1 else f" in {results.primary.label}"
        text = f"No difference to {reference} was confirmed{only}."
        return text if len(text.split()) <= LONGEST_ANSWER else "No difference was confirmed."
    elif state["worse"]:
        first = [f"No arm is better than {reference}"]
    else:
        first = [f"No arm {_found(results, state['higher'][:1], reference, 'lower')}"]
    bad = [(every, _found(results, every)) for every in others]
    last = ["".join(f"; {_named(every)} {way}" for every, way in bad)]
    last += ["".join(f"; {len(every)} {way}" for every, way in bad)]
    if not good:
        sized = "".join(f"; {_named(every)} {way}{_largest(results, every)}" for every, way in bad)
        last = [sized, *last]
    options = [f"{a}{b}." for a in first for b in last]
    best = "lower" if state["lower"] or state["higher"] else "better"
    counts = [f"{len(every)} {every[0].state}" for every in others] or ["0 worse"]
    options.append(f"Of {len(primary)} contrasts {len(good)} are {best}, {', '.join(counts)}.")
    return next((text for text in options if len(text.split()) <= LONGEST_ANSWER), options[-1])


def _found(results: Results, every: list[Contrast], against: str = "", state: str = "") -> str:
    """What arms of one state are: "is better than softmax", "are lower in calibration error", "have a lower
    upper bound of the loss". Another state may be named."""
    state, label, bounds = state or every[0].state, results.primary.label, results.bounded(every[0].key)
    be, have = ("is", "has") if len(every) == 1 else ("are", "have")
    if state == "as good":
        same = f"{have} an upper bound of the {label} as low" if bounds else f"{be} as good"
        return f"{same} as {against}" + ("'s" if bounds else "") if against else same
    way = f"{be} {state}" if state in ("better", "worse") else f"{be} {state} in {label}"
    way = f"{have} a {state} upper bound of the {label}" if bounds else way
    return f"{way} than {against}" if against else way


def _largest(results: Results, every: list[Contrast]) -> str:
    """By how much, of the arm with the largest difference, which is named among several."""
    most = max(every, key=_size)
    return ("" if len(every) == 1 else f", most {arm_of(most)}") + _by(results, most)


def _size(contrast: Contrast) -> float:
    """By which contrasts are ranked: divergence is the largest."""
    return math.inf if contrast.difference is None else abs(contrast.relative or 0)


def _leading(results: Results, primary: list[Contrast]) -> str:
    """Of an exploratory page: what was seen of the arm with the largest difference."""
    seen = [c for c in primary if c.difference is not None]
    if not seen:
        return "Nothing can be compared."
    most = max(seen, key=_size)
    text = f"Seen, not confirmed: {arm_of(most)} against {most.against}, {observed(results, most)}."
    short = len(text.split()) <= LONGEST_ANSWER
    return text if short else f"Seen, not confirmed: {arm_of(most)} differs most."


def _by(results: Results, contrast: Contrast) -> str:
    """by 0.021 nats/token (1.4 %)"""
    if contrast.difference is None:
        good = contrast.lower == results.primary.low_is_good
        return f", as {contrast.against if good else contrast.key.arm} diverged"
    if (contrast.difference < 0) != contrast.lower:
        return ""  # seeds that came later point the other way; the sentence of the contrast says so
    size = with_unit(abs(contrast.difference), results.primary)
    share = f" ({percent(abs(contrast.relative))})" if contrast.relative is not None else ""
    return f" by {size}{share}"


def _named(every: list[Contrast]) -> str:
    if len(every) > MANY:
        return f"{len(every)} arms"
    return listed(arm_of(c) for c in every)


def _sure(plan: Plan, results: Results) -> str:
    seeds = sorted({seed for look in results.looks for seed in look.seeds})
    least = min((c.p_adjusted for c in results.judged if c.p_adjusted is not None), default=1.0)
    looks = f" and {len(plan.looks)} looks" if plan.looks else ""
    family = counted(len(results.judged), "contrast")
    return (
        f"{counted(len(seeds), 'seed')}, paired; exact sign-flip test with Holm's correction over "
        f"{family}{looks}: least {p_value(least)}; 95 % t intervals."
    )


def _more(plan: Plan, results: Results, primary: list[Contrast]) -> list[str]:
    """Sentences in the order of their weight, at most three."""
    found = []
    if results.answers:
        found.append(claims_in_short(results.answers))
    diverged = sorted({arm.name for part in results.parts for arm in part.arms if _diverged(arm)})
    if diverged:
        found.append(f"Runs of {listed(diverged)} diverged: they rank after all that did not.")
    if results.within is not None:
        found += _near(results)
    unproven = [c for c in primary if c.state == "not proven"]
    open_ = [c for c in primary if c.state not in (*CONFIRMED, "as good", "not proven")]
    told = [_named(open_)] if open_ and len(primary) > 1 else []
    told += [f"{_named(unproven)}, as {UNPROVEN}"] if unproven else []
    if told:
        found.append(f"Not confirmed: {'; '.join(told)}.")
    added = [seed for seed in results.seeds if all(seed not in look.seeds for look in results.looks)]
    if added and results.looks:
        came = f"Seeds {seeds_in_words(tuple(added))} came after this verdict"
        found.insert(0, f"{came}: they narrow the intervals and change no word of it.")
    return found[:3]


def claims_in_short(answers: Sequence[Answer]) -> str:
    """Of 8 published claims: 2 seen in direction, 1 in the opposite direction and 5 not seen."""
    ways = {"seen": "seen in direction", "opposite": "in the opposite direction"}
    ways |= {"not seen": "not seen", "not judged": "not judged"}
    counts = {way: sum(answer.direction == name for answer in answers) for name, way in ways.items()}
    told = listed(f"{count} {way}" for way, count in counts.items() if count)
    return f"Of {counted(len(answers), 'published claim')}: {told}."


def _near(results: Results) -> Iterator[str]:
    """How many arms came near the untouched model they began from."""
    for part in (part for part in results.parts if part.untouched is not None):
        needed = {arm.name: to_untouched(results, part, arm).values() for arm in part.arms}
        reached = [arm for arm, every in needed.items() if every and None not in every]
        at = f" at {part.name}" if part.name else ""
        names = listed(reached) if reached else "no arm"
        yield f"Within {results.within:g} of the untouched model's loss{at} came {names}."


def to_untouched(results: Results, part: PartResult, arm: ArmResult) -> dict[int, float | None]:
    """By seed: how much of the budget until the loss was near that of the untouched model."""
    best = part.untouched.best if part.untouched is not None else None
    if best is None or results.within is None:
        return {}
    near = best.loss + results.within
    return {
        run.seed: run.amount_to(near) if run.status == "done" else None for run in arm.runs if run.ended
    }


def answers(plan: Plan, results: Results) -> tuple[Answer, ...]:
    """Each published claim beside what was found: its direction, and our size beside the published one."""
    if not results.finished or not results.looks:
        return ()
    return tuple(_claim_answer(plan, results, claim) for claim in plan.claims)


def _claim_answer(plan: Plan, results: Results, claim: Claim) -> Answer:
    found = [results.contrast(key) for key in plan.keys_of(claim)]
    known = [c for c in found if c is not None and c.pairs]
    direction = _no_worse(plan, results, claim) if claim.expect == "no worse" else _direction(claim, known)
    ours = "; ".join(_ours(results, claim, c) for c in known) if known else "not measured"
    return Answer(claim.part, claim.claim, claim.published, direction, ours)  # type: ignore[arg-type]


def _direction(claim: Claim, found: list[Contrast]) -> str:
    """Seen, where all contrasts are confirmed that way; opposite, where one is confirmed the other way; not
    judged, where none has pairs enough to be confirmed."""
    if all(c.state in ("too few", "not judged") for c in found):
        return "not judged"
    ways = [("lower" if c.lower else "higher") if c.state in CONFIRMED else None for c in found]
    if all(way == claim.expect for way in ways):
        return "seen"
    return "opposite" if any(way not in (None, claim.expect) for way in ways) else "not seen"


def _no_worse(plan: Plan, results: Results, claim: Claim) -> str:
    """By the 90 % interval of the pairs of the verdict: seen, where it stays within the limit; opposite,
    where it lies beyond; not judged, where no contrast has pairs enough to be confirmed."""
    sides = set()
    for key in plan.keys_of(claim):
        pairs = [x for seed, x in differences(results, key).items() if seed in results.looks[-1].seeds]
        found, contrast = estimate(pairs, 0.9), results.contrast(key)
        mean = contrast.reference if contrast is not None else None
        if len(pairs) < plan.least:
            sides.add("not judged")
            continue
        if found is None or found.low is None or found.high is None or mean is None:
            return "not seen"
        limit = (claim.size or 0.0) * (abs(mean) if claim.relative else 1)
        sign = 1 if results.metric(key.metric).low_is_good else -1
        low, high = sorted((sign * found.low, sign * found.high))
        sides.add("seen" if high <= limit else "opposite" if low > limit else "not seen")
    return sides.pop() if len(sides) == 1 else "not seen"


def _ours(results: Results, claim: Claim, c: Contrast) -> str:
    text = f"{c.key.arm}: {observed(results, c)}"
    if c.relative is not None and c.key.place == "best":
        text += f", {percent(c.relative, sign=True)}"
    if c.state not in CONFIRMED and claim.expect != "no worse":
        text += ", not confirmed" if c.p_adjusted is None else f", not confirmed ({p_value(c.p_adjusted)})"
    if claim.size is not None and claim.expect != "no worse" and c.low is not None and c.high is not None:
        scale = abs(c.reference) if claim.relative and c.reference and c.key.place == "best" else 1.0
        inside = c.low <= claim.size * scale <= c.high
        published = (
            percent(claim.size, sign=True) if claim.relative else f"{claim.size:+g}".replace("-", "−")
        )
        text += f"; the published {published} lies {'inside' if inside else 'outside'} the interval"
    return text


def not_controlled(plan: Plan, results: Results) -> Iterator[str]:
    """What could explain a difference, or its absence, besides the arms themselves."""
    yield from plan.notes
    yield _tuning(plan, results)
    if plan.equal_flops:
        yield "Arms have equal training FLOPs, and so not the same number of tokens."
    for part in results.parts:
        at = f"{part.name}: " if part.name else ""
        for name in ("parameters", "flops_per_token"):
            if name == "parameters" or not plan.equal_flops:
                yield from (at + sentence for sentence in unequal(part, name))
        others = [f"{a.name} ({', '.join(own)})" for a in part.arms if (own := _own_settings(plan, a))]
        if others:
            yield f"{at}Settings of their own besides the mixer: {listed(others)}."
        late = [arm.name for arm in part.arms if _still_improving(arm)]
        if late:
            yield f"{at}Still improving when the budget ended: {listed(late)}; more could change the order."
    yield from _seeds(results)
    sets = len(results.data.get("sets", ()))
    what = f"{f'{sets} data sets' if sets else 'One data set'} ({results.data.get('name')})"
    budgets = "; ".join(dict.fromkeys(_budget(plan, part) for part in plan.parts))
    budget = "" if results.exploratory else f" and one budget{' each' if sets else ''} ({budgets})"
    yield f"{what}{budget}: others were not tried."
    made = {
        tuple(run.environment.get(k) for k in ("device", "torch", "commit"))
        for run in results.runs
        if run.environment
    }
    if len(made) > 1:
        yield f"The runs were not all made with one device, torch and commit, but with {len(made)}."


def _budget(plan: Plan, part: Part) -> str:
    config = part.config
    amount = (
        f"{config.tokens:,} {plan.task.unit}" if config.tokens is not None else f"{config.steps:,} steps"
    )
    return f"{amount}, {config.schedule} schedule"


def _tuning(plan: Plan, results: Results) -> str:
    arms = [arm for part in results.parts for arm in part.arms]
    given = {plan.config(p, a, 0).lr for p in plan.parts for a in p.read_arms}
    if not plan.tune:
        told = f"Learning rates ({listed(f'{rate:g}' for rate in sorted(given))}) were given and not tuned"
        return f"{told}: others may suit other arms."
    short = f" of {plan.trial_tokens:,} {plan.task.unit}" if plan.trial_tokens else ""
    short += " or as many FLOPs" if short and plan.equal_flops else ""
    told = (
        f"Learning rates were chosen per arm by {plan.trials} trials{short} on validation, around a given "
        "rate, with one seed that is not judged; nothing else was tuned."
    )
    told += " What is best in short trials may be too large a rate for a run." if short else ""
    lost = [arm.name for arm in arms if arm.tuning and all(trial.loss is None for trial in arm.tuning)]
    edge = [a.name for a in arms if a.tuning and a.settings.get("lr") in (a.tuning[0].lr, a.tuning[-1].lr)]
    if lost:
        told += f" All trials of {listed(dict.fromkeys(lost))} diverged."
    if edge:
        told += f" The best rate of {listed(dict.fromkeys(edge))} was the first or last tried."
    return told


def _own_settings(plan: Plan, arm: ArmResult) -> list[str]:
    hidden = ("mixer", "lr") if plan.tune else ("mixer",)
    return [f"{key} {value}" for key, value in arm.settings.items() if not (key in hidden or value is None)]


def unequal(part: PartResult, name: str) -> Iterator[str]:
    """Where arms differ in a size from the first arm by more than 1 %."""
    base = part.reference.cost(name)
    found = []
    for arm in part.arms[1:]:
        row: Row | None = arm.cost(name)
        if base and row and base.value and abs(row.value / base.value - 1) > TOLERANCE:
            share = row.value / base.value - 1
            found.append(f"{arm.name} {percent(abs(share))} {'more' if share > 0 else 'fewer'}")
    if found:
        yield f"Against {part.reference.name}, not the same {COSTS[name].label}: {listed(found)}."


def _still_improving(arm: ArmResult) -> bool:
    """Whether most runs ended at their best."""
    late = [run.best == run.curve[-1] for run in arm.done if run.curve]
    return bool(late) and 2 * sum(late) > len(late)


def _seeds(results: Results) -> Iterator[str]:
    failed = sorted({arm.name for _, arm, run in results.placed_runs if run.status == "failed"})
    if failed:
        yield f"Runs of {listed(failed)} failed and are missing: those left may be the easier ones."
    if len(results.seeds) > 1:
        yield (
            "Intervals are over seeds (initial weights and data order); every run was scored on the same "
            "test data, whose choice is not in them."
        )
    if any(c.p_adjusted is not None and c.p_adjusted > ERROR_RATE for c in results.judged):
        yield "What was not confirmed may still be there: too few seeds, or too small a difference."
