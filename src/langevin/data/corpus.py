"""A prepared text: tokens on disk, their tokenizer, and the order in which they are used."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from langevin.data import order
from langevin.data.texts import SPLITS
from langevin.errors import unknown

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

A = TypeVar("A", np.ndarray, "torch.Tensor")


@dataclass(frozen=True, eq=False)
class Corpus:
    """The splits train, valid and test as flat streams of tokens.

    Documents, where there are any, each end with the tokenizer's eos token.
    """

    folder: Path
    manifest: dict[str, Any]

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.folder / "tokenizer", local_files_only=True)

    @property
    def vocab_size(self) -> int:
        return int(self.manifest["tokenizer"]["vocab_size"])

    @property
    def eos(self) -> int:
        """The id of the token that ends a document."""
        return int(self.manifest["tokenizer"]["eos"])

    @property
    def separator(self) -> int:
        return self.eos

    def position_ids(self, tokens: A) -> A:
        import torch

        here = torch.arange(tokens.shape[-1], device=tokens.device).expand(tokens.shape)
        starts = torch.where(tokens == self.separator, here, 0).cummax(-1).values
        return here - starts

    def scored(self, tokens: A) -> A | None:
        return None

    def scored_text(self, split, limit):
        tokens = self.tokens(split)
        first = self.tokenizer.decode(tokens[:1].tolist(), skip_special_tokens=True)
        if limit is None or limit >= len(tokens):
            size = self.manifest["splits"][split]
            return size["characters"] - len(first), size["bytes"] - len(first.encode())
        text = self.tokenizer.decode(tokens[:limit].tolist(), skip_special_tokens=True)
        return len(text) - len(first), len(text.encode()) - len(first.encode())

    @property
    def has_documents(self) -> bool:
        return bool(self.manifest["documents"])

    def tokens(self, split: str) -> np.memmap:
        """All tokens of a split, in order (uint16 or uint32, on disk)."""
        if split not in SPLITS:
            raise unknown("split", split, SPLITS)
        return self._tokens[split]

    @cached_property
    def _tokens(self) -> dict[str, np.memmap]:
        dtype = np.dtype(self.manifest["dtype"])
        return {split: np.memmap(self.folder / f"{split}.bin", dtype, mode="r") for split in SPLITS}

    def documents(self, split: str) -> np.ndarray:
        """Where each document starts in the stream; [0] for a text without documents."""
        if not self.has_documents:
            return np.zeros(1, np.int64)
        ends = np.flatnonzero(self.tokens(split) == self.eos)
        return np.concatenate([np.zeros(1, np.int64), ends[:-1] + 1])

    def true_nats_per_token(self, split: str) -> float | None:
        """The loss of the distribution that the split was drawn from, where that is known."""
        known = self.manifest.get("true_entropy")
        return None if known is None else float(known[split]["nats_per_token"])

    def windows(
        self, split: str, step: int, *, seed: int, batch: int, context: int, first: int | None = None
    ) -> np.ndarray:
        """Where the windows of a training step start: int64 (batch,). See `order` for the rule.

        A window is the `context + 1` tokens from its start, round the circle: a slice of
        `device_tokens(split, device, wrap=context)`. `first` makes the circle of the first so many tokens.
        """
        count = min(len(self.tokens(split)), first or len(self.tokens(split)))
        return order.window_starts(count, step, seed=seed, batch=batch, context=context)

    def batch_indices(self, split: str, step: int, *, seed: int, batch: int, context: int) -> np.ndarray:
        """The positions in the split of the tokens of a training batch: int64 (batch, context + 1)."""
        starts = self.windows(split, step, seed=seed, batch=batch, context=context)
        return order.windows(len(self.tokens(split)), starts, context + 1)

    def batch(self, split: str, step: int, *, seed: int, batch: int, context: int) -> np.ndarray:
        """The tokens of a training batch: int64 (batch, context + 1), a pure function of (seed, step)."""
        where = self.batch_indices(split, step, seed=seed, batch=batch, context=context)
        return self.tokens(split)[where].astype(np.int64)

    def device_tokens(
        self, split: str, device: str | torch.device, wrap: int = 0, first: int | None = None
    ) -> torch.Tensor:
        """A split, or its first tokens, as one int32 tensor on a device, then `wrap` of them again."""
        import torch

        tokens = self.tokens(split)[:first]
        whole = np.concatenate([tokens, np.resize(tokens, wrap)]).astype(np.int32)
        return torch.from_numpy(whole).to(device)

    def document_ids(self, tokens: A) -> A:
        """Which document each token of a window belongs to, for `documents=` masks.

        Counted from 0 in each row; an eos is the last token of its document. Takes and gives numpy arrays
        or torch tensors (..., length).
        """
        ends = tokens == self.eos
        return ends.cumsum(-1) - 1 * ends
