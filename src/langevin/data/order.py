"""The order in which a stream of tokens is trained on: pure functions, no state.

The N tokens of a split are a circle: the last is followed by the first. From a seeded start o,
block j covers the C targets o + jC ... o + jC + C-1 (mod N), and its window is one token longer at the
left. Blocks follow each other round the circle without end, so the N targets from eN to (e+1)N are epoch
e: each token exactly once, whether or not C divides N, and the cuts move by N mod C from one epoch to the
next. The blocks that lie inside an epoch come in an order permuted by (seed, epoch); the one across its
end comes last and belongs to both epochs. Batch b of step k is block slot k·batch + b: nothing is dropped,
repeated or padded, also where a batch crosses the end of an epoch.

Examples of their own, such as labelled texts, come once an epoch, in batches of about the same length.
Epoch e takes the slots eN to (e+1)N: the batches across its ends are filled at random, all others are cut
from its examples sorted by length, and come in an order permuted by (seed, epoch). Where all are of one
size, such as images, the order of an epoch is a permutation.
"""

from functools import lru_cache

import numpy as np

from langevin.errors import UsageError


def window_starts(tokens: int, step: int, *, seed: int, batch: int, context: int) -> np.ndarray:
    """Where the windows of a step start in the circle of tokens (int64, one a row of the batch)."""
    if not 1 <= context < tokens:
        raise UsageError(
            f"a context of {context} does not fit a split of {tokens:,} tokens",
            f"Use a context from 1 to {tokens - 1:,}, or more text.",
        )
    slots = np.arange(step * batch, (step + 1) * batch, dtype=np.int64)
    blocks = slots.copy()
    epochs = slots * context // tokens
    for epoch in np.unique(epochs):
        first = -(-int(epoch) * tokens // context)  # the blocks [first, last) lie inside the epoch
        last = (int(epoch) + 1) * tokens // context
        inside = (slots >= first) & (slots < last)
        if inside.any():
            blocks[inside] = first + permutation(last - first, seed, int(epoch))[slots[inside] - first]
    return (_start(seed, tokens) + blocks * context - 1) % tokens


def windows(tokens: int, starts: np.ndarray, length: int) -> np.ndarray:
    """The positions of each window's tokens, round the circle: (rows, length)."""
    return (starts[:, None] + np.arange(length)) % tokens


def epoch_of_examples(lengths: np.ndarray, epoch: int, *, seed: int, batch: int) -> np.ndarray:
    """The examples of an epoch in the order of its slots; few lengths are those batches are padded to."""
    count = len(lengths)
    shuffled = permutation(count, seed, epoch)
    before, behind = -epoch * count % batch, (epoch + 1) * count % batch
    if before + behind >= count:
        return shuffled
    across, inside = np.split(shuffled, [before + behind])
    alike = inside[np.argsort(lengths[inside], kind="stable")].reshape(-1, batch)
    alike = alike[permutation(len(alike), seed, epoch, 1)]
    return np.concatenate([across[:before], alike.ravel(), across[before:]])


def examples(count: int, step: int, *, seed: int, batch: int) -> np.ndarray:
    """The examples of a step where all are of one size: each once an epoch."""
    epochs, places = np.divmod(np.arange(step * batch, (step + 1) * batch), count)
    rows = [permutation(count, seed, int(epoch))[places[epochs == epoch]] for epoch in np.unique(epochs)]
    return np.concatenate(rows)


def uniforms(rows: int, columns: int, *seeds: int) -> np.ndarray:
    """Random numbers in [0, 1) with 24 bits: the same in every version of numpy."""
    words = np.random.PCG64(np.random.SeedSequence(seeds)).random_raw(rows * columns)
    return (words >> 40).astype(np.float32).reshape(rows, columns) / np.float32(1 << 24)


@lru_cache(maxsize=4)
def permutation(count: int, *seeds: int) -> np.ndarray:
    """A random permutation as the order of random words: the same in every version of numpy."""
    words = np.random.PCG64(np.random.SeedSequence(seeds)).random_raw(count)
    order = np.argsort(words, kind="stable")
    order.flags.writeable = False
    return order


@lru_cache(maxsize=64)
def _start(seed: int, tokens: int) -> int:
    return int(np.random.PCG64(np.random.SeedSequence((seed,))).random_raw()) % tokens
