"""Sigmoid attention: every key is judged alone, nothing is normalised.

    w_ij = σ( q_i·k_j / √d + b_i )      with alibi positions -m_h |i - j| is added as well

b is '-log n' (per row, -ln n_i, so that a row starts with a total weight of about 1 at every length),
a number, or 'head': learned per head, starting at -ln of the training length.
(Ramapuram et al. 2024, arXiv 2409.04431)
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from langevin.kernels import pointwise, reference
from langevin.kernels.view import as_many_heads, wide
from langevin.mixers import alibi
from langevin.mixers.mechanism import Geometry, Inputs, Mechanism, Parameters, in_full_precision, initial
from langevin.mixers.spec import register


@register("sigmoid")
@dataclass(frozen=True)
class Sigmoid(Mechanism):
    bias: float | Literal["-log n", "head"] = "-log n"

    examples = ("sigmoid", "sigmoid(bias='head')")

    has_alibi = True

    def parameters(self, geometry: Geometry) -> Parameters:
        if self.bias != "head":
            return {}
        return {"bias": initial(-math.log(max(2, geometry.train_length)), geometry.heads)}

    def row_bias(self, x: Inputs) -> Tensor:
        """b_i, broadcasting to (B, H, Q)."""
        dtype = wide(x.q_BHQD.dtype)
        if "bias" in x.p:
            return x.p["bias"][:, None].to(dtype)
        if self.bias == "-log n":
            return -x.view.log_visible(dtype)[..., 0]
        return torch.full((1, 1, 1), float(self.bias), dtype=dtype, device=x.q_BHQD.device)

    def attend(self, x: Inputs) -> Tensor:
        q = x.q_BHQD * x.geometry.scale
        k, v = as_many_heads(x.k_BHKD, q), as_many_heads(x.v_BHKD, q)
        slopes = alibi.slopes(x.geometry.heads, q.device) if x.geometry.alibi else None
        return pointwise.attention(q, k, v, self.row_bias(x), x.view, sigmoid=True, slopes_H=slopes)

    @in_full_precision
    def weights(self, x: Inputs) -> Tensor:
        z = reference.scores(x.q_BHQD, as_many_heads(x.k_BHKD, x.q_BHQD), x.view, x.geometry.scale)
        z = z + self.row_bias(x)[..., None]
        if x.geometry.alibi:
            z = z + alibi.bias(x.view, x.geometry.heads, z.dtype)
        return z.sigmoid().masked_fill(~x.view.mask(), 0.0)
