"""`listops`, `listops-lra`: nested operations on digits whose value is the class, from a seeded generator.

    [MAX 2 9 [MIN 4 7 ] 0 ]   ->   9

A node is an operation with probability 1/4, above the greatest depth never, and else a digit; MIN, MAX, MED
(the median, truncated) and SM (the sum modulo 10) take a uniform number of arguments. No tree comes twice.
(Nangia & Bowman 2018, arXiv 1804.06028; Tay et al. 2020, arXiv 2011.04006)

Many trees grow at a time, level by level: the children of a level's operations, one after another, are the
next level. From the leaves up follow sizes and values, from the roots down the place of every token.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

OPERATIONS = ("[MIN", "[MAX", "[MED", "[SM")
CLOSE = 10 + len(OPERATIONS)
TOKENS = (*(str(digit) for digit in range(10)), *OPERATIONS, "]")
AT_A_TIME = 20_000


class Level(NamedTuple):
    tree: np.ndarray  # of each node
    token: np.ndarray  # a digit, or 10 and more: an operation
    children: np.ndarray  # their number


@dataclass(frozen=True)
class ListOps:
    """The parameters of a published set: the most arguments, the greatest depth, lengths in tokens (an
    operation and its bracket are two), and how many examples."""

    arguments: int = 5
    depth: int = 20
    shortest: int = 1
    longest: int = 10**9
    train: int = 90_000
    valid: int = 0
    test: int = 10_000
    seed: int = 0

    def identity(self) -> dict[str, Any]:
        return {"settings": asdict(self), "generator": _fingerprint(self)}

    def read(self) -> dict[str, list[tuple[str, str]]]:
        """Texts with their value, of every split that has a number."""
        every = self.examples()
        sizes = {"train": self.train, "valid": self.valid, "test": self.test}
        return {split: list(islice(every, size)) for split, size in sizes.items() if size}

    def examples(self) -> Iterator[tuple[str, str]]:
        """Distinct trees without end, with their value."""
        words, seen, turn = np.array(TOKENS, dtype=object), set(), 0
        while True:
            tokens, ends, values = self._some(turn)
            turn += 1
            for start, end, value in zip([0, *ends[:-1]], ends, values, strict=True):
                tree = tokens[start:end]
                key = hashlib.blake2b(tree.tobytes(), digest_size=16).digest()
                if key not in seen:
                    seen.add(key)
                    yield " ".join(words[tree]), str(value)

    def _some(self, turn: int) -> tuple[np.ndarray, list[int], list[int]]:
        """The tokens of trees of the right length one after another, where each ends, and its value."""
        levels = self._grown(np.random.PCG64(np.random.SeedSequence((self.seed, turn))))
        length = np.zeros(AT_A_TIME, np.int64)
        for level in levels:
            length += np.bincount(level.tree, 1 + (level.token >= 10), AT_A_TIME).astype(np.int64)
        fits = (length >= self.shortest) & (length <= self.longest)
        levels = [Level(*(x[fits[level.tree]] for x in level)) for level in levels]
        sizes, values = _measured(levels)
        ends = np.cumsum(sizes[0])
        tokens, place = np.empty(ends[-1], np.uint8), ends - sizes[0]
        for depth, level in enumerate(levels):
            nested = level.token >= 10
            tokens[place] = level.token
            tokens[(place + sizes[depth] - 1)[nested]] = CLOSE
            if depth + 1 < len(levels):
                size, number = sizes[depth + 1], level.children[nested]
                before = np.cumsum(size) - size
                first = np.cumsum(number) - number
                place = np.repeat(place[nested] + 1 - before[first], number) + before
        return tokens, ends.tolist(), values.tolist()

    def _grown(self, random: np.random.PCG64) -> list[Level]:
        levels: list[Level] = []
        tree = np.arange(AT_A_TIME)
        while len(tree):
            draw = random.random_raw(2 * len(tree)).reshape(2, -1)
            nested = (draw[0] >> np.uint64(62) == 0) & (len(levels) + 1 < self.depth)
            choices = np.where(nested, len(OPERATIONS), 10)
            token = _below(draw[1] >> np.uint64(32), choices) + np.where(nested, 10, 0)
            number = 2 + _below(draw[1] & np.uint64(2**32 - 1), np.full(len(tree), self.arguments - 1))
            levels.append(Level(tree, token, np.where(nested, number, 0)))
            tree = np.repeat(tree, levels[-1].children)
        return levels


def _below(word: np.ndarray, choices: np.ndarray) -> np.ndarray:
    """Random words of 32 bits as whole numbers from 0 to below so many."""
    return (word.astype(np.int64) * choices) >> 32


def _measured(levels: list[Level]) -> tuple[list[np.ndarray], np.ndarray]:
    """The tokens of every node with all below it, level by level, and the values of the roots."""
    sizes: list[np.ndarray] = []
    below = np.zeros(0, np.int64)
    for level in reversed(levels):
        size, value = np.ones(len(level.token), np.int64), level.token.copy()
        nested = level.token >= 10
        if nested.any():
            number = level.children[nested]
            first = np.cumsum(number) - number
            size[nested] = 2 + np.add.reduceat(sizes[0], first)
            ranked = below[np.lexsort((below, np.repeat(np.arange(len(number)), number)))]
            least, most = ranked[first], ranked[first + number - 1]
            middle = (ranked[first + (number - 1) // 2] + ranked[first + number // 2]) // 2
            total = np.add.reduceat(below, first) % 10
            value[nested] = np.choose(level.token[nested] - 10, (least, most, middle, total))
        sizes.insert(0, size)
        below = value
    return sizes, below


@lru_cache(maxsize=4)
def _fingerprint(listops: ListOps) -> str:
    """sha256 of some trees: another one for another generator."""
    some = "\n".join(f"{value} {text}" for text, value in islice(listops.examples(), 20))
    return hashlib.sha256(some.encode()).hexdigest()[:16]


NYU = ListOps()
LRA = ListOps(arguments=10, depth=10, shortest=500, longest=2000, train=96_000, valid=2_000, test=2_000)
