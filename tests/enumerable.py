"""A source of short texts whose distribution is known, and the denoiser that is exact for it."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

V, L = 3, 4  # tokens and length: 81 texts


class ExactDenoiser:
    """p(x_i | what is visible), by summing over all texts; as LangevinForMaskedLM is called."""

    training = False
    device = torch.device("cpu")

    def __init__(self, p: Tensor) -> None:
        self.texts = torch.tensor(list(itertools.product(range(V), repeat=L)))
        self.p = p
        self.config = SimpleNamespace(vocab_size=V + 1, hidden_size=V, eos_token_id=None, positions="rope")
        self.calls = 0

    def __call__(self, input_ids: Tensor, masked: Tensor | None = None, **options: Any) -> Any:
        """Logits (B, L, V), with probabilities of 0 as -inf."""
        self.calls += 1
        z = input_ids if masked is None else torch.where(masked, V, input_ids)
        fits = ((z[:, None] == V) | (z[:, None] == self.texts)).all(-1)  # (B, texts)
        weight = fits * self.p
        onehot = torch.nn.functional.one_hot(self.texts, V).double()  # (texts, L, V)
        return SimpleNamespace(logits=torch.einsum("bt,tlv->blv", weight, onehot).log())

    def drawn(self, count: int) -> Tensor:
        chosen = torch.multinomial(self.p, count, True, generator=torch.Generator().manual_seed(5))
        return self.texts[chosen]

    def surprise(self, texts: Tensor) -> Tensor:
        """-ln p of each."""
        return -self.p[self.number(texts)].log()

    def number(self, texts: Tensor) -> Tensor:
        return (texts * V ** torch.arange(L - 1, -1, -1)).sum(-1)

    def distance(self, texts: Tensor) -> float:
        """The total variation of the truth from how often each text came."""
        seen = torch.bincount(self.number(texts), minlength=V**L) / len(texts)
        return float((seen - self.p).abs().sum() / 2)


class Tokens:
    """A cache that holds the tokens themselves, as transformers' static one holds keys and values."""

    def __init__(self, max_cache_len: int, **options: Any) -> None:
        self.length = torch.zeros((), dtype=torch.long)
        self.layers = [SimpleNamespace(cumulative_length=self.length)]
        self.ids = torch.empty(0)

    def after(self, new: Tensor) -> Tensor:
        """All tokens so far and the new ones, which are kept."""
        self.ids = torch.cat([self.ids[:, : int(self.length)], new], 1) if len(self.ids) else new
        self.length += new.shape[1]
        return self.ids


class BlockDenoiser(ExactDenoiser):
    """The same for a network of blocks: each query knows the tokens that it is shown, and no others."""

    def __call__(
        self,
        input_ids: Tensor,
        masked: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Tokens | None = None,
        **options: Any,
    ) -> Any:
        z = input_ids if masked is None else torch.where(masked, V, input_ids)
        queries = z.shape[1]
        if past_key_values is not None:
            z = past_key_values.after(z)
        keys = z.shape[1]
        place = torch.arange(keys) if position_ids is None else position_ids[0]
        sees = torch.ones(queries, keys) if attention_mask is None else attention_mask[0, 0]
        calls, found = self.calls + 1, []
        for query in range(queries):
            known = torch.full((len(z), L), V)
            for key in sees[query].nonzero().flatten():
                known[:, place[key]] = z[:, key]
            found.append(super().__call__(known).logits[:, place[keys - queries + query]])
        self.calls = calls
        return SimpleNamespace(logits=torch.stack(found, 1)[:, -options.get("logits_to_keep", 0) :])


def markov(kind: type[ExactDenoiser] = ExactDenoiser) -> Any:
    """Texts of a Markov chain in which neighbours tell much about each other."""
    step = torch.tensor([[0.8, 0.15, 0.05], [0.1, 0.1, 0.8], [0.3, 0.6, 0.1]], dtype=torch.float64)
    first = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    texts = torch.tensor(list(itertools.product(range(V), repeat=L)))
    p = first[texts[:, 0]]
    for i in range(1, L):
        p = p * step[texts[:, i - 1], texts[:, i]]
    return kind(p)


def entropy(p: Tensor) -> float:
    return float(-torch.special.xlogy(p, p).sum())
