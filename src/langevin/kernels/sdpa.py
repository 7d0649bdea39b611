"""The softmax family on torch's fused attention.

    o_i = Σ_j softmax_j( scale · q_i·k_j ) v_j      over the keys that i sees

A mixer of this family only scales q (or adds columns to q and k), so it costs what softmax costs. What
is no product of columns comes as a bias on the scores, (H, Q, K).

B batch, H heads (G for each key head), Q queries, K keys, D head width, N blocks of C positions.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from langevin.kernels.view import View, as_many_heads

# A window this many times shorter than the keys is worth cutting into blocks.
_WINDOW_SAVING = 4
_LEAST_BLOCK = 128


def attention(
    q_BHQD: Tensor,
    k_BHKD: Tensor,
    v_BHKD: Tensor,
    view: View,
    scale: float,
    dropout: float = 0.0,
    bias_HQK: Tensor | None = None,
) -> Tensor:
    """q may have more heads than k and v."""
    mask, causal = None, False
    if view.window is not None and bias_HQK is None and not view.whole:
        gone, _ = view.reach(0, view.queries)  # keys that have left the window of every query
        view, k_BHKD, v_BHKD = view.last(view.keys - gone), k_BHKD[:, :, gone:], v_BHKD[:, :, gone:]
    if bias_HQK is not None:
        mask = bias_HQK[None] if view.plain and not view.causal else _masked(bias_HQK, view)
    elif _has_short_window(view):
        return view.silence_blind(_windowed(q_BHQD, k_BHKD, v_BHKD, view, scale, dropout))
    elif not view.plain or (view.causal and view.queries > 1 and not view.whole):
        mask = view.mask_BQK[:, None]
    elif view.causal and view.queries > 1:  # a branch: lengths in a graph have no value to make a flag of
        causal = True
    return view.silence_blind(_sdpa(q_BHQD, k_BHKD, v_BHKD, mask, causal, scale, dropout))


def _has_short_window(view: View) -> bool:
    """Whether cutting into blocks pays (an exported graph must not depend on the answer)."""
    if view.window is None or not view.whole or torch.compiler.is_exporting():
        return False
    return view.keys > _WINDOW_SAVING * view.window


def _masked(bias_HQK: Tensor, view: View) -> Tensor:
    """The bias with -inf at unseen keys. A row that sees nothing stays finite, and is silenced later."""
    seen = view.mask()
    if view.may_be_blind:
        seen = seen | ~seen.any(-1, keepdim=True)
    return bias_HQK.masked_fill(~seen, float("-inf"))


def _windowed(q: Tensor, k: Tensor, v: Tensor, view: View, scale: float, dropout: float) -> Tensor:
    """Blocks of queries, each against its own block of keys and those beside it: O(K · window)."""
    assert view.window is not None
    B, C = q.shape[0], max(_LEAST_BLOCK, view.window)
    N, wide = (view.keys + C - 1) // C, 2 if view.causal else 3

    def blocks(x: Tensor, fill: int = 0) -> Tensor:
        """(.., L, D) -> (.., N, C, D)."""
        return F.pad(x, (0, 0, 0, N * C - view.keys), value=fill).unflatten(-2, (N, C))

    def reached(x: Tensor) -> Tensor:
        """(.., L, D) -> (.., N, 2C or 3C, D), the blocks that each block's window reaches."""
        x = F.pad(blocks(x), (0, 0, 0, 0, 1, wide - 2))
        return torch.cat([x[..., s : s + N, :, :] for s in range(wide)], -2)

    def joined(x: Tensor) -> Tensor:
        """(B, H, N, C, D) -> (B·N, H, C, D)."""
        return x.transpose(1, 2).flatten(0, 1)

    first, last = view.bounds_BQ
    starts = torch.arange(N, device=q.device)[:, None, None] * C - C
    j = starts + torch.arange(wide * C, device=q.device)
    # Rows beyond the end are cut off; they see all, lest they be NaN.
    seen = (j >= blocks(first[..., None])) & (j <= blocks(last[..., None], 2**31))
    if view.real_BK is not None:
        seen = seen & reached(view.real_BK[..., None]).mT
    mask = seen.expand(B, -1, -1, -1).flatten(0, 1)[:, None]
    out = _sdpa(joined(blocks(q)), joined(reached(k)), joined(reached(v)), mask, False, scale, dropout)
    return out.unflatten(0, (B, N)).transpose(1, 2).flatten(2, 3)[:, :, : view.keys]


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, dropout: float
) -> Tensor:
    """Fused kernels know shared key heads or masks, not both: heads of a single query that share a key
    become rows of one head, and keys are repeated for other masks."""
    grouped, shape = False, q.shape[:-1]
    if q.shape[1] != k.shape[1]:
        if q.shape[2] == 1:
            q = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
            if mask is not None and mask.shape[1] > 1:
                mask = mask.reshape(mask.shape[0], k.shape[1], -1, mask.shape[3])
        elif mask is not None:
            k, v = as_many_heads(k, q), as_many_heads(v, q)
        else:
            grouped = True
    with _kernels(q, mask):
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=grouped
        )
    return out.reshape(*shape, out.shape[-1])


def _kernels(q: Tensor, mask: Tensor | None) -> AbstractContextManager[None]:
    if q.device.type != "cuda" or may_plan(q, mask):
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def may_plan(q: Tensor, mask: Tensor | None) -> bool:
    """Whether cuDNN's kernel may be used. It is the fastest on a GPU, but plans for tens of milliseconds at
    every new shape. Training repeats its shapes; decoding, evaluation and masked batches bring new ones."""
    return mask is None and q.shape[2] > 1 and q.requires_grad
