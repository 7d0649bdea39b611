"""Masked diffusion: tokens vanish behind a mask one by one, and the model learns to bring them back.

    forward      z_i = MASK with probability m(t), else x_i,   independently,   m(0) = 0, m(1) = 1
    training     Σ_i w(t) [z_i = MASK] · -ln p(x_i | z),       w = m' / m,      t stratified over the batch
    likelihood   Σ_i (n / l) [z_i = MASK] · -ln p(x_i | z),    l of the n tokens masked, l uniform in 1 .. n

Both are unbiased for one upper bound of -ln p(x), whatever m is, and are averaged over all n tokens, not
over the masked ones. The second has less variance and no limit at t = 0, and is what is reported. The model
sees both sides, is not told t, never predicts MASK, and a token that is visible costs nothing.
(Sahoo et al. 2024, arXiv 2406.07524; Shi et al. 2024, arXiv 2406.04329; Ou et al. 2024, arXiv 2406.03736)

    schedule     linear   m = t                  cosine-a     m = 1 - cos(πt/2)
                 cosine-b m = sin(πt/2)          polynomial   m = t^power

B rows, T tokens, L = T - 1 of them predicted (those that `ar` predicts), V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from langevin.errors import UsageError
from langevin.kernels.view import wide
from langevin.objectives.objective import Batch, Objective, register
from langevin.settings import TrainConfig

LEAST_TIME = 1e-3  # in training, where w is unbounded at 0

_VISIBLE = -100  # what cross_entropy leaves out


def weighted_losses(logits_BLV: Tensor, x_BL: Tensor, masked_BL: Tensor, weight_B: Tensor) -> Tensor:
    """(B, L): weight · -ln p(x) where a token is masked, 0 where it is visible; in nats, in float32 or
    better."""
    targets = torch.where(masked_BL, x_BL, _VISIBLE)
    logits = logits_BLV.to(wide(logits_BLV.dtype)).transpose(1, 2)
    return F.cross_entropy(logits, targets, ignore_index=_VISIBLE, reduction="none") * weight_B[:, None]


def fewest_masked(noise_BL: Tensor, scored_BL: Tensor, time_B: Tensor) -> tuple[Tensor, Tensor]:
    """Exactly l = ⌈t n⌉ of the n scored tokens of each row, those with the smallest noise, and n / l."""
    n_B = scored_BL.sum(-1)
    l_B = torch.minimum((time_B * n_B).long() + 1, n_B)
    rank_BL = torch.where(scored_BL, noise_BL, 2.0).argsort(dim=-1, stable=True).argsort(-1)
    return (rank_BL < l_B[:, None]) & scored_BL, n_B / l_B.clamp_min(1)


@register("masked")
@dataclass(frozen=True)
class Masked(Objective):
    schedule: Literal["linear", "cosine-a", "cosine-b", "polynomial"] = "linear"
    power: float = 2.0
    """Of the polynomial schedule."""

    causal = False
    head = "LangevinForMaskedLM"
    extra_tokens = 1
    likelihood = "bound"
    criterion = staticmethod(weighted_losses)

    def __post_init__(self) -> None:
        if not self.power > 0:
            raise UsageError(f"{self.name}(power={self.power}) must be positive")

    def check(self, config: TrainConfig) -> None:
        if config.init is not None:
            raise UsageError(
                f"{self.name} trains a model that sees both sides, and {config.init} looks back only",
                "Leave --init out.",
            )

    def masked_share(self, t: Tensor) -> Tensor:
        """m(t) = 1 - α(t): how much is masked at a time from 0 to 1."""
        if self.schedule == "linear":
            return t
        if self.schedule == "cosine-a":
            return 2 * (math.pi / 4 * t).sin().square()
        if self.schedule == "cosine-b":
            return (math.pi / 2 * t).sin()
        return t**self.power

    def weight(self, t: Tensor) -> Tensor:
        """w(t) = m'(t) / m(t)."""
        if self.schedule == "linear":
            return 1 / t
        if self.schedule == "cosine-a":
            return math.pi / 2 / (math.pi / 4 * t).tan()
        if self.schedule == "cosine-b":
            return math.pi / 2 / (math.pi / 2 * t).tan()
        return self.power / t

    def draws(self, batch: Batch, rows: int, generator: torch.Generator | None) -> Batch:
        """A time from 0 to 1 for each row, each from a stratum of its own, and noise for each token."""
        strata = torch.randperm(rows, generator=generator)
        times = (strata + torch.rand(rows, generator=generator)) / rows
        noise = torch.rand(rows, batch["tokens"].shape[1] - 1, generator=generator)
        return {"times": times, "noise": noise}

    def loss(
        self, model: Any, batch: Batch, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor | int]:
        batch = self._with_draws(batch, generator)
        scored_BL = scored(batch)
        count = scored_BL.sum() if "scored" in batch else scored_BL.numel()
        if not model.training:
            return self.upper_bound(model, batch).sum(), count
        times = batch["times"].clamp_min(LEAST_TIME)
        masked_BL = (batch["noise"] < self.masked_share(times)[:, None]) & scored_BL
        losses_BL = self.criterion(*self.predicted(model, batch, masked_BL), masked_BL, self.weight(times))
        return losses_BL.sum(), count

    def upper_bound(self, model: Any, batch: Batch, generator: torch.Generator | None = None) -> Tensor:
        batch = self._with_draws(batch, generator)
        masked_BL, weight_B = fewest_masked(batch["noise"], scored(batch), batch["times"])
        return weighted_losses(*self.predicted(model, batch, masked_BL), masked_BL, weight_B)

    def chain_rule(self, model: Any, batch: Batch, at_once: int) -> Tensor:
        """-ln p(x_i | x_<i): L passes, in which all that is to the right of a token is masked."""
        scored_BL = scored(batch)
        found_BL = torch.zeros(scored_BL.shape, device=scored_BL.device)
        place = torch.arange(scored_BL.shape[1], device=scored_BL.device)
        for some in scored_BL.nonzero().split(at_once):
            row_N, at_N = some.T
            rows = {name: x[row_N] for name, x in batch.items()}
            later_NL = (place >= at_N[:, None]) & scored_BL[row_N]
            logits_NLV, x_NL = self.predicted(model, rows, later_NL)
            asked_NL = place == at_N[:, None]
            weight_N = torch.ones(len(some), device=scored_BL.device)
            losses_NL = weighted_losses(logits_NLV, x_NL, asked_NL, weight_N)
            found_BL[row_N, at_N] = losses_NL[asked_NL].to(found_BL.dtype)
        return found_BL

    def predicted(
        self, model: Any, batch: Batch, masked_BL: Tensor, **more: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Logits (B, L, V) of a batch in which some tokens are masked, and the tokens (B, L); more is what
        else the model reads."""
        x_BL = batch["tokens"][:, 1:]
        places = {name: batch[name][:, 1:] for name in ("position_ids",) if name in batch}
        return model(input_ids=x_BL, masked=masked_BL, **places, **more).logits, x_BL

    @classmethod
    def sampling(cls) -> type[Any]:
        from langevin.sampling.masked import MaskedSampling

        return MaskedSampling

    def sampler(self) -> Callable[..., Any]:
        from langevin.sampling.masked import generate

        return partial(generate, masked_share=self.masked_share)

    def _with_draws(self, batch: Batch, generator: torch.Generator | None) -> Batch:
        """The batch with its random numbers: those that came with it, or new ones."""
        if "times" in batch:
            return batch
        tokens = batch["tokens"]
        drawn = self.draws(batch, len(tokens), generator)
        return {**batch, **{name: x.to(tokens.device) for name, x in drawn.items()}}


def scored(batch: Batch) -> Tensor:
    """(B, L): which tokens may be masked; the others are context."""
    if "scored" in batch:
        return batch["scored"][:, 1:]
    return torch.ones_like(batch["tokens"][:, 1:], dtype=torch.bool)
