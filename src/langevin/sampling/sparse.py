"""Texts from sparse distribution diffusion: the steps and orders of `masked`, with candidates in the state.

Candidates are only read: tokens are drawn from predictions, and committed, as in `masked`. B texts, L
positions, K candidates.
"""

from typing import Any

import torch
from torch import Tensor

from langevin.objectives.objective import generator_of
from langevin.objectives.sparse import likeliest, slots
from langevin.sampling.masked import Denoising


class SoftDenoising(Denoising):
    """Open positions carry the k likeliest tokens of the call before, if they were open then."""

    def __init__(self, *args: Any, k: int, **options: Any) -> None:
        self.k = k
        super().__init__(*args, **options)
        self.predicted_BL = torch.zeros_like(self.asked_BL)

    def inputs(self, some_B: Any) -> dict[str, Tensor]:
        read = super().inputs(some_B)
        if self.logits_BLV is None:
            none_BLK = torch.zeros(*read["input_ids"].shape, self.k, device=self.model.device)
            carried = {"candidates": none_BLK.long(), "probabilities": none_BLK}
        else:
            carried = likeliest(self.logits_BLV[some_B], self.k)
            carried["probabilities"] *= self.predicted_BL[some_B][..., None]
        self.predicted_BL[some_B] = read["input_ids"] == self.mask
        return {**read, **carried}


class FullDenoising(Denoising):
    """All positions are candidates: what is committed, among new distractors at every call, and noise."""

    replays = False

    def __init__(self, *args: Any, k: int, **options: Any) -> None:
        self.k = k
        super().__init__(*args, **options)

    def inputs(self, some_B: Any) -> dict[str, Tensor]:
        ids_BL, real_BL = self.ids_BL[some_B], self.real_BL[some_B]
        random_BLR = torch.zeros(*ids_BL.shape, 2 * self.k + 1)
        for to, row in zip(random_BLR, some_B.nonzero().flatten().tolist(), strict=True):
            numbers = to[: self.lengths[row]]
            numbers.copy_(torch.rand(numbers.shape, generator=generator_of(self.seeds[row], self.taken)))
        open_BL = (ids_BL == self.mask) & real_BL
        level_B = (open_BL.sum(-1) / real_BL.sum(-1)).sqrt()
        return slots(ids_BL, open_BL, level_B, random_BLR.to(ids_BL.device), self.mask)
