"""Which positions of a text are committed next, and which are opened again.

    ancestral       each open position with probability 1 - m(s)/m(t), from time t to s: the process itself
    first-hitting   the same in continuous time, which is: positions in random order, one a call
    confidence      where the likeliest token has the largest probability
    margin          where it is furthest ahead of the second
    entropy         where the prediction has the least entropy
    threshold       wherever the likeliest token has more than a given probability, or the best place

What is drawn in one step is drawn as if it were alone, and neighbours depend on each other the most. So
where n positions are open (in the window, if there is one) and a step has to commit c of them, every order
but the first and last commits the best of each n/c neighbours.

Ancestral steps may also open what was committed, each position with probability σ, and then commit so much
more that as many are open as before: the masked share m(t) stays what it is for any σ up to

    σ_max = min( 1, m(s) / (1 - m(t)) ),           open positions:  ( 1 - m(s) - (1 - σ)(1 - m(t)) ) / m(t)

    cap       σ = min( η, σ_max )
    rescale   σ = η σ_max
    conf      σ_i = η σ_max n w_i,   w = softmax(-p) over the n committed, p their probabilities when they
              were; at most σ_max
    loop      cap, while time stands still: 45 % of the steps lead to t = 0.1, 50 % stay there, 5 % end it
(Wang et al. 2025, arXiv 2503.00307)

B texts, N positions, V vocabulary, R positions of interest.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Order = Literal["ancestral", "first-hitting", "confidence", "margin", "entropy", "threshold"]
Remask = Literal["none", "cap", "rescale", "conf", "loop"]

LOOP_FROM, LOOP_TO, LOOP_TIME = 0.55, 0.05, 0.1


def uniform(seed_B: Tensor, place_N: Tensor, counter: int | Tensor) -> Tensor:
    """(B, N), in [0, 1): a function of a text's seed, the position and a counter alone (splitmix64); of C
    counters (C, 1, 1) at once (C, B, N)."""
    bits = _mixed(_mixed(seed_B)[:, None] + (counter << 32) + place_N)
    return _shifted(bits, 11).double() * 2.0**-53


def _mixed(x: Tensor) -> Tensor:
    x = x + (0x9E3779B97F4A7C15 - 2**64)
    x = (x ^ _shifted(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ _shifted(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, by: int) -> Tensor:
    """x >> by of 64 bits without a sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def certainty(logits_RV: Tensor, order: Order) -> Tensor:
    p_RV = logits_RV.float().softmax(-1)
    if order == "entropy":
        return torch.special.xlogy(p_RV, p_RV).sum(-1)
    if order == "margin":
        best = p_RV.topk(2, dim=-1).values
        return best[:, 0] - best[:, 1]
    return p_RV.amax(-1)


def best_of_each(score_BN: Tensor, group_BN: Tensor) -> Tensor:
    """The place with the largest score in each group, the first of equal ones."""
    rank_BN = score_BN.argsort(dim=-1, descending=True, stable=True).argsort(-1)
    first_BN = torch.full_like(rank_BN, rank_BN.shape[1]).scatter_reduce(1, group_BN, rank_BN, "amin")
    return rank_BN == first_BN.gather(1, group_BN)


def looped(t: Tensor) -> Tensor:
    """The time of a loop: down to a tenth, there for a while, and on."""
    before = LOOP_TIME + (1 - LOOP_TIME) * (t - LOOP_FROM) / (1 - LOOP_FROM)
    return torch.where(t > LOOP_FROM, before, (LOOP_TIME / LOOP_TO * t).clamp(max=LOOP_TIME))


def remasking(
    kind: Remask, eta: float, m_B1: Tensor, after_B1: Tensor, p_BN: Tensor, committed_BN: Tensor
) -> tuple[Tensor, Tensor]:
    """With what probability a committed position is opened, (B, N or 1), and an open one committed, (B, 1),
    in a step that changes the masked share from m to `after`."""
    most_B1 = (after_B1 / (1 - m_B1).clamp_min(1e-9)).clamp(max=1)
    sigma = eta * most_B1 if kind in ("rescale", "conf") else most_B1.clamp(max=eta)
    mean_B1 = sigma
    if kind == "loop":
        mean_B1 = sigma = torch.where(after_B1 == m_B1, sigma, 0.0)
    elif kind == "conf":
        count_B1 = committed_BN.sum(-1, keepdim=True)
        w_BN = torch.where(committed_BN, -p_BN, -torch.inf).softmax(-1).nan_to_num()
        sigma = torch.minimum(sigma * count_B1 * w_BN, most_B1)
        mean_B1 = sigma.sum(-1, keepdim=True) / count_B1.clamp_min(1)
    commits_B1 = (1 - after_B1 - (1 - mean_B1) * (1 - m_B1)) / m_B1.clamp_min(1e-9)
    return sigma, torch.where(after_B1 > 0, commits_B1, 1.0)  # whatever is rounded, all at the end
