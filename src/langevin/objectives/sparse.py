"""Sparse distribution diffusion: an open position carries a few candidates with probabilities, not a mask.

state='soft'. A position that is not committed carries the k likeliest tokens of the call of the network
before, with their true probabilities; the rest is on MASK. With k = 0 this is `masked`.

    c = top k of p(· | z_s), z_s more masked than z_t;     the loss is that of `masked`, with p(· | z_t, c)

In training z_s has up to `gap` of the text masked beyond z_t, as the state before a sampler's step has;
`feedback` is the share of rows that get c, the others have c = 0. c is a function of the trajectory from
the mask's end, never of what z_t hides, so the sum stays a bound of -ln p(x): a model that draws z_s, then
z_t, is one, too. Likelihood is measured with z_s = z_t: two passes over the same masks, without draws of
its own, and so is the chain rule. (Soft-masked diffusion: arXiv 2510.17206)

state='full'. Every position is k candidates, all of which attend to all. Noise n(t) is the schedule's.

    clean        x with p = 1 - ε(k - 1), and k - 1 random tokens with p = ε, ε = 0.01, in random slots
    forward      with probability n (1 - (1 - n) p / p_x) a candidate becomes a random token with p = 1/V,
                 else it stays, with p <- (1 - n) p + n/V

x goes with probability n². Where it stays it has the largest p; where it is gone, what is left does not
depend on it. So the state is that of `masked` with m = n², and candidates that anybody could draw who knows
which positions are destroyed: given the rest they do not depend on x. The bound is therefore that of
`masked`, with the weight m'/m = 2n'/n, over destroyed positions alone, and one samples as there: from t to
s a destroyed position gets a token drawn from p(x | state) with probability 1 - n(s)²/n(t)², and all else
is drawn anew. The level n that candidates show is √(destroyed share) of the row.

B rows, L predictions, V vocabulary, K candidates, R = 2K + 1 random numbers of a position.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from langevin.errors import UsageError
from langevin.kernels.view import wide
from langevin.models.cost import flops_of
from langevin.objectives.masked import Masked, scored
from langevin.objectives.objective import Batch, Objective, generator_of, register
from langevin.settings import TrainConfig

ROUNDING = 1e-4
WRONG = 0.01  # the probability of a candidate that is not the token, in a clean state


def likeliest(logits_BLV: Tensor, k: int) -> dict[str, Tensor]:
    """The k likeliest tokens of predictions and their probabilities, as a model reads them."""
    best, ids = logits_BLV.topk(k)
    whole = logits_BLV.to(wide(logits_BLV.dtype)).logsumexp(-1, keepdim=True)
    return {"candidates": ids, "probabilities": (best - whole).exp()}


def slots(
    x_BL: Tensor,
    destroyed_BL: Tensor,
    level_B: Tensor,
    random_BLR: Tensor,
    vocabulary: int,
    held: int | Tensor | None = None,
) -> dict[str, Tensor]:
    """The candidates of tokens of which some are destroyed, at noise n, as a model reads them. Where fewer
    are `held` than there are slots, the others stay at 1/V."""
    k = random_BLR.shape[-1] // 2
    held = k if held is None else held
    n, uniform = level_B[:, None, None], 1 / vocabulary
    right = 1 - WRONG * (held - 1)
    token_BLK = (random_BLR[..., :k] * vocabulary).long().clamp_max(vocabulary - 1)
    after_BLK = torch.arange(k, device=x_BL.device) - (random_BLR[..., -1:] * k).long()
    own_BLK = after_BLK == 0
    seen_BLK = own_BLK & ~destroyed_BL[..., None]
    swapped_BLK = random_BLR[..., k : 2 * k] < n * (1 - (1 - n) * WRONG / right)
    wrong_BLK = torch.where(
        own_BLK | swapped_BLK | (after_BLK % k >= held), uniform, (1 - n) * WRONG + n * uniform
    )
    return {
        "candidates": torch.where(seen_BLK, x_BL[..., None], token_BLK),
        "probabilities": torch.where(seen_BLK, (1 - n) * right + n * uniform, wrong_BLK),
    }


@register("sparse")
@dataclass(frozen=True)
class Sparse(Masked):
    state: Literal["soft", "full"] = "soft"
    """Candidates at open positions, from their last prediction; or everywhere."""
    k: int = 8
    """Candidates of a position."""
    feedback: float = 0.75
    """Soft: the share of rows that are fed back to in training."""
    gap: float = 0.25
    """Soft: how much more of the text may be masked in the call before."""
    warmup: float = 0.05
    """Soft: the part of training before the first row is."""
    curriculum: float = 0.0
    """Full: the part of training in which the candidates that are not noise double from 1 to k."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block is not None:
            raise UsageError(f"{self.name} has no blocks", "Use masked(block=N).")
        for key in ("feedback", "gap", "warmup", "curriculum"):
            if not 0 <= getattr(self, key) <= 1:
                raise UsageError(f"{self.name}({key}={getattr(self, key)}) must be from 0 to 1")
        if self.feeds and not self.feedback:
            raise UsageError(f"{self.name}(feedback=0.0) trains without feedback", "Use masked.")
        least, most = (1, round(1 / WRONG) - 1) if self.state == "full" else (0, None)
        if self.k < least or (most is not None and self.k > most):
            to = "or more" if most is None else f"to {most}"
            raise UsageError(f"{self.name}(state={self.state!r}, k={self.k}) must have k {least} {to}")

    def check(self, config: TrainConfig) -> None:
        super().check(config)
        idle = [] if self.feeds else ["feedback", "gap", "warmup"]
        idle += ["curriculum"] if self.state == "soft" else []
        for key in idle:
            if getattr(self, key) != getattr(Sparse, key):
                raise UsageError(
                    f"{self.name}({key}={getattr(self, key)}) changes nothing with state={self.state!r}"
                    + ("" if self.k else " and k=0"),
                    f"Leave {key} out.",
                )

    def bound(self, config: TrainConfig, model: Any) -> Objective:
        tokens = model.config.vocab_size - self.extra_tokens
        if self.k > tokens:
            raise UsageError(
                f"{self.name}(k={self.k}) wants more candidates than the vocabulary has tokens, {tokens}",
                "Choose a smaller k.",
            )
        if self.feeds and config.batch * self.feedback + ROUNDING < 1:
            raise UsageError(
                f"{self.name}(feedback={self.feedback}) feeds back to no row of a batch of {config.batch}",
                f"Use --batch {math.ceil(1 / self.feedback - ROUNDING)} or more.",
            )
        return self

    def model_settings(self) -> dict[str, Any]:
        return {"candidates": self.state if self.feeds or self.state == "full" else "none"}

    @property
    def feeds(self) -> bool:
        """Whether a call reads something of the one before."""
        return self.state == "soft" and self.k > 0

    def flops(self, model: Any, context: int) -> float:
        """Of a full state every candidate is a token of a context k times as long; the head sees one."""
        if self.state != "full":
            return super().flops(model, context) * (3 + self.feedback * self.feeds) / 3
        head = 6.0 * model.get_output_embeddings().weight.numel()
        return self.k * (flops_of(model, self.k * context) - head) + head

    def masked_share(self, t: Tensor) -> Tensor:
        n = super().masked_share(t)
        return n.square() if self.state == "full" else n

    def weight(self, t: Tensor) -> Tensor:
        return super().weight(t) * (2 if self.state == "full" else 1)

    def draws(self, batch: Batch, rows: int, generator: torch.Generator | None) -> Batch:
        """Those of `masked`, the same; then R numbers for each token, or one for each row and whether it is
        fed back to: of any so many neighbours a share as near to `feedback` as can be."""
        drawn, length = super().draws(batch, rows, generator), batch["tokens"].shape[1] - 1
        if self.state == "full":
            drawn["slots"] = torch.rand(rows, length, 2 * self.k + 1, generator=generator)
        elif self.feeds:
            drawn["ahead"] = torch.rand(rows, generator=generator)
            drawn["fed"] = (torch.arange(1 + rows) * self.feedback + ROUNDING).floor().diff() > 0
        return drawn

    def chain_rule(self, model: Any, batch: Batch, at_once: int) -> Tensor:
        return super().chain_rule(model, self._with_draws(batch, generator_of(0)), at_once)

    def predicted(self, model: Any, batch: Batch, masked_BL: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
        if self.state == "full":
            vocabulary = getattr(model, "module", model).config.vocab_size - self.extra_tokens
            x_BL, level_B = batch["tokens"][:, 1:], masked_BL.float().mean(-1).sqrt()
            more = slots(x_BL, masked_BL, level_B, batch["slots"], vocabulary, self._held(batch))
        elif self.feeds and not more:
            more = self._fed_back(model, batch, masked_BL)
        return super().predicted(model, batch, masked_BL, **more)

    def _held(self, batch: Batch) -> Tensor | None:
        if not self.curriculum or "progress" not in batch:
            return None
        doublings = (batch["progress"] / self.curriculum * math.ceil(math.log2(self.k))).floor()
        return torch.exp2(doublings).clamp_max(self.k)

    def _fed_back(self, model: Any, batch: Batch, masked_BL: Tensor) -> Batch:
        """What is read of a call before: in training of the rows that get feedback, or one row more, so
        that parts of one size are the same work, which a CUDA graph replays."""
        B, earlier_BL = len(masked_BL), masked_BL
        some, fed = torch.arange(B, device=masked_BL.device), torch.ones_like(masked_BL[:, 0])
        if model.training:
            share_B = self.masked_share(batch["times"]) + self.gap * batch["ahead"]
            earlier_BL = masked_BL | ((batch["noise"] < share_B[:, None]) & scored(batch))
            fed, rows = batch["fed"], math.ceil(self.feedback * B - ROUNDING)
            some = fed.long().argsort(descending=True, stable=True)[:rows]
            if "progress" in batch:
                fed = fed & (batch["progress"] >= self.warmup)
        part: Batch = {name: batch[name][some] for name in ("tokens", "position_ids") if name in batch}
        with torch.no_grad():
            logits_BLV, _ = super().predicted(model, part, earlier_BL[some])
            found = likeliest(logits_BLV, self.k)
            found["probabilities"] *= fed[some][:, None, None]
        return {name: x.new_zeros(B, *x.shape[1:]).index_copy(0, some, x) for name, x in found.items()}

    def sampler(self) -> partial[Any]:
        from langevin.sampling.sparse import FullDenoising, SoftDenoising

        if not self.k:
            return super().sampler()
        kind = SoftDenoising if self.state == "soft" else FullDenoising
        return partial(super().sampler(), denoising=partial(kind, k=self.k))
