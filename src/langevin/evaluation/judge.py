"""What another language model makes of texts: how likely they are to it, and how far two sets of them are
from each other.

A text is read as a row that begins with the judge's beginning-of-text token; that token and the end of a
text are not scored, and what does not fit the judge's context is left out.

N texts, D features, K clusters, V vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from langevin.data.tokenizers import encoder, load
from langevin.errors import Diverged, UsageError
from langevin.models.pretrained import located, pretrained
from langevin.runs.files import sha256
from langevin.runs.load import weight_files

Array = NDArray[np.float64]

LOGITS_AT_ONCE = {"cpu": 2**25, "cuda": 2**29}
VARIANCE = 0.9  # of the features, that clusters are told apart by
TEXTS_A_CLUSTER = 10
RESTARTS, ITERATIONS = 5, 100  # of k-means
SCALE, POINTS = 5.0, 25  # of the frontier: what divergences are multiplied with, and where it is taken


@dataclass(frozen=True, eq=False)
class Judged:
    """Of each text."""

    nll: Array  # the sum over its tokens, in nats
    tokens: Array  # how many
    features_ND: Tensor  # the mean of the last hidden states


@dataclass(frozen=True)
class Judge:
    """A causal language model of transformers: a folder, a run, or a name on the Hub."""

    name: str
    model: Any
    tokenizer: Any
    sha256: str | None  # of its weights, where they lie in a folder

    @staticmethod
    def read(name: str, device: str) -> Judge:
        where = located(name)
        model = pretrained(name, None).to(device).eval()
        weights = sha256(*weight_files(Path(where))) if os.path.isdir(where) else None
        return Judge(name, model, load(where), weights)

    def rows(self, texts: list[str]) -> list[list[int]]:
        """The tokens of each text, from its beginning-of-text token on; refused where the model has no such
        token, or fewer than its tokenizer."""
        start = self.tokenizer.bos_token_id
        start = self.tokenizer.eos_token_id if start is None else start
        if start is None:
            raise UsageError(f"{self.name} has no token that a text begins with", "Choose another judge.")
        longest = getattr(self.model.config, "max_position_embeddings", None)
        found = encoder(self.tokenizer)(texts, False) if texts else ()
        rows, size = [[start, *ids.tolist()][:longest] for ids, _ in found], self.model.config.vocab_size
        if any(max(row) >= size for row in rows):
            raise UsageError(
                f"{self.name} has a tokenizer with more tokens than the model's {size}",
                "Choose another judge.",
            )
        return rows

    @torch.no_grad()
    def judged(self, texts: list[str], told: Callable[[int], None] = lambda done: None) -> Judged:
        """In batches of similar length; told how many texts have been read."""
        rows, device, size = self.rows(texts), self.model.device, self.model.config.vocab_size
        nll, features = np.zeros(len(rows)), torch.zeros(len(rows), 0)
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
        while order:
            longest = len(rows[order[0]])
            count = max(1, LOGITS_AT_ONCE[device.type] // (longest * size))
            some, order = order[:count], order[count:]
            ids = torch.zeros(len(some), longest, dtype=torch.long)
            real = torch.zeros(len(some), longest, dtype=torch.bool)
            for at, i in enumerate(some):
                ids[at, : len(rows[i])] = torch.tensor(rows[i])
                real[at, : len(rows[i])] = True
            ids, real = ids.to(device), real.to(device)
            out = self.model(ids, output_hidden_states=True, use_cache=False)
            logits = out.logits[:, :-1].float()
            chosen = logits.gather(-1, ids[:, 1:, None])[..., 0]
            lost = torch.where(real[:, 1:], logits.logsumexp(-1) - chosen, 0.0).double().sum(-1)
            state = out.hidden_states[-1].double() * real[..., None]
            mean = (state.sum(1) / real.sum(1, keepdim=True)).cpu()
            features = features if features.numel() else mean.new_zeros(len(rows), mean.shape[1])
            nll[some], features[some] = lost.cpu().numpy(), mean
            told(len(rows) - len(order))
        if not np.isfinite(nll).all():
            raise Diverged(f"the judge {self.name} gives a text no finite likelihood", "Choose another.")
        return Judged(nll, np.array([len(row) - 1.0 for row in rows]), features)


def frontier_area(ours_ND: Tensor, real_ND: Tensor, seed: int = 0) -> float:
    """How much of each other two sets of texts cover, from 0 to 1 where both are one.

        P, Q    shares of either set in clusters of both together (k-means on unit features)
        R       = λ P + (1 - λ) Q
        curve   ( exp(-c KL(Q‖R)), exp(-c KL(P‖R)) ),  0 < λ < 1;   the area under it

    (MAUVE: Pillutla et al. 2021, arXiv 2102.01454, with mean states for features and half a count added to
    each cluster.)
    """
    both = torch.cat([ours_ND, real_ND])
    both = both / both.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    centred = both - both.mean(0)
    _, strength, directions = torch.linalg.svd(centred, full_matrices=False)
    share = strength.square().cumsum(0) / strength.square().sum().clamp_min(1e-300)
    kept = int((share < VARIANCE).sum()) + 1
    count = max(2, round(min(len(ours_ND), len(real_ND)) / TEXTS_A_CLUSTER))
    cluster = _clusters(centred @ directions[:kept].T, count, seed).numpy()
    sides = cluster[: len(ours_ND)], cluster[len(ours_ND) :]
    p, q = ((np.bincount(side, minlength=count) + 0.5) / (len(side) + count / 2) for side in sides)
    share_P = (np.arange(POINTS) + 1.0)[:, None] / (POINTS + 1)
    r = share_P * p + (1 - share_P) * q
    x, y = (np.exp(-SCALE * (one * np.log(one / r)).sum(-1)) for one in (q, p))
    x, y = np.r_[1, x, 0], np.r_[0, y, 1]
    return float(((x[:-1] - x[1:]) * (y[:-1] + y[1:])).sum() / 2)


def _clusters(x_ND: Tensor, count: int, seed: int) -> Tensor:
    """The cluster of each row: the best of several k-means, each from k-means++."""
    draw = torch.Generator().manual_seed(seed)
    best, least = torch.zeros(len(x_ND), dtype=torch.long), torch.inf
    for _ in range(RESTARTS):
        centres = x_ND[torch.randint(len(x_ND), (1,), generator=draw)]
        while len(centres) < count:
            far = torch.cdist(x_ND, centres).amin(1).square() + 1e-12
            centres = torch.cat([centres, x_ND[torch.multinomial(far, 1, generator=draw)]])
        cluster = torch.full((len(x_ND),), -1)
        for _ in range(ITERATIONS):
            distance, nearest = torch.cdist(x_ND, centres).min(1)
            if torch.equal(nearest, cluster):
                break
            cluster = nearest
            members = torch.nn.functional.one_hot(cluster, count).to(x_ND)
            sizes = members.sum(0)[:, None]
            centres = torch.where(sizes > 0, members.T @ x_ND / sizes.clamp_min(1), centres)
        if float(distance.square().sum()) < least:
            best, least = cluster, float(distance.square().sum())
    return best
