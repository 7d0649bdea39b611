"""Scoring: the shift is right, each token counts once, and the numbers are those of the formulas."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from synthetic import (
    VOCABULARY,
    bigram_table,
    bigram_text,
    next_token_oracle,
    oracle_text,
    token_after_next_oracle,
)
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from langevin.bench.mixers import peak_memory
from langevin.errors import UsageError, WorkError
from langevin.evaluation import likelihood
from langevin.evaluation.calibration import measure
from langevin.evaluation.likelihood import TokenScores, score, score_at, summary
from langevin.objectives import ar


def one_window(tokens: Tensor) -> list[ar.Windows]:
    return [(tokens[None], torch.ones(1, len(tokens) - 1, dtype=torch.bool))]


def random_windows(batches: int, rows: int, length: int, vocabulary: int = VOCABULARY) -> list[ar.Windows]:
    scored = torch.rand(rows, length) < 0.7
    return [(torch.randint(0, vocabulary, (rows, length + 1)), scored) for _ in range(batches)]


def numbers(scores: TokenScores) -> np.ndarray:
    return np.stack([scores.nll, scores.confidence, scores.correct, scores.entropy, scores.square])


def loss(logits, targets, scored=None):
    summed, count = ar.summed_loss(logits, targets, scored)
    return summed / count


def test_a_perfect_next_token_oracle_scores_loss_0_accuracy_1_ece_0_brier_0():
    text = oracle_text(400)
    scores = score(next_token_oracle, ar.Strided(text, length=32, stride=8), device="cpu")
    likelihood, calibration = summary(scores), measure(scores)
    assert likelihood.tokens == 399
    assert (likelihood.nll.value, likelihood.nll.low, likelihood.nll.high) == (0, 0, 0)
    assert likelihood.perplexity.value == 1
    assert (likelihood.accuracy.value, likelihood.entropy.value) == (1, 0)
    assert (calibration.ece.value, calibration.adaptive_ece.value) == (0, 0)
    assert (calibration.brier.value, calibration.top1_brier.value) == (0, 0)
    inputs, targets = ar.shift(text[None])
    assert float(loss(next_token_oracle(inputs), targets)) == 0


def test_an_oracle_for_the_token_after_next_scores_badly():
    scores = score(token_after_next_oracle, ar.Strided(oracle_text(400), length=32), device="cpu")
    likelihood, calibration = summary(scores), measure(scores)
    assert likelihood.nll.value > 100
    assert likelihood.accuracy.value < 0.1
    assert calibration.ece.value > 0.9


def test_the_loss_is_the_mean_of_the_scored_tokens_nll():
    table = bigram_table()
    windows = random_windows(1, 6, 11)
    tokens, scored = windows[0][:2]
    inputs, targets = ar.shift(tokens)
    scores = score(lambda x: table[x], windows, device="cpu")
    assert len(scores) == int(scored.sum())
    assert float(loss(table[inputs], targets, scored)) == pytest.approx(scores.nll.mean(), rel=1e-6)


def test_losses_of_parts_add_up_to_the_loss_of_the_whole():
    table = bigram_table()
    tokens = torch.randint(0, VOCABULARY, (5, 9))
    mask = torch.rand(5, 8) < 0.6
    inputs, targets = ar.shift(tokens)
    logits, total = table[inputs], mask.sum()
    parts = [ar.summed_loss(logits[i], targets[i], mask[i])[0] / total for i in (slice(0, 2), slice(2, 5))]
    assert float(sum(parts)) == pytest.approx(float(loss(logits, targets, mask)), rel=1e-6)


def test_a_half_precision_loss_is_computed_in_float32():
    inputs, targets = ar.shift(torch.randint(0, VOCABULARY, (4, 9)))
    logits = bigram_table()[inputs].bfloat16()
    assert loss(logits, targets).dtype == torch.float32
    assert float(loss(logits, targets)) == float(loss(logits.float(), targets))


def test_logits_and_targets_from_different_shifts_are_refused():
    tokens = torch.randint(0, VOCABULARY, (2, 9))
    with pytest.raises(UsageError, match="do not fit"):
        loss(bigram_table()[tokens], ar.shift(tokens)[1])


@pytest.mark.parametrize("size", [2, 3, 17, 64, 65, 100])
@pytest.mark.parametrize(("length", "stride"), [(16, 16), (16, 5), (16, 1), (1, 1), (64, 33)])
def test_each_token_but_the_first_is_scored_exactly_once(size, length, stride):
    text = torch.arange(size)
    times = torch.zeros(size, dtype=torch.long)
    windows = ar.Strided(text, length=length, stride=stride, batch=3)
    batches = list(windows)
    for tokens, scored, _ in batches:
        times += torch.bincount(ar.shift(tokens)[1][scored], minlength=size)
        later = torch.arange(tokens.shape[1] - 1) >= tokens.shape[1] - 1 - stride
        assert bool((scored <= (later | (tokens[:, :1] == 0))).all())  # the context is kept
    assert times.tolist() == [0] + [1] * (size - 1)
    assert len(batches) == len(windows)


def recall_three(table: Tensor) -> Any:
    """A model that looks back over exactly three tokens."""

    def model(tokens: Tensor) -> Tensor:
        logits = table[tokens]
        for back in (1, 2):
            earlier = torch.zeros_like(logits)
            earlier[:, back:] = table[tokens[:, :-back]].roll(back, -1)
            logits = logits + earlier
        return logits

    return model


def test_strided_equals_unstrided_where_the_context_covers_all_the_model_uses():
    text, model = torch.randint(0, VOCABULARY, (203,)), recall_three(bigram_table())
    whole = score(model, one_window(text), device="cpu")
    for stride in (1, 7, 14):
        strided = score(model, ar.Strided(text, length=16, stride=stride), device="cpu")
        np.testing.assert_allclose(numbers(strided), numbers(whole), rtol=1e-5, atol=1e-6)
    short_of_context = score(model, ar.Strided(text, length=16, stride=16), device="cpu")
    assert abs(short_of_context.nll - whole.nll).max() > 0.1


def test_scores_are_those_of_the_plain_formulas():
    table = bigram_table(3.0).double()
    windows = random_windows(3, 4, 9)
    scores = score(lambda x: table[x], windows, device="cpu")
    at = 0
    for window, (tokens, scored) in enumerate((w[0][i], w[1][i]) for w in windows for i in range(4)):
        for place in range(9):
            if not scored[place]:
                continue
            z = table[tokens[place]].numpy()
            p = np.exp(z) / np.exp(z).sum()
            y = int(tokens[place + 1])
            assert scores.nll[at] == pytest.approx(-np.log(p[y]))
            assert scores.confidence[at] == pytest.approx(p.max())
            assert scores.correct[at] == (p.argmax() == y)
            assert scores.entropy[at] == pytest.approx(-(p * np.log(p)).sum())
            assert scores.brier[at] == pytest.approx(((p - np.eye(VOCABULARY)[y]) ** 2).sum())
            assert scores.top1_brier[at] == pytest.approx((p.max() - (p.argmax() == y)) ** 2)
            assert scores.unit[at] == window
            at += 1
    assert at == len(scores)


@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_chunking_does_not_change_the_numbers(rows, monkeypatch):
    table, windows = bigram_table(3.0), random_windows(2, 5, 13)
    whole = score(lambda x: table[x], windows, device="cpu")
    monkeypatch.setattr(likelihood, "_LOGITS_AT_ONCE", rows * VOCABULARY)
    parts = score(lambda x: table[x], windows, device="cpu")
    np.testing.assert_allclose(numbers(parts), numbers(whole), rtol=1e-6, atol=1e-7)


def test_half_precision_logits_are_scored_in_float32():
    table, windows = bigram_table(3.0).bfloat16(), random_windows(2, 5, 13)
    half = score(lambda x: table[x], windows, device="cpu")
    full = score(lambda x: table[x].float(), windows, device="cpu")
    assert half.nll.dtype == np.float32
    np.testing.assert_array_equal(numbers(half), numbers(full))


def test_a_large_vocabulary_needs_a_fraction_of_the_memory_of_its_logits(monkeypatch):
    monkeypatch.setattr(likelihood, "_LOGITS_AT_ONCE", 32 * 50_257)
    logits = torch.randn(1, 512, 50_257, dtype=torch.bfloat16)
    windows = [(torch.randint(0, 50_257, (1, 513)), torch.ones(1, 512, dtype=torch.bool))]
    peak = peak_memory(lambda: score(lambda x: logits, windows, device="cpu"))
    assert peak < 32 * 50_257 * 4 * 5 < logits.numel() * 4 / 3


@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_a_temperature_divides_the_logits(temperature):
    table, windows = bigram_table(3.0).double(), random_windows(2, 5, 13)
    plain, scaled = score_at(lambda x: table[x], windows, (1.0, temperature), device="cpu")
    by_hand = score(lambda x: table[x] / temperature, windows, device="cpu")
    np.testing.assert_allclose(numbers(scaled), numbers(by_hand), rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(plain.nll, score(lambda x: table[x], windows, device="cpu").nll)
    assert (plain.temperature, scaled.temperature) == (1.0, temperature)


def test_nan_logits_raise_and_name_the_window():
    windows = [
        (torch.randint(0, VOCABULARY, (4, 10)), torch.ones(4, 9, dtype=torch.bool)) for _ in range(3)
    ]
    calls = []

    def model(tokens: Tensor) -> Tensor:
        logits = bigram_table()[tokens]
        calls.append(1)
        if len(calls) == 2:
            logits[2, 5, 3] = math.nan
        return logits

    with pytest.raises(WorkError, match=r"window 6, position 5 give nan"):
        score(model, windows, device="cpu")


def test_a_forbidden_token_has_no_probability_and_a_forbidden_target_raises():
    table = bigram_table()
    forbidden = table.clone()
    forbidden[:, 3] = -math.inf
    text = torch.tensor([0, 1, 2, 4, 5, 6])
    scores = score(lambda x: forbidden[x], one_window(text), device="cpu")
    p = forbidden[text[:-1]].softmax(-1)
    np.testing.assert_allclose(scores.entropy, -torch.special.xlogy(p, p).sum(-1), rtol=1e-5)
    with pytest.raises(WorkError, match=r"position 1 give inf"):
        score(lambda x: forbidden[x], one_window(torch.tensor([0, 1, 3])), device="cpu")


def tiny_gpt2() -> Any:
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64, "vocab_size": VOCABULARY}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=1))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model


def test_a_transformers_model_scores_its_own_loss():
    model = tiny_gpt2().eval()
    tokens = torch.randint(0, VOCABULARY, (3, 20))
    windows = [(tokens, torch.ones(3, 19, dtype=torch.bool))]
    scores = score(model, windows, device="cpu")
    expected = model(tokens, labels=tokens).loss.detach()
    assert scores.nll.mean() == pytest.approx(float(expected), rel=1e-5)


def test_wrong_windows_and_models_are_refused():
    table, ones = bigram_table(), torch.ones(2, 9, dtype=torch.bool)
    tokens = torch.randint(0, VOCABULARY, (2, 10))
    for windows, cause in (
        ([(tokens[:, :1], ones)], "2 or more"),
        ([(tokens, ~ones)], "no token is scored"),
        ([], "no token is scored"),
    ):
        with pytest.raises(UsageError, match=cause):
            score(lambda x: table[x], windows, device="cpu")
    with pytest.raises(UsageError, match="logits of shape"):
        score(lambda x: table[x][:, :-1], [(tokens, ones)], device="cpu")
    with pytest.raises(UsageError, match="outside the model's vocabulary"):
        score(lambda x: table[x][..., :5], [(tokens, ones)], device="cpu")
    with pytest.raises(UsageError, match="stride"):
        ar.Strided(torch.arange(9), length=4, stride=5)


def test_bits_are_nats_over_ln_2_and_counted_per_character_and_byte():
    text = bigram_text(bigram_table(), 600)
    scores = score(lambda x: bigram_table()[x], ar.Strided(text, length=20), device="cpu")
    found = summary(scores, characters=1500, utf8_bytes=1800)
    total = scores.nll.sum(dtype=np.float64) / math.log(2)
    assert found.bits_per_token.value == pytest.approx(total / 599)
    assert found.bits_per_character.value == pytest.approx(total / 1500)
    assert found.bits_per_byte.value == pytest.approx(total / 1800)
    assert found.perplexity.value == pytest.approx(math.exp(found.nll.value))
    assert found.perplexity.low < found.perplexity.value < found.perplexity.high


def made_up(nll: np.ndarray, unit: np.ndarray) -> TokenScores:
    half = np.full(nll.shape, 0.5)
    return TokenScores(nll, half, half > 0, half, half, unit)


def test_bootstrap_intervals_cover_the_truth_about_95_times_in_100():
    """Tokens of a window share a window effect; as if tokens were independent, intervals are too short."""
    draw, covered, covered_by_tokens, trials, windows, tokens = np.random.default_rng(0), 0, 0, 300, 60, 12
    unit = np.repeat(np.arange(windows), tokens)
    for trial in range(trials):
        effect = draw.gamma(4.0, 0.25, windows)  # mean 1
        nll = effect[unit] * draw.exponential(1.0, windows * tokens)
        by_window = summary(made_up(nll, unit), resamples=400, seed=trial).nll
        by_token = summary(made_up(nll, np.arange(len(nll))), resamples=100, seed=trial).nll
        covered += by_window.low <= 1 <= by_window.high
        covered_by_tokens += by_token.low <= 1 <= by_token.high
    assert 0.91 <= covered / trials <= 0.98
    assert covered_by_tokens < covered - 0.03 * trials


def test_the_same_seed_gives_the_same_interval_and_one_unit_gives_none():
    nll = np.random.default_rng(0).exponential(1.0, 100)
    several = made_up(nll, np.arange(100) // 10)
    assert summary(several, seed=3) == summary(several, seed=3) != summary(several, seed=4)
    alone = summary(made_up(nll, np.zeros(100, dtype=np.int64))).nll
    assert (alone.value, alone.low, alone.high) == (pytest.approx(nll.mean()), None, None)


def test_documents_given_with_the_windows_are_the_units():
    tokens = torch.randint(0, VOCABULARY, (2, 5))
    documents = torch.tensor([[7, 7, 9, 9], [9, 9, 9, 11]])
    windows = [(tokens, torch.ones(2, 4, dtype=torch.bool), documents)]
    scores = score(lambda x: bigram_table()[x], windows, device="cpu")
    assert scores.unit.tolist() == documents.flatten().tolist()
    assert summary(scores).units == 3


@pytest.mark.parametrize("seed", range(20))
def test_the_interval_of_a_mean_stays_where_means_can_be(seed: int) -> None:
    """Twenty losses, nearly all of them 0: the resamples' own noise is no reason to go below."""
    sums = np.stack([np.ones(20), np.r_[1.0, np.zeros(19)]], -1)
    (found,) = likelihood.bootstrap(sums, lambda s: s[..., 1:] / s[..., :1], resamples=200, seed=seed)
    assert found.low is not None
    assert found.low >= 0
