"""How sure a study is: t intervals over seeds, exact sign-flip tests, Holm's correction.

Runs are paired by seed, and a difference is an arm's value minus the reference's. If two arms were alike,
each difference would be as likely to have the other sign, so the exact two-sided p is the share of the 2ⁿ
sign patterns s that give at least the sum that was seen:

    p = #{ s ∈ {−1,+1}ⁿ : |Σ s_i d_i| ≥ |Σ d_i| } / 2ⁿ        (never below 2/2ⁿ)

Holm's correction keeps the chance of any wrong finding among all judged contrasts of a study, and over all
looks that were declared, at or below 5 %.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np

ERROR_RATE = 0.05
EXACT_PAIRS = 20
RANDOM_FLIPS = 100_000

Scale = Literal["plain", "log", "log odds"]


@dataclass(frozen=True)
class Estimate:
    """A mean with a t interval; without one where there are fewer than two values, or infinite ones."""

    mean: float
    low: float | None
    high: float | None
    n: int


def estimate(values: Sequence[float], confidence: float = 0.95, scale: Scale = "plain") -> Estimate | None:
    """Mean ± t · s/√n, by the delta method on a scale on which no interval leaves the range of the values:
    logarithms of what is positive (of width s/√n · 1/m), log odds of fractions (s/√n · 1/(m(1 − m)))."""
    x = np.array(values, dtype=float)
    if not len(x):
        return None
    with np.errstate(invalid="ignore"):
        mean = float(x.mean())
    if len(x) == 1 or not np.isfinite(x).all():
        return Estimate(mean, None, None, len(x))
    with np.errstate(over="ignore"):
        half = t_quantile(confidence, len(x) - 1) * float(x.std(ddof=1)) / math.sqrt(len(x))
    if not math.isfinite(half):
        return Estimate(mean, None, None, len(x))
    if scale == "log odds" and 0 < mean < 1:
        odds, half = math.log(mean / (1 - mean)), half / (mean * (1 - mean))
        low, high = (0.5 * (1 + math.tanh((odds + sign * half) / 2)) for sign in (-1, 1))
        return Estimate(mean, low, high, len(x))
    if scale == "log" and mean > 0:
        return Estimate(mean, mean * math.exp(-half / mean), mean * math.exp(half / mean), len(x))
    return Estimate(mean, mean - half, mean + half, len(x))


def sign_flip(differences: Sequence[float]) -> float:
    """The two-sided sign-flip p: exact to 20 pairs, then by 100,000 random patterns, ours counted in.

    An infinite difference, of a run that diverged, counts as larger than all finite ones together. Sums
    that differ only by rounding count as equal, so differences of zero and ties are exact too.
    """
    d = np.array(differences, dtype=float)
    finite = np.isfinite(d)
    largest = 2 * float(np.abs(d[finite]).sum()) + 1
    d[~finite] = np.sign(d[~finite]) * largest
    least = abs(d.sum()) - 1e-9 * np.abs(d).sum()
    if len(d) > EXACT_PAIRS:
        draw = np.random.default_rng(0)
        sums = np.zeros(RANDOM_FLIPS)
        for value in d:  # one by one, so that memory stays small
            sums += np.where(draw.integers(2, size=RANDOM_FLIPS, dtype=np.int8), value, -value)
        return float((np.count_nonzero(np.abs(sums) >= least) + 1) / (RANDOM_FLIPS + 1))
    sums = d[:1]  # a pattern and its mirror image have the same |sum|: the first sign may stay
    for value in d[1:]:
        sums = np.concatenate([sums + value, sums - value])
    return float(np.mean(np.abs(sums) >= least)) if len(d) else 1.0


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p: the i-th smallest of k times (k − i + 1), in the same order, at most 1."""
    adjusted = [1.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        highest = max(highest, (len(p_values) - rank) * p_values[index])
        adjusted[index] = min(1.0, highest)
    return adjusted


def least_seeds(contrasts: int, looks: int = 1) -> int:
    """Pairs from which a finding can survive Holm: the least n with contrasts · looks · 2/2ⁿ ≤ 0.05."""
    return math.ceil(1 + math.log2(max(1, contrasts) * looks / ERROR_RATE))


@cache
def t_quantile(confidence: float, freedom: int) -> float:
    """The t with P(|T| ≤ t) = confidence for Student's T with a whole number of degrees of freedom ν.

    With θ = atan(t/√ν) that probability is a finite sum (Abramowitz and Stegun 26.7.3 and 26.7.4):

        odd ν:   2/π · (θ + sin θ · (cos θ + 2/3 cos³θ + ... + 2·4…(ν−3)/(3·5…(ν−2)) cos^(ν−2) θ))
        even ν:  sin θ · (1 + 1/2 cos²θ + ... + 1·3…(ν−3)/(2·4…(ν−2)) cos^(ν−2) θ)

    It grows with θ, and is inverted by halving. From 200 degrees on, the normal quantile is near enough.
    """
    freedom = min(freedom, 200)
    odd = freedom % 2

    def inside(theta: float) -> float:
        cosine = math.cos(theta)
        term = cosine if odd else 1.0
        total = 0.0
        for power in range(odd, freedom - 1, 2):
            total += term
            term *= cosine * cosine * (power + 1) / (power + 2)
        total *= math.sin(theta)
        return 2 / math.pi * (theta + total) if odd else total

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle) < confidence else (low, middle)
    return math.sqrt(freedom) * math.tan((low + high) / 2)
