"""A gated linear recurrence along the tokens, in O(L) and few steps.

    s_i  =  a_i ⊙ s_{i-1} + g_i,    s_{-1} = 0

Two steps in a row are one of the same form, (a, g) then (a', g') being (a' a, a' g + g'). So hops of 1, 2,
4, ... reach over a chunk; the last states of the chunks are such a recurrence again, of fewer steps.

B batch, L tokens, W width, N chunks, C tokens of a chunk.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 16


def recurrence(a_BLW: Tensor, g_BLW: Tensor, longest: int) -> Tensor:
    """s_i of all tokens, of which there are no more than `longest`."""
    if longest == 1:
        return g_BLW
    result: Tensor = Recurrence.apply(a_BLW, g_BLW, longest)
    return result


class Recurrence(torch.autograd.Function):
    """Only a and s are kept. The gradient comes back the other way, e_i = ∂s_i + a_{i+1} ⊙ e_{i+1}, with
    ∂g_i = e_i and ∂a_i = e_i ⊙ s_{i-1}."""

    @staticmethod
    def forward(a_BLW: Tensor, g_BLW: Tensor, longest: int) -> Tensor:
        return _carried(a_BLW, g_BLW, longest)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)
        ctx.longest = inputs[2]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        a, s = ctx.saved_tensors
        later = F.pad(a[:, 1:], (0, 0, 0, 1))
        e = _carried(later.flip(1), gradients[0].flip(1), ctx.longest).flip(1)
        return e * F.pad(s[:, :-1], (0, 0, 1, 0)), e, None


def _carried(a_BLW: Tensor, g_BLW: Tensor, longest: int) -> Tensor:
    L, chunk, hop = a_BLW.shape[1], min(CHUNK, longest), 1
    a, g = (F.pad(x, (0, 0, 0, -L % chunk)).unflatten(1, (-1, chunk)) for x in (a_BLW, g_BLW))
    while hop < chunk:  # a and g become those of the last 2 hop steps in one, as far as the chunk goes
        g = g + a * F.pad(g, (0, 0, hop, 0))[:, :, :chunk]
        a = a * F.pad(a, (0, 0, hop, 0), value=1.0)[:, :, :chunk]
        hop *= 2
    if longest > chunk:
        before = _carried(a[:, :, -1], g[:, :, -1], -(-longest // chunk))
        g = g + a * F.pad(before, (0, 0, 1, 0))[:, :-1, None]
    return g.flatten(1, 2)[:, :L]
