"""Batches for the device: `put(step)` hands one over without waiting, `batch()` is what came of it there.

What a step reads stays in its place, so that steps can be replayed as CUDA graphs. B rows of this process,
L context.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from langevin.data import order

Arrays = dict[str, np.ndarray]


class Feed:
    """Batches that are made on the host, by `make(step)` for all processes; none is larger than that of
    the step `widest`."""

    widest: int = 0
    shape: Any = None  # of the batch that was put, where they differ

    def __init__(
        self,
        make: Callable[[int], Arrays],
        held_out: list[Arrays],
        device: torch.device,
        share: Callable[[Any], Any],
        widest: int = 0,
    ) -> None:
        self.make, self.device, self.share, self.widest = make, device, share, widest
        self.places: dict[tuple[torch.Size, ...], dict[str, Tensor]] = {}  # one for batches of each shape
        self.put(0)
        self.held_out = [{k: torch.from_numpy(v).to(device) for k, v in part.items()} for part in held_out]
        self.rows = len(next(iter(self.batch().values())))

    def put(self, step: int) -> None:
        mine = {name: torch.from_numpy(self.share(value)) for name, value in self.make(step).items()}
        self.shape = tuple(x.shape for x in mine.values())
        if self.shape not in self.places:
            self.places[self.shape] = {name: x.to(self.device) for name, x in mine.items()}
        for name, x in mine.items():
            x = x.pin_memory() if self.device.type == "cuda" else x
            self.places[self.shape][name].copy_(x, non_blocking=True)

    def batch(self) -> dict[str, Tensor]:
        return self.places[self.shape]

    def where(self, step: int) -> str:
        """Where the rows of a step come from, for whoever looks for what broke it."""
        return f"the batch of step {step}"


class TokenFeed(Feed):
    """Windows of a text: gathered on a GPU where the whole text fits there, else on the host."""

    def __init__(self, config: Any, corpus: Any, masked: bool, device: torch.device, share: Any) -> None:
        self.config, self.corpus, self.device, self.share = config, corpus, device, share
        self.masked = masked
        tokens = len(corpus.tokens("train"))
        self.count = min(tokens, config.train_tokens or tokens)
        self.rows = len(share(range(config.batch)))
        self.train: Tensor | None = None
        if fits(device, 4 * self.count):
            self.train = corpus.device_tokens("train", device, first=self.count)
        self.starts = torch.zeros(self.rows, dtype=torch.long, device=device)
        self.held_tokens = torch.zeros(self.rows, config.context + 1, dtype=torch.long, device=device)
        # The first eval_tokens validation tokens in windows without overlap.
        valid = corpus.tokens("valid")
        windows = max(1, min(config.eval_tokens, len(valid) - 1) // config.context)
        rows = corpus.rows("valid", np.arange(windows) * config.context, config.context + 1)
        looked_at = torch.from_numpy(rows).to(device)
        self.held_out = [self._laid_out(part) for part in looked_at.split(config.batch)]

    def windows(self, step: int) -> np.ndarray:
        """Where the windows of a step start, over all processes."""
        config = self.config
        return order.window_starts(
            self.count, step, seed=config.seed, batch=config.batch, context=config.context
        )

    def put(self, step: int) -> None:
        """Hand over where the windows of a step start, or their tokens where the text is not there."""
        starts = self.share(self.windows(step))
        if self.train is not None:
            self.starts.copy_(torch.from_numpy(starts), non_blocking=True)
        else:
            rows = self.corpus.rows("train", starts, self.config.context + 1, self.count)
            self.held_tokens.copy_(torch.from_numpy(rows), non_blocking=True)

    def batch(self) -> dict[str, Tensor]:
        if self.train is None:
            return self._laid_out(self.held_tokens)
        index = self.starts[:, None] + torch.arange(self.config.context + 1, device=self.device)
        return self._laid_out(self.train[index % len(self.train)].long())

    def _laid_out(self, tokens: Tensor) -> dict[str, Tensor]:
        """Tokens (B, L + 1), with positions that start anew at documents where these are told apart."""
        batch, scored = {"tokens": tokens}, self.corpus.scored(tokens)
        if self.masked:
            batch["position_ids"] = self.corpus.position_ids(tokens)
        return batch if scored is None else {**batch, "scored": scored}

    def where(self, step: int) -> str:
        return f"windows starting at {[int(s) for s in self.windows(step)[:4]]} ..."


def fits(device: torch.device, size: int) -> bool:
    """Whether a text of so many bytes may live on the device: a quarter of a GPU's free memory. A CPU maps
    it from its file."""
    return device.type == "cuda" and size <= torch.cuda.mem_get_info(device)[0] // 4


def chunks(batch: dict[str, Tensor], parts: int) -> list[dict[str, Tensor]]:
    """A batch in equal parts."""
    split = {name: x.chunk(parts) for name, x in batch.items()}
    return [dict(zip(split, part, strict=True)) for part in zip(*split.values(), strict=True)]
