"""What a study says: a sentence for each state of a contrast, and nothing stronger than it may."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from simulated import DIVERGED, FACTS, FAILED, MISSING, curve, judged, plan_of, run_of, states, told

from langevin.evaluation.rows import Row
from langevin.studies.compare import concluded
from langevin.studies.plan import Claim, Part, Plan
from langevin.studies.report import render, study_page
from langevin.studies.results import ArmResult, Key, PartResult, RunResult, Trial
from langevin.studies.words import contrast_in_words

BASE = [3.0, 3.1, 2.9, 3.05, 2.95, 3.02, 2.98, 3.04]
NOISE = [0.01, -0.02, 0.015, -0.005, 0.02, -0.01, 0.004, -0.012]


def shifted(by: float, noise: float = 0.1) -> list[float]:
    return [b + by + noise * n for b, n in zip(BASE, NOISE, strict=True)]


def sentences(results):
    return {
        c.key.arm: contrast_in_words(results, c)
        for c in results.contrasts
        if c.key.metric == results.primary.name and c.key.place == "best"
    }


def one(values, base=BASE, **options):
    """The state of an arm against another, its sentence, and all results."""
    _, results = judged({"softmax": base, "ours": values}, **options)
    return states(results)["ours"], sentences(results)["ours"], results


def test_better_and_worse_are_said_of_a_confirmed_difference():
    state, sentence, results = one(shifted(-0.02))
    assert state == "better"
    assert re.fullmatch(
        r"ours is better than softmax: loss lower by 0\.02\d* nats/token "
        r"\(95 % t interval 0\.01\d* to 0\.02\d*\)\.",
        sentence,
    )
    assert results.verdict.answer == "ours is better than softmax by 0.020 nats/token (0.7 %)."
    assert "8 seeds" in results.verdict.sure
    assert "over 1 contrast: least p = 0.0078" in results.verdict.sure
    state, sentence, results = one(shifted(0.02))
    assert state == "worse"
    assert sentence.startswith("ours is worse than softmax: loss higher by 0.02")
    assert results.verdict.answer.startswith("No arm is better than softmax; ours is worse by 0.02")


def test_higher_is_better_where_the_metric_says_so():
    base = [0.5 + n for n in NOISE]
    state, sentence, _ = one([x + 0.05 for x in base], base, primary="accuracy")
    assert state == "better"
    assert sentence.startswith("ours is better than softmax: next-token accuracy higher by 0.05")


def test_what_was_not_confirmed_is_told_with_its_interval_and_no_more():
    state, sentence, results = one([b + n for b, n in zip(BASE, NOISE, strict=True)])
    assert state == "not confirmed"
    assert sentence.startswith(
        "ours against softmax: loss higher by 0.0003 nats/token (95 % t interval −0.0"
    )
    assert sentence.endswith("), not confirmed.")
    assert results.verdict.answer.startswith("No difference to softmax was confirmed: loss higher by")


def test_an_interval_without_0_that_the_correction_does_not_confirm_does_not_survive():
    """C7: version 0.1 said "no difference found … the interval still allows −0.033 to −0.009"."""
    near = [-0.03, -0.02, -0.04, 0.001, -0.03, -0.02, -0.01, -0.03]
    arms = {"softmax": BASE, "ours": [b + n for b, n in zip(BASE, near, strict=True)]}
    arms |= {f"m{i}": shifted(0.0, 1 + i / 10) for i in range(4)}
    _, results = judged(arms)
    assert states(results)["ours"] == "does not survive"
    assert sentences(results)["ours"].endswith("; this does not survive 5 contrasts.")
    found = results.contrast(Key("", "ours", "nll"))
    assert found.high < 0
    assert found.p <= 0.05 < found.p_adjusted


@pytest.mark.parametrize("seed", range(20))
def test_a_label_never_contradicts_the_interval_beside_it(seed):
    """C7."""
    rng = np.random.default_rng(seed)
    values = {f"m{i}": list(3 + rng.normal(-0.006 * i, 0.01, 8)) for i in range(4)}
    _, results = judged(values)
    for c in results.judged:
        out = not c.low <= 0 <= c.high
        assert c.state in (
            ("better", "worse", "does not survive") if out else ("better", "worse", "not confirmed")
        )


def test_as_good_needs_the_90_percent_interval_inside_the_margin():
    values = [b + n for b, n in zip(BASE, NOISE, strict=True)]
    state, sentence, results = one(values, margin=0.02)
    found = results.contrast(Key("", "ours", "nll"))
    assert state == "as good"
    assert max(-found.low90, found.high90) < 0.02
    assert sentence.startswith("ours is as good as softmax within 0.020 nats/token: loss higher by")
    assert results.verdict.answer == "ours is as good as softmax."
    assert one(values, margin=0.99 * max(-found.low90, found.high90))[0] == "not confirmed"
    assert one(values)[0] == "not confirmed"


def test_an_answer_names_what_is_as_good_beside_what_is_better():
    near = [b + n for b, n in zip(BASE, NOISE, strict=True)]
    _, results = judged({"softmax": BASE, "far": shifted(-0.3), "ours": near, "mine": near}, margin=0.02)
    assert states(results) == {"far": "better", "ours": "as good", "mine": "as good"}
    assert results.verdict.answer.startswith("far is better than softmax by ")
    assert results.verdict.answer.endswith("; ours and mine are as good.")


def test_too_few_seeds_judge_nothing_and_say_how_many_would():
    state, sentence, results = one([2.5] * 4, [3.0, 3.1, 2.9, 3.0])
    assert state == "too few"
    assert sentence.endswith("; 4 pairs of seeds cannot confirm anything.")
    assert (
        results.verdict.answer
        == "Cannot be judged: 4 pairs of runs cannot confirm a difference; it takes 6."
    )


@pytest.mark.parametrize(
    ("ours", "base", "by", "state"),
    [
        ("bound", "exact", -0.02, "better"),
        ("bound", "exact", 0.02, "not proven"),
        ("exact", "bound", 0.02, "worse"),
        ("exact", "bound", -0.02, "not proven"),
        ("bound", "bound", 0.02, "higher"),
        ("bound", "bound", -0.02, "lower"),
        ("exact", "exact", 0.02, "worse"),
    ],
)
def test_a_bound_below_an_exact_loss_proves_better_and_one_above_proves_nothing(ours, base, by, state):
    found, sentence, results = one(shifted(by), kinds={"softmax": base, "ours": ours})
    assert found == state
    if state == "not proven":
        assert sentence.endswith("; an upper bound above an exact loss proves nothing.")
        assert not re.search(r"\b(better|worse)\b", sentence + told(results))
        assert told(results).endswith(
            "Not confirmed: ours, as an upper bound above an exact loss proves nothing."
        )


def test_of_two_upper_bounds_the_lower_one_is_called_that_and_not_better():
    """It may be the tighter bound of the worse model."""
    kinds = {"softmax": "bound", "ours": "bound", "theirs": "bound", "ar": "exact"}
    values = {"softmax": BASE, "ours": shifted(-0.02), "theirs": shifted(0.03), "ar": shifted(-0.3)}
    claims = (Claim("It is lower.", "", "ours", "nll", "lower"),)
    _, results = judged(values, kinds=kinds, claims=claims)
    assert states(results) == {"ours": "lower", "theirs": "higher", "ar": "not proven"}
    assert results.verdict.answer.startswith(
        "ours has a lower upper bound of the loss than softmax by 0.020 nats/token ("
    )
    assert results.verdict.answer.endswith("; theirs has a higher upper bound of the loss.")
    assert results.verdict.more[-1] == (
        "Not confirmed: ar, as an upper bound above an exact loss proves nothing."
    )
    said = sentences(results)
    assert said["ours"].startswith("ours has a lower upper bound of the loss than softmax: upper bound")
    assert said["ar"].startswith("ar against softmax: loss lower than the upper bound by 0.30")
    assert results.answers[0].direction == "seen"
    assert not re.search(r"\b(better|worse)\b", " ".join(said.values()) + told(results))
    alone = {name: values[name] for name in ("softmax", "theirs")}
    answer = judged(alone, kinds=kinds)[1].verdict.answer
    assert answer.startswith("No arm has a lower upper bound of the loss than softmax; theirs has a higher")


def test_where_seeds_are_too_few_it_is_the_bound_that_is_higher():
    kinds = {"softmax": "exact", "ours": "bound"}
    _, sentence, _ = one(shifted(0.3)[:2], BASE[:2], kinds=kinds)
    assert sentence.startswith("ours against softmax: upper bound of the loss higher by 0.299 nats/token")


def test_two_upper_bounds_within_the_margin_do_not_make_two_models_as_good():
    kinds = {"softmax": "bound", "ours": "bound"}
    state, sentence, results = one(shifted(0.0), kinds=kinds, margin=0.1)
    assert state == "as good"
    assert results.verdict.answer == "ours has an upper bound of the loss as low as softmax's."
    assert "is as good" not in sentence


@pytest.mark.parametrize(("lost", "said"), [("ours", "higher"), ("softmax", "lower")])
def test_an_arm_with_a_bound_that_diverged_is_the_one_that_is_named(lost, said):
    values = {"softmax": list(BASE), "ours": shifted(0.0)}
    values[lost] = [DIVERGED] * 7 + values[lost][7:]
    _, results = judged(values, kinds={"softmax": "bound", "ours": "bound"})
    assert states(results)["ours"] == said
    assert f"{said} upper bound of the loss" in results.verdict.answer
    assert f", as {lost} diverged" in results.verdict.answer


def test_an_exact_loss_near_a_bound_is_not_as_good():
    """What the bound is a bound of may be far lower."""
    kinds = {"softmax": "bound", "ours": "exact"}
    assert one(shifted(0.0), kinds=kinds, margin=0.1)[0] == "not confirmed"


@pytest.mark.parametrize("seeds", [2, 5])
def test_too_few_seeds_are_not_as_good_and_no_worse_either(seeds):
    claim = Claim("no worse", "", "ours", "nll", "no worse", size=0.5)
    values = {"softmax": BASE[:seeds], "ours": shifted(0.0)[:seeds]}
    _, results = judged(values, margin=1.0, claims=(claim,))
    assert states(results)["ours"] == "too few"
    assert results.answers[0].direction == "not judged"


@pytest.mark.parametrize("by", [-0.5, 0.5])
def test_a_claim_is_not_judged_where_seeds_are_too_few_whichever_way_they_point(by):
    claims = (claim("lower"), claim("higher"))
    values = {"softmax": BASE[:2], "ours": shifted(by)[:2]}
    _, results = judged(values, claims=claims)
    assert [answer.direction for answer in results.answers] == ["not judged"] * 2
    assert results.verdict.answer.startswith("Cannot be judged: 2 pairs")
    assert "Of 2 published claims: 2 not judged." in results.verdict.more
    assert "not seen" not in render(study_page(results, figures=False))


def test_examples_that_point_the_other_way_or_are_too_few_confirm_nothing():
    def state(ours, base):
        return one(shifted(-0.02), examples={"ours": ours, "softmax": base})[0]

    ten = [0.01 * n for n in range(10)]
    assert state(lambda s: [x - 1 for x in ten], lambda s: ten) == "better"
    assert state(lambda s: [x + 1 for x in ten], lambda s: ten) == "not confirmed"
    assert state(lambda s: [0.0], lambda s: [1.0]) == "not confirmed"
    assert state(lambda s: ten, lambda s: ten[:5]) == "not confirmed"
    assert state(lambda s: ten, lambda s: []) == "not confirmed"


@pytest.mark.parametrize(
    ("first", "last", "near"),
    [(2.0, 2.0, "m0 and m1"), (3.0, 2.01, "m0 and m1"), (3.0, 2.9, "m0"), (3.0, DIVERGED, "m0")],
)
def test_arms_that_start_near_the_untouched_model_came_near_it(first, last, near):
    plan = plan_of(2, 2)

    def run(seed, *losses):
        points = tuple(replace(p, amount=p.amount - 100) for p in curve(*losses))
        status = "diverged" if DIVERGED in losses else "done"
        return RunResult(
            seed, status, rows=(Row("nll", 2.0),), curve=points[: 1 if DIVERGED in losses else None]
        )

    arms = [
        ArmResult("m0", {}, tuple(run(seed, 2.0, 2.0) for seed in range(2))),
        ArmResult("m1", {}, tuple(run(seed, first, last) for seed in range(2))),
    ]
    part = PartResult("", tuple(arms), untouched=run(0, 2.0))
    results = concluded(plan, (part,), FACTS, "")
    assert f"Within 0.05 of the untouched model's loss came {near}." in results.verdict.more


def test_a_diagnostic_has_a_direction_and_no_winner():
    """C2: the demo of version 0.1 said "sima is better than softmax" by ECE of a model 0.38 nats worse."""
    _, results = judged(
        {"softmax": BASE, "down": shifted(-0.02), "up": shifted(0.02)},
        primary="ece",
        kinds=dict.fromkeys(("softmax", "down", "up"), "diagnostic"),
    )
    assert states(results) == {"down": "lower", "up": "higher"}
    assert sentences(results)["down"].startswith("down has a lower calibration error (ECE) than softmax: ")
    page = render(study_page(results, figures=False))
    assert not re.search(r"\b(better|worse)\b", told(results) + page)


def test_other_metrics_are_told_with_an_interval_and_never_judged():
    """C2: only the primary metric is judged, whatever the others show."""
    plan = plan_of(2, 8)
    arms = []
    for i, arm in enumerate(plan.parts[0].read_arms):
        runs = tuple(
            run_of(s, 3 + n, rows={"accuracy": Row("accuracy", 0.5 + i / 10 + n)})
            for s, n in enumerate(NOISE)
        )
        arms.append(ArmResult(arm.name, arm.changes, runs))
    results = concluded(plan, (PartResult("", tuple(arms)),), FACTS, "")
    found = results.contrast(Key("", "m1", "accuracy"))
    assert (found.state, found.p, found.p_adjusted) == ("not judged", None, None)
    assert found.low > 0.05
    assert not re.search(r"\b(better|worse)\b", told(results))


# Examples as a second source of variance


@pytest.mark.parametrize(("spread", "state"), [(0.01, "better"), (2.0, "not confirmed")])
def test_where_examples_vary_too_better_needs_their_interval_to_exclude_0(spread, state):
    rng = np.random.default_rng(0)
    own = rng.normal(0, spread, 40)
    own -= own.mean()
    examples = {"softmax": lambda seed: [0.0] * 40, "ours": lambda seed: list(-0.02 + own)}
    assert one(shifted(-0.02), examples=examples)[0] == state


# Divergence


@pytest.mark.parametrize("by", [-1.0, -0.02, 0.0, 0.02])
@pytest.mark.parametrize("lost", [1, 2, 3])
@pytest.mark.parametrize("arms", [2, 4])
def test_an_arm_that_diverges_is_never_better_whatever_its_other_runs(by, lost, arms):
    """C5: version 0.1 dropped the runs that diverged and called the others "better … significant"."""
    values = [DIVERGED] * lost + shifted(by)[lost:]
    others = {f"m{i}": shifted(0.001 * i) for i in range(arms - 2)}
    _, results = judged({"softmax": BASE, "ours": values, **others})
    assert states(results)["ours"] != "better"
    found = results.contrast(Key("", "ours", "nll"))
    assert (found.difference, found.low, found.high, found.low90) == (None, None, None, None)
    assert found.pairs == 8
    said = f"{lost} run{'s' * (lost > 1)} of ours diverged, so there is no interval"
    assert said in sentences(results)["ours"]
    assert "Runs of ours diverged" in told(results)


def test_an_arm_that_always_diverges_is_worse_and_its_reference_too():
    assert one([DIVERGED] * 8)[0] == "worse"
    state, sentence, results = one(BASE, [DIVERGED] * 8)
    assert state == "better"
    assert sentence == "ours is better than softmax: 8 runs of softmax diverged, so there is no interval."
    assert results.verdict.answer == "ours is better than softmax, as softmax diverged."


def test_where_both_diverged_the_difference_is_0():
    state, _, results = one([DIVERGED] * 2 + shifted(-0.02)[2:], [DIVERGED] * 2 + BASE[2:])
    found = results.contrast(Key("", "ours", "nll"))
    assert found.p == 2 / 2**6
    assert found.pairs == 8
    assert (found.difference, found.low) == (None, None)
    assert state == "not confirmed"  # an arm that diverged on 2 of 8 seeds is never better


def test_where_all_diverged_nothing_is_as_good():
    lost = [DIVERGED] * 8
    assert one(lost, lost, margin=1.0)[0] == "not confirmed"


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_measurement_that_is_not_finite_is_a_divergence_and_not_missing(value):
    """A model that gives NaN on test is not left out of the comparison."""
    plan = plan_of(2, 8)
    ours = [run_of(seed, x) for seed, x in enumerate(shifted(-0.02))]
    ours[:2] = [RunResult(seed, "done", rows=(Row("nll", value),)) for seed in (0, 1)]
    base = [run_of(seed, x) for seed, x in enumerate(BASE)]
    arms = [ArmResult(name, {}, tuple(runs)) for name, runs in (("m0", base), ("m1", ours))]
    results = concluded(plan, (PartResult("", tuple(arms)),), FACTS, "")
    found = results.contrast(Key("", "m1", "nll"))
    assert (found.pairs, found.state, found.low) == (8, "not confirmed", None)


def test_divergence_is_worst_where_higher_is_better_too():
    base = [0.5 + n for n in NOISE]
    values = [DIVERGED] * 3 + [x + 0.05 for x in base[3:]]
    assert one(values, base, primary="accuracy")[0] != "better"
    assert one([DIVERGED] * 8, base, primary="accuracy")[0] == "worse"


def test_a_run_that_failed_is_missing_and_its_pair_with_it():
    state, _, results = one([FAILED, *shifted(-0.02)[1:]])
    assert (results.contrast(Key("", "ours", "nll")).pairs, state) == (7, "better")
    assert any("Runs of ours failed" in line for line in results.not_controlled)


# How far, and what was not planned


def test_before_all_runs_have_ended_there_is_no_verdict_and_no_p():
    _, _, results = one([*shifted(-0.02)[:7], MISSING])
    assert results.verdict.answer == "No answer yet: 15 of 16 runs have ended."
    assert all(c.p is None and c.state == "not judged" for c in results.contrasts)
    assert results.contrast(Key("", "ours", "nll")).high < 0  # intervals are there


def test_what_was_not_planned_is_exploratory_and_nothing_is_confirmed():
    """C6: hindsight left no trace."""
    _, _, results = one(shifted(-0.02), exploratory="these runs were not planned as one study")
    assert results.exploratory
    assert results.verdict.answer.startswith(
        "Seen, not confirmed: ours against softmax, loss lower by 0.02"
    )
    assert (
        results.verdict.sure
        == "Exploratory: these runs were not planned as one study. Nothing is confirmed."
    )
    assert all(c.state == "not judged" for c in results.contrasts)


# Seeds that came later


def grown(values, base=BASE, seen=7, **options):
    """A study with a verdict from the first `seen` seeds."""
    looks = [{"seeds": list(range(seen)), "missing": []}]
    return one(values, base, facts={"looks": looks}, **options)


@pytest.mark.parametrize("last", [-0.5, 0.0, 0.5, DIVERGED])
@pytest.mark.parametrize("by", [-0.02, 0.0, 0.02])
def test_seeds_that_came_later_change_no_word_of_the_verdict(last, by):
    """C10: seeds added one by one gave new chances."""
    before = one(shifted(by)[:7], BASE[:7])[0]
    after, _, results = grown([*shifted(by)[:7], BASE[7] + last])
    assert after == before
    assert results.verdict.more[0] == (
        "Seeds 7 came after this verdict: they narrow the intervals and change no word of it."
    )


def test_a_run_that_was_missing_at_the_look_stays_out_of_the_verdict():
    looks = [{"seeds": list(range(8)), "missing": [["", "ours", 0]]}]
    _, _, results = one(shifted(-0.02), facts={"looks": looks})
    found = results.contrast(Key("", "ours", "nll"))
    assert (found.p, found.pairs) == (2 / 2**7, 8)


@pytest.mark.parametrize(
    ("seeds", "answer"),
    [(6, "No answer yet: the first of the declared looks is at 7 seeds."), (7, "better"), (8, "better")],
)
def test_a_declared_look_is_the_verdict_and_nothing_is_judged_before(seeds, answer):
    _, _, results = one(shifted(-0.02)[:seeds], BASE[:seeds], looks=(7, 10))
    assert answer in results.verdict.answer
    if seeds >= 7:
        assert results.judged[0].p_adjusted == 2 * 2 / 2**7
        assert "and 2 looks" in results.verdict.sure
    else:
        assert results.judged == []


def test_a_later_declared_look_can_confirm_and_an_earlier_finding_stays():
    values = [b + d for b, d in zip(BASE, [0.01, 0.02] + [-0.03] * 6, strict=True)]
    state, sentence, _ = one(values, looks=(6, 8))
    assert (state, sentence.endswith("; this does not survive the exact test.")) == (
        "does not survive",
        True,
    )
    late = [b - 0.03 for b in BASE]
    assert one(late, looks=(4, 8))[0] == "better"
    assert one([*shifted(-0.02)[:7], 9.0], looks=(7, 8))[0] == "better"


# The answer


LONG = [
    *("softmax", "heat(t='adaptive', distance='squared')+drift(gate=True)+noise(std=0.1)"),
    *(f"a long name in several words for the mixer number {i} of this study" for i in range(6)),
]


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(
    "effects",
    [
        (0,) * 8,
        (0, -1, -1, -1, -1, -1, -1, -1),
        (0, 1, 1, 1, 1, 1, 1, 1),
        (0, -1, 1, -1, 1, -1, 1, 0),
        (0, -1, 0, 0, 0, 0, 0, 0),
        (0, 0, 0, 1, 1, 0, 0, 0),
        (0, math.inf, -1, 1, 0, 0, 0, 0),
    ],
)
@pytest.mark.parametrize("margin", [None, 0.05])
def test_an_answer_has_at_most_30_words_and_a_verdict_five_sentences(parts, effects, margin):
    """C12: fifteen bullets of prose stood before the first number."""
    arms = tuple(f'"{name}"=heat(t={i + 1})' for i, name in enumerate(LONG))
    claims = (Claim("It is so.", "a number", LONG[1], "nll", "lower", part="part 0" if parts > 1 else ""),)
    plan = replace(plan_of(arms, parts=parts, margin=margin), claims=claims)
    rng = np.random.default_rng(0)
    made = []
    for part in plan.parts:
        found = []
        for arm, effect in zip(part.read_arms, effects, strict=True):
            values = 3 + 0.2 * effect + rng.normal(0, 0.01, len(plan.seeds)) if effect < math.inf else None
            runs = [run_of(s, DIVERGED if values is None else float(values[s])) for s in plan.seeds]
            found.append(ArmResult(arm.name, arm.changes, tuple(runs)))
        made.append(PartResult(part.name, tuple(found)))
    results = concluded(plan, tuple(made), FACTS, "")
    verdict = results.verdict
    assert len(verdict.answer.split()) <= 30
    assert verdict.answer.endswith(".")
    assert 2 + len(verdict.more) <= 5
    said = re.findall(r"\b(better|worse)\b", verdict.answer)
    assert ("better" in said) == (any(e < 0 for e in effects) or "No arm is better" in verdict.answer)
    assert ("worse" in said) == any(e > 0 for e in effects)


def test_arms_of_parts_with_other_references_are_told_against_their_own():
    parts = (
        Part(("a=heat(t=1)", "b=heat(t=2)"), {}, "4 layers"),
        Part(("c=heat(t=3)", "d=heat(t=4)"), {}, "8 layers"),
    )
    plan = Plan(parts, metrics=("nll",))
    made = tuple(
        PartResult(
            part.name,
            tuple(
                ArmResult(a.name, a.changes, tuple(run_of(s, 3 - i * 0.1 + s / 1e4) for s in plan.seeds))
                for i, a in enumerate(part.read_arms)
            ),
        )
        for part in parts
    )
    results = concluded(plan, made, FACTS, "")
    assert (
        "b at 4 layers and d at 8 layers are better than the first arm of its part"
        in results.verdict.answer
    )
    assert contrast_in_words(results, results.contrasts[1]).startswith("d at 8 layers is better than c: ")


# Matched loss


def learned(seed, losses, values=()):
    rows = tuple(Row("ece", v, "diagnostic", {"step": 10 * (i + 1)}) for i, v in enumerate(values))
    return RunResult(seed, "done", rows=(Row("nll", min(losses)), *rows), curve=curve(*losses))


def matched(arms, metric="to_match"):
    plan = plan_of([f"{name}=heat(t={i + 1})" for i, name in enumerate(arms)], 7)
    made = tuple(
        ArmResult(name, {"mixer": "heat"}, tuple(replace(run, seed=s) for s in plan.seeds))
        for name, run in arms.items()
    )
    results = concluded(plan, (PartResult("", made),), FACTS, "")
    return {c.key.arm: c for c in results.contrasts if c.key.metric == metric and c.key.place == "matched"}


def test_a_matched_loss_is_that_of_a_pair_and_does_not_depend_on_other_arms():
    """C1: the threshold was the worst seed of the worst arm: −0.8 % of the tokens instead of −7 %."""
    arms = {"softmax": learned(0, [4.0, 2.0, 1.0]), "fast": learned(0, [3.0, 1.0, 0.5])}
    alone = matched(arms)["fast"]
    assert alone.difference == pytest.approx(200 / 300 - 1)  # 1.0 is reached after 200, not 300
    beside = matched({**arms, "slow": learned(0, [9.0, 8.0, 7.0])})
    assert beside["fast"] == alone
    assert beside["slow"].difference > 1


def test_between_evaluations_amounts_and_metrics_are_interpolated():
    arms = {
        "softmax": learned(0, [4.0, 2.0, 1.5], [0.3, 0.2, 0.1]),
        "fast": learned(0, [3.0, 1.0], [0.4, 0.2]),
    }
    assert matched(arms)["fast"].difference == pytest.approx(175 / 300 - 1)
    assert matched(arms, "ece")["fast"].difference == pytest.approx(0.25 - 0.1)


def test_a_diverged_run_has_no_metric_at_a_matched_loss_and_needs_endlessly_many_tokens():
    found = matched({"softmax": learned(0, [4.0, 1.0]), "ours": RunResult(0, "diverged", "no")})["ours"]
    assert (found.difference, found.low) == (None, None)


@pytest.mark.parametrize("lost", ["ours", "softmax"])
def test_a_metric_at_a_matched_loss_counts_a_diverged_run_as_the_worst(lost):
    """C5: 2 of 7 that diverged would leave the 5 others to show a lower ECE."""
    plan = plan_of(("softmax", "ours=ssmax"), 7, claims=(claim(metric="ece", at="matched"),))
    values = {"softmax": [0.3, 0.2, 0.2], "ours": [0.2, 0.1, 0.1]}
    arms = []
    for name, own in values.items():
        runs = [replace(learned(s, [4.0, 2.0, 1.0], own), seed=s) for s in plan.seeds]
        runs[:2] = [RunResult(s, "diverged", "no") if name == lost else runs[s] for s in (0, 1)]
        arms.append(ArmResult(name, {"mixer": "softmax"}, tuple(runs)))
    results = concluded(plan, (PartResult("", tuple(arms)),), FACTS, "")
    found = results.contrast(Key("", "ours", "ece", "matched"))
    assert (found.pairs, found.low) == (7, None)
    assert results.answers[0].direction == ("not seen" if lost == "ours" else "seen")


# Claims


def claimed(values, claims, base=BASE, **options):
    plan, results = judged({"softmax": base, **values}, claims=claims, **options)
    return plan, results, results.answers


def claim(expect="lower", metric="nll", arm="ours", **more):
    return Claim("It is so.", "a table", arm, metric, expect, **more)


@pytest.mark.parametrize(
    ("by", "expect", "direction"),
    [
        (-0.02, "lower", "seen"),
        (0.02, "lower", "opposite"),
        (-0.02, "higher", "opposite"),
        (0.02, "higher", "seen"),
        (0.0, "lower", "not seen"),
    ],
)
def test_a_claim_gets_a_direction(by, expect, direction):
    _, _, (answer,) = claimed({"ours": shifted(by, 1.0 if by == 0 else 0.1)}, (claim(expect),))
    assert answer.direction == direction
    assert answer.ours.startswith("ours: loss ")
    assert ("not confirmed (p = " in answer.ours) == (direction == "not seen")


@pytest.mark.parametrize(("size", "place"), [(-0.02 / 3, "inside"), (-0.05, "outside")])
def test_a_claim_gets_its_size_beside_ours_whatever_its_direction(size, place):
    """C3: version 0.1 mixed the two into one "held" or "did not hold"."""
    _, _, (answer,) = claimed({"ours": shifted(-0.02)}, (claim(size=size),))
    assert answer.direction == "seen"
    assert answer.ours.endswith(f"lies {place} the interval")


@pytest.mark.parametrize("seeds", [8, 20])
def test_the_answer_to_a_size_does_not_turn_with_the_number_of_seeds(seeds):
    """C3: of a published −5 % and a true −0.5 % version 0.1 said "did not hold" at 6, "held" at 20."""
    rng = np.random.default_rng(1)
    base = list(3 + rng.normal(0, 0.05, seeds))
    ours = [b - 0.015 + 0.002 * x for b, x in zip(base, rng.normal(0, 1, seeds), strict=True)]
    _, _, (answer,) = claimed({"ours": ours}, (claim(size=-0.05),), base)
    assert answer.direction == "seen"
    assert "−0.5 %" in answer.ours
    assert answer.ours.endswith("the published −5.0 % lies outside the interval")


def test_a_size_in_the_unit_of_the_metric_is_taken_as_it_is():
    _, _, (answer,) = claimed({"ours": shifted(-0.02)}, (claim(size=-0.02, relative=False),))
    assert answer.ours.endswith("the published −0.02 lies inside the interval")


def test_a_claim_about_a_diagnostic_joins_the_family_and_is_worded_by_its_direction():
    plan, results, (answer,) = claimed(
        {"ours": shifted(-0.02)},
        (claim(metric="ece"),),
        metrics=("nll", "ece"),
    )
    assert len(plan.family) == 2
    assert answer.direction == "not judged"  # not measured in these runs
    assert answer.ours == "not measured"
    assert results.judged[0].p_adjusted == 2 * results.judged[0].p


def test_a_claim_can_set_two_arms_against_each_other_and_the_verdict_stays_about_the_first():
    values = {"slow": shifted(0.3), "ours": shifted(0.1)}
    plan, results, (answer,) = claimed(values, (claim(against="slow"),))
    assert len(plan.family) == 3
    assert answer.direction == "seen"
    assert answer.ours.startswith("ours: loss lower by 0.2")
    assert "are worse" in results.verdict.answer
    assert "ours is better" not in results.verdict.answer


def test_a_claim_about_every_arm_needs_all_of_them():
    both = {"a": shifted(0.02), "b": shifted(0.03)}
    assert claimed(both, (claim("higher", arm="*"),))[2][0].direction == "seen"
    mixed = {"a": shifted(0.02), "b": shifted(-0.03)}
    assert claimed(mixed, (claim("higher", arm="*"),))[2][0].direction == "opposite"
    flat = {"a": shifted(0.02), "b": shifted(0.0, 1.0)}
    assert claimed(flat, (claim("higher", arm="*"),))[2][0].direction == "not seen"


@pytest.mark.parametrize(
    ("by", "direction"), [(-0.3, "seen"), (0.02, "seen"), (0.3, "opposite"), (0.15, "not seen")]
)
def test_no_worse_goes_by_the_90_percent_interval_and_takes_no_part_in_the_family(by, direction):
    """A share of 5 % of 3.0 nats is 0.15."""
    plan, _, (answer,) = claimed({"ours": shifted(by)}, (claim("no worse", size=0.05),))
    assert answer.direction == direction
    assert len(plan.family) == 1


@pytest.mark.parametrize(("last", "direction"), [(-0.3, "seen"), (0.3, "opposite"), (-0.1, "not seen")])
def test_a_trend_is_the_ratio_in_the_last_part_against_the_first(last, direction):
    arms, claims = ("softmax", "ours=ssmax"), (claim(metric="ece", at="trend"),)
    plan = plan_of(arms, 8, 2, claims=claims, metrics=("nll", "ece"))
    made = []
    for part, share in zip(plan.parts, (-0.1, last), strict=True):
        found = []
        for i, arm in enumerate(part.read_arms):
            noise = [n * (1 if direction == "not seen" else 0.1) * i for n in NOISE]
            rows = [Row("ece", 0.2 * (1 + (share + n) * i), "diagnostic") for n in noise]
            runs = tuple(run_of(s, BASE[s], rows={"ece": row}) for s, row in enumerate(rows))
            found.append(ArmResult(arm.name, arm.changes, runs))
        made.append(PartResult(part.name, tuple(found)))
    results = concluded(plan, tuple(made), FACTS, "")
    assert results.answers[0].direction == direction
    assert len(plan.family) == 3


@pytest.mark.parametrize("where", [0, 1])
def test_a_trend_counts_a_diverged_run_as_the_worst(where):
    """C5."""
    plan = plan_of(("softmax", "ours=ssmax"), 8, 2, claims=(claim(metric="ece", at="trend"),))
    made = []
    for p, (part, ratio) in enumerate(zip(plan.parts, (0.9, 0.5), strict=True)):
        found = []
        for i, arm in enumerate(part.read_arms):
            rows = [
                {"ece": Row("ece", 0.2 * (ratio if i else 1) + s / 1e4, "diagnostic")} for s in range(8)
            ]
            gone = [i == 1 and p == where and s < 2 for s in range(8)]
            runs = tuple(run_of(s, DIVERGED if gone[s] else 3.0, rows=rows[s]) for s in range(8))
            found.append(ArmResult(arm.name, arm.changes, runs))
        made.append(PartResult(part.name, tuple(found)))
    results = concluded(plan, tuple(made), FACTS, "")
    assert results.contrast(Key("", "ours", "ece", "trend")).pairs == 8
    assert results.answers[0].direction == ("seen" if where == 0 else "not seen")


def test_claims_are_not_answered_before_the_study_has_ended():
    assert claimed({"ours": [*shifted(-0.02)[:7], MISSING]}, (claim(),))[2] == ()


# What was not controlled


def test_tuning_is_disclosed():
    """C10: tuning used one seed, undisclosed."""
    plan = plan_of(2, 7, tune="lr", trials=3)
    trials = (Trial(1e-3, 3.1), Trial(2e-3, 3.0), Trial(4e-3, None))
    arms = tuple(
        ArmResult(a.name, {**a.changes, "lr": 2e-3}, tuple(run_of(s, 3.0) for s in plan.seeds), (), trials)
        for a in plan.parts[0].read_arms
    )
    results = concluded(plan, (PartResult("", arms),), FACTS, "")
    (line,) = [line for line in results.not_controlled if "trials" in line]
    assert "3 trials on validation, around a given rate, with one seed that is not judged" in line
    edge = tuple(replace(arm, settings={**arm.settings, "lr": 1e-3}) for arm in arms)
    results = concluded(plan, (PartResult("", edge),), FACTS, "")
    assert any("was the first or last tried" in line for line in results.not_controlled)


def test_settings_sizes_and_surroundings_that_differ_are_told():
    plan = plan_of(("softmax", "slow=ssmax, lr=1e-4"), 7)
    arms = tuple(
        ArmResult(
            a.name,
            a.changes,
            tuple(replace(run_of(s, 3.0), environment={"torch": f"2.{i}"}) for s in plan.seeds),
            (Row("parameters", 1000 + 50 * i, "cost"),),
        )
        for i, a in enumerate(plan.parts[0].read_arms)
    )
    results = concluded(plan, (PartResult("", arms),), FACTS, "")
    lines = " ".join(results.not_controlled)
    assert "Settings of their own besides the mixer: slow (lr 0.0001)." in lines
    assert "Against softmax, not the same parameters: slow 5.0 % more." in lines
    assert "not all made with one device, torch and commit, but with 2" in lines
