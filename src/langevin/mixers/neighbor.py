"""Neighbour diffusion: an attention-free mixer that only ever looks at tokens at fixed distances.

Iterated `iters` times on h, starting from x, with hop δ = 1, or 1, 2, 4, ... when dilated:

    n_i  =  W_l h_{i-δ} + W_s h_i + W_r h_{i+δ}
    h_i  <- LayerNorm( α h_i + (1 - α) W₂ GELU(W₁ n_i) )            kind='mlp'
    h_i  <- α h_i + (1 - α) (W h_{i-δ} + W h_{i+δ})                 kind='linear'

kind='content' has no loop. It hears all distances δ at once: 0, 1, ..., iters, or dilated 0, 1, 2, 4, ...
Every token says which share of v it gives and what it takes of the sum; channels weigh distances by t:

    b_i, v_i, c_i  =  W x_i;    g_i  =  σ(b_i) ⊙ v_i
    y_i  =  W_o ( SiLU(c_i) ⊙ Σ_δ ( t_δ ⊙ g_{i-δ} + t_-δ ⊙ g_{i+δ} ) )

mean=True adds one more distance, all tokens at once: t_∞ ⊙ (1/n_i) Σ_j g_j over the n_i tokens that i sees.

kind='recurrent' hears the next token only, which passes on what it has heard, and so all of them: half of
the channels come from the left, half from the right. Every token says how much it lets through:

    b_i, v_i, c_i, f_i  =  W x_i;    g_i  =  σ(b_i) ⊙ v_i;    a_i  =  σ(f_i + k)
    s_i  =  a_i ⊙ s_{i-1} + g_i    or    a_i ⊙ s_{i+1} + g_i;    y_i  =  W_o ( SiLU(c_i) ⊙ r ⊙ s_i )

with r = √(1 - σ(k)²): where what tokens give averages out, a channel that remembers long is no louder than
others; a mean still adds up.

Causal drops the right neighbours. Beyond the ends, across documents and at padding are zeros, in every
iteration, so nothing wraps around and nothing bleeds; kind='recurrent' steps over padding. Iterations share
weights unless shared=False. noise adds σ · rms(x) · ε to x in training. A token hears iters tokens far;
dilated 2^iters - 1, kind='content' 2^(iters - 1). (Banavara, attention-free diffusion; gates around a
convolution as in Fu et al. 2022, H3; a gated linear recurrence as in De et al. 2024, Griffin)

Patches of an image stand in a grid: the neighbours are then those above, left, right and below, with
corners=True all eight, and the formulas have as many terms; beyond the edges there are zeros.

B batch, L tokens, W width, N distances.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from langevin.errors import UsageError
from langevin.kernels.recurrence import recurrence
from langevin.kernels.view import View, wide
from langevin.mixers.mechanism import Geometry, Wrappers, check_heads
from langevin.mixers.spec import Spec, register

LONGEST_MEMORY = 1000  # tokens over which a channel of kind='recurrent' remembers at first; others: less


@register("neighbor")
@dataclass(frozen=True)
class Neighbor:
    iters: int = 4
    alpha: float = 0.5
    kind: Literal["mlp", "linear", "content", "recurrent"] = "mlp"
    shared: bool = True
    hops: Literal[1, "dilated"] = 1
    noise: float = 0.0
    corners: bool = False
    mean: bool = False

    name: ClassVar[str]
    has_grid: ClassVar[bool] = True
    examples: ClassVar[tuple[str, ...]] = (
        "neighbor",
        "neighbor(hops='dilated')",
        "neighbor(kind='linear')",
        "neighbor(kind='content', hops='dilated')",
        "neighbor(kind='content', hops='dilated', mean=True)",
        "neighbor(kind='recurrent')",
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
                "neighbor(kind='content') learns what a token keeps, and has no iterations",
                "Leave alpha and shared out.",
            )
        loop = (self.iters, self.alpha, self.shared, self.hops)
        if self.kind == "recurrent" and loop != (4, 0.5, True, 1):
            raise UsageError(
                "neighbor(kind='recurrent') hears all tokens, and learns what they let through",
                "Leave iters, alpha, shared and hops out.",
            )
        if self.mean and self.kind != "content":
            raise UsageError(
                f"neighbor(kind='{self.kind}') has no weight for a mean",
                "Say kind='content', or leave mean out.",
            )
        if self.hops == "dilated" and self.iters > 30:
            raise UsageError(f"neighbor(iters={self.iters}) doubles its hop too often", "Use 30.")

    def module(self, spec: Spec, grid: tuple[int, int] | None = None, **place: Any) -> NeighborMixer:
        return NeighborMixer(spec, grid=grid, **place)

    @property
    def distances(self) -> list[int]:
        if self.hops == "dilated":
            return [2**i for i in range(self.iters)]
        return [i + 1 if self.kind == "content" else 1 for i in range(self.iters)]

    @property
    def state_lengths(self) -> list[int]:
        """How many inputs are kept for what comes, of each iteration."""
        if self.kind == "recurrent":
            return [1]
        if self.kind == "content":
            return [max(self.distances), *([1] if self.mean else [])]
        return self.distances

    @property
    def sums(self) -> bool:
        """Whether tokens hear all of a text, and not only those at some distances."""
        return self.mean or self.kind == "recurrent"

    def offsets(self, causal: bool) -> list[int]:
        """Where kind='content' looks, counted backwards."""
        return [0, *self.distances, *([] if causal else [-hop for hop in self.distances])]


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
        self.spec, self.width, self.heads, self.grid = spec, width, heads, grid
        self.causal = causal and grid is None
        self.config: Neighbor = spec.mixer
        if self.config.corners and grid is None:
            raise UsageError("tokens of a text have no corners", "Leave corners out.")
        if self.config.kind == "recurrent" and grid is not None:
            raise UsageError(
                "neighbor(kind='recurrent') reads along a line, and patches stand in a grid",
                "Choose another kind.",
            )
        self.content: Content | None = None
        self.recurrent: Recurrent | None = None
        own, beside = (1, 2 if causal else 3) if grid is None else (len(self.around) // 2, len(self.around))
        copies = 1 if self.config.shared else self.config.iters
        if self.config.kind == "content":
            distances = 1 + self.config.iters * (beside - 1)
            self.content, copies = Content(width, distances, self.config.mean), 0
        elif self.config.kind == "recurrent":
            self.recurrent, copies = Recurrent(width), 0
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
        """Mixed x, and the state after it: the last inputs of every iteration. x comes after the tokens of
        a state, of which the view shows what may be seen."""
        if state is not None and x_BLW.shape[1] == 0:
            return x_BLW, state
        x_BLW = only_real(self._noised(x_BLW), view)
        before: tuple[Tensor | None, ...] = state or (None,) * len(self.config.state_lengths)
        if self.content is not None:
            h, kept = self._by_content(self.content, x_BLW, view, before)
        elif self.recurrent is not None:
            h, kept = self._passed_on(self.recurrent, x_BLW, view, *before)
        else:
            h, kept = self._iterated(x_BLW, view, before)
        heads = h.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return self.wrappers(heads).transpose(1, 2).flatten(-2), tuple(kept)

    def _iterated(
        self, x_BLW: Tensor, view: View, before: tuple[Tensor | None, ...]
    ) -> tuple[Tensor, list[Tensor]]:
        h, L, kept = x_BLW, x_BLW.shape[1], []
        for i, hop in enumerate(self.config.distances):
            if self.grid is None:
                longer = self._longer(h, before[i], hop)
                kept.append(longer[:, L : L + hop])
                beside = [only_shown(longer[:, :L], view, hop), h]
                if not self.causal:
                    beside.append(only_shown(longer[:, 2 * hop :], view, -hop))
            else:
                beside = self._in_grid(h, hop)
            h = only_real(self.steps[0 if self.config.shared else i](beside), view)
        return h, kept

    def _by_content(
        self, content: Content, x_BLW: Tensor, view: View, before: tuple[Tensor | None, ...]
    ) -> tuple[Tensor, list[Tensor]]:
        given, taken = content.begin(x_BLW)
        given, kept = only_real(given, view), []
        if self.grid is None:
            reach, L = max(self.config.distances), x_BLW.shape[1]
            longer = self._longer(given, before[0], reach)
            kept = [longer[:, L : L + reach]]
            heard = [
                only_shown(longer[:, reach - hop : reach - hop + L], view, hop)
                for hop in self.config.offsets(self.causal)
            ]
        else:
            around = [self._in_grid(given, hop) for hop in self.config.distances]
            heard = [given, *(h for hop in around for i, h in enumerate(hop) if 2 * i + 1 != len(hop))]
        if self.config.mean:
            mean, total = self._mean(given, view, before[-1])
            heard.append(mean)
            kept.append(total)
        taps_NW = content.taps.to(given.dtype).view(len(heard), self.width)
        parts = [tap * h for tap, h in zip(taps_NW, heard, strict=True)]
        return content.out(taken * sum(parts[1:], parts[0])), kept

    def _mean(self, given_BLW: Tensor, view: View, before: Tensor | None) -> tuple[Tensor, Tensor]:
        """Of what the tokens give that each one sees, and the sum at the end for what comes."""
        given = given_BLW.to(wide(given_BLW.dtype))
        if view.dense_BQK is not None and view.whole:
            with torch.autocast(given.device.type, enabled=False):
                total = view.dense_BQK.to(given.dtype) @ given
        elif not view.free:
            raise UsageError(
                "a mean of all tokens so far knows no mask but padding and documents", "Leave mean out."
            )
        elif view.starts_BQ is not None:
            total = carried(only_shown(torch.ones_like(given), view, 1), given, before)
        elif self.causal:
            total = given.cumsum(1) if before is None else given.cumsum(1) + before.view_as(given[:, :1])
        else:
            total = given.sum(1, keepdim=True)
        last = total[:, -1:]
        if view.ends_BQ is not None:
            total = total.gather(1, view.ends_BQ[..., None].expand_as(given))
        n = view.visible_BQ.clamp_min(1)[:, : total.shape[1], None]
        return (total / n).to(given_BLW.dtype), last

    def _passed_on(
        self, recurrent: Recurrent, x_BLW: Tensor, view: View, before: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        if not view.free:
            raise UsageError(
                "what tokens pass on to each other knows no mask but padding and documents",
                "Choose another kind of neighbor.",
            )
        given, through, taken = recurrent.begin(x_BLW)
        given = only_real(given, view)
        if view.real_BK is not None:
            through = torch.where(view.at_queries(view.real_BK)[..., None], through, 1.0)
        if self.causal:
            heard = carried(only_shown(through, view, 1), given, before)
        else:
            left, right = through.tensor_split(2, -1)
            through = torch.cat([only_shown(left, view, 1), only_shown(right, view, -1)], -1)
            heard = turned(recurrence(turned(through), turned(given)))
        return recurrent.out((taken * heard).to(taken.dtype)), [heard[:, -1:]]

    def _longer(self, h_BLW: Tensor, before: Tensor | None, reach: int) -> Tensor:
        """h with what stands before it, or zeros, and if the right is heard zeros behind it."""
        if before is None:
            return F.pad(h_BLW, (0, 0, reach, 0 if self.causal else reach))
        return torch.cat([before.view(len(h_BLW), reach, self.width), h_BLW], 1)

    def _in_grid(self, h_BLW: Tensor, hop: int) -> list[Tensor]:
        """What stands at each place around, and zeros beyond the edges."""
        assert self.grid is not None
        rows, columns = self.grid
        wider = F.pad(h_BLW.unflatten(1, self.grid), (0, 0, hop, hop, hop, hop))
        return [
            wider[:, (1 + r) * hop :, (1 + c) * hop :][:, :rows, :columns].flatten(1, 2)
            for r, c in self.around
        ]

    def _noised(self, x_BLW: Tensor) -> Tensor:
        if not (self.training and self.config.noise):
            return x_BLW
        rms = x_BLW.detach().square().mean(-1, keepdim=True).sqrt()
        return x_BLW + self.config.noise * rms * torch.randn_like(x_BLW)


def carried(through_BLW: Tensor, given_BLW: Tensor, before: Tensor | None) -> Tensor:
    """s_i = a_i ⊙ s_{i-1} + g_i from what came before on, or from zero."""
    if before is not None:
        first = given_BLW[:, :1] + through_BLW[:, :1] * before.view_as(given_BLW[:, :1])
        given_BLW = torch.cat([first, given_BLW[:, 1:]], 1)
    return recurrence(through_BLW, given_BLW)


def only_shown(moved_BLW: Tensor, view: View, hop: int) -> Tensor:
    """What stands `hop` before each token, and zero where the view does not show it: there are zeros
    beyond the ends and at padding anyway."""
    if view.free and view.starts_BQ is None:
        return moved_BLW
    return torch.where(view.shows(hop)[..., None], moved_BLW, 0.0)


def only_real(h_BLW: Tensor, view: View) -> Tensor:
    """Zero at padding."""
    if view.real_BK is None:
        return h_BLW
    return torch.where(view.at_queries(view.real_BK)[..., None], h_BLW, 0.0)


class Gates(nn.Linear):
    """b, v, c and perhaps f side by side, from x. c starts where SiLU(c) is 1: what is heard is then about
    twelve times as loud at first as with c at 0, and small classifiers learn much faster."""

    OPEN = 1.2785

    def __init__(self, width: int, parts: int) -> None:
        super().__init__(width, parts * width)
        self.bias = nn.Parameter(self.start()["bias"])

    def start(self) -> dict[str, Tensor]:
        """What a new model has."""
        width = self.in_features
        bias = torch.zeros(self.out_features)
        bias[2 * width : 3 * width] = self.OPEN
        return {"bias": bias}


class Content(nn.Module):
    """What each token gives and takes, the weights of the distances, and what becomes of it."""

    def __init__(self, width: int, distances: int, mean: bool) -> None:
        super().__init__()
        self.distances, self.mean = distances, mean
        self.into = Gates(width, 3)
        self.taps = nn.Parameter(self.start()["taps"])
        self.out = nn.Linear(width, width)

    def start(self) -> dict[str, Tensor]:
        width = self.into.in_features
        near = torch.randn(self.distances, width) * self.distances**-0.5
        return {"taps": torch.cat([near, torch.ones(int(self.mean), width)]).flatten()}  # it is no matrix

    def begin(self, x_BLW: Tensor) -> tuple[Tensor, Tensor]:
        b, v, c = self.into(x_BLW).chunk(3, -1)
        return b.sigmoid() * v, F.silu(c)


class Recurrent(nn.Module):
    """What each token gives, lets through and takes, and what becomes of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into = Gates(width, 4)
        self.out = nn.Linear(width, width)
        self.keep = nn.Parameter(self.start()["keep"])

    def start(self) -> dict[str, Tensor]:
        width = self.out.in_features
        tokens = torch.logspace(0, math.log10(LONGEST_MEMORY), -(-width // 2))  # on each side
        return {"keep": tokens.log().repeat(2)[:width]}  # k: σ(k) = tokens / (1 + tokens)

    def begin(self, x_BLW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """g and a, in float32 or better for their sums and products are long, and r ⊙ SiLU(c)."""
        b, v, c, f = self.into(x_BLW).chunk(4, -1)
        k = self.keep.to(wide(x_BLW.dtype))
        r = ((1 + k.sigmoid()) * (-k).sigmoid()).sqrt()
        return (b.sigmoid() * v).to(k.dtype), (f.to(k.dtype) + k).sigmoid(), r.to(c.dtype) * F.silu(c)


def turned(x_BLW: Tensor) -> Tensor:
    """The second half of the channels from back to front."""
    left, right = x_BLW.tensor_split(2, -1)
    return torch.cat([left, right.flip(1)], -1)


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
        others = [x for i, x in enumerate(beside) if i != self.own]
        u = self.tap(sum(others[1:], others[0])) + (len(others) - 1) * self.tap.bias
        return self.alpha * beside[self.own] + (1 - self.alpha) * u
