"""Published claims beside what was found: when they held, when not, and when nobody can tell."""

from __future__ import annotations

import pytest
from small_results import arm, results_of

from langevin.studies.claims import in_short, published, published_speeds, published_trends
from langevin.studies.recipe import Best, Claim, Difference, NoWorse, Part, Speed, Trend

LOW = [2.00, 2.01, 2.02, 2.00, 2.01, 2.02]
HIGH = [2.31, 2.30, 2.33, 2.32, 2.30, 2.31]
MIXED = [2.01, 2.00, 2.03, 1.99, 2.02, 2.01]


def judged(test, results, part=None):
    (row,) = published((Claim("It is so.", "they said so", test),), part or Part(), results)
    assert row["published"] == "they said so"
    assert row["sentence"].startswith("“It is so” ")
    assert row["sentence"].endswith(".")
    return row


@pytest.mark.parametrize(
    ("ours", "expect", "held"),
    [(LOW, "lower", "yes"), (LOW, "higher", "no"), (MIXED, "lower", "cannot tell")],
)
def test_a_claimed_difference_is_answered_by_the_paired_test(ours, expect, held):
    base = HIGH if ours is LOW else LOW
    row = judged(Difference("nll", "ssmax", expect), results_of(arm("softmax", base), arm("ssmax", ours)))
    assert row["held"] == held
    assert "6 pairs" in row["ours"]
    if held != "cannot tell":
        assert row["ours"].startswith("2.010 against 2.312 (−13.0 %)")
        assert "p = 0.031" in row["sentence"]


@pytest.mark.parametrize(
    ("expect", "size", "held", "said"),
    [
        ("lower", 0.0, "cannot tell", "allows either sign"),
        ("lower", 0.5, "no", "excludes the published −50.0 %"),
        ("higher", 0.5, "no", "excludes the published +50.0 %"),
        ("higher", 0.001, "cannot tell", "does not exclude the published +0.1 %"),
        ("lower", 0.001, "cannot tell", "does not exclude the published −0.1 %"),
    ],
)
def test_where_no_difference_is_found_the_interval_is_held_against_the_published_size(
    expect, size, held, said
):
    test = Difference("nll", "ssmax", expect, size=size)
    row = judged(test, results_of(arm("softmax", LOW), arm("ssmax", MIXED)))
    assert row["held"] == held
    assert "no difference in test loss was found" in row["sentence"]
    assert said in row["sentence"]


def test_an_interval_without_zero_is_not_said_to_allow_both_signs():
    """The test and the interval may disagree."""
    ours = [b + d for b, d in zip(LOW, (1, 1, 1, 1, 1, -0.01), strict=True)]
    row = judged(Difference("nll", "ssmax", "higher"), results_of(arm("softmax", LOW), arm("ssmax", ours)))
    assert row["held"] == "cannot tell"
    assert "excludes zero" in row["sentence"]
    same = judged(Difference("nll", "ssmax", "lower"), results_of(arm("softmax", LOW), arm("ssmax", LOW)))
    assert "all pairs are exactly equal" in same["sentence"]


@pytest.mark.parametrize(("size", "said"), [(0.0, False), (0.05, False), (0.5, True)])
def test_a_difference_smaller_than_the_published_one_holds_and_says_so(size, said):
    results = results_of(arm("softmax", HIGH), arm("ssmax", LOW))
    row = judged(Difference("nll", "ssmax", "lower", size=size), results)
    assert row["held"] == "yes"
    assert ("smaller than the published 50 %" in row["sentence"]) == said


@pytest.mark.parametrize(("expect", "points"), [("lower", "for"), ("higher", "against")])
def test_under_six_seeds_no_claim_is_judged_but_what_was_seen_is_said(expect, points):
    results = results_of(arm("softmax", HIGH[:5]), arm("ssmax", LOW[:5]))
    row = judged(Difference("nll", "ssmax", expect), results)
    assert row["held"] == "cannot tell"
    assert f"observed, {points} the claim" in row["sentence"]
    assert "2.008 against 2.312" in row["sentence"]


def test_a_claim_about_what_was_not_measured_cannot_be_told():
    results = results_of(arm("softmax", HIGH), arm("ssmax", LOW))
    row = judged(Difference("nll", "ssmax", "lower", at="matched"), results)
    assert (row["held"], row["ours"]) == ("cannot tell", "not measured")


@pytest.mark.parametrize(
    ("by", "held"), [(0.2, "yes"), (0.05, "no"), (0.15, "cannot tell")], ids=["within", "beyond", "across"]
)
def test_no_worse_by_a_share_is_answered_by_the_interval(by, held):
    results = results_of(arm("softmax", LOW), arm("ssmax", HIGH))
    assert judged(NoWorse("nll", "ssmax", by), results)["held"] == held


def test_being_better_is_no_worse_whatever_the_size():
    results = results_of(arm("softmax", HIGH), arm("ssmax", LOW))
    assert judged(NoWorse("nll", "ssmax", 0.01), results)["held"] == "yes"


@pytest.mark.parametrize(
    ("first", "others", "held"),
    [
        (LOW, [HIGH, HIGH[::-1]], "yes"),
        (HIGH + HIGH[:2], [LOW + LOW[:2], HIGH[::-1] + HIGH[2:4]], "no"),
        (HIGH, [LOW, HIGH[::-1]], "cannot tell"),  # p = 0.031 does not survive Holm over two arms
        (LOW, [HIGH, MIXED], "cannot tell"),
        (LOW[:2], [HIGH[:2], HIGH[:2]], "cannot tell"),
    ],
)
def test_the_best_of_several_must_be_better_than_each(first, others, held):
    results = results_of(arm("a", first), *(arm(f"b{i}", o) for i, o in enumerate(others)))
    assert judged(Best("nll"), results)["held"] == held


def test_a_trend_over_parts_compares_the_last_with_the_first():
    def two(gains, expect):
        test = Trend("nll", "ssmax", expect)
        parts = [
            (Part(f"{i} layers"), results_of(arm("softmax", HIGH), arm("ssmax", [g * h for h in HIGH])))
            for i, g in enumerate(gains)
        ]
        (row,) = published_trends((Claim("It grows.", "-", test),), parts)
        return row

    assert two([0.9, 0.7], "lower")["held"] == "yes"
    assert two([0.7, 0.9], "lower")["held"] == "no"
    assert two([0.9, 0.9], "lower")["held"] == "cannot tell"
    assert two([1.5, 1.2], "lower")["held"] == "no"  # less of a loss is no gain
    assert two([0.9, 0.7], "lower")["ours"] == "0 layers: −10.0 %, 1 layers: −30.0 %"


def speeds(ratio, spread=0.01, rounds=10, length=8192):
    def row(mixer, ratio):
        core = {"part": "core", "length": length, "forward_ms": 1.0, "forward_spread_ms": spread}
        return {"mixer": mixer, **core, "forward_ratio": ratio}

    def step(mixer, ratio):
        return {"mixer": mixer, "tokens_per_second": 1.0, "spread": spread, "ratio": 1 / ratio}

    return {
        "mixers": {"settings": {"repeats": rounds}, "rows": [row("softmax", 1.0), row("sima", ratio)]},
        "training": {"settings": {"rounds": rounds}, "rows": [step("softmax", 1.0), step("sima", ratio)]},
    }


@pytest.mark.parametrize(
    ("test", "facts", "held"),
    [
        (Speed("core", "sima", "faster"), {"ratio": 0.8}, "yes"),
        (Speed("core", "sima", "faster"), {"ratio": 1.2}, "no"),
        (Speed("core", "sima", "slower"), {"ratio": 1.2}, "yes"),
        (Speed("core", "sima", "slower"), {"ratio": 1.2, "spread": 0.3}, "cannot tell"),
        (Speed("core", "sima", "slower"), {"ratio": 1.2, "rounds": 3}, "cannot tell"),
        (Speed("core", "sima", "slower", length=16384), {"ratio": 1.2}, "cannot tell"),
        (Speed("training", "sima", "same"), {"ratio": 1.02}, "yes"),
        (Speed("training", "sima", "same"), {"ratio": 1.2}, "no"),
        (Speed("training", "sima", "same"), {"ratio": 1.05}, "cannot tell"),
    ],
)
def test_a_claim_about_speed_holds_beyond_the_spread_of_the_runs(test, facts, held):
    (row,) = published_speeds((Claim("It is so.", "-", test),), speeds(**facts))
    assert row["held"] == held


def test_the_claims_are_counted_in_one_sentence():
    rows = [{"held": held} for held in ("yes", "no", "no", "cannot tell")]
    assert in_short(rows) == "Of 4 published claims 1 held, 2 did not hold and 1 cannot be judged."
