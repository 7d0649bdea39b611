"""Intervals, paired tests, corrections: equal to tables and brute force, right as often as stated."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from small_results import arm, results_of, run

from langevin.errors import UsageError
from langevin.studies.statistics import (
    by_seed,
    compare_arms,
    holm,
    interval,
    least_pairs,
    paired,
    sign_flip,
    summarise,
    t_quantile,
)


def against_zero(differences, **options):
    return paired(dict(enumerate(differences)), dict.fromkeys(range(len(differences)), 0.0), **options)


@pytest.mark.parametrize(
    ("confidence", "freedom", "table"),
    [
        (0.95, 1, 12.706),
        (0.95, 2, 4.303),
        (0.95, 3, 3.182),
        (0.95, 5, 2.571),
        (0.95, 10, 2.228),
        (0.95, 19, 2.093),
        (0.95, 120, 1.980),
        (0.99, 4, 4.604),
        (0.90, 7, 1.895),
        (0.50, 30, 0.683),
    ],
)
def test_t_quantiles_are_those_of_the_table(confidence, freedom, table):
    assert t_quantile(confidence, freedom) == pytest.approx(table, abs=5e-4)


def test_the_t_quantile_leaves_the_stated_mass_outside():
    """By integrating the density ∝ (1 + x²/ν)^(−(ν+1)/2) instead of summing the closed form."""
    for freedom in (1, 4, 7, 20):
        t = t_quantile(0.95, freedom)
        x = np.linspace(0, t, 200_001)
        log_scale = (
            math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(freedom * math.pi) / 2
        )
        density = np.exp(log_scale - (freedom + 1) / 2 * np.log1p(x**2 / freedom))
        assert 2 * np.trapezoid(density, x) == pytest.approx(0.95, abs=1e-8)


def test_an_interval_is_the_mean_and_t_standard_errors():
    found = interval([1.0, 2.0, 3.0])
    assert (found.mean, found.n) == (2.0, 3)
    assert found.high - 2 == pytest.approx(4.3027 / math.sqrt(3), abs=1e-4)
    assert 2 - found.low == pytest.approx(found.high - 2)


def test_one_value_has_a_mean_and_no_interval():
    assert interval([1.5]) == interval(iter([1.5]))
    assert (interval([1.5]).mean, interval([1.5]).low, interval([]).mean) == (1.5, None, None)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_is_refused(bad):
    with pytest.raises(UsageError, match="cannot average"):
        interval([1.0, bad])
    with pytest.raises(UsageError, match=r"seeds \[1\]"):
        against_zero([1.0, bad])


@pytest.mark.parametrize(
    "differences",
    [
        [0.3, -0.1, 0.7, 0.2, 0.4, 0.9],
        [1, 1, 1, -1, 1, 1, 1],  # ties everywhere
        [0, 0, 0.5, 0.25, -0.1, 0.3],
        [0.1, 0.7, -0.3, 0.5, 0.3, -0.7],  # sums that are equal but for rounding
        [1e6, -2e6, 3e6, 4e6, 5e6, 6e6, 7e6, 1e6],
        [-2.0],
    ],
)
def test_the_exact_p_is_that_of_trying_every_flip(differences):
    observed = abs(math.fsum(differences))
    count = 0
    for flipped in itertools.product((False, True), repeat=len(differences)):
        total = math.fsum(-d if flip else d for d, flip in zip(differences, flipped, strict=True))
        count += abs(total) >= observed * (1 - 1e-12)
    assert sign_flip(differences) == count / 2 ** len(differences)


def test_the_exact_p_of_whole_numbers_is_that_of_counting_subset_sums():
    """Another way: flips of d correspond to subsets, counted by their sum, at the largest exact n."""
    d = [3, 1, -2, 5, 4, 1, 2, -1, 3, 6, 2, 2, -4, 1, 5, 3, 2, -1, 4, 1]
    ways = {0: 1}
    for size in map(abs, d):
        grown = dict(ways)
        for total, count in ways.items():
            grown[total + size] = grown.get(total + size, 0) + count
        ways = grown
    all_, seen = sum(map(abs, d)), abs(sum(d))
    extreme = sum(count for subset, count in ways.items() if abs(2 * subset - all_) >= seen)
    assert sign_flip(d) == extreme / 2**20


def test_equal_arms_have_p_one_and_an_interval_at_zero():
    found = against_zero([0.0] * 8)
    assert (found.difference, found.low, found.high, found.p) == (0.0, 0.0, 0.0, 1.0)


def test_the_least_p_of_six_pairs_is_one_in_thirty_two():
    assert against_zero([0.1] * 6).p == 1 / 32
    assert against_zero([0.1] * 5).p == 1 / 16


def test_many_pairs_use_random_flips_that_agree_with_the_normal_limit():
    d = np.random.default_rng(3).normal(0.25, 1, 60)
    z = abs(d.sum()) / math.sqrt((d**2).sum())
    assert sign_flip(d) == pytest.approx(math.erfc(z / math.sqrt(2)), abs=0.01)
    assert sign_flip(np.ones(40)) == pytest.approx(1 / 100_001)


def test_pairs_are_matched_by_seed_and_the_others_left_out():
    found = paired({0: 1.0, 2: 3.0, 7: 9.0}, {7: 8.0, 2: 1.0, 5: 100.0})
    assert (found.pairs, found.difference) == (2, 1.5)
    assert paired({0: 1.0}, {1: 1.0}).difference is None


def test_a_paired_difference_is_the_same_every_time_and_turns_with_its_sign():
    d = [0.3, -0.1, 0.7, 0.2, 0.4, 0.9, 0.1]
    assert against_zero(d) == against_zero(d)
    turned = against_zero([-x for x in d])
    assert turned.p == against_zero(d).p
    assert turned.high == pytest.approx(-against_zero(d).low, abs=0.03)


def test_below_six_pairs_the_interval_is_students():
    d = [0.1, 0.4, 0.2]
    assert against_zero(d).low == pytest.approx(interval(d).low)


@pytest.mark.parametrize("n", [6, 10, 14])
def test_the_bootstrap_interval_covers_the_mean_nearly_as_often_as_it_says(n):
    """Three standard errors of 1,000 trials are 2 %; the plain percentile interval covers 87 % at n = 6."""
    draw = np.random.default_rng(n)
    hits = 0
    for trial in range(1000):
        found = against_zero(draw.normal(size=n), resamples=1000, seed=trial)
        hits += found.low <= 0 <= found.high
    assert 0.91 <= hits / 1000 <= 0.975


def test_holm_multiplies_by_the_hypotheses_left_and_keeps_the_order():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_holm_rejects_exactly_what_the_step_down_rule_rejects():
    draw = np.random.default_rng(0)
    for _ in range(200):
        p = draw.random(5) ** 3
        rejected = set()
        for left, index in zip(range(5, 0, -1), np.argsort(p), strict=True):
            if p[index] * left > 0.05:
                break
            rejected.add(int(index))
        assert {i for i, q in enumerate(holm(p.tolist())) if q <= 0.05} == rejected


def test_the_least_pairs_are_where_the_least_p_reaches_the_error_rate():
    for arms in range(1, 12):
        n = least_pairs(arms)
        assert arms * 2 / 2**n <= 0.05 < arms * 2 / 2 ** (n - 1)


def verdicts(*arms, **facts):
    return {row["arm"]: row["verdict"] for row in results_of(*arms, **facts)["comparisons"]}


def test_null_comparisons_are_called_different_at_most_at_the_stated_rate():
    """20 seed pairs of equal distributions, 400 times: 5 % and three standard errors are 8.3 %."""
    draw = np.random.default_rng(1)
    wrong = 0
    for _ in range(400):
        ours, theirs = draw.normal(2, 0.1, (2, 20))
        wrong += verdicts(arm("softmax", theirs), arm("again", ours)) != {"again": "no difference found"}
    assert wrong / 400 <= 0.083


def test_a_planted_difference_is_found_with_its_direction():
    """A shift of one standard deviation of the differences over 20 pairs is missed about once in 100."""
    draw = np.random.default_rng(2)
    found = []
    for _ in range(100):
        noise, theirs = draw.normal(0, 0.1, 20), draw.normal(2, 1, 20)
        arms = arm("softmax", theirs), arm("low", theirs - 0.1 + noise), arm("high", theirs + 0.1 + noise)
        found.append(verdicts(*arms))
    assert sum(f["low"] == "better" for f in found) >= 93
    assert sum(f["high"] == "worse" for f in found) >= 93
    assert not any(f["low"] == "worse" or f["high"] == "better" for f in found)


@pytest.mark.parametrize("seeds", [1, 2, 5])
def test_fewer_than_six_pairs_are_never_judged(seeds):
    arms = arm("softmax", [2.0] * seeds), arm("heat", [1.0] * seeds)
    assert verdicts(*arms) == {"heat": "too few seeds"}


def test_a_failed_run_takes_its_pair_away_and_shifts_no_other():
    base = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    ours = [x - 0.1 - 0.001 * x for x in base]
    ours[2] = "loss is not finite"
    (row,) = compare_arms(results_of(arm("softmax", base), arm("heat", ours)))
    assert (row["pairs"], row["verdict"]) == (6, "better")
    assert row["difference"] == pytest.approx(-0.1 - 0.001 * 25 / 6)


def test_higher_is_better_where_the_metric_says_so_and_a_metric_without_direction_is_not_judged():
    base, ours = ({"runs": [], "name": name} for name in ("softmax", "heat"))
    for seed in range(6):
        values = {"accuracy": 0.5 + seed / 100, "entropy": 1.0}
        base["runs"].append(run(seed, values))
        ours["runs"].append(run(seed, {"accuracy": values["accuracy"] + 0.01, "entropy": 5.0}))
    (row,) = compare_arms(results_of(base, ours))
    assert (row["metric"], row["verdict"]) == ("accuracy", "better")


def test_values_at_the_matched_loss_are_compared_beside_those_at_the_best():
    base = arm("softmax", [2.0] * 6, matched={"accuracy": 0.5})
    ours = arm("heat", [2.0] * 6, matched={"accuracy": 0.4})
    rows = {(row["metric"], row["at"]): row["verdict"] for row in compare_arms(results_of(base, ours))}
    assert rows == {("nll", "best"): "no difference found", ("accuracy", "matched"): "worse"}


def test_p_is_corrected_over_the_arms_of_one_metric():
    base = arm("softmax", [2.0] * 6)
    rows = compare_arms(results_of(base, arm("a", [1.9] * 6), arm("b", [1.8] * 6), arm("c", ["x"] * 6)))
    assert [row["p_adjusted"] for row in rows] == [2 / 32, 2 / 32, None]
    assert [row["pairs"] for row in rows] == [6, 6, 0]


def test_values_that_are_missing_or_not_finite_are_left_out_by_seed():
    found = arm("heat", [1.0, math.nan, None, 4.0])
    assert by_seed(found, "nll") == {0: 1.0, 3: 4.0}
    assert summarise(found, ["nll", "ece"])["nll"]["n"] == 2
    assert "ece" not in summarise(found, ["nll", "ece"])


def test_what_a_failed_run_left_behind_is_not_counted():
    found = arm("heat", [1.0, 2.0])
    found["runs"][1]["status"] = "failed"
    assert by_seed(found, "nll") == {0: 1.0}


def test_a_seed_that_comes_twice_in_an_arm_is_refused():
    twice = {"name": "heat", "runs": [run(3, {"nll": 1.0}), run(3, {"nll": 2.0})]}
    with pytest.raises(UsageError, match="seed 3 twice"):
        by_seed(twice, "nll")
