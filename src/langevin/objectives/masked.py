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

With block=N a text is written in blocks of N tokens from left to right, each by masked diffusion:

    -ln p(x)  <=  Σ_b bound( x^b | x^<b )        N = 1: the exact loss of a model from left to right

A block is masked by counts, in training as well. The network reads [x ; z], every token twice at one
position: masked tokens see their own block, masked as it is, and the clean blocks before it, and clean
blocks see themselves and those before. What a finished block is to later ones never changes, and can be
kept in a cache. (Arriola et al. 2025, arXiv 2503.09573)

B rows, T tokens, L = T - 1 of them predicted (those that `ar` predicts), in M blocks of N; V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from langevin.errors import UsageError
from langevin.kernels.view import wide
from langevin.mixers import parse
from langevin.models.cost import flops_of
from langevin.objectives.objective import Batch, Objective, generator_of, register
from langevin.settings import TrainConfig

LEAST_TIME = 1e-3  # in training, where w is unbounded at 0
TURNS = 8  # in which all tokens of a text are asked for

_VISIBLE = -100  # what cross_entropy leaves out


def weighted_losses(logits_BLV: Tensor, x_BL: Tensor, masked_BL: Tensor, weight_BL: Tensor) -> Tensor:
    """(B, L): weight · -ln p(x) where a token is masked, 0 where it is visible; in nats, in float32 or
    better."""
    targets = torch.where(masked_BL, x_BL, _VISIBLE)
    logits = logits_BLV.to(wide(logits_BLV.dtype)).transpose(1, 2)
    return F.cross_entropy(logits, targets, ignore_index=_VISIBLE, reduction="none") * weight_BL


def fewest_masked(noise_BMN: Tensor, scored_BMN: Tensor, time_BM: Tensor) -> tuple[Tensor, Tensor]:
    """Exactly l = ⌈t n⌉ of the n scored tokens of each block, those with the smallest noise, and n / l."""
    n_BM = scored_BMN.sum(-1)
    l_BM = torch.minimum((time_BM * n_BM).long() + 1, n_BM)
    rank_BMN = torch.where(scored_BMN, noise_BMN, 2.0).argsort(dim=-1, stable=True).argsort(-1)
    return rank_BMN < l_BM[..., None], n_BM / l_BM.clamp_min(1)


def in_blocks(x_BL: Tensor, block: int | None) -> Tensor:
    """(B, M, N), with zeros where the last block is not full; None: one block."""
    L = x_BL.shape[1]
    N = block or L
    return F.pad(x_BL, (0, -L % N)).unflatten(1, (-1, N))


def two_parts(length: int, block: int, device: torch.device) -> Tensor:
    """Who sees whom in [x ; z], (1, 1, 2L, 2L)."""
    place = torch.arange(2 * length, device=device)
    of, part = place % length // block, place // length
    own, earlier = of[:, None] == of, of[:, None] > of
    return ((own & (part[:, None] == part)) | (earlier & (part == 0)))[None, None]


@register("masked")
@dataclass(frozen=True)
class Masked(Objective):
    schedule: Literal["linear", "cosine-a", "cosine-b", "polynomial"] = "linear"
    power: float = 2.0
    """Of the polynomial schedule."""
    block: int | None = None
    """Tokens of a block; default: a text is one."""

    causal = False
    head = "LangevinForMaskedLM"
    extra_tokens = 1
    likelihood = "bound"
    criterion = staticmethod(weighted_losses)

    def __post_init__(self) -> None:
        if not self.power > 0:
            raise UsageError(f"{self.name}(power={self.power}) must be positive")
        if self.block is not None and self.block < 1:
            raise UsageError(f"{self.name}(block={self.block}) must be 1 or more")
        if self.block is not None and self.schedule != "linear":
            raise UsageError(
                f"blocks are masked by counts, and know no schedule such as {self.schedule}",
                "Leave schedule or block out.",
            )

    def check(self, config: TrainConfig) -> None:
        if self.power != Masked.power and self.schedule != "polynomial":
            raise UsageError(
                f"{self.name}(power={self.power}) changes nothing in a schedule that is {self.schedule}",
                "Leave power out, or give schedule='polynomial'.",
            )
        if config.init is not None:
            raise UsageError(
                f"{self.name} has no --init: it trains a model that sees both sides from its beginning",
                "Leave --init out.",
            )
        if self.block is None:
            return
        if config.context % self.block:
            raise UsageError(
                f"blocks of {self.block} do not fill a context of {config.context}",
                "Choose a block that divides the context.",
            )
        for spec in (parse(text.strip()) for text in config.mixer.split(";")):
            if not getattr(spec.mixer, "takes_blocks", False):
                raise UsageError(
                    f"{spec} does not see a text in blocks: more counts for it than keys and values",
                    "Choose softmax, ssmax, sigmoid or heat without alpha, or leave block out.",
                )
        if config.positions == "alibi":
            raise UsageError(
                "alibi positions are distances, which a text that is read twice does not have",
                "Choose other positions, or leave block out.",
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
        """A time from 0 to 1 for each row or block, each from a stratum of its own, and noise for each
        token."""
        L = batch["tokens"].shape[1] - 1
        shape = (rows,) if self.block is None else (rows, math.ceil(L / self.block))
        strata = torch.randperm(math.prod(shape), generator=generator).view(shape)
        times = (strata + torch.rand(shape, generator=generator)) / strata.numel()
        return {"times": times, "noise": torch.rand(rows, L, generator=generator)}

    def loss(
        self, model: Any, batch: Batch, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor | int]:
        batch = self._with_draws(batch, generator)
        scored_BL = scored(batch)
        count = scored_BL.sum() if "scored" in batch else scored_BL.numel()
        if not model.training:
            return self.upper_bound(model, batch).sum(), count
        if self.block is None:
            times = batch["times"].clamp_min(LEAST_TIME)[:, None]
            masked_BL, weight = (batch["noise"] < self.masked_share(times)) & scored_BL, self.weight(times)
        else:
            masked_BL, weight = self._counted(batch)
        losses_BL = self.criterion(*self.predicted(model, batch, masked_BL), masked_BL, weight)
        return losses_BL.sum(), count

    def upper_bound(self, model: Any, batch: Batch, generator: torch.Generator | None = None) -> Tensor:
        batch = self._with_draws(batch, generator)
        masked_BL, weight_BL = self._counted(batch)
        return weighted_losses(*self.predicted(model, batch, masked_BL), masked_BL, weight_BL)

    def _counted(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Masks and weights of the count form in every block, (B, L)."""
        scored_BL = scored(batch)
        B, L = scored_BL.shape
        noise_BMN, scored_BMN = in_blocks(batch["noise"], self.block), in_blocks(scored_BL, self.block)
        masked_BMN, weight_BM = fewest_masked(noise_BMN, scored_BMN, batch["times"].view(B, -1))
        weight_BMN = weight_BM[..., None].expand(masked_BMN.shape)
        return masked_BMN.flatten(1)[:, :L], weight_BMN.flatten(1)[:, :L]

    def chain_rule(self, model: Any, batch: Batch, at_once: int) -> Tensor:
        """-ln p(x_i | x_<i): a pass for each place in a block, in which all that is to the right of it in
        the block is masked."""
        scored_BL = scored(batch)
        found_BL = torch.zeros(scored_BL.shape, device=scored_BL.device)
        place_L = torch.arange(scored_BL.shape[1], device=scored_BL.device) % (
            self.block or len(found_BL[0])
        )
        for some in in_blocks(scored_BL, self.block).any(1).nonzero().split(at_once):
            row_R, at_R = some.T
            rows = {name: x[row_R] for name, x in batch.items()}
            later_RL = (place_L >= at_R[:, None]) & scored_BL[row_R]
            asked_RL = (place_L == at_R[:, None]) & scored_BL[row_R]
            logits_RLV, x_RL = self.predicted(model, rows, later_RL)
            losses_RL = weighted_losses(logits_RLV, x_RL, asked_RL, torch.ones_like(found_BL[:1]))
            found_BL.index_add_(0, row_R, losses_RL.to(found_BL.dtype))
        return found_BL

    def predicted(self, model: Any, batch: Batch, masked_BL: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
        """Logits (B, L, V) of a batch in which some tokens are masked, and the tokens (B, L); more is what
        else the model reads."""
        x_BL = batch["tokens"][:, 1:]
        places = {name: batch[name][:, 1:] for name in ("position_ids",) if name in batch}
        if self.block is None:
            return model(input_ids=x_BL, masked=masked_BL, **places, **more).logits, x_BL
        if places:
            raise UsageError(
                "blocks cannot tell packed documents apart", "Leave position_ids or block out."
            )
        L, device = x_BL.shape[1], x_BL.device
        out = model(
            input_ids=torch.cat([x_BL, x_BL], 1),
            masked=F.pad(masked_BL, (L, 0)),
            position_ids=torch.arange(L, device=device).repeat(2)[None],
            attention_mask=two_parts(L, self.block, device),
            logits_to_keep=L,
        )
        return out.logits, x_BL

    def flops(self, model: Any, context: int) -> float:
        return flops_of(model, context, self.block)

    @classmethod
    def sampling(cls) -> type[Any]:
        from langevin.sampling.masked import MaskedSampling

        return MaskedSampling

    def check_sampling(self, sampling: Any) -> None:
        from langevin.sampling.masked import refuse_sweeps

        refuse_sweeps(sampling, self.block)

    def sampler(self) -> partial[Any]:
        from langevin.sampling.masked import generate

        return partial(generate, masked_share=self.masked_share, block=self.block)

    @torch.no_grad()
    def repaired(self, model: Any, tokens_BL: Tensor, sampling: Any) -> Tensor | None:
        """Of a sampler that remasks: where the rest of a text speaks against a token, it is opened and
        written anew. Sweeps go over all of it."""
        if self.block is not None or (sampling.remask == "none" and not sampling.sweeps):
            return None
        from langevin.sampling.masked import rewritten

        sampler: Any = self.sampler()
        write: Any = partial(rewritten, model, **sampler.keywords)
        if sampling.remask != "none":
            wrong_BL = self._against(model, tokens_BL) > 0
            tokens_BL = write(tokens_BL, wrong_BL, replace(sampling, sweeps=0))
        if sampling.sweeps:
            all_BL = torch.ones_like(tokens_BL, dtype=torch.bool)
            tokens_BL = write(tokens_BL, ~all_BL, replace(sampling, remask="none"), asked_BL=all_BL)
        return tokens_BL

    def _against(self, model: Any, tokens_BL: Tensor) -> Tensor:
        """log p(x_i | nothing) - log p(x_i | rest), rest: without x_i and an eighth of the others."""
        batch = self._with_draws({"tokens": F.pad(tokens_BL, (1, 0))}, generator_of(0))
        turn_BL = batch["noise"].argsort(-1).argsort(-1) % TURNS

        def surprise(masked_BL: Tensor) -> Tensor:
            ones_BL = torch.ones_like(batch["noise"])
            return weighted_losses(*self.predicted(model, batch, masked_BL), masked_BL, ones_BL)

        against_BL = -surprise(torch.ones_like(turn_BL, dtype=torch.bool))
        for turn in range(TURNS):
            against_BL += surprise(turn_BL == turn)
        return against_BL

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
