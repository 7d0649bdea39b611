"""Samplers that are made to cheat: each writes what some measure of texts likes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from langevin.data.synthetic.stories import stories

Trap = Callable[[NDArray[np.int64], float, int, int, np.random.Generator], list[list[int]]]
PHRASE = 8


def unigram(
    train: NDArray[np.int64], temperature: float, texts: int, tokens: int, draw: np.random.Generator
) -> list[list[int]]:
    """Tokens at random, as often as in training."""
    ids, counts = np.unique(train, return_counts=True)
    p = counts ** (1 / temperature)
    return draw.choice(ids, (texts, tokens), p=p / p.sum()).tolist()


def bigram(
    train: NDArray[np.int64], temperature: float, texts: int, tokens: int, draw: np.random.Generator
) -> list[list[int]]:
    """Each token by the one before it."""
    size = int(train.max()) + 1
    counts = np.zeros((size, size))
    np.add.at(counts, (train[:-1], train[1:]), 1)
    rows = []
    for _ in range(texts):
        row = [int(draw.choice(train))]
        while len(row) < tokens:
            p = counts[row[-1]] ** (1 / temperature)
            row.append(int(draw.choice(size, p=p / p.sum())) if p.sum() else int(draw.choice(train)))
        rows.append(row)
    return rows


def repeated(
    train: NDArray[np.int64], temperature: float, texts: int, tokens: int, draw: np.random.Generator
) -> list[list[int]]:
    """Real phrases over and over: the warmer, the more different ones."""
    rows = []
    for _ in range(texts):
        starts = draw.integers(0, len(train) - PHRASE, max(1, round(temperature * tokens / PHRASE)))
        phrases = [train[at : at + PHRASE].tolist() for at in starts]
        row = [t for i in range(tokens // PHRASE + 1) for t in phrases[i % len(phrases)]]
        rows.append(row[:tokens])
    return rows


TRAPS: dict[str, Trap] = {"unigram": unigram, "bigram": bigram, "repeated": repeated}


def story_file(count: int) -> str:
    return "<|endoftext|>".join(story.text for story in stories(count, 0, "train"))
