"""A prepared text: tokens on disk, their tokenizer, and the order in which they are used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from langevin.data import order
from langevin.data.texts import SPLITS
from langevin.data.tokenizers import load_tokenizer
from langevin.errors import unknown

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

BLOCK = 1 << 24
"""Tokens that are brought to a device at once."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """The splits train, valid and test as flat streams of tokens.

    Documents, where there are any, are divided by one token, the separator: each ends with the tokenizer's
    eos, or begins with its bos where the tokenizer puts one before every text. Either way a document is
    read from the separator before it on: attention and positions begin anew there.
    """

    folder: Path
    manifest: dict[str, Any]

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        return load_tokenizer(self.folder / "tokenizer")

    @property
    def vocab_size(self) -> int:
        return int(self.manifest["tokenizer"]["vocab_size"])

    @property
    def separator(self) -> int:
        """The id of the token between documents: eos, or bos."""
        return int(self.manifest["separator"])

    @property
    def begins_with_bos(self) -> bool:
        """Whether documents are `bos text`, else `text eos`."""
        return bool(self.manifest["layout"] == "bos text")

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
        separators = np.flatnonzero(self.tokens(split) == self.separator)
        return separators if self.begins_with_bos else np.concatenate([[0], separators[:-1] + 1])

    def text_size(self, split: str, start: int = 0, stop: int | None = None) -> tuple[int, int]:
        """Characters and bytes of the text behind tokens[start:stop] of valid or test.

        A character counts with its first token; separators have none, unknown characters count.
        """
        if split not in SPLITS[1:]:
            raise unknown("split with sizes", split, SPLITS[1:])
        pairs = np.memmap(self.folder / f"{split}.sizes", "<u2", mode="r").reshape(-1, 2)
        characters, utf8_bytes = pairs[start:stop].sum(0, dtype=np.int64)
        return int(characters), int(utf8_bytes)

    def true_nats_per_token(self, split: str) -> float | None:
        """The loss of the distribution that the split was drawn from, where that is known."""
        known = self.manifest.get("true_entropy")
        return None if known is None else float(known[split]["nats_per_token"])

    def rows(self, split: str, starts: np.ndarray, length: int, first: int | None = None) -> np.ndarray:
        """The `length` tokens from each start, round the circle, out of the file: int64 (rows, length)."""
        tokens = self.tokens(split)[:first]
        return tokens[order.windows(len(tokens), starts, length)].astype(np.int64)

    def batch(self, split: str, step: int, *, seed: int, batch: int, context: int) -> np.ndarray:
        """The tokens of a training batch: int64 (batch, context + 1), a pure function of (seed, step)."""
        count = len(self.tokens(split))
        starts = order.window_starts(count, step, seed=seed, batch=batch, context=context)
        return self.rows(split, starts, context + 1)

    def device_tokens(
        self, split: str, device: str | torch.device, first: int | None = None
    ) -> torch.Tensor:
        """A split, or its first tokens, as one int32 tensor in a device's memory, without a copy here."""
        import torch

        tokens = self.tokens(split)[:first]
        whole = torch.empty(len(tokens), dtype=torch.int32, device=device)
        for at in range(0, len(tokens), BLOCK):
            part = torch.from_numpy(tokens[at : at + BLOCK].astype(np.int32))
            whole[at : at + BLOCK] = part.to(device)
        return whole

    def position_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        """How far each token of windows (..., length) is from its document's separator, or from the start
        of the window."""
        import torch

        places = torch.arange(tokens.shape[-1], device=tokens.device)
        return places - torch.where(tokens == self.separator, places, 0).cummax(-1).values

    def scored(self, targets: torch.Tensor) -> torch.Tensor | None:
        """Which targets count; None for all. A bos is not asked for: what follows a text is not its own."""
        return targets != self.separator if self.begins_with_bos else None


def same_data(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """What differs between the data of two manifests, in words; None if they are the same tokens."""
    try:
        for split in (*one["splits"], *other["splits"]):
            facts = [manifest["splits"][split] for manifest in (one, other)]
            if len({f["text_sha256"] if "text_sha256" in f else f["sha256"] for f in facts}) > 1:
                return f"the {split} text"
            if len({f.get("labels_sha256") for f in facts}) > 1:
                return f"the {split} labels"
        if one.get("tokenizer_sha256") != other.get("tokenizer_sha256"):
            return "the tokenizer"
        layouts = {m.get("layout", "text eos" if m.get("documents") else "text") for m in (one, other)}
    except (KeyError, TypeError, AttributeError):
        return "the record of the data (it is damaged)"
    return "what stands between documents" if len(layouts) > 1 else None
