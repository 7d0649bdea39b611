"""Heat-kernel attention: softmax whose temperature is a diffusion time.

    dot       w_ij = softmax_j( q_i·k_j / 2t )
    squared   w_ij = softmax_j( -|q_i - k_j|² / 4t )        |q_i|² cancels, |k_j|² does not
    alpha     either, with -α (i - j)² / 4t added

t is a number; 'law': t₀ √(L₀ / depth), t₀ = 0.28, L₀ = 4; 'head': learned per head; or 'adaptive': per
query and head, from statistics of the keys the query sees,

    ln t_ih  <-  w_h · ( mean_j z_ij,  |q_i| rms_j |k_j| / d,  ln n_i ),      z = q·k/√d

which needs running sums of k only: causal, no L×L matrix, and all of it in a key-value cache. Learned
times stay inside (t_min, t_max) smoothly and start at √d/2, where heat-kernel attention is plain softmax;
in a host model that multiplies q·k by another scale, at 1/(2·scale), which is the same there.
(Curry 2025, zenodo 18004600)
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from langevin.errors import UsageError
from langevin.kernels.linear import visible_sum
from langevin.kernels.view import as_many_heads, wide
from langevin.mixers.mechanism import (
    Geometry,
    Inputs,
    Parameters,
    SoftmaxMechanism,
    in_full_precision,
    initial,
    per_head,
)
from langevin.mixers.spec import register

LAW_TIME, LAW_DEPTH = 0.28, 4
_TINY = 1e-12  # under the root, for a finite slope at zero


@register("heat")
@dataclass(frozen=True)
class Heat(SoftmaxMechanism):
    t: float | Literal["law", "head", "adaptive"] = "head"
    distance: Literal["dot", "squared"] = "dot"
    alpha: float = 0.0
    t_min: float = 0.01
    t_max: float = 100.0

    examples = (
        "heat(t=0.28)",
        "heat(t='law')",
        "heat(t='head')",
        "heat(t='adaptive')",
        "heat(t=1.0, distance='squared')",
        "heat(t=0.16, alpha=1.0)",
    )

    def __post_init__(self) -> None:
        if not isinstance(self.t, str) and self.t <= 0:
            raise UsageError(f"heat(t={self.t}) must be positive", "t is a time: t=√d/2 is plain softmax.")
        if self.alpha < 0:
            raise UsageError(f"heat(alpha={self.alpha}) must be 0 or more")
        if not 0 < self.t_min < self.t_max:
            raise UsageError(f"heat needs 0 < t_min < t_max, not {self.t_min} and {self.t_max}")

    @property
    def decay(self) -> float:
        return float(self.alpha)

    def parameters(self, geometry: Geometry) -> Parameters:
        if self.t not in ("head", "adaptive"):
            return {}
        softmax_time = 0.5 / geometry.scale
        if not self.t_min < softmax_time < self.t_max:
            raise UsageError(
                f"heat: 1/(2·scale) = {softmax_time:g} is outside ({self.t_min}, {self.t_max})",
                "A learned time starts there; widen t_min and t_max.",
            )
        level = math.log(softmax_time / self.t_min) / math.log(self.t_max / self.t_min)
        p = {"time": initial(math.log(level / (1 - level)), geometry.heads)}
        if self.t == "adaptive":
            p["adapt"] = initial(0.0, geometry.heads, 3)
        return p

    def time(self, x: Inputs) -> float | Tensor:
        """t: a number, (H, 1, 1) or (B, H, Q, 1)."""
        if self.t == "law":
            return LAW_TIME * math.sqrt(LAW_DEPTH / x.geometry.depth)
        if not isinstance(self.t, str):
            return float(self.t)
        level = per_head(x.p["time"])
        if self.t == "adaptive":
            features = self.statistics(x)
            level = level + (features * x.p["adapt"][:, None, :]).sum(-1, keepdim=True)
        return self.bounded(level)

    def bounded(self, level: Tensor) -> Tensor:
        """(-∞, ∞) -> (t_min, t_max), geometrically."""
        span = math.log(self.t_max / self.t_min)
        return self.t_min * (span * level.sigmoid()).exp()

    @in_full_precision
    def statistics(self, x: Inputs) -> Tensor:
        """(mean_j z_ij, |q_i| rms_j |k_j| / d, ln n_i) over the keys i sees; (B, H, Q, 3)."""
        view, dtype = x.view, wide(x.q_BHQD.dtype)
        q, k = x.q_BHQD.to(dtype), x.k_BHKD.to(dtype)
        if view.real_BK is not None:
            k = torch.where(view.real_BK[:, None, :, None], k, 0.0)
        n = view.visible_BQ.clamp_min(1).to(dtype)[:, None, :, None]
        d = q.shape[-1]
        summed = as_many_heads(visible_sum(k, view), q)
        mean_score = (q * summed).sum(-1, keepdim=True) / (n * math.sqrt(d))
        squares = as_many_heads(visible_sum(k.square().sum(-1, keepdim=True), view), q)
        spread = (q.square().sum(-1, keepdim=True) * squares / n + _TINY).sqrt() / d
        return torch.cat([mean_score, spread, n.log().expand_as(mean_score)], -1)

    def scale(self, x: Inputs) -> float | Tensor:
        return 0.5 / self.time(x)

    def key_offset(self, x: Inputs) -> Tensor | None:
        if self.distance == "dot":
            return None
        return -x.k_BHKD.to(wide(x.k_BHKD.dtype)).square().sum(-1, keepdim=True) / 2

    def learned(self, p: Parameters, geometry: Geometry) -> Parameters:
        if "time" not in p:
            return dict(p)
        return {**p, "time": self.bounded(p["time"])}
