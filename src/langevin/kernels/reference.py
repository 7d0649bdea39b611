"""Explicit weights for every family: the specification of the kernels, used for pictures and tests.

B batch, H heads, Q queries, K keys, D head width.
"""

import torch
from torch import Tensor

from langevin.kernels.view import View, wide

_DOWN = 2.0**-6  # keeps the product of large q and k in the range of float16


def scores(
    q_BHQD: Tensor,
    k_BHKD: Tensor,
    view: View,
    scale: float | Tensor,
    key_offset: Tensor | None = None,
    decay: float = 0.0,
) -> Tensor:
    """τ_i ( q_i·k_j + κ_j - (α/2)(i - j)² ), in float32 or better from the product on."""
    product = (q_BHQD * _DOWN) @ k_BHKD.transpose(-1, -2)
    z = product.to(wide(product.dtype)) / _DOWN
    if key_offset is not None:
        z = z + key_offset.transpose(-1, -2)
    if decay:
        z = z - (decay / 2) * view.distance().square().to(z.dtype)
    return z * scale


def softmax_weights(scores_BHQK: Tensor, view: View) -> Tensor:
    masked = scores_BHQK.masked_fill(~view.mask(), float("-inf"))
    top = masked.amax(-1, keepdim=True).clamp_min(torch.finfo(masked.dtype).min)
    e = (masked - top.detach()).exp()
    return e / e.sum(-1, keepdim=True).clamp_min(torch.finfo(e.dtype).tiny)


def visible_sum(x_BHKD: Tensor, view: View) -> Tensor:
    """Σ of x_j over the keys each query sees."""
    return view.mask().to(x_BHKD.dtype) @ x_BHKD
