"""Labelled texts as batches: rows of about the same length together, padded to one of a few lengths.

A row is what the tokenizer makes of a text, with the tokens that it puts around one, cut to the context.
"""

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from langevin.data import order
from langevin.data.corpus import Corpus
from langevin.data.reading import laid_out

LENGTHS = 6  # to which batches are padded; a GPU plans, compiles and records each of them once


@dataclass(frozen=True, eq=False)
class Labelled:
    """Examples that have classes, in a folder of the cache with a manifest."""

    folder: Path
    manifest: dict[str, Any]
    first: int | None = None  # so many training rows, of a seeded order

    @property
    def classes(self) -> list[str]:
        return list(self.manifest["facts"]["classes"])

    @lru_cache(maxsize=3)  # noqa: B019  (of the few sets of a process)
    def labels(self, split: str) -> np.ndarray:
        return np.fromfile(self.folder / f"{split}.labels", "<i4").astype(np.int64)

    @cached_property
    def train(self) -> np.ndarray:
        """The rows that are trained on."""
        count = len(self.labels("train"))
        return order.permutation(count, 0)[: self.first] if self.first else np.arange(count)

    @cached_property
    def weights(self) -> np.ndarray:
        """Of each class, such that all classes weigh the same in train and rows 1 on average."""
        counts = np.bincount(self.labels("train")[self.train], minlength=len(self.classes))
        return (len(self.train) / len(self.classes) / np.maximum(counts, 1)).astype(np.float32)

    def texts(self, split: str) -> list[str]:
        """The rows of valid or test as they stood, or the names of their files."""
        return list(json.loads((self.folder / f"{split}.json").read_text()))

    def tell(self) -> None:
        """What one should know of the data before believing its numbers."""
        facts = self.manifest["facts"]
        gone = [f"left out: {count:,} {what}" for what, count in facts["left out"].items()]
        for note in (*gone, *facts.get("notes", ())):
            warnings.warn(note, stacklevel=3)


@dataclass(frozen=True, eq=False, kw_only=True)
class LabelledTexts(Labelled):
    """A corpus whose documents have classes, cut to `context` tokens."""

    context: int

    def tell(self) -> None:
        super().tell()
        longer = int((self.spans("train")[1] > self.context - len(self.around[0] + self.around[1])).sum())
        if longer:
            warnings.warn(
                f"{longer:,} of {len(self.labels('train')):,} training rows are longer than the context of "
                f"{self.context} tokens: their ends are not read",
                stacklevel=3,
            )

    @cached_property
    def corpus(self) -> Corpus:
        return Corpus(self.folder, self.manifest)

    @property
    def vocab_size(self) -> int:
        return self.corpus.vocab_size

    @cached_property
    def tokenizer(self) -> Any:
        return reading(self.corpus.tokenizer, self.context)

    @cached_property
    def around(self) -> tuple[list[int], list[int]]:
        return around(self.tokenizer)

    def tokens(self, split: str) -> np.ndarray:
        """Of all rows, one after another."""
        return self.corpus.tokens(split)

    @lru_cache(maxsize=3)  # noqa: B019  (of the few sets of a process)
    def spans(self, split: str) -> tuple[np.ndarray, np.ndarray]:
        """Where the text of each row starts in the corpus, and its tokens."""
        starts, total = self.corpus.documents(split), len(self.corpus.tokens(split))
        lengths = np.diff(starts, append=total) - 1
        return starts + self.corpus.begins_with_bos, lengths

    @cached_property
    def lengths(self) -> np.ndarray:
        """To which batches are padded."""
        return few_lengths(self._read("train", self.train), LENGTHS, self.context)

    def _read(self, split: str, rows: np.ndarray) -> np.ndarray:
        """Tokens of each row as it is read."""
        return np.minimum(self.spans(split)[1][rows] + sum(map(len, self.around)), self.context)

    def padded(self, split: str, rows: np.ndarray) -> np.ndarray:
        """To which of the lengths each row is padded at least."""
        longest = self.lengths[-1]
        fits = self.lengths[np.searchsorted(self.lengths, np.minimum(self._read(split, rows), longest))]
        return np.where(self._read(split, rows) > longest, self.context, fits)

    @lru_cache(maxsize=2)  # noqa: B019
    def epoch(self, number: int, seed: int, batch: int) -> np.ndarray:
        lengths = self.padded("train", self.train)
        return self.train[order.epoch_of_examples(lengths, number, seed=seed, batch=batch)]

    def batch(self, step: int, *, seed: int, batch: int) -> dict[str, np.ndarray]:
        """A training batch, a pure function of (seed, step)."""
        slots, count = np.arange(step * batch, (step + 1) * batch), len(self.train)
        rows = [self.epoch(int(slot // count), seed, batch)[slot % count] for slot in slots]
        found = self.rows("train", np.array(rows))
        return {**found, "weights": self.weights[found["labels"]]}

    def widest(self, seed: int, batch: int) -> int:
        """A step of the first epoch whose batch is padded the most."""
        whole = self.epoch(0, seed, batch)[: len(self.train) // batch * batch].reshape(-1, batch)
        return int(self.padded("train", whole).max(-1).argmax()) if len(whole) else 0

    def rows(self, split: str, rows: np.ndarray) -> dict[str, np.ndarray]:
        starts, lengths = self.spans(split)
        tokens = self.corpus.tokens(split)
        texts = [tokens[starts[row] : starts[row] + min(lengths[row], self.context)] for row in rows]
        length = int(self.padded(split, rows).max())
        found = laid_out(texts, self.around, length, self.context, self.tokenizer.pad_token_id)
        return {**found, "labels": self.labels(split)[rows]}

    def in_batches(self, split: str, rows: np.ndarray, batch: int) -> Iterator[np.ndarray]:
        """Rows of about the same length together."""
        ordered = rows[np.argsort(self._read(split, rows), kind="stable")]
        yield from np.array_split(ordered, range(batch, len(rows), batch))


def few_lengths(sizes: np.ndarray, most: int, longest: int) -> np.ndarray:
    """So many lengths, multiples of 8 or the longest, that rows padded to the next of them have the fewest
    tokens: least(j) = min_i least(i) + e_j (n_j - n_i) over ends e, with n_j rows up to e_j."""
    ends = np.minimum(np.arange(8, int(sizes.max()) + 8, 8), longest)
    rows = np.searchsorted(np.sort(sizes), ends, side="right")
    more = np.where(np.tri(len(ends), k=-1, dtype=bool).T, ends * (rows - rows[:, None]), np.inf)
    least, before = ends * rows.astype(float), []
    for _ in range(most - 1):
        cost = least[:, None] + more
        before.append(np.where(cost.min(0) < least, cost.argmin(0), -1))
        least = np.minimum(least, cost.min(0))
    chosen = [len(ends) - 1]
    for back in reversed(before):
        if back[chosen[0]] >= 0:
            chosen.insert(0, int(back[chosen[0]]))
    return ends[chosen]


def reading(tokenizer: Any, context: int) -> Any:
    """A tokenizer that pads, and cuts to the context."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.model_max_length = context
    return tokenizer


def around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens that a tokenizer puts before and behind a text."""
    whole, bare = (tokenizer("a", add_special_tokens=added).input_ids for added in (True, False))
    before = next(i for i in range(len(whole) + 1) if whole[i : i + len(bare)] == bare)
    return whole[:before], whole[before + len(bare) :]
