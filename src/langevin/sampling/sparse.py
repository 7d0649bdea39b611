"""Texts from sparse distribution diffusion: the steps and orders of `masked`, with candidates in the state.

Candidates are only read: tokens are drawn from predictions, and committed, as in `masked`. B texts, L
positions, K candidates, R random numbers of a position.
"""

from typing import Any

import torch

from langevin.kernels.view import wide
from langevin.objectives.sparse import likeliest, slots
from langevin.sampling.denoising import Denoising
from langevin.sampling.orders import uniform

FIRST = 1 << 24  # of the counters of candidates: below it are those of commits


class SoftDenoising(Denoising):
    """Open positions carry the k likeliest tokens of the last call in which they were open, if any."""

    def __init__(self, *args: Any, k: int, **options: Any) -> None:
        self.k = k
        super().__init__(*args, **options)
        none_BLK = torch.zeros(
            *self.ids_BL.shape, k, device=self.model.device, dtype=wide(self.model.dtype)
        )
        self.carried = {"candidates": none_BLK.long(), "probabilities": none_BLK}
        self.predicted_BL = torch.zeros_like(self.asked_BL)  # open in the call that the logits are of

    def inputs(self, some_B: Any) -> dict[str, Any]:
        read = super().inputs(some_B)
        if self.logits_BLV is not None:
            predicted_BL1 = self.predicted_BL[some_B][..., None]
            for name, found in likeliest(self.logits_BLV[some_B], self.k).items():
                held = self.carried[name]
                held[some_B] = torch.where(predicted_BL1, found, held[some_B])
        open_BL, stale_B1 = read["input_ids"] == self.mask, self.stale_B[some_B][:, None]
        self.predicted_BL[some_B] = torch.where(stale_B1, open_BL, self.predicted_BL[some_B])
        return {**read, **{name: held[some_B] for name, held in self.carried.items()}}


class FullDenoising(Denoising):
    """All positions are candidates: what is committed, among new distractors at every call, and noise."""

    replays = False

    def __init__(self, *args: Any, k: int, **options: Any) -> None:
        self.k = k
        super().__init__(*args, **options)

    def inputs(self, some_B: Any) -> dict[str, Any]:
        ids_BL, real_BL = self.ids_BL[some_B], self.real_BL[some_B]
        R = 2 * self.k + 1
        number_LR = self.place_L[:, None] * R + torch.arange(R, device=ids_BL.device)
        random = uniform(self.seed_B[some_B], number_LR.flatten(), FIRST + self.taken)
        open_BL = (ids_BL == self.mask) & real_BL
        level_B = (open_BL.sum(-1) / real_BL.sum(-1)).sqrt()
        return slots(ids_BL, open_BL, level_B, random.unflatten(1, (-1, R)), self.mask)
