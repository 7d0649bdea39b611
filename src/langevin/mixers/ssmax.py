"""Scalable softmax: attention that does not fade as the context grows.

    w_ij = softmax_j( (s_h · ln n_i + b_h) · q_i·k_j / √d )

n_i is the number of keys query i sees. s_h is learned per head and starts at 1 / mean_{n<=T} ln n, so that
over the training length T the mean temperature is that of plain softmax; b is 0 unless asked for.
(Nakanishi 2025, arXiv 2501.19399)
"""

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from langevin.errors import UsageError
from langevin.mixers.mechanism import Geometry, Inputs, Parameters, SoftmaxMechanism, initial, per_head
from langevin.mixers.spec import register


@register("ssmax")
@dataclass(frozen=True)
class SSMax(SoftmaxMechanism):
    s: float | Literal["head"] = "head"
    bias: float | Literal["head"] = 0.0
    train_length: int | None = None  # default: the model's

    examples = ("ssmax", "ssmax(bias='head')")

    def __post_init__(self) -> None:
        if self.train_length is not None and self.train_length < 2:
            raise UsageError(f"ssmax(train_length={self.train_length}) must be 2 or more")

    def parameters(self, geometry: Geometry) -> Parameters:
        T = self.train_length or max(2, geometry.train_length)
        start = T / math.lgamma(T + 1)  # Σ_{n<=T} ln n = ln T!
        p = {}
        if self.s == "head":
            p["s"] = initial(start, geometry.heads)
        if self.bias == "head":
            p["bias"] = initial(0.0, geometry.heads)
        return p

    def scale(self, x: Inputs) -> Tensor:
        s = per_head(x.p["s"]) if "s" in x.p else float(self.s)
        bias = per_head(x.p["bias"]) if "bias" in x.p else float(self.bias)
        return (s * x.view.log_visible(x.q_BHQD.dtype) + bias) * x.geometry.scale
