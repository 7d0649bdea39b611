"""Where attention goes: how spread out it is, how far it reaches, how much the first token soaks up.

B batch, H heads, Q queries, K keys; the queries are the last Q of the K positions, as in a View. Explicit
weights come from a forward pass: a mixer's `return_weights=True`, or a model's `output_attentions=True`.

Weights are read as shares p_ij = |w_ij| / Σ_j |w_ij|. For softmax that changes nothing; weights that do not
sum to one (sigmoid) or may be negative (sima) get this meaning, and `row_sum` says so.

    entropy       -Σ_j p_ij ln p_ij, and as a fraction of ln n_i (queries that see two keys or more)
    sink          p of the first key that the query sees
    radius        the smallest r with Σ_{|i-j| <= r} p_ij >= 50, 90, 95, 99 %

All are means over queries that see and weigh something; radii also have medians.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from langevin.errors import UsageError
from langevin.mixers.neighbor import NeighborMixer
from langevin.models.attention import QKV

SHARES = (0.5, 0.9, 0.95, 0.99)
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Radius:
    share: float
    mean: float
    median: float


@dataclass(frozen=True)
class Head:
    """The attention of one head, averaged over queries."""

    head: int
    queries: int
    entropy: float  # nats
    relative_entropy: float | None  # of ln n; None where no query sees two keys
    sink: float
    radius: tuple[Radius, ...]
    row_sum: float  # mean Σ_j w_ij as it came


def attention_statistics(weights_BHQK: Tensor, visible: Tensor) -> list[Head]:
    """The statistics of every head; visible is True where a query may see a key, as View.mask gives it:
    (B or 1, 1, Q, K)."""
    B, H, Q, K = weights_BHQK.shape
    seen_BQK = visible[:, 0].expand(B, Q, K).to(weights_BHQK.device)
    return [_head(h, weights_BHQK[:, h].double(), seen_BQK) for h in range(H)]


def _head(head: int, w_BQK: Tensor, seen_BQK: Tensor) -> Head:
    _, Q, K = w_BQK.shape
    place = torch.arange(K, device=w_BQK.device)
    distance_QK = (place[K - Q :, None] - place).abs()
    alive_BQ = (w_BQK != 0).any(-1)
    if not bool(alive_BQ.any()):
        raise UsageError(f"no query of head {head} gives weight to any key")
    distance_NK = distance_QK.expand_as(w_BQK)[alive_BQ]
    w, seen = w_BQK[alive_BQ], seen_BQK[alive_BQ]
    p = w.abs() / w.abs().sum(-1, keepdim=True)
    n = seen.sum(-1)
    entropy = -torch.special.xlogy(p, p).sum(-1)
    several = n > 1
    first = seen.int().argmax(-1, keepdim=True)  # the first of the largest
    within = torch.zeros_like(p).scatter_add_(-1, distance_NK, p).cumsum(-1)
    return Head(
        head=head,
        queries=len(p),
        entropy=float(entropy.mean()),
        relative_entropy=float((entropy / n.log())[several].mean()) if bool(several.any()) else None,
        sink=float(p.gather(-1, first).mean()),
        radius=tuple(_radius(within, share) for share in SHARES),
        row_sum=float(w.sum(-1).mean()),
    )


def _radius(within_ND: Tensor, share: float) -> Radius:
    radius = (within_ND < share - _ROUNDING).sum(-1).double()
    return Radius(share, float(radius.mean()), float(radius.quantile(0.5)))


@dataclass(frozen=True)
class LearnedScalar:
    """One learned number, in the terms of its mixer's formula."""

    layer: int
    head: int
    name: str  # time, s, bias, drift.gain, drift.gate, ...
    value: float
    channel: int | None = None  # where a head has one for each channel (or, in adapt, for each feature)


def learned_scalars(model: nn.Module) -> list[LearnedScalar]:
    """The learned times, s, biases and drifts of every mixer in a model, by layer and head."""
    rows: list[LearnedScalar] = []
    mixers = [m for m in model.modules() if isinstance(m, QKV | NeighborMixer)]
    for mixer in mixers:
        layer = mixer.geometry.layer
        terms = list(mixer.learned().items()) if isinstance(mixer, QKV) else []
        for config, scalars in zip(mixer.wrappers.configs, mixer.wrappers.scalars, strict=True):
            terms += [(f"{config.name}.{name}", x) for name, x in config.learned(scalars()).items()]
        for name, values in terms:  # (H,), (H, 1) or (H, channels)
            rows += [
                LearnedScalar(layer, h, name, value, channel if len(channels) > 1 else None)
                for h, channels in enumerate(values.detach().double().reshape(len(values), -1).tolist())
                for channel, value in enumerate(channels)
            ]
    return rows
