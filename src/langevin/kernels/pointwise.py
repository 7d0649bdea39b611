"""Attention whose weights are a function of each score alone, without an L×L matrix.

    w_ij = f( q_i·k_j + b_i - m_h |i - j| ),   o_i = Σ_j w_ij v_j      over the keys that i sees
    f: sigmoid, or the identity (linear attention in quadratic order, for views with no faster form)

Queries are taken in blocks and the backward pass computes the weights again, so at most one block of
weights exists at a time. With P = f(S):  dV = Pᵀ dO,  dS = (dO Vᵀ) ⊙ f'(S),  dQ = dS K,  dK = dSᵀ Q,
db_i = Σ_j dS_ij.

B batch, H heads, Q queries, K keys, D head width.
"""

import math
from typing import Any

import torch
from torch import Tensor

from langevin.kernels.operator import differentiable, operator
from langevin.kernels.view import View, wide

# Elements of one block of weights: small enough for the CPU's caches and memory, large enough to
# keep a GPU busy. With a window few rows are enough, and leave few columns out of sight.
_BLOCK_ELEMENTS = {"cpu": 2**20, "cuda": 2**27}
_WINDOW_ROWS = {"cpu": 32, "cuda": 512}
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
    if view.queries == 1 or torch.compiler.is_exporting():  # an exported graph runs where we are not
        p = _weights(q_BHQD, k_BHKD, bias, slopes, sigmoid, view, (0, view.queries, 0, view.keys))
        return (p.to(v_BHKD.dtype) @ v_BHKD).to(dtype)
    masks, flags = view.parts
    out: Tensor = _mixing(q_BHQD, k_BHKD, v_BHKD, bias, (slopes, *masks), (*flags, sigmoid))
    return out.to(dtype)


def _blocks(q_BHQD: Tensor, view: View) -> list[tuple[int, int, int, int]]:
    """Queries [start, stop) and the keys [low, high) they may see, a block of weights at a time."""
    device = q_BHQD.device.type
    width = view.keys if view.window is None else min(view.keys, 2 * view.window)
    rows = _BLOCK_ELEMENTS.get(device, 2**24) // max(1, q_BHQD.shape[0] * q_BHQD.shape[1] * width)
    if view.window is not None:
        rows = min(rows, max(width, _WINDOW_ROWS.get(device, 512)))
    rows = max(_LEAST_ROWS, rows)
    starts = range(0, view.queries, rows)
    stops = [min(start + rows, view.queries) for start in starts]
    return [(i, j, *view.reach(i, j)) for i, j in zip(starts, stops, strict=True)]


def _weights(
    q: Tensor,
    k: Tensor,
    bias: Tensor,
    slopes: Tensor | None,
    sigmoid: bool,
    view: View,
    block: tuple[int, int, int, int],
) -> Tensor:
    """The weights of a block, made in place."""
    i, j, low, high = block
    p = (q[..., i:j, :] @ k[..., low:high, :].transpose(-1, -2)).to(bias.dtype).add_(bias[..., i:j, None])
    if slopes is not None:
        p.sub_(slopes[:, None, None] * view.distance(*block).abs())
    p.masked_fill_(~view.mask(*block), -math.inf if sigmoid else 0.0)
    return p.sigmoid_() if sigmoid else p


_INPUTS = f"Tensor q, Tensor k, Tensor v, Tensor bias, Tensor? slopes, {View.SCHEMA}, bool sigmoid"


@operator(f"({_INPUTS}) -> Tensor", lambda q, k, v, *_: v.new_empty(*q.shape[:-1], v.shape[-1]))
def _pointwise(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, slopes: Tensor | None, *rest: Any) -> Tensor:
    """Results are written into tensors made beforehand and blocks are changed in place: small results
    kept between large temporary blocks would pin the memory of all of them."""
    *parts, sigmoid = rest
    view = View.joined(q, k, *parts)
    out = v.new_empty(*q.shape[:-1], v.shape[-1])
    for i, j, low, high in _blocks(q, view):
        p = _weights(q, k, bias, slopes, sigmoid, view, (i, j, low, high))
        out[..., i:j, :] = p.to(v.dtype) @ v[..., low:high, :]
    return out


@operator(
    f"(Tensor dout, {_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda dout, q, k, v, bias, *_: tuple(x.new_empty(x.shape) for x in (q, k, v, bias)),
)
def _pointwise_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, slopes: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *parts, sigmoid = rest
    view = View.joined(q, k, *parts)
    dq, dbias = q.new_empty(q.shape), bias.new_empty(bias.shape)
    dk, dv = k.new_zeros(k.shape, dtype=bias.dtype), v.new_zeros(v.shape, dtype=bias.dtype)
    for block in _blocks(q, view):
        i, j, low, high = block
        q_rows, k_columns, do_rows = q[..., i:j, :], k[..., low:high, :], dout[..., i:j, :]
        p = _weights(q, k, bias, slopes, sigmoid, view, block)
        dv[..., low:high, :] += p.to(v.dtype).transpose(-1, -2) @ do_rows
        ds = (do_rows @ v[..., low:high, :].transpose(-1, -2)).to(bias.dtype)
        if sigmoid:
            ds.mul_(p).mul_(p.neg_().add_(1))
        else:
            ds.masked_fill_(~view.mask(*block), 0.0)
        dbias[..., i:j] = ds.sum(-1)
        ds = ds.to(q.dtype)
        dq[..., i:j, :] = ds @ k_columns
        dk[..., low:high, :] += ds.transpose(-1, -2) @ q_rows
    return dq, dk.to(k.dtype), dv.to(v.dtype), dbias


_mixing = differentiable(_pointwise, _pointwise_backward)
