"""Whether a model's confidence is what it claims: of the tokens predicted with 70 %, are 70 % right?

    fit = fit_temperature(model, validation, device="cpu")
    plain, scaled = score_at(model, test, (1.0, fit.value), device="cpu")
    measure(plain).ece, measure(scaled).ece

Tokens are sorted into bins b by top-1 confidence c. With n_b tokens, accuracy a_b and mean confidence c_b,

    ECE             Σ_b n_b/n |a_b - c_b|                                     15 bins of equal width
    adaptive ECE    √ Σ_b n_b/n ( (a_b - c_b)² - a_b (1 - a_b) / (n_b - 1) )   15 bins of equal mass

ECE is positive even for a perfectly calibrated model: by how much, says the noise floor. Adaptive ECE is
the debiased estimator of Kumar et al. (2019, arXiv 1909.10155): the subtracted term is what sampling alone
adds to the square, so the sum of a calibrated model is about 0 (and its root is taken of 0 where the sum is
negative). It is a root mean square, and as such larger than a mean of absolute errors.

Bins are (low, high], and 0 belongs to the first; equal confidences always share a bin.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from langevin.errors import UsageError
from langevin.evaluation.likelihood import (
    Estimate,
    TokenScores,
    below_the_largest,
    bootstrap,
    per_unit,
    sweep,
)
from langevin.objectives import ar

Array = NDArray[np.float64]

BINS = 15
_LAST_NODE = 5  # log2 β: temperatures between 1/32 and 32
_CLOSE = 5e-4  # in log2 β, 0.035 %
_LEAST_ENERGY = 1e-30


def equal_mass(confidence: Array, bins: int) -> Array:
    """The inner edges: the ⌈n/bins⌉th, ⌈2n/bins⌉th, ... smallest confidence."""
    rank = -(-np.arange(1, bins) * len(confidence) // bins)
    return np.sort(confidence)[rank - 1]


def _bin(confidence: Array, edges: Array) -> NDArray[np.int64]:
    return np.searchsorted(edges, confidence, side="left")


def _binned(confidence: Array, correct: Array, edges: Array) -> Array:
    """(n_b, Σ c, Σ correct) of every bin, (bins, 3)."""
    index, bins = _bin(confidence, edges), len(edges) + 1
    rows = (None, confidence, correct)
    return np.stack([np.bincount(index, weights=row, minlength=bins) for row in rows], -1)


def _plain_error(sums: Array) -> Array:
    """Σ_b n_b/n |a_b - c_b| of sums (..., bins, 3)."""
    n, c, right = np.moveaxis(sums, -1, 0)
    error: Array = np.abs(right - c).sum(-1) / n.sum(-1)
    return error


def _debiased_square(sums: Array) -> Array:
    """Σ_b n_b/n ((a_b - c_b)² - a_b (1 - a_b) / (n_b - 1)); a single token is not corrected."""
    n, c, right = np.moveaxis(sums, -1, 0)
    some = np.maximum(n, 1)
    accuracy = right / some
    square = ((right - c) / some) ** 2 - accuracy * (1 - accuracy) / np.maximum(n - 1, 1)
    total: Array = (n * square).sum(-1) / n.sum(-1)
    return total


@dataclass(frozen=True)
class Floor:
    """What a perfectly calibrated model would score by chance, with these confidences."""

    mean: float
    high: float  # 95 % of such models score less


@dataclass(frozen=True)
class Bin:
    """One column of a reliability diagram."""

    low: float
    high: float
    count: int
    confidence: float | None  # None in an empty bin
    accuracy: Estimate | None


@dataclass(frozen=True)
class Calibration:
    temperature: float
    tokens: int
    units: int  # documents or windows resampled
    ece: Estimate
    ece_floor: Floor
    adaptive_ece: Estimate
    brier: Estimate
    top1_brier: Estimate
    confidence: Estimate
    overconfidence: Estimate  # mean confidence - accuracy
    reliability: tuple[Bin, ...]


def measure(
    scores: TokenScores, *, bins: int = BINS, resamples: int = 1000, simulations: int = 1000, seed: int = 0
) -> Calibration:
    """Calibration of scored tokens, with intervals by resampling units and the noise floor of ECE.

    Edges of equal mass are those of the sample in every resample, and a fitted temperature is taken as
    given. The interval of ECE is about what it measures on this many tokens: near the floor that is more
    than the true error, which the interval of the debiased adaptive ECE covers.
    """
    c, right = scores.confidence.astype(np.float64), scores.correct.astype(np.float64)
    edges = (np.arange(1, bins) / bins, equal_mass(c, bins))  # the inner ones
    columns = _binned(c, right, edges[0])
    filled = columns[:, 0] > 0
    simple = np.stack([np.ones(len(c)), c, right, scores.brier, scores.top1_brier])
    binned = [per_unit(simple[:3], scores.unit, _bin(c, e), bins) for e in edges]
    sums = np.concatenate([per_unit(simple, scores.unit), *binned], -1)

    def statistics(totals: Array) -> Array:
        n, confidence, hits, brier, top1 = np.moveaxis(totals[..., :5], -1, 0)
        width, mass = np.split(totals[..., 5:].reshape(*totals.shape[:-1], 2 * bins, 3), 2, -2)
        with np.errstate(invalid="ignore"):
            accuracy = (width[..., 2] / width[..., 0])[..., filled]
        errors = [_plain_error(width), _debiased_square(mass)]
        means = [x / n for x in (brier, top1, confidence, confidence - hits)]
        return np.concatenate([np.stack([*errors, *means], -1), accuracy], -1)

    found = bootstrap(sums, statistics, resamples=resamples, seed=seed)
    return Calibration(
        temperature=scores.temperature,
        tokens=len(c),
        units=len(sums),
        ece=found[0].map(lambda x: max(x, 0.0)),
        ece_floor=noise_floor(c, edges[0], simulations=simulations, seed=seed),
        adaptive_ece=found[1].map(lambda x: math.sqrt(max(x, 0.0))),
        brier=found[2],
        top1_brier=found[3],
        confidence=found[4],
        overconfidence=found[5],
        reliability=_reliability(columns, found[6:]),
    )


def _reliability(sums: Array, accuracies: list[Estimate]) -> tuple[Bin, ...]:
    remaining, bins = iter(accuracies), len(sums)
    return tuple(
        Bin(
            b / bins,
            (b + 1) / bins,
            int(n),
            float(c / n) if n else None,
            next(remaining).map(lambda x: min(max(x, 0.0), 1.0)) if n else None,
        )
        for b, (n, c, _) in enumerate(sums)
    )


def noise_floor(confidence: Array, edges: Array, *, simulations: int, seed: int) -> Floor:
    """The ECE of models that are right with probability c, token by token.

    Sorted by confidence, a bin is a slice, and a simulation costs one uniform number a token.
    """
    ordered = np.sort(confidence)
    chance = ordered.astype(np.float32)
    draw = np.random.default_rng(seed)
    sums = np.repeat(_binned(ordered, np.zeros(len(ordered)), edges)[None], simulations, 0)
    cuts = np.searchsorted(ordered, edges, side="right")
    for i in range(simulations):
        right = draw.random(len(chance), dtype=np.float32) < chance
        sums[i, :, 2] = [np.count_nonzero(part) for part in np.split(right, cuts)]
    errors = _plain_error(sums)
    return Floor(float(errors.mean()), float(np.quantile(errors, 0.95)))


@dataclass(frozen=True)
class Temperature:
    """The temperature that makes the text likeliest."""

    value: float
    inside: bool  # False: the likelihood still grows at the end of the range, 1/32 to 32
    passes: int  # over the text


def fit_temperature(
    model: Callable[[Tensor], Any], windows: Iterable[ar.Windows], *, device: torch.device | str
) -> Temperature:
    """The T that minimises the mean NLL of softmax(z / T), for validation text; within 0.1 %.

    With β = 1/T and z counted from the largest logit, the NLL is convex in β and least where

        U(β) = u,      U = mean E_p[-z],      dU/dβ = - mean Var_p[z],      u = mean -z_y

    A pass over the text takes U and its slope at three β, factors of √2 apart and first around 1, until u
    lies between two. There ln U is nearly straight against ln β, and where errors are rare against β: both
    cubic Hermite interpolants are solved for ln u, and where they disagree a further pass looks at three β
    around the place. Usually one pass is enough.
    """
    if iter(windows) is windows:
        raise UsageError("the windows can be gone through only once", "Pass a list or ar.Strided.")
    known: dict[float, tuple[float, float]] = {}  # at log2 β: U and its slope
    nodes, passes = [-0.5, 0.0, 0.5], 0
    while True:
        found, _ = sweep(model, windows, _energies(nodes), device=device)
        u, *rest = found.mean(-1, dtype=np.float64).tolist()
        known |= dict(zip(nodes, zip(rest[::2], rest[1::2], strict=True), strict=True))
        passes += 1
        if known[0.0][0] == u:
            return Temperature(1.0, True, passes)
        below = [x for x, (energy, _) in known.items() if energy >= u]
        above = [x for x, (energy, _) in known.items() if energy < u]
        if not below or not above:
            end = min(above) if above else max(below)
            if abs(end) >= _LAST_NODE:
                return Temperature(2**-end, False, passes)
            nodes = [end + (-k if above else k) / 2 for k in (1, 2, 3)]
            continue
        ends = max(below), min(above)
        straight, logarithmic = (_crossing(ends, known, u, in_logarithm) for in_logarithm in (False, True))
        doubt = abs(straight - logarithmic)
        if min(doubt, ends[1] - ends[0]) < _CLOSE:
            return Temperature(2**-logarithmic, True, passes)
        nodes = [logarithmic - doubt, logarithmic, logarithmic + doubt]


def _energies(nodes: list[float]) -> Callable[[Tensor, Tensor], Tensor]:
    """-z_y, then at every node E_p[-z] and its slope, -Var_p[z]."""

    def statistics(z_NV: Tensor, y_N: Tensor) -> Tensor:
        z, z_y, _ = below_the_largest(z_NV, y_N)
        rows = [-z_y]
        for node in nodes:
            e = (z * 2**node).exp_()
            total = e.sum(-1)
            mean = e.mul_(z).sum(-1) / total
            rows += [-mean, mean.square() - e.mul_(z).sum(-1) / total]
        return torch.stack(rows)

    return statistics


def _crossing(
    ends: tuple[float, float], known: dict[float, tuple[float, float]], u: float, in_logarithm: bool
) -> float:
    """log2 of the β between two at which the cubic through ln U, against β or ln β, falls through ln u."""

    def point(x: float) -> tuple[float, float, float]:
        energy, slope = known[x]
        energy = max(energy, _LEAST_ENERGY)
        place, change = (x * math.log(2), 2**x) if in_logarithm else (2**x, 1.0)
        return place, math.log(energy / u), slope / energy * change

    (a, f_a, d_a), (b, f_b, d_b) = (point(x) for x in ends)
    low, high = 0.0, 1.0
    for _ in range(50):
        s = (low + high) / 2
        value = f_a * (1 + 2 * s) * (1 - s) ** 2 + f_b * s**2 * (3 - 2 * s)
        value += (b - a) * (d_a * s * (1 - s) ** 2 - d_b * s**2 * (1 - s))
        low, high = (s, high) if value >= 0 else (low, s)
    place = a + (b - a) * low
    return place / math.log(2) if in_logarithm else math.log2(place)
