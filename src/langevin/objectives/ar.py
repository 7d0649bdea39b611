"""Autoregression: predict the next token.

    loss = - Σ_i m_i ln p(x_{i+1} | x_1 .. x_i)  /  Σ_i m_i

B batch, T tokens, L = T - 1 predictions, V vocabulary. `shift` is the only place where inputs and targets
are moved against each other: models take inputs and return logits at the same positions, and training and
evaluation compare those logits with these targets as they stand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from langevin.errors import UsageError
from langevin.kernels.view import wide
from langevin.objectives.objective import Batch, Objective, register

# Tokens (B, L + 1); scored (B, L), True where a target counts; perhaps the unit (document) of each target.
Windows = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]

_NO_TARGET = -100  # what cross_entropy leaves out


def shift(tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
    """(inputs, targets), both (B, T - 1): the target at position i is token i + 1."""
    if tokens_BT.ndim != 2 or tokens_BT.shape[1] < 2:
        raise UsageError(
            f"tokens have shape {tuple(tokens_BT.shape)}, expected (batch, 2 or more)",
            "A prediction needs a token to start from and one to predict.",
        )
    return tokens_BT[:, :-1], tokens_BT[:, 1:]


def summed_loss(
    logits_BLV: Tensor, targets_BL: Tensor, scored_BL: Tensor | None = None
) -> tuple[Tensor, Tensor | int]:
    """The negative log-likelihood of the targets that are scored, in nats and in float32 or better, and how
    many there are."""
    if logits_BLV.shape[:2] != targets_BL.shape:
        raise UsageError(
            f"logits {tuple(logits_BLV.shape)} do not fit targets {tuple(targets_BL.shape)}",
            "Both come from one shift: logits = model(inputs), with inputs, targets = shift(tokens).",
        )
    if scored_BL is not None:
        targets_BL = torch.where(scored_BL, targets_BL, _NO_TARGET)
    logits = logits_BLV.flatten(0, 1)
    logits = logits.to(wide(logits.dtype))
    summed = F.cross_entropy(logits, targets_BL.flatten(), ignore_index=_NO_TARGET, reduction="sum")
    return summed, targets_BL.numel() if scored_BL is None else scored_BL.sum()


def predicted(model: Any, batch: Batch, **options: Any) -> tuple[Any, Tensor, Tensor | None]:
    """What the model puts out for a batch, the targets, and which of them count (None: all).

    The batch holds tokens (B, T); perhaps position_ids (B, T), which start anew where attention must not
    look back, and scored (B, T), False where a token is not to be predicted.
    """
    inputs, targets = shift(batch["tokens"])
    places = {name: batch[name][:, :-1] for name in ("position_ids",) if name in batch}
    out = model(input_ids=inputs, use_cache=False, **places, **options)
    return out, targets, batch["scored"][:, 1:] if "scored" in batch else None


@register("ar")
@dataclass(frozen=True)
class Autoregression(Objective):
    likelihood = "exact"
    criterion: ClassVar[Callable[..., Any]] = staticmethod(summed_loss)

    def loss(
        self, model: Any, batch: Batch, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor | int]:
        out, targets, scored = predicted(model, batch)
        return self.criterion(out.logits, targets, scored)

    def sampler(self) -> Callable[..., Any]:
        from langevin.sampling.ar import generate

        return generate


def stride_of(length: int, stride: int | None, batch: int) -> int:
    """How far windows of `length` predictions move on (default: without overlap); raises where tokens would
    be left out."""
    if length < 1 or batch < 1:
        raise UsageError(f"length={length} and batch={batch} must be 1 or more")
    stride = length if stride is None else stride
    if not 1 <= stride <= length:
        raise UsageError(
            f"stride={stride} must be between 1 and the length, {length}",
            "A longer stride would leave tokens out.",
        )
    return stride


@dataclass(frozen=True, eq=False)
class Strided:
    """A text as overlapping windows in which each token but the first is scored exactly once.

    A window holds `length` predictions and starts `stride` tokens after the one before, so a scored token
    sees at least length - stride tokens of context (at the start of the text, all there is). The last
    window ends with the text. Tokens are resampled in blocks of `length`, whatever the stride.
    """

    tokens: Tensor
    length: int
    stride: int | None = None  # default: length, without overlap
    batch: int = 8
    counts: Callable[[Tensor], Tensor | None] = lambda targets: None  # which targets are asked for; all

    def __post_init__(self) -> None:
        if self.tokens.ndim != 1 or len(self.tokens) < 2:
            raise UsageError(
                f"tokens have shape {tuple(self.tokens.shape)}, expected (2 or more,)",
                "Pass the text as one row; a prediction needs a token to start from.",
            )
        stride_of(self.length, self.stride, self.batch)

    @property
    def step(self) -> int:
        return stride_of(self.length, self.stride, self.batch)

    def starts(self) -> list[int]:
        last = max(0, len(self.tokens) - 1 - self.length)
        return [*range(0, last, self.step), last]

    def __len__(self) -> int:
        return math.ceil(len(self.starts()) / self.batch)

    def __iter__(self) -> Iterator[Windows]:
        length = min(self.length, len(self.tokens) - 1)
        starts = torch.tensor(self.starts(), device=self.tokens.device)
        place = torch.arange(length + 1, device=self.tokens.device)
        done = torch.cat([starts.new_zeros(1), starts[:-1] + length])  # the first target left to score
        for first, fresh in zip(starts.split(self.batch), done.split(self.batch), strict=True):
            positions = first[:, None] + place
            predicted = positions[:, :-1]
            tokens, scored = self.tokens[positions].long(), predicted >= fresh[:, None]
            asked = self.counts(tokens[:, 1:])
            yield tokens, scored if asked is None else scored & asked, predicted // self.length
