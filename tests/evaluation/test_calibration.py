"""Calibration: equal to plain loops, at the noise floor when calibrated, far above it when not."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import numpy as np
import pytest
from synthetic import VOCABULARY, bigram_table, bigram_text, next_token_oracle, oracle_text

from langevin.evaluation.calibration import equal_mass, measure, noise_floor
from langevin.evaluation.likelihood import TokenScores, score
from langevin.objectives import ar


def plain_ece(confidence, correct, bins=15):
    error = 0.0
    for b in range(bins):
        inside = [
            i for i, c in enumerate(confidence) if b / bins < c <= (b + 1) / bins or (b == 0 and c == 0)
        ]
        if inside:
            accuracy = sum(correct[i] for i in inside) / len(inside)
            mean = sum(confidence[i] for i in inside) / len(inside)
            error += len(inside) / len(confidence) * abs(accuracy - mean)
    return error


def plain_adaptive(confidence, correct, bins=15):
    """(debiased root mean square, L1): ranks are cut into equal parts; a tie goes to its first part."""
    n, ordered = len(confidence), sorted(confidence)
    parts = [[] for _ in range(bins)]
    for c, right in zip(confidence, correct, strict=True):
        rank = ordered.index(c) + 1  # of the first of equals
        parts[next(b for b in range(bins) if rank <= math.ceil((b + 1) * n / bins))].append((c, right))
    square = l1 = 0.0
    for part in parts:
        if part:
            size = len(part)
            mean, accuracy = (sum(x) / size for x in zip(*part, strict=True))
            noise = accuracy * (1 - accuracy) / (size - 1) if size > 1 else 0.0
            square += size / n * ((accuracy - mean) ** 2 - noise)
            l1 += size / n * abs(accuracy - mean)
    return math.sqrt(max(square, 0)), l1


def random_predictions(n, seed):
    """Confidences with many ties, some on the edges of bins, some exactly 0 or 1."""
    draw = np.random.default_rng(seed)
    confidence = np.where(draw.random(n) < 0.5, draw.integers(0, 31, n) / 30, draw.random(n))
    confidence[: n // 10] = 1.0
    confidence[n // 10 : n // 7] = 0.0
    draw.shuffle(confidence)
    return confidence, draw.random(n) < 0.3 + 0.4 * confidence


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("n", [1, 2, 7, 15, 16, 500])
def test_errors_equal_plain_loops_with_ties_and_confidence_0_and_1(n, seed):
    confidence, correct = random_predictions(n, seed)
    root, _ = plain_adaptive(confidence.tolist(), correct.tolist())
    found = measured(confidence, correct)
    assert found.ece.value == pytest.approx(plain_ece(confidence, correct), abs=1e-12)
    assert found.adaptive_ece.value == pytest.approx(root, abs=1e-9)


def test_errors_do_not_depend_on_the_order_of_tokens():
    confidence, correct = random_predictions(300, 0)
    shuffled = np.random.default_rng(1).permutation(300)
    there, here = measured(confidence[shuffled], correct[shuffled]), measured(confidence, correct)
    assert there.ece.value == pytest.approx(here.ece.value, abs=1e-12)
    assert there.adaptive_ece.value == pytest.approx(here.adaptive_ece.value, abs=1e-12)


def test_an_edge_belongs_to_the_bin_below_it_and_confidence_1_to_the_last():
    for k in range(1, 16):
        found = measure(scored(np.array([k / 15]), np.array([True])), simulations=1).reliability
        assert [b.count for b in found].index(1) == k - 1
        assert (found[k - 1].low, found[k - 1].high) == ((k - 1) / 15, k / 15)
    assert measure(scored(np.array([0.0]), np.array([True])), simulations=1).reliability[0].count == 1


def scored(confidence, correct, unit=None) -> TokenScores:
    unit = np.arange(len(confidence)) if unit is None else unit
    nll = np.where(correct, -np.log(np.maximum(confidence, 1e-9)), 9.0)
    return TokenScores(nll, confidence, correct, nll, confidence**2, unit)


def measured(confidence, correct):
    """Of a single unit, so that nothing is resampled."""
    one = np.zeros(len(confidence), int)
    return measure(scored(np.asarray(confidence), np.asarray(correct), one), simulations=1)


def test_measure_reports_what_the_plain_functions_do():
    confidence, correct = random_predictions(400, 2)
    scores = scored(confidence, correct, np.arange(400) // 9)
    found = measure(scores, resamples=200, simulations=50)
    assert found.ece.value == pytest.approx(plain_ece(confidence, correct))
    root, _ = plain_adaptive(confidence.tolist(), correct.tolist())
    assert found.adaptive_ece.value == pytest.approx(root)
    assert found.top1_brier.value == pytest.approx(((confidence - correct) ** 2).mean())
    assert found.overconfidence.value == pytest.approx(confidence.mean() - correct.mean())
    assert (found.tokens, found.units) == (400, 45)
    for estimate in (found.ece, found.adaptive_ece, found.brier, found.top1_brier, found.confidence):
        assert 0 <= estimate.low <= estimate.value <= estimate.high


def test_multiclass_brier_through_score_equals_the_sum_over_classes():
    table, text = bigram_table(), bigram_text(bigram_table(), 300)
    scores = score(lambda x: table[x], ar.Strided(text, length=16), device="cpu")
    p, y = table[text[:-1]].double().softmax(-1).numpy(), text[1:].numpy()
    plain = np.mean([sum((p[i, c] - (c == y[i])) ** 2 for c in range(VOCABULARY)) for i in range(299)])
    assert measure(scores).brier.value == pytest.approx(plain, rel=1e-5)


def test_reliability_data_add_up_and_can_be_written_as_json():
    confidence, correct = random_predictions(500, 3)
    confidence[(confidence > 0.4) & (confidence <= 8 / 15)] = 0.3  # leaves a bin empty
    found = measure(scored(confidence, correct), resamples=100, simulations=20)
    assert sum(b.count for b in found.reliability) == 500
    assert sum(b.count * b.accuracy.value for b in found.reliability if b.count) == pytest.approx(
        correct.sum()
    )
    assert sum(b.count * b.confidence for b in found.reliability if b.count) == pytest.approx(
        confidence.sum()
    )
    empty = [b for b in found.reliability if not b.count]
    assert empty
    assert all(b.confidence is None and b.accuracy is None for b in empty)
    written = json.loads(json.dumps(asdict(found), allow_nan=False))
    assert written["ece"]["value"] == found.ece.value
    assert written["reliability"][14]["accuracy"]["low"] <= written["reliability"][14]["accuracy"]["high"]


def of_bigram(sharper: float, n: int = 40_000):
    """The calibration of a bigram model on its own text, with its logits made sharper."""
    table = bigram_table()
    text = bigram_text(table, n)
    return measure(score(lambda x: sharper * table[x], ar.Strided(text, length=64), device="cpu"))


def test_calibrated_models_sit_inside_their_noise_floor_95_times_in_100():
    inside = 0
    for seed in range(60):
        table = bigram_table(seed=seed)
        windows = ar.Strided(bigram_text(table, 3000, seed=100 + seed), length=64)
        found = measure(score(lambda x, t=table: t[x], windows, device="cpu"), resamples=2, simulations=200)
        inside += found.ece.value <= found.ece_floor.high
    assert inside >= 0.87 * 60


def test_a_calibrated_model_scores_what_it_expects_of_itself():
    found = of_bigram(1.0)
    assert found.ece.value <= found.ece_floor.high
    assert found.adaptive_ece.low == 0
    assert found.overconfidence.low <= 0 <= found.overconfidence.high


def test_an_overconfident_model_is_far_outside_its_noise_floor():
    found = of_bigram(1.5)
    assert found.ece.low > 10 * found.ece_floor.high
    assert found.adaptive_ece.low > 0.05
    assert found.overconfidence.low > 0.05


def test_the_noise_floor_is_the_mean_absolute_deviation_of_each_bin():
    """With many tokens a bin's gap is normal: E|gap| = √(2/π) · √(Σ c(1-c)) / n."""
    confidence = np.random.default_rng(0).beta(1, 2, 30_000)
    for inner in (np.arange(1, 15) / 15, equal_mass(confidence, 15)):
        floor = noise_floor(confidence, inner, simulations=1000, seed=0)
        index = np.searchsorted(inner, confidence)
        spread = np.sqrt(np.bincount(index, weights=confidence * (1 - confidence)))
        assert floor.mean == pytest.approx(math.sqrt(2 / math.pi) * spread.sum() / 30_000, rel=0.03)
        assert floor.mean < floor.high < 2 * floor.mean


def test_the_debiased_error_is_nearly_unbiased_where_the_plain_one_is_not():
    """Squared, over many small samples of a model that is 3 points overconfident in every bin."""
    draw, squares, plain = np.random.default_rng(0), [], []
    for _ in range(400):
        confidence = draw.uniform(0.2, 1.0, 1000)
        correct = draw.random(1000) < confidence - 0.03
        found = measured(confidence, correct)
        squares.append(found.adaptive_ece.value**2)
        plain.append(plain_adaptive(confidence.tolist(), correct.tolist())[1])
    assert np.mean(plain) > 0.042
    assert math.sqrt(np.mean(squares)) == pytest.approx(0.03, abs=0.005)


def test_intervals_cover_the_true_calibration_error_about_95_times_in_100():
    draw, covered = np.random.default_rng(0), np.zeros(2)
    for trial in range(120):
        confidence = draw.uniform(0.2, 1.0, 6000)
        correct = draw.random(6000) < confidence - 0.1
        scores = scored(confidence, correct, np.arange(6000) // 50)
        found = measure(scores, resamples=200, simulations=2, seed=trial)
        for i, estimate in enumerate((found.ece, found.adaptive_ece)):
            covered[i] += estimate.low <= 0.1 <= estimate.high
    assert (covered / 120 >= 0.89).all()
    assert (covered / 120 <= 0.99).all()


def test_a_perfect_model_has_an_ece_of_0_and_no_noise():
    found = measure(score(next_token_oracle, ar.Strided(oracle_text(300), length=20), device="cpu"))
    assert (found.ece.value, found.ece.low, found.ece.high) == (0, 0, 0)
    assert (found.ece_floor.mean, found.ece_floor.high) == (0, 0)
    assert found.reliability[14].count == 299


def test_float32_and_float64_scores_agree():
    table, text = bigram_table(), bigram_text(bigram_table(), 2000)
    windows = ar.Strided(text, length=32)
    single, double = (score(lambda x, t=t: t[x], windows, device="cpu") for t in (table, table.double()))
    assert single.nll.dtype == np.float32
    assert double.nll.dtype == np.float64
    assert measure(single).ece.value == pytest.approx(measure(double).ece.value, abs=1e-6)
