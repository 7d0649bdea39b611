"""How well a model predicts text: every token scored once, every number with an interval.

    scores = score(model, ar.Strided(tokens, length=256, stride=128), device="cpu")
    summary(scores, characters=len(text)).nll

One pass keeps a few numbers a token and never the logits: with p the prediction and y the target,

    -ln p_y,    max_c p_c,    argmax_c p_c = y,    -Σ_c p_c ln p_c,    Σ_c p_c²

from which likelihood and calibration follow. B batch, L predictions, V vocabulary, N scored tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from langevin.errors import Diverged, UsageError
from langevin.kernels.view import wide
from langevin.objectives import ar

Statistics = Callable[[Tensor, Tensor], Tensor]  # logits (N, V) and targets (N,) -> numbers (K, N)

_LOGITS_AT_ONCE = 2**24  # 64 MiB in float32
_DRAWS_AT_ONCE = 2**22
_LEAST = -1e4  # a logit this far below the largest has no probability; -∞ · 0 would be NaN


@dataclass(frozen=True, eq=False)
class TokenScores:
    """What is known of every scored token, at one temperature; arrays of N on the CPU."""

    nll: NDArray[Any]  # -ln p_y, in nats
    confidence: NDArray[Any]  # max_c p_c
    correct: NDArray[np.bool_]
    entropy: NDArray[Any]  # of the prediction, in nats
    square: NDArray[Any]  # Σ_c p_c²
    unit: NDArray[np.int64]  # the document or window the token belongs to, resampled as a whole
    temperature: float = 1.0

    def __len__(self) -> int:
        return len(self.nll)

    @property
    def brier(self) -> NDArray[np.float64]:
        """Σ_c (p_c - [c = y])² = 1 - 2 p_y + Σ_c p_c², between 0 and 2."""
        return 1 - 2 * np.exp(-self.nll.astype(np.float64)) + self.square

    @property
    def top1_brier(self) -> NDArray[np.float64]:
        """(max_c p_c - [argmax is right])², between 0 and 1."""
        return (self.confidence.astype(np.float64) - self.correct) ** 2


@dataclass(frozen=True, eq=False)
class TokenBounds:
    """An upper bound of the NLL, as shares of every scored token; arrays of N on the CPU."""

    nll: NDArray[Any]  # a token's share, in nats: it says nothing of that token alone
    unit: NDArray[np.int64]
    masks_se: float | None = None  # of the mean over tokens, by the choice of masks alone

    def __len__(self) -> int:
        return len(self.nll)


def score(
    model: Callable[[Tensor], Any], windows: Iterable[ar.Windows], *, device: torch.device | str
) -> TokenScores:
    """Score every token the windows mark; see `sweep`."""
    (scores,) = score_at(model, windows, (1.0,), device=device)
    return scores


def score_at(
    model: Callable[[Tensor], Any],
    windows: Iterable[ar.Windows],
    temperatures: tuple[float, ...],
    *,
    device: torch.device | str,
) -> tuple[TokenScores, ...]:
    """`score` at several temperatures in one pass over the model."""
    wrong = [t for t in temperatures if not 0 < t < math.inf]
    if wrong:
        raise UsageError(f"temperature {wrong[0]} must be positive")

    def statistics(z_NV: Tensor, y_N: Tensor) -> Tensor:
        z, z_y, correct = below_the_largest(z_NV, y_N)
        rest = [row for t in temperatures for row in _prediction(z, z_y, t)]
        return torch.stack([correct.to(z.dtype), *rest])

    (correct, *rest), unit = sweep(model, windows, statistics, device=device)
    return tuple(
        TokenScores(nll, confidence, correct > 0, entropy, square, unit, t)
        for t, (nll, confidence, entropy, square) in zip(
            temperatures, zip(*[iter(rest)] * 4, strict=True), strict=True
        )
    )


def below_the_largest(z_NV: Tensor, y_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits less the largest of their row (in place), the target's, and whether that is the largest."""
    largest, best = z_NV.max(-1, keepdim=True)
    z_NV -= largest
    z_y = z_NV.gather(-1, y_N[:, None])[:, 0]
    return z_NV.clamp_(min=_LEAST), z_y, best[:, 0] == y_N


def _prediction(z_NV: Tensor, z_y: Tensor, temperature: float) -> tuple[Tensor, ...]:
    """NLL, confidence, entropy and Σ p² of softmax(z / temperature), where the largest z is 0."""
    x = z_NV if temperature == 1 else z_NV / temperature
    e = x.exp()
    total = e.sum(-1)
    log_total = total.log()
    entropy = log_total - (x * e).sum(-1) / total
    square = e.square_().sum(-1) / total.square()
    return log_total - z_y / temperature, 1 / total, entropy, square


@torch.no_grad()
def sweep(
    model: Callable[..., Any],
    windows: Iterable[ar.Windows],
    statistics: Statistics,
    *,
    device: torch.device | str,
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Statistics of every scored prediction (K, N), and the unit of each (N,).

    A batch of windows is tokens (B, L + 1) and scored (B, L), True where the target tokens[:, 1:] counts;
    a third tensor (B, L) may name the unit (document) of each target, which is else its window. Padding on
    the right is harmless as long as it is not scored. The model is any callable from tokens to logits, or
    a transformers model, on `device` and in evaluation mode. Logits are widened to float32 and handed over
    64 MiB at a time, so that only the model itself ever holds them all.
    """
    parts, units, seen = [], [], 0
    options = {"use_cache": False} if isinstance(model, PreTrainedModel) else {}
    for tokens, scored, *named in windows:
        inputs, targets = ar.shift(tokens)
        unit = torch.arange(seen, seen + len(tokens))[:, None].expand(scored.shape)
        unit = named[0].cpu() if named else unit
        out = model(inputs.to(device), **options)
        logits: Tensor = getattr(out, "logits", out)
        _check_logits(logits, targets)
        scored_places = scored.to(device).flatten().nonzero()[:, 0]
        y, z = targets.to(device).flatten(), logits.flatten(0, 1)
        at_once = max(1, _LOGITS_AT_ONCE // z.shape[-1])
        found = [statistics(z[some].to(wide(z.dtype)), y[some]) for some in scored_places.split(at_once)]
        part = torch.cat(found, -1).cpu()
        _check_finite(part, scored, seen)
        parts.append(part.numpy())
        units.append(unit[scored.cpu()].numpy())
        seen += len(tokens)
    if not sum(len(u) for u in units):
        raise UsageError("no token is scored", "The text is empty, or the windows mark nothing.")
    return np.concatenate(parts, -1), np.concatenate(units).astype(np.int64)


def _check_logits(logits: Tensor, targets: Tensor) -> None:
    if logits.ndim != 3 or logits.shape[:2] != targets.shape:
        raise UsageError(
            f"the model gave logits of shape {tuple(logits.shape)} for {tuple(targets.shape)} tokens",
            "Expected (batch, tokens, vocabulary), one prediction a token.",
        )
    largest = int(targets.max())
    if largest >= logits.shape[-1]:
        raise UsageError(
            f"token {largest} is outside the model's vocabulary of {logits.shape[-1]}",
            "The tokenizer does not fit the model.",
        )


def _check_finite(part_KN: Tensor, scored_BL: Tensor, seen: int) -> None:
    bad = ~part_KN.isfinite()
    if bool(bad.any()):
        row, which = (int(x) for x in bad.nonzero()[0])
        window, position = scored_BL.cpu().nonzero()[which].tolist()
        raise Diverged(
            f"the logits at window {seen + window}, position {position} give {float(part_KN[row, which])}",
            "The model has diverged or overflows: try an earlier checkpoint, or float32.",
        )


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % interval, from resampling whole units or of a share (None: too few for one)."""

    value: float
    low: float | None
    high: float | None

    def map(self, increasing: Callable[[float], float]) -> Estimate:
        low, high = (None if x is None else increasing(x) for x in (self.low, self.high))
        return Estimate(increasing(self.value), low, high)


def wilson(right: float, of: int) -> Estimate:
    """A share of independent answers with Wilson's 95 % interval, which has a width even where all are
    right; of none it is 0, without an interval.

    (p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n),    z = 1.96
    """
    if not of:
        return Estimate(0.0, None, None)
    z, p = 1.959964, right / of
    middle, half = p + z * z / (2 * of), z * math.sqrt(p * (1 - p) / of + z * z / (4 * of * of))
    low, high = ((middle + side * half) / (1 + z * z / of) for side in (-1, 1))
    return Estimate(p, min(p, max(0.0, low)), max(p, min(1.0, high)))


def per_unit(
    numbers_KN: NDArray[Any], unit_N: NDArray[np.int64], bin_N: NDArray[np.int64] | int = 0, bins: int = 1
) -> NDArray[np.float64]:
    """Sums of each number over each unit, or over each unit's share of each bin; (U, bins · K)."""
    names, index = np.unique(unit_N, return_inverse=True)
    cell, cells = index * bins + bin_N, len(names) * bins
    sums = np.stack([np.bincount(cell, weights=row, minlength=cells) for row in numbers_KN], -1)
    return sums.reshape(len(names), -1).astype(np.float64)


def resampled(sums_UK: NDArray[np.float64], resamples: int, seed: int) -> NDArray[np.float64]:
    """Totals (resamples, K) of as many units drawn with replacement. The draws depend on the seed and the
    number of units alone, so that models scored on the same windows are resampled in pairs."""
    units, draw = len(sums_UK), np.random.default_rng(seed)
    totals = []
    for some in np.array_split(np.arange(resamples), math.ceil(resamples * units / _DRAWS_AT_ONCE)):
        drawn = draw.integers(0, units, (len(some), units)) + units * np.arange(len(some))[:, None]
        counts = np.bincount(drawn.ravel(), minlength=drawn.size).reshape(drawn.shape)
        totals.append(counts.astype(np.float64) @ sums_UK)
    return np.concatenate(totals)


def bootstrap(
    sums_UK: NDArray[np.float64],
    statistic: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    *,
    resamples: int,
    seed: int,
) -> list[Estimate]:
    """Statistics (..., M) of totals (..., K), each with its interval; NaN is left out of it.

    Tokens of one text depend on each other, so units are resampled and not tokens. The interval is the
    2.5th to the 97.5th percentile of the resamples, less their mean excess over the sample: a resample is
    noisier than the sample, which alone raises its calibration errors. Means have no such excess; what is
    no more than the noise of drawing resamples is not taken for one.
    """
    values = statistic(sums_UK.sum(0))
    if len(sums_UK) < 2:
        return [Estimate(float(v), None, None) for v in values]
    again = statistic(resampled(sums_UK, resamples, seed))
    excess = np.nanmean(again, 0) - values
    excess[np.abs(excess) < 4 * np.nanstd(again, 0) / math.sqrt(resamples)] = 0
    low, high = np.nanpercentile(again, (2.5, 97.5), axis=0) - excess
    return [Estimate(float(v), float(a), float(b)) for v, a, b in zip(values, low, high, strict=True)]


@dataclass(frozen=True)
class Likelihood:
    """Token-weighted means with 95 % bootstrap intervals; bits are nats / ln 2."""

    tokens: int
    units: int  # documents or windows resampled
    nll: Estimate
    perplexity: Estimate
    bits_per_token: Estimate
    bits_per_character: Estimate | None
    bits_per_byte: Estimate | None
    accuracy: Estimate | None = None  # of predictions
    entropy: Estimate | None = None


def summary(
    scores: TokenScores | TokenBounds,
    *,
    characters: int | None = None,
    utf8_bytes: int | None = None,
    resamples: int = 1000,
    seed: int = 0,
) -> Likelihood:
    """Likelihood of scored text that has so many characters and bytes (their number per token is taken
    as known in the intervals)."""
    predictions = (scores.correct, scores.entropy) if isinstance(scores, TokenScores) else ()
    sums = per_unit(np.stack([np.ones(len(scores)), scores.nll, *predictions]), scores.unit)
    nll, *rest = bootstrap(sums, lambda s: s[..., 1:] / s[..., :1], resamples=resamples, seed=seed)
    bits = nll.map(lambda x: x / math.log(2))

    def per(count: int | None) -> Estimate | None:
        return None if count is None else bits.map(lambda x: x * len(scores) / count)

    return Likelihood(
        tokens=len(scores),
        units=len(sums),
        nll=nll,
        perplexity=nll.map(lambda x: math.exp(x) if x < 709 else math.inf),
        bits_per_token=bits,
        bits_per_character=per(characters),
        bits_per_byte=per(utf8_bytes),
        **dict(zip(("accuracy", "entropy"), rest, strict=False)),
    )
