"""Temperature scaling: fitted on validation text, it finds the temperature hidden in the logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from synthetic import bigram_table, bigram_text, next_token_oracle, oracle_text

from langevin.errors import UsageError
from langevin.evaluation.calibration import fit_temperature, measure
from langevin.evaluation.likelihood import score_at
from langevin.objectives import ar

TABLE = bigram_table(1.5)
VALIDATION, TEST = bigram_text(TABLE, 20_000, seed=1), bigram_text(TABLE, 20_000, seed=2)


def likeliest(table, text):
    """The temperature of least NLL, by golden section."""
    inputs, targets = ar.shift(text[None])
    logits, targets = table.double()[inputs[0]], targets[0]
    low, high, ratio = np.log(1 / 40), np.log(40), (np.sqrt(5) - 1) / 2
    while high - low > 1e-7:
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        worse = F.cross_entropy(logits / np.exp(a), targets) > F.cross_entropy(logits / np.exp(b), targets)
        low, high = (a, high) if worse else (low, b)
    return float(np.exp(low))


@pytest.mark.parametrize("hidden", [0.3, 0.8, 1.0, 1.25, 1.9, 6.0])
def test_a_hidden_temperature_is_recovered(hidden):
    table = TABLE * hidden
    windows = ar.Strided(VALIDATION, length=128)
    fit = fit_temperature(lambda x: table[x], windows, device="cpu")
    assert fit.inside
    assert fit.value == pytest.approx(hidden, rel=0.03)
    assert fit.value == pytest.approx(likeliest(table, VALIDATION), rel=1e-3)
    assert fit.passes == (1 if 0.75 < hidden < 1.35 else 2 if 0.25 < hidden < 4 else 3)


def confident(generator):
    """Sure of everything, and rarely wrong."""
    logits = torch.full((3000, 200), -16.0)
    logits[:, 0] = 0
    return logits, torch.where(torch.rand(3000, generator=generator) < 0.002, 5, 0)


def sure_and_unsure(generator):
    """Two kinds of tokens, with logits far apart and close together."""
    sharp = torch.where(torch.rand(3000, 1, generator=generator) < 0.4, 11.0, 0.4)
    logits = sharp * torch.randn(3000, 30, generator=generator)
    return logits, torch.multinomial((1.25 * logits).softmax(-1), 1, generator=generator)[:, 0]


def two_levels(generator):
    """Half of the tokens are possible and half are not, but for the noise that says otherwise."""
    logits = torch.where(torch.rand(3000, 23, generator=generator) < 0.5, 0.0, -17.0)
    chance = 0.98 * logits.softmax(-1) + 0.02 / 23
    return logits, torch.multinomial(chance, 1, generator=generator)[:, 0]


def heavy_tails(generator):
    student = torch.distributions.StudentT(2.0)
    torch.manual_seed(3)
    logits = 2 * student.sample((3000, 50))
    return logits, torch.multinomial((0.8 * logits).softmax(-1), 1, generator=generator)[:, 0]


@pytest.mark.parametrize("kind", [confident, sure_and_unsure, two_levels, heavy_tails])
def test_the_temperature_is_within_a_thousandth_of_the_likeliest_on_a_fine_grid(kind):
    logits, targets = kind(torch.Generator().manual_seed(5))
    tokens = torch.cat([targets.new_zeros(1), targets])[None]
    windows = [(tokens, torch.ones_like(targets, dtype=torch.bool)[None])]
    fit = fit_temperature(lambda x: logits[None].clone(), windows, device="cpu")
    assert fit.inside
    grid = fit.value * (1 + np.arange(-40, 41) / 4000)  # 1 % to either side
    losses = [float(F.cross_entropy(logits.double() / t, targets)) for t in grid]
    assert grid[int(np.argmin(losses))] == pytest.approx(fit.value, rel=1e-3)


def test_scaling_improves_the_likelihood_and_calibration_of_other_text():
    table = TABLE * 1.6
    fit = fit_temperature(lambda x: table[x], ar.Strided(VALIDATION, length=128), device="cpu")
    calls = []

    def model(tokens):
        calls.append(len(tokens))
        return table[tokens]

    windows = ar.Strided(TEST, length=128)
    plain, scaled = score_at(model, windows, (1.0, fit.value), device="cpu")
    assert len(calls) == len(windows)
    before, after = measure(plain), measure(scaled)
    assert scaled.nll.mean() < plain.nll.mean() - 0.05
    assert before.ece.low > 5 * before.ece_floor.high
    assert after.ece.value < 2 * after.ece_floor.high
    assert after.brier.value < before.brier.value
    assert after.temperature == fit.value
    np.testing.assert_array_equal(plain.correct, scaled.correct)


def test_a_model_that_is_always_right_wants_the_lowest_temperature_and_says_so():
    windows = ar.Strided(oracle_text(200), length=20)
    fit = fit_temperature(lambda x: next_token_oracle(x) / 100, windows, device="cpu")
    assert not fit.inside
    assert fit.value == 1 / 32


def test_logits_that_say_nothing_keep_temperature_1():
    windows = ar.Strided(VALIDATION[:300], length=20)
    fit = fit_temperature(lambda x: torch.zeros(*x.shape, len(TABLE)), windows, device="cpu")
    assert (fit.value, fit.inside) == (1.0, True)


def test_windows_that_can_be_read_only_once_are_refused():
    windows = iter(ar.Strided(VALIDATION, length=128))
    with pytest.raises(UsageError, match="only once"):
        fit_temperature(lambda x: TABLE[x], windows, device="cpu")


def test_temperatures_must_be_positive():
    with pytest.raises(UsageError, match="positive"):
        score_at(lambda x: TABLE[x], ar.Strided(TEST, length=128), (1.0, 0.0), device="cpu")
