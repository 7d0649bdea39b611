"""The verdict in words agrees with the table, judges only what the test judged, names what is missing."""

from __future__ import annotations

import re

import numpy as np
import pytest
from small_results import arm, results_of, run

from langevin.errors import UsageError
from langevin.studies.controls import not_controlled

BASE = [2.00, 2.10, 2.05, 1.95, 2.20, 2.15, 2.02, 2.08]


def shifted(by, wobble=0.001, seeds=8):
    return [x + by + wobble * (-1) ** i * i for i, x in enumerate(BASE[:seeds])]


def words(results):
    return " ".join(results["verdict"])


def test_a_better_arm_is_named_with_size_interval_p_and_pairs():
    results = results_of(arm("softmax", BASE), arm("heat", shifted(-0.05)))
    (row,) = results["comparisons"]
    assert results["verdict"][1] == (
        f"heat is better than softmax: test loss lower by {-row['difference']:.4f} nats/token (95 % "
        f"interval {-row['high']:.4f} to {-row['low']:.4f}, p = 0.0078, 8 pairs); "
        "significant at the 5 % level."
    )


def test_several_arms_are_summed_up_in_one_sentence_first():
    arms = [
        arm("softmax", BASE),
        arm("heat", shifted(-0.05)),
        arm("sima", shifted(0.4)),
        arm("again", shifted(0, wobble=0.01)),
    ]
    assert results_of(*arms)["verdict"][0] == (
        "In short, by test loss: heat is better than softmax; sima is worse; "
        "no difference to softmax was found for again."
    )
    few = [arm("softmax", BASE[:2]), arm("heat", BASE[2:4]), arm("sima", BASE[4:6])]
    assert "In short" not in words(results_of(*few))


def test_a_worse_arm_is_called_worse_and_never_better():
    text = words(results_of(arm("softmax", BASE), arm("sigmoid", shifted(0.05))))
    assert "sigmoid is worse than softmax: test loss higher by 0.04" in text
    assert "better" not in text


def test_a_null_comparison_says_no_difference_and_what_it_still_allows():
    results = results_of(arm("softmax", BASE), arm("again", shifted(0, wobble=0.01)))
    (row,) = results["comparisons"]
    text = words(results)
    assert "again against softmax: no difference found in test loss" in text
    assert f"still allows −{-row['low']:.3f} to +{row['high']:.3f} nats/token" in text
    assert not re.search("better|worse|significant", text)


def test_runs_that_are_equal_in_every_pair_are_said_to_be_equal():
    text = words(results_of(arm("softmax", BASE), arm("again", BASE)))
    assert "no difference found in test loss (all 8 pairs are exactly equal)" in text


def test_two_seeds_decline_and_say_how_many_it_takes():
    text = words(results_of(arm("softmax", BASE[:2]), arm("heat", shifted(-0.5, seeds=2))))
    assert "Too few seeds to judge heat: 2 pairs. It takes at least 6," in text
    assert "Observed, not judged: test loss of heat lower by 0.5" in text
    assert not re.search("better|worse|significant", text)


def test_one_seed_declines_without_an_interval():
    text = words(results_of(arm("softmax", [2.0]), arm("heat", [1.5]), arm("sima", [2.5])))
    assert "Too few seeds to judge heat and sima: 1 pair. It takes at least 6, and 7 for a finding" in text
    assert "interval" not in text


@pytest.mark.parametrize("seeds", range(1, 6))
def test_the_word_significant_never_appears_under_six_seeds(seeds):
    arms = [arm(f"arm{i}", shifted(-i, seeds=seeds)) for i in range(4)]
    assert "significant" not in words(results_of(*arms))


def test_six_seeds_can_find_an_arm_better_but_not_among_five():
    others = [arm(f"arm{i}", shifted(-i / 10, seeds=6)) for i in range(1, 6)]
    text = words(results_of(arm("softmax", BASE[:6]), *others))
    assert text.count("is better than softmax") == 5
    assert "does not survive Holm's correction for 5 arms (p = 0.16)" in text
    assert (
        "With 6 seeds nothing found among 5 arms can survive that correction: it takes at least 8" in text
    )
    assert "significant" not in text


def test_eight_seeds_are_enough_for_five_arms():
    others = [arm(f"arm{i}", shifted(-i / 10)) for i in range(1, 6)]
    text = words(results_of(arm("softmax", BASE), *others))
    assert text.count("significant after Holm's correction for 5 arms (p = 0.039)") == 5


def test_every_sentence_agrees_with_the_table_whatever_the_numbers():
    draw = np.random.default_rng(0)
    seen = set()
    for _ in range(60):
        seeds = int(draw.integers(1, 10))
        base = draw.normal(2, 0.1, seeds)
        others = [
            arm(f"arm{i}", base + draw.normal(0, 0.05) + draw.normal(0, 0.03, seeds)) for i in range(3)
        ]
        results = results_of(arm("softmax", base), *others)
        for row in results["comparisons"]:
            seen.add(row["verdict"])
            about = [s for s in results["verdict"] if re.search(rf"\b{row['arm']}\b", s)]
            text = " ".join(s for s in about if not s.startswith("The cost"))
            for word in ("better", "worse"):
                assert (f"{row['arm']} is {word} than" in text) == (row["verdict"] == word)
            said = f"{row['arm']} against softmax: no difference found" in text
            assert said == (row["verdict"] == "no difference found")
            assert ("Observed, not judged" in text) == (row["verdict"] == "too few seeds")
            counted = row["verdict"] in ("better", "worse") and row["p_adjusted"] <= 0.05
            assert ("significant" in text) == counted
    assert seen == {"better", "worse", "no difference found", "too few seeds"}


def test_a_better_arm_comes_with_its_cost_and_others_without():
    base = arm("softmax", BASE, speed=1000.0, memory=100)
    heat = arm("heat", shifted(-0.1), speed=900.0, memory=150, parameters=1100)
    sima = arm("sima", shifted(0.1), speed=2000.0, memory=50)
    costs = [s for s in results_of(base, heat, sima)["verdict"] if s.startswith("The cost")]
    assert costs == [
        "The cost: heat trained with 0.90 times the tokens/s, 1.50 times the peak memory and 1.100 times "
        "the parameters of softmax."
    ]


def test_the_true_entropy_stands_beside_the_lowest_loss():
    data = {"name": "stories", "true_nats_per_token": 1.5}
    text = words(results_of(arm("softmax", [2.0, 2.0]), arm("heat", [1.75, 1.75]), data=data))
    assert "is 1.500 nats/token; the lowest mean loss (heat, 1.750) is 0.250 above it." in text


def test_failed_runs_are_named_with_their_first_error():
    losses = [*BASE[:6], "loss is not finite at step 3\nTraceback", "out of memory"]
    text = words(results_of(arm("softmax", BASE), arm("heat", losses)))
    assert "heat seeds 6 and 7 (loss is not finite at step 3)." in text
    assert "6 pairs" in text


def test_a_run_without_the_metric_is_named():
    text = words(results_of(arm("softmax", BASE), arm("heat", [*BASE[:7], float("nan")])))
    assert "Without a finite test loss, and so left out: heat seed 7." in text


def test_nothing_finished_means_nothing_to_compare():
    results = results_of(arm("softmax", ["a", "b"]), arm("heat", ["c", "d"]))
    assert results["verdict"][0] == "No run finished: there is nothing to compare."
    assert "softmax seeds 0 and 1 (a)" in words(results)


def test_a_reference_without_runs_leaves_no_pairs():
    text = words(results_of(arm("softmax", ["a"] * 6), arm("heat", BASE[:6])))
    assert "softmax, the reference: no test loss was measured." in text
    assert "Too few seeds to judge heat: 0 pairs" in text
    assert "No seed of heat has a partner in softmax." in text


def test_one_arm_alone_has_its_mean_and_nothing_to_compare_with():
    found = results_of(arm("softmax", [2.0, 2.1, 2.2]))["verdict"]
    assert found == [
        "softmax: test loss 2.10 nats/token (95 % interval 1.85 to 2.35, 3 seeds).",
        "There is no other arm to compare it with.",
    ]


def test_other_metrics_are_told_once_and_functions_of_the_loss_not_again():
    arms = []
    for name, more in (("softmax", 0.0), ("heat", 0.02)):
        runs = [run(i, {"nll": x, "perplexity": x, "accuracy": x / 4 + more}) for i, x in enumerate(BASE)]
        arms.append({"name": name, "runs": runs})
    text = words(results_of(*arms))
    assert "By accuracy at the best checkpoint, heat (higher by 0.020, p = 0.0078, " in text
    assert "is better than softmax" in text
    assert "perplexity" not in text


def test_the_matched_loss_is_told_apart_from_the_best_checkpoint():
    base = arm("softmax", BASE, matched={"accuracy": 0.5})
    heat = arm("heat", BASE, matched={"accuracy": 0.4})
    text = words(results_of(base, heat, matched_loss=2.25))
    assert "By accuracy at the matched validation loss of 2.25, heat (lower by 0.10, " in text
    assert "is worse than softmax" in text


def test_a_metric_without_direction_judges_nothing():
    arms = [{"name": n, "runs": [run(i, {"entropy": i + 1.0}) for i in range(6)]} for n in ("a", "b")]
    text = words(results_of(*arms, primary="entropy"))
    assert "no arm is judged by it" in text
    assert "better" not in text


def test_an_unknown_primary_metric_is_refused_with_the_nearest():
    with pytest.raises(UsageError, match="Did you mean 'accuracy'"):
        results_of(arm("softmax", BASE), primary="acuracy")


def test_a_difference_that_is_not_zero_never_reads_as_zero():
    wide = [2.0 - 1e-5, 1.0, 1.0, 1.0, 1.0, 1.0]
    text = words(results_of(arm("softmax", [2.0] * 6), arm("heat", wide)))
    assert not re.search(r"[ −+]0\.0+ ", text)


SETTINGS = {"lr": 0.003, "layers": 2, "width": 64, "context": 64, "tokens": 300_000, "schedule": "cosine"}


def left_open(*arms, **facts):
    return " ".join(results_of(*arms, settings=facts.pop("settings", SETTINGS), **facts)["not_controlled"])


def test_what_was_not_controlled_names_the_settings_there_were():
    text = left_open(arm("softmax", BASE), arm("heat", BASE))
    assert "The learning rate of 0.003 was not tuned per arm" in text
    assert (
        "One data set (stories), one model size (2 layers, 64 wide, 64 tokens of context) and one training "
        "budget (300,000 tokens, cosine schedule): others were not tried." in text
    )


def test_nothing_is_said_that_does_not_apply():
    text = left_open(arm("softmax", BASE), arm("heat", BASE, parameters=1009))
    assert not re.search(
        "not the same|Only|failed|shared the machine|Still improving|metrics|of their own", text
    )


def test_a_tuned_learning_rate_is_not_called_untuned():
    by_setting = left_open(arm("softmax", BASE), arm("heat", BASE), settings={**SETTINGS, "tune": "lr"})
    by_change = left_open(arm("softmax", BASE), arm("heat", BASE, changes={"lr": 0.01}))
    for text in (by_setting, by_change):
        assert "not tuned per arm" not in text
        assert "Only the learning rate was chosen per arm" in text
    assert "Settings of their own besides the mixer: heat (lr 0.01)." in by_change


def test_arms_over_one_per_cent_apart_in_size_are_named():
    text = left_open(arm("softmax", BASE), arm("heat", BASE), arm("neighbor", BASE, parameters=880))
    assert "Against softmax, not the same parameters: neighbor 12.0 % fewer." in text
    assert "FLOPs a token, on the same tokens: neighbor 12.0 % fewer." in text


def test_few_seeds_failures_workers_and_several_metrics_are_told():
    arms = [arm("softmax", [2.0, 2.1, 2.2]), arm("heat", [2.0, "out of memory", 2.1])]
    for one in arms:
        for i, done in enumerate(one["runs"]):
            done["values"] and done["values"].update(accuracy=i / 10)
    text = left_open(*arms, environment={"workers": 2})
    assert "Only 3 seeds" in text
    assert "Runs of heat failed" in text
    assert "2 runs shared the machine at a time" in text
    assert "2 metrics were tested" in text


def test_arms_that_end_at_their_best_are_said_to_be_still_improving():
    heat = arm("heat", BASE)
    for one in heat["runs"]:
        one["best"]["tokens"] = one["cost"]["tokens"]
    text = left_open(arm("softmax", BASE), heat)
    assert "Still improving when the budget ended: heat." in text


def test_runs_of_unequal_length_are_told():
    heat = arm("heat", BASE)
    heat["runs"][0]["cost"]["tokens"] = 900
    assert "from 900 to 1,000" in left_open(arm("softmax", BASE), heat)


def test_one_arm_has_no_differences_between_arms_to_control():
    results = results_of(arm("softmax", BASE), settings=SETTINGS)
    assert not_controlled(results) == results["not_controlled"]
    assert "tuned per arm" not in " ".join(results["not_controlled"])
