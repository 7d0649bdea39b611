"""Training images changed at random, in batches on the device, and the feed that hands them over.

What becomes of an image is a function of sixteen uniform numbers, and these are one of (seed, step):

    moved, turned, mirrored    one linear map of its places, bilinear between pixels; what comes in at the
                               edge is its mirror image
    coloured                   b x,  then  m + c (x - m)  about its mean m,  then  g + s (x - g)  about the
                               grey g of each pixel, with b, c and s in 1 ± colour
    erased                     a grey square of up to half the side
    mixed                      M x + (1 - M) x'  with the other one x' of a pair of rows; half of them blend
                               (M = λ everywhere), half have a rectangle of x' (M = 0 there)

λ is uniform. A mixed image has both labels, in the shares mean(M) and 1 - mean(M).

B images, H height, W width; bytes or numbers from 0 to 255.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from langevin.data import order
from langevin.data.feed import Feed, fits
from langevin.data.images import LabelledImages
from langevin.settings import TrainConfig

DRAWN = 16  # uniform numbers for each image
GREY = 128.0


@dataclass(frozen=True)
class Changes:
    """crop: pixels an image is moved by, at most; turn: degrees; colour: how much brightness, contrast and
    saturation change; erase, mix: the share of images of which a part is hidden, or that are mixed."""

    crop: int = 0
    flip: bool = False
    turn: float = 0.0
    colour: float = 0.0
    erase: float = 0.0
    mix: float = 0.0

    def __call__(self, images_B3HW: Tensor, drawn_BN: Tensor) -> tuple[Tensor, Tensor]:
        """Changed images, and the share (B,) that each has of its own label."""
        x, u = images_B3HW.float(), drawn_BN.unbind(1)
        if self.crop or self.flip or self.turn:
            x = self._placed(x, *u[:4])
        if self.colour:
            x = self._coloured(x, *u[4:7])
        if self.erase:
            side = u[8] / 4  # half of it
            hidden = _rectangle(x, u[9], u[10], torch.where(u[7] < self.erase, side, 0.0))
            x = torch.where(hidden, GREY, x)
        if not self.mix:
            return x, torch.ones_like(u[0])
        blend, cut = u[11] < self.mix / 2, (u[11] >= self.mix / 2) & (u[11] < self.mix)
        corner = _rectangle(x, u[13], u[14], torch.where(cut, (1 - u[12]).sqrt() / 2, 0.0))
        mask = torch.where(blend[:, None, None, None], u[12][:, None, None, None], (~corner).float())
        return mask * x + (1 - mask) * x[other_of_pair(x)], mask.mean((1, 2, 3))

    def _placed(self, x: Tensor, right: Tensor, down: Tensor, turn: Tensor, flip: Tensor) -> Tensor:
        angle = torch.deg2rad(self.turn * (2 * turn - 1))
        mirror = torch.where(flip < 0.5, -1.0, 1.0) if self.flip else torch.ones_like(flip)
        steps = [torch.floor((2 * self.crop + 1) * u) - self.crop for u in (right, down)]
        across, along = 2 * steps[0] / x.shape[3], 2 * steps[1] / x.shape[2]
        cos, sin = angle.cos(), angle.sin()
        rows = [torch.stack([cos * mirror, -sin, across], 1), torch.stack([sin * mirror, cos, along], 1)]
        grid = F.affine_grid(torch.stack(rows, 1), list(x.shape), align_corners=False)
        return F.grid_sample(x, grid, padding_mode="reflection", align_corners=False)

    def _coloured(self, x: Tensor, *u: Tensor) -> Tensor:
        bright, contrast, saturation = (1 + self.colour * (2 * v - 1)[:, None, None, None] for v in u)
        x = x * bright
        mean = x.mean((1, 2, 3), keepdim=True)
        x = mean + contrast * (x - mean)
        grey = x.mean(1, keepdim=True)
        return (grey + saturation * (x - grey)).clamp(0, 255)


def _rectangle(x: Tensor, right: Tensor, down: Tensor, half: Tensor) -> Tensor:
    """(B, 1, H, W): True in a square about a random place, of so many half sides (as a share of a side)."""
    inside = []
    for size, centre in ((x.shape[2], down), (x.shape[3], right)):
        place = (torch.arange(size, device=x.device) + 0.5) / size
        inside.append((place - centre[:, None]).abs() < half[:, None])
    return (inside[0][:, :, None] & inside[1][:, None, :])[:, None]


def other_of_pair(x_B: Tensor) -> Tensor:
    """(B,): with which row each is mixed, 1 0 3 2 ...; the same in every part of a batch that is even."""
    return (torch.arange(len(x_B), device=x_B.device) ^ 1).clamp_max(len(x_B) - 1)


class ImageFeed(Feed):
    """Images are gathered and changed on the device, where all of them live if they fit."""

    def __init__(
        self,
        config: TrainConfig,
        data: LabelledImages,
        changes: Changes,
        held_out: list[dict[str, np.ndarray]],
        device: torch.device,
        share: Any,
    ) -> None:
        self.config, self.data, self.share, self.device = config, data, share, device
        self.change = torch.compile(changes, dynamic=False) if config.compile == "on" else changes
        self.mixes = bool(changes.mix)
        images = torch.from_numpy(data.images("train").copy())
        self.here = device.type == "cpu" or fits(device, images.numel())
        self.train = images.to(device) if self.here else images
        self.labels = torch.from_numpy(data.labels("train")).to(device)
        self.weights = torch.from_numpy(data.weights).to(device)
        self.rows = len(share(range(config.batch)))
        self.chosen = torch.zeros(self.rows, dtype=torch.long, device=device)
        self.gathered = torch.zeros(self.rows, *images.shape[1:], dtype=torch.uint8, device=device)
        self.drawn = torch.zeros(self.rows, DRAWN, device=device)
        self.put(0)
        self.held_out = [{k: torch.from_numpy(v).to(device) for k, v in part.items()} for part in held_out]

    def put(self, step: int) -> None:
        seed, batch = self.config.seed, self.config.batch
        rows = torch.from_numpy(self.share(self.data.examples(step, seed=seed, batch=batch)))
        drawn = torch.from_numpy(self.share(order.uniforms(batch, DRAWN, seed, step, 2)))
        self._copy(self.chosen, rows)
        self._copy(self.drawn, drawn)
        if not self.here:
            self._copy(self.gathered, self.train[rows])

    def _copy(self, place: Tensor, x: Tensor) -> None:
        place.copy_(x.pin_memory() if self.device.type == "cuda" else x, non_blocking=True)

    def batch(self) -> dict[str, Tensor]:
        labels = self.labels[self.chosen]
        images, share = self.change(self.train[self.chosen] if self.here else self.gathered, self.drawn)
        batch = {"pixel_values": images, "labels": labels, "weights": self.weights[labels]}
        if not self.mixes:
            return batch
        pair = other_of_pair(labels)
        others = {"other_labels": labels[pair], "other_weights": batch["weights"][pair]}
        return {**batch, **others, "share": share}
