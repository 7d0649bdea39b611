"""Neighbours at a distance, with zeros beyond the view: shifts that never wrap around.

B batch, L tokens, W width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from langevin.kernels.view import View


def shifted(h_BLW: Tensor, hop: int) -> Tensor:
    """h_{i-hop} at position i, zeros where there is none; a negative hop looks right."""
    L = h_BLW.shape[1]
    if abs(hop) >= L:
        return torch.zeros_like(h_BLW)
    if hop > 0:
        return F.pad(h_BLW[:, :-hop], (0, 0, hop, 0))
    return F.pad(h_BLW[:, -hop:], (0, 0, 0, -hop))


def neighbor(h_BLW: Tensor, hop: int, view: View) -> Tensor:
    """The neighbour `hop` to the left (negative: to the right) where the view shows it, else zero."""
    moved = shifted(h_BLW, hop)
    if view.plain:
        return moved
    return torch.where(view.shows(hop)[..., None], moved, 0.0)


def only_real(h_BLW: Tensor, view: View) -> Tensor:
    """Zero at padding."""
    if view.real_BK is None:
        return h_BLW
    return torch.where(view.at_queries(view.real_BK)[..., None], h_BLW, 0.0)
