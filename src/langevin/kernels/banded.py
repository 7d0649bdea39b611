"""Softmax with a penalty on distance, computed in a band around the diagonal, exactly.

    w_ij = softmax_j( q_i·k_j - c_i (i - j)² - m_h |i - j| )      over the keys that i sees

The logits q·k are unbounded, so no radius fixed in advance is safe. Here the band ends where the bound
|q_i| max_j |k_j| - c_i (i - j)², rounding included, guarantees that every further weight is zero in
floating point: nothing is cut off. Blocks are visited outwards from the diagonal with a running maximum
and sum, and a block of zero weights leaves both unchanged bit for bit, so the width of the band, which
depends on all tokens, never shows in a result.

B batch, H heads, N blocks of C positions, D head width.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from langevin.kernels.operator import differentiable, operator
from langevin.kernels.view import View, wide

_C = 64
# How much larger than |q| |k| a computed q·k may be: a GPU may round both to 11 bits (TF32).
_ROUNDED = 1 + 2**-8


def attention(
    q_BHLD: Tensor,
    k_BHLD: Tensor,
    v_BHLD: Tensor,
    penalty_BHL: Tensor,
    view: View,
    slopes_H: Tensor | None = None,
) -> Tensor:
    """q carries the scale; k and v have as many heads as q; as many queries as keys, in intervals.

    A query that is padding mixes to zero: it may be far from all it sees, and would widen the band.
    """
    dtype = wide(q_BHLD.dtype)
    q, k, v = (x.to(dtype) for x in (q_BHLD, k_BHLD, v_BHLD))
    penalty = penalty_BHL.to(dtype).expand(q.shape[:-1]).contiguous()
    first, last = view.bounds_BQ
    if view.real_BK is not None:
        last = torch.where(view.real_BK, last, -1)
    slopes = None if slopes_H is None else slopes_H.to(dtype)
    masks = (first.contiguous(), last.contiguous(), view.real_BK, slopes)
    out: Tensor = _mixing(q, k, v, penalty, masks, (view.causal,))[0]
    return out.to(q_BHLD.dtype)


_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor penalty, "
    "Tensor first, Tensor last, Tensor? real, Tensor? slopes, bool causal"
)


@operator(
    f"({_INPUTS}) -> (Tensor, Tensor, Tensor)",
    lambda q, k, v, penalty, *_: (
        v.new_empty(v.shape),
        penalty.new_empty(penalty.shape),
        torch.empty((), dtype=torch.int64),
    ),
)
def _band(q: Tensor, k: Tensor, v: Tensor, penalty: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-sum-exp of each row, and the number of blocks the band reaches to each side."""
    if not q.numel():
        return v.new_zeros(v.shape), penalty.new_zeros(penalty.shape), torch.tensor(0)
    *bounds, causal = rest
    grid = _Grid(q, k, v, penalty, *bounds)
    top = torch.full_like(grid.penalty, -math.inf)
    total = torch.zeros_like(grid.penalty)
    acc = torch.zeros_like(grid.q[..., :1]).expand(*grid.q.shape[:-1], v.shape[-1]).clone()

    def visit(shift: int) -> None:
        rows, _ = grid.pair(shift)
        s = grid.scores(shift)
        new_top = torch.maximum(top[:, :, rows], s.amax(-1))
        base = new_top.masked_fill(new_top == -math.inf, 0.0)
        p = (s - base[..., None]).exp()
        keep = (top[:, :, rows] - base).exp()
        total[:, :, rows] = total[:, :, rows] * keep + p.sum(-1)
        acc[:, :, rows] = acc[:, :, rows] * keep[..., None] + p @ grid.values(shift)
        top[:, :, rows] = new_top

    visit(0)
    reach = grid.reach(top)
    for shift in _outwards(reach, causal):
        visit(shift)
    out = acc / total.clamp_min(torch.finfo(total.dtype).tiny)[..., None]
    lse = (top + total.log()).masked_fill(total == 0, math.inf)
    return grid.ungrid(out), lse.flatten(2)[..., : q.shape[2]].contiguous(), torch.tensor(reach)


@operator(
    f"(Tensor dout, Tensor out, Tensor lse, Tensor reach, {_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda dout, out, lse, reach, *inputs: tuple(x.new_empty(x.shape) for x in inputs[:4]),
)
def _band_backward(
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    reach: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    penalty: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """P = exp(S - lse), dS = P ⊙ (dO Vᵀ - rowsum(dO ⊙ O)), and the products of each with q, k, v."""
    if not q.numel():
        dq, dk, dv, dpenalty = (x.new_zeros(x.shape) for x in (q, k, v, penalty))
        return dq, dk, dv, dpenalty
    *bounds, causal = rest
    grid = _Grid(q, k, v, penalty, *bounds)
    do, delta = grid.blocks(dout), grid.blocks((dout * out).sum(-1, keepdim=True))
    row_lse = grid.blocks(lse[..., None], math.inf)
    dq, dk, dv = torch.zeros_like(grid.q), torch.zeros_like(grid.k), torch.zeros_like(grid.v)
    dpenalty = torch.zeros_like(grid.penalty)
    for shift in [0, *_outwards(int(reach), causal)]:
        rows, columns = grid.pair(shift)
        p = (grid.scores(shift) - row_lse[:, :, rows]).exp()
        dv[:, :, columns] += p.transpose(-1, -2) @ do[:, :, rows]
        ds = p * (do[:, :, rows] @ grid.values(shift).transpose(-1, -2) - delta[:, :, rows])
        dq[:, :, rows] += ds @ grid.k[:, :, columns]
        dk[:, :, columns] += ds.transpose(-1, -2) @ grid.q[:, :, rows]
        dpenalty[:, :, rows] -= (ds * grid.distance(shift).square()).sum(-1)
    dpenalty = dpenalty.flatten(2)[..., : q.shape[2]].contiguous()
    return grid.ungrid(dq), grid.ungrid(dk), grid.ungrid(dv), dpenalty


_mixing = differentiable(_band, _band_backward)


def _outwards(reach: int, causal: bool) -> Iterator[int]:
    for distance in range(1, reach + 1):
        yield distance
        if not causal:
            yield -distance


class _Grid:
    """The sequence in N blocks of C; block row n meets block column n - shift."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        penalty: Tensor,
        first: Tensor,
        last: Tensor,
        real: Tensor | None,
        slopes: Tensor | None,
    ) -> None:
        self.length, self.slopes = q.shape[2], slopes
        self.q, self.k, self.v = self.blocks(q), self.blocks(k), self.blocks(v)
        self.penalty = self.blocks(penalty[..., None])[..., 0]
        # Rows beyond the end see nothing: their interval is empty.
        self.first = self.blocks(first[:, None, :, None], 1)
        self.last = self.blocks(last[:, None, :, None], 0)
        self.real = None if real is None else self.blocks(real[:, None, :, None], False)[..., 0]
        self.N = self.q.shape[2]

    def blocks(self, x: Tensor, fill: float = 0.0) -> Tensor:
        pad = -self.length % _C
        return F.pad(x, (0, 0, 0, pad), value=fill).unflatten(2, (-1, _C))

    def ungrid(self, x: Tensor) -> Tensor:
        return x.flatten(2, 3)[:, :, : self.length].contiguous()

    def pair(self, shift: int) -> tuple[slice, slice]:
        if shift >= 0:
            return slice(shift, self.N), slice(0, self.N - shift)
        return slice(0, self.N + shift), slice(-shift, self.N)

    def distance(self, shift: int) -> Tensor:
        a = torch.arange(_C, device=self.q.device)
        return (shift * _C + a[:, None] - a).to(self.q.dtype)

    def values(self, shift: int) -> Tensor:
        return self.v[:, :, self.pair(shift)[1]]

    def scores(self, shift: int) -> Tensor:
        rows, columns = self.pair(shift)
        s = self.q[:, :, rows] @ self.k[:, :, columns].transpose(-1, -2)
        s = s - self.penalty[:, :, rows, :, None] * self.distance(shift).square()
        if self.slopes is not None:
            s = s - self.slopes[:, None, None, None] * self.distance(shift).abs()
        starts = torch.arange(columns.start, columns.stop, device=s.device) * _C
        j = (starts[:, None] + torch.arange(_C, device=s.device))[:, None, :]
        seen = (j >= self.first[:, :, rows]) & (j <= self.last[:, :, rows])
        if self.real is not None:
            seen = seen & self.real[:, :, columns, None, :]
        return s.masked_fill(~seen, -math.inf)

    def reach(self, top: Tensor) -> int:
        """Blocks to each side beyond which every weight underflows to zero."""
        farthest = self.N - 1
        underflow = -math.log(torch.finfo(top.dtype).smallest_normal) + 40  # past subnormals
        largest = self.q.norm(dim=-1) * self.k.norm(dim=-1).amax() * _ROUNDED
        radius = ((largest - top + underflow) / self.penalty).sqrt()
        radius = radius.masked_fill((self.last < self.first)[..., 0], 0.0)
        widest = float(radius.amax())
        if not math.isfinite(widest):
            return farthest
        return min(farthest, int((widest - 1) // _C) + 1)
