"""Sigmoid attention: every key is judged alone, nothing is normalised.

    w_ij = σ( q_i·k_j / √d + b_i )      with alibi positions -m_h |i - j| is added as well

b is '-log n' (per row, -ln n_i, so that a row starts with a total weight of about 1 at every length),
a number, or 'head': learned per head, starting at -ln of the training length.
(Ramapuram et al. 2024, arXiv 2409.04431)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from langevin.kernels import pointwise, reference
from langevin.kernels.view import View, wide
from langevin.mixers import alibi
from langevin.mixers.mechanism import Geometry, Mechanism, Parameters, as_many_heads, initial
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

    def row_bias(self, view: View, p: Parameters, dtype: torch.dtype) -> Tensor:
        """b_i, broadcasting to (B, H, Q)."""
        if "bias" in p:
            return p["bias"][:, None].to(wide(dtype))
        if self.bias == "-log n":
            return -view.log_visible(dtype)[..., 0]
        return torch.full((1, 1, 1), float(self.bias), dtype=wide(dtype), device=view.device)

    def attend(
        self,
        q_BHQD: Tensor,
        k_BHKD: Tensor,
        v_BHKD: Tensor,
        view: View,
        p: Parameters,
        geometry: Geometry,
        past_queries: Tensor | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        k, v = as_many_heads(k_BHKD, q_BHQD), as_many_heads(v_BHKD, q_BHQD)
        q = q_BHQD * geometry.sharpness
        bias = self.row_bias(view, p, q.dtype)
        slopes = alibi.slopes(geometry.heads, q.device) if geometry.alibi else None
        return pointwise.attention(q, k, v, bias, view, sigmoid=True, slopes_H=slopes)

    def weights(
        self,
        q_BHQD: Tensor,
        k_BHKD: Tensor,
        view: View,
        p: Parameters,
        geometry: Geometry,
        past_queries: Tensor | None = None,
    ) -> Tensor:
        z = reference.scores(q_BHQD, as_many_heads(k_BHKD, q_BHQD), view, geometry.sharpness)
        z = z + self.row_bias(view, p, z.dtype)[..., None]
        if geometry.alibi:
            z = z + alibi.bias(view, geometry.heads, z.dtype)
        return reference.sigmoid_weights(z, view)
