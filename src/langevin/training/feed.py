"""Tokens for the device: the whole text where it fits, batch by batch where it does not.

B rows of this process, L context.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from langevin.data import Corpus, order
from langevin.training.config import TrainConfig
from langevin.training.parallel import World


class Feed:
    """`put(step)` hands a batch over without waiting, `batch()` is what the device makes of it."""

    def __init__(self, config: TrainConfig, corpus: Corpus, device: torch.device, world: World) -> None:
        self.config, self.corpus, self.device, self.world = config, corpus, device, world
        rows = config.batch // world.size
        tokens = len(corpus.tokens("train"))
        self.count = min(tokens, config.train_tokens or tokens)
        looked_at = max(config.eval_tokens, config.context) + 1
        self.valid = corpus.device_tokens("valid", device, first=looked_at)
        self.train: Tensor | None = None
        if 4 * self.count <= room_for_tokens(device):
            self.train = corpus.device_tokens("train", device, first=self.count)
        self.starts = torch.zeros(rows, dtype=torch.long, device=device)
        self.held = torch.zeros(rows, config.context + 1, dtype=torch.long, device=device)
        # The first eval_tokens validation tokens in windows without overlap, in batches (B, L + 1).
        windows = max(1, min(config.eval_tokens, len(self.valid) - 1) // config.context)
        starts = torch.arange(windows) * config.context
        self.held_out = [self.gather(self.valid, part) for part in starts.split(config.batch)]

    def windows(self, step: int) -> np.ndarray:
        """Where the windows of a step start, over all processes."""
        config = self.config
        return self.corpus.windows(
            "train",
            step,
            seed=config.seed,
            batch=config.batch,
            context=config.context,
            first=config.train_tokens,
        )

    def put(self, step: int) -> None:
        """Hand over where the windows of a step start, or their tokens where the text is not there."""
        starts = self.world.share(self.windows(step))
        if self.train is not None:
            self.starts.copy_(torch.from_numpy(starts), non_blocking=True)
        else:
            where = order.windows(self.count, starts, self.config.context + 1)
            rows = self.corpus.tokens("train")[where].astype(np.int64)
            self.held.copy_(torch.from_numpy(rows), non_blocking=True)

    def batch(self) -> Tensor:
        """The batch that was put last, (B, L + 1)."""
        return self.held if self.train is None else self.gather(self.train, self.starts)

    def gather(self, tokens: Tensor, starts: Tensor) -> Tensor:
        """Windows of L + 1 tokens, gathered on the device."""
        index = starts.to(self.device)[:, None]
        index = index + torch.arange(self.config.context + 1, device=self.device)
        return tokens[index % len(tokens)].long()


def room_for_tokens(device: torch.device) -> int:
    """Bytes that the training text may take on a device: a quarter of a GPU's free memory."""
    if device.type != "cuda":
        return 2**32
    return torch.cuda.mem_get_info(device)[0] // 4
