"""A gated linear recurrence along the tokens, in O(L) and few steps.

    s_i  =  a_i ⊙ s_{i-1} + g_i,    s_{-1} = 0

Two steps in a row are one of the same form, (a, g) then (a', g') being (a' a, a' g + g'). So hops of 1, 2,
4, ... reach over a chunk; the last states of the chunks are such a recurrence again, of fewer steps. While
a graph is traced the length may be unknown, and this goes on as often as the longest text would need.

B batch, L tokens, W width, N chunks, C tokens of a chunk.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 16
LONGEST = 900_000  # tokens that a traced graph takes


def recurrence(a_BLW: Tensor, g_BLW: Tensor) -> Tensor:
    """s_i of all tokens."""
    L = g_BLW.shape[1]
    if L <= 1:
        return g_BLW
    levels = levels_for(LONGEST if torch.compiler.is_compiling() else L)
    result: Tensor = Recurrence.apply(a_BLW, g_BLW, levels)
    return result


class Recurrence(torch.autograd.Function):
    """Only a and s are kept. The gradient comes back the other way, e_i = ∂s_i + a_{i+1} ⊙ e_{i+1}, with
    ∂g_i = e_i and ∂a_i = e_i ⊙ s_{i-1}."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a_BLW: Tensor, g_BLW: Tensor, levels: int) -> Tensor:
        return _carried(a_BLW, g_BLW, levels)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)
        ctx.levels = inputs[2]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        a, s = ctx.saved_tensors
        later = F.pad(a[:, 1:], (0, 0, 0, 1))
        e = _carried(later.flip(1), gradients[0].flip(1), ctx.levels).flip(1)
        return e * F.pad(s[:, :-1], (0, 0, 1, 0)), e, None


def _carried(a_BLW: Tensor, g_BLW: Tensor, levels: int) -> Tensor:
    if levels == 1:
        return _within(a_BLW, g_BLW)[1]
    L = a_BLW.shape[1]
    N = chunks(L)
    a, g = (F.pad(x, (0, 0, 0, N * CHUNK - L)).unflatten(1, (N, CHUNK)) for x in (a_BLW, g_BLW))
    a, g = _within(a, g)
    before_BNW = _carried(a[:, :, -1], g[:, :, -1], levels - 1)
    g = g + a * F.pad(before_BNW, (0, 0, 1, 0))[:, :-1, None]
    return g.flatten(1, 2)[:, :L]


def _within(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """a and g of all steps so far in one, (..., C or fewer, W)."""
    C, hop = a.shape[-2], 1
    while hop < CHUNK:
        g = g + a * F.pad(g, (0, 0, hop, 0))[..., :C, :]
        a = a * F.pad(a, (0, 0, hop, 0), value=1.0)[..., :C, :]
        hop *= 2
    return a, g


def chunks(length: int) -> int:
    """That hold so many tokens, and two or more, because a traced graph takes one for a case of its own."""
    return length // CHUNK + 2


def levels_for(length: int) -> int:
    """How often the states of chunks are cut into chunks, until one holds them."""
    return 1 if length <= CHUNK else 1 + levels_for(chunks(length))
