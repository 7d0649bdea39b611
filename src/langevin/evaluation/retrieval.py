"""How often what was hidden is found: rows by length and depth, with exact counts and Wilson intervals.

Also needles in words, for any causal language model that has a tokenizer. An answer is right where each of
its tokens is the likeliest after those before it, so that greedy decoding would write it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from langevin.data.synthetic.needle import Draw
from langevin.errors import UsageError
from langevin.evaluation.likelihood import wilson
from langevin.evaluation.rows import Row

KEYS = (
    *("Anchor", "Basket", "Candle", "Dragon", "Engine", "Falcon", "Garden", "Hammer", "Island", "Jacket"),
    *("Kettle", "Ladder", "Mirror", "Needle", "Orange", "Pencil", "Quarry", "Ribbon", "Saddle", "Temple"),
    *("Umbrella", "Violin", "Window", "Yellow", "Zebra", "Bridge", "Castle", "Desert", "Forest", "Harbor"),
)
SAYS, ASKS = "\nThe secret number of {} is {}.\n", "\nThe secret number of {} is"


@torch.no_grad()
def likeliest(model: Any, tokens_BT: Tensor, scored_BT: Tensor, at_once: int, device: str) -> Tensor:
    """What the model thinks of every token but the first that is scored, in order."""
    found = []
    for tokens, scored in zip(tokens_BT.split(at_once), scored_BT.split(at_once), strict=True):
        from_place = int(scored.any(0).nonzero()[0])  # logits of what stands before are not needed
        kept = tokens.shape[1] - from_place
        logits = model(tokens[:, :-1].to(device), use_cache=False, logits_to_keep=kept).logits
        found.append(logits[:, -kept:].argmax(-1)[scored[:, from_place:].to(device)].cpu())
    return torch.cat(found)


Trial = Callable[[int, float], tuple[np.ndarray, np.ndarray | None, int]]
"""Of a length and a depth: which answers were right, which belong to another key where that is known, and
where the needle stood."""


def by_length_and_depth(
    trial: Trial, lengths: Sequence[int], depths: Sequence[float], at: int
) -> tuple[list[Row], list[float]]:
    """The whole grid, and right or wrong of every row at the length `at`. A cell is told three times: by
    its depth, by where the needle stands and by how far it is from the end, as the same position at
    another length tells dilution from position."""
    cells: list[Row] = []
    answers: dict[int, list[np.ndarray]] = {n: [] for n in lengths}
    others: dict[int, list[np.ndarray]] = {n: [] for n in lengths}
    for n in lengths:
        for depth in depths:
            right, other, position = trial(n, depth)
            found = wilson(int(right.sum()), len(right))
            for axis, place in (("depth", depth), ("position", position), ("distance", n - position)):
                cells.append(Row.of("accuracy", found, "exact", len(right), {"length": n, axis: place}))
            answers[n].append(right)
            others[n] += [] if other is None else [other]
    whole, by_length = [], []
    for name, by in (("accuracy", answers), ("answers_of_other_keys", others)):
        for n, parts in ((n, parts) for n, parts in by.items() if parts):
            pooled = np.concatenate(parts)
            found = wilson(int(pooled.sum()), len(pooled))
            by_length.append(Row.of(name, found, "exact", len(pooled), {"length": n}))
            whole += [Row.of(name, found, "exact", len(pooled))] if n == at else []
    return [*whole, *by_length, *cells], np.concatenate(answers[at]).astype(float).tolist()


def refuse_beyond_positions(model: Any, longest: int) -> int | None:
    """How many learned positions a model has, which must reach; None: it has none."""
    config = model.config
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    words = model.get_input_embeddings()
    tables = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding) and m is not words}
    if not tables & {limit, (limit or 0) + 2}:
        return None
    if limit is not None and longest > limit:
        raise UsageError(
            f"a length of {longest} is beyond the {limit} learned positions of the model",
            "Give shorter lengths.",
        )
    return limit


def refuse_unreadable(tokenizer: Any) -> None:
    """Raise where keys or numbers are lost in a tokenizer: to who reads one word for all of them every
    answer is right."""
    for word in (*KEYS, "1234567890"):
        try:
            ids = tokenizer(f" {word}", add_special_tokens=False).input_ids
        except Exception:  # tokenizers has no other for what it cannot read
            ids = []
        if word.lower() not in tokenizer.decode(ids).replace(" ", "").lower():
            raise UsageError(
                f"the tokenizer of the model does not know {word!r}, which needles in words need",
                "Try a model whose tokenizer reads any text.",
            )


class InWords:
    """Needles in a text, for a model that reads text: each key has a number of four digits, and the last
    sentence asks for that of the first key. None of these numbers stands in the text around."""

    def __init__(self, model: Any, tokenizer: Any, corpus: Any, needles: int, samples: int) -> None:
        refuse_unreadable(tokenizer)
        self.model, self.tokenizer, self.needles, self.samples = model, tokenizer, needles, samples
        if not 1 <= needles <= len(KEYS):
            raise UsageError(
                f"needles={needles} must be from 1 to {len(KEYS)}, the keys there are in words"
            )
        text = corpus.tokens("test")
        self.text = text[text != corpus.separator].astype(np.int64)
        begins = tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
        self.start = [tokenizer.bos_token_id] if begins else []

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def row(self, draw: Draw, length: int, depth: float) -> tuple[list[int], int, int]:
        """So many tokens with the answer, how many of them the answer has, and where its needle begins."""
        keys = [KEYS[i] for i in draw.distinct(len(KEYS), 1, self.needles)[0]]
        first = int(draw.below(len(self.text) - length, 1)[0])
        around = self.tokenizer.decode(self.text[first : first + length])
        numbers: list[str] = []
        while len(numbers) < self.needles:
            number = str(int(draw.below(9000, 1)[0]) + 1000)
            numbers += [] if number in around or number in numbers else [number]
        said = [self.ids(SAYS.format(*pair)) for pair in zip(keys, numbers, strict=True)]
        question, asked = self.ids(ASKS.format(keys[0])), self.ids(f"{ASKS.format(keys[0])} {numbers[0]}")
        same = next(
            (i for i, (a, b) in enumerate(zip(question, asked, strict=False)) if a != b), len(question)
        )
        room = length - len(self.start) - sum(map(len, said)) - len(asked)
        if room < 1:
            raise UsageError(
                f"a length of {length} has no room for {self.needles} needles and a question",
                "Use longer --lengths or fewer --needles.",
            )
        places = [math.floor(depth * room), *draw.below(room + 1, self.needles - 1)]
        hay, row = self.text[first : first + room], list(self.start)
        before = begins = 0
        for place, needle in sorted(zip(places, said, strict=True), key=lambda pair: int(pair[0])):
            row += hay[before:place].tolist()
            begins = len(row) if needle is said[0] else begins
            row, before = [*row, *needle], place
        return [*row, *hay[before:].tolist(), *asked], len(asked) - same, begins

    def trial(self, length: int, depth: float, at_once: int, device: str) -> tuple[np.ndarray, None, int]:
        """Which answers were right, and where their needles began, on average."""
        draw = Draw(length, round(1e6 * depth), self.needles)
        rows, sizes, begins = zip(
            *(self.row(draw, length, depth) for _ in range(self.samples)), strict=True
        )
        tokens, size = torch.tensor(rows), torch.tensor(sizes)
        scored = torch.arange(length) >= length - size[:, None]
        said = likeliest(self.model, tokens, scored, at_once, device)
        right = [
            bool((a == b).all())
            for a, b in zip(said.split(sizes), tokens[scored].split(sizes), strict=True)
        ]
        return np.array(right), None, round(sum(begins) / len(begins))
