"""The softmax family on torch's fused attention.

    o_i = Σ_j softmax_j( scale · q_i·k_j ) v_j      over the keys that i sees

A mixer of this family only scales q (or adds columns to q and k), so it costs what softmax costs. What
is no product of columns comes as a bias on the scores, (H, Q, K).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from langevin.kernels.view import View

# A window this many times shorter than the keys is worth cutting into blocks.
_WINDOW_SAVING = 4
_WINDOW_BLOCK = 512


def attention(
    q_BHQD: Tensor,
    k_BHKD: Tensor,
    v_BHKD: Tensor,
    view: View,
    scale: float,
    dropout: float = 0.0,
    bias_HQK: Tensor | None = None,
) -> Tensor:
    if bias_HQK is not None:
        mask = bias_HQK[None] if view.plain else _masked(bias_HQK, view)
        out = _sdpa(q_BHQD, k_BHKD, v_BHKD, mask, False, scale, dropout)
    elif view.window is not None and view.keys > _WINDOW_SAVING * view.window:
        out = _windowed(q_BHQD, k_BHKD, v_BHKD, view, scale, dropout)
    elif view.plain and (not view.causal or view.queries in (1, view.keys)):
        causal = view.causal and view.queries > 1
        out = _sdpa(q_BHQD, k_BHKD, v_BHKD, None, causal, scale, dropout)
    else:
        out = _sdpa(q_BHQD, k_BHKD, v_BHKD, view.mask(), False, scale, dropout)
    return view.silence_blind(out)


def _masked(bias_HQK: Tensor, view: View) -> Tensor:
    """The bias with -inf at unseen keys. A row that sees nothing stays finite, and is silenced later."""
    seen = view.mask()
    if view.may_be_blind:
        seen = seen | ~seen.any(-1, keepdim=True)
    return bias_HQK.masked_fill(~seen, float("-inf"))


def _windowed(q: Tensor, k: Tensor, v: Tensor, view: View, scale: float, dropout: float) -> Tensor:
    """Blocks of queries, each against the few keys its window reaches: O(K · window)."""
    block = max(_WINDOW_BLOCK, view.window or 0)
    parts = []
    for start in range(0, view.queries, block):
        stop = min(start + block, view.queries)
        low, high = view.reach(start, stop)
        mask = view.mask(start, stop, low, high)
        keys, values = k[..., low:high, :], v[..., low:high, :]
        parts.append(_sdpa(q[..., start:stop, :], keys, values, mask, False, scale, dropout))
    return torch.cat(parts, -2)


def _sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    dropout: float,
) -> Tensor:
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=causal,
        scale=scale,
        enable_gqa=k.shape[1] != q.shape[1],
    )
