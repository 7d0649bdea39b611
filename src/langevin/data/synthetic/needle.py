"""Values hidden under keys in a haystack, from a seeded generator.

    … k₁ v₁ … k₂ v₂ … … k₁   ->   v₁

A needle is a key with its value behind it. Words of the haystack, keys and values are three sets of tokens
in this order, and no two needles of a row share a key or a value: a value stands nowhere but behind its
own key. One key of a row is asked for last.
A layout says where the keys of a row stand, and which needle each belongs to; a value is an answer where
its needle came before.

B rows, L tokens that are read (one more is predicted), M needles, P places of keys.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from langevin.data.texts import SPLITS

Layout = tuple[np.ndarray, np.ndarray]  # places (B, P), the last being L - 1, and needles (B, P)


class Draw:
    """Uniform numbers that are a function of some whole ones, in every version of numpy."""

    def __init__(self, *numbers: int) -> None:
        self.random = np.random.PCG64(np.random.SeedSequence(numbers))

    def uniform(self, *shape: int) -> np.ndarray:
        words = self.random.random_raw(int(np.prod(shape))) >> np.uint64(11)
        return (words * 2.0**-53).reshape(shape)

    def below(self, count: Any, *shape: int) -> np.ndarray:
        return (self.uniform(*shape) * count).astype(np.int64)

    def distinct(self, count: int, *shape: int) -> np.ndarray:
        """Numbers below count of which none comes twice in a row."""
        return self.uniform(shape[0], count).argsort(1)[:, : shape[1]]


@dataclass(frozen=True, eq=False)
class Haystack:
    """The three sets of tokens, and rows made of them: of noise, or of a text."""

    words: int
    keys: int
    values: int
    corpus: Any = None
    tokenizer: None = None  # keys and values are no text

    @property
    def vocab_size(self) -> int:
        return self.words + self.keys + self.values

    @property
    def manifest(self) -> dict[str, Any]:
        if self.corpus is not None:
            return dict(self.corpus.manifest)
        few = min(4, self.keys, self.values)
        layout = recurring(Draw(0), 8, 64, few)
        some = self.rows(Draw(0), "train", layout, few)["tokens"].tobytes()
        facts = {"sha256": hashlib.sha256(some).hexdigest()}  # another one for another generator
        return {"name": "noise", "splits": dict.fromkeys(SPLITS, facts)}

    def rows(self, draw: Draw, split: str, layout: Layout, needles: int) -> dict[str, np.ndarray]:
        """Tokens (B, L + 1) and which of them are answers."""
        places, which = layout
        rows, length = len(places), int(places[0, -1]) + 2
        if self.corpus is None:
            tokens = draw.below(self.words, rows, length)
        else:
            tokens = self.corpus.rows(split, draw.below(len(self.corpus.tokens(split)), rows), length)
        at, scored = np.arange(rows)[:, None], np.zeros(tokens.shape, bool)
        keys = self.words + draw.distinct(self.keys, rows, needles)
        values = self.words + self.keys + draw.distinct(self.values, rows, needles)
        tokens[at, places] = keys[at, which]
        tokens[at, places + 1] = values[at, which]
        came_before = np.tril(which[:, :, None] == which[:, None, :], -1).any(-1)
        scored[at, places + 1] = came_before
        return {"tokens": tokens, "scored": scored}


def easy_and_hard(draw: Draw, rows: int, needles: int) -> np.ndarray:
    """To learn from: 1 to `needles` needles, a number that differs from row to row, uniform in its
    logarithm. Where all rows are hard, nothing is learned for long."""
    return np.exp(draw.uniform(rows, 1) * np.log(needles + 1)).astype(np.int64)


def recurring(draw: Draw, rows: int, length: int, needles: int) -> Layout:
    """To learn from: pairs fill half of a row, and each is any of its needles."""
    pairs = length // 4
    some = easy_and_hard(draw, rows, needles)
    cells = np.sort(draw.distinct((length - 2) // 2, rows, pairs - 1), 1)
    places = 2 * cells + draw.below(2, rows, 1)
    return _asked_last(places, length), draw.below(some, rows, pairs)


def hidden(draw: Draw, place_B: np.ndarray, length: int, needles: int) -> Layout:
    """To be tried on: the needle that is asked for stands at `place`, the others anywhere else."""
    rows, odd = len(place_B), place_B[:, None] % 2
    cells = draw.uniform(rows, (length - 1) // 2)
    cells[np.arange(cells.shape[1]) >= (length - 1 - odd) // 2] = 2
    cells[np.arange(rows), place_B // 2] = 2
    others = 2 * cells.argsort(1)[:, : needles - 1] + odd
    which = np.broadcast_to(np.append(np.arange(needles), 0), (rows, needles + 1))
    return _asked_last(np.concatenate([place_B[:, None], others], 1), length), which


def queried(draw: Draw, rows: int, length: int, needles: int) -> Layout:
    """Multi-query associative recall: all needles first, then each is asked for once, anywhere."""
    cells = draw.distinct((length - 2) // 2 - needles, rows, needles - 1)
    asked = 2 * (needles + np.sort(cells, 1)) + draw.below(2, rows, 1)
    first = np.broadcast_to(np.arange(needles), (rows, needles))
    places = np.concatenate([2 * first, asked], 1)
    which = np.concatenate([first, draw.distinct(needles, rows, needles)], 1)
    return _asked_last(places, length), which


def _asked_last(places: np.ndarray, length: int) -> np.ndarray:
    return np.concatenate([places, np.full((len(places), 1), length - 1)], 1)
