"""Neighbour diffusion: an attention-free mixer that only ever looks at the tokens next door.

Iterated `iters` times on h, starting from x, with hop δ = 1, or 1, 2, 4, ... when dilated:

    n_i  =  W_l h_{i-δ} + W_s h_i + W_r h_{i+δ}
    h_i  <- LayerNorm( α h_i + (1 - α) W₂ GELU(W₁ n_i) )            kind='mlp'
    h_i  <- α h_i + (1 - α) (W h_{i-δ} + W h_{i+δ})                 kind='linear'

kind='content' starts from h = W_u x; every token says for each head, iteration and neighbour what it takes:

    p_i  =  softmax( T x_i + s_h [self] ),    h_i <- p_i,l h_{i-δ} + p_i,s h_i + p_i,r h_{i+δ}
    y_i  =  W_o ( h_i ⊙ SiLU(W_g x_i) )

s_h is 0 for the first head and SELF for the last, which start far and near. No matrix is in the loop.

Causal drops the right neighbour. Beyond the ends, across documents and at padding there are zeros, again at
every iteration, so nothing wraps around and nothing bleeds. Iterations share weights unless shared=False.
noise adds σ · rms(x) · ε to x in training. A token hears iters hops (dilated: 2^iters - 1 tokens) far.

Patches of an image stand in a grid: the neighbours are then those above, left, right and below, with
corners=True all eight, and the formulas have as many terms; beyond the edges there are zeros.
(Banavara, attention-free diffusion)

B batch, L tokens, W width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from langevin.errors import UsageError
from langevin.kernels.view import View
from langevin.mixers.mechanism import Geometry, Wrappers, check_heads
from langevin.mixers.spec import Spec, register

SELF = 3.0  # by how much the last head starts with itself


@register("neighbor")
@dataclass(frozen=True)
class Neighbor:
    iters: int = 4
    alpha: float = 0.5
    kind: Literal["mlp", "linear", "content"] = "mlp"
    shared: bool = True
    hops: Literal[1, "dilated"] = 1
    noise: float = 0.0
    corners: bool = False

    name: ClassVar[str]
    has_grid: ClassVar[bool] = True
    examples: ClassVar[tuple[str, ...]] = (
        "neighbor",
        "neighbor(hops='dilated')",
        "neighbor(kind='linear')",
        "neighbor(kind='content', hops='dilated')",
    )

    def __post_init__(self) -> None:
        if self.iters < 1:
            raise UsageError(f"neighbor(iters={self.iters}) must be 1 or more")
        if not 0 <= self.alpha <= 1:
            raise UsageError(f"neighbor(alpha={self.alpha}) must be between 0 and 1")
        if self.noise < 0:
            raise UsageError(f"neighbor(noise={self.noise}) must be 0 or more")
        if self.kind == "content" and (self.alpha, self.shared) != (0.5, True):
            raise UsageError(
                "neighbor(kind='content') learns what a token keeps, at every iteration",
                "Leave alpha and shared out.",
            )
        if self.hops == "dilated" and self.iters > 30:
            raise UsageError(f"neighbor(iters={self.iters}) doubles its hop too often", "Use 30.")

    def module(self, spec: Spec, grid: tuple[int, int] | None = None, **place: Any) -> NeighborMixer:
        return NeighborMixer(spec, grid=grid, **place)

    @property
    def repeats(self) -> int:
        """How often a token goes through the same matrices."""
        return self.iters if self.shared and self.kind != "content" else 1

    @property
    def distances(self) -> list[int]:
        return [2**i if self.hops == "dilated" else 1 for i in range(self.iters)]


class NeighborMixer(nn.Module):
    """(B, L, W) -> (B, L, W) by the formula above."""

    def __init__(
        self,
        spec: Spec,
        *,
        width: int,
        heads: int,
        causal: bool,
        layer: int = 0,
        depth: int = 4,
        max_length: int = 1024,
        grid: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        check_heads(width, heads)
        self.spec, self.width, self.heads, self.causal, self.grid = spec, width, heads, causal, grid
        self.config: Neighbor = spec.mixer
        if self.config.corners and grid is None:
            raise UsageError("tokens of a text have no corners", "Leave corners out.")
        self.content: Content | None = None
        own, beside = (1, 2 if causal else 3) if grid is None else (len(self.around) // 2, len(self.around))
        if self.config.kind == "content":
            self.content, copies = Content(width, heads, self.config.iters, own, beside), 0
        else:
            copies = 1 if self.config.shared else self.config.iters
        step = MLPStep if self.config.kind == "mlp" else LinearStep
        self.steps = nn.ModuleList(step(width, self.config.alpha, own, beside) for _ in range(copies))
        self.geometry = Geometry(heads, width // heads, heads, layer, depth, max_length)
        self.wrappers = Wrappers(spec, self.geometry)

    @property
    def around(self) -> list[tuple[int, int]]:
        """Rows and columns from a place in a grid to itself and its neighbours, in their order."""
        every = [(row, column) for row in (-1, 0, 1) for column in (-1, 0, 1)]
        return [place for place in every if self.config.corners or 0 in place]

    def forward(
        self, x_BLW: Tensor, view: View, state: tuple[Tensor, ...] | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Mixed x, and the state after it: the last `hop` inputs of every iteration. x comes after the
        tokens of a state, of which the view shows what may be seen."""
        x_BLW, kept, taps = self._noised(x_BLW), [], None
        if self.content is None:
            h = only_real(x_BLW, view)
        else:
            h, taps = (only_real(part, view) for part in self.content.begin(x_BLW))
            h = h.unflatten(-1, (self.heads, -1))
        for i, hop in enumerate(self.config.distances):
            if self.grid is None:
                beside, last = self._in_line(h, view, hop, None if state is None else state[i])
                kept.append(last)
            else:
                beside = self._in_grid(h, hop)
            if taps is None:
                h = only_real(self.steps[0 if self.config.shared else i](beside), view)
            else:  # at padding it takes nothing
                h = mixed(taps[:, :, i], beside)
        if self.content is not None:
            h = self.content.end(h.flatten(-2), x_BLW)
        heads = h.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return self.wrappers(heads).transpose(1, 2).flatten(-2), tuple(kept)

    def _in_line(
        self, h: Tensor, view: View, hop: int, state: Tensor | None
    ) -> tuple[list[Tensor], Tensor]:
        """What stands to the left, h itself and what stands to the right, if that may be seen; and the
        last `hop` of h, for those that come."""
        L, nothing = h.shape[1], h.new_zeros(h.shape[0], hop, *h.shape[2:])
        before = nothing if state is None else state.view_as(nothing)
        longer = torch.cat([before, h] if self.causal else [before, h, nothing], 1)
        beside = [only_shown(longer[:, :L], view, hop), h]
        if not self.causal:
            beside.append(only_shown(longer[:, 2 * hop :], view, -hop))
        return beside, longer[:, L : L + hop].reshape(len(h), hop, self.width)

    def _in_grid(self, h: Tensor, hop: int) -> list[Tensor]:
        """What stands at each place around, and zeros beyond the edges."""
        assert self.grid is not None
        rows, columns = self.grid
        padding = (0, 0) * (h.ndim - 2) + (hop,) * 4
        wider = F.pad(h.unflatten(1, self.grid), padding)
        return [
            wider[:, (1 + r) * hop :, (1 + c) * hop :][:, :rows, :columns].flatten(1, 2)
            for r, c in self.around
        ]

    def _noised(self, x_BLW: Tensor) -> Tensor:
        if not (self.training and self.config.noise):
            return x_BLW
        rms = x_BLW.detach().square().mean(-1, keepdim=True).sqrt()
        return x_BLW + self.config.noise * rms * torch.randn_like(x_BLW)


def only_shown(moved_BL: Tensor, view: View, hop: int) -> Tensor:
    """What stands `hop` before each token, and zero where the view does not show it: there are zeros
    beyond the ends and at padding anyway."""
    if view.free and view.starts_BQ is None:
        return moved_BL
    return torch.where(_beside(view.shows(hop), moved_BL), moved_BL, 0.0)


def only_real(h_BL: Tensor, view: View) -> Tensor:
    """Zero at padding."""
    if view.real_BK is None:
        return h_BL
    return torch.where(_beside(view.at_queries(view.real_BK), h_BL), h_BL, 0.0)


def _beside(shown_BL: Tensor, h_BL: Tensor) -> Tensor:
    return shown_BL.reshape(*shown_BL.shape, *(1 for _ in h_BL.shape[2:]))


def mixed(taps_BLHN: Tensor, neighbours_BLHD: list[Tensor]) -> Tensor:
    """Σ_n p_n h_n, with one p for the channels of a head."""
    parts = [p * h for p, h in zip(taps_BLHN.split(1, -1), neighbours_BLHD, strict=True)]
    return sum(parts[1:], parts[0])


class Content(nn.Module):
    """What is mixed, what each token takes of its neighbours, and what becomes of it."""

    def __init__(self, width: int, heads: int, iters: int, own: int, beside: int) -> None:
        super().__init__()
        self.shape, self.own = (iters, heads, beside), own
        self.value = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, width, bias=False)
        self.taps = nn.Linear(width, math.prod(self.shape))
        self.out = nn.Linear(width, width)

    def begin(self, x_BLW: Tensor) -> tuple[Tensor, Tensor]:
        """h, and the taps (B, L, iterations, heads, neighbours)."""
        logits = self.taps(x_BLW).unflatten(-1, self.shape)
        stays = torch.linspace(0, SELF, self.shape[1], device=x_BLW.device, dtype=logits.dtype)
        own = F.pad(stays[:, None], (self.own, self.shape[2] - self.own - 1))
        return self.value(x_BLW), (logits + own).softmax(-1)

    def end(self, h_BLW: Tensor, x_BLW: Tensor) -> Tensor:
        return self.out(h_BLW * F.silu(self.gate(x_BLW)))


class MLPStep(nn.Module):
    """LayerNorm( α h + (1 - α) W₂ GELU(W₁ (W_l left + W_s h + W_r right)) )."""

    def __init__(self, width: int, alpha: float, own: int, beside: int) -> None:
        super().__init__()
        self.alpha, self.own = alpha, own
        self.taps = nn.Linear(beside * width, width, bias=False)  # W_l, W_s and W_r side by side
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, beside: list[Tensor]) -> Tensor:
        u = self.down(F.gelu(self.up(self.taps(torch.cat(beside, -1)))))
        return self.norm(self.alpha * beside[self.own] + (1 - self.alpha) * u)


class LinearStep(nn.Module):
    """α h + (1 - α) (W left + W right), one biased W."""

    def __init__(self, width: int, alpha: float, own: int, beside: int) -> None:
        super().__init__()
        self.alpha, self.own = alpha, own
        self.tap = nn.Linear(width, width)

    def forward(self, beside: list[Tensor]) -> Tensor:
        others = [self.tap(x) for i, x in enumerate(beside) if i != self.own]
        return self.alpha * beside[self.own] + (1 - self.alpha) * sum(others[1:], others[0])
