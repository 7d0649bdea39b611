"""ALiBi: positions as a penalty on distance, and nothing else (Press et al. 2022, arXiv 2108.12409).

    logit_ij  <-  logit_ij - m_h |i - j|,      m_h = 2^(-8 (h+1) / H)

It is added after the mixer's temperature. i - j counts positions of the tensor, so padding before a text
and packed documents change nothing. In a causal view -m (i - j) = -m i + m j is a product of two columns,
and the fused kernels need no bias matrix.

B batch, H heads, Q queries, K keys, D head width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from langevin.kernels.view import View, wide

# Positions are counted in units of this many tokens, which keeps both columns in the range of float16.
_UNIT = 256


def slopes(heads: int, device: torch.device | str = "cpu") -> Tensor:
    """m_h as (H,), in float64. Without a power of two of heads, those of the next smaller power come first,
    then every other one of the next larger."""
    whole = 2 ** (heads.bit_length() - 1)
    regular = torch.arange(1, whole + 1, device=device, dtype=torch.float64) / whole
    between = (torch.arange(heads - whole, device=device, dtype=torch.float64) + 0.5) / whole
    return torch.exp2(-8 * torch.cat([regular, between]))


def bias(view: View, heads: int, dtype: torch.dtype) -> Tensor:
    """-m_h |i - j| in full, (H, Q, K)."""
    return (-slopes(heads, view.device)[:, None, None] * view.distance().abs()).to(wide(dtype))


def with_columns(q_BHQD: Tensor, k_BHKD: Tensor, view: View, scale: float) -> tuple[Tensor, Tensor]:
    """Columns such that scale · q'·k' = scale · q·k - m_h (i - j), up to a constant in every row.

    Half precision has no exact number for a position of many thousands: it is the sum of two, and so is
    the slope. Single and double precision carry -m i beside m j and have both in front, where they cancel
    before anything small is added to them.
    """
    H, dtype = q_BHQD.shape[1], q_BHQD.dtype
    m_H11 = slopes(H, q_BHQD.device)[:, None, None] * (_UNIT / scale)
    j, i = (torch.arange(n, device=q_BHQD.device)[:, None] for n in (view.keys, view.queries))
    place_K1, place_Q1 = (j - view.past).double() / _UNIT, i.double() / _UNIT  # from the first query on
    if dtype in (torch.float32, torch.float64):
        m_H11 = m_H11.to(dtype).double()
        q_columns = torch.cat([-m_H11 * place_Q1, m_H11.expand(-1, view.queries, -1)], -1)
        k_columns = torch.cat([torch.ones_like(place_K1), place_K1], -1)
    else:
        steep, fine = _two_parts(m_H11, dtype)
        far, near = _two_parts(place_K1, dtype)
        q_columns = torch.cat([steep, steep, fine, fine], -1).expand(-1, view.queries, -1)
        k_columns = torch.cat([far, near, far, near], -1)
    fill = -(q_BHQD.shape[-1] + q_columns.shape[-1]) % 8
    q_columns = q_columns.to(dtype).expand(*q_BHQD.shape[:-1], -1)
    k_columns = k_columns.to(dtype).expand(*k_BHKD.shape[:-1], -1)
    q = F.pad(torch.cat([q_columns, q_BHQD], -1), (0, fill))
    k = F.pad(torch.cat([k_columns, k_BHKD], -1), (0, fill))
    return q, k


def _two_parts(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two numbers of a low precision whose sum is x, to twice that precision."""
    high = x.to(dtype)
    return high, (x - high.to(x.dtype)).to(dtype)
