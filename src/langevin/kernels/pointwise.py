"""Attention whose weights are a function of each score alone, without an L×L matrix.

    w_ij = f( q_i·k_j + b_i - m_h |i - j| ),   o_i = Σ_j w_ij v_j      over the keys that i sees
    f: sigmoid, or the identity (linear attention in quadratic order, for views with no faster form)

Queries are taken in blocks and the backward pass computes the weights again, so at most one block of
weights exists at a time. With P = f(S):  dV = Pᵀ dO,  dS = (dO Vᵀ) ⊙ f'(S),  dQ = dS K,  dK = dSᵀ Q,
db_i = Σ_j dS_ij.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from langevin.kernels.view import View, wide

# Elements of one block of weights: small enough for the CPU's caches and memory, large enough to
# keep a GPU busy.
_BLOCK_ELEMENTS = {"cpu": 2**20, "cuda": 2**27}
_LEAST_ROWS = 32


def attention(
    q_BHQD: Tensor,
    k_BHKD: Tensor,
    v_BHKD: Tensor,
    bias_BHQ: Tensor,
    view: View,
    sigmoid: bool,
    slopes_H: Tensor | None = None,
) -> Tensor:
    """q already carries the scale; k and v have as many heads as q; b_i broadcasts to (B, H, Q)."""
    bias = bias_BHQ.expand(q_BHQD.shape[:-1])
    dtype = q_BHQD.dtype
    if q_BHQD.device.type == "cpu":  # half precision is emulated there: slower and less exact
        q_BHQD, k_BHKD, v_BHKD = (x.to(wide(dtype)) for x in (q_BHQD, k_BHKD, v_BHKD))
    slopes = None if slopes_H is None else slopes_H.to(bias.dtype)
    return _Pointwise.apply(q_BHQD, k_BHKD, v_BHKD, bias, slopes, view, sigmoid).to(dtype)


def _blocks(q_BHQD: Tensor, view: View) -> list[tuple[int, int, int, int]]:
    """Queries [start, stop) and the keys [low, high) they may see, a block of weights at a time."""
    budget = _BLOCK_ELEMENTS.get(q_BHQD.device.type, 2**24)
    width = view.keys if view.window is None else min(view.keys, 2 * view.window)
    rows = max(_LEAST_ROWS, budget // (q_BHQD.shape[0] * q_BHQD.shape[1] * width))
    starts = range(0, view.queries, rows)
    stops = [min(start + rows, view.queries) for start in starts]
    return [(i, j, *view.reach(i, j)) for i, j in zip(starts, stops, strict=True)]


def _weights(
    q: Tensor,
    k: Tensor,
    bias: Tensor,
    slopes: Tensor | None,
    view: View,
    block: tuple[int, int, int, int],
    sigmoid: bool,
) -> tuple[Tensor, Tensor]:
    """The weights of a block and its mask."""
    i, j, low, high = block
    mask = view.mask(i, j, low, high)
    p = (q[..., i:j, :] @ k[..., low:high, :].transpose(-1, -2)).to(bias.dtype).add_(bias[..., i:j, None])
    if slopes is not None:
        rows = torch.arange(view.offset + i, view.offset + j, device=p.device)
        distance = (rows[:, None] - torch.arange(low, high, device=p.device)).abs()
        p.sub_(slopes[:, None, None] * distance)
    if sigmoid:
        p.sigmoid_()
    return p.masked_fill_(~mask, 0.0), mask


class _Pointwise(torch.autograd.Function):
    """Results are written into tensors made beforehand and blocks are changed in place: small results
    kept between large temporary blocks would pin the memory of all of them."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor,
        slopes: Tensor | None,
        view: View,
        sigmoid: bool,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, bias, slopes)
        ctx.view, ctx.sigmoid = view, sigmoid
        out = v.new_empty(*q.shape[:-1], v.shape[-1])
        for i, j, low, high in _blocks(q, view):
            p, _ = _weights(q, k, bias, slopes, view, (i, j, low, high), sigmoid)
            out[..., i:j, :] = p.to(v.dtype) @ v[..., low:high, :]
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dout,) = grads
        q, k, v, bias, slopes = ctx.saved_tensors
        view, sigmoid = ctx.view, ctx.sigmoid
        dq, dbias = torch.empty_like(q), bias.new_empty(bias.shape)
        dk = torch.zeros_like(k, dtype=bias.dtype)
        dv = torch.zeros_like(v, dtype=bias.dtype)
        for i, j, low, high in _blocks(q, view):
            q_rows, k_columns, do_rows = q[..., i:j, :], k[..., low:high, :], dout[..., i:j, :]
            p, mask = _weights(q, k, bias, slopes, view, (i, j, low, high), sigmoid)
            dv[..., low:high, :] += p.to(v.dtype).transpose(-1, -2) @ do_rows
            ds = (do_rows @ v[..., low:high, :].transpose(-1, -2)).to(bias.dtype)
            if sigmoid:
                ds.mul_(p).mul_(p.neg_().add_(1))
            else:
                ds.masked_fill_(~mask, 0.0)
            dbias[..., i:j] = ds.sum(-1)
            ds = ds.to(q.dtype)
            dq[..., i:j, :] = ds @ k_columns
            dk[..., low:high, :] += ds.transpose(-1, -2) @ q_rows
        return dq, dk.to(k.dtype), dv.to(v.dtype), dbias, None, None, None
