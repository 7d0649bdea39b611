"""Models whose predictions are known: oracles, and a bigram model with text of its own making."""

from __future__ import annotations

import torch
from torch import Tensor

VOCABULARY = 23
SURE = 200.0


def successor(tokens: Tensor) -> Tensor:
    """The token that follows, in the oracle's text."""
    return (5 * tokens + 3) % VOCABULARY


def oracle_text(length: int, start: int = 1) -> Tensor:
    text = [torch.tensor(start)]
    while len(text) < length:
        text.append(successor(text[-1]))
    return torch.stack(text)


def next_token_oracle(tokens: Tensor) -> Tensor:
    return SURE * torch.nn.functional.one_hot(successor(tokens), VOCABULARY).float()


def token_after_next_oracle(tokens: Tensor) -> Tensor:
    return SURE * torch.nn.functional.one_hot(successor(successor(tokens)), VOCABULARY).float()


def bigram_table(sharpness: float = 2.0, seed: int = 0, vocabulary: int = VOCABULARY) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return sharpness * torch.randn(vocabulary, vocabulary, generator=generator)


def bigram_text(table: Tensor, length: int, seed: int = 1) -> Tensor:
    """Text sampled from the bigram model itself, which therefore is calibrated on it."""
    generator = torch.Generator().manual_seed(seed)
    thresholds = table.double().softmax(-1).cumsum(-1)
    uniform = torch.rand(length, generator=generator, dtype=torch.float64)
    rows, draws, text = thresholds.tolist(), uniform.tolist(), [0]
    for u in draws[1:]:
        row = rows[text[-1]]
        text.append(next((c for c, level in enumerate(row) if u < level), len(row) - 1))
    return torch.tensor(text)
