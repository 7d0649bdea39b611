"""Texts from a language model: many at once, each as if it were alone.

Prompts of different lengths are padded on the left into one batch. Every text has a seed of its own, from
which all its random numbers come before anything is written, so the same prompt and seed give the same text
in any batch (up to the rounding of a kernel, which may differ with the size of the batch).

    token = the first one with  Σ_{v <= token} p(v) > u,      u uniform in [0, 1)

B texts in a batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

from langevin.errors import UsageError

Ended = Literal["end", "stop", "length"]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, and when a text ends."""

    tokens: int = 200
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise UsageError(f"tokens={self.tokens} must be 1 or more")
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"temperature={self.temperature} must be 0 or more")
        if self.top_k < 0:
            raise UsageError(f"top_k={self.top_k} must be 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p={self.top_p} must be above 0 and at most 1")
        if "" in self.stop:
            raise UsageError("an empty string stops nothing", "Give stop strings of a character or more.")


@dataclass(frozen=True)
class Request:
    prompt: str
    seed: int = 0


@dataclass(frozen=True)
class Text:
    """A prompt and what came after it; `ended` says whether by the end-of-text token, a stop string, or
    because it was long enough."""

    prompt: str
    seed: int
    text: str
    tokens: int
    ended: Ended


def generate(
    model: Any,
    tokenizer: Any,
    requests: list[Request],
    sampling: Sampling,
    *,
    batch: int = 16,
    streamer: BaseStreamer | None = None,
    finished: Callable[[int, Text], None] = lambda index, text: None,
    stepped: Callable[[range, int], None] = lambda texts, tokens: None,
) -> list[Text]:
    """One text for each request, in their order.

    finished(index, text) is called as soon as a text ends; stepped(indices, tokens) after every token of a
    batch. A streamer (transformers') shows the tokens of a single text as they come.
    """
    if batch < 1:
        raise UsageError(f"batch={batch} must be 1 or more")
    prompts = [_tokens(tokenizer, request.prompt) for request in requests]
    _refuse_too_long(model.config, max(map(len, prompts), default=0), sampling.tokens)
    texts: dict[int, Text] = {}

    def end(index: int, new_tokens: list[int], why: Ended) -> None:
        request, prompt = requests[index], prompts[index]
        text = tokenizer.decode(prompt + new_tokens, skip_special_tokens=True)
        if why == "stop":
            text = _up_to_stop(text, tokenizer.decode(prompt, skip_special_tokens=True), sampling.stop)
        texts[index] = Text(request.prompt, request.seed, text, len(new_tokens), why)
        finished(index, texts[index])

    for first in range(0, len(requests), batch):
        rows = range(first, min(first + batch, len(requests)))
        seeds = [requests[i].seed for i in rows]
        length = max(len(prompts[i]) for i in rows)
        ending = Ending(rows, length, _criteria(model, tokenizer, sampling), end, stepped)
        _write(model, tokenizer, [prompts[i] for i in rows], seeds, sampling, ending, streamer)
    return [texts[i] for i in range(len(requests))]


def _write(
    model: Any,
    tokenizer: Any,
    prompts: list[list[int]],
    seeds: list[int],
    sampling: Sampling,
    ending: Ending,
    streamer: BaseStreamer | None,
) -> None:
    """One batch, by transformers' own loop: greedy, among the one token that `Draw` leaves."""
    length = max(map(len, prompts))
    eos = _eos(model, tokenizer)
    pad = eos[0] if eos else 0
    ids = torch.tensor([[pad] * (length - len(p)) + p for p in prompts])
    real = torch.tensor([[0] * (length - len(p)) + [1] * len(p) for p in prompts])
    chosen = LogitsProcessorList()
    if sampling.temperature > 0:
        chosen.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            chosen.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            chosen.append(TopPLogitsWarper(sampling.top_p))
        chosen.append(Draw(seeds, length, sampling.tokens))
    out = model.generate(
        ids.to(model.device),
        attention_mask=real.to(model.device),
        max_new_tokens=sampling.tokens,
        do_sample=False,
        logits_processor=chosen,
        stopping_criteria=StoppingCriteriaList([ending]),
        streamer=streamer,
        eos_token_id=eos or None,
        pad_token_id=pad,
    )
    ending.close(out)


class Draw(LogitsProcessor):
    """Leaves one token possible in every row, drawn by the row's own random numbers."""

    def __init__(self, seeds: list[int], prompt_length: int, tokens: int) -> None:
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.u_BT = torch.stack([torch.rand(tokens, generator=g, dtype=torch.float64) for g in generators])
        self.prompt_length = prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.u_BT = self.u_BT.to(scores.device)
        u_B1 = self.u_BT[:, input_ids.shape[1] - self.prompt_length, None]
        below_BV = scores.softmax(-1, dtype=torch.float64).cumsum(-1)
        token_B1 = torch.searchsorted(below_BV, u_B1 * below_BV[:, -1:], right=True)
        return torch.full_like(scores, float("-inf")).scatter(1, token_B1, 0.0)


class Ending(StoppingCriteria):
    """Ends each row of a batch on its own, and tells of it at once."""

    def __init__(
        self,
        rows: range,
        prompt_length: int,
        criteria: dict[Ended, StoppingCriteria],
        end: Callable[[int, list[int], Ended], None],
        stepped: Callable[[range, int], None],
    ) -> None:
        """rows are the indices of the batch's texts, by which `end` knows them."""
        self.rows, self.prompt_length, self.criteria = rows, prompt_length, criteria
        self.end, self.stepped = end, stepped
        self.open = set(range(len(rows)))

    def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Tensor:
        over_B = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        for why, criterion in self.criteria.items():
            met_B = criterion(input_ids, scores)
            over_B |= met_B
            for row in self.open & set(met_B.nonzero()[:, 0].tolist()):
                self._end(row, input_ids, why)
        self.stepped(self.rows, input_ids.shape[1] - self.prompt_length)
        return over_B

    def close(self, ids_BL: Tensor) -> None:
        """End the rows that are still open."""
        for row in sorted(self.open):
            self._end(row, ids_BL, "length")

    def _end(self, row: int, ids_BL: Tensor, why: Ended) -> None:
        self.open.discard(row)
        self.end(self.rows[row], ids_BL[row, self.prompt_length :].tolist(), why)


def _criteria(model: Any, tokenizer: Any, sampling: Sampling) -> dict[Ended, StoppingCriteria]:
    criteria: dict[Ended, StoppingCriteria] = {}
    if eos := _eos(model, tokenizer):
        criteria["end"] = EosTokenCriteria(eos)
    if sampling.stop:
        criteria["stop"] = StopStringCriteria(tokenizer, list(sampling.stop))
    return criteria


def _eos(model: Any, tokenizer: Any) -> list[int]:
    eos = model.generation_config.eos_token_id
    eos = tokenizer.eos_token_id if eos is None else eos
    return [eos] if isinstance(eos, int) else list(eos or ())


def _tokens(tokenizer: Any, prompt: str) -> list[int]:
    """The prompt's tokens; nothing at all is what comes after the end of another text."""
    ids = list(tokenizer(prompt).input_ids) if prompt else []
    return ids or [tokenizer.eos_token_id]


def _refuse_too_long(config: Any, prompt: int, tokens: int) -> None:
    limit = getattr(config, "max_position_embeddings", None)
    if getattr(config, "positions", None) == "learned" and limit and prompt + tokens > limit:
        raise UsageError(
            f"a prompt of {prompt} tokens and {tokens} more do not fit {limit} positions",
            "Shorten the prompt or --tokens.",
        )


def _up_to_stop(text: str, prompt: str, stops: tuple[str, ...]) -> str:
    """The text up to and with the first stop string that ends after the prompt: tokens may overrun."""
    ends = []
    for stop in stops:
        at = text.find(stop, max(0, len(prompt) - len(stop) + 1))
        if at >= 0:
            ends.append(at + len(stop))
    return text[: min(ends)] if ends else text
